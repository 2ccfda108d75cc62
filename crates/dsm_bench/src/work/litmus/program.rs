//! The litmus tests: the accesses of each thread, and the outcomes that they forbid.

use std::arch::asm;

use serde::{Deserialize, Serialize};

/// Values that a thread has read: of the variable that it wrote or read last first.
pub type Seen = [u64; 2];

/// An instance of a test.
#[derive(Clone, Copy, Debug)]
pub struct Instance {
    /// First variable.
    pub x: *mut u64,
    /// Second variable.
    pub y: *mut u64,
    /// Variable that crosses two pages, shared by all instances of a batch.
    pub across: *mut u64,
    /// Values that are not larger are old.
    pub base: u64,
}

/// A litmus test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Test {
    /// Store buffering: each writes one and reads the other.
    Sb,
    /// Store buffering with a fence between.
    SbFenced,
    /// Store buffering with a locked exchange for the write.
    SbLocked,
    /// Message passing: written in this order, read in the other.
    Mp,
    /// Message passing with locked accesses to the flag.
    MpLocked,
    /// Load buffering: each reads one and writes the other.
    Lb,
    /// S: a write after a read, against two writes.
    S,
    /// R: a read after a write, against two writes.
    R,
    /// R with a fence before the read.
    RFenced,
    /// Two writes against two.
    TwoPlusTwoW,
    /// Write to read causality: one writes, one reads that and writes, one reads both.
    Wrc,
    /// Independent reads of independent writes.
    Iriw,
    /// Two reads of one variable, which is written twice.
    CoRr,
    /// Two locked additions to one variable.
    Add,
    /// A write of 8 bytes, read by 4 and 4.
    Halves,
    /// Two writes of 4 bytes, read by 8.
    HalvesBack,
    /// A write that crosses two pages, and a flag.
    Crossing,
}

/// Outcome of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Some order of all accesses explains it.
    Ordinary,
    /// Allowed, but no order of all accesses explains it.
    Relaxed,
    /// Forbidden.
    Forbidden,
}

impl Test {
    /// All tests.
    pub const ALL: [Self; 17] = [
        Self::Sb,
        Self::SbFenced,
        Self::SbLocked,
        Self::Mp,
        Self::MpLocked,
        Self::Lb,
        Self::S,
        Self::R,
        Self::RFenced,
        Self::TwoPlusTwoW,
        Self::Wrc,
        Self::Iriw,
        Self::CoRr,
        Self::Add,
        Self::Halves,
        Self::HalvesBack,
        Self::Crossing,
    ];

    /// Returns the name in the literature.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sb => "SB",
            Self::SbFenced => "SB+mfences",
            Self::SbLocked => "SB+xchgs",
            Self::Mp => "MP",
            Self::MpLocked => "MP+locked",
            Self::Lb => "LB",
            Self::S => "S",
            Self::R => "R",
            Self::RFenced => "R+mfence",
            Self::TwoPlusTwoW => "2+2W",
            Self::Wrc => "WRC",
            Self::Iriw => "IRIW",
            Self::CoRr => "CoRR",
            Self::Add => "lock add",
            Self::Halves => "MP 8 by 4",
            Self::HalvesBack => "MP 4 by 8",
            Self::Crossing => "MP page-crossing",
        }
    }

    /// Returns the number of threads.
    pub fn threads(self) -> u32 {
        match self {
            Self::Iriw => 4,
            Self::Wrc => 3,
            _ => 2,
        }
    }

    /// Runs a thread's accesses. Returns what it read.
    pub(super) fn step(self, thread: u32, instance: &Instance) -> Seen {
        let Instance { x, y, across, base } = *instance;
        let (one, two) = (base + 1, base + 2);
        let half = |value: u64| value | value << 32;
        let [low, high] = [x.cast::<u32>(), x.cast::<u32>().wrapping_add(1)];
        // SAFETY: the variables are words of the shared memory, only ever used by these accesses: other
        // threads write them at the same time, and any value may be read.
        unsafe {
            match (self, thread) {
                (Self::Sb, _) => {
                    let (mine, others) = if thread == 0 { (x, y) } else { (y, x) };
                    store(mine, one);
                    [load(others), 0]
                }
                (Self::SbFenced, _) => {
                    let (mine, others) = if thread == 0 { (x, y) } else { (y, x) };
                    store(mine, one);
                    fence();
                    [load(others), 0]
                }
                (Self::SbLocked, _) => {
                    let (mine, others) = if thread == 0 { (x, y) } else { (y, x) };
                    exchange(mine, one);
                    [load(others), 0]
                }
                (Self::Mp, 0) => {
                    store(x, one);
                    store(y, one);
                    [0, 0]
                }
                (Self::Mp, _) => {
                    let flag = load(y);
                    [flag, load(x)]
                }
                (Self::MpLocked, 0) => {
                    store(x, one);
                    exchange(y, one);
                    [0, 0]
                }
                (Self::MpLocked, _) => {
                    let flag = add(y, 0);
                    [flag, load(x)]
                }
                (Self::Lb, _) => {
                    let (mine, others) = if thread == 0 { (y, x) } else { (x, y) };
                    let read = load(others);
                    store(mine, one);
                    [read, 0]
                }
                (Self::S, 0) => {
                    store(x, two);
                    store(y, one);
                    [0, 0]
                }
                (Self::S, _) => {
                    let read = load(y);
                    store(x, one);
                    [read, 0]
                }
                (Self::R | Self::RFenced, 0) => {
                    store(x, one);
                    store(y, one);
                    [0, 0]
                }
                (Self::R | Self::RFenced, _) => {
                    store(y, two);
                    if self == Self::RFenced {
                        fence();
                    }
                    [load(x), 0]
                }
                (Self::TwoPlusTwoW, _) => {
                    let (first, second) = if thread == 0 { (x, y) } else { (y, x) };
                    store(first, one);
                    store(second, two);
                    [0, 0]
                }
                (Self::Wrc, 0) => {
                    store(x, one);
                    [0, 0]
                }
                (Self::Wrc, 1) => {
                    let read = load(x);
                    store(y, one);
                    [read, 0]
                }
                (Self::Wrc, _) => {
                    let flag = load(y);
                    [flag, load(x)]
                }
                (Self::Iriw, 0) => {
                    store(x, one);
                    [0, 0]
                }
                (Self::Iriw, 1) => {
                    store(y, one);
                    [0, 0]
                }
                (Self::Iriw, _) => {
                    let (first, second) = if thread == 2 { (x, y) } else { (y, x) };
                    let read = load(first);
                    [read, load(second)]
                }
                (Self::CoRr, 0) => {
                    store(x, one);
                    store(x, two);
                    [0, 0]
                }
                (Self::CoRr, _) => {
                    let read = load(x);
                    [read, load(x)]
                }
                (Self::Add, _) => [add(x, 1), 0],
                (Self::Halves, 0) => {
                    store(x, half(one));
                    [0, 0]
                }
                (Self::Halves, _) => {
                    let read = load_half(high);
                    [read, load_half(low)]
                }
                (Self::HalvesBack, 0) => {
                    store_half(low, one);
                    store_half(high, one);
                    [0, 0]
                }
                (Self::HalvesBack, _) => [load(x), 0],
                (Self::Crossing, 0) => {
                    store(across, half(one));
                    store(y, one);
                    [0, 0]
                }
                (Self::Crossing, _) => {
                    let flag = load(y);
                    [flag, load(across)]
                }
            }
        }
    }

    /// Classifies the threads' reads and the variables' final values.
    pub(super) fn classify(self, seen: &[Seen], last: Seen, base: u64) -> Outcome {
        let new = |value: u64| value.saturating_sub(base);
        let [x_last, y_last] = last.map(new);
        let read = |thread: usize, which: usize| new(seen[thread][which]);
        let forbidden_if = |forbidden: bool| {
            if forbidden {
                Outcome::Forbidden
            } else {
                Outcome::Ordinary
            }
        };
        let relaxed_if = |relaxed: bool| {
            if relaxed {
                Outcome::Relaxed
            } else {
                Outcome::Ordinary
            }
        };
        let [low, high] = [|value: u64| value & 0xffff_ffff, |value: u64| value >> 32];
        if self.has_lost(seen, last, base) {
            return Outcome::Forbidden;
        }
        match self {
            Self::Sb => relaxed_if(read(0, 0) == 0 && read(1, 0) == 0),
            Self::SbFenced | Self::SbLocked => forbidden_if(read(0, 0) == 0 && read(1, 0) == 0),
            Self::Mp | Self::MpLocked => forbidden_if(read(1, 0) == 1 && read(1, 1) == 0),
            Self::Lb => forbidden_if(read(0, 0) == 1 && read(1, 0) == 1),
            Self::S => forbidden_if(read(1, 0) == 1 && x_last == 2),
            Self::R => relaxed_if(y_last == 2 && read(1, 0) == 0),
            Self::RFenced => forbidden_if(y_last == 2 && read(1, 0) == 0),
            Self::TwoPlusTwoW => forbidden_if(x_last == 1 && y_last == 1),
            Self::Wrc => forbidden_if(read(1, 0) == 1 && read(2, 0) == 1 && read(2, 1) == 0),
            Self::Iriw => {
                let only_first = |thread| read(thread, 0) == 1 && read(thread, 1) == 0;
                forbidden_if(only_first(2) && only_first(3))
            }
            Self::CoRr => forbidden_if(read(1, 0) > read(1, 1)),
            Self::Add => forbidden_if(seen[0][0] == seen[1][0]),
            Self::Halves => forbidden_if(new(seen[1][0]) == 1 && new(seen[1][1]) == 0),
            Self::HalvesBack => {
                let value = seen[1][0];
                forbidden_if(new(high(value)) == 1 && new(low(value)) == 0)
            }
            Self::Crossing => {
                let (flag, value) = (read(1, 0), seen[1][1]);
                let is_old = new(low(value)) == 0 || new(high(value)) == 0;
                match (flag == 1 && is_old, low(value) == high(value)) {
                    (true, _) => Outcome::Forbidden,
                    (false, same) => relaxed_if(!same),
                }
            }
        }
    }
}

impl Test {
    /// Returns whether a variable's final value is none that a write left there: a write was lost.
    fn has_lost(self, seen: &[Seen], last: Seen, base: u64) -> bool {
        let (one, either) = (base + 1, base + 1..=base + 2);
        let [x, y] = last;
        match self {
            Self::Sb
            | Self::SbFenced
            | Self::SbLocked
            | Self::Mp
            | Self::MpLocked
            | Self::Lb
            | Self::Wrc
            | Self::Iriw => x != one || y != one,
            Self::S => !either.contains(&x) || y != one,
            Self::R | Self::RFenced => x != one || !either.contains(&y),
            Self::TwoPlusTwoW => !either.contains(&x) || !either.contains(&y),
            Self::CoRr => x != base + 2,
            Self::Add => x != seen[0][0].max(seen[1][0]) + 1,
            Self::Halves | Self::HalvesBack => x != (one | one << 32),
            Self::Crossing => y != one,
        }
    }
}

impl Instance {
    /// Returns the variables' final values.
    pub(super) fn last(&self) -> Seen {
        // SAFETY: as in `step`.
        unsafe { [load(self.x), load(self.y)] }
    }
}

// The accesses are written as instructions: neither the compiler nor a library may join, split or move them.

unsafe fn load(from: *const u64) -> u64 {
    let value;
    // SAFETY: the caller's address is mapped.
    unsafe { asm!("mov {}, [{}]", out(reg) value, in(reg) from, options(nostack, preserves_flags)) };
    value
}

unsafe fn store(to: *mut u64, value: u64) {
    // SAFETY: the caller's address is mapped, and may be written.
    unsafe { asm!("mov [{}], {}", in(reg) to, in(reg) value, options(nostack, preserves_flags)) };
}

unsafe fn load_half(from: *const u32) -> u64 {
    let value: u64;
    // SAFETY: the caller's address is mapped.
    unsafe { asm!("mov {:e}, [{}]", out(reg) value, in(reg) from, options(nostack, preserves_flags)) };
    value
}

unsafe fn store_half(to: *mut u32, value: u64) {
    // SAFETY: the caller's address is mapped, and may be written.
    unsafe { asm!("mov [{}], {:e}", in(reg) to, in(reg) value, options(nostack, preserves_flags)) };
}

unsafe fn exchange(to: *mut u64, value: u64) -> u64 {
    let mut value = value;
    // SAFETY: the caller's address is mapped, and may be written.
    unsafe { asm!("xchg [{}], {}", in(reg) to, inout(reg) value, options(nostack, preserves_flags)) };
    value
}

unsafe fn add(to: *mut u64, value: u64) -> u64 {
    let mut value = value;
    // SAFETY: the caller's address is mapped, and may be written.
    unsafe { asm!("lock xadd [{}], {}", in(reg) to, inout(reg) value, options(nostack)) };
    value
}

fn fence() {
    // SAFETY: orders accesses, and nothing else.
    unsafe { asm!("mfence", options(nostack, preserves_flags)) };
}
