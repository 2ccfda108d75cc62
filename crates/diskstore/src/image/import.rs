//! Creates images from existing files.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::payload::{is_bzimage, is_elf};
use super::{ImageError, ImageStore, Record, failed};

/// Parameters of an import: a kernel, a disk, or both.
#[derive(Clone, Debug, Default)]
pub struct ImportRequest {
    /// The image's name.
    pub name: String,
    /// bzImage or ELF.
    pub kernel: Option<PathBuf>,
    /// File of the initramfs, if there is one.
    pub initrd: Option<PathBuf>,
    /// raw or qcow2.
    pub disk: Option<PathBuf>,
    /// Kernel command line of the guest.
    pub cmdline: Option<String>,
}

/// Kind of a file, detected by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// bzImage or ELF.
    Kernel,
    /// QEMU's copy-on-write format.
    Qcow2,
    /// Any other file of whole sectors.
    Raw,
}

impl FileKind {
    /// Detects the kind of the file at `path`.
    pub fn of(path: &Path) -> Result<Self, ImageError> {
        let mut head = Vec::new();
        let file = File::open(path).map_err(failed("read", path))?;
        let meta = file.metadata().map_err(failed("read", path))?;
        let wrong = |reason: &str| {
            Err(ImageError::File {
                path: path.into(),
                reason: reason.into(),
            })
        };
        if !meta.is_file() {
            return wrong("not a regular file");
        }
        file.take(1024)
            .read_to_end(&mut head)
            .map_err(failed("read", path))?;
        if is_bzimage(&head) || is_elf(&head) {
            return Ok(Self::Kernel);
        }
        if head.starts_with(b"QFI\xfb") {
            return Ok(Self::Qcow2);
        }
        if meta.len() == 0 || meta.len() % 512 != 0 {
            return wrong("neither a kernel nor a disk: a raw disk has a multiple of 512 bytes");
        }
        Ok(Self::Raw)
    }
}

/// Copies the files into a new image; `progress` gets the copied and the total bytes.
pub fn import(
    store: &ImageStore,
    request: &ImportRequest,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Record, ImageError> {
    if request.kernel.is_none() && request.disk.is_none() {
        return Err(ImageError::Unable("an image needs a kernel or a disk".into()));
    }
    let mut record = Record::new(&request.name, "imported files".into());
    if let Some(kernel) = &request.kernel
        && FileKind::of(kernel)? != FileKind::Kernel
    {
        return Err(ImageError::File {
            path: kernel.clone(),
            reason: "neither a bzImage nor an ELF kernel".into(),
        });
    }
    let format = match request
        .disk
        .as_deref()
        .map(|disk| FileKind::of(disk).map(|kind| (disk, kind)))
    {
        None => None,
        Some(Err(error)) => return Err(error),
        Some(Ok((disk, FileKind::Kernel))) => {
            return Err(ImageError::File {
                path: disk.into(),
                reason: "a kernel, not a disk".into(),
            });
        }
        Some(Ok((disk, FileKind::Qcow2))) => {
            refuse_backing(disk)?;
            Some("qcow2")
        }
        Some(Ok((_, FileKind::Raw))) => Some("raw"),
    };
    let build = store.begin(&request.name)?;
    let disk_name = if format == Some("qcow2") {
        "root.qcow2"
    } else {
        "root.raw"
    };
    let files = [
        (&request.kernel, "kernel"),
        (&request.initrd, "initrd"),
        (&request.disk, disk_name),
    ];
    let lengths = files
        .iter()
        .filter_map(|(path, _)| fs::metadata(path.as_ref()?).ok());
    let total: u64 = lengths.map(|meta| meta.len()).sum();
    let mut before = 0;
    for (path, name) in files {
        let Some(path) = path else { continue };
        let target = build.folder.join(name);
        before += copy(path, &target, &mut |bytes| progress(before + bytes, total))?;
    }
    record.kernel = request
        .kernel
        .as_ref()
        .map(|_| build.file("kernel", false))
        .transpose()?;
    record.initrd = request
        .initrd
        .as_ref()
        .map(|_| build.file("initrd", false))
        .transpose()?;
    record.disk = request
        .disk
        .as_ref()
        .map(|_| build.file(disk_name, true))
        .transpose()?;
    record.format = format.map(String::from);
    let usual = if request.disk.is_some() {
        "console=ttyS0 root=/dev/vda rw"
    } else {
        "console=ttyS0"
    };
    record.cmdline = request.cmdline.clone().unwrap_or_else(|| usual.into());
    build.publish(&record)?;
    Ok(record)
}

/// Refuses a qcow2 with a backing file: the image would be incomplete, and the name could be any file of the
/// host.
fn refuse_backing(disk: &Path) -> Result<(), ImageError> {
    let mut head = [0; 16];
    File::open(disk)
        .and_then(|mut file| file.read_exact(&mut head))
        .map_err(failed("read", disk))?;
    if head[8..16] != [0; 8] {
        let reason = "has a backing file; `qemu-img convert -O qcow2` makes it whole".into();
        return Err(ImageError::File {
            path: disk.into(),
            reason,
        });
    }
    Ok(())
}

/// Copies a file, skipping blocks of zeroes.
fn copy(source: &Path, target: &Path, progress: &mut dyn FnMut(u64)) -> Result<u64, ImageError> {
    use std::os::unix::fs::FileExt;
    let mut from = File::open(source).map_err(failed("read", source))?;
    let to = hostfiles::private::new_file(target).map_err(failed("write", target))?;
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0u64;
    loop {
        let length = from.read(&mut buffer).map_err(failed("read", source))?;
        if length == 0 {
            break;
        }
        for (index, block) in buffer[..length].chunks(64 << 10).enumerate() {
            if block.iter().any(|&byte| byte != 0) {
                let at = done + (index as u64) * (64 << 10);
                to.write_all_at(block, at).map_err(failed("write", target))?;
            }
        }
        done += length as u64;
        progress(done);
    }
    to.set_len(done).map_err(failed("write", target))?;
    Ok(done)
}
