//! Decides whether this machine's KVM can run guests, within 300 ms.
//!
//! Some machines offer a KVM without hardware support: VMs can be created, but kernel-mode code is emulated
//! at a few per cent of native speed and `lock cmpxchg16b` fails. The probe therefore runs a tiny long-mode
//! program: that instruction, then a counted loop. It compares the loop's time with that of the same loop on
//! this CPU. The ratio is also valid in a lab host, where both are slow.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, Kvm, VcpuExit, VcpuFd};

/// Result of the probe.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Guests can run.
    Usable,
    /// There is no `/dev/kvm`.
    Missing,
    /// `/dev/kvm` exists, and this user may not open it.
    NoPermission,
    /// Guest code runs this many times slower than the same code on the host.
    TooSlow {
        /// Guest time over native time.
        ratio: f64,
    },
    /// KVM lacks a feature that guests need.
    Incomplete {
        /// The missing feature.
        what: String,
    },
}

impl fmt::Display for Verdict {
    /// Writes one line, with the fix where there is one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usable => f.write_str("this machine's KVM can run guests"),
            Self::Missing => f.write_str("this machine has no KVM (/dev/kvm is missing)"),
            Self::NoPermission => f.write_str(
                "this user may not use /dev/kvm (help: `sudo usermod -aG kvm $USER`, then log in again)",
            ),
            Self::TooSlow { ratio } => write!(
                f,
                "this machine's KVM only emulates: guest code runs {ratio:.0} times slower"
            ),
            Self::Incomplete { what } => write!(f, "this machine's KVM can't run guests: {what}"),
        }
    }
}

/// Loop iterations of one measurement: two instructions each, about 1 ms on hardware.
const ITERATIONS: u32 = 1_000_000;

/// Ratio above which KVM emulates. Hardware gives about 1, nested paging under emulation 1 to 3.
const RATIO_MAX: f64 = 8.0;

/// Time after which an unfinished guest is stopped.
const GUEST_TIMEOUT: Duration = Duration::from_millis(200);

/// Capabilities that every guest needs.
const NEEDED: &[(Cap, &str)] = &[
    (Cap::UserMemory, "user memory"),
    (Cap::Irqchip, "interrupt chip"),
    (Cap::Irqfd, "irqfd"),
    (Cap::Ioeventfd, "ioeventfd"),
    (Cap::ImmediateExit, "immediate exit"),
    (Cap::ExtCpuid, "CPUID"),
    (Cap::MpState, "CPU states"),
    (Cap::SignalMsi, "message-signalled interrupts"),
];

const MEMORY_BYTES: usize = 64 << 10;
const CODE: u64 = 0x8000;

/// Probes `/dev/kvm`.
pub fn probe() -> Verdict {
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            return match error.errno() {
                libc::ENOENT | libc::ENODEV | libc::ENXIO => Verdict::Missing,
                libc::EACCES | libc::EPERM => Verdict::NoPermission,
                _ => incomplete(format!("/dev/kvm can't be opened: {error}")),
            };
        }
    };
    if let Some((_, name)) = NEEDED.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
        return incomplete(format!("it lacks the capability \"{name}\""));
    }
    match run(&kvm) {
        Ok(verdict) => verdict,
        Err(error) => incomplete(format!("a test program can't be run: {error}")),
    }
}

fn incomplete(what: String) -> Verdict {
    Verdict::Incomplete { what }
}

fn run(kvm: &Kvm) -> io::Result<Verdict> {
    let vm = kvm.create_vm()?;
    let memory = Memory::new()?;
    memory.fill();
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: MEMORY_BYTES as u64,
        userspace_addr: memory.0 as u64,
    };
    // SAFETY: `memory` outlives `vm`'s vCPU below, which is dropped at the end of this function before it.
    unsafe { vm.set_user_memory_region(region) }?;
    let mut vcpu = vm.create_vcpu(0)?;
    let cpuid = kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)?;
    let leaf = |function: u32| cpuid.as_slice().iter().find(|entry| entry.function == function);
    if leaf(1).is_none_or(|entry| entry.ecx & (1 << 13) == 0) {
        return Ok(incomplete("guests would have no cmpxchg16b".into()));
    }
    if leaf(0x8000_0001).is_none_or(|entry| entry.edx & (1 << 29) == 0) {
        return Ok(incomplete("guests would have no 64-bit mode".into()));
    }
    vcpu.set_cpuid2(&cpuid)?;
    enter_long_mode(&vcpu)?;
    measure(&mut vcpu)
}

fn measure(vcpu: &mut VcpuFd) -> io::Result<Verdict> {
    let alarm = Alarm::start(GUEST_TIMEOUT)?;
    // The program reports by writes to port 0x10: after cmpxchg16b, after a warm-up, and after the loop.
    let mut reports = Vec::new();
    while reports.len() < 3 {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(0x10, _)) => reports.push(Instant::now()),
            Ok(VcpuExit::InternalError) => {
                return Ok(incomplete(if reports.is_empty() {
                    "it does not know the instruction cmpxchg16b".into()
                } else {
                    "it failed inside".into()
                }));
            }
            Ok(other) => return Ok(incomplete(format!("a test program ended with {other:?}"))),
            Err(error) if error.errno() == libc::EINTR && alarm.rang() => {
                let ratio = GUEST_TIMEOUT.as_secs_f64() / native().as_secs_f64().max(1e-6);
                return Ok(Verdict::TooSlow { ratio });
            }
            Err(error) if error.errno() == libc::EINTR || error.errno() == libc::EAGAIN => {}
            Err(error) => return Err(error.into()),
        }
    }
    let ratio = (reports[2] - reports[1]).as_secs_f64() / native().as_secs_f64().max(1e-6);
    Ok(if ratio > RATIO_MAX {
        Verdict::TooSlow { ratio }
    } else {
        Verdict::Usable
    })
}

/// Returns the time of the loop on this CPU. The loop runs once, as in the guest: the faster of two runs
/// would make KVM look slow if the guest's only run was disturbed.
fn native() -> Duration {
    let start = Instant::now();
    // SAFETY: the block counts a register down and touches nothing else.
    unsafe {
        std::arch::asm!("2:", "dec {0:e}", "jnz 2b", inout(reg) ITERATIONS => _, options(nomem, nostack));
    }
    start.elapsed()
}

/// The program, at [`CODE`]: `mov edi, 0x4000; xor eax, eax; xor edx, edx; xor ecx, ecx; lock cmpxchg16b
/// [rdi]; out 0x10, al;` `mov ecx, 1000; 1: dec ecx; jnz 1b; out 0x10, al; mov ecx, ITERATIONS; 2: dec ecx;
/// jnz 2b; out 0x10, al; hlt`
fn program() -> Vec<u8> {
    let mut code = vec![0xbf, 0x00, 0x40, 0, 0, 0x31, 0xc0, 0x31, 0xd2, 0x31, 0xc9];
    code.extend([0xf0, 0x48, 0x0f, 0xc7, 0x0f, 0xe6, 0x10]);
    for count in [1000, ITERATIONS] {
        code.push(0xb9);
        code.extend(count.to_le_bytes());
        code.extend([0xff, 0xc9, 0x75, 0xfc, 0xe6, 0x10]);
    }
    code.push(0xf4);
    code
}

/// Flat 64-bit segments and identity page tables at 0x1000 to 0x3fff.
fn enter_long_mode(vcpu: &VcpuFd) -> io::Result<()> {
    let mut sregs = vcpu.get_sregs()?;
    let segment = |kind: u8, long: u8| kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: if long == 1 { 8 } else { 16 },
        type_: kind,
        present: 1,
        dpl: 0,
        db: 1 - long,
        s: 1,
        l: long,
        g: 1,
        ..kvm_segment::default()
    };
    sregs.cs = segment(11, 1);
    for slot in [
        &mut sregs.ds,
        &mut sregs.es,
        &mut sregs.fs,
        &mut sregs.gs,
        &mut sregs.ss,
    ] {
        *slot = segment(3, 0);
    }
    sregs.cr3 = 0x1000;
    sregs.cr4 |= 1 << 5;
    sregs.cr0 = (1 << 31) | (1 << 16) | (1 << 4) | 1;
    sregs.efer = (1 << 8) | (1 << 10);
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    regs.rip = CODE;
    regs.rsp = 0x7000;
    regs.rflags = 2;
    vcpu.set_regs(&regs)?;
    Ok(())
}

/// The guest's memory: an anonymous mapping of [`MEMORY_BYTES`].
struct Memory(*mut u8);

impl Memory {
    fn new() -> io::Result<Self> {
        // SAFETY: a new private mapping at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                MEMORY_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(start.cast()))
    }

    fn fill(&self) {
        // SAFETY: the mapping has MEMORY_BYTES bytes, and no vCPU runs yet.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.0, MEMORY_BYTES) };
        let code = program();
        bytes[CODE as usize..CODE as usize + code.len()].copy_from_slice(&code);
        // One entry in each of three levels; the last maps 2 MiB: present, writable, large.
        for (table, entry) in [(0x1000, 0x2003u64), (0x2000, 0x3003), (0x3000, 0x83)] {
            bytes[table..table + 8].copy_from_slice(&entry.to_le_bytes());
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own and nothing refers to it any more.
        unsafe { libc::munmap(self.0.cast(), MEMORY_BYTES) };
    }
}

static RANG: AtomicBool = AtomicBool::new(false);

extern "C" fn ring(_: libc::c_int) {
    RANG.store(true, Ordering::Relaxed);
}

/// A timer that interrupts `KVM_RUN` repeatedly once its time is over; stopped on drop.
struct Alarm(libc::sigaction);

impl Alarm {
    fn start(after: Duration) -> io::Result<Self> {
        RANG.store(false, Ordering::Relaxed);
        // SAFETY: all zeroes is a valid sigaction; the handler only stores to an atomic; no SA_RESTART, so
        // KVM_RUN ends.
        unsafe {
            let mut old: libc::sigaction = std::mem::zeroed();
            let mut new: libc::sigaction = std::mem::zeroed();
            new.sa_sigaction = ring as *const () as usize;
            if libc::sigaction(libc::SIGALRM, &new, &mut old) != 0 {
                return Err(io::Error::last_os_error());
            }
            let micros = libc::suseconds_t::try_from(after.as_micros()).unwrap_or(200_000);
            timer(micros, 5_000);
            Ok(Self(old))
        }
    }

    fn rang(&self) -> bool {
        RANG.load(Ordering::Relaxed)
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        timer(0, 0);
        // SAFETY: puts back the action that was there before.
        unsafe { libc::sigaction(libc::SIGALRM, &self.0, std::ptr::null_mut()) };
    }
}

fn timer(first_us: libc::suseconds_t, then_us: libc::suseconds_t) {
    let value = |us| libc::timeval {
        tv_sec: 0,
        tv_usec: us,
    };
    let timer = libc::itimerval {
        it_interval: value(then_us),
        it_value: value(first_us),
    };
    // SAFETY: `timer` is valid for the call.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise LAB-09.
    #[test]
    fn probe_ends_in_time_on_any_machine() {
        let start = Instant::now();
        let verdict = probe();
        println!("{verdict} ({verdict:?}) after {:?}", start.elapsed());
        // 300 ms on an idle machine; a loaded one gets more.
        assert!(
            start.elapsed() < Duration::from_secs(2),
            "{verdict:?} after {:?}",
            start.elapsed()
        );
    }
}
