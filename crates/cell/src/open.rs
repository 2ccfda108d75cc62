//! Opens all files of a VM, so that its shard needs to open nothing: spec in, launch spec and open files out.

mod egress;
mod files;
mod left;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use config::vm::{
    DiskDevice, DiskFormatSpec, DiskMode, NetKind, NetSpec, OnFullSpec, PagesSpec, SandboxSpec, ShareSpec,
    VmSpec,
};
use diskstore::disk::{Announcement, DiskRequest, Format, Mode, OpenDisk, allocate_whole};
use diskstore::group_copy::GroupCopy;
use diskstore::image::{Image, ImageStore};
use hostfiles::private;
use nix::unistd::{Whence, geteuid, lseek};
use shard_api::launch::*;
use subnet::Egress;
use subnet::helper::HelperProcess;
use subnet::passt::{Passt, PasstChild, PasstSpec};
use subnet::process::Count;

use self::egress::egress;
use self::files::{Files, GroupFiles, mappable, readable};
use crate::cmdline;
use crate::identity::{Given, IdOwner};
use crate::programs::BuildProgram;
use crate::shard_log::ShardLog;
use crate::share_group::{Apart, Claims, maps_pages};
use crate::socket::bind;

pub use self::files::scratch_directory;
pub(crate) use self::left::LeftOpened;

/// The file in the VM's directory that has the log of its home.
pub(crate) const HOME_LOG: &str = "shard.log";

/// The reason why a VM can't start: one line, with the cause and the help.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A disk.
    #[error(transparent)]
    Disk(#[from] diskstore::disk::DiskError),
    /// An image.
    #[error(transparent)]
    Image(#[from] diskstore::image::ImageError),
    /// A network card.
    #[error(transparent)]
    Net(#[from] subnet::SubnetError),
    /// A file.
    #[error("{what} {path}: {source}; {help}")]
    File {
        /// The file's use in the VM.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The remedy.
        help: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A file that is mapped as a whole, and that VMs of another share group map.
    #[error(
        "{what} {path}: VMs of another share group map it, and this VM can't run without; give them one \
         `share_group`, end them, or let all VMs share (`share_between` in the host's file)"
    )]
    KeptApart {
        /// The file's use in the VM.
        what: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// The spec has no kernel.
    #[error("no kernel to boot: name an image that has one, or a kernel file")]
    NoKernel,
    /// Another refusal of the host.
    #[error("preparing the VM failed: {0}; see whether the host is out of files or memory")]
    Host(#[from] io::Error),
}

/// An opened VM, with all that must live as long as the VM; the files are the shard's.
#[derive(Debug)]
pub struct Opened {
    /// The spec that it was opened from, without sharing for files that other groups map.
    pub spec: VmSpec,
    /// Its claims on the files whose pages it maps.
    pub claims: Claims,
    /// For the shard; each boot sets its `handover`, `log` and `users`, and its vsock's `ports`.
    pub launch: LaunchSpec,
    /// The files it refers to.
    pub files: Vec<OwnedFd>,
    /// The monitor's end of the console.
    pub console: UnixStream,
    /// The kernel's file, for messages.
    pub kernel: PathBuf,
    /// The directory of the host's sockets that the guest may connect to.
    pub ports: File,
    /// Maximum length of a file that the VM's disks write, bytes.
    pub disk_file_bytes: u64,
    /// Whether a file outlives the VM, which must then be ended with care.
    pub keeps_writes: bool,
    locks: Locks,
    passt: Vec<UserCard>,
    /// The log of the home, which has a line for each card that was cut off.
    pub(crate) log: Arc<ShardLog>,
}

/// Locks that keep files of the VM from others, until they are dropped. Disks are locked by their files, too.
#[derive(Debug)]
enum Locks {
    /// The locks that this process took.
    Taken {
        _disks: Vec<OpenDisk>,
        originals: Vec<GroupCopy>,
        /// Keeps the image in the store as long as the VM runs.
        image: Option<Box<Image>>,
    },
    /// The locks of a predecessor of this process.
    Left {
        files: Vec<OwnedFd>,
        _announcements: Vec<Announcement>,
    },
}

impl Locks {
    /// The open files that are locked, except those of the disks.
    fn files(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Self::Taken { originals, image, .. } => {
                let originals = originals.iter().map(GroupCopy::original);
                originals.chain(image.as_deref().map(Image::lock)).collect()
            }
            Self::Left { files, .. } => files.iter().map(AsFd::as_fd).collect(),
        }
    }
}

/// A card of user-mode networking: its passt, and how to start it again.
#[derive(Debug)]
struct UserCard {
    /// Its number among all cards of the VM.
    number: usize,
    spec: PasstSpec,
    /// Its socket among the files.
    file: Fd,
    /// Its process, which ends when this is dropped.
    child: Option<PasstChild>,
}

/// Opens all files. `folder` is the VM's in the runtime directory; `cid` its address on the socket device;
/// `claims` those of its share group; `program` that of its shards and of the filters of its cards.
pub fn open(
    spec: &VmSpec,
    name: &str,
    folder: &Path,
    cid: u32,
    mut claims: Claims,
    program: &BuildProgram,
) -> Result<Opened, OpenError> {
    let mut apart = Apart::default();
    let maps = |share: Share| share != Share::Never && maps_pages(spec);
    let mut files = Files(Vec::new());
    let kvm_path = Path::new("/dev/kvm");
    let kvm = OpenOptions::new()
        .read(true)
        .write(true)
        .open(kvm_path)
        .map_err(|source| OpenError::File {
            what: "KVM",
            path: kvm_path.to_owned(),
            help: "load the kvm module, join the group `kvm`, or use --lab=always",
            source,
        })?;
    let kvm = files.add(kvm);
    let image = match &spec.image {
        Some(image) => Some(ImageStore::open_default()?.get(image)?),
        None => None,
    };
    let (kernel_path, initrd_path) = match (spec.kernel_files(), &image) {
        (Some((kernel, initrd)), _) => (kernel.to_owned(), initrd.map(Path::to_owned)),
        (None, Some(image)) => (
            image.kernel.clone().ok_or(OpenError::NoKernel)?,
            image.initrd.clone(),
        ),
        (None, None) => return Err(OpenError::NoKernel),
    };
    let mut grouped = GroupFiles {
        group: spec.share_group.as_deref(),
        vm: name,
        copies: Vec::new(),
    };
    let kernel = files.add(readable("kernel", &grouped.own("kernel", &kernel_path)?)?);
    let initrd = match initrd_path {
        Some(path) => Some(files.add(readable("initrd", &grouped.own("initrd", &path)?)?)),
        None => None,
    };
    let mut share_boot = share(spec, None);
    let boot = [Some(kernel), initrd]
        .into_iter()
        .flatten()
        .map(|fd| &files.0[fd.0]);
    if maps(share_boot) && !claims.claim(boot, &kernel_path) {
        (apart.boot, share_boot) = (true, Share::Never);
    }
    let scratch = scratch_directory();
    let mut disks = Vec::new();
    let mut launches = Vec::new();
    let root = image
        .as_ref()
        .and_then(|image| image.disk.as_ref())
        .map(|(path, format)| DiskRequest {
            path: path.clone(),
            format: Some(*format),
            mode: Mode::Private,
            persistent: spec.root.persistent,
            read_only: false,
            overlay_path: None,
            scratch_dir: scratch.clone(),
            vm_name: name.to_owned(),
        });
    let roots = usize::from(root.is_some());
    let queues_default = u16::from(spec.cpus).min(4);
    let mut requests: Vec<(DiskRequest, u16, bool, Share, OnFull)> = root
        .into_iter()
        .map(|request| {
            let share = share(spec, spec.root.share);
            (request, queues_default, false, share, on_full(spec.root.on_full))
        })
        .collect();
    requests.extend(spec.disks.iter().map(|disk| {
        let request = DiskRequest {
            path: disk.path.clone(),
            format: disk.format.map(|format| match format {
                DiskFormatSpec::Raw => Format::Raw,
                DiskFormatSpec::Qcow2 => Format::Qcow2,
            }),
            mode: match disk.mode {
                DiskMode::Private => Mode::Private,
                DiskMode::Exclusive => Mode::Exclusive,
            },
            persistent: disk.persistent,
            read_only: disk.read_only,
            overlay_path: None,
            scratch_dir: scratch.clone(),
            vm_name: name.to_owned(),
        };
        (
            request,
            disk.queues.unwrap_or(queues_default),
            disk.device == DiskDevice::Pmem,
            share(spec, disk.share),
            on_full(disk.on_full),
        )
    }));
    let mut keeps_writes = false;
    let mut disk_file_bytes = 0;
    for (index, (mut request, queues, pmem, mut share, on_full)) in requests.into_iter().enumerate() {
        keeps_writes |= request.persistent;
        if request.mode == Mode::Private {
            request.path = grouped.own("disk", &request.path)?;
        }
        if request.persistent && request.mode == Mode::Private {
            let overlays = ImageStore::open_default()?.data().join("overlays").join(name);
            private::directories(&overlays)?;
            request.overlay_path = Some(overlays.join(format!("{index}.qcow2")));
        }
        let mut disk = diskstore::disk::open(&request)?;
        let mapped = mappable(&disk, pmem).iter().map(|layer| &layer.file);
        if (pmem || maps(share)) && !claims.claim(mapped, &request.path) {
            if pmem {
                return Err(OpenError::KeptApart {
                    what: "pmem disk",
                    path: request.path,
                });
            }
            share = Share::Never;
            match index.checked_sub(roots) {
                Some(number) => apart.disks.push(number),
                None => apart.root = true,
            }
        }
        if let (true, false, [own]) = (pmem && request.persistent, disk.read_only, &disk.layers[..]) {
            // A write to a mapping that finds no room is not an error to the guest, but the end of the VM.
            allocate_whole(&own.file).map_err(|source| OpenError::File {
                what: "persistent memory",
                path: request.path.clone(),
                help: "make room for all of the file, or use the disk with `as = \"block\"`",
                source,
            })?;
        }
        disk_file_bytes = disk_file_bytes.max(disk.file_bytes_max()?);
        let layers = std::mem::take(&mut disk.layers)
            .into_iter()
            .map(|layer| LayerLaunch {
                file: files.add(layer.file),
                format: match layer.format {
                    Format::Raw => DiskFormat::Raw,
                    Format::Qcow2 => DiskFormat::Qcow2,
                    Format::Scratch => DiskFormat::Scratch,
                },
            })
            .collect();
        launches.push(DiskLaunch {
            id: format!("disk{index}"),
            layers,
            read_only: disk.read_only,
            scratch_limit: spec.scratch_limit.map(|limit| limit.0),
            queues,
            pmem,
            share,
            on_full,
        });
        disks.push(disk);
    }
    let mut nets = Vec::new();
    let mut passt = Vec::new();
    let log = Arc::new(ShardLog::create(&folder.join(HOME_LOG))?);
    let addresses = hardware_addresses(spec, name)?;
    for (index, (net, mac)) in cards(spec).into_iter().zip(addresses).enumerate() {
        let id = format!("net{index}");
        let backend = match (&net.kind, &net.tap) {
            (NetKind::Tap, Some(tap)) => {
                let queues = subnet::tap::open(tap, net.queues.unwrap_or(1))?;
                NetBackendLaunch::Tap(queues.into_iter().map(|queue| files.add(queue)).collect())
            }
            _ => {
                let count = Count::new()?;
                let egress = (!net.host).then(|| egress(&id, program, spec.sandbox, log.clone(), count));
                let spec = passt_spec(&net, mac, egress.transpose()?, cid)?;
                let Passt { socket, child } = subnet::passt::start(&spec)?;
                let file = files.add(socket);
                passt.push(UserCard {
                    number: index,
                    spec,
                    file,
                    child: Some(child),
                });
                NetBackendLaunch::Stream(file)
            }
        };
        nets.push(NetLaunch { id, mac, backend });
    }
    let listener = bind(&folder.join("vsock.sock"))?;
    let ports = folder.join("ports");
    std::fs::DirBuilder::new().mode(0o700).create(&ports)?;
    let ports = File::open(ports)?;
    let vsock = Some(VsockLaunch {
        cid,
        listener: files.add(listener),
        ports: None,
    });
    let (console, theirs) = UnixStream::pair()?;
    let console_fd = files.add(theirs);
    let cmdline = cmdline::joined(spec, image.as_ref().map(|image| image.cmdline.as_str()));
    let nodes = spec
        .nodes
        .iter()
        .enumerate()
        .map(|(index, node)| NodeLaunch {
            vcpus: config::cpulist::parse(&node.cpus).unwrap_or_default(),
            memory_bytes: node.memory.0,
            distances: node.distances.clone().unwrap_or_else(|| {
                (0..spec.nodes.len())
                    .map(|to| if to == index { 10 } else { 20 })
                    .collect()
            }),
            latencies_ps: Vec::new(),
            bandwidths_mb_s: Vec::new(),
            host_node: node.host_node,
        })
        .collect();
    let launch = LaunchSpec {
        name: name.to_owned(),
        kvm,
        vcpus: spec.cpus,
        memory: MemoryLaunch {
            bytes: spec.memory.0,
            pages: match spec.pages {
                PagesSpec::Small => Pages::Small,
                PagesSpec::Transparent => Pages::Transparent,
                PagesSpec::Huge2M => Pages::Huge2M,
                PagesSpec::Huge1G => Pages::Huge1G,
            },
            prefault: spec.prefault,
            host_nodes: spec.memory_nodes.clone(),
        },
        nodes,
        kernel,
        initrd,
        cmdline,
        disks: launches,
        nets,
        vsock,
        balloon: spec.has_balloon(),
        share_boot,
        mapped: Vec::new(),
        span: None,
        resume: None,
        handover: console_fd,
        console: console_fd,
        log: console_fd,
        sandbox: SandboxLaunch {
            policy: match spec.sandbox {
                SandboxSpec::Auto => SandboxPolicy::Auto,
                SandboxSpec::Require => SandboxPolicy::Require,
                SandboxSpec::Off => SandboxPolicy::Off,
            },
            ..SandboxLaunch::default()
        },
    };
    Ok(Opened {
        spec: apart.spec(spec),
        claims,
        launch,
        files: files.0,
        console,
        kernel: kernel_path,
        ports,
        disk_file_bytes,
        keeps_writes,
        locks: Locks::Taken {
            _disks: disks,
            originals: grouped.copies,
            image: image.map(Box::new),
        },
        passt,
        log,
    })
}

/// The settings of a user-mode card's passt.
fn passt_spec(
    net: &NetSpec,
    mac: [u8; 6],
    egress: Option<Egress>,
    cid: u32,
) -> Result<PasstSpec, subnet::SubnetError> {
    let forward: Result<_, _> = net.forward.iter().map(|text| text.parse()).collect();
    Ok(PasstSpec {
        mac,
        forward: forward?,
        egress,
        user: passt_user(cid),
    })
}

/// The user and group of the VM's passt and filters: those of its shards outside. Only root can choose them.
fn passt_user(cid: u32) -> Option<(u32, u32)> {
    let identity = geteuid()
        .is_root()
        .then(|| Given::of(IdOwner::Vm(cid)).identity)
        .flatten();
    identity.map(|identity| (identity.uid, identity.gid))
}

/// The VM's network cards: one of user-mode networking if the spec has no list.
fn cards(spec: &VmSpec) -> Vec<NetSpec> {
    spec.nets.clone().unwrap_or_else(|| {
        vec![NetSpec {
            kind: NetKind::User,
            tap: None,
            forward: Vec::new(),
            mac: None,
            queues: None,
            host: false,
        }]
    })
}

/// The hardware address of each card of the VM called `name`: its own, or one made of the name.
pub fn hardware_addresses(spec: &VmSpec, name: &str) -> Result<Vec<[u8; 6]>, subnet::SubnetError> {
    let address = |(index, card): (usize, &NetSpec)| match &card.mac {
        Some(text) => subnet::parse_mac(text),
        None => Ok(subnet::mac_address(name, index)),
    };
    cards(spec).iter().enumerate().map(address).collect()
}

fn on_full(spec: OnFullSpec) -> OnFull {
    match spec {
        OnFullSpec::Error => OnFull::Error,
        OnFullSpec::Pause => OnFull::Pause,
    }
}

/// The sharing mode of a disk with the setting `own`.
fn share(spec: &VmSpec, own: Option<ShareSpec>) -> Share {
    match own.or(spec.share).unwrap_or_default() {
        ShareSpec::Adaptive => Share::Adaptive,
        ShareSpec::Deferred => Share::Deferred,
        ShareSpec::AtRead => Share::AtRead,
        ShareSpec::Never => Share::Never,
    }
}

impl Opened {
    /// The kernel's file.
    ///
    /// # Errors
    /// If there are no descriptors left.
    pub fn kernel_file(&self) -> io::Result<File> {
        Ok(self.files[self.launch.kernel.0].try_clone()?.into())
    }

    /// The files of the disks, with the disks' names.
    pub fn disk_files(&self) -> impl Iterator<Item = (&str, BorrowedFd<'_>)> {
        let layers = self.launch.disks.iter().flat_map(|disk| {
            let files = disk.layers.iter();
            files.map(|layer| (disk.id.as_str(), layer.file))
        });
        layers.map(|(disk, file)| (disk, self.files[file.0].as_fd()))
    }

    /// The processes that serve this VM beside the shard.
    pub fn helpers(&self) -> impl Iterator<Item = &HelperProcess> {
        let children = self.passt.iter().filter_map(|card| card.child.as_ref());
        children.flat_map(PasstChild::helpers)
    }

    /// Number of frames that the guest's cards were not allowed to send, for each card.
    pub(crate) fn filtered(&self) -> Vec<Arc<Count>> {
        let policies = self.passt.iter().filter_map(|card| card.spec.egress.as_ref());
        policies.map(|egress| egress.count.clone()).collect()
    }

    /// Claims the memory of the frozen VM from which this one resumes, and checks that this one may map the
    /// same files.
    ///
    /// # Errors
    /// If VMs of another share group map the memory, or an image that it stands for.
    pub fn claim_frozen(&mut self, memory: &[File]) -> Result<(), OpenError> {
        self.claims.claim(memory, Path::new("of the snapshot"));
        match self.claims.refused().first() {
            None => Ok(()),
            Some(path) => Err(OpenError::KeptApart {
                what: "memory or an image",
                path: path.clone(),
            }),
        }
    }

    /// Prepares everything for another boot of the same VM: disks keep their writes, networks start anew,
    /// since a frame may have been cut in two.
    pub fn renew(&mut self) -> Result<(), OpenError> {
        // A clone that reboots boots as any VM.
        self.launch.resume = None;
        for fd in [Some(self.launch.kernel), self.launch.initrd]
            .into_iter()
            .flatten()
        {
            lseek(&self.files[fd.0], 0, Whence::SeekSet).map_err(io::Error::from)?;
        }
        for card in &mut self.passt {
            // The old process holds the forwarded ports until it has ended.
            self.files[card.file.0] = File::open("/dev/null")?.into();
            card.child = None;
            let Passt { socket, child } = subnet::passt::start(&card.spec)?;
            self.files[card.file.0] = socket;
            card.child = Some(child);
        }
        Ok(())
    }
}
