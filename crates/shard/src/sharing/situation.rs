//! What the adaptive rule needs to know, read from files opened before the sandbox closed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};

use diskstore::disk::Users;
use policy::sharing::{SHORT_PERMILLE, Situation, Way, adaptive};

use super::extents::ImageId;
use crate::launch::Share;

const PERMILLE: u64 = 1000;
/// Bytes of /proc/meminfo that are looked at: what is wanted is at its start.
const MEMINFO_BYTES: usize = 1024;
/// Refreshes between two counts of users: of images that this VM is alone on, and of others. Counting reads the table of
/// all the host's sockets.
const REFRESHES_ALONE: u32 = 5;
const REFRESHES_SHARED: u32 = 60;

/// The situations of a VM's images. Made before the sandbox closes, refreshed by the background, read by the disks.
pub struct Situations {
    meminfo: Option<File>,
    table: Option<Users>,
    refreshes: AtomicU32,
    available_permille: AtomicU32,
    users: Vec<AtomicU32>,
}

impl Situations {
    /// Opens what tells of memory; `sockets` is an open [`Users::TABLE`]. What can't be known is taken to be harmless:
    /// plenty of memory, and other users.
    pub fn open(images: &[File], sockets: Option<File>) -> Self {
        let table = sockets.and_then(|table| Users::new(table, images).ok());
        let situations = Self {
            meminfo: File::open("/proc/meminfo").ok(),
            table,
            refreshes: AtomicU32::new(0),
            available_permille: AtomicU32::new(PERMILLE as u32),
            users: images.iter().map(|_| AtomicU32::new(2)).collect(),
        };
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
        let alone = self.users.iter().any(|users| users.load(Ordering::Relaxed) < 2);
        let between = if alone { REFRESHES_ALONE } else { REFRESHES_SHARED };
        if self
            .refreshes
            .fetch_add(1, Ordering::Relaxed)
            .is_multiple_of(between)
            && let Some(Ok(counted)) = self.table.as_ref().map(Users::count)
        {
            for (users, counted) in self.users.iter().zip(counted) {
                users.store(counted, Ordering::Relaxed);
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
    use diskstore::disk::Use;

    use super::*;

    #[test]
    fn users_of_an_image_are_counted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let image = || File::open(file.path()).unwrap();
        let _one = Use::announce(&image(), "one");
        let other = Use::announce(&image(), "other");
        let situations = Situations::open(&[image()], File::open(Users::TABLE).ok());
        assert_eq!(situations.status()["users"][0], 2);
        drop(other);
        let situations = Situations::open(&[image()], File::open(Users::TABLE).ok());
        assert_eq!(situations.status()["users"][0], 1);
        (0..REFRESHES_ALONE).for_each(|_| situations.refresh());
        let _again = Use::announce(&image(), "again");
        (0..REFRESHES_ALONE).for_each(|_| situations.refresh());
        assert_eq!(situations.status()["users"][0], 2);
    }
}
