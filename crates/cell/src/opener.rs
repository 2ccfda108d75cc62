//! A short-lived process that opens files by names of a VM's owner, with the owner's rights.
//!
//! The monitor of another user's VM is root's. It opens no name of that user by itself: root may open any
//! file. It starts this program again as [`COMMAND`], which first takes the ids of the owner and gives up all
//! capabilities. That process resolves the names beneath the allowed directories, locks the files, reads
//! images' headers, and passes the descriptors. The monitor trusts none of it: it checks the type and the
//! access mode of each descriptor, and kills a process that does not answer in time.

mod protocol;
mod serve;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use diskstore::disk::{DiskRequest, Format, Layer, OpenDisk};
use hostfiles::names::{Access, Below, Kind, check};
use registry::lease::OWN_PROGRAM;
use registry::monitor::Owner;
use shard_api::launch::DiskFormat;
use shard_api::message::{Files, ReceiveError, receive_by, send};

use self::protocol::{Answer, NamedDisk, Request, Wanted};
pub use self::serve::serve;

/// First argument of the process; the owner's ids follow.
pub const COMMAND: &str = "open-names";
/// Time limit for one answer. The first opening of a qcow2 file after a boot of the host reads its tables.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// Maximum number of files of a disk.
const LAYERS_MAX: usize = 16;

/// Reason why a named file is not opened. One line.
#[derive(Debug, thiserror::Error)]
pub enum OpenerError {
    /// The process does not start, or its socket breaks.
    #[error("the process that opens the files of user {uid} failed: {error}")]
    Process {
        /// The owner's user id.
        uid: u32,
        /// The cause.
        error: io::Error,
    },
    /// The opener does not answer in time.
    #[error(
        "user {uid}: the files were not opened within {} s; name files of a file system that answers",
        ANSWER_LIMIT.as_secs()
    )]
    Silent {
        /// The owner's user id.
        uid: u32,
    },
    /// The opener refuses to open a file.
    #[error("{why} (opened as user {uid})")]
    Refused {
        /// The owner's user id.
        uid: u32,
        /// Reason and help.
        why: String,
    },
    /// The opener passes a descriptor of another file.
    #[error("{path}: the process that opens the files of user {uid} passed another file: {why}")]
    Descriptor {
        /// The owner's user id.
        uid: u32,
        /// Name of the file that was requested.
        path: String,
        /// Difference from the requested file.
        why: String,
    },
}

/// The process of one VM. Dropping it ends it.
#[derive(Debug)]
pub struct Opener {
    uid: u32,
    below: Below,
    socket: UnixStream,
    process: Child,
}

impl Opener {
    /// Starts the process with the rights of `owner`. It opens files below these directories.
    ///
    /// # Errors
    /// If the host is out of processes.
    pub fn start(owner: &Owner, below: Below) -> Result<Self, OpenerError> {
        Self::start_by(Path::new(OWN_PROGRAM), owner, below)
    }

    /// The same by `program`, which is `mirrorball`.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_by(program: &Path, owner: &Owner, below: Below) -> Result<Self, OpenerError> {
        let failed = |error| OpenerError::Process {
            uid: owner.uid,
            error,
        };
        let (socket, theirs) = UnixStream::pair().map_err(failed)?;
        let mut command = Command::new(program);
        command.arg0("mirrorball").args(owner_words(owner));
        // No variable of this process's is of use there.
        command.env_clear();
        command.stdin(Stdio::from(OwnedFd::from(theirs)));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().map_err(failed)?;
        Ok(Self {
            uid: owner.uid,
            below,
            socket,
            process,
        })
    }

    /// Opens a regular file for reading; `what` is its use in the VM.
    ///
    /// # Errors
    /// [`OpenerError`].
    pub fn file(&mut self, what: &str, path: &Path) -> Result<File, OpenerError> {
        let wanted = Wanted::File {
            what: what.to_owned(),
            path: path.to_owned(),
        };
        match self.ask(wanted)? {
            (Answer::File(file), mut files) => {
                let file = files.take(file).map_err(|error| self.strange(path, error))?;
                check(&file, Kind::File, Access::Read).map_err(|error| self.strange(path, error))?;
                Ok(file)
            }
            (Answer::Refused { why }, _) => Err(OpenerError::Refused { uid: self.uid, why }),
            (Answer::Disk { .. }, _) => Err(self.strange(path, "a disk")),
        }
    }

    /// Opens the files of a disk and locks them, without a temporary overlay.
    ///
    /// # Errors
    /// [`OpenerError`].
    pub fn disk(&mut self, request: &DiskRequest, allocate: bool) -> Result<OpenDisk, OpenerError> {
        let path = &request.path;
        let Some(named) = NamedDisk::of(request, allocate) else {
            let why = format!(
                "disk {}: another user's VM can't keep the writes of a private disk; use \
                 `mode = \"exclusive\"`, or drop `persistent`",
                path.display()
            );
            return Err(OpenerError::Refused { uid: self.uid, why });
        };
        let (answer, files) = self.ask(Wanted::Disk(named))?;
        match answer {
            Answer::Disk { layers, size_bytes } => self.received(request, layers, size_bytes, files),
            Answer::Refused { why } => Err(OpenerError::Refused { uid: self.uid, why }),
            Answer::File(_) => Err(self.strange(path, "a single file")),
        }
    }

    /// Checks the files of a disk.
    fn received(
        &self,
        request: &DiskRequest,
        layers: Vec<protocol::NamedLayer>,
        size_bytes: u64,
        mut files: Files,
    ) -> Result<OpenDisk, OpenerError> {
        let path = &request.path;
        if layers.is_empty() || layers.len() > LAYERS_MAX || i64::try_from(size_bytes).is_err() {
            return Err(self.strange(path, format!("{} files, {size_bytes} bytes", layers.len())));
        }
        let mut opened = Vec::new();
        for (depth, layer) in layers.into_iter().enumerate() {
            let access = match request.is_in_place() && depth == 0 {
                true => Access::ReadWrite,
                false => Access::Read,
            };
            let file = files
                .take(layer.file)
                .map_err(|error| self.strange(path, error))?;
            check(&file, Kind::Disk, access).map_err(|error| self.strange(path, error))?;
            let format = match layer.format {
                DiskFormat::Raw => Format::Raw,
                DiskFormat::Qcow2 => Format::Qcow2,
                DiskFormat::Scratch => return Err(self.strange(path, "a temporary overlay")),
            };
            opened.push(Layer { file, format });
        }
        let vm = &request.vm_name;
        Ok(OpenDisk::received(opened, size_bytes, request.read_only, vm))
    }

    fn ask(&mut self, wanted: Wanted) -> Result<(Answer, Files), OpenerError> {
        let request = Request {
            directories: self.below.directories.clone(),
            setting: self.below.setting.clone(),
            wanted,
        };
        let deadline = Instant::now() + ANSWER_LIMIT;
        let answered = self
            .socket
            .set_write_timeout(Some(ANSWER_LIMIT))
            .map_err(ReceiveError::from)
            .and_then(|()| send(&mut self.socket, &request, &[]))
            .and_then(|()| receive_by(&mut self.socket, deadline));
        answered.map_err(|error| match error {
            _ if Instant::now() >= deadline => OpenerError::Silent { uid: self.uid },
            ReceiveError::Io(error) => OpenerError::Process { uid: self.uid, error },
            other => OpenerError::Process {
                uid: self.uid,
                error: io::Error::other(other),
            },
        })
    }

    fn strange(&self, path: &Path, why: impl ToString) -> OpenerError {
        OpenerError::Descriptor {
            uid: self.uid,
            path: path.display().to_string(),
            why: why.to_string(),
        }
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        // A process that has ended can't be killed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Arguments of the process.
fn owner_words(owner: &Owner) -> Vec<String> {
    let groups: Vec<String> = owner.groups.iter().map(u32::to_string).collect();
    let words = [COMMAND.to_owned(), owner.uid.to_string(), owner.gid.to_string()];
    words.into_iter().chain(groups).collect()
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::fd::AsFd;
    use std::path::PathBuf;

    use diskstore::disk::Mode;
    use shard_api::launch::Fd;
    use shard_api::message::receive;

    use super::protocol::NamedLayer;
    use super::*;

    /// A process that answers one request by a function.
    fn opener(answer: impl FnOnce() -> (Answer, Vec<File>) + Send + 'static) -> Opener {
        let (socket, mut theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let _ = receive::<Request>(&mut theirs);
            let (answer, files) = answer();
            let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            let _ = send(&mut theirs, &answer, &files);
        });
        Opener {
            uid: 1001,
            below: Below {
                directories: vec![PathBuf::from("/srv")],
                setting: "`paths`".to_owned(),
            },
            socket,
            process: Command::new("true").spawn().unwrap(),
        }
    }

    fn request() -> DiskRequest {
        DiskRequest {
            path: PathBuf::from("/srv/disk"),
            format: None,
            mode: Mode::Private,
            persistent: false,
            read_only: false,
            overlay_path: None,
            scratch_dir: PathBuf::from("/var/tmp"),
            vm_name: "own".to_owned(),
            below: None,
        }
    }

    fn layer(file: usize, format: DiskFormat) -> NamedLayer {
        NamedLayer {
            file: Fd(file),
            format,
        }
    }

    #[test]
    fn descriptor_that_was_not_requested_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        std::fs::write(&path, [7; 4096]).unwrap();
        let open = |writable| {
            let mut options = OpenOptions::new();
            options.read(true).write(writable).open(&path).unwrap()
        };
        let device = || File::open("/dev/null").unwrap();
        let raw = || layer(0, DiskFormat::Raw);
        let disk = |layers, size_bytes, files: Vec<File>| {
            let mut opener = opener(move || (Answer::Disk { layers, size_bytes }, files));
            opener.disk(&request(), false).map(|disk| disk.layers.len())
        };
        assert_eq!(disk(vec![raw()], 4096, vec![open(false)]).unwrap(), 1);
        for (layers, size_bytes, files, why) in [
            (vec![raw()], 4096, vec![open(true)], "not open in the mode"),
            (vec![raw()], 4096, vec![device()], "not a regular file"),
            (vec![raw()], 4096, Vec::new(), "was not passed"),
            (vec![raw(), raw()], 4096, vec![open(false)], "used already"),
            (
                vec![layer(0, DiskFormat::Scratch)],
                4096,
                vec![open(false)],
                "a temporary overlay",
            ),
            (Vec::new(), 4096, Vec::new(), "0 files"),
            (vec![raw()], u64::MAX, vec![open(false)], "bytes"),
        ] {
            let error = disk(layers, size_bytes, files).unwrap_err().to_string();
            assert!(
                error.contains("passed another file") && error.contains(why),
                "{error}"
            );
        }
        let file = open(true);
        let mut of_kernel = opener(move || (Answer::File(Fd(0)), vec![file]));
        let error = of_kernel.file("kernel", &path).unwrap_err().to_string();
        assert!(error.contains("not open in the mode"), "{error}");
    }

    #[test]
    fn process_that_ends_without_an_answer_is_an_error() {
        let mut gone = opener(|| panic!("it was killed"));
        let error = gone.disk(&request(), false).unwrap_err().to_string();
        assert!(error.contains("opens the files of user 1001 failed"), "{error}");
    }

    #[test]
    fn disk_with_a_persistent_overlay_is_not_opened_for_another_user() {
        let mut opener = opener(|| panic!("nothing is requested"));
        let request = DiskRequest {
            persistent: true,
            ..request()
        };
        let error = opener.disk(&request, false).unwrap_err().to_string();
        assert!(
            error.contains("can't keep the writes of a private disk"),
            "{error}"
        );
    }
}
