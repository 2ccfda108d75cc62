//! A lab host's initramfs: the running program as `/init`, the programs beside it, the modules, and the
//! parameters of this boot.
//!
//! It lives in a memfd, so nothing is left over however the lab ends, and the token in it can't be read by
//! others.

use std::fs;
use std::io::{Seek, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::LabError;
use crate::boot::BootConfig;
use crate::cpio::Archive;
use crate::error::Context;
use crate::module::Module;
use crate::registry::programs_beside;

/// Makes the archive for one host.
pub fn build(modules: &[Module], boot: &BootConfig) -> Result<fs::File, LabError> {
    let what = || "could not make the lab host's initramfs".to_string();
    let file = fs::File::from(memfd_create(c"lab-initramfs", MFdFlags::empty()).context(what)?);
    let program = PathBuf::from("/proc/self/exe");
    let program = fs::read(&program).on("read", &program)?;
    let beside = programs_beside().map(|(name, path)| Ok((name, fs::read(&path).on("read", &path)?)));
    let beside = beside.collect::<Result<Vec<_>, LabError>>()?;
    let mut archive = Archive::new(std::io::BufWriter::new(file));
    let mut write = || -> std::io::Result<()> {
        for directory in ["dev", "proc", "sys", "root", "modules"] {
            archive.directory(directory)?;
        }
        // The kernel opens it for the first process's standard streams.
        archive.character_device("dev/console", 0o600, 5, 1)?;
        archive.file("init", 0o755, &program)?;
        for (name, program) in &beside {
            archive.file(name, 0o755, program)?;
        }
        for module in modules {
            archive.file(
                &format!("modules/{}.ko", module.name),
                0o644,
                &fs::read(&module.path)?,
            )?;
        }
        archive.file("boot.json", 0o600, &serde_json::to_vec(boot)?)
    };
    write().context(what)?;
    let mut writer = archive.finish().context(what)?;
    writer.flush().context(what)?;
    let mut file = writer
        .into_inner()
        .map_err(std::io::IntoInnerError::into_error)
        .context(what)?;
    file.rewind().context(what)?;
    // QEMU must inherit it.
    nix::fcntl::fcntl(
        file.as_fd(),
        nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty()),
    )
    .context(what)?;
    Ok(file)
}
