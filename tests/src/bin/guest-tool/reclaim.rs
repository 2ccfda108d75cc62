//! Linux reclaims a process's pages while its threads use them, each on a CPU of its own.
//!
//! Linux decides by the dirty bit in a page's table entry, which the processor sets, whether a reclaimed page
//! must be kept: a lost bit is a lost write. In turns one thread writes. The other allows pages to be dropped
//! (`MADV_FREE`), and has them reclaimed (`MADV_PAGEOUT`), to swap where they must not be dropped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::thread;

use guest_tests::pattern::mix;

use crate::Fault;
use crate::memory::{PAGE_BYTES, Region};
use crate::pinned::{alarm_after, pin};

/// How often all pages are written while they are reclaimed.
const SWEEPS: u64 = 8;
/// Longer than any storm here: a thread that still runs then waits without success.
const LIMIT_S: u64 = 200;
const THREADS: usize = 2;

struct Storm {
    start: usize,
    pages: usize,
    rounds: u64,
    turn: Barrier,
    /// The round's writer has done its sweeps.
    swept: AtomicBool,
    /// The first error. The threads go on, so that none waits for the other.
    wrong: Mutex<Option<String>>,
}

/// Counts of one thread.
#[derive(Default)]
struct Counts {
    /// Pages that were dropped, as allowed.
    forgotten: u64,
    /// Calls that reclaimed pages while they were written.
    takes: u64,
}

/// Runs `rounds` with `pages`, on CPUs 0 and 1.
pub fn storm(pages: usize, rounds: u64) -> Result<String, Fault> {
    alarm_after(LIMIT_S);
    let region = Region::new(pages * PAGE_BYTES)?;
    let storm = Storm {
        start: region.address(),
        pages,
        rounds,
        turn: Barrier::new(THREADS),
        swept: AtomicBool::new(false),
        wrong: Mutex::new(None),
    };
    let before = swapped_out()?;
    let counts = thread::scope(|scope| {
        let storm = &storm;
        let threads = [0, 1].map(|me| scope.spawn(move || storm.work(me)));
        threads.map(|thread| thread.join().map_err(|_| "a thread panicked"))
    });
    if let Some(wrong) = storm.wrong.into_inner()? {
        return Err(wrong.into());
    }
    let [first, second] = counts;
    let (first, second) = (first?, second?);
    Ok(format!(
        "forgotten={} takes={} swapped={}",
        first.forgotten + second.forgotten,
        first.takes + second.takes,
        swapped_out()? - before
    ))
}

/// Pages that Linux has written to swap since its start.
fn swapped_out() -> Result<u64, Fault> {
    let text = std::fs::read_to_string("/proc/vmstat")?;
    let count = text.lines().find_map(|line| line.strip_prefix("pswpout "));
    Ok(count.ok_or("no pswpout in /proc/vmstat")?.parse()?)
}

impl Storm {
    fn work(&self, me: usize) -> Counts {
        let mut counts = Counts::default();
        self.note(pin(me));
        for round in 0..self.rounds {
            if round % THREADS as u64 == me as u64 {
                self.write_all(round, &mut counts);
            } else {
                self.take_all(round, &mut counts);
            }
        }
        counts
    }

    fn write_all(&self, round: u64, counts: &mut Counts) {
        for page in 0..self.pages {
            self.write(page, mark(round, page, 0));
        }
        self.turn.wait();
        // The other allows all pages to be dropped.
        self.turn.wait();
        for page in (1..self.pages).step_by(2) {
            self.write(page, mark(round, page, 1));
        }
        self.turn.wait();
        // The other reclaims them.
        self.turn.wait();
        counts.forgotten += self.check_taken(round);
        self.turn.wait();
        for sweep in 2..2 + SWEEPS {
            for page in 0..self.pages {
                if sweep > 2 {
                    self.check(page, &[mark(round, page, sweep - 1)]);
                }
                self.write(page, mark(round, page, sweep));
            }
        }
        self.swept.store(true, Ordering::Release);
        self.turn.wait();
        self.turn.wait();
    }

    fn take_all(&self, round: u64, counts: &mut Counts) {
        self.turn.wait();
        self.advise(libc::MADV_FREE);
        self.turn.wait();
        // The other writes to every second page again.
        self.turn.wait();
        self.advise(libc::MADV_PAGEOUT);
        self.turn.wait();
        self.check_taken(round);
        self.swept.store(false, Ordering::Release);
        self.turn.wait();
        while !self.swept.load(Ordering::Acquire) {
            self.advise(libc::MADV_PAGEOUT);
            counts.takes += 1;
        }
        self.turn.wait();
        for page in 0..self.pages {
            self.check(page, &[mark(round, page, SWEEPS + 1)]);
        }
        self.turn.wait();
    }

    /// Checks the pages: one that was written after it was allowed to be dropped has the written value;
    /// another one may be all zeroes. Returns the number of zero pages.
    fn check_taken(&self, round: u64) -> u64 {
        let found = (0..self.pages).map(|page| match page % 2 {
            1 => self.check(page, &[mark(round, page, 1)]),
            _ => self.check(page, &[mark(round, page, 0), 0]),
        });
        found.filter(|word| *word == 0).count() as u64
    }

    /// Checks that a page's first and last word have one of the wanted values, and returns it.
    fn check(&self, page: usize, wanted: &[u64]) -> u64 {
        let [first, last] = self.words(page).map(|word| {
            // SAFETY: `words` gives aligned words of the mapping, which lives as long as the threads; only
            // threads of this process write there, and a word is read whole.
            unsafe { word.read_volatile() }
        });
        if first != last || !wanted.contains(&first) {
            self.note(Err(format!(
                "page {page} has {first:#x} and {last:#x} instead of {wanted:#x?}"
            )));
        }
        first
    }

    fn write(&self, page: usize, value: u64) {
        for word in self.words(page) {
            // SAFETY: as in `check`; one thread writes in each turn.
            unsafe { word.write_volatile(value) };
        }
    }

    /// Addresses of the first word of a page and its last.
    fn words(&self, page: usize) -> [*mut u64; 2] {
        assert!(page < self.pages);
        let start = self.start + page * PAGE_BYTES;
        [start as *mut u64, (start + PAGE_BYTES - 8) as *mut u64]
    }

    fn advise(&self, advice: i32) {
        let bytes = self.pages * PAGE_BYTES;
        // SAFETY: our own mapping; pages that this reclaims are zeroes or come back, and both are read as
        // words only.
        let status = unsafe { libc::madvise(self.start as *mut libc::c_void, bytes, advice) };
        if status != 0 {
            let error = std::io::Error::last_os_error();
            self.note(Err(format!("madvise {advice}: {error}")));
        }
    }

    fn note(&self, what: Result<(), String>) {
        if let Err(wrong) = what {
            let mut first = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(wrong);
        }
    }
}

/// The value that is written to a page, never zero.
fn mark(round: u64, page: usize, step: u64) -> u64 {
    mix(round << 32 | (page as u64) << 8 | step) | 1
}
