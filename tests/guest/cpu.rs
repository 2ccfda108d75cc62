//! Instructions of the processor that Rust has no function for.

use core::arch::asm;

/// Reads a model-specific register.
pub fn read(register: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the callers name registers that every CPU of these guests has; reading them changes nothing.
    unsafe { asm!("rdmsr", in("ecx") register, out("eax") low, out("edx") high, options(nostack)) };
    u64::from(high) << 32 | u64::from(low)
}

/// Writes a model-specific register.
pub fn write(register: u32, value: u64) {
    let (low, high) = (value as u32, (value >> 32) as u32);
    // SAFETY: as above; the caller writes only what it wants of its own CPU. The instruction is a barrier for
    // the compiler.
    unsafe { asm!("wrmsr", in("ecx") register, in("eax") low, in("edx") high, options(nostack)) };
}

/// The time stamp, read after all earlier reads.
pub fn tsc() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reads a counter.
    unsafe { asm!("lfence", "rdtsc", out("eax") low, out("edx") high, options(nostack)) };
    u64::from(high) << 32 | u64::from(low)
}

/// Ticks since then; none if the counter has gone back.
pub fn since(start: u64) -> u64 {
    tsc().saturating_sub(start)
}

/// Writes a byte to a port.
pub fn out(port: u16, value: u8) {
    // SAFETY: the ports here are the serial line's and the power register's.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nostack)) };
}

/// Reads a byte from a port.
pub fn input(port: u16) -> u8 {
    let value;
    // SAFETY: as above.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nostack)) };
    value
}

/// Lets interrupts in.
pub fn open() {
    // SAFETY: the interrupt table is loaded before the first call, and all that handlers share is atomic.
    unsafe { asm!("sti", options(nostack)) };
}

/// Keeps interrupts out.
pub fn close() {
    // SAFETY: delays interrupts.
    unsafe { asm!("cli", options(nostack)) };
}

/// Lets interrupts in and halts until one has come: none can come between the two.
pub fn halt() {
    // SAFETY: as `open`.
    unsafe { asm!("sti", "hlt", options(nostack)) };
}

/// Halts permanently, except for NMI, INIT and SMI.
pub fn stop() -> ! {
    loop {
        // SAFETY: nothing goes on after it.
        unsafe { asm!("cli", "hlt", options(nostack)) };
    }
}

/// The x2APIC id that CPUID has for this CPU (leaf 0xB).
pub fn topology_id() -> u32 {
    let id;
    // SAFETY: CPUID changes four registers; the compiler keeps RBX for itself.
    unsafe {
        asm!(
            "push rbx", "cpuid", "pop rbx",
            inout("eax") 0xB => _, inout("ecx") 0 => _, out("edx") id
        )
    };
    id
}

/// Pauses for a moment.
pub fn pause() {
    core::hint::spin_loop();
}

/// Makes all earlier writes visible before later accesses (Intel SDM 3A, 11.12.3: writes to x2APIC registers
/// don't wait).
pub fn fence() {
    // SAFETY: orders memory.
    unsafe { asm!("mfence", "lfence", options(nostack)) };
}

/// Reads CR3: the guest-physical address of the root of the page tables, with its flags.
pub fn page_tables() -> u64 {
    let value;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr3", out(reg) value, options(nostack)) };
    value
}

/// CR8: interrupts of this priority and those below wait.
pub fn set_priority(class: u64) {
    // SAFETY: delays interrupts.
    unsafe { asm!("mov cr8, {}", in(reg) class, options(nostack)) };
}

/// The value of CR8.
pub fn priority() -> u64 {
    let value;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr8", out(reg) value, options(nostack)) };
    value
}

/// Writes CR2 and DR0 to DR3, which nothing here uses, so that they keep the value.
pub fn set_idle_registers(value: u64) {
    // SAFETY: CR2 has a meaning in page faults only, DR0 to DR3 only if DR7 enables them.
    unsafe {
        asm!("mov cr2, {0}", "mov dr0, {0}", "mov dr1, {1}", "mov dr2, {2}", "mov dr3, {3}",
            in(reg) value, in(reg) value + 1, in(reg) value + 2, in(reg) value + 3, options(nostack));
    }
}

/// Whether these registers have kept the value.
pub fn idle_registers_are(value: u64) -> bool {
    let (a, b, c, d, e): (u64, u64, u64, u64, u64);
    // SAFETY: reads registers.
    unsafe {
        asm!("mov {}, cr2", "mov {}, dr0", "mov {}, dr1", "mov {}, dr2", "mov {}, dr3",
            out(reg) a, out(reg) b, out(reg) c, out(reg) d, out(reg) e, options(nostack));
    }
    [a, b, c, d, e] == [value, value, value + 1, value + 2, value + 3]
}

/// Fills general and SSE registers, waits for `turns`, and returns whether all have kept their values.
pub fn registers_hold(turns: u64, seed: u64) -> bool {
    let mut words = [0u64; 32];
    for (index, word) in words.iter_mut().enumerate() {
        *word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (index as u64) << 56;
    }
    let mut kept = [0u64; 34];
    // SAFETY: reads `words`, writes `kept`, both as large as is used; every register used is declared.
    unsafe {
        asm!(
            "movups xmm0, [rsi]", "movups xmm1, [rsi + 16]", "movups xmm2, [rsi + 32]",
            "movups xmm3, [rsi + 48]", "movups xmm4, [rsi + 64]", "movups xmm5, [rsi + 80]",
            "movups xmm6, [rsi + 96]", "movups xmm7, [rsi + 112]",
            "movups xmm8, [rsi + 128]", "movups xmm9, [rsi + 144]", "movups xmm10, [rsi + 160]",
            "movups xmm11, [rsi + 176]", "movups xmm12, [rsi + 192]", "movups xmm13, [rsi + 208]",
            "movups xmm14, [rsi + 224]", "movups xmm15, [rsi + 240]",
            "mov r8, rdx", "lea r9, [r8 + 1]", "lea r10, [r9 + 1]", "lea r11, [r10 + 1]",
            "lea r12, [r11 + 1]",
            "lea r13, [r12 + 1]", "lea r14, [r13 + 1]", "lea r15, [r14 + 1]",
            "2:", "pause", "dec rcx", "jnz 2b",
            "movups [rdi], xmm0", "movups [rdi + 16], xmm1", "movups [rdi + 32], xmm2",
            "movups [rdi + 48], xmm3", "movups [rdi + 64], xmm4", "movups [rdi + 80], xmm5",
            "movups [rdi + 96], xmm6", "movups [rdi + 112], xmm7",
            "movups [rdi + 128], xmm8", "movups [rdi + 144], xmm9", "movups [rdi + 160], xmm10",
            "movups [rdi + 176], xmm11", "movups [rdi + 192], xmm12", "movups [rdi + 208], xmm13",
            "movups [rdi + 224], xmm14", "movups [rdi + 240], xmm15",
            "add r8, r9", "add r8, r10", "add r8, r11", "add r8, r12", "add r8, r13", "add r8, r14",
            "add r8, r15",
            "mov [rdi + 256], r8", "mov [rdi + 264], rdx",
            in("rsi") words.as_ptr(), in("rdi") kept.as_mut_ptr(), inout("rcx") turns => _, in("rdx") seed,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _, out("r12") _, out("r13") _, out("r14") _,
            out("r15") _, out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _,
            out("xmm5") _, out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _,
            out("xmm11") _, out("xmm12") _, out("xmm13") _,
            out("xmm14") _, out("xmm15") _, options(nostack)
        );
    }
    // Eight numbers from the seed on.
    let sum = seed.wrapping_mul(8).wrapping_add(28);
    (0..32).all(|index| kept[index] == words[index]) && kept[32] == sum && kept[33] == seed
}
