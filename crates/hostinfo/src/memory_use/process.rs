//! The kernel's figures of one process: its mappings, its page tables, its open files.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::classify::GUEST_MEMORY;
use super::smaps::{self, Area, FileId};

/// A file that a process has open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenFile {
    /// The file's number.
    pub id: FileId,
    /// The file's name, with ` (deleted)` when it has none any more.
    pub name: String,
    /// Whether it was opened for writing.
    pub writable: bool,
    /// Whether it is the guest's memory, not a file on a disk.
    pub guest_memory: bool,
    /// Bytes that the file takes: on its disk, or of memory and swap if it has no disk.
    pub allocated: u64,
    /// The path by which it can be opened, even if it is deleted.
    pub link: PathBuf,
}

impl OpenFile {
    /// Opens the file for reading.
    pub fn open(&self) -> io::Result<File> {
        File::open(&self.link)
    }
}

/// The mappings of a process.
pub fn areas(pid: u32) -> io::Result<Vec<Area>> {
    Ok(smaps::parse(&fs::read_to_string(format!("/proc/{pid}/smaps"))?))
}

/// Bytes of a process's page tables.
pub fn page_tables(pid: u32) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let found = text
        .lines()
        .filter_map(smaps::field)
        .find(|(name, _)| *name == "VmPTE");
    Ok(found.map_or(0, |(_, bytes)| bytes))
}

/// Bytes of memory of a process that are no file's, and of its page tables. Each user may read them.
pub fn own_memory(pid: u32) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let fields = text.lines().filter_map(smaps::field);
    let own = fields.filter(|(name, _)| ["RssAnon", "VmPTE"].contains(name));
    Ok(own.fold(0, |sum, (_, bytes)| sum.saturating_add(bytes)))
}

/// The regular files that a process has open.
pub fn open_files(pid: u32) -> io::Result<Vec<OpenFile>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let link = entry?.path();
        // A file may be closed at any moment; a closed file counts for nothing.
        if let Ok(file) = open_file(&link) {
            files.extend(file);
        }
    }
    Ok(files)
}

/// The program that a process runs.
pub fn program(pid: u32) -> io::Result<OpenFile> {
    let link = PathBuf::from(format!("/proc/{pid}/exe"));
    let mut program = open_file(&link)?.ok_or(io::ErrorKind::NotFound)?;
    // The mode bits of the link don't show how a program was opened.
    program.writable = false;
    Ok(program)
}

fn open_file(link: &Path) -> io::Result<Option<OpenFile>> {
    // The mode bits of the link show how the file was opened.
    const WRITABLE: u32 = 0o200;
    let (target, metadata) = (fs::read_link(link)?, fs::metadata(link)?);
    if !metadata.is_file() {
        return Ok(None);
    }
    let name = target.to_string_lossy().into_owned();
    Ok(Some(OpenFile {
        id: id(&metadata),
        guest_memory: name.starts_with(GUEST_MEMORY),
        name,
        writable: fs::symlink_metadata(link)?.mode() & WRITABLE != 0,
        allocated: metadata.blocks().saturating_mul(512),
        link: link.to_owned(),
    }))
}

/// The number of a file as [`smaps`] prints it.
fn id(metadata: &fs::Metadata) -> FileId {
    let device = metadata.dev();
    FileId {
        device: (libc::major(device), libc::minor(device)),
        inode: metadata.ino(),
    }
}

/// The descendants of `pid`, without `except` and their descendants.
pub fn descendants(pid: u32, except: &[u32]) -> Vec<u32> {
    let mut found = Vec::new();
    let mut parents = vec![pid];
    while let Some(parent) = parents.pop() {
        for child in children(parent) {
            if !except.contains(&child) && !found.contains(&child) {
                found.push(child);
                parents.push(child);
            }
        }
    }
    found
}

fn children(pid: u32) -> Vec<u32> {
    // A process that has just ended has none.
    let threads = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    threads
        .filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|text| {
            text.split_whitespace()
                .filter_map(|word| word.parse().ok())
                .collect::<Vec<_>>()
        })
        .collect()
}
