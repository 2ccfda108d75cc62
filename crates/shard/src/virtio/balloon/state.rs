//! State shared by the balloon's front end, its thread and its handle: the target, the actual size, the
//! guest's statistics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use locks::IgnorePoison;
use vmm_sys_util::eventfd::EventFd;

use crate::virtio::Interrupt;

/// Unit of the balloon's sizes, bytes (Virtio 1.2, section 5.5.6), whatever the guest's page size.
pub const UNIT_BYTES: u64 = 4096;

pub struct State {
    pub target_pages: AtomicU32,
    pub actual_pages: AtomicU32,
    pub pages_max: u32,
    pub statistics: Mutex<BTreeMap<u16, u64>>,
    pub interrupt: Mutex<Option<Arc<dyn Interrupt>>>,
    /// Wakes the thread to request new statistics from the guest.
    pub refresh: EventFd,
}

impl State {
    /// Records the size of the balloon that the guest reports.
    pub fn set_actual(&self, pages: u32) {
        let before = self.actual_pages.swap(pages, Ordering::AcqRel);
        if pages < before {
            // A size below the target means that the guest deflated by itself: it ran out of memory.
            self.target_pages.fetch_min(pages, Ordering::AcqRel);
        }
    }
}

/// Handle that sets the balloon's size. Cheap to clone.
#[derive(Clone)]
pub struct BalloonHandle(pub(super) Arc<State>);

impl BalloonHandle {
    /// Requests that the guest release `bytes` in all, at most its whole memory.
    pub fn set_bytes(&self, bytes: u64) {
        let pages = u32::try_from(bytes / UNIT_BYTES)
            .unwrap_or(u32::MAX)
            .min(self.0.pages_max);
        self.0.target_pages.store(pages, Ordering::Release);
        let interrupt = self.0.interrupt.lock().ignore_poison().clone();
        if let Some(interrupt) = interrupt {
            interrupt.signal_config();
        }
    }

    /// Returns the number of bytes that the guest has released.
    pub fn actual_bytes(&self) -> u64 {
        u64::from(self.0.actual_pages.load(Ordering::Acquire)) * UNIT_BYTES
    }
}
