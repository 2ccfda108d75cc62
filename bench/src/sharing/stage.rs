//! The guests' files: kernel, initramfs with the program `bench-reader`, and a disk with a file to read.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;

use crate::Outcome;

/// Size of the file that each guest reads.
const DATA_BYTES: u64 = 150 << 20;
/// Size of its disk; a multiple of 2 MiB, as persistent memory requires.
pub const DISK_BYTES: u64 = 192 << 20;

/// The names in the folder.
pub const KERNEL: &str = "vmlinux";
pub const INITRD: &str = "initrd";
pub const DISK: &str = "disk.raw";

/// Makes the files below `folder/images/sharing`, as in an image store.
pub fn stage(folder: &Path, kernel: &Path, initrd: &Path) -> Outcome<()> {
    let files = files(folder);
    fs::create_dir_all(&files)?;
    fs::copy(kernel, files.join(KERNEL))?;
    let mut archive = fs::read(initrd)?;
    archive.resize(archive.len().next_multiple_of(4), 0);
    let content = folder.join("content");
    // Left over if an earlier call was interrupted.
    let _ = fs::remove_dir_all(&content);
    fs::create_dir_all(&content)?;
    let reader = std::env::current_exe()?.with_file_name("bench-reader");
    fs::copy(reader, content.join("reader"))?;
    let cpio = Command::new("sh")
        .args(["-c", "echo reader | cpio --quiet -o -H newc"])
        .current_dir(&content)
        .output()?;
    if !cpio.status.success() {
        return Err(format!("cpio: {}", String::from_utf8_lossy(&cpio.stderr)).into());
    }
    archive.extend(cpio.stdout);
    fs::write(files.join(INITRD), archive)?;
    fs::remove_file(content.join("reader"))?;
    random(&content.join("data"))?;
    disk(&files.join(DISK), &content)?;
    fs::remove_dir_all(content)?;
    Ok(())
}

/// The folder of the files.
pub fn files(folder: &Path) -> std::path::PathBuf {
    folder.join("images/sharing")
}

/// Fills the file so that no two pages are equal, and merging finds only pages that were read from one place.
fn random(file: &Path) -> Outcome<()> {
    let mut output = BufWriter::new(File::create(file)?);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..DATA_BYTES / 8 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        output.write_all(&state.to_le_bytes())?;
    }
    output.flush()?;
    Ok(())
}

fn disk(disk: &Path, content: &Path) -> Outcome<()> {
    File::create(disk)?.set_len(DISK_BYTES)?;
    let status = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0"])
        // No deferred work for the guests.
        .args([
            "-E",
            "lazy_itable_init=0,lazy_journal_init=0",
            "-O",
            "^has_journal",
            "-d",
        ])
        .arg(content)
        .arg(disk)
        .status()?;
    if !status.success() {
        return Err(format!("mke2fs: {status}").into());
    }
    Ok(())
}
