//! Linux's cost of revoking a right to a page that another CPU may have in its TLB: the kernel's own
//! one-phase change.

use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bench::Outcome;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use crate::patience::poll;
use crate::pinned::{both, one};

const CALLS: u32 = 10_000;
const PAGE_BYTES: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// A page of its own. Reading it is safe at any time; only the thread that protects it writes it.
struct Page(NonNull<AtomicU64>);

// SAFETY: a mapping belongs to no thread, and its one word is an atomic.
unsafe impl Sync for Page {}

impl Page {
    fn new() -> Outcome<Self> {
        let writable = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let page = unsafe { mmap_anonymous(None, PAGE_BYTES, writable, MapFlags::MAP_PRIVATE)? };
        Ok(Self(page.cast()))
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: mapped, readable and aligned as long as this value is there.
        unsafe { self.0.as_ref() }
    }

    fn protect(&self, rights: ProtFlags) -> Outcome<()> {
        // SAFETY: our own mapping, which stays readable; no thread writes while that is not allowed.
        unsafe { mprotect(self.0.cast(), PAGE_BYTES.get(), rights)? };
        Ok(())
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which no reference outlives this value.
        let _ = unsafe { munmap(self.0.cast(), PAGE_BYTES.get()) };
    }
}

/// The time of a call that revokes the right to write, when `touched` has brought the page into the TLBs.
fn measure(page: &Page, mut touched: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    let mut all = Duration::ZERO;
    for number in 0..CALLS {
        page.protect(ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)?;
        page.word().store(number.into(), Ordering::Relaxed);
        touched()?;
        let start = Instant::now();
        page.protect(ProtFlags::PROT_READ)?;
        all += start.elapsed();
    }
    Ok(all.as_nanos() as f64 / f64::from(CALLS))
}

/// The page is only in this CPU's TLB.
pub fn one_cpu() -> Outcome<f64> {
    let page = Page::new()?;
    one(|| measure(&page, || Ok(())))
}

/// The other CPU reads it again and again.
pub fn two_cpus() -> Outcome<f64> {
    let page = Page::new()?;
    let (reads, over) = (AtomicU64::new(0), AtomicBool::new(false));
    both(
        || {
            while !over.load(Ordering::Relaxed) {
                std::hint::black_box(page.word().load(Ordering::Relaxed));
                reads.fetch_add(1, Ordering::Release);
            }
            Ok(())
        },
        || {
            let measured = measure(&page, || {
                let seen = reads.load(Ordering::Acquire);
                // The read in progress may have begun before, so one more is needed.
                poll(|| (reads.load(Ordering::Acquire) > seen + 1).then_some(()))
            });
            over.store(true, Ordering::Relaxed);
            measured
        },
    )
}
