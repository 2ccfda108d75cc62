//! The shared folders of a VM: their directories, and the processes that serve them.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use config::vm::{FolderCache, FolderSpec, SandboxSpec};
use folders::process::FLAG;
use folders::request::Rights;
use folders::{Arguments, Cache, FolderProcess, FolderSpec as ServerSpec, LeftFolder};
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};
use shard_api::launch::{Fd, FolderLaunch};

use super::left::Process;
use super::{OpenError, Opening};
use crate::left::{Leaving, LeftFiles};
use crate::programs::{self, BuildProgram};
use crate::shard_log::ShardLog;
use crate::text::printable;

/// A shared folder: its process, and how to start it again.
#[derive(Debug)]
pub(super) struct Folder {
    /// Its number among all folders of the VM.
    number: usize,
    spec: ServerSpec,
    /// Its socket among the files.
    file: Fd,
    /// Its process, which ends when this is dropped.
    process: Option<FolderProcess>,
}

/// The folders of a VM.
#[derive(Default)]
pub(super) struct Folders {
    pub launches: Vec<FolderLaunch>,
    pub opened: Vec<Folder>,
}

/// A folder on its way from a monitor to its successor. Descriptors are positions among those that are left.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LeftServer {
    number: usize,
    file: Fd,
    folder: Fd,
    /// Its process and the file of its output; none if it could not be started again.
    process: Option<(Process, Fd)>,
}

impl Opening<'_> {
    /// Opens the directories, and starts their processes.
    pub fn folders(&mut self, program: &BuildProgram, log: &Arc<ShardLog>) -> Result<Folders, OpenError> {
        let mut all = Folders::default();
        for (number, folder) in self.spec.folders.iter().enumerate() {
            let directory = self.names.folder(&folder.path)?;
            let spec = server_spec(folder, directory.into(), self.spec.sandbox, program, log.clone())?;
            let (socket, process) = FolderProcess::start(&spec)?;
            let file = self.files.add(socket);
            all.launches.push(FolderLaunch {
                tag: folder.tag.clone(),
                socket: file,
                share: folder.share,
            });
            all.opened.push(Folder {
                number,
                spec,
                file,
                process: Some(process),
            });
        }
        Ok(all)
    }
}

/// How the process of a folder is started.
fn server_spec(
    folder: &FolderSpec,
    directory: OwnedFd,
    sandbox: SandboxSpec,
    program: &BuildProgram,
    log: Arc<ShardLog>,
) -> io::Result<ServerSpec> {
    let tag = folder.tag.clone();
    let user = owner(&directory)?;
    Ok(ServerSpec {
        program: program.sealed(FLAG),
        folder: Arc::new(directory),
        arguments: Arguments {
            seal: programs::seal(sandbox),
            user,
            rights: Rights {
                read_only: folder.read_only,
                xattr: folder.xattr,
            },
            cache: match folder.cache {
                FolderCache::None => Cache::None,
                FolderCache::Auto => Cache::Auto,
                FolderCache::Always => Cache::Always,
            },
            lends: folder.share,
        },
        ended: Arc::new(move |why| log.note(&end_line(&tag, why))),
    })
}

/// The user and group of a folder's process: those of the directory. Only root can choose them.
fn owner(directory: &OwnedFd) -> io::Result<Option<(u32, u32)>> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let metadata = std::fs::File::from(directory.try_clone()?).metadata()?;
    Ok(Some((metadata.uid(), metadata.gid())))
}

/// The line of a log for a process that has ended. Its message may be a guest's.
fn end_line(tag: &str, why: &str) -> String {
    let why = printable(why);
    format!("folder {tag}: {why}; its files give EIO until the VM boots again")
}

impl Folder {
    /// The process that serves the folder, if it runs.
    pub fn process(&self) -> Option<&FolderProcess> {
        self.process.as_ref()
    }

    /// Starts the process again for another boot: a request of the old one may be on its way.
    pub fn renew(&mut self, files: &mut [OwnedFd]) -> io::Result<()> {
        self.process = None;
        let (socket, process) = FolderProcess::start(&self.spec)?;
        *files.get_mut(self.file.0).ok_or(io::ErrorKind::InvalidData)? = socket;
        self.process = Some(process);
        Ok(())
    }

    /// Leaves the folder to a successor of this process.
    pub fn leave(&self, leaving: &mut Leaving) -> io::Result<LeftServer> {
        let process = self.process.as_ref().map(|process| {
            let log = leaving.add(process.log())?;
            Ok::<_, io::Error>((Process::leave(process.process(), leaving)?, log))
        });
        Ok(LeftServer {
            number: self.number,
            file: self.file,
            folder: leaving.add(&*self.spec.folder)?,
            process: process.transpose()?,
        })
    }

    /// Takes over a folder from a predecessor of this process.
    pub fn adopt(
        left: LeftServer,
        files: &mut LeftFiles,
        spec: &config::VmSpec,
        program: &BuildProgram,
        log: &Arc<ShardLog>,
    ) -> io::Result<Self> {
        let folder = spec.folders.get(left.number);
        let folder = folder.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        let directory = files.take(left.folder)?;
        let spec = server_spec(folder, directory, spec.sandbox, program, log.clone())?;
        let process = left.process.map(|(process, log)| {
            let left = LeftFolder {
                process: process.take(files)?,
                log: files.take(log)?,
            };
            FolderProcess::adopt(left, &spec)
        });
        let process = process.transpose()?;
        Ok(Self {
            number: left.number,
            spec,
            file: left.file,
            process,
        })
    }
}

#[cfg(test)]
mod tests {
    use child_process::Seal;

    use super::*;

    #[test]
    fn line_of_an_ended_server_names_the_folder_and_carries_no_terminal_escapes() {
        assert_eq!(
            end_line(
                "data",
                "the folder's server left with status 1; it said: \x1b[31mred\nnet0: fine"
            ),
            "folder data: the folder's server left with status 1; it said:  [31mred net0: fine; its files \
             give EIO until the VM boots again"
        );
    }

    #[test]
    fn server_of_a_folder_is_the_program_of_shards_with_the_settings_of_the_spec() {
        let directory = tempfile::tempdir().unwrap();
        let log = Arc::new(ShardLog::create(&directory.path().join("shard.log")).unwrap());
        let program = BuildProgram::open(std::path::Path::new("/bin/true")).unwrap();
        let folder = FolderSpec {
            path: directory.path().to_owned(),
            tag: "data".to_owned(),
            read_only: true,
            cache: FolderCache::None,
            xattr: false,
            share: true,
        };
        let open = std::fs::File::open(directory.path()).unwrap();
        let spec = server_spec(&folder, open.into(), SandboxSpec::Require, &program, log).unwrap();
        assert_eq!(spec.program.words, ["mirrorball-shard", "--folder-server"]);
        assert!(Arc::ptr_eq(&spec.program.file, program.file()));
        let Arguments {
            seal,
            user,
            rights,
            cache,
            lends,
        } = spec.arguments;
        assert_eq!((seal, cache), (Seal::Require, Cache::None));
        assert!(rights.read_only && !rights.xattr && lends);
        let metadata = directory.path().metadata().unwrap();
        let owner = geteuid().is_root().then(|| (metadata.uid(), metadata.gid()));
        assert_eq!(user, owner);
    }
}
