//! Freezing a running VM: the monitor's side.

use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use config::VmSpec;
use diskstore::disk::nameless_file;
use registry::share_group::ShareGroup;
use shard_api::launch::{
    DiskFormat, DiskLaunch, Fd, HandoverReply, HandoverRequest, LaunchSpec, LayerLaunch, ResumeLaunch,
};
use shard_api::layout::Layout;
use shard_api::message::{Files, ReceiveError, receive_by, send};
use shard_api::saved::STATE_BYTES_MAX;

use super::handed::{check_sealed, for_reading};
use super::{FREEZE_LIMIT, FreezeAnswer, FrozenFiles, check_cloneable, has_overlay, not_frozen};
use crate::open::{VmResources, scratch_directory};
use crate::text::printable;

/// The files and the socket by which a monitor freezes its running VM.
#[derive(Debug)]
pub struct Freezable {
    pub(super) socket: UnixStream,
    /// Answers to a predecessor of this process may come first.
    pub(super) is_adopted: bool,
    pub(super) spec: VmSpec,
    pub(super) share_group: ShareGroup,
    /// Length of the memory's file, and of each layer.
    pub(super) memory_bytes: u64,
    /// The overlays of each disk that has any.
    pub(super) overlays: Vec<Option<Overlays>>,
    /// Files of the memory from which the VM was resumed. A snapshot's have no seals.
    pub(super) resumed: Vec<File>,
}

/// The temporary overlays of a disk.
#[derive(Debug)]
pub(super) struct Overlays {
    /// Length of the one that the VM writes, and so of each copy.
    pub(super) bytes: u64,
    /// The frozen ones below, for reading only, the newest first.
    pub(super) frozen: Vec<OwnedFd>,
}

impl Overlays {
    fn of(disk: &DiskLaunch, files: &[OwnedFd]) -> io::Result<Option<Self>> {
        let mut scratch = disk
            .layers
            .iter()
            .filter(|layer| layer.format == DiskFormat::Scratch);
        if !has_overlay(disk) {
            return Ok(None);
        }
        let Some(top) = scratch.next() else {
            return Ok(None);
        };
        let copy = |layer: &LayerLaunch| files[layer.file.0].try_clone();
        Ok(Some(Self {
            bytes: File::from(copy(top)?).metadata()?.len(),
            frozen: scratch.map(copy).collect::<io::Result<_>>()?,
        }))
    }
}

impl Freezable {
    /// The freezable VM of `opened`, whose shard listens at the other end of `socket`.
    pub fn new(opened: &VmResources, socket: UnixStream) -> io::Result<Self> {
        socket.set_write_timeout(Some(FREEZE_LIMIT))?;
        let launch = &opened.launch;
        let layout = Layout::new(launch.memory.bytes, &[]);
        let overlays = launch
            .disks
            .iter()
            .map(|disk| Overlays::of(disk, &opened.files))
            .collect::<io::Result<_>>()?;
        Ok(Self {
            socket,
            is_adopted: false,
            spec: opened.spec.clone(),
            share_group: opened.claims.group().clone(),
            memory_bytes: layout.map_or(0, |layout| layout.ram_end()),
            overlays,
            resumed: resumed(launch, &opened.files)?,
        })
    }

    /// As [`Self::new`], for a shard to which a predecessor of this process may have sent a request.
    pub fn adopt(opened: &VmResources, socket: UnixStream) -> io::Result<Self> {
        let own = Self::new(opened, socket)?;
        Ok(Self {
            is_adopted: true,
            ..own
        })
    }

    /// Sets the spec of VMs that are resumed from here.
    pub(crate) fn set_spec(&mut self, spec: VmSpec) {
        self.spec = spec;
    }

    /// The socket that a freeze waits for: shutting it down makes the freeze fail.
    pub fn socket(&self) -> io::Result<UnixStream> {
        self.socket.try_clone()
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
        let deadline = Instant::now() + FREEZE_LIMIT;
        if std::mem::take(&mut self.is_adopted) {
            self.skip_to_own(deadline)?;
        }
        let sent = send(&mut self.socket, request, &files);
        match sent.and_then(|()| receive_by(&mut self.socket, deadline)) {
            Ok((HandoverReply::Refused { why }, _)) => Err(io::Error::other(printable(&why))),
            Ok(answer) => Ok(answer),
            Err(error) => {
                // A late reply would be taken for that to the next request.
                let _ = self.socket.shutdown(Shutdown::Both);
                Err(not_frozen(error))
            }
        }
    }

    /// Discards replies to requests of a predecessor of this process: those before the reply to a request of
    /// this one.
    fn skip_to_own(&mut self, deadline: Instant) -> io::Result<()> {
        let asked = send(&mut self.socket, &HandoverRequest::Touched, &[]);
        let mut skip = || -> Result<(), ReceiveError> {
            loop {
                let (reply, _) = receive_by::<HandoverReply>(&mut self.socket, deadline)?;
                if matches!(reply, HandoverReply::Touched { .. }) {
                    return Ok(());
                }
            }
        };
        asked.and_then(|()| skip()).map_err(|error| {
            // A later reply would be taken for another request's.
            let _ = self.socket.shutdown(Shutdown::Both);
            io::Error::other(error)
        })
    }

    fn freeze(&mut self) -> io::Result<(FrozenFiles, Vec<OwnedFd>)> {
        if let Some(why) = check_cloneable(&self.spec) {
            return Err(io::Error::other(why));
        }
        let directory = scratch_directory();
        let mut copies: Vec<OwnedFd> = Vec::new();
        let mut places = Vec::new();
        for overlay in &self.overlays {
            places.push(match overlay {
                Some(_) => {
                    copies.push(nameless_file(&directory)?.into());
                    Some(Fd(copies.len() - 1))
                }
                None => None,
            });
        }
        let request = HandoverRequest::Freeze { overlays: places };
        let (reply, mut received) = self.ask(&request, &copies)?;
        let HandoverReply::Frozen { resume, paused_us } = reply else {
            return Err(io::Error::other("the shard answers something else"));
        };
        let mut files: Vec<OwnedFd> = Vec::new();
        let mut add = |file: OwnedFd| {
            files.push(file);
            Fd(files.len() - 1)
        };
        let mut copies = copies.into_iter();
        let mut overlays = Vec::new();
        for overlay in &self.overlays {
            let mut disk = Vec::new();
            if let (Some(Overlays { bytes, frozen }), Some(copy)) =
                (overlay, overlay.as_ref().and_then(|_| copies.next()))
            {
                let copy = for_reading(copy.into(), "a frozen disk", *bytes, &directory);
                disk.push(add(copy.map_err(io::Error::other)?.into()));
                for file in frozen {
                    disk.push(add(file.try_clone()?));
                }
            }
            overlays.push(disk);
        }
        let mut take = |fd: Fd, what, bytes| -> io::Result<Fd> {
            let file = received.take(fd).map_err(io::Error::other)?;
            // The shard may have changed what it has of a file that is known here.
            if let Some(own) = self.resumed.iter().find(|own| is_same(own, &file)) {
                return Ok(add(own.try_clone()?.into()));
            }
            check_sealed(&file, what, bytes).map_err(io::Error::other)?;
            Ok(add(file.into()))
        };
        let memory_bytes = self.memory_bytes..=self.memory_bytes;
        let resume = ResumeLaunch {
            state: take(resume.state, "a state", 1..=STATE_BYTES_MAX)?,
            memory: resume
                .memory
                .into_iter()
                .map(|fd| take(fd, "memory", memory_bytes.clone()))
                .collect::<io::Result<_>>()?,
        };
        if resume.memory.is_empty() {
            return Err(io::Error::other(
                "the shard hands out no memory; kill the VM and start it again",
            ));
        }
        let frozen = FrozenFiles {
            spec: self.spec.clone(),
            share_group: self.share_group.clone(),
            resume,
            overlays,
            paused_us,
        };
        Ok((frozen, files))
    }
}

/// The files of the memory from which a VM is resumed; none for one that boots.
fn resumed(launch: &LaunchSpec, files: &[OwnedFd]) -> io::Result<Vec<File>> {
    let memory = launch.resume.iter().flat_map(|resume| &resume.memory);
    memory.map(|fd| Ok(files[fd.0].try_clone()?.into())).collect()
}

/// Whether two descriptors are of one file.
fn is_same(one: &File, other: &File) -> bool {
    let identity = |file: &File| file.metadata().map(|about| (about.dev(), about.ino()));
    matches!((identity(one), identity(other)), (Ok(one), Ok(other)) if one == other)
}
