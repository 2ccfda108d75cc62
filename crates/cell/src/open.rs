//! Opens everything a VM needs, so that its shard needs to open nothing: spec in, launch spec and open files out.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use config::vm::{DiskDevice, DiskFormatSpec, DiskMode, NetKind, NetSpec, PagesSpec, SandboxSpec, VmSpec};
use diskstore::disk::{DiskRequest, Format, Mode, OpenDisk};
use diskstore::image::ImageStore;
use shard::launch::*;

/// Why a VM can't start: one line, what and how to mend it.
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
    #[error("{what} {path}: {source}; {mend}")]
    File {
        /// What the file is to the VM.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// How to mend it.
        mend: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// Nothing to boot.
    #[error("no kernel to boot: name an image that has one, or a kernel file")]
    NoKernel,
    /// Something else of the host's.
    #[error("preparing the VM failed: {0}; see whether the host is out of files or memory")]
    Host(#[from] io::Error),
}

/// An opened VM. What must live as long as the VM is in here; the files are the shard's.
#[derive(Debug)]
pub struct Opened {
    /// For the shard.
    pub launch: LaunchSpec,
    /// The files it refers to.
    pub files: Vec<OwnedFd>,
    /// The monitor's end of the console.
    pub console: UnixStream,
    /// Something outlives the VM: it must be ended with care.
    pub keeps_writes: bool,
    disks: Vec<OpenDisk>,
    passt: Vec<subnet::passt::Passt>,
}

struct Files(Vec<OwnedFd>);

impl Files {
    fn add(&mut self, file: impl Into<OwnedFd>) -> Fd {
        self.0.push(file.into());
        Fd(self.0.len() - 1)
    }
}

fn readable(what: &'static str, path: &Path) -> Result<File, OpenError> {
    File::open(path).map_err(|source| OpenError::File {
        what,
        path: path.to_owned(),
        mend: "name a file that this user may read",
        source,
    })
}

/// Opens everything. `folder` is the VM's in the runtime directory; `cid` its address on the socket device.
pub fn open(spec: &VmSpec, name: &str, folder: &Path, cid: u32) -> Result<Opened, OpenError> {
    let mut files = Files(Vec::new());
    let kvm_path = Path::new("/dev/kvm");
    let kvm = OpenOptions::new()
        .read(true)
        .write(true)
        .open(kvm_path)
        .map_err(|source| OpenError::File {
            what: "KVM",
            path: kvm_path.to_owned(),
            mend: "load the kvm module, join the group `kvm`, or use --lab=always",
            source,
        })?;
    let kvm = files.add(kvm);
    let image = match &spec.image {
        Some(image) => Some(ImageStore::open_default()?.get(image)?),
        None => None,
    };
    let (kernel_path, initrd_path, own) = match (&spec.kernel, &image) {
        (Some(kernel), _) => (
            kernel.path.clone(),
            kernel.initrd.clone(),
            kernel.cmdline.as_str(),
        ),
        (None, Some(image)) => (
            image.kernel.clone().ok_or(OpenError::NoKernel)?,
            image.initrd.clone(),
            "",
        ),
        (None, None) => return Err(OpenError::NoKernel),
    };
    let kernel = files.add(readable("kernel", &kernel_path)?);
    let initrd = match initrd_path {
        Some(path) => Some(files.add(readable("initrd", &path)?)),
        None => None,
    };
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
            scratch_dir: std::env::temp_dir(),
            vm_name: name.to_owned(),
        });
    let queues_default = u16::from(spec.cpus).min(4);
    let mut requests: Vec<(DiskRequest, u16, bool)> = root
        .into_iter()
        .map(|request| (request, queues_default, false))
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
            scratch_dir: std::env::temp_dir(),
            vm_name: name.to_owned(),
        };
        (
            request,
            disk.queues.unwrap_or(queues_default),
            disk.device == DiskDevice::Pmem,
        )
    }));
    let mut keeps_writes = false;
    for (index, (mut request, queues, pmem)) in requests.into_iter().enumerate() {
        keeps_writes |= request.persistent;
        if request.persistent && request.mode == Mode::Private {
            let overlays = ImageStore::open_default()?.data().join("overlays").join(name);
            std::fs::create_dir_all(&overlays)?;
            request.overlay_path = Some(overlays.join(format!("{index}.qcow2")));
        }
        let mut disk = diskstore::disk::open(&request)?;
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
            queues,
            pmem,
        });
        disks.push(disk);
    }
    let one_user_card = [NetSpec {
        kind: NetKind::User,
        tap: None,
        forward: Vec::new(),
        mac: None,
        queues: None,
    }];
    let mut nets = Vec::new();
    let mut passt = Vec::new();
    for (index, net) in spec.nets.as_deref().unwrap_or(&one_user_card).iter().enumerate() {
        let mac = match &net.mac {
            Some(text) => subnet::parse_mac(text)?,
            None => subnet::mac_address(name, index),
        };
        let backend = match (&net.kind, &net.tap) {
            (NetKind::Tap, Some(tap)) => {
                let queues = subnet::tap::open(tap, net.queues.unwrap_or(1))?;
                NetBackendLaunch::Tap(queues.into_iter().map(|queue| files.add(queue)).collect())
            }
            _ => {
                let mut forward = Vec::new();
                for text in &net.forward {
                    forward.push(text.parse()?);
                }
                let started = subnet::passt::start(&subnet::passt::PasstSpec { mac, forward })?;
                let fd = files.add(started.socket.try_clone()?);
                passt.push(started);
                NetBackendLaunch::Stream(fd)
            }
        };
        nets.push(NetLaunch {
            id: format!("net{index}"),
            mac,
            backend,
        });
    }
    let listener = UnixListener::bind(folder.join("vsock.sock"))?;
    let vsock = Some(VsockLaunch {
        cid,
        listener: files.add(listener),
        ports: None,
    });
    let (console, theirs) = UnixStream::pair()?;
    let console_fd = files.add(theirs);
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join("shard.log"))?;
    let log = files.add(log);
    let mut cmdline = String::from("console=ttyS0 panic=-1 quiet");
    match &image {
        Some(image) if !image.cmdline.is_empty() => cmdline = format!("{cmdline} {}", image.cmdline),
        Some(_) => cmdline.push_str(" root=/dev/vda rw"),
        None => {}
    }
    if !own.is_empty() {
        cmdline = format!("{cmdline} {own}");
    }
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
        },
        nodes,
        kernel,
        initrd,
        cmdline,
        disks: launches,
        nets,
        vsock,
        balloon: spec.balloon,
        console: console_fd,
        log,
        sandbox: match spec.sandbox {
            SandboxSpec::Auto => SandboxPolicy::Auto,
            SandboxSpec::Require => SandboxPolicy::Require,
            SandboxSpec::Off => SandboxPolicy::Off,
        },
        sandbox_missing: Vec::new(),
    };
    Ok(Opened {
        launch,
        files: files.0,
        console,
        keeps_writes,
        disks,
        passt,
    })
}

impl Opened {
    /// How many disks and user-mode cards the monitor keeps alive for the VM.
    pub fn kept(&self) -> (usize, usize) {
        (self.disks.len(), self.passt.len())
    }
}
