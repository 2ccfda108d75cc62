//! Accesses that no kernel makes: random writes to the controllers' registers, and interrupts to any CPU
//! without end. It runs until a write of its own ends it, or the machine is turned off.

use core::sync::atomic::{AtomicBool, Ordering};

use crate::apic::{self, Delivery, To};
use crate::boot::STARTUP_VECTOR;
use crate::storm::Numbers;
use crate::{cpu, cpus};

const X2APIC: u32 = 0x800;
const COMMAND: u32 = 0x830;
const APIC_BASE: u32 = 0x1B;
const TSC_DEADLINE: u32 = 0x6E0;
/// Bytes of `rdmsr` and `wrmsr`.
const ACCESS_BYTES: u64 = 2;

static ON: AtomicBool = AtomicBool::new(false);

/// Makes refused accesses count as done from now on.
pub fn turn_on() {
    ON.store(true, Ordering::Release);
}

/// Whether refused accesses count as done.
pub fn is_on() -> bool {
    ON.load(Ordering::Acquire)
}

/// Lets the interrupted code go on after its `rdmsr` or `wrmsr`.
///
/// # Safety
/// `frame` has the instruction pointer that is returned to.
pub unsafe fn skip(frame: *mut u64) {
    // SAFETY: by the caller.
    unsafe { *frame += ACCESS_BYTES };
}

/// Runs one CPU's part.
pub fn harass(me: usize) -> ! {
    let mut numbers = Numbers::new(cpu::tsc() ^ me as u64);
    loop {
        match numbers.below(16) {
            0..=4 => cpu::write(X2APIC + numbers.below(0x40), any(&mut numbers)),
            5 | 6 => drop(cpu::read(X2APIC + numbers.below(0x100))),
            7 => cpu::write(TSC_DEADLINE, any(&mut numbers)),
            8 => cpu::write(COMMAND, command(&mut numbers)),
            9 if numbers.below(50) == 0 => cpu::write(APIC_BASE, any(&mut numbers)),
            10 if numbers.below(20) == 0 => restart(&mut numbers),
            11 => apic::enable(),
            12 => flood(&mut numbers, To::All),
            13 => flood(&mut numbers, To::Nobody),
            14 => flood(&mut numbers, To::Broadcast),
            _ => cpu::open(),
        }
    }
}

/// A random value: mostly a few bits, occasionally all.
fn any(numbers: &mut Numbers) -> u64 {
    let mut value = 0;
    for _ in 0..numbers.below(4) {
        value |= 1 << numbers.below(64);
    }
    if numbers.below(8) == 0 {
        !value
    } else {
        value | u64::from(numbers.below(256))
    }
}

/// Any delivery except INIT and start-up, to any CPU, whether it exists or not.
fn command(numbers: &mut Numbers) -> u64 {
    const KINDS: [u64; 6] = [0, 1, 2, 3, 4, 7];
    let kind = KINDS[numbers.below(6) as usize] << 8;
    let vector = u64::from(0x20 + numbers.below(0xE0));
    let (shorthand, logical) = (
        u64::from(numbers.below(4)) << 18,
        u64::from(numbers.below(2)) << 11,
    );
    let destination = if numbers.below(2) == 0 {
        u64::from(numbers.below(20))
    } else {
        any(numbers) & 0xFFFF_FFFF
    };
    destination << 32 | shorthand | logical | kind | vector
}

fn flood(numbers: &mut Numbers, to: To) {
    for _ in 0..100 {
        apic::send(Delivery::Fixed, to, 0x30 + numbers.below(0xC0) as u8);
    }
    apic::send(Delivery::Nmi, to, 0);
}

/// Stops any CPU but the first, itself maybe, and starts it, once or twice. The first one would look for
/// firmware, and find none.
fn restart(numbers: &mut Numbers) {
    let others = (cpus() as u32 - 1).max(1);
    let target = To::One(1 + numbers.below(others) as usize);
    apic::send(Delivery::Init, target, 0);
    for _ in 0..1 + numbers.below(2) {
        apic::send(Delivery::Startup, target, STARTUP_VECTOR);
    }
}
