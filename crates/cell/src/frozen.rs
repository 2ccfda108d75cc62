//! A frozen VM, as the monitors of its clones have it: its spec, and open files of its state, memory and
//! disks.
//!
//! A running VM's monitor freezes it on a request over its control socket ([`Freezable`]), and sends the
//! files along; from then on neither needs the other.

mod freezable;
mod handed;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use config::VmSpec;
use config::vm::{DiskMode, NetKind};
use registry::control::{OF_CLIENT, Request};
use registry::share_group::ShareGroup;
use serde::{Deserialize, Serialize};
use shard_api::launch::{DiskFormat, DiskLaunch, Fd, LaunchSpec, LayerLaunch, ResumeLaunch};
use shard_api::message::{Files, ReceiveError, receive, send};

pub use self::freezable::Freezable;

/// Time limit for a freeze: the pause, and the copies of the temporary overlays.
const FREEZE_LIMIT: Duration = Duration::from_secs(60);

/// The first line of the answer to [`Request::Freeze`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum FreezeAnswer {
    /// The VM is frozen: the files come with this.
    Frozen(Box<FrozenFiles>),
    /// The VM can't be frozen.
    Refused {
        /// Reason in one line, for the client's user.
        why: String,
    },
}

/// The descriptors of a frozen VM's files.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FrozenFiles {
    /// The VM's spec.
    pub spec: VmSpec,
    /// Its share group, which its clones join.
    pub share_group: ShareGroup,
    /// State and memory.
    pub resume: ResumeLaunch,
    /// For each disk, its temporary overlays, the newest first.
    pub overlays: Vec<Vec<Fd>>,
    /// Time for which the VM was paused, microseconds.
    pub paused_us: u64,
}

/// A VM that stands still, and from whose files others resume.
#[derive(Debug)]
pub struct FrozenVm {
    /// The VM's spec.
    pub spec: VmSpec,
    /// The share group that it brings along.
    pub share_group: Option<ShareGroup>,
    /// State of the machine: vCPUs, interrupt controllers and devices.
    pub state: File,
    /// Its memory: its own file, then the layers.
    pub memory: Vec<File>,
    /// For each disk, its temporary overlays, the newest first.
    pub overlays: Vec<Vec<File>>,
    /// Time for which the VM was paused, microseconds.
    pub paused_us: u64,
}

impl FrozenVm {
    /// Freezes the running VM whose directory is `folder`.
    pub fn of(folder: &Path) -> io::Result<Self> {
        let mut socket = UnixStream::connect(folder.join("control.sock"))?;
        socket.set_read_timeout(Some(FREEZE_LIMIT))?;
        send(&mut socket, &OF_CLIENT.sent(&Request::Freeze), &[]).map_err(not_frozen)?;
        let (answer, mut files) = receive(&mut socket).map_err(not_frozen)?;
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
            share_group: Some(frozen.share_group),
            paused_us: frozen.paused_us,
        })
    }

    /// Forgets the writes to the spec's disks, for VMs that resume with disks of their own in their places.
    pub fn forget_disks(&mut self) {
        let first = self.overlays.len().saturating_sub(self.spec.disks.len());
        self.overlays.iter_mut().skip(first).for_each(Vec::clear);
    }

    /// Makes a VM that was opened from the same spec resume from this one's state: adds its files to `files`
    /// and names them in `launch`.
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

/// The reason why a VM was not frozen, by the error of the socket of a process that takes part in it.
fn not_frozen(error: ReceiveError) -> io::Error {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    let has_ended = match &error {
        ReceiveError::Incomplete => true,
        ReceiveError::Io(error) => matches!(error.kind(), BrokenPipe | ConnectionReset),
        _ => false,
    };
    match has_ended {
        true => io::Error::other(
            "the VM, or the process that serves it, ended before the VM was frozen; see `mirrorball ps`",
        ),
        false => io::Error::other(error),
    }
}

fn has_overlay(disk: &DiskLaunch) -> bool {
    disk.layers
        .first()
        .is_some_and(|layer| layer.format == DiskFormat::Scratch)
}

/// The resource of a running VM that prevents a clone, in one line with the help; none when it can be cloned.
pub fn check_cloneable(spec: &VmSpec) -> Option<String> {
    check_disks_cloneable(spec)
        .or_else(|| check_cards_cloneable(spec))
        .or_else(|| check_memory_cloneable(spec))
        .or_else(|| check_regions_cloneable(spec))
        .or_else(|| check_folders_cloneable(spec))
}

/// The same for its disks alone.
pub fn check_disks_cloneable(spec: &VmSpec) -> Option<String> {
    if spec.root.persistent {
        return Some(
            "its root disk is persistent, and only it may write that; start it without `persistent`".into(),
        );
    }
    for disk in &spec.disks {
        let path = disk.path.display();
        if disk.persistent && !disk.read_only {
            return Some(format!(
                "its disk {path} is persistent, and only it may write that; give it the disk without \
                 `persistent`"
            ));
        }
        if disk.mode == DiskMode::Exclusive {
            return Some(format!(
                "its disk {path} is exclusive, for one VM at a time; give it the disk as `private`"
            ));
        }
    }
    None
}

fn check_memory_cloneable(spec: &VmSpec) -> Option<String> {
    spec.resident.map(|_| {
        "its memory is paged, and pages in a paging file can't be cloned; start it without `resident`".into()
    })
}

fn check_regions_cloneable(spec: &VmSpec) -> Option<String> {
    let region = spec.shared.first()?;
    Some(format!(
        "it has the shared region {}, whose content is other VMs' too: a clone would find it changed since \
         the freeze; start it without `shared`",
        region.name
    ))
}

fn check_folders_cloneable(spec: &VmSpec) -> Option<String> {
    let folder = spec.folders.first()?;
    Some(format!(
        "it has the shared folder {}, whose open files a clone would not have; start it without `folders`",
        folder.tag
    ))
}

fn check_cards_cloneable(spec: &VmSpec) -> Option<String> {
    let mut cards = spec.nets.iter().flatten();
    let tap = cards.find(|net| net.kind == NetKind::Tap)?;
    Some(format!(
        "its network card is the TAP device {}, which only one VM can use; give it a card of the kind \
         `subnet` or `user`, or none",
        tap.tap.as_deref().unwrap_or_default()
    ))
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::fs::FileExt;
    use std::thread;
    use std::time::Instant;

    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    use shard::launch::{HandoverReply, HandoverRequest};
    use shard::sharing::{seal, sealable_file};
    use shard::snapshot::STATE_BYTES_MAX;

    use super::freezable::Overlays;
    use super::*;
    use crate::handle::VmHandle;

    const OVERLAY_BYTES: u64 = 2 << 16;
    const MEMORY_BYTES: u64 = 64 << 20;

    /// The files that a shard sends.
    struct Handed {
        state: File,
        memory: File,
        overlay_bytes: u64,
    }

    fn memory_file(name: &CStr, bytes: u64, is_sealed: bool) -> File {
        let file = sealable_file(name).unwrap();
        file.set_len(bytes).unwrap();
        if is_sealed {
            seal(&file).unwrap();
        }
        file
    }

    impl Handed {
        fn good() -> Self {
            Self {
                state: memory_file(c"state", 100, true),
                memory: memory_file(c"memory", MEMORY_BYTES, true),
                overlay_bytes: OVERLAY_BYTES,
            }
        }
    }

    /// A VM with one disk, whose shard is at the other end of `socket`.
    fn freezable(socket: UnixStream) -> Freezable {
        Freezable {
            socket,
            is_adopted: false,
            spec: serde_json::from_str(r#"{"image": "tiny"}"#).unwrap(),
            share_group: ShareGroup::of_run().unwrap(),
            memory_bytes: MEMORY_BYTES,
            overlays: vec![Some(Overlays {
                bytes: OVERLAY_BYTES,
                frozen: Vec::new(),
            })],
            resumed: Vec::new(),
        }
    }

    /// A monitor's answer to a client when its shard sends these files. The shard keeps its file of the disk,
    /// and changes it when the client has its own.
    fn handed_on(handed: Handed) -> (FreezeAnswer, Files) {
        handed_on_by_resumed(handed, Vec::new())
    }

    /// The same for a VM that was resumed from files of memory.
    fn handed_on_by_resumed(handed: Handed, resumed: Vec<File>) -> (FreezeAnswer, Files) {
        let (socket, mut shard) = UnixStream::pair().unwrap();
        let shard = thread::spawn(move || {
            let (request, mut files) = receive::<HandoverRequest>(&mut shard).unwrap();
            let HandoverRequest::Freeze { overlays } = request else {
                panic!("{request:?}");
            };
            let overlay = files.take(overlays[0].unwrap()).unwrap();
            overlay.set_len(handed.overlay_bytes).unwrap();
            overlay.write_all_at(b"frozen", 0).unwrap();
            let reply = HandoverReply::Frozen {
                resume: ResumeLaunch {
                    state: Fd(0),
                    memory: vec![Fd(1)],
                },
                paused_us: 1,
            };
            let files = [handed.state.as_fd(), handed.memory.as_fd()];
            send(&mut shard, &reply, &files).unwrap();
            overlay
        });
        let mut freezable = freezable(socket);
        freezable.resumed = resumed;
        let (mut client, mut monitor) = UnixStream::pair().unwrap();
        freezable.serve(&mut monitor).unwrap();
        let answer = receive(&mut client).unwrap();
        shard.join().unwrap().write_all_at(b"forged", 0).unwrap();
        answer
    }

    fn refusal(handed: Handed) -> String {
        match handed_on(handed).0 {
            FreezeAnswer::Refused { why } => why,
            answer => panic!("{answer:?}"),
        }
    }

    #[test]
    fn a_clone_gets_frozen_disks_that_neither_it_nor_its_parent_can_write() {
        let (answer, mut files) = handed_on(Handed::good());
        let FreezeAnswer::Frozen(frozen) = answer else {
            panic!("{answer:?}");
        };
        let overlay = files.take(frozen.overlays[0][0]).unwrap();
        let flags = OFlag::from_bits_retain(fcntl(&overlay, FcntlArg::F_GETFL).unwrap());
        assert_eq!(flags & OFlag::O_ACCMODE, OFlag::O_RDONLY);
        let refused = overlay.write_at(b"x", 0).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBADF));
        let mut content = [0; 6];
        overlay.read_exact_at(&mut content, 0).unwrap();
        assert_eq!(content, *b"frozen");
        assert_eq!(overlay.metadata().unwrap().len(), OVERLAY_BYTES);
    }

    #[test]
    fn memory_and_state_that_a_shard_can_still_change_are_refused() {
        let memory = memory_file(c"memory", MEMORY_BYTES, false);
        let why = refusal(Handed {
            memory,
            ..Handed::good()
        });
        assert!(why.contains("memory that it can still change"), "{why}");
        let state = memory_file(c"state", 100, false);
        let why = refusal(Handed {
            state,
            ..Handed::good()
        });
        assert!(why.contains("a state that it can still change"), "{why}");
        // One of the seals is not enough.
        let memory = memory_file(c"memory", MEMORY_BYTES, false);
        // SAFETY: takes no pointers.
        let sealed = unsafe { libc::fcntl(memory.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE) };
        assert_eq!(sealed, 0);
        let why = refusal(Handed {
            memory,
            ..Handed::good()
        });
        assert!(why.contains("memory that it can still change"), "{why}");
        let plain = tempfile::tempfile().unwrap();
        plain.set_len(100).unwrap();
        let why = refusal(Handed {
            state: plain,
            ..Handed::good()
        });
        assert!(why.contains("a state that it can still change"), "{why}");
    }

    #[test]
    fn a_pipe_in_the_place_of_a_state_is_refused() {
        let (pipe, _writer) = std::io::pipe().unwrap();
        let state = File::from(OwnedFd::from(pipe));
        let why = refusal(Handed {
            state,
            ..Handed::good()
        });
        assert!(why.contains("no regular file"), "{why}");
        assert!(!why.contains('\n'), "{why}");
    }

    #[test]
    fn files_of_a_shard_that_are_cut_off_or_too_long_are_refused() {
        let memory = memory_file(c"memory", MEMORY_BYTES - 4096, true);
        let why = refusal(Handed {
            memory,
            ..Handed::good()
        });
        assert!(why.contains("memory of 67104768 bytes"), "{why}");
        let state = memory_file(c"state", STATE_BYTES_MAX + 1, true);
        let why = refusal(Handed {
            state,
            ..Handed::good()
        });
        assert!(why.contains("a state of 33554433 bytes"), "{why}");
        let overlay_bytes = OVERLAY_BYTES - 1;
        let why = refusal(Handed {
            overlay_bytes,
            ..Handed::good()
        });
        assert!(why.contains("a frozen disk of 131071 bytes"), "{why}");
    }

    #[test]
    fn answer_to_a_predecessor_is_not_taken_for_that_to_a_successor() {
        let (socket, mut shard) = UnixStream::pair().unwrap();
        // The predecessor was killed before it could read this.
        let late = HandoverReply::Frozen {
            resume: ResumeLaunch {
                state: Fd(0),
                memory: Vec::new(),
            },
            paused_us: 1,
        };
        let handed = Handed::good();
        send(&mut shard, &late, &[handed.state.as_fd()]).unwrap();
        let shard = thread::spawn(move || {
            for first in [7, 8] {
                let (request, _) = receive::<HandoverRequest>(&mut shard).unwrap();
                assert!(matches!(request, HandoverRequest::Touched), "{request:?}");
                let runs = vec![(first, 1)];
                send(&mut shard, &HandoverReply::Touched { runs }, &[]).unwrap();
            }
        });
        let mut freezable = Freezable {
            is_adopted: true,
            ..freezable(socket)
        };
        assert_eq!(freezable.touched().unwrap(), [(8, 1)]);
        shard.join().unwrap();
    }

    #[test]
    fn memory_of_a_snapshot_is_handed_on_by_the_monitors_own_descriptor() {
        let snapshot = || {
            let file = tempfile::tempfile().unwrap();
            file.set_len(MEMORY_BYTES).unwrap();
            file
        };
        let own = snapshot();
        own.write_all_at(b"memory", 0).unwrap();
        let with = |memory: &File| Handed {
            memory: memory.try_clone().unwrap(),
            ..Handed::good()
        };
        let (answer, mut files) = handed_on_by_resumed(with(&own), vec![own.try_clone().unwrap()]);
        let FreezeAnswer::Frozen(frozen) = answer else {
            panic!("{answer:?}");
        };
        let mut read = [0; 6];
        let memory = files.take(frozen.resume.memory[0]).unwrap();
        memory.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(&read, b"memory");
        // Another file without seals is the shard's.
        let (answer, _) = handed_on_by_resumed(with(&snapshot()), vec![own]);
        assert!(matches!(answer, FreezeAnswer::Refused { .. }), "{answer:?}");
    }

    #[test]
    fn forgotten_disks_are_those_of_the_spec_and_not_the_images() {
        let file = || tempfile::tempfile().unwrap();
        let overlays_after = |spec: &str, overlays: Vec<Vec<File>>| -> Vec<usize> {
            let mut frozen = FrozenVm {
                spec: serde_json::from_str(spec).unwrap(),
                share_group: None,
                state: file(),
                memory: Vec::new(),
                overlays,
                paused_us: 0,
            };
            frozen.forget_disks();
            frozen.overlays.iter().map(Vec::len).collect()
        };
        let disks = r#"{"image": "i", "disks": [{"path": "a"}, {"path": "b"}]}"#;
        let root_and_disks = || vec![vec![file()], vec![file(), file()], vec![file()]];
        assert_eq!(overlays_after(disks, root_and_disks()), [1, 0, 0]);
        assert_eq!(overlays_after(disks, vec![vec![file()], vec![file()]]), [0, 0]);
        assert_eq!(overlays_after(r#"{"image": "i"}"#, vec![vec![file()]]), [1]);
    }

    #[test]
    fn the_end_of_a_vm_does_not_wait_for_a_freeze_that_its_shard_never_answers() {
        let (near, _silent) = UnixStream::pair().unwrap();
        let freezable = Freezable {
            socket: near,
            is_adopted: false,
            spec: serde_json::from_str("{}").unwrap(),
            share_group: ShareGroup::of_run().unwrap(),
            memory_bytes: MEMORY_BYTES,
            overlays: Vec::new(),
            resumed: Vec::new(),
        };
        let handle = VmHandle::default();
        handle.set_freezable(Some(freezable));
        let started = Instant::now();
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| handle.touched());
            std::thread::sleep(Duration::from_millis(100));
            assert!(!asked.is_finished(), "it waits for the answer");
            handle.end_freezable();
            assert!(asked.join().unwrap().is_err());
        });
        assert!(started.elapsed() < Duration::from_secs(10));
        assert!(handle.touched().is_err());
    }
}
