//! Each CPU of the machine starts once and finds its own id, and the ACPI tables list exactly those CPUs.
//!
//! CPUs are started one after another, so that a host with few CPUs is not flooded. Each compares its three
//! ids, reports itself and halts permanently. The tables are those of ACPI 6.5, chapter 5.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::apic::{self, Delivery, To};
use crate::boot::STARTUP_VECTOR;
use crate::serial::{self, Line};
use crate::{account, count, cpu, failed, storm};

/// CPUs with 8-bit ids, without the broadcast id and one that is reserved.
pub const MACHINE_CPUS_MAX: usize = 254;

/// Set before another CPU starts.
static ON: AtomicBool = AtomicBool::new(false);
/// How often a CPU with this x2APIC id started. Ids past the last CPU are counted in `FOREIGN`.
static STARTS: [AtomicU32; MACHINE_CPUS_MAX] = [const { AtomicU32::new(0) }; MACHINE_CPUS_MAX];
/// CPUs whose id is beyond those of the machine.
static FOREIGN: AtomicU32 = AtomicU32::new(0);
/// CPUs whose ids in CPUID and in the x2APIC differ.
static DIFFERENT: AtomicU32 = AtomicU32::new(0);

/// Whether CPUs are enumerated, instead of sending interrupts.
pub fn is_on() -> bool {
    ON.load(Ordering::Acquire)
}

/// Starts `cpus` CPUs, this one included, compares them with the ACPI tables, and turns the machine off.
pub fn run(cpus: usize, rsdp: usize) -> ! {
    ON.store(true, Ordering::Release);
    let cpus = cpus.min(MACHINE_CPUS_MAX);
    drop(Line::new().text("enumeration begins").number("cpus", cpus as u64));
    record(0);
    for (id, starts) in STARTS.iter().enumerate().take(cpus).skip(1) {
        apic::send(Delivery::Init, To::One(id), 0);
        apic::send(Delivery::Startup, To::One(id), STARTUP_VECTOR);
        // As the manual asks (Intel SDM 3A, 9.4.4.1): the second one does nothing to a CPU that runs.
        apic::send(Delivery::Startup, To::One(id), STARTUP_VECTOR);
        storm::wait(
            || starts.load(Ordering::Acquire) != 0,
            || serial::give_up(|line| line.text(" it did not start").number("cpu", id as u64)),
        );
    }
    let tables = Tables::read(rsdp, cpus);
    let get = |counter: &AtomicU32| u64::from(counter.load(Ordering::Acquire));
    let line = Line::new().text("enumeration ends").number("cpus", cpus as u64);
    let started = STARTS.iter().filter(|starts| get(starts) == 1).count();
    let again = STARTS.iter().filter(|starts| get(starts) > 1).count();
    let line = account(line, "started", started as u64, cpus as u64);
    let line = account(line, "again", again as u64, 0);
    let line = account(line, "foreign", get(&FOREIGN), 0);
    let line = account(line, "different", get(&DIFFERENT), 0);
    let line = line.number("tables", tables.count);
    let line = account(line, "checksums_wrong", tables.checksums_wrong, 0);
    let line = account(line, "listed", tables.listed, cpus as u64);
    let line = account(line, "unlisted", tables.unlisted, 0);
    drop(line.text(if failed() { " NOT WELL" } else { " all well" }));
    serial::power_off()
}

/// Runs on another CPU: reports its id and halts.
pub fn report(initial: usize) -> ! {
    apic::enable();
    record(initial);
    cpu::stop()
}

/// Counts a start of the CPU whose initial APIC id is `initial`.
fn record(initial: usize) {
    let id = apic::id();
    if id as usize != initial || cpu::topology_id() != id {
        count(&DIFFERENT);
    }
    match STARTS.get(id as usize) {
        Some(starts) => count(starts),
        None => count(&FOREIGN),
    }
}

/// Counts from the ACPI tables.
struct Tables {
    count: u64,
    checksums_wrong: u64,
    /// Enabled CPUs in the MADT.
    listed: u64,
    /// Ids of started CPUs that the MADT does not list exactly once.
    unlisted: u64,
}

impl Tables {
    fn read(rsdp: usize, cpus: usize) -> Self {
        const XSDT_ADDRESS: usize = 24;
        const RSDP_BYTES: usize = 36;
        const HEADER_BYTES: usize = 36;
        let mut all = Self {
            count: 0,
            checksums_wrong: 0,
            listed: 0,
            unlisted: 0,
        };
        if !matches(rsdp, b"RSD PTR ") {
            serial::give_up(|line| line.text(" no RSDP").address("at", rsdp as u64));
        }
        all.add(rsdp, RSDP_BYTES);
        let xsdt = number(rsdp + XSDT_ADDRESS, 8) as usize;
        let bytes = length(xsdt);
        all.add(xsdt, bytes);
        let mut listings = [0u8; MACHINE_CPUS_MAX];
        for entry in (HEADER_BYTES..bytes).step_by(8) {
            let table = number(xsdt + entry, 8) as usize;
            all.add(table, length(table));
            if matches(table, b"APIC") {
                all.read_madt(table, &mut listings);
            }
        }
        all.unlisted = listings.iter().take(cpus).filter(|times| **times != 1).count() as u64;
        all
    }

    fn add(&mut self, table: usize, bytes: usize) {
        self.count += 1;
        let sum = (0..bytes).fold(0u8, |sum, at| sum.wrapping_add(number(table + at, 1) as u8));
        self.checksums_wrong += u64::from(sum != 0);
    }

    /// Local APICs are entries of type 0, local x2APICs of type 9 (ACPI 6.5, 5.2.12).
    fn read_madt(&mut self, madt: usize, listings: &mut [u8; MACHINE_CPUS_MAX]) {
        const FIRST_ENTRY: usize = 44;
        const ENABLED: u64 = 1;
        let mut at = FIRST_ENTRY;
        while at < length(madt) {
            let entry = madt + at;
            let (id, flags) = match number(entry, 1) {
                0 => (number(entry + 3, 1), number(entry + 4, 4)),
                9 => (number(entry + 4, 4), number(entry + 8, 4)),
                _ => (0, 0),
            };
            if flags & ENABLED != 0 {
                self.listed += 1;
                if let Some(times) = listings.get_mut(id as usize) {
                    *times = times.saturating_add(1);
                }
            }
            let bytes = number(entry + 1, 1) as usize;
            if bytes < 2 {
                serial::give_up(|line| {
                    line.text(" an entry of the MADT without length")
                        .number("at", at as u64)
                });
            }
            at += bytes;
        }
    }
}

/// The length in a table's header.
fn length(table: usize) -> usize {
    number(table + 4, 4) as usize
}

/// A number of 1, 4 or 8 bytes in the ACPI tables, which may lie at any address.
fn number(at: usize, bytes: usize) -> u64 {
    // SAFETY: memory below 4 GiB is mapped one to one, and the tables' own lengths keep the callers inside of
    // them.
    (0..bytes).fold(0, |sum, index| {
        sum | u64::from(unsafe { *((at + index) as *const u8) }) << (8 * index)
    })
}

fn matches(at: usize, signature: &[u8]) -> bool {
    let bytes = signature.iter().enumerate();
    bytes.fold(true, |same, (index, byte)| {
        same && number(at + index, 1) == u64::from(*byte)
    })
}
