//! Checks of a VM's spec against this host: readable files, available memory, unique names.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use crate::error::ConfigError;
use crate::fault::{Fault, fault};
use crate::vm::DiskMode;
use crate::{VmFile, VmSpec};

/// Facts about the host for the checks; a test may supply its own.
#[derive(Clone, Copy, Debug)]
pub struct HostFacts {
    /// All of the host's memory, bytes.
    pub memory_bytes: u64,
    /// Opens a file to read, or to read and write, and returns the file's kind.
    pub open: fn(&Path, Access) -> io::Result<FileKind>,
}

/// The access that a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Access for reading.
    Read,
    /// Reading and writing.
    Write,
}

/// Kind of the file at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A block device, which may be a disk.
    BlockDevice,
    /// A directory, which only a shared folder may be.
    Directory,
    /// Not known: the file is checked where it is opened.
    Unchecked,
    /// Neither a file nor a disk: a pipe, a socket, a character device.
    Other,
}

impl HostFacts {
    /// The same facts for a spec whose files this process may not look at, since another user or another host
    /// names them. They are checked where they are opened.
    pub fn without_files() -> Self {
        Self {
            open: |_, _| Ok(FileKind::Unchecked),
            ..Self::of_this_host()
        }
    }

    /// Reads `/proc/meminfo` of this host. Memory is unlimited (`u64::MAX`) when that file has no total.
    pub fn of_this_host() -> Self {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kib = meminfo
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"))
            .and_then(|rest| rest.split_whitespace().next())
            .and_then(|number| number.parse::<u64>().ok());
        Self {
            memory_bytes: kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024)),
            open,
        }
    }
}

/// Checks a spec against the host. `file` is the VM file of the spec, if there is one; an error then points
/// into its text.
pub fn check_host(spec: &VmSpec, file: Option<&VmFile>, facts: &HostFacts) -> Result<(), ConfigError> {
    host_fault(spec, facts).map_or(Ok(()), |fault| Err(placed(&fault, file)))
}

/// Fails at the first VM of `files` that has the name of an earlier one.
pub fn duplicate_names(files: &[VmFile]) -> Result<(), ConfigError> {
    for (index, file) in files.iter().enumerate() {
        let Some(name) = &file.spec.name else { continue };
        if let Some(earlier) = files[..index]
            .iter()
            .find(|earlier| earlier.spec.name.as_ref() == Some(name))
        {
            let fault = fault(
                &["name"],
                format!("two VMs named {name:?}: {} has it too", earlier.source_name),
                "give each VM its own name",
            );
            return Err(placed(&fault, Some(file)));
        }
    }
    Ok(())
}

fn placed(fault: &Fault, file: Option<&VmFile>) -> ConfigError {
    match file {
        Some(file) => ConfigError::from_fault(&file.source_name, &file.text, fault),
        None => ConfigError::from_flags(fault),
    }
}

fn host_fault(spec: &VmSpec, facts: &HostFacts) -> Option<Fault> {
    if spec.memory.0 > facts.memory_bytes {
        let all = crate::Size(facts.memory_bytes >> 20 << 20);
        return Some(fault(
            &["memory"],
            format!("{} of memory is more than the host has ({all})", spec.memory),
            "give the VM less",
        ));
    }
    if let Some((kernel, initrd)) = spec.kernel_files() {
        let found = file_fault(&["kernel", "path"], "kernel", kernel, Access::Read, facts)
            .or_else(|| file_fault(&["kernel", "initrd"], "initrd", initrd?, Access::Read, facts));
        if found.is_some() {
            return found;
        }
    }
    spec.disks
        .iter()
        .enumerate()
        .find_map(|(index, disk)| {
            // Only in this mode the file itself is written.
            let access = match disk.mode {
                DiskMode::Exclusive if disk.persistent => Access::Write,
                _ => Access::Read,
            };
            let at = ["disks", &index.to_string(), "path"];
            file_fault(&at, "disk", &disk.path, access, facts)
        })
        .or_else(|| folder_fault(spec, facts))
}

/// Finds a shared folder that is no directory of the host.
fn folder_fault(spec: &VmSpec, facts: &HostFacts) -> Option<Fault> {
    spec.folders.iter().enumerate().find_map(|(index, folder)| {
        let why = match (facts.open)(&folder.path, Access::Read) {
            Ok(FileKind::Directory | FileKind::Unchecked) => return None,
            Ok(_) => "is not a directory".to_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => "no such directory".to_owned(),
            Err(error) => error.to_string(),
        };
        let at = ["folders", &index.to_string(), "path"];
        let help = "name a directory; relative paths start at the VM file's folder";
        let found = fault(&at, format!("folder {:?}: {why}", folder.path), help);
        Some(found.or_by_flag("name a directory of this host"))
    })
}

fn file_fault(at: &[&str], what: &str, path: &Path, access: Access, facts: &HostFacts) -> Option<Fault> {
    let refused = |why: &str, help: &str| fault(at, format!("{what} {path:?}: {why}"), help);
    match (facts.open)(path, access) {
        Ok(FileKind::File | FileKind::Unchecked) => None,
        Ok(FileKind::BlockDevice) if what == "disk" => None,
        Ok(FileKind::Directory) => Some(refused("is a directory", "name a file")),
        Ok(_) => Some(refused("is not a file", "name a file")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(
            refused(
                "no such file",
                "check the path; relative paths start at the VM file's folder",
            )
            .or_by_flag("check the path"),
        ),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && access == Access::Write => {
            Some(refused(
                "no permission to write it",
                "give your user permission to write it, or drop `persistent`",
            ))
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Some(refused(
            "no permission to read it",
            "give your user permission to read it",
        )),
        Err(error) => Some(refused(&error.to_string(), "fix the file, or name another")),
    }
}

fn open(path: &Path, access: Access) -> io::Result<FileKind> {
    let kind = std::fs::metadata(path)?.file_type();
    if kind.is_dir() {
        return Ok(FileKind::Directory);
    }
    // Opening a pipe would wait for its other end.
    if !kind.is_file() && !kind.is_block_device() {
        return Ok(FileKind::Other);
    }
    OpenOptions::new()
        .read(true)
        .write(access == Access::Write)
        .open(path)?;
    Ok(if kind.is_file() {
        FileKind::File
    } else {
        FileKind::BlockDevice
    })
}
