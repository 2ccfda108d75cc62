//! Inputs of the adaptive sharing rule: the host's free memory, and which images other VMs map too. The
//! memory is read from a file that was opened before the sandbox closed. The monitor reports the shared
//! images.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use policy::sharing::{SHORT_PERMILLE, SharingInputs, SharingMode, adaptive};

use super::extents::ImageId;
use crate::launch::{MappedFile, Share};

const PERMILLE: u64 = 1000;
/// Bytes of /proc/meminfo that are read: the needed lines are at its start.
const MEMINFO_BYTES: usize = 1024;

/// Inputs for a VM's images. Created before the sandbox closes, refreshed by the background thread, read by
/// the disks.
pub struct PressureMonitor {
    meminfo: Option<File>,
    available_permille: AtomicU32,
    shared: Vec<AtomicBool>,
    /// The place of each image among the files in the monitor's reports.
    places: Vec<Option<usize>>,
}

impl PressureMonitor {
    /// Opens the source of memory figures; `mapped` is the monitor's first report. Unknown inputs have
    /// harmless values: plenty of memory, and other users.
    pub fn open(images: &[File], mapped: &[MappedFile]) -> Self {
        let place = |image: &File| {
            let image = image.metadata().ok()?;
            let is_it = |known: &MappedFile| (known.device, known.inode) == (image.dev(), image.ino());
            mapped.iter().position(is_it)
        };
        let pressure = Self {
            meminfo: File::open("/proc/meminfo").ok(),
            available_permille: AtomicU32::new(PERMILLE as u32),
            shared: images.iter().map(|_| AtomicBool::new(true)).collect(),
            places: images.iter().map(place).collect(),
        };
        let shared: Vec<_> = mapped.iter().map(|file| file.is_shared).collect();
        pressure.set_shared(&shared);
        pressure.refresh();
        pressure
    }

    /// Reads the memory figures again.
    pub fn refresh(&self) {
        let mut text = [0; MEMINFO_BYTES];
        if let Some(Ok(bytes)) = self.meminfo.as_ref().map(|file| file.read_at(&mut text, 0)) {
            let text = String::from_utf8_lossy(&text[..bytes]);
            if let (Some(total), Some(available)) = (kib(&text, "MemTotal:"), kib(&text, "MemAvailable:")) {
                let permille = available * PERMILLE / total.max(1);
                self.available_permille.store(permille as u32, Ordering::Relaxed);
            }
        }
    }

    /// Takes the monitor's report, in the order of the files of [`PressureMonitor::open`].
    pub fn set_shared(&self, files: &[bool]) {
        for (shared, place) in self.shared.iter().zip(&self.places) {
            if let Some(is_shared) = place.and_then(|place| files.get(place)) {
                shared.store(*is_shared, Ordering::Relaxed);
            }
        }
    }

    /// Returns the mode for reads of an image by a disk with this setting.
    pub fn mode(&self, share: Share, image: ImageId) -> SharingMode {
        match share {
            Share::Never => SharingMode::Remember,
            Share::AtRead => SharingMode::AtRead { run_pages_min: 1 },
            Share::Deferred => SharingMode::Deferred { run_pages_min: 1 },
            Share::Adaptive => adaptive(SharingInputs {
                is_shared: self
                    .shared
                    .get(usize::from(image))
                    .is_some_and(|shared| shared.load(Ordering::Relaxed)),
                available_permille: self.available_permille.load(Ordering::Relaxed),
            }),
        }
    }

    /// Returns whether the host is short of memory.
    pub fn short(&self) -> bool {
        self.available_permille.load(Ordering::Relaxed) < SHORT_PERMILLE
    }

    #[cfg(test)]
    pub(super) fn set_short(&self) {
        self.available_permille
            .store(SHORT_PERMILLE - 1, Ordering::Relaxed);
    }

    /// Returns the inputs for `inspect`.
    pub fn status(&self) -> serde_json::Value {
        let shared: Vec<_> = self
            .shared
            .iter()
            .map(|shared| shared.load(Ordering::Relaxed))
            .collect();
        serde_json::json!({
            "available_permille": self.available_permille.load(Ordering::Relaxed),
            "shared": shared,
        })
    }
}

fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_is_shared_as_the_monitor_last_reported_and_until_then_assumed_shared() {
        let images = [(); 3].map(|()| tempfile::tempfile().unwrap());
        let file = |image: &File, is_shared| {
            let image = image.metadata().unwrap();
            let (device, inode) = (image.dev(), image.ino());
            MappedFile {
                device,
                inode,
                is_shared,
            }
        };
        // The first image is in no report; the order is the monitor's.
        let pressure = PressureMonitor::open(&images, &[file(&images[2], true), file(&images[1], false)]);
        let shared = || pressure.status()["shared"].clone();
        assert_eq!(shared(), serde_json::json!([true, false, true]));
        pressure.set_shared(&[false, true]);
        assert_eq!(shared(), serde_json::json!([true, true, false]));
        // A report that is too short or too long changes nothing else.
        pressure.set_shared(&[true]);
        pressure.set_shared(&[]);
        pressure.set_shared(&[true, false, true, true]);
        assert_eq!(shared(), serde_json::json!([true, false, true]));
    }
}
