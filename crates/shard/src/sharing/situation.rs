//! What the adaptive rule needs to know: the host's memory, read from a file opened before the sandbox closed, and the users of
//! each image, which the monitor counts.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU32, Ordering};

use policy::sharing::{SHORT_PERMILLE, Situation, Way, adaptive};

use super::extents::ImageId;
use crate::launch::{FileUsers, Share};

const PERMILLE: u64 = 1000;
/// Bytes of /proc/meminfo that are looked at: what is wanted is at its start.
const MEMINFO_BYTES: usize = 1024;

/// The situations of a VM's images. Made before the sandbox closes, refreshed by the background, read by the disks.
pub struct Situations {
    meminfo: Option<File>,
    available_permille: AtomicU32,
    users: Vec<AtomicU32>,
    /// Where the users of each image are among those that the monitor counts.
    counted: Vec<Option<usize>>,
}

impl Situations {
    /// Opens what tells of memory; `users` is what the monitor counted so far. What can't be known is taken to be harmless:
    /// plenty of memory, and other users.
    pub fn open(images: &[File], users: &[FileUsers]) -> Self {
        let place = |image: &File| {
            let image = image.metadata().ok()?;
            let is_it = |known: &FileUsers| (known.device, known.inode) == (image.dev(), image.ino());
            users.iter().position(is_it)
        };
        let situations = Self {
            meminfo: File::open("/proc/meminfo").ok(),
            available_permille: AtomicU32::new(PERMILLE as u32),
            users: images.iter().map(|_| AtomicU32::new(2)).collect(),
            counted: images.iter().map(place).collect(),
        };
        let counts: Vec<_> = users.iter().map(|file| file.users).collect();
        situations.set_users(&counts);
        situations.refresh();
        situations
    }

    /// Reads anew what may have changed.
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

    /// Takes what the monitor has counted, in the order of the files that [`Situations::open`] got.
    pub fn set_users(&self, counts: &[u32]) {
        for (users, place) in self.users.iter().zip(&self.counted) {
            if let Some(counted) = place.and_then(|place| counts.get(place)) {
                users.store(*counted, Ordering::Relaxed);
            }
        }
    }

    /// What is done with reads of an image by a disk that shares so.
    pub fn way(&self, share: Share, image: ImageId) -> Way {
        match share {
            Share::Never => Way::Remember,
            Share::AtRead => Way::AtRead { run_pages_min: 1 },
            Share::Deferred => Way::Deferred { run_pages_min: 1 },
            Share::Adaptive => adaptive(Situation {
                users: self
                    .users
                    .get(usize::from(image))
                    .map_or(0, |users| users.load(Ordering::Relaxed)),
                available_permille: self.available_permille.load(Ordering::Relaxed),
            }),
        }
    }

    /// Whether the host is short of memory.
    pub fn short(&self) -> bool {
        self.available_permille.load(Ordering::Relaxed) < SHORT_PERMILLE
    }

    #[cfg(test)]
    pub(super) fn make_short(&self) {
        self.available_permille
            .store(SHORT_PERMILLE - 1, Ordering::Relaxed);
    }

    /// For `inspect`.
    pub fn status(&self) -> serde_json::Value {
        let users: Vec<_> = self
            .users
            .iter()
            .map(|users| users.load(Ordering::Relaxed))
            .collect();
        serde_json::json!({
            "available_permille": self.available_permille.load(Ordering::Relaxed),
            "users": users,
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
    fn users_of_an_image_are_those_that_the_monitor_counts() {
        let images = [(); 3].map(|()| tempfile::tempfile().unwrap());
        let file = |image: &File, users| {
            let image = image.metadata().unwrap();
            let (device, inode) = (image.dev(), image.ino());
            FileUsers { device, inode, users }
        };
        // Of the first nothing is known; the order is the monitor's.
        let situations = Situations::open(&images, &[file(&images[2], 7), file(&images[1], 1)]);
        let users = || situations.status()["users"].clone();
        assert_eq!(users(), serde_json::json!([2, 1, 7]));
        situations.set_users(&[1, 3]);
        assert_eq!(users(), serde_json::json!([2, 3, 1]));
        // Too few, or too many, change nothing else.
        situations.set_users(&[5]);
        situations.set_users(&[]);
        situations.set_users(&[5, 4, 9, 9]);
        assert_eq!(users(), serde_json::json!([2, 4, 5]));
    }
}
