//! What the adaptive rule needs to know, read from files opened before the sandbox closed.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU32, Ordering};

use policy::sharing::{Situation, Way, adaptive};

use super::extents::ImageId;

const PERMILLE: u64 = 1000;
/// Longest text taken from one of the files.
const TEXT_BYTES_MAX: usize = 1 << 20;

/// The situations of a VM's images. Made before the sandbox closes, refreshed by the background, read by the disks.
pub struct Situations {
    meminfo: Option<File>,
    locks: Option<File>,
    /// Device and inode of each image, as /proc/locks writes them.
    names: Vec<String>,
    available_permille: AtomicU32,
    users: Vec<AtomicU32>,
}

impl Situations {
    /// Opens what tells of memory and of the users of `images`. What can't be opened is taken to be harmless: plenty of
    /// memory, and other users.
    pub fn open(images: &[File]) -> Self {
        let names = images.iter().map(|file| file.metadata().map(|meta| name(&meta)));
        let names: Vec<_> = names.map(Result::unwrap_or_default).collect();
        let situations = Self {
            meminfo: File::open("/proc/meminfo").ok(),
            locks: File::open("/proc/locks").ok(),
            available_permille: AtomicU32::new(PERMILLE as u32),
            users: names.iter().map(|_| AtomicU32::new(2)).collect(),
            names,
        };
        situations.refresh();
        situations
    }

    /// Reads everything anew.
    pub fn refresh(&self) {
        if let Some(text) = self.meminfo.as_ref().and_then(read)
            && let (Some(total), Some(available)) = (kib(&text, "MemTotal:"), kib(&text, "MemAvailable:"))
        {
            let permille = available * PERMILLE / total.max(1);
            self.available_permille.store(permille as u32, Ordering::Relaxed);
        }
        if let Some(text) = self.locks.as_ref().and_then(read) {
            for (name, users) in self.names.iter().zip(&self.users) {
                users.store(holders(&text, name), Ordering::Relaxed);
            }
        }
    }

    /// What the adaptive rule says of an image now.
    pub fn way(&self, image: ImageId) -> Way {
        adaptive(Situation {
            users: self
                .users
                .get(usize::from(image))
                .map_or(0, |users| users.load(Ordering::Relaxed)),
            available_permille: self.available_permille.load(Ordering::Relaxed),
        })
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

/// A file as /proc/locks names it: major and minor in hexadecimal, then the inode.
fn name(meta: &std::fs::Metadata) -> String {
    let (major, minor) = (libc::major(meta.dev()), libc::minor(meta.dev()));
    format!("{major:02x}:{minor:02x}:{}", meta.ino())
}

/// How many open files hold the file `name` shared; each VM on an image holds it once.
fn holders(locks: &str, name: &str) -> u32 {
    let holds = |line: &&str| {
        // "1: FLOCK  ADVISORY  READ 1234 00:1f:567 0 EOF"; a waiting one has "->" after the number.
        let fields: Vec<_> = line.split_whitespace().collect();
        fields.get(1) == Some(&"FLOCK") && fields.get(3) == Some(&"READ") && fields.get(5) == Some(&name)
    };
    u32::try_from(locks.lines().filter(holds).count()).unwrap_or(u32::MAX)
}

fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// The whole text of a file of /proc, from its start.
fn read(file: &File) -> Option<String> {
    let mut text = Vec::new();
    let mut chunk = [0; 4096];
    while text.len() < TEXT_BYTES_MAX {
        match file.read_at(&mut chunk, text.len() as u64) {
            Ok(0) => break,
            Ok(count) => text.extend_from_slice(&chunk[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => (),
            Err(_) => return None,
        }
    }
    String::from_utf8(text).ok()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn holders_are_counted_by_file() {
        let text = "1: FLOCK  ADVISORY  READ 12 00:1f:567 0 EOF\n\
                    1: -> FLOCK  ADVISORY  READ 13 00:1f:567 0 EOF\n\
                    2: FLOCK  ADVISORY  WRITE 12 00:1f:567 0 EOF\n\
                    3: POSIX  ADVISORY  READ 12 00:1f:567 0 EOF\n\
                    4: FLOCK  ADVISORY  READ 14 00:1f:568 0 EOF\n\
                    5: FLOCK  ADVISORY  READ 15 00:1f:567 0 EOF\n";
        assert_eq!(holders(text, "00:1f:567"), 2);
        assert_eq!(holders(text, "08:01:567"), 0);
    }

    #[test]
    fn this_process_is_seen_as_a_holder() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let image = || File::open(file.path()).unwrap();
        let (first, second) = (image(), image());
        for held in [&first, &second] {
            // SAFETY: flock touches no memory.
            assert_eq!(unsafe { libc::flock(held.as_raw_fd(), libc::LOCK_SH) }, 0);
        }
        let situations = Situations::open(&[image()]);
        assert_eq!(situations.status()["users"][0], 2);
    }
}
