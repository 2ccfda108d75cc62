//! Opens all files of a VM, so that its shard needs to open nothing: spec in, launch spec and open files out.

mod boot;
mod cards;
mod disks;
mod egress;
mod files;
mod folders;
mod launch;
mod left;
mod names;
mod paging;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::folders::FolderProcess;
use child_process::ServiceProcess;
use config::VmSpec;
use config::cluster::RegionAccess;
use diskstore::disk::{Announcement, OpenDisk};
use diskstore::group_copy::GroupCopy;
use diskstore::image::Image;
use nix::unistd::{Whence, lseek};
use registry::cluster::interface::RegionGrant;
use registry::monitor::NameRules;
use shard_api::launch::{Fd, LaunchSpec, RegionLaunch, VsockLaunch};
use shard_api::saved::{self, SavedMachine};
use subnet::passt::{Passt, PasstChild};
use subnet::process::Count;

use self::cards::{OnSubnet, UserCard};
use self::files::{Files, GroupFiles};
use self::folders::Folder;
use self::names::Names;
use crate::cmdline;
use crate::frozen::FrozenVm;
use crate::opener::OpenerError;
use crate::programs::BuildProgram;
use crate::shard_log::ShardLog;
use crate::share_group::{Apart, Claims};
use crate::socket::bind;
use crate::subnet_card::{SubnetCardError, drain};

pub use self::cards::hardware_addresses;
pub use self::disks::disk_serial;
pub use self::files::scratch_directory;
pub(crate) use self::launch::disk_limits;
pub(crate) use self::left::LeftOpened;

/// The file in the VM's directory that has the log of its home.
pub(crate) const HOME_LOG: &str = "shard.log";

/// The reason why a VM can't start: one line, with the cause and the help.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A disk can't be opened or locked.
    #[error(transparent)]
    Disk(#[from] diskstore::disk::DiskError),
    /// The image can't be used.
    #[error(transparent)]
    Image(#[from] diskstore::image::ImageError),
    /// A network card.
    #[error(transparent)]
    Net(#[from] subnet::SubnetError),
    /// A card of a subnet.
    #[error(transparent)]
    Subnet(#[from] SubnetCardError),
    /// Another file of the VM can't be used.
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
    /// The spec limits a root disk that the image does not have.
    #[error("root: the image has no root disk whose requests could be limited; help: leave out [root]")]
    NoRootDisk,
    /// The spec has no kernel.
    #[error("no kernel to boot: name an image that has one, or a kernel file")]
    NoKernel,
    /// A file that another user's VM names.
    #[error(transparent)]
    Opener(#[from] OpenerError),
    /// Another refusal of the host.
    #[error("preparing the VM failed: {0}; see whether the host is out of files or memory")]
    Host(#[from] io::Error),
}

/// An opened VM, with all that must live as long as the VM; the files are the shard's.
#[derive(Debug)]
pub struct VmResources {
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
    /// Maximum length of a file that the VM's disks or its pager write, bytes.
    pub disk_file_bytes: u64,
    /// Whether a file outlives the VM, which must then be ended with care.
    pub keeps_writes: bool,
    locks: Locks,
    passt: Vec<UserCard>,
    folders: Vec<Folder>,
    subnet: Vec<OnSubnet>,
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

/// A VM whose files are to be opened.
#[derive(Clone, Copy, Debug)]
pub struct OfVm<'a> {
    /// Spec that names the files.
    pub spec: &'a VmSpec,
    /// Name of the VM, unique among its user's.
    pub name: &'a str,
    /// Its directory in the runtime directory.
    pub folder: &'a Path,
    /// Its address on the socket device.
    pub cid: u32,
    /// Rules for the files that the spec names.
    pub names: Option<&'a NameRules>,
}

/// A VM whose files are being opened.
struct Opening<'a> {
    spec: &'a VmSpec,
    name: &'a str,
    files: Files,
    /// Opens the files that the spec names.
    names: Names,
    /// Files of the VM's share group.
    grouped: GroupFiles<'a>,
    claims: Claims,
    /// Parts that share nothing, as other groups map their files.
    apart: Apart,
}

/// Opens all files of a VM; `claims` are those of its share group; `program` is that of its shards and of the
/// filters of its cards.
pub fn open(vm: OfVm<'_>, claims: Claims, program: &BuildProgram) -> Result<VmResources, OpenError> {
    let OfVm {
        spec,
        name,
        folder,
        cid,
        names,
    } = vm;
    let mut opening = Opening {
        spec,
        name,
        files: Files(Vec::new()),
        names: Names::of(names)?,
        grouped: GroupFiles {
            group: spec.share_group.as_deref(),
            vm: name,
            copies: Vec::new(),
        },
        claims,
        apart: Apart::default(),
    };
    let kvm = opening.kvm()?;
    let boot = opening.boot()?;
    let disks = opening.disks(boot.image.as_deref())?;
    let log = Arc::new(ShardLog::create(&folder.join(HOME_LOG))?);
    let cards = opening.cards(cid, program, &log)?;
    let folders = opening.folders(program, &log)?;
    let listener = bind(&folder.join("vsock.sock"))?;
    let ports = folder.join("ports");
    std::fs::DirBuilder::new().mode(0o700).create(&ports)?;
    let ports = File::open(ports)?;
    let vsock = Some(VsockLaunch {
        cid,
        listener: opening.files.add(listener),
        ports: None,
    });
    let (console, theirs) = UnixStream::pair()?;
    let console_fd = opening.files.add(theirs);
    let mut memory = launch::memory(spec);
    memory.paging = opening.paging()?;
    let paging_file_bytes = opening.paging_file_bytes();
    let launch = LaunchSpec {
        name: name.to_owned(),
        kvm,
        vcpus: spec.cpus,
        memory,
        nodes: launch::nodes(spec),
        kernel: boot.kernel,
        initrd: boot.initrd,
        cmdline: cmdline::joined(spec, boot.image.as_deref().map(|image| image.cmdline.as_str())),
        disks: disks.launches,
        disk_limits: disk_limits(spec),
        regions: Vec::new(),
        nets: cards.launches,
        folders: folders.launches,
        vsock,
        balloon: spec.has_balloon(),
        share_boot: boot.share,
        mapped: Vec::new(),
        span: None,
        resume: None,
        handover: console_fd,
        console: console_fd,
        log: console_fd,
        sandbox: launch::sandbox(spec.sandbox),
    };
    Ok(VmResources {
        spec: opening.apart.spec(spec),
        claims: opening.claims,
        launch,
        files: opening.files.0,
        console,
        kernel: boot.kernel_path,
        ports,
        disk_file_bytes: disks.file_bytes.max(paging_file_bytes),
        keeps_writes: disks.keeps_writes,
        locks: Locks::Taken {
            _disks: disks.opened,
            originals: opening.grouped.copies,
            image: boot.image,
        },
        passt: cards.user_mode,
        folders: folders.opened,
        subnet: cards.subnet,
        log,
    })
}

impl VmResources {
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

    /// Adds shared regions, whose files the VM's shard maps.
    pub fn add_regions(&mut self, regions: Vec<(RegionGrant, File)>) {
        for (grant, file) in regions {
            let launch = RegionLaunch {
                name: grant.name,
                file: Fd(self.files.len()),
                read_only: grant.access == RegionAccess::Read,
            };
            self.files.push(file.into());
            self.launch.regions.push(launch);
        }
    }

    /// The files of the shared regions, with the regions' names.
    ///
    /// # Errors
    /// If this process has no descriptors left.
    pub(crate) fn region_files(&self) -> io::Result<Vec<(String, Arc<OwnedFd>)>> {
        let files = self.launch.regions.iter().map(|region| {
            let file = self.files.get(region.file.0).ok_or(io::ErrorKind::InvalidData)?;
            Ok((region.name.clone(), Arc::new(file.try_clone()?)))
        });
        files.collect()
    }

    /// The processes that serve this VM beside the shard.
    pub fn card_processes(&self) -> impl Iterator<Item = &ServiceProcess> {
        let children = self.passt.iter().filter_map(|card| card.child.as_ref());
        let servers = self.folders.iter().filter_map(Folder::process);
        let cards = children.flat_map(PasstChild::processes);
        cards.chain(servers.map(FolderProcess::process))
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
    /// If VMs of another share group map the memory, or an image that it may stand for.
    pub fn claim_frozen(&mut self, frozen: &FrozenVm) -> Result<(), OpenError> {
        let has_memory = self.claims.claim(&frozen.memory, Path::new("of the snapshot"));
        let needed = match self.claims.refused().first() {
            // Only the disks' images are refused, and no page of the memory stands for one of an image.
            Some(_)
                if has_memory
                    && saved::read::<SavedMachine>(&frozen.state)?
                        .memory
                        .images
                        .is_empty() =>
            {
                None
            }
            refused => refused,
        };
        match needed {
            None => Ok(()),
            Some(path) => Err(OpenError::KeptApart {
                what: "memory or an image",
                path: path.clone(),
            }),
        }
    }

    /// Prepares everything for another boot of the same VM: disks keep their writes, networks and folders
    /// start anew, since a frame may have been cut in two.
    pub fn renew(&mut self) -> Result<(), OpenError> {
        // A clone that reboots boots as any VM.
        self.launch.resume = None;
        for fd in [Some(self.launch.kernel), self.launch.initrd]
            .into_iter()
            .flatten()
        {
            lseek(&self.files[fd.0], 0, Whence::SeekSet).map_err(io::Error::from)?;
        }
        for card in &self.subnet {
            drain(&self.files[card.file.0]);
        }
        for card in &mut self.passt {
            // The old process holds the forwarded ports until it has ended.
            self.files[card.file.0] = File::open("/dev/null")?.into();
            card.child = None;
            let Passt { socket, child } = subnet::passt::start(&card.spec)?;
            self.files[card.file.0] = socket;
            card.child = Some(child);
        }
        for folder in &mut self.folders {
            folder.renew(&mut self.files)?;
        }
        Ok(())
    }
}
