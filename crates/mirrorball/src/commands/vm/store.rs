//! Defined VMs of a user: a VM file for each in the data directory, in `vms/NAME.toml`.
//!
//! They survive a restart of the host. A lock serialises commands that change them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;

use config::VmSpec;
use diskstore::image::data_directory;
use hostfiles::lock::{self, Flock, Share};
use hostfiles::{private, replace_file};
use miette::{IntoDiagnostic, Result, miette};

const EXTENSION: &str = ".toml";
const LOCK: &str = ".lock";

/// The directory.
#[derive(Debug)]
pub struct Store(PathBuf);

/// Defined VMs.
#[derive(Debug, Default)]
pub struct Defined {
    /// The VMs, by name.
    pub vms: BTreeMap<String, VmSpec>,
    /// Unreadable files, one line each: they were edited by hand, or are of another version.
    pub broken: Vec<String>,
}

impl Store {
    /// Opens the user's own store.
    ///
    /// # Errors
    /// If there is no data directory.
    pub fn open() -> Result<Self> {
        let data = data_directory();
        let data = data.ok_or_else(|| {
            miette!(
                help = "set HOME, or MIRRORBALL_DATA to a directory",
                "there is no directory to keep defined VMs in"
            )
        })?;
        // Absolute, because later commands may run in another directory.
        let data = std::path::absolute(data).into_diagnostic()?;
        Ok(Self(data.join("vms")))
    }

    /// Creates the directory, and prevents other changes of definitions until the lock is dropped.
    ///
    /// # Errors
    /// If the directory can't be created or written, or another command holds the lock for 10 s.
    pub fn lock(&self) -> Result<Flock<fs::File>> {
        let path = self.0.join(LOCK);
        private::directories(&self.0)
            .and_then(|()| private::lock_file(&path))
            .and_then(|file| lock::within(&path, file, Share::Exclusive, lock::LIMIT))
            .map_err(|error| miette!("{}: {error}", self.0.display()))
    }

    /// Returns the defined VMs; empty if no VM was ever defined.
    ///
    /// # Errors
    /// If the directory can't be read.
    pub fn read(&self) -> Result<Defined> {
        let mut defined = Defined::default();
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(defined),
            Err(error) => return Err(miette!("{}: {error}", self.0.display())),
        };
        for entry in entries {
            let entry = entry.into_diagnostic()?;
            let file = entry.file_name();
            let Some(name) = file.to_str().and_then(|file| file.strip_suffix(EXTENSION)) else {
                continue;
            };
            match read(&entry.path(), name) {
                Ok(spec) => _ = defined.vms.insert(name.to_owned(), spec),
                Err(why) => defined.broken.push(format!(
                    "{}: {why}; define it anew with `mirrorball vm define FILE.toml`, or remove the file",
                    entry.path().display()
                )),
            }
        }
        defined.broken.sort();
        Ok(defined)
    }

    /// Stores a VM under a name, replacing an earlier one.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn write(&self, name: &str, spec: &VmSpec) -> Result<()> {
        let text = config::text_of(spec).map_err(|error| miette!("{name}: {error}"))?;
        let text = format!("# Kept by `mirrorball vm define`, which replaces this file.\n{text}");
        let path = self.path(name);
        replace_file(&path, private::FILE_MODE, text.as_bytes())
            .map_err(|error| miette!("{}: {error}", path.display()))
    }

    /// Removes a VM.
    ///
    /// # Errors
    /// If there is none of this name, or its file can't be removed.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path(name))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}{EXTENSION}"))
    }
}

fn read(path: &std::path::Path, name: &str) -> Result<VmSpec, String> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    let spec = config::parse(name, &text).map_err(|error| error.to_string())?;
    match &spec.name {
        Some(own) if own == name => Ok(spec),
        _ => Err("its `name` is not the file's".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, more: &str) -> VmSpec {
        config::parse("vm.toml", &format!("name = {name:?}\nimage = \"x\"\n{more}")).unwrap()
    }

    #[test]
    fn definitions_survive_a_round_trip_and_invalid_files_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store(directory.path().join("data/vms"));
        assert!(store.read().unwrap().vms.is_empty());
        let lock = store.lock().unwrap();
        let more = "cpus = 2\nafter = [\"db\"]\nlabels = { team = \"web\" }\n\
                    [[disks]]\npath = \"/d\"\n[[nets]]\nkind = \"user\"\nforward = [\"80:80\"]\n";
        let web = spec("web.1", more);
        store.write("web.1", &web).unwrap();
        store.write("db", &spec("db", "")).unwrap();
        drop(lock);
        let defined = store.read().unwrap();
        assert_eq!(defined.vms.keys().collect::<Vec<_>>(), ["db", "web.1"]);
        let json = |spec: &VmSpec| serde_json::to_value(spec).unwrap();
        assert_eq!(json(&defined.vms["web.1"]), json(&web));
        assert!(defined.broken.is_empty(), "{:?}", defined.broken);
        fs::write(store.path("b"), "name = \"b\"\nimage = \"x\"\nfuture = 1\n").unwrap();
        fs::copy(store.path("db"), store.path("c")).unwrap();
        let defined = store.read().unwrap();
        assert_eq!(defined.vms.len(), 2);
        let [unknown, other] = &defined.broken[..] else {
            panic!("{:?}", defined.broken);
        };
        assert!(
            unknown.contains("/b.toml: ") && unknown.contains("future"),
            "{unknown}"
        );
        assert!(other.contains("/c.toml: ") && other.contains("name"), "{other}");
        store.remove("db").unwrap();
        assert_eq!(store.remove("db").unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
