//! The files that a benchmarked guest starts from, in memory: kernel, initramfs with `bench-guest`, disk,
//! programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Outcome;

/// A folder in memory with all files that the runs read. Removed when dropped.
pub struct GuestFiles {
    folder: PathBuf,
    /// Mirrorball's program.
    pub mirrorball: PathBuf,
    /// The copy of the dynamic loader that starts QEMU's program with copies of its libraries.
    loader: PathBuf,
    /// Directory with the copies of the libraries.
    libraries: PathBuf,
    /// QEMU's program.
    qemu: PathBuf,
    /// Directory with QEMU's firmware, for its `-L`.
    firmware: PathBuf,
    /// An ELF kernel.
    pub kernel: PathBuf,
    /// Initramfs with the benchmark's programs.
    pub initrd: PathBuf,
    /// A raw disk.
    pub disk: PathBuf,
    /// A folder to share, empty until [`GuestFiles::fill_folder`].
    pub shared: PathBuf,
}

const DISK_BYTES: u64 = 64 << 20;
/// Length of the file in the folder to share.
const FOLDER_FILE_BYTES: usize = 48 << 20;
/// Where Debian keeps QEMU's firmware.
const FIRMWARE: [&str; 2] = ["/usr/share/qemu", "/usr/share/seabios"];

impl GuestFiles {
    /// Copies everything into `/dev/shm`: QEMU, the named files, and the programs that `mirrorball` starts.
    ///
    /// # Errors
    /// If a file or program is missing, or there is no room.
    pub fn stage(mirrorball: &Path, kernel: &Path, initrd: &Path) -> Outcome<Self> {
        let folder = PathBuf::from(format!("/dev/shm/mirrorball-bench-{}", std::process::id()));
        fs::create_dir(&folder)?;
        let files = Self {
            mirrorball: folder.join("mirrorball"),
            loader: folder.join("lib/loader"),
            libraries: folder.join("lib"),
            qemu: folder.join("qemu-system-x86_64"),
            firmware: folder.join("firmware"),
            kernel: folder.join("vmlinux"),
            initrd: folder.join("initrd"),
            disk: folder.join("disk.raw"),
            shared: folder.join("shared"),
            folder,
        };
        crate::programs::copy(mirrorball, &files.mirrorball)?;
        fs::copy(kernel, &files.kernel)?;
        let guest = std::env::current_exe()?.with_file_name("bench-guest");
        let mut initrd = fs::read(initrd)?;
        initrd.resize(initrd.len().next_multiple_of(4), 0);
        initrd.extend(archive(&files.folder, &guest)?);
        fs::write(&files.initrd, initrd)?;
        fs::File::create(&files.disk)?.set_len(DISK_BYTES)?;
        fs::create_dir(&files.shared)?;
        let qemu = which("qemu-system-x86_64")?;
        fs::copy(&qemu, &files.qemu)?;
        files.copy_libraries(&qemu)?;
        files.copy_firmware()?;
        Ok(files)
    }

    /// Writes the file that guests read into the folder to share.
    ///
    /// # Errors
    /// If there is no room.
    pub fn fill_folder(&self) -> Outcome<()> {
        let bytes: Vec<u8> = (0..FOLDER_FILE_BYTES)
            .map(|at| (at / 4096 + at % 251) as u8)
            .collect();
        Ok(fs::write(self.shared.join("file"), bytes)?)
    }

    /// The socket of the server of the folder beside QEMU.
    pub fn virtiofsd_socket(&self) -> PathBuf {
        self.folder.join("virtiofsd.socket")
    }

    /// Starts QEMU from the copies.
    pub fn qemu(&self) -> Command {
        let mut command = Command::new(&self.loader);
        command.arg("--library-path").arg(&self.libraries);
        command.arg(&self.qemu).arg("-L").arg(&self.firmware);
        command
    }

    fn copy_libraries(&self, program: &Path) -> Outcome<()> {
        fs::create_dir(&self.libraries)?;
        let output = Command::new("ldd").arg(program).output()?;
        for word in String::from_utf8(output.stdout)?.split_whitespace() {
            let library = Path::new(word);
            let Some(name) = library.file_name().filter(|_| library.is_absolute()) else {
                continue;
            };
            if name.to_string_lossy().starts_with("ld-linux") {
                fs::copy(library, &self.loader)?;
            } else {
                fs::copy(library, self.libraries.join(name))?;
            }
        }
        Ok(())
    }

    fn copy_firmware(&self) -> Outcome<()> {
        fs::create_dir(&self.firmware)?;
        for folder in FIRMWARE {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                if entry
                    .path()
                    .extension()
                    .is_some_and(|kind| kind == "bin" || kind == "rom")
                {
                    fs::copy(entry.path(), self.firmware.join(entry.file_name()))?;
                }
            }
        }
        Ok(())
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
