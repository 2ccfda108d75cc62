//! The files a benchmarked guest starts from, in memory: kernel, initramfs with [`bench-guest`], disk, programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Options, Outcome};

/// A folder in memory with everything the runs read. Removed when dropped.
pub struct GuestFiles {
    folder: PathBuf,
    /// Mirrorball's program.
    pub mirrorball: PathBuf,
    /// QEMU's program and the loader arguments that start it from memory.
    pub qemu: PathBuf,
    /// An ELF kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: PathBuf,
    /// A raw disk.
    pub disk: PathBuf,
}

const DISK_BYTES: u64 = 64 << 20;

impl GuestFiles {
    /// Copies everything into `/dev/shm`.
    pub fn stage(options: &Options) -> Outcome<Self> {
        let folder = PathBuf::from(format!("/dev/shm/mirrorball-bench-{}", std::process::id()));
        fs::create_dir(&folder)?;
        let files = Self {
            mirrorball: folder.join("mirrorball"),
            qemu: folder.join("qemu-system-x86_64"),
            kernel: folder.join("vmlinux"),
            initrd: folder.join("initrd"),
            disk: folder.join("disk.raw"),
            folder,
        };
        fs::copy(&options.mirrorball, &files.mirrorball)?;
        fs::copy(&options.kernel, &files.kernel)?;
        let guest = std::env::current_exe()?.with_file_name("bench-guest");
        let mut initrd = fs::read(&options.initrd)?;
        initrd.resize(initrd.len().next_multiple_of(4), 0);
        initrd.extend(archive(&files.folder, &guest)?);
        fs::write(&files.initrd, initrd)?;
        fs::File::create(&files.disk)?.set_len(DISK_BYTES)?;
        let qemu = which("qemu-system-x86_64")?;
        fs::copy(&qemu, &files.qemu)?;
        Ok(files)
    }
}

impl Drop for GuestFiles {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn which(program: &str) -> Outcome<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    path.split(':')
        .map(|folder| Path::new(folder).join(program))
        .find(|file| file.exists())
        .ok_or_else(|| format!("{program} is not installed").into())
}

/// A cpio archive with the guest's program as `/bench`.
fn archive(folder: &Path, guest: &Path) -> Outcome<Vec<u8>> {
    let staging = folder.join("cpio");
    fs::create_dir(&staging)?;
    fs::copy(guest, staging.join("bench"))?;
    let output = Command::new("sh")
        .args(["-c", "echo bench | cpio --quiet -o -H newc"])
        .current_dir(&staging)
        .output()?;
    if !output.status.success() {
        return Err(format!("cpio: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(output.stdout)
}
