//! The programs that a monitor starts: that of shards, `mirrorball-shard`, and that of keepers,
//! `mirrorball-keeper`. A monitor opens them once, so that files which are replaced while VMs run mix no
//! versions.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use child_process::{Seal, SealedProgram};
use config::vm::SandboxSpec;
use shard_api::version::agree_with_shard;
use urpc::version::{VersionMismatch, Versions};

/// File name of the program of shards, in the directory of `mirrorball`; also the first word of a shard's
/// command line.
pub const SHARD: &str = "mirrorball-shard";
/// The same for keepers.
pub const KEEPER: &str = "mirrorball-keeper";

/// Reason for a program that is not used. One line, with help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// The file cannot be opened, or is none to execute.
    #[error(
        "the program {path} cannot be started: {why}; help: install it beside `mirrorball`, from the \
         same build",
        path = .path.display()
    )]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The defect.
        why: String,
    },
    /// The program has no version in common with this monitor.
    #[error(transparent)]
    VersionMismatch(#[from] VersionMismatch),
}

/// The open programs.
#[derive(Debug)]
pub struct Programs {
    /// The program of shards.
    pub shard: Arc<BuildProgram>,
    /// The program of keepers.
    pub keeper: BuildProgram,
}

impl Programs {
    /// Opens the programs of the running `mirrorball`, which are in the same directory.
    ///
    /// # Errors
    /// If one is missing, or may not be executed.
    pub fn beside_command() -> Result<Self, ProgramError> {
        // The path of a file that was replaced meanwhile has another last name, and the same directory.
        let command = std::env::current_exe().unwrap_or_default();
        Ok(Self {
            shard: Arc::new(BuildProgram::open(&command.with_file_name(SHARD))?),
            keeper: BuildProgram::open(&command.with_file_name(KEEPER))?,
        })
    }
}

/// An open program of this build.
#[derive(Debug)]
pub struct BuildProgram {
    path: PathBuf,
    file: Arc<File>,
}

impl BuildProgram {
    /// Opens the program at `path`.
    ///
    /// # Errors
    /// If there is no such file, or it may not be executed.
    pub fn open(path: &Path) -> Result<Self, ProgramError> {
        let unusable = |why: &dyn ToString| ProgramError::Unusable {
            path: path.to_owned(),
            why: why.to_string(),
        };
        let file = File::open(path).map_err(|error| unusable(&error))?;
        let metadata = file.metadata().map_err(|error| unusable(&error))?;
        if !metadata.is_file() || metadata.permissions().mode() & 0o111 == 0 {
            return Err(unusable(&"it is no executable file"));
        }
        Ok(Self::of_open(path.to_owned(), file))
    }

    /// The program that a predecessor of this process opened by this path.
    pub fn of_open(path: PathBuf, file: File) -> Self {
        Self {
            path,
            file: Arc::new(file),
        }
    }

    /// The open file, to execute it.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// The program of shards as a sealed process of another kind, which the argument `flag` names.
    pub fn sealed(&self, flag: &str) -> SealedProgram {
        SealedProgram {
            file: self.file.clone(),
            words: [SHARD, flag].map(Into::into).into(),
        }
    }

    /// The path by which it was opened, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether users other than its owner and group may execute it.
    pub fn is_executable_by_others(&self) -> bool {
        let metadata = self.file.metadata();
        metadata.is_ok_and(|program| program.permissions().mode() & 0o001 != 0)
    }

    /// The error of a shard that refused its launch, since it speaks other versions than this monitor.
    pub fn unlike(&self, theirs: Versions) -> ProgramError {
        match agree_with_shard(theirs, &format!("the program {}", self.path.display())) {
            Err(error) => error.into(),
            Ok(version) => ProgramError::Unusable {
                path: self.path.clone(),
                why: format!("it refuses version {version}, which it says that it speaks"),
            },
        }
    }
}

/// How strictly the processes of a VM with this sandbox seal themselves.
pub fn seal(sandbox: SandboxSpec) -> Seal {
    match sandbox {
        SandboxSpec::Auto => Seal::Auto,
        SandboxSpec::Require => Seal::Require,
        SandboxSpec::Off => Seal::Off,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::fs::Permissions;

    use shard_api::version::VERSIONS;

    use super::*;

    #[test]
    fn unusable_program_is_named_with_the_reason_and_help() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SHARD);
        let refused = |why: &str| {
            let line = BuildProgram::open(&path).unwrap_err().to_string();
            let begin = format!("the program {} cannot be started: {why}", path.display());
            assert!(line.starts_with(&begin), "{line}");
            assert!(
                line.ends_with("; help: install it beside `mirrorball`, from the same build"),
                "{line}"
            );
            assert!(!line.contains('\n'), "{line}");
        };
        refused("No such file or directory");
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        refused("it is no executable file");
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        assert!(BuildProgram::open(&path).unwrap().is_executable_by_others());
        fs::set_permissions(&path, Permissions::from_mode(0o750)).unwrap();
        assert!(!BuildProgram::open(&path).unwrap().is_executable_by_others());
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        refused("it is no executable file");
    }

    #[test]
    fn open_program_stays_the_same_when_its_file_is_replaced() {
        use std::io::Read;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SHARD);
        let write = |path: &Path, text: &str| {
            fs::write(path, text).unwrap();
            fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
        };
        write(&path, "old");
        let program = BuildProgram::open(&path).unwrap();
        let new = folder.path().join("new");
        write(&new, "new");
        fs::rename(&new, &path).unwrap();
        let mut text = String::new();
        (&*program.file).read_to_string(&mut text).unwrap();
        assert_eq!(text, "old");
    }

    #[test]
    fn shard_of_an_unlike_version_is_reported_with_both_versions_and_help() {
        let program = BuildProgram {
            path: "/usr/bin/mirrorball-shard".into(),
            file: Arc::new(File::open("/dev/null").unwrap()),
        };
        let line = program.unlike(Versions::up_to(VERSIONS.newest + 2)).to_string();
        let begin = format!(
            "the program /usr/bin/mirrorball-shard speaks versions {} to {} of the protocol of shards, and \
             this program {VERSIONS}; help: ",
            VERSIONS.newest + 1,
            VERSIONS.newest + 2
        );
        assert!(line.starts_with(&begin) && !line.contains('\n'), "{line}");
        // A shard that lies about its versions is not trusted.
        let line = program.unlike(VERSIONS).to_string();
        assert!(
            line.contains("it refuses version") && !line.contains('\n'),
            "{line}"
        );
    }
}
