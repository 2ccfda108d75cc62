//! Random interrupts: each CPU sends random ones to random CPUs, and sends a vector again only when all of it
//! has arrived.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::apic::{self, Delivery, To};
use crate::interrupts::{FIRST_VECTOR, LAST_VECTOR, SEEN, SENT_AT, idle_registers_hold};
use crate::{CPUS_MAX, count, cpu, cpus, serial};

/// Time stamp ticks after which an interrupt counts as lost: some ten seconds.
const LOST_AFTER: u64 = 20_000_000_000;
/// The same limit for a CPU that is behind the others.
pub const LATE_AFTER: u64 = 3 * LOST_AFTER;
const TURNS: u64 = 4000;

/// Interrupts sent to each CPU, by vector. Only a vector's owner writes.
pub static EXPECTED: [[AtomicU32; 256]; CPUS_MAX] = [const { [const { AtomicU32::new(0) }; 256] }; CPUS_MAX];
pub static NMIS_EXPECTED: [AtomicU32; CPUS_MAX] = [const { AtomicU32::new(0) }; CPUS_MAX];
pub static TIMERS_EXPECTED: [AtomicU32; CPUS_MAX] = [const { AtomicU32::new(0) }; CPUS_MAX];
/// Number of checks of the registers. `CHANGED` counts those that failed.
pub static HELD: AtomicU32 = AtomicU32::new(0);
pub static CHANGED: AtomicU32 = AtomicU32::new(0);
/// Timers that did not keep to their setting.
pub static TIMER_WRONG: AtomicU32 = AtomicU32::new(0);
/// NMIs of several senders would merge into one, so one CPU at a time sends them.
static NMI_SENDER: AtomicBool = AtomicBool::new(false);

/// Random numbers of one CPU (xorshift64*).
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as u32 % limit
    }
}

/// A CPU in the midst of a storm.
pub struct Storm {
    me: usize,
    numbers: Numbers,
}

impl Storm {
    pub fn new(me: usize, epoch: u32) -> Self {
        let numbers = Numbers::new(u64::from(epoch) << 8 | me as u64);
        Self { me, numbers }
    }

    /// Sends one random interrupt, and waits for its arrival.
    pub fn sweep(&mut self) {
        let all = (1 << cpus()) - 1;
        let others = all & !(1 << self.me);
        match self.numbers.below(18) {
            0..=5 => {
                let target = self.numbers.below(cpus() as u32) as usize;
                self.volley(To::One(target), 1 << target);
            }
            6 => self.one(To::Others, others),
            7 => self.one(To::All, all),
            8 => self.one(To::Own, 1 << self.me),
            9 => self.own(),
            10 | 11 => {
                let cluster = 1 + self.numbers.below(all);
                self.volley(To::Cluster(cluster), cluster);
            }
            12 => self.one(To::Broadcast, all),
            13 => {
                let cluster = 1 + self.numbers.below(all);
                self.lowest_priority(cluster);
            }
            14 => {
                let target = self.numbers.below(cpus() as u32) as usize;
                match self.numbers.below(3) {
                    0 if others != 0 => self.nmi(To::Others, others),
                    1 => self.nmi(To::One(target), 1 << target),
                    _ => apic::send(Delivery::Fixed, To::Nobody, FIRST_VECTOR),
                }
            }
            15 => self.timer(),
            16 => self.timer_disarmed(),
            _ => self.hold(),
        }
    }

    /// The `index`th of this CPU's vectors.
    fn vector(&self, index: u32) -> u8 {
        FIRST_VECTOR + (index as usize * cpus() + self.me) as u8
    }

    fn vectors() -> u32 {
        (usize::from(LAST_VECTOR - FIRST_VECTOR) + 1) as u32 / cpus() as u32
    }

    /// Sends several different vectors at once.
    fn volley(&mut self, to: To, cpus: u32) {
        let count = 1 + self.numbers.below(Self::vectors());
        let first = self.numbers.below(Self::vectors());
        self.stamp();
        for index in 0..count {
            let vector = self.vector((first + index) % Self::vectors());
            expect(cpus, vector);
            apic::send(Delivery::Fixed, to, vector);
        }
        for index in 0..count {
            let vector = self.vector((first + index) % Self::vectors());
            self.arrival(cpus, vector);
        }
    }

    fn one(&mut self, to: To, cpus: u32) {
        let vector = self.any_vector();
        self.stamp();
        expect(cpus, vector);
        apic::send(Delivery::Fixed, to, vector);
        self.arrival(cpus, vector);
    }

    fn own(&mut self) {
        let vector = self.any_vector();
        expect(1 << self.me, vector);
        apic::send_self(vector);
        self.arrival(1 << self.me, vector);
    }

    /// Sends an interrupt that exactly one of `cpus` must get.
    fn lowest_priority(&mut self, cpus: u32) {
        let vector = self.any_vector();
        let index = usize::from(vector);
        let missing = || {
            each(cpus).fold(u32::MAX, |sum, cpu| {
                let received = SEEN[cpu].received[index].load(Ordering::Acquire);
                sum.wrapping_add(received.wrapping_sub(EXPECTED[cpu][index].load(Ordering::Relaxed)))
            })
        };
        self.stamp();
        apic::send(Delivery::LowestPriority, To::Cluster(cpus), vector);
        wait(
            || missing() == 0,
            || {
                serial::give_up(|line| {
                    let line = line.text(" one of the CPUs was to get an interrupt of lowest priority");
                    line.number("vector", u64::from(vector))
                        .number("from", self.me as u64)
                        .number("cpus", u64::from(cpus))
                        .number("received", u64::from(missing().wrapping_add(1)))
                })
            },
        );
        for cpu in each(cpus) {
            let received = SEEN[cpu].received[index].load(Ordering::Acquire);
            EXPECTED[cpu][index].store(received, Ordering::Relaxed);
        }
    }

    fn nmi(&mut self, to: To, cpus: u32) {
        while NMI_SENDER.swap(true, Ordering::Acquire) {
            cpu::pause();
        }
        each(cpus).for_each(|cpu| count(&NMIS_EXPECTED[cpu]));
        apic::send(Delivery::Nmi, to, 0);
        for cpu in each(cpus) {
            let (seen, expected) = (&SEEN[cpu].nmis, &NMIS_EXPECTED[cpu]);
            let surplus = || {
                seen.load(Ordering::Acquire)
                    .wrapping_sub(expected.load(Ordering::Relaxed)) as i32
            };
            wait(|| surplus() >= 0, || lost("NMI", 2, self.me, cpu, expected, seen));
        }
        NMI_SENDER.store(false, Ordering::Release);
    }

    /// Checks that the timer comes once, not before its time, however often it was set to another time
    /// before; meanwhile the CPU halts.
    fn timer(&mut self) {
        let seen = &SEEN[self.me];
        for _ in 0..self.numbers.below(3) {
            apic::set_timer(cpu::tsc() + (1 << 45) + u64::from(self.numbers.below(1 << 20)));
        }
        let before = seen.timers.load(Ordering::Relaxed);
        let came = || seen.timers.load(Ordering::Relaxed).wrapping_sub(before);
        let deadline = cpu::tsc() + 20_000 + u64::from(self.numbers.below(1_000_000));
        count(&TIMERS_EXPECTED[self.me]);
        seen.deadline.store(deadline, Ordering::Relaxed);
        apic::set_timer(deadline);
        let start = cpu::tsc();
        cpu::close();
        while came() == 0 {
            cpu::halt();
            cpu::close();
            if cpu::since(start) > LOST_AFTER {
                lost(
                    "timer",
                    apic::TIMER_VECTOR,
                    self.me,
                    self.me,
                    &TIMERS_EXPECTED[self.me],
                    &seen.timers,
                );
            }
        }
        cpu::open();
        if came() != 1 || apic::timer() != 0 {
            count(&TIMER_WRONG);
        }
    }

    /// Checks that a timer that was disarmed in time does not come.
    fn timer_disarmed(&mut self) {
        let seen = &SEEN[self.me];
        let before = seen.timers.load(Ordering::Relaxed);
        let deadline = cpu::tsc() + 2_000_000;
        seen.deadline.store(deadline, Ordering::Relaxed);
        apic::set_timer(deadline);
        let armed = apic::timer();
        apic::set_timer(0);
        let disarmed = apic::timer();
        if cpu::tsc() >= deadline {
            // Too late, as happens when another program had this CPU: it may come or not.
            while cpu::tsc() < deadline + 4_000_000 {
                cpu::pause();
            }
            let came = seen.timers.load(Ordering::Relaxed).wrapping_sub(before);
            TIMERS_EXPECTED[self.me].fetch_add(came.min(1), Ordering::Relaxed);
            return;
        }
        while cpu::tsc() < deadline + 500_000 {
            cpu::pause();
        }
        if seen.timers.load(Ordering::Relaxed) != before || armed != deadline || disarmed != 0 {
            count(&TIMER_WRONG);
        }
    }

    /// Checks that registers keep their values during interrupts and moves, and that the time stamp does not
    /// go back.
    fn hold(&mut self) {
        let seed = u64::from(self.numbers.below(1 << 30));
        let start = cpu::tsc();
        count(&HELD);
        if !cpu::registers_hold(TURNS, seed) || !idle_registers_hold(self.me) {
            count(&CHANGED);
        }
        if cpu::tsc() < start {
            count(&SEEN[self.me].backwards);
        }
    }

    fn any_vector(&mut self) -> u8 {
        let index = self.numbers.below(Self::vectors());
        self.vector(index)
    }

    fn stamp(&self) {
        SENT_AT[self.me].store(cpu::tsc(), Ordering::Release);
    }

    fn arrival(&self, cpus: u32, vector: u8) {
        let index = usize::from(vector);
        for cpu in each(cpus) {
            let (seen, expected) = (&SEEN[cpu].received[index], &EXPECTED[cpu][index]);
            wait(
                || seen.load(Ordering::Acquire) == expected.load(Ordering::Relaxed),
                || lost("interrupt", vector, self.me, cpu, expected, seen),
            );
        }
    }
}

fn expect(cpus: u32, vector: u8) {
    each(cpus).for_each(|cpu| count(&EXPECTED[cpu][usize::from(vector)]));
}

/// The CPUs of a mask.
pub fn each(cpus: u32) -> impl Iterator<Item = usize> {
    (0..CPUS_MAX).filter(move |cpu| cpus >> cpu & 1 == 1)
}

/// Waits with interrupts open for an imminent event; calls `late` when it takes too long.
pub fn wait(ready: impl FnMut() -> bool, late: impl FnOnce()) {
    wait_for(LOST_AFTER, ready, late);
}

/// The same as [`wait`], with a limit.
pub fn wait_for(limit: u64, mut ready: impl FnMut() -> bool, late: impl FnOnce()) {
    let start = cpu::tsc();
    while !ready() {
        for _ in 0..50 {
            cpu::pause();
        }
        if cpu::since(start) > limit {
            return late();
        }
    }
}

fn lost(what: &str, vector: u8, from: usize, to: usize, sent: &AtomicU32, received: &AtomicU32) -> ! {
    serial::give_up(|line| {
        let line = line
            .text(" lost or doubled: ")
            .text(what)
            .number("vector", u64::from(vector));
        let line = line.number("from", from as u64).number("to", to as u64);
        let line = line.number("sent", u64::from(sent.load(Ordering::Relaxed)));
        line.number("received", u64::from(received.load(Ordering::Relaxed)))
    })
}
