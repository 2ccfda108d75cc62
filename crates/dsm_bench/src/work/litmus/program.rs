//! The litmus tests: the accesses of each thread, and the outcomes that they forbid.

use serde::{Deserialize, Serialize};

use super::variable::{Variable, fence};

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
    /// x86's memory order has no execution with it.
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
        let [x, y, across] = instance.variables();
        let (mine, others) = if thread == 0 { (x, y) } else { (y, x) };
        let (one, two) = (instance.base + 1, instance.base + 2);
        let twice = |value: u64| value | value << 32;
        let [low, high] = x.halves();
        match (self, thread) {
            (Self::Sb, _) => write_and_read((mine, one), others),
            (Self::SbFenced, _) => {
                mine.store(one);
                fence();
                [others.load(), 0]
            }
            (Self::SbLocked, _) => {
                mine.exchange(one);
                [others.load(), 0]
            }
            (Self::Mp, 0) => write_both((x, one), (y, one)),
            (Self::Mp, _) => read_both(y, x),
            (Self::MpLocked, 0) => {
                x.store(one);
                y.exchange(one);
                [0, 0]
            }
            (Self::MpLocked, _) => {
                let flag = y.add(0);
                [flag, x.load()]
            }
            (Self::Lb, _) => read_and_write(mine, (others, one)),
            (Self::S, 0) => write_both((x, two), (y, one)),
            (Self::S, _) => read_and_write(y, (x, one)),
            (Self::R | Self::RFenced, 0) => write_both((x, one), (y, one)),
            (Self::R, _) => write_and_read((y, two), x),
            (Self::RFenced, _) => {
                y.store(two);
                fence();
                [x.load(), 0]
            }
            (Self::TwoPlusTwoW, _) => write_both((mine, one), (others, two)),
            (Self::Wrc, 0) => write(x, one),
            (Self::Wrc, 1) => read_and_write(x, (y, one)),
            (Self::Wrc, _) => read_both(y, x),
            (Self::Iriw, 0) => write(x, one),
            (Self::Iriw, 1) => write(y, one),
            (Self::Iriw, 2) => read_both(x, y),
            (Self::Iriw, _) => read_both(y, x),
            (Self::CoRr, 0) => write_both((x, one), (x, two)),
            (Self::CoRr, _) => read_both(x, x),
            (Self::Add, _) => [x.add(1), 0],
            (Self::Halves, 0) => write(x, twice(one)),
            (Self::Halves, _) => {
                let read = high.load();
                [read, low.load()]
            }
            (Self::HalvesBack, 0) => {
                low.store(one);
                high.store(one);
                [0, 0]
            }
            (Self::HalvesBack, _) => [x.load(), 0],
            (Self::Crossing, 0) => write_both((across, twice(one)), (y, one)),
            (Self::Crossing, _) => read_both(y, across),
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
    /// Returns the variables: `x`, `y` and `across`.
    fn variables(&self) -> [Variable; 3] {
        // SAFETY: they are words of the shared memory, which is mapped and writable while a test runs, and
        // which no other code uses meanwhile.
        [self.x, self.y, self.across].map(|word| unsafe { Variable::new(word) })
    }

    /// Returns the variables' final values.
    pub(super) fn last(&self) -> Seen {
        let [x, y, _] = self.variables();
        read_both(x, y)
    }
}

/// A write of a value to a variable.
type Write = (Variable, u64);

#[inline(always)]
fn write(to: Variable, value: u64) -> Seen {
    to.store(value);
    [0, 0]
}

#[inline(always)]
fn write_both(first: Write, second: Write) -> Seen {
    first.0.store(first.1);
    second.0.store(second.1);
    [0, 0]
}

#[inline(always)]
fn write_and_read((to, value): Write, from: Variable) -> Seen {
    to.store(value);
    [from.load(), 0]
}

#[inline(always)]
fn read_and_write(from: Variable, (to, value): Write) -> Seen {
    let read = from.load();
    to.store(value);
    [read, 0]
}

#[inline(always)]
fn read_both(first: Variable, second: Variable) -> Seen {
    let read = first.load();
    [read, second.load()]
}
