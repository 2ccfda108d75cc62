//! Handlers of all interrupts: each counts its interrupt, and checks its CPU and its time.
//!
//! Vectors from [`FIRST_VECTOR`] to [`LAST_VECTOR`] are dealt to the CPUs in turn. Only its owner sends a
//! vector, so every count belongs to one sender and one receiver.

use core::arch::{asm, global_asm};
use core::ptr::{addr_of, addr_of_mut};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::{CPUS_MAX, apic, count, cpu, hostile, serial};

/// The lowest vector of storms.
pub const FIRST_VECTOR: u8 = 0x30;
/// The highest vector of storms.
pub const LAST_VECTOR: u8 = 0xEF;
const NMI: u64 = 2;
const GENERAL_PROTECTION: u64 = 13;
const FIRST_INTERRUPT: u64 = 32;
/// Number of kept vectors, in the order in which a CPU took them.
const RECENT: usize = 8;

/// Counts of one CPU.
pub struct Seen {
    /// Interrupts by vector.
    pub received: [AtomicU32; 256],
    /// Interrupts that the controller did not have in service: delivered twice by something else.
    pub phantoms: AtomicU32,
    /// Interrupts that came in the midst of one of the same priority or a higher one.
    pub disorder: AtomicU32,
    /// Interrupts that came, by the time stamp, before they were sent; and steps back of this CPU's own
    /// counter.
    pub backwards: AtomicU32,
    /// Interrupts that came in the midst of another.
    pub nested: AtomicU32,
    pub nmis: AtomicU32,
    pub spurious: AtomicU32,
    pub timers: AtomicU32,
    /// Timers that came before their time.
    pub early: AtomicU32,
    /// Time stamp at which the timer should interrupt.
    pub deadline: AtomicU64,
    /// The last vectors.
    pub recent: [AtomicU32; RECENT],
    pub taken: AtomicU32,
    /// The priority of the interrupt that is being handled.
    class: AtomicU32,
}

impl Seen {
    const fn new() -> Self {
        Self {
            received: [const { AtomicU32::new(0) }; 256],
            phantoms: AtomicU32::new(0),
            disorder: AtomicU32::new(0),
            backwards: AtomicU32::new(0),
            nested: AtomicU32::new(0),
            nmis: AtomicU32::new(0),
            spurious: AtomicU32::new(0),
            timers: AtomicU32::new(0),
            early: AtomicU32::new(0),
            deadline: AtomicU64::new(0),
            recent: [const { AtomicU32::new(0) }; RECENT],
            taken: AtomicU32::new(0),
            class: AtomicU32::new(0),
        }
    }

    /// The vector taken `before` the last one.
    pub fn recent(&self, before: u32) -> u32 {
        let taken = self.taken.load(Ordering::Relaxed);
        self.recent[taken.wrapping_sub(1 + before) as usize % RECENT].load(Ordering::Relaxed)
    }
}

/// The counts of each CPU.
pub static SEEN: [Seen; CPUS_MAX] = [const { Seen::new() }; CPUS_MAX];
/// Time stamp at which each CPU began its current sends.
pub static SENT_AT: [AtomicU64; CPUS_MAX] = [const { AtomicU64::new(0) }; CPUS_MAX];

static NUMBERS: [u64; CPUS_MAX] = {
    let mut numbers = [0; CPUS_MAX];
    let mut cpu = 0;
    while cpu < CPUS_MAX {
        numbers[cpu] = cpu as u64;
        cpu += 1;
    }
    numbers
};

const FS_BASE: u32 = 0xC000_0100;
const GS_BASE: u32 = 0xC000_0101;
/// Registers without a use here, which can hold any address: the base of FS, KERNEL_GS_BASE, LSTAR,
/// SYSENTER's stack and entry.
const IDLE: [u32; 5] = [FS_BASE, 0xC000_0102, 0xC000_0082, 0x175, 0x176];

fn idle_value(cpu: usize) -> u64 {
    0x1234_5000 + ((cpu as u64) << 4)
}

/// Returns this CPU's number.
pub fn me() -> usize {
    let number: u64;
    // SAFETY: `load` has made GS point to this CPU's number.
    unsafe { asm!("mov {}, gs:[0]", out(reg) number, options(nostack, readonly)) };
    number as usize
}

/// Writes values into unused registers that they must keep, whichever host thread runs this CPU.
pub fn fill_idle_registers(me: usize) {
    for (register, value) in IDLE.into_iter().zip(idle_value(me)..) {
        cpu::write(register, value);
    }
    cpu::set_idle_registers(idle_value(me));
    cpu::set_priority(apic::IDLE_PRIORITY);
}

/// Whether these registers have kept their values.
pub fn idle_registers_hold(me: usize) -> bool {
    let kept = IDLE
        .into_iter()
        .zip(idle_value(me)..)
        .all(|(register, value)| cpu::read(register) == value);
    kept && cpu::idle_registers_are(idle_value(me)) && cpu::priority() == apic::IDLE_PRIORITY
}

global_asm!(
    ".text",
    ".balign 16",
    ".global interrupt_entries",
    "interrupt_entries:",
    ".set vector, 0",
    ".rept 256",
    ".balign 16",
    // The CPU has pushed an error code, or gets one here.
    ".if vector != 8 && (vector < 10 || vector > 14) && vector != 17 && vector != 21 && vector != 29 \
     && vector != 30",
    "push 0",
    ".endif",
    ".byte 0x68", // push with 32 bits, so that all are alike
    ".long vector",
    "jmp interrupt_common",
    ".set vector, vector + 1",
    ".endr",
    "interrupt_common:",
    "push rax",
    "push rcx",
    "push rdx",
    "push rbx",
    "push rbp",
    "push rsi",
    "push rdi",
    "push r8",
    "push r9",
    "push r10",
    "push r11",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov rbp, rsp",
    "mov rdi, [rbp + 15 * 8]",
    "lea rsi, [rbp + 17 * 8]",
    "sub rsp, 512",
    "and rsp, -16",
    "fxsave64 [rsp]",
    "cld",
    "call interrupt",
    "fxrstor64 [rsp]",
    "mov rsp, rbp",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop r11",
    "pop r10",
    "pop r9",
    "pop r8",
    "pop rdi",
    "pop rsi",
    "pop rbp",
    "pop rbx",
    "pop rdx",
    "pop rcx",
    "pop rax",
    "add rsp, 16",
    "iretq",
);

unsafe extern "C" {
    static interrupt_entries: u8;
}

/// An interrupt gate (Intel SDM 3A, 7.14.1).
#[derive(Clone, Copy)]
#[repr(C)]
struct Gate {
    low: u64,
    high: u64,
}

#[repr(C, packed)]
struct TablePointer {
    limit: u16,
    base: u64,
}

static mut TABLE: [Gate; 256] = [Gate { low: 0, high: 0 }; 256];

/// Fills the interrupt table. Once, by the first CPU.
pub fn prepare() {
    const CODE: u64 = 0x10;
    const PRESENT_INTERRUPT: u64 = 0x8E;
    for vector in 0..256 {
        let entry = addr_of!(interrupt_entries) as u64 + vector * 16;
        let low = entry & 0xFFFF | CODE << 16 | PRESENT_INTERRUPT << 40 | (entry >> 16 & 0xFFFF) << 48;
        // SAFETY: no other CPU runs yet, and none has loaded the table.
        unsafe {
            (addr_of_mut!(TABLE) as *mut Gate)
                .add(vector as usize)
                .write(Gate {
                    low,
                    high: entry >> 32,
                })
        };
    }
}

/// Makes this CPU number `me`, with the table.
pub fn load(me: usize) {
    cpu::write(GS_BASE, addr_of!(NUMBERS[me]) as u64);
    let pointer = TablePointer {
        limit: (size_of::<[Gate; 256]>() - 1) as u16,
        base: addr_of!(TABLE) as u64,
    };
    // SAFETY: the table is filled and stays.
    unsafe { asm!("lidt [{}]", in(reg) &pointer, options(nostack, readonly)) };
    SEEN[me].class.store(0, Ordering::Relaxed);
}

/// Called by every entry, with interrupts kept out. `frame` has the words that the CPU has pushed, from the
/// instruction pointer on.
#[unsafe(no_mangle)]
extern "C" fn interrupt(vector: u64, frame: *mut u64) {
    if vector == NMI {
        count(&SEEN[me()].nmis);
        return;
    }
    if vector == GENERAL_PROTECTION && hostile::is_on() {
        // SAFETY: the frame is the interrupted code's, which takes an access that is refused for done.
        unsafe { hostile::skip(frame) };
        return;
    }
    if vector < FIRST_INTERRUPT {
        // SAFETY: the instruction pointer, and the error code below it.
        let (code, at) = unsafe { (*frame.sub(1), *frame) };
        serial::give_up(|line| {
            let line = line.text(" an exception").number("vector", vector);
            line.address("code", code).address("at", at)
        });
    }
    let (me, vector) = (me(), vector as u8);
    let seen = &SEEN[me];
    if vector == apic::SPURIOUS_VECTOR {
        count(&seen.spurious);
        return;
    }
    if !apic::is_in_service(vector) {
        count(&seen.phantoms);
        return;
    }
    let before = seen.class.load(Ordering::Relaxed);
    let class = u32::from(vector >> 4);
    if class <= before {
        count(&seen.disorder);
    }
    if before > 0 {
        count(&seen.nested);
    }
    match vector {
        apic::TIMER_VECTOR => timer(seen),
        _ => storm(seen, me, vector, before, class),
    }
    apic::end_of_interrupt();
}

fn timer(seen: &Seen) {
    if cpu::tsc() < seen.deadline.load(Ordering::Relaxed) {
        count(&seen.early);
    }
    count(&seen.timers);
}

fn storm(seen: &Seen, me: usize, vector: u8, before: u32, class: u32) {
    let now = cpu::tsc();
    let sender = crate::owner(vector);
    if sender != me && now < SENT_AT[sender].load(Ordering::Acquire) {
        count(&seen.backwards);
    }
    let taken = seen.taken.load(Ordering::Relaxed);
    seen.recent[taken as usize % RECENT].store(u32::from(vector), Ordering::Relaxed);
    seen.taken.store(taken.wrapping_add(1), Ordering::Relaxed);
    // From now on its owner may send it again; it comes after this one's end.
    seen.received[usize::from(vector)].fetch_add(1, Ordering::AcqRel);
    if vector & 2 != 0 {
        // Higher ones may come in the midst of it.
        seen.class.store(class, Ordering::Relaxed);
        cpu::open();
        for _ in 0..20 {
            cpu::pause();
        }
        cpu::close();
        seen.class.store(before, Ordering::Relaxed);
    }
}
