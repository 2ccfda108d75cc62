//! Swap of the host on a file.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A swap file in use. Given back when dropped.
pub struct SwapFile {
    file: PathBuf,
    /// The loop device, on a file system whose files the kernel can't swap to.
    device: Option<String>,
}

impl SwapFile {
    /// Writes a swap file, and has the host use it before any other swap. The error is the reason why the
    /// host can't.
    pub fn open(file: &Path, mib: u64) -> Result<Self, String> {
        let fails = |error: std::io::Error| format!("no swap: {}: {error}", file.display());
        let mut written = File::create(file).map_err(fails)?;
        let mut swap = Self {
            file: file.to_owned(),
            device: None,
        };
        let mode = fs::Permissions::from_mode(0o600);
        fs::set_permissions(file, mode).map_err(fails)?;
        // A file with holes can't be swap.
        let zeroes = vec![0; 1 << 20];
        (0..mib)
            .try_for_each(|_| written.write_all(&zeroes))
            .map_err(fails)?;
        written.sync_all().map_err(fails)?;
        let name = file.display().to_string();
        call("mkswap", &[&name])?;
        if swap_on(&name).is_err() {
            let device = call("losetup", &["--find", "--show", &name])?.trim().to_owned();
            swap.device = Some(device.clone());
            swap_on(&device)?;
        }
        Ok(swap)
    }
}

fn swap_on(name: &str) -> Result<String, String> {
    call("swapon", &["--priority", "32767", name])
}

fn call(program: &str, words: &[&str]) -> Result<String, String> {
    let fails = |error: &str| format!("no swap: {program} {}: {}", words.join(" "), error.trim());
    let output = Command::new(program).args(words).output();
    let output = output.map_err(|error| fails(&error.to_string()))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(fails(&String::from_utf8_lossy(&output.stderr))),
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        let name = match &self.device {
            Some(device) => device.clone(),
            None => self.file.display().to_string(),
        };
        let _ = call("swapoff", &[&name]);
        if let Some(device) = &self.device {
            let _ = call("losetup", &["--detach", device]);
        }
        let _ = fs::remove_file(&self.file);
    }
}
