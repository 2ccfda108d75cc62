//! A setting of the host that a test needs to change.

use std::fs;

/// A file below `/sys/kernel/mm` or `/proc/sys` with another word in it until this is dropped.
pub struct Setting {
    path: &'static str,
    before: String,
}

impl Setting {
    /// Lets VMs have transparent huge pages (`pages = "thp"`). Where a host is emulated, each page that a
    /// guest touches first costs a fault of 0.2 to 0.4 ms: a guest that fills its memory is ten times as fast
    /// with huge ones.
    #[track_caller]
    pub fn huge_pages() -> Self {
        Self::new("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "advise")
    }

    /// Writes `word` there.
    #[track_caller]
    pub fn new(path: &'static str, word: &str) -> Self {
        let before = fs::read_to_string(path).expect("a setting of the host");
        // Of several words the host shows all, the present one in brackets.
        let chosen = before
            .split(['[', ']'])
            .nth(1)
            .unwrap_or(before.trim())
            .to_owned();
        fs::write(path, word).expect("root may change it");
        Self { path, before: chosen }
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        // A second error would hide the first.
        let _ = fs::write(self.path, &self.before);
    }
}
