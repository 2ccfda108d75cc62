//! Tests of memory that CPUs share: plain words behind a flag, a lock, locked additions, and neighbours in
//! one line.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use crate::storm::{LATE_AFTER, wait_for};
use crate::{CPUS_MAX, count, cpus, late};

/// Words of a page.
const WORDS: usize = 512;
/// Times that the page goes round all CPUs in an epoch.
const ROUNDS: u32 = 4;
/// Additions of each CPU in an epoch, by each method.
const ADDITIONS: u32 = 40;
/// Words behind the lock, far enough apart for two lines.
const GUARDED: usize = 16;
/// Times in an epoch that the first two CPUs each write their word and then read the other's.
const DUELS: u32 = 20;

/// A value alone in its pages.
#[repr(C, align(4096))]
struct Page<T>(T);

/// Page that the CPUs rewrite in turn.
static RELAY: Page<[AtomicU64; WORDS]> = Page([const { AtomicU64::new(0) }; WORDS]);
/// Number of turns so far, which names the CPU whose turn it is.
static TURN: Page<AtomicU32> = Page(AtomicU32::new(0));
static LOCK: Page<AtomicBool> = Page(AtomicBool::new(false));
static BEHIND_LOCK: Page<[AtomicU32; GUARDED]> = Page([const { AtomicU32::new(0) }; GUARDED]);
static ADDED: Page<AtomicU32> = Page(AtomicU32::new(0));
/// A word of each CPU, beside its neighbours'.
static NEIGHBOURS: Page<[AtomicU32; CPUS_MAX]> = Page([const { AtomicU32::new(0) }; CPUS_MAX]);
/// Words that the two CPUs of a duel write, in pages of their own. `READ` has the value that each has read.
static WRITTEN: [Page<AtomicU32>; 2] = [const { Page(AtomicU32::new(0)) }; 2];
static READ: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
static MET: Page<AtomicU32> = Page(AtomicU32::new(0));

/// Number of checks. `WRONG` counts those that failed.
pub static CHECKED: AtomicU32 = AtomicU32::new(0);
pub static WRONG: AtomicU32 = AtomicU32::new(0);

/// This CPU's part in epoch `epoch`, counted from 1.
pub fn exchange(me: usize, epoch: u32) {
    relay(me, epoch);
    crowd(me);
    duels(me, epoch);
    meet(me);
    if me == 0 {
        verify(epoch);
    }
}

/// Counts a check.
fn check(holds: bool) {
    count(&CHECKED);
    if !holds {
        count(&WRONG);
    }
}

/// Passes a page of plain words round all CPUs; a flag says whose it is.
fn relay(me: usize, epoch: u32) {
    let all = cpus() as u32;
    for round in 0..ROUNDS {
        let turn = ((epoch - 1) * ROUNDS + round) * all + me as u32;
        let is_ours = || TURN.0.load(Ordering::Acquire) == turn;
        wait_for(LATE_AFTER, is_ours, || late("the page does not go round", me));
        let word = |turn: u32, index: usize| u64::from(turn) << 32 | index as u64;
        let are_as_left = |(index, found): (usize, &AtomicU64)| {
            turn == 0 || found.load(Ordering::Relaxed) == word(turn - 1, index)
        };
        check(RELAY.0.iter().enumerate().all(are_as_left));
        for (index, place) in RELAY.0.iter().enumerate() {
            place.store(word(turn, index), Ordering::Relaxed);
        }
        TURN.0.store(turn + 1, Ordering::Release);
    }
}

/// Has all CPUs at once use a lock, a counter, and a line in which each has a word.
fn crowd(me: usize) {
    for _ in 0..ADDITIONS {
        count(&ADDED.0);
        let own = &NEIGHBOURS.0[me];
        own.store(own.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        let take = || {
            let free = LOCK
                .0
                .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
            free.is_ok()
        };
        wait_for(LATE_AFTER, take, || late("a lock is never free", me));
        let before = BEHIND_LOCK.0[0].load(Ordering::Relaxed);
        check(
            BEHIND_LOCK
                .0
                .iter()
                .all(|word| word.load(Ordering::Relaxed) == before),
        );
        for word in &BEHIND_LOCK.0 {
            word.store(before + 1, Ordering::Relaxed);
        }
        LOCK.0.store(false, Ordering::Release);
    }
}

/// Two CPUs write, then each reads the other's word: at least one of them sees the write (Intel SDM 3A,
/// 9.2.3.4 and 9.2.5).
fn duels(me: usize, epoch: u32) {
    for duel in 0..DUELS {
        let number = (epoch - 1) * DUELS + duel + 1;
        meet(me);
        if me < 2 && cpus() > 1 {
            WRITTEN[me].0.store(number, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            READ[me].store(WRITTEN[1 - me].0.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        meet(me);
        if me == 0 && cpus() > 1 {
            check(READ.iter().any(|read| read.load(Ordering::Relaxed) == number));
        }
    }
}

/// Waits until all CPUs are here. Each CPU calls this equally often.
fn meet(me: usize) {
    let all = cpus() as u32;
    let arrived = MET.0.fetch_add(1, Ordering::AcqRel);
    let wanted = (arrived / all + 1) * all;
    let are_all = || MET.0.load(Ordering::Acquire).wrapping_sub(wanted) < u32::MAX / 2;
    wait_for(LATE_AFTER, are_all, || late("not all CPUs meet", me));
}

/// Checks that all additions have arrived.
fn verify(epoch: u32) {
    let each = epoch * ADDITIONS;
    let all = each * cpus() as u32;
    check(ADDED.0.load(Ordering::Relaxed) == all);
    check(
        BEHIND_LOCK
            .0
            .iter()
            .all(|word| word.load(Ordering::Relaxed) == all),
    );
    let neighbours = &NEIGHBOURS.0[..cpus()];
    check(neighbours.iter().all(|word| word.load(Ordering::Relaxed) == each));
}
