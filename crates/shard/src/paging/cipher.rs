//! Encryption of pages in the paging file.
//!
//! The key is random, is in this process's memory only, and is gone when the process ends: the file is
//! unreadable afterwards. Each page is sealed by AES-256-GCM (NIST SP 800-38D). The nonce counts the writes.
//! So none is used twice with the key, except for a comparison, whose ciphertext is dropped. The tag is the
//! checksum. Nonce and tag stay in memory ([`Seal`], 24 bytes for each slot). So a page that is damaged, that
//! is another's, or that is an older one of the same slot does not pass.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use dsm::PAGE_LEN;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

/// Length of a tag, bytes.
pub const TAG_BYTES: usize = 16;
const KEY_BYTES: usize = 32;

/// Nonce and checksum of a slot, without which it can't be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seal {
    /// Number of the write.
    pub write: u64,
    /// Tag of the ciphertext.
    pub tag: [u8; TAG_BYTES],
}

/// Seals of all slots. Memory is touched when slots are written.
pub struct SealTable {
    /// As numbers, since only of these the allocator gets zeroed memory instead of writing zeroes.
    seals: Vec<[u64; 3]>,
}

impl SealTable {
    /// Creates the table of `slots` slots that were never written.
    pub fn new(slots: u32) -> Self {
        Self {
            seals: vec![[0; 3]; slots as usize],
        }
    }

    /// Returns the seal of the last write of a slot. A slot of an image has none, and needs none.
    pub fn get(&self, slot: u32) -> Seal {
        let [write, first, second] = self.seals.get(slot as usize).copied().unwrap_or_default();
        let mut tag = [0; TAG_BYTES];
        tag[..8].copy_from_slice(&first.to_le_bytes());
        tag[8..].copy_from_slice(&second.to_le_bytes());
        Seal { write, tag }
    }

    /// Records the seal of a write of a slot.
    pub fn set(&mut self, slot: u32, seal: Seal) {
        let [a, b, c, d, e, f, g, h, second @ ..] = seal.tag;
        let first = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        self.seals[slot as usize] = [seal.write, first, u64::from_le_bytes(second)];
    }
}

/// Error: the bytes of a slot are not those that were written there last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the bytes are not those that were written")]
pub struct Damaged;

/// The key of one shard.
pub struct PageCipher {
    /// At an address that does not change, locked in memory if the host permits it.
    key: Box<LessSafeKey>,
    writes: AtomicU64,
}

impl PageCipher {
    /// Creates a random key. Called before the sandbox closes.
    ///
    /// # Errors
    /// If the host gives no random bytes.
    pub fn new() -> io::Result<Self> {
        let mut bytes = [0; KEY_BYTES];
        let random = |_| io::Error::other("the host gives no random bytes for the key");
        SystemRandom::new().fill(&mut bytes).map_err(random)?;
        let key = UnboundKey::new(&AES_256_GCM, &bytes).map_err(random)?;
        let key = Box::new(LessSafeKey::new(key));
        // SAFETY: a local variable, which is overwritten with any bytes.
        unsafe { std::ptr::write_volatile(&mut bytes, [0; KEY_BYTES]) };
        // Without the right to lock memory, only a host that swaps writes the key to its own disk.
        // SAFETY: changes no content; the range is the box's.
        let _ = unsafe { libc::mlock((&raw const *key).cast(), size_of::<LessSafeKey>()) };
        Ok(Self {
            key,
            writes: AtomicU64::new(0),
        })
    }

    /// Encrypts a page in place, for `slot`.
    ///
    /// # Errors
    /// Never with a page; the library's limit is 64 GiB.
    pub fn seal(&self, slot: u32, page: &mut [u8; PAGE_LEN]) -> io::Result<Seal> {
        // 2^64 writes of 4 KiB do not happen.
        let write = self.writes.fetch_add(1, Ordering::Relaxed);
        let tag = self.tag(slot, write, page)?;
        Ok(Seal { write, tag })
    }

    /// Returns whether a page has the content that was sealed for `slot`. Its bytes are encrypted again with
    /// the nonce of the seal, in `scratch`: the ciphertext is the same, or is used nowhere. Two contents have
    /// the same tag with a probability of 2^-119 at most: the guest does not know the key of the checksum.
    ///
    /// # Errors
    /// As [`PageCipher::seal`].
    pub fn is_sealed(
        &self,
        slot: u32,
        seal: &Seal,
        page: &[u8; PAGE_LEN],
        scratch: &mut [u8; PAGE_LEN],
    ) -> io::Result<bool> {
        scratch.copy_from_slice(page);
        Ok(self.tag(slot, seal.write, scratch)? == seal.tag)
    }

    /// Encrypts a page in place, and returns its tag.
    fn tag(&self, slot: u32, write: u64, page: &mut [u8; PAGE_LEN]) -> io::Result<[u8; TAG_BYTES]> {
        let aad = Aad::from(slot.to_le_bytes());
        let sealed = self.key.seal_in_place_separate_tag(nonce(write), aad, page);
        let tag = sealed.map_err(|_| io::Error::other("the page cannot be encrypted"))?;
        let mut bytes = [0; TAG_BYTES];
        bytes.copy_from_slice(tag.as_ref());
        Ok(bytes)
    }

    /// Decrypts a page of `slot` in place.
    ///
    /// # Errors
    /// [`Damaged`]; the page then has no content.
    pub fn open(&self, slot: u32, seal: &Seal, page: &mut [u8; PAGE_LEN]) -> Result<(), Damaged> {
        let aad = Aad::from(slot.to_le_bytes());
        let opened =
            self.key
                .open_in_place_separate_tag(nonce(seal.write), aad, Tag::from(seal.tag), page, 0..);
        opened.map(drop).map_err(|_| Damaged)
    }
}

fn nonce(write: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[..8].copy_from_slice(&write.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> [u8; PAGE_LEN] {
        std::array::from_fn(|index| (index / 7) as u8)
    }

    #[test]
    fn page_is_unreadable_in_the_file_and_comes_back_whole() {
        let cipher = PageCipher::new().unwrap();
        let (mut first, mut second) = (page(), page());
        let seals = [&mut first, &mut second].map(|page| cipher.seal(5, page).unwrap());
        assert_ne!(first, page());
        assert_ne!(first, second, "the same page is another ciphertext at each write");
        assert_eq!(cipher.open(5, &seals[0], &mut first), Ok(()));
        assert_eq!(first, page());
    }

    #[test]
    fn seals_of_slots_are_kept_apart_and_take_memory_when_they_are_set() {
        let resident = || {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = text.split(' ').nth(1).unwrap().parse().unwrap();
            pages * PAGE_LEN as u64
        };
        let (slots, before) = (1 << 25, resident());
        let mut table = SealTable::new(slots);
        // The table has 768 MiB.
        assert!(
            resident() < before + (200 << 20),
            "the table is written when it is made"
        );
        let cipher = PageCipher::new().unwrap();
        let seals = [0, 1, slots - 1].map(|slot| (slot, cipher.seal(slot, &mut page()).unwrap()));
        seals.iter().for_each(|(slot, seal)| table.set(*slot, *seal));
        for (slot, seal) in seals {
            assert_eq!(table.get(slot), seal);
        }
        assert_eq!(table.get(2), Seal::default());
    }

    #[test]
    fn content_of_a_slot_is_recognized_and_any_other_is_not() {
        let cipher = PageCipher::new().unwrap();
        let mut scratch = [0; PAGE_LEN];
        let seal = cipher.seal(5, &mut page()).unwrap();
        assert!(cipher.is_sealed(5, &seal, &page(), &mut scratch).unwrap());
        for bit in [0, 8 * PAGE_LEN / 2, 8 * PAGE_LEN - 1] {
            let mut changed = page();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(
                !cipher.is_sealed(5, &seal, &changed, &mut scratch).unwrap(),
                "bit {bit}"
            );
        }
        assert!(
            !cipher.is_sealed(6, &seal, &page(), &mut scratch).unwrap(),
            "another slot"
        );
        let newer = cipher.seal(5, &mut [7; PAGE_LEN]).unwrap();
        assert!(
            !cipher.is_sealed(5, &newer, &page(), &mut scratch).unwrap(),
            "a newer write"
        );
    }

    #[test]
    fn damaged_moved_old_and_foreign_pages_do_not_pass() {
        let cipher = PageCipher::new().unwrap();
        let mut sealed = page();
        let seal = cipher.seal(5, &mut sealed).unwrap();
        for bit in [0, 8 * PAGE_LEN / 2, 8 * PAGE_LEN - 1] {
            let mut damaged = sealed;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(cipher.open(5, &seal, &mut damaged), Err(Damaged), "bit {bit}");
        }
        assert_eq!(
            cipher.open(6, &seal, &mut sealed.clone()),
            Err(Damaged),
            "another slot"
        );
        let mut newer = page();
        let newer_seal = cipher.seal(5, &mut newer).unwrap();
        assert_eq!(
            cipher.open(5, &newer_seal, &mut sealed.clone()),
            Err(Damaged),
            "an older write"
        );
        let other = PageCipher::new().unwrap();
        assert_eq!(
            other.open(5, &seal, &mut sealed),
            Err(Damaged),
            "another shard's key"
        );
    }
}
