//! Space budget of a temporary overlay: its own limit, and a reserve of the file system that it shares with
//! others.
//!
//! Overlays of all VMs lie in one directory by default. Each leaves a reserve of that file system free, so
//! that a guest that writes all it can neither fills the host's disk nor takes the last space of the other
//! VMs.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::statfs::fstatfs;

/// Fraction of the file system that is left free, and the maximum bytes of it.
const RESERVE_DIVISOR: u64 = 20;
const RESERVE_MAX: u64 = 1 << 30;
/// Maximum bytes written between two checks of a file system with plenty of space.
const GRANT_MAX: u64 = 4 << 20;
/// Fraction of the free bytes that may be written between two checks.
const GRANT_DIVISOR: u64 = 16;

/// Space budget of an overlay.
pub(super) struct SpaceBudget {
    /// Maximum bytes of its blocks.
    limit: u64,
    used: AtomicU64,
    /// Bytes that may be written before the next check of the file system.
    granted: AtomicU64,
}

impl SpaceBudget {
    /// Creates the budget of an overlay that has `used` bytes of blocks now; `None` means no limit of its
    /// own.
    pub fn new(limit: Option<u64>, used: u64) -> Self {
        Self {
            limit: limit.unwrap_or(u64::MAX),
            used: AtomicU64::new(used),
            granted: AtomicU64::new(0),
        }
    }

    /// Takes `bytes` of the limit, for new blocks of the overlay.
    ///
    /// # Errors
    /// `EFBIG` if the limit has no space for all of them: unlike a full file system, that does not pass.
    pub fn take(&self, bytes: u64) -> io::Result<()> {
        let more = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.limit);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(()),
            Err(_) => Err(io::Error::from_raw_os_error(libc::EFBIG)),
        }
    }

    /// Returns bytes that were taken and not needed.
    pub fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Checks the file system of the file, periodically, for `bytes` of free space.
    ///
    /// # Errors
    /// `ENOSPC` if that would leave less than the reserve.
    pub fn check_file_system(&self, file: &File, bytes: u64) -> io::Result<()> {
        let less = |granted: u64| granted.checked_sub(bytes);
        if self
            .granted
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
            .is_err()
        {
            let (total, available) = host(file)?;
            let full = || io::Error::from_raw_os_error(libc::ENOSPC);
            let granted = grant(total, available, bytes).ok_or_else(full)?;
            self.granted.store(granted, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Returns the size of the file's file system, and the bytes that this user may still take.
fn host(file: &File) -> io::Result<(u64, u64)> {
    let host = fstatfs(file)?;
    let block = u64::try_from(host.block_size()).unwrap_or(0);
    Ok((
        host.blocks().saturating_mul(block),
        host.blocks_available().saturating_mul(block),
    ))
}

/// Decides whether `bytes` may be written, and how many more before the next check. A file system of size 0
/// does not report its space.
fn grant(total: u64, available: u64, bytes: u64) -> Option<u64> {
    if total == 0 {
        return Some(GRANT_MAX);
    }
    let reserve = (total / RESERVE_DIVISOR).min(RESERVE_MAX);
    let left = available.saturating_sub(reserve).checked_sub(bytes)?;
    Some((left / GRANT_DIVISOR).min(GRANT_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_reserve_of_a_twentieth_and_a_gib_at_most_is_left() {
        assert_eq!(grant(100 * GIB, 50 * GIB, 4096), Some(GRANT_MAX));
        assert_eq!(grant(100 * GIB, GIB + 4095, 4096), None);
        assert_eq!(grant(100 * GIB, GIB + 4096, 4096), Some(0));
        assert_eq!(grant(GIB, GIB / 20 + 4095, 4096), None);
        assert_eq!(grant(GIB, GIB / 20 + 16 * 5000 + 4096, 4096), Some(5000));
        assert_eq!(grant(GIB, 0, 4096), None);
        // More than the whole file system has.
        assert_eq!(grant(GIB, GIB, u64::MAX), None);
        // A file system that does not report its size.
        assert_eq!(grant(0, 0, 4096), Some(GRANT_MAX));
    }

    #[test]
    fn limit_holds_and_returned_space_can_be_taken_again() {
        let space = SpaceBudget::new(Some(10_000), 4_000);
        let refused = |result: io::Result<()>| result.unwrap_err().raw_os_error() == Some(libc::EFBIG);
        assert!(refused(space.take(6_001)));
        space.take(6_000).unwrap();
        assert!(refused(space.take(1)));
        assert!(refused(space.take(u64::MAX)));
        space.give_back(500);
        assert!(refused(space.take(501)));
        space.take(500).unwrap();
    }
}
