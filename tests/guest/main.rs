//! A kernel that does nothing but interrupts: all CPUs send each other all kinds of them, and each one is
//! counted.
//!
//! It starts the other CPUs by INIT and start-up interrupts, then goes through *epochs*. In each, all CPUs
//! storm (`storm`) and share memory with each other (`exchange`). Then the first one runs the checks that
//! need quiet (`quiet`) while the others wait. At the end it compares the sent interrupts with the received
//! ones, writes one line of counts that ends with `all well` or `NOT WELL`, and turns the machine off.
//!
//! Of the kernel's command line it reads `storm.cpus=` (as many as the machine has), `storm.sweeps=` for each
//! CPU and epoch, and `storm.epochs=`; with 0 it goes on until `q` is typed on the console. With
//! `storm.hostile=1` it counts nothing, and all CPUs make accesses that no kernel makes (`hostile`). With
//! `storm.enumerate=N` it sends no interrupts except those that start CPUs, and counts the machine's N CPUs
//! (`enumeration`).

#![no_std]
#![no_main]

mod apic;
mod boot;
mod cpu;
mod enumeration;
mod exchange;
mod hostile;
mod interrupts;
mod quiet;
mod runtime;
mod serial;
mod storm;

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use interrupts::{FIRST_VECTOR, SEEN};
use serial::Line;

/// One cluster of logical destinations; CPUs of which most vectors are dealt.
pub const CPUS_MAX: usize = 16;

static CPUS: AtomicU32 = AtomicU32::new(1);
static SWEEPS: AtomicU32 = AtomicU32::new(0);
/// The epoch that CPUs may begin.
static EPOCH: AtomicU32 = AtomicU32::new(0);
/// CPUs that have finished the epoch.
static DONE: AtomicU32 = AtomicU32::new(0);
/// Sweeps in all.
static SWEPT: AtomicU32 = AtomicU32::new(0);
/// How often each CPU has started.
pub static STARTS: [AtomicU32; CPUS_MAX] = [const { AtomicU32::new(0) }; CPUS_MAX];
/// Grows while a CPU waits for an epoch.
pub static HEARTBEATS: [AtomicU32; CPUS_MAX] = [const { AtomicU32::new(0) }; CPUS_MAX];
static FAILED: AtomicBool = AtomicBool::new(false);

/// How many CPUs there are.
pub fn cpus() -> usize {
    CPUS.load(Ordering::Relaxed) as usize
}

/// The CPU that sends this vector.
pub fn owner(vector: u8) -> usize {
    usize::from(vector - FIRST_VECTOR) % cpus()
}

/// A vector of this CPU in a priority class.
pub fn own_vector(cpu: usize, class: u8) -> u8 {
    let first = class << 4;
    first + ((cpu + cpus() - owner(first)) % cpus()) as u8
}

/// Adds one.
pub fn count(counter: &AtomicU32) {
    counter.fetch_add(1, Ordering::AcqRel);
}

#[unsafe(no_mangle)]
extern "C" fn first_cpu(boot_params: usize) -> ! {
    let option = |name: &[u8], otherwise| boot::option(boot_params, name, otherwise);
    CPUS.store(
        option(b"storm.cpus=", 1).clamp(1, CPUS_MAX as u32),
        Ordering::Relaxed,
    );
    SWEEPS.store(option(b"storm.sweeps=", 100), Ordering::Relaxed);
    let epochs = option(b"storm.epochs=", 1);
    boot::lay_trampoline();
    interrupts::prepare();
    begin(0);
    let enumerated = option(b"storm.enumerate=", 0) as usize;
    if enumerated > 0 {
        enumeration::run(enumerated, boot::rsdp(boot_params));
    }
    for cpu in 1..cpus() {
        apic::send(apic::Delivery::Init, apic::To::One(cpu), 0);
        quiet::start_up(cpu, 0);
    }
    drop(Line::new().text("storm begins").number("cpus", cpus() as u64));
    if option(b"storm.hostile=", 0) == 1 {
        hostile::turn_on();
        hostile::harass(0);
    }
    let mut epoch = 0;
    while epochs == 0 || epoch < epochs {
        epoch += 1;
        DONE.store(0, Ordering::Relaxed);
        EPOCH.store(epoch, Ordering::Release);
        sweeps(0, epoch);
        let done = || DONE.load(Ordering::Acquire) as usize == cpus();
        storm::wait_for(storm::LATE_AFTER, done, || late("another CPU is away", 0));
        quiet::priorities(0);
        quiet::restart_all();
        if epochs == 0 && serial::typed(b'q') {
            break;
        }
    }
    report(epoch);
    serial::power_off()
}

#[unsafe(no_mangle)]
extern "C" fn other_cpu(me: usize) -> ! {
    if enumeration::is_on() {
        enumeration::report(me);
    }
    let mut epoch = EPOCH.load(Ordering::Acquire);
    begin(me);
    // A device of the first CPU's host process, from another one.
    if STARTS[me].load(Ordering::Relaxed) == 0 {
        drop(Line::new().text("CPU").number("number", me as u64));
    }
    count(&STARTS[me]);
    cpu::open();
    loop {
        let begun = || {
            count(&HEARTBEATS[me]);
            if hostile::is_on() {
                hostile::harass(me);
            }
            EPOCH.load(Ordering::Acquire) != epoch
        };
        storm::wait_for(storm::LATE_AFTER, begun, || late("the first CPU is away", me));
        epoch = EPOCH.load(Ordering::Acquire);
        sweeps(me, epoch);
    }
}

fn begin(me: usize) {
    interrupts::load(me);
    interrupts::fill_idle_registers(me);
    apic::enable();
    cpu::open();
}

fn sweeps(me: usize, epoch: u32) {
    let mut storm = storm::Storm::new(me, epoch);
    for _ in 0..SWEEPS.load(Ordering::Relaxed) {
        storm.sweep();
        count(&SWEPT);
    }
    exchange::exchange(me, epoch);
    count(&DONE);
}

/// Reports an event that never came, and ends.
pub fn late(what: &str, me: usize) -> ! {
    serial::give_up(|line| {
        let line = line.text(" ").text(what).number("cpu", me as u64);
        line.number("done", u64::from(DONE.load(Ordering::Relaxed)))
    })
}

/// Adds a name and its count to a line. A count other than `wanted` is a failure.
pub fn account(line: Line, name: &str, found: u64, wanted: u64) -> Line {
    if found != wanted {
        FAILED.store(true, Ordering::Relaxed);
    }
    line.number(name, found)
}

/// Whether any count was wrong.
pub fn failed() -> bool {
    FAILED.load(Ordering::Relaxed)
}

fn total(of: impl Fn(usize) -> u32) -> u64 {
    (0..cpus()).map(|cpu| u64::from(of(cpu))).sum()
}

fn report(epochs: u32) {
    cpu::close();
    let get = |counter: &AtomicU32| counter.load(Ordering::Acquire);
    let (mut sent, mut lost, mut doubled) = (0, 0, 0);
    for (seen, expected) in SEEN.iter().zip(&storm::EXPECTED).take(cpus()) {
        for (received, expected) in seen.received.iter().zip(expected) {
            let (received, expected) = (get(received), get(expected));
            sent += u64::from(expected);
            lost += u64::from(expected.saturating_sub(received));
            doubled += u64::from(received.saturating_sub(expected));
        }
    }
    let nmis = total(|cpu| get(&storm::NMIS_EXPECTED[cpu]));
    let timers = total(|cpu| get(&storm::TIMERS_EXPECTED[cpu]));
    let restarts = u64::from(epochs) * (cpus() as u64 - 1);
    let line = Line::new()
        .text("storm ends")
        .number("cpus", cpus() as u64)
        .number("epochs", u64::from(epochs));
    let line = line.number("sweeps", u64::from(get(&SWEPT))).number("sent", sent);
    let line = account(
        line,
        "received",
        total(|cpu| (0..256).map(|v| get(&SEEN[cpu].received[v])).sum()),
        sent,
    );
    let line = account(line, "lost", lost, 0);
    let line = account(line, "doubled", doubled, 0);
    let line = account(line, "disorder", total(|cpu| get(&SEEN[cpu].disorder)), 0);
    let line = account(line, "backwards", total(|cpu| get(&SEEN[cpu].backwards)), 0);
    let line = line.number("nested", total(|cpu| get(&SEEN[cpu].nested)));
    let line = line.number("phantoms", total(|cpu| get(&SEEN[cpu].phantoms)));
    let line = line.number("spurious", total(|cpu| get(&SEEN[cpu].spurious)));
    let line = line.number("nmis_sent", nmis);
    let line = account(line, "nmis", total(|cpu| get(&SEEN[cpu].nmis)), nmis);
    let line = line.number("timers_set", timers);
    let line = account(line, "timers", total(|cpu| get(&SEEN[cpu].timers)), timers);
    let line = line.number("early", total(|cpu| get(&SEEN[cpu].early)));
    let line = account(line, "timers_wrong", u64::from(get(&storm::TIMER_WRONG)), 0);
    let line = line.number("held", u64::from(get(&storm::HELD)));
    let line = account(line, "changed", u64::from(get(&storm::CHANGED)), 0);
    let line = line.number("exchanged", u64::from(get(&exchange::CHECKED)));
    let line = account(line, "wrong", u64::from(get(&exchange::WRONG)), 0);
    let line = account(line, "restarts", u64::from(get(&quiet::RESTARTS)), restarts);
    drop(line.text(if failed() { " NOT WELL" } else { " all well" }));
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo) -> ! {
    let line = info.location().map_or(0, |place| u64::from(place.line()));
    let file = info.location().map_or("", |place| place.file());
    serial::give_up(|said| {
        said.text(" a bug of this kernel in ")
            .text(file)
            .number("line", line)
    })
}
