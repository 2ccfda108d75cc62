//! A VM that was frozen, as the monitors of its clones have it: its spec, and open files of its state, memory and disks.
//!
//! A running VM's monitor freezes it when asked over its control socket ([`Freezable`]), and sends the files along; from then
//! on neither needs the other.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use config::VmSpec;
use config::vm::{DiskMode, NetKind};
use diskstore::disk::nameless_file;
use serde::{Deserialize, Serialize};
use shard::launch::{
    DiskFormat, DiskLaunch, Fd, HandoverReply, HandoverRequest, LaunchSpec, LayerLaunch, ResumeLaunch,
};
use shard::process::{Files, receive, send};

use crate::control::Request;
use crate::open::scratch_directory;

/// How long freezing may take: standing still, and copying what the temporary overlays hold.
const FREEZE_LIMIT: Duration = Duration::from_secs(60);

/// The first line of the answer to [`Request::Freeze`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum FreezeAnswer {
    /// Frozen: the files come with this.
    Frozen(Box<FrozenFiles>),
    /// It can't be done.
    Refused {
        /// Why.
        why: String,
    },
}

/// Which file is which.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FrozenFiles {
    /// What the VM was started from.
    pub spec: VmSpec,
    /// State and memory.
    pub resume: ResumeLaunch,
    /// For each disk, its temporary overlays, the newest first.
    pub overlays: Vec<Vec<Fd>>,
    /// How long the VM stood still, microseconds.
    pub paused_us: u64,
}

/// A frozen VM.
#[derive(Debug)]
pub struct FrozenVm {
    /// What it was started from.
    pub spec: VmSpec,
    /// Its state.
    pub state: File,
    /// Its memory: its own file, then the layers.
    pub memory: Vec<File>,
    /// For each disk, its temporary overlays, the newest first.
    pub overlays: Vec<Vec<File>>,
    /// How long it stood still, microseconds.
    pub paused_us: u64,
}

impl FrozenVm {
    /// Freezes the running VM whose directory is `folder`.
    pub fn of(folder: &Path) -> io::Result<Self> {
        let mut socket = UnixStream::connect(folder.join("control.sock"))?;
        socket.set_read_timeout(Some(FREEZE_LIMIT))?;
        send(&mut socket, &Request::Freeze, &[]).map_err(io::Error::other)?;
        let (answer, mut files) = receive(&mut socket).map_err(io::Error::other)?;
        match answer {
            FreezeAnswer::Frozen(frozen) => Self::take(*frozen, &mut files),
            FreezeAnswer::Refused { why } => Err(io::Error::other(why)),
        }
    }

    fn take(frozen: FrozenFiles, files: &mut Files) -> io::Result<Self> {
        let mut take = |fd: Fd| files.take(fd).map_err(io::Error::other);
        Ok(Self {
            state: take(frozen.resume.state)?,
            memory: frozen
                .resume
                .memory
                .into_iter()
                .map(&mut take)
                .collect::<io::Result<_>>()?,
            overlays: frozen
                .overlays
                .into_iter()
                .map(|overlays| overlays.into_iter().map(&mut take).collect())
                .collect::<io::Result<_>>()?,
            spec: frozen.spec,
            paused_us: frozen.paused_us,
        })
    }

    /// Lets a VM that was opened from the same spec go on where this one stood: adds its files to `files` and names them in
    /// `launch`.
    pub fn resume(&self, launch: &mut LaunchSpec, files: &mut Vec<OwnedFd>) -> io::Result<()> {
        let mut add = |file: &File| -> io::Result<Fd> {
            files.push(file.try_clone()?.into());
            Ok(Fd(files.len() - 1))
        };
        if self.overlays.len() != launch.disks.len() {
            return Err(io::Error::other("the frozen VM had other disks than its spec"));
        }
        for (disk, overlays) in launch.disks.iter_mut().zip(&self.overlays) {
            let layers = overlays
                .iter()
                .map(|file| {
                    Ok(LayerLaunch {
                        file: add(file)?,
                        format: DiskFormat::Scratch,
                    })
                })
                .collect::<io::Result<Vec<_>>>()?;
            let below = usize::from(has_overlay(disk)).min(disk.layers.len());
            disk.layers.splice(below..below, layers);
        }
        launch.resume = Some(ResumeLaunch {
            state: add(&self.state)?,
            memory: self.memory.iter().map(&mut add).collect::<io::Result<_>>()?,
        });
        Ok(())
    }
}

fn has_overlay(disk: &DiskLaunch) -> bool {
    disk.layers
        .first()
        .is_some_and(|layer| layer.format == DiskFormat::Scratch)
}

/// What of a running VM others may not share, in one line with the mend; nothing when it can be cloned.
pub fn obstacle(spec: &VmSpec) -> Option<String> {
    if spec.root.persistent {
        return Some(
            "its root disk is persistent, and only it may write that; start it without `persistent`".into(),
        );
    }
    for disk in &spec.disks {
        let path = disk.path.display();
        if disk.persistent && !disk.read_only {
            return Some(format!(
                "its disk {path} is persistent, and only it may write that; give it the disk without `persistent`"
            ));
        }
        if disk.mode == DiskMode::Exclusive {
            return Some(format!(
                "its disk {path} is exclusive, for one VM at a time; give it the disk as `private`"
            ));
        }
    }
    let tap = spec.nets.iter().flatten().find(|net| net.kind == NetKind::Tap)?;
    Some(format!(
        "its network card is the TAP device {}, which only one VM can use; give it a card of the kind `user`, or none",
        tap.tap.as_deref().unwrap_or_default()
    ))
}

/// What a monitor needs to freeze its running VM.
#[derive(Debug)]
pub struct Freezable {
    socket: UnixStream,
    spec: VmSpec,
    /// For each disk, whether it has a temporary overlay, and the frozen ones under that.
    overlays: Vec<Option<Vec<OwnedFd>>>,
}

impl Freezable {
    /// For the VM of `spec`, which runs with `launch` and `files`; its shard listens at the other end of `socket`.
    pub fn new(spec: VmSpec, launch: &LaunchSpec, files: &[OwnedFd], socket: UnixStream) -> io::Result<Self> {
        socket.set_read_timeout(Some(FREEZE_LIMIT))?;
        let overlays = launch
            .disks
            .iter()
            .map(|disk| {
                let frozen = disk.layers.iter().skip(1);
                let frozen = frozen.filter(|layer| layer.format == DiskFormat::Scratch);
                let copy = |layer: &LayerLaunch| files[layer.file.0].try_clone();
                has_overlay(disk)
                    .then(|| frozen.map(copy).collect::<io::Result<_>>())
                    .transpose()
            })
            .collect::<io::Result<_>>()?;
        Ok(Self {
            socket,
            spec,
            overlays,
        })
    }

    /// Freezes the VM and sends everything to `client`.
    pub fn serve(&mut self, client: &mut UnixStream) -> io::Result<()> {
        let (answer, files) = match self.freeze() {
            Ok((frozen, files)) => (FreezeAnswer::Frozen(Box::new(frozen)), files),
            Err(error) => {
                let why = error.to_string();
                (FreezeAnswer::Refused { why }, Vec::new())
            }
        };
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send(client, &answer, &files).map_err(io::Error::other)
    }

    /// Runs of pages that the VM has touched so far, by their first and their number.
    pub fn touched(&mut self) -> io::Result<Vec<(u64, u64)>> {
        match self.ask(&HandoverRequest::Touched, &[])?.0 {
            HandoverReply::Touched { runs } => Ok(runs),
            _ => Err(io::Error::other("the shard answers something else")),
        }
    }

    fn ask(&mut self, request: &HandoverRequest, files: &[OwnedFd]) -> io::Result<(HandoverReply, Files)> {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send(&mut self.socket, request, &files).map_err(io::Error::other)?;
        match receive(&mut self.socket).map_err(io::Error::other)? {
            (HandoverReply::Refused { why }, _) => Err(io::Error::other(why)),
            answer => Ok(answer),
        }
    }

    fn freeze(&mut self) -> io::Result<(FrozenFiles, Vec<OwnedFd>)> {
        if let Some(why) = obstacle(&self.spec) {
            return Err(io::Error::other(why));
        }
        let directory = scratch_directory();
        let mut files: Vec<OwnedFd> = Vec::new();
        let mut copies = Vec::new();
        for overlay in &self.overlays {
            copies.push(match overlay {
                Some(_) => {
                    files.push(nameless_file(&directory)?.into());
                    Some(Fd(files.len() - 1))
                }
                None => None,
            });
        }
        let request = HandoverRequest::Freeze {
            overlays: copies.clone(),
        };
        let (reply, mut received) = self.ask(&request, &files)?;
        let HandoverReply::Frozen { resume, paused_us } = reply else {
            return Err(io::Error::other("the shard answers something else"));
        };
        let mut overlays = Vec::new();
        for (copy, frozen) in copies.into_iter().zip(&self.overlays) {
            let mut disk: Vec<Fd> = copy.into_iter().collect();
            for file in frozen.iter().flatten() {
                files.push(file.try_clone()?);
                disk.push(Fd(files.len() - 1));
            }
            overlays.push(disk);
        }
        let mut add = |fd: Fd| -> io::Result<Fd> {
            files.push(received.take(fd).map_err(io::Error::other)?.into());
            Ok(Fd(files.len() - 1))
        };
        let resume = ResumeLaunch {
            state: add(resume.state)?,
            memory: resume
                .memory
                .into_iter()
                .map(&mut add)
                .collect::<io::Result<_>>()?,
        };
        let frozen = FrozenFiles {
            spec: self.spec.clone(),
            resume,
            overlays,
            paused_us,
        };
        Ok((frozen, files))
    }
}
