//! The VM's devices on the PCI bus, one for each entry of the [`LaunchSpec`], in its order.
//!
//! [`DeviceFiles::take`] receives their files from the monitor's message before the sandbox closes. [`build`]
//! creates the devices, which start threads, afterwards.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use diskstore::disk::{self, BaseWatch, Format, Store};
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::interrupt::Interrupts;
use crate::kind::{PlainMemory, ServedKind, VmKind};
use crate::launch::{
    DiskFormat, DiskLaunch, FolderLaunch, LaunchSpec, NetBackendLaunch, OnFull, RegionLaunch, Share,
};
use crate::machine::Machine;
use crate::memory::GuestRam;
use crate::paging::{DiskImage, PageOrigins, PagingDiskIo};
use crate::pci::PciBus;
use crate::ports::Ports;
use crate::process::{Files, ReceiveError};
use crate::sandbox::Threads;
use crate::sharing::{DiskSharing, FolderSharing, Sharing};
use crate::virtio::VirtioDevice;
use crate::virtio::balloon::{Balloon, BalloonHandle, PlainRelease, Release};
use crate::virtio::block::{Block, DiskLimiters, FullDisks, ReadOrigins};
use crate::virtio::fs::Fs;
use crate::virtio::net::{self, Net};
use crate::virtio::pmem::{self, Pmem, Writes};
use crate::virtio::rng::Rng;
use crate::virtio::transport::{Log, VirtioPci};
use crate::virtio::vsock::Vsock;

/// Serial of the virtual paging disk.
const PAGING_DISK_ID: &str = "paging";

/// Error: a device could not be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot make the device {id}")]
pub struct DevicesError {
    id: String,
    #[source]
    source: io::Error,
}

/// The open files of the devices.
pub struct DeviceFiles {
    disks: Vec<Vec<(File, Format)>>,
    regions: Vec<File>,
    nets: Vec<net::Backend>,
    folders: Vec<OwnedFd>,
    vsock: Option<UnixListener>,
    ports: Option<Ports>,
}

/// Converts a disk format of the launch message into the disk store's.
fn format_of(format: DiskFormat) -> Format {
    match format {
        DiskFormat::Raw => Format::Raw,
        DiskFormat::Qcow2 => Format::Qcow2,
        DiskFormat::Scratch => Format::Scratch,
    }
}

impl DeviceFiles {
    /// Takes the devices' files from the monitor's message.
    pub fn take(spec: &LaunchSpec, files: &mut Files) -> Result<Self, ReceiveError> {
        let mut disks = Vec::with_capacity(spec.disks.len());
        for disk in &spec.disks {
            let layers: Result<_, ReceiveError> = disk
                .layers
                .iter()
                .map(|layer| Ok((files.take(layer.file)?, format_of(layer.format))))
                .collect();
            disks.push(layers?);
        }
        let regions = spec.regions.iter().map(|region| files.take(region.file));
        let regions = regions.collect::<Result<_, ReceiveError>>()?;
        let mut nets = Vec::with_capacity(spec.nets.len());
        for net in &spec.nets {
            nets.push(match &net.backend {
                NetBackendLaunch::Tap(queues) => {
                    let queues: Result<_, ReceiveError> = queues
                        .iter()
                        .map(|fd| Ok(OwnedFd::from(files.take(*fd)?)))
                        .collect();
                    net::Backend::Tap(queues?)
                }
                NetBackendLaunch::Stream(fd) => net::Backend::Stream(OwnedFd::from(files.take(*fd)?)),
                NetBackendLaunch::Packets(fd) => net::Backend::Packets(OwnedFd::from(files.take(*fd)?)),
                NetBackendLaunch::Offloads(fd) => net::Backend::Offloads(OwnedFd::from(files.take(*fd)?)),
            });
        }
        let folders = spec.folders.iter().map(|folder| files.take(folder.socket));
        let folders = folders.map(|socket| Ok(OwnedFd::from(socket?)));
        let folders = folders.collect::<Result<_, ReceiveError>>()?;
        let (mut vsock, mut ports) = (None, None);
        if let Some(launch) = &spec.vsock {
            vsock = Some(UnixListener::from(OwnedFd::from(files.take(launch.listener)?)));
            ports = launch
                .ports
                .map(|fd| files.take(fd))
                .transpose()?
                .map(|file| Ports::new(file.into()));
        }
        Ok(Self {
            disks,
            regions,
            nets,
            folders,
            vsock,
            ports,
        })
    }

    /// Returns the sizes of the regions of persistent memory: of disks in the order of the spec, then of
    /// shared regions.
    pub fn pmem_bytes(&self, spec: &LaunchSpec) -> io::Result<Vec<u64>> {
        let disks = spec
            .disks
            .iter()
            .zip(&self.disks)
            .filter(|(launch, _)| launch.pmem);
        let disks = disks.map(|(_, layers)| layers.last().map(|(file, _)| file));
        disks
            .chain(self.regions.iter().map(Some))
            .map(|file| {
                let file = file.ok_or(io::ErrorKind::InvalidInput)?;
                pmem::region_bytes(file.metadata()?.len()).ok_or(io::ErrorKind::FileTooLarge.into())
            })
            .collect()
    }

    /// Returns the files of disks that have no writer and whose pages may be shared, each with its disk's
    /// sharing mode.
    pub fn images(&self, spec: &LaunchSpec) -> io::Result<Vec<(DiskImage, Share)>> {
        let mut images = Vec::new();
        for (launch, layers) in spec.disks.iter().zip(&self.disks) {
            if launch.pmem || launch.share == Share::Never {
                continue;
            }
            // Only the top layer is written.
            for (file, _) in layers.iter().skip(usize::from(!launch.read_only)) {
                let (file, disk) = (file.try_clone()?, launch.id.clone());
                images.push((DiskImage { file, disk }, launch.share));
            }
        }
        Ok(images)
    }

    /// Returns the temporary overlay of each disk that has one.
    pub fn overlays(&self) -> io::Result<Vec<Option<File>>> {
        let overlay = |layers: &Vec<(File, Format)>| match layers.first() {
            Some((file, Format::Scratch)) => file.try_clone().map(Some),
            _ => Ok(None),
        };
        self.disks.iter().map(overlay).collect()
    }
}

fn failed(id: &str) -> impl Fn(io::Error) -> DevicesError {
    move |source| DevicesError {
        id: id.to_owned(),
        source,
    }
}

/// Context for the creation of devices.
pub struct DeviceContext<'a> {
    /// Machine of the devices.
    pub machine: &'a Machine,
    /// Kind of VM.
    pub kind: &'a ServedKind,
    /// Starts the devices' threads.
    pub threads: &'a Threads,
    /// Bus for the devices.
    pub bus: &'a PciBus,
    /// Interrupts of the devices.
    pub interrupts: &'a Arc<Interrupts>,
    /// Log of the devices' warnings.
    pub log: &'a Log,
}

impl DeviceContext<'_> {
    /// Puts a device on the bus that may access `memory`.
    fn add(
        &self,
        id: &str,
        memory: &GuestRam,
        device: io::Result<impl VirtioDevice + 'static>,
    ) -> Result<(), DevicesError> {
        let device = Box::new(device.map_err(failed(id))?);
        let (memory, log) = (memory.clone(), self.log.clone());
        self.bus
            .add(|bar| VirtioPci::new(device, id, memory, self.interrupts, log, bar))
            .map_err(failed(id))?;
        Ok(())
    }

    fn block(
        &self,
        launch: &DiskLaunch,
        layers: Vec<(File, Format)>,
        watch: &mut BaseWatch,
    ) -> io::Result<Block> {
        let store = disk::assemble_within(layers, launch.read_only, launch.scratch_limit)?;
        watch.watch(&launch.id, &*store)?;
        let origins = self.origins(launch, &*store);
        let block = Block::new(
            self.threads,
            &launch.id,
            store,
            launch.read_only,
            launch.queues,
            origins,
            launch.on_full,
        )?;
        if let Some(note) = block.note() {
            (self.log)(note);
        }
        Ok(block)
    }

    /// Returns the use of the origins of a disk's reads, if its files and the VM's memory allow one.
    fn origins(&self, launch: &DiskLaunch, store: &dyn Store) -> Option<ReadOrigins> {
        if launch.share == Share::Never {
            return None;
        }
        match self.kind.paging() {
            Some(paging) => PageOrigins::new(paging, store).map(ReadOrigins::Paged),
            None => self.sharing(launch, store).map(ReadOrigins::Shared),
        }
    }

    fn sharing(&self, launch: &DiskLaunch, store: &dyn Store) -> Option<DiskSharing> {
        let Sharing { mapper, pressure } = self.kind.sharing()?;
        let files = store.files();
        let bases = store.bases();
        let image = |index: usize| {
            let file = files.get(index).filter(|_| bases.contains(&index))?;
            mapper.image_of(file)
        };
        Some(DiskSharing {
            mapper: mapper.clone(),
            pressure: pressure.clone(),
            share: launch.share,
            images: (0..files.len()).map(image).collect(),
        })
    }

    /// Creates persistent memory of the disk's base. The mapping is shared if the disk may be written
    /// (exclusive and persistent), else private.
    fn pmem(
        &self,
        launch: &DiskLaunch,
        mut layers: Vec<(File, Format)>,
        guest: u64,
        watch: &mut BaseWatch,
    ) -> io::Result<Pmem> {
        let refused = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        let alone = layers.len() == 1;
        let Some((file, Format::Raw)) = layers.pop() else {
            return refused("persistent memory takes a raw file");
        };
        let flags = OFlag::from_bits_truncate(fcntl(&file, FcntlArg::F_GETFL)?);
        let writes = if launch.read_only {
            Writes::Refused
        } else if alone && flags.contains(OFlag::O_RDWR) {
            Writes::Kept
        } else {
            Writes::Private
        };
        if writes != Writes::Kept {
            watch.watch_file(&launch.id, file.as_fd())?;
        }
        let device = Pmem::new(self.threads, file, guest, writes)?;
        self.machine.map_pmem(device.region())?;
        Ok(device)
    }

    /// Creates the device of a shared folder.
    fn folder(&self, launch: &FolderLaunch, socket: OwnedFd) -> io::Result<Fs> {
        let sharing = self.kind.sharing().filter(|_| launch.share);
        let sharing = sharing.map(|sharing| FolderSharing::new(sharing.mapper.clone()));
        Fs::new(self.threads, &launch.tag, socket, sharing, self.log.clone())
    }

    /// Creates persistent memory of a shared region.
    fn region(&self, launch: &RegionLaunch, file: File, guest: u64) -> io::Result<Pmem> {
        let writes = match launch.read_only {
            true => Writes::ReadOnly,
            false => Writes::Kept,
        };
        let device = Pmem::new(self.threads, file, guest, writes)?;
        self.machine.map_pmem(device.region())?;
        Ok(device)
    }
}

/// State of the devices that the first thread uses.
pub struct BuiltDevices {
    /// The balloon, if the VM has one.
    pub balloon: Option<BalloonHandle>,
    /// Watch of the disks' bases.
    pub watch: BaseWatch,
    /// Disks whose writes wait for room on the host.
    pub full: FullDisks,
    /// Limits of the disks' requests.
    pub limiters: DiskLimiters,
}

/// Creates every device of `spec` and puts it on the bus.
pub fn build(
    spec: &LaunchSpec,
    files: DeviceFiles,
    context: &DeviceContext<'_>,
) -> Result<BuiltDevices, DevicesError> {
    let mut watch = BaseWatch::default();
    let mut full = FullDisks::default();
    let mut limiters = DiskLimiters::default();
    // Memory that devices may access: RAM and persistent memory, which is mapped before any device receives
    // its memory.
    let mut memory = context.machine.memory.clone();
    let mut regions = context.machine.layout.pmem.iter();
    let mut disks = Vec::with_capacity(spec.disks.len());
    for ((number, launch), layers) in (0..).zip(&spec.disks).zip(files.disks) {
        disks.push(match launch.pmem.then(|| regions.next()).flatten() {
            Some(region) => {
                let device = context
                    .pmem(launch, layers, region.start, &mut watch)
                    .map_err(failed(&launch.id))?;
                memory = device.region().join(&memory).map_err(failed(&launch.id))?;
                limiters.push(None);
                DiskDevice::Pmem(device)
            }
            None => {
                let block = context.block(launch, layers, &mut watch);
                let block = block.map_err(failed(&launch.id))?;
                if launch.on_full == OnFull::Pause {
                    full.watch(number, block.metrics());
                }
                limiters.push(block.limiter());
                DiskDevice::Block(block)
            }
        });
    }
    if let Err(why) = limiters.set(&spec.disk_limits) {
        // The monitor checks the limits; without them the guest's disks are right.
        (context.log)(&format!("its disks are not limited: {why}"));
    }
    let mut shared = Vec::with_capacity(spec.regions.len());
    for (launch, file) in spec.regions.iter().zip(files.regions) {
        let id = region_id(launch);
        let range = regions
            .next()
            .ok_or_else(|| failed(&id)(io::ErrorKind::InvalidInput.into()))?;
        let device = context.region(launch, file, range.start).map_err(failed(&id))?;
        // A write of a device to a read-only mapping would end this process. So devices have no such memory.
        if !launch.read_only {
            memory = device.region().join(&memory).map_err(failed(&id))?;
        }
        shared.push((id, device));
    }
    for (launch, disk) in spec.disks.iter().zip(disks) {
        match disk {
            DiskDevice::Pmem(pmem) => context.add(&launch.id, &memory, Ok(pmem))?,
            DiskDevice::Block(block) => context.add(&launch.id, &memory, Ok(block))?,
        }
    }
    if let Some(io) = context.kind.paging().and_then(PagingDiskIo::new) {
        let id = PAGING_DISK_ID;
        context.add(id, &memory, Block::paging(context.threads, id, io))?;
    }
    for (id, device) in shared {
        context.add(&id, &memory, Ok(device))?;
    }
    for (launch, backend) in spec.nets.iter().zip(files.nets) {
        let net = Net::new(context.threads, &launch.id, launch.mac, backend);
        context.add(&launch.id, &memory, net)?;
    }
    for (launch, socket) in spec.folders.iter().zip(files.folders) {
        let folder = context.folder(launch, socket);
        context.add(&folder_id(launch), &memory, folder)?;
    }
    if let (Some(launch), Some(listener)) = (&spec.vsock, files.vsock) {
        let vsock = Vsock::new(context.threads, launch.cid, listener, files.ports);
        context.add("vsock", &memory, vsock)?;
    }
    context.add("rng", &memory, Rng::new(context.threads))?;
    if !spec.balloon {
        return Ok(BuiltDevices {
            balloon: None,
            watch,
            full,
            limiters,
        });
    }
    let release = Release(match context.kind {
        VmKind::Plain(PlainMemory::Whole) => VmKind::Plain(PlainRelease::Whole),
        VmKind::Plain(PlainMemory::Shared(sharing)) => {
            VmKind::Plain(PlainRelease::Shared(sharing.mapper.clone()))
        }
        VmKind::Plain(PlainMemory::Paged(paging)) => VmKind::Plain(PlainRelease::Paged(paging.clone())),
        VmKind::SharedSpan(_) => VmKind::SharedSpan(()),
        VmKind::CoherentSpan(_, coherence) => VmKind::CoherentSpan((), *coherence),
    });
    let balloon = Balloon::new(context.threads, spec.memory.bytes, release);
    let handle = balloon.as_ref().ok().map(Balloon::handle);
    // RAM alone: the guest can't release pages of a file.
    context.add("balloon", &context.machine.memory, balloon)?;
    Ok(BuiltDevices {
        balloon: handle,
        watch,
        full,
        limiters,
    })
}

/// Name of a shared region's device for logs and metrics.
fn region_id(launch: &RegionLaunch) -> String {
    format!("shared-{}", launch.name)
}

/// Name of a shared folder's device for logs and metrics.
fn folder_id(launch: &FolderLaunch) -> String {
    format!("folder-{}", launch.tag)
}

enum DiskDevice {
    Pmem(Pmem),
    Block(Block),
}
