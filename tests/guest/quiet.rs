//! Checks that need the other CPUs to wait: priorities of this CPU, and the stop and new start of each of the
//! others.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::apic::{self, Delivery, To};
use crate::boot::STARTUP_VECTOR;
use crate::interrupts::SEEN;
use crate::storm::{EXPECTED, wait};
use crate::{HEARTBEATS, STARTS, count, cpu, cpus, own_vector, serial};

/// Time in which a wrong interrupt would arrive, in turns of the time stamp.
const MOMENT: u64 = 3_000_000;

/// How often other CPUs were stopped and started.
pub static RESTARTS: AtomicU32 = AtomicU32::new(0);

/// Checks that three blocked interrupts come by priority (Intel SDM 3A, 11.8.3), and none below CR8
/// (11.8.3.1).
pub fn priorities(me: usize) {
    let seen = &SEEN[me];
    let [low, middle, high] = [0x3, 0x6, 0xB].map(|class| own_vector(me, class));
    let start = seen.taken.load(Ordering::Relaxed);
    cpu::close();
    for vector in [middle, low, high] {
        count(&EXPECTED[me][usize::from(vector)]);
        apic::send_self(vector);
    }
    rest();
    if seen.taken.load(Ordering::Relaxed) != start {
        wrong("an interrupt came that was kept out", me);
    }
    cpu::open();
    taken(me, start.wrapping_add(3));
    let order = [2, 1, 0].map(|before| seen.recent(before));
    // A handler that allows others may be overtaken, but not in the order in which they begin.
    if order != [high, middle, low].map(u32::from) {
        wrong(
            "interrupts came in another order than that of their priorities",
            me,
        );
    }
    cpu::set_priority(7);
    for vector in [middle, high] {
        count(&EXPECTED[me][usize::from(vector)]);
        apic::send_self(vector);
    }
    taken(me, start.wrapping_add(4));
    rest();
    if seen.taken.load(Ordering::Relaxed) != start.wrapping_add(4) || seen.recent(0) != u32::from(high) {
        wrong("CR8 did not keep an interrupt out", me);
    }
    cpu::set_priority(apic::IDLE_PRIORITY);
    taken(me, start.wrapping_add(5));
    apic::set_priority(7);
    count(&EXPECTED[me][usize::from(middle)]);
    apic::send_self(middle);
    rest();
    if seen.taken.load(Ordering::Relaxed) != start.wrapping_add(5) {
        wrong("the priority's register did not keep an interrupt out", me);
    }
    if cpu::priority() != 7 {
        wrong("CR8 is not what was written to the priority's register", me);
    }
    cpu::set_priority(9);
    if apic::priority() != 9 {
        wrong("the priority's register is not what was written to CR8", me);
    }
    apic::set_priority(apic::IDLE_PRIORITY);
    taken(me, start.wrapping_add(6));
}

/// A CPU that gets INIT stops and takes no interrupt; a start-up interrupt starts it, and does nothing to one
/// that runs.
pub fn restart(target: usize) {
    let beats = || HEARTBEATS[target].load(Ordering::Relaxed);
    let starts = STARTS[target].load(Ordering::Acquire);
    apic::send(Delivery::Init, To::One(target), 0);
    let start = cpu::tsc();
    loop {
        let before = beats();
        rest();
        if beats() == before {
            break;
        }
        if cpu::since(start) > 1000 * MOMENT {
            wrong("INIT did not stop it", target);
        }
    }
    let vector = usize::from(own_vector(0, 0x8));
    let received = SEEN[target].received[vector].load(Ordering::Acquire);
    apic::send(Delivery::Fixed, To::One(target), vector as u8);
    rest();
    start_up(target, starts);
    if SEEN[target].received[vector].load(Ordering::Acquire) != received {
        wrong("it took an interrupt while it was stopped", target);
    }
    apic::send(Delivery::Startup, To::One(target), STARTUP_VECTOR);
    rest();
    if STARTS[target].load(Ordering::Acquire) != starts.wrapping_add(1) {
        wrong("a start-up interrupt started a CPU that runs", target);
    }
    count(&RESTARTS);
}

/// Starts a CPU that has had INIT and `starts` starts before.
pub fn start_up(target: usize, starts: u32) {
    apic::send(Delivery::Startup, To::One(target), STARTUP_VECTOR);
    wait(
        || STARTS[target].load(Ordering::Acquire) == starts.wrapping_add(1),
        || wrong("it did not start", target),
    );
    // It beats only when it is done with its start.
    let before = HEARTBEATS[target].load(Ordering::Relaxed);
    wait(
        || HEARTBEATS[target].load(Ordering::Relaxed) != before,
        || wrong("it started and went no further", target),
    );
}

/// Restarts every CPU except the first, one after another.
pub fn restart_all() {
    (1..cpus()).for_each(restart);
}

fn rest() {
    let start = cpu::tsc();
    while cpu::since(start) < MOMENT {
        cpu::pause();
    }
}

fn taken(me: usize, count: u32) {
    wait(
        || SEEN[me].taken.load(Ordering::Relaxed) == count,
        || wrong("an interrupt to itself was lost or doubled", me),
    );
}

fn wrong(what: &str, cpu: usize) -> ! {
    serial::give_up(|line| line.text(" ").text(what).number("cpu", cpu as u64))
}
