//! A directory for one test's files, in memory where the host has such a place; removed with the test.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory that is removed when dropped.
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Makes an empty directory named after `test`.
    pub fn new(test: &str) -> Self {
        let places = [
            PathBuf::from("/run"),
            PathBuf::from("/dev/shm"),
            std::env::temp_dir(),
        ];
        Self::in_one_of(&places, test)
    }

    /// The same where a lab host sees it too, since a lab host has its own `/run` and `/dev`.
    pub fn shared(test: &str) -> Self {
        Self::in_one_of(&[std::env::temp_dir()], test)
    }

    fn in_one_of(places: &[PathBuf], test: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("guest-tests-{test}-{}-{count}", std::process::id());
        let path = places
            .iter()
            .map(|place| place.join(&name))
            .find(|path| fs::create_dir(path).is_ok())
            .expect("one of /run, /dev/shm and the temporary directory is writable");
        Self { path }
    }

    /// Path of the directory, which is removed when this is dropped.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path in it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a file and gives its path.
    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.join(name);
        fs::write(&path, bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        path
    }

    /// Makes a sparse file of this many bytes.
    pub fn sparse(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.write(name, b"");
        let file = fs::OpenOptions::new().write(true).open(&path).expect("just made");
        file.set_len(bytes).expect("a sparse file takes no room");
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A second error would hide the first.
        let _ = fs::remove_dir_all(&self.path);
    }
}
