//! Overlays that persistent private disks left in the data directory: `overlays/VM/DISK.qcow2`.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::stop_first;
use crate::disk::header::Header;
use crate::disk::lock::Share;
use crate::disk::open::{open_locked, resolve};
use crate::disk::{DiskError, holders};

/// The overlays of a data directory.
#[derive(Clone, Debug)]
pub struct Overlays {
    folder: PathBuf,
}

/// An overlay of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Overlay {
    /// Name of the VM.
    pub vm: String,
    /// Number of the disk, from 0; an image's root disk is the first.
    pub disk: u32,
    /// The file.
    pub path: PathBuf,
    /// Its base; unknown if the file is damaged.
    pub base: Option<PathBuf>,
    /// Whether the base exists.
    pub base_is_there: bool,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Space of the file, in bytes.
    pub taken_bytes: u64,
    /// Ids of the processes that use it.
    pub used_by: Vec<u32>,
}

impl Overlays {
    /// Returns the overlays below the data directory `data`.
    pub fn of(data: &Path) -> Self {
        Self {
            folder: data.join("overlays"),
        }
    }

    /// Returns all overlays, by VM and disk.
    pub fn list(&self) -> io::Result<Vec<Overlay>> {
        let mut overlays = Vec::new();
        for vm in names(&self.folder)? {
            for file in names(&self.folder.join(&vm))? {
                let disk = file.strip_suffix(".qcow2").and_then(|number| number.parse().ok());
                if let Some(disk) = disk {
                    let path = self.folder.join(&vm).join(&file);
                    // An overlay that disappears meanwhile is left out.
                    overlays.extend(inspect(vm.clone(), disk, path).ok());
                }
            }
        }
        overlays.sort_by(|a, b| (&a.vm, a.disk).cmp(&(&b.vm, b.disk)));
        Ok(overlays)
    }

    /// Returns the overlays that `VM` or `VM/DISK` names.
    pub fn named(&self, name: &str) -> io::Result<Vec<Overlay>> {
        let (vm, disk) = match name.split_once('/') {
            Some((vm, disk)) => (vm, Some(disk)),
            None => (name, None),
        };
        let mut found = self.list()?;
        found.retain(|overlay| overlay.vm == vm && disk.is_none_or(|disk| overlay.disk.to_string() == disk));
        Ok(found)
    }

    /// Returns the overlays over the file at `base`, except `except`.
    pub fn standing_on(&self, base: &Path, except: &Path) -> io::Result<Vec<Overlay>> {
        let identity = |path: &Path| {
            std::fs::metadata(path)
                .map(|about| (about.dev(), about.ino()))
                .ok()
        };
        let (base, except) = (identity(base), identity(except));
        let mut found = self.list()?;
        found.retain(|overlay| {
            base.is_some()
                && overlay.base.as_deref().and_then(identity) == base
                && identity(&overlay.path) != except
        });
        Ok(found)
    }

    /// Removes an unused overlay, and its VM's directory with the last one.
    pub fn remove(&self, overlay: &Overlay) -> Result<(), DiskError> {
        let path = &overlay.path;
        let failed = DiskError::io(path, "removing it");
        let (_file, _lock) = open_locked(path, true, Share::Exclusive, "").map_err(stop_first)?;
        std::fs::remove_file(path).map_err(failed)?;
        if let Some(folder) = path.parent() {
            // The directory stays if it has other content.
            let _ = std::fs::remove_dir(folder);
        }
        Ok(())
    }
}

fn inspect(vm: String, disk: u32, path: PathBuf) -> io::Result<Overlay> {
    let file = std::fs::File::open(&path)?;
    let taken_bytes = file.metadata()?.blocks() * 512;
    let header = Header::read(&file, false).ok();
    let backing = header.as_ref().and_then(|header| header.backing.as_deref());
    let base = backing.and_then(|backing| resolve(&path, backing).ok());
    Ok(Overlay {
        vm,
        disk,
        base_is_there: base.as_deref().is_some_and(Path::exists),
        base,
        size_bytes: header.map_or(0, |header| header.size),
        taken_bytes,
        used_by: holders(&path)?.into_iter().map(|holder| holder.pid).collect(),
        path,
    })
}

/// Returns the names in a directory, sorted; none if it does not exist.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error),
    };
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    Ok(names)
}
