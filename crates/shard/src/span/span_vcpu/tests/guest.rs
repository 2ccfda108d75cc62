//! Guest of one vCPU: 64-bit code that reports words through port 0x10.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::Kvm;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::arch::x86_64::cpuid::Groups;
use crate::arch::x86_64::kernel::Entry;
use crate::arch::x86_64::layout::GDT_START;
use crate::arch::x86_64::{registers, start, state};
use crate::bus::{Bus, BusDevice};
use crate::ending::EndSignal;
use crate::kick;
use crate::kind::SpanKind;
use crate::launch::{Ending, SpanLaunch, TscLaunch};
use crate::machine;
use crate::memory::GuestRam;
use crate::process::Files;
use crate::quiescer::Quiescer;
use crate::span::machine::{Channels, SpanSetup, migrated_msrs};
use crate::span::packet::Packet;
use crate::vcpu::{Vcpu, VcpuCounters};
use shard_api::relation::Ratio;

/// Words that every program reports: its handlers of NMIs and of vector 0x41, and its end.
pub const NMI: u32 = 0x2_0000;
pub const INTERRUPT: u32 = 0x41_0000;
pub const DONE: u32 = 0xD00E;

const CODE: u64 = 0x10_0000;
const IDT: u64 = 0x1_8000;
const MEMORY_BYTES: usize = 2 << 20;
const REPORT_PORTS: std::ops::Range<u64> = 0x10..0x18;

/// Position-independent program. Its first words are its length and the offsets of its two handlers and its
/// code.
pub struct Program(pub *const [u32; 4]);

/// Assembles a program into a constant of the given name.
macro_rules! program {
    ($name:ident: $($line:literal)+) => {
        core::arch::global_asm!(
            ".pushsection .rodata.guests, \"a\"",
            ".balign 4",
            concat!(".globl ", stringify!($name)),
            concat!(stringify!($name), ":"),
            concat!(".long 8f - ", stringify!($name)),
            concat!(".long 5f - ", stringify!($name)),
            concat!(".long 6f - ", stringify!($name)),
            concat!(".long 4f - ", stringify!($name)),
            "4:",
            $($line,)+
            "mov eax, 0xD00E; out 0x10, eax; out 0x14, al",
            "7: hlt; jmp 7b",
            "5: push rax; mov eax, 0x20000; out 0x10, eax; pop rax; iretq",
            "6: push rax; push rcx; push rdx",
            "mov eax, 0x410000; out 0x10, eax",
            "mov ecx, 0x80B; xor eax, eax; xor edx, edx; wrmsr",
            "pop rdx; pop rcx; pop rax; iretq",
            "8:",
            ".popsection",
        );
        unsafe extern "C" {
            static $name: [u32; 4];
        }
    };
}
pub(super) use program;

impl Program {
    fn bytes(&self) -> &'static [u8] {
        let [length, ..] = self.head();
        // SAFETY: `program!` has emitted `length` bytes there, which never change.
        unsafe { std::slice::from_raw_parts(self.0.cast(), length as usize) }
    }

    fn head(&self) -> [u32; 4] {
        // SAFETY: the pointer is to the constant that `program!` has emitted.
        unsafe { *self.0 }
    }
}

/// Words that the guest has reported, and the end of the VM.
struct Reports {
    words: Mutex<Vec<u32>>,
    end: Arc<EndSignal>,
}

impl BusDevice for Reports {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }
    fn write(&self, offset: u64, data: &[u8]) {
        match <[u8; 4]>::try_from(data) {
            Ok(word) if offset == 0 => self.words.lock().unwrap().push(u32::from_le_bytes(word)),
            _ => self.end.end(Ending::PowerOff),
        }
    }
}

/// Runs the program to its end and returns the words that it reported; none without KVM. `packets` are in the
/// vCPU's event slot before it runs.
pub fn run(program: &Program, packets: impl IntoIterator<Item = Packet>) -> Option<Vec<u32>> {
    const LIMIT: Duration = Duration::from_secs(20);
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            println!("left out: /dev/kvm: {error}");
            return None;
        }
    };
    kick::catch().unwrap();
    let memory: GuestRam =
        Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap());
    let vm = machine::create_shard_vm(&kvm).unwrap();
    machine::map_memory(&vm, &memory).unwrap();
    let setup = setup();
    let mut fd = vm.create_vcpu(0).unwrap();
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    setup.prepare_vcpu(&fd, &cpuid, 0, Groups::of(&[0])).unwrap();
    let [.., start] = program.head();
    let entry = Entry::Linux64(CODE + u64::from(start));
    load(program, entry, &memory);
    let mut special = fd.get_sregs().unwrap();
    registers::special(entry, &mut special);
    (special.idt.base, special.idt.limit) = (IDT, 256 * 16 - 1);
    fd.set_sregs(&special).unwrap();
    fd.set_regs(&registers::general(entry)).unwrap();
    let numbers = migrated_msrs(&state::register_numbers(&kvm).unwrap());
    let counters = Arc::new(VcpuCounters::default());
    let shared = SpanKind::SharedSpan(&memory);
    let local = setup
        .vcpu(&numbers, &mut fd, 0, shared, counters.clone())
        .unwrap();
    let router = setup.router.clone();
    for packet in packets {
        router.event_slot(0).unwrap().post(|events| events.add(packet));
    }
    let end = Arc::new(EndSignal::new().unwrap());
    let reports = Arc::new(Reports {
        words: Mutex::default(),
        end: end.clone(),
    });
    let mut ports = Bus::default();
    ports.claim(REPORT_PORTS, reports.clone()).unwrap();
    let vcpu = Vcpu {
        fd,
        ports: Arc::new(ports),
        mmio: Arc::new(Bus::default()),
        end: end.clone(),
        counters,
        local,
    };
    let (running, over) = mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        vcpu.run(&Quiescer::new(), &Arc::default());
        drop(running);
    });
    let is_over = over.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Disconnected);
    end.end(Ending::Quit);
    router.end();
    thread.join().unwrap();
    let words = reports.words.lock().unwrap().clone();
    assert!(is_over, "the guest still ran after {words:x?}");
    let cause = end.cause();
    assert!(
        matches!(cause, Some(Ending::PowerOff)),
        "{cause:?} after {words:x?}"
    );
    Some(words)
}

fn setup() -> SpanSetup {
    let span = SpanLaunch {
        shard: 0,
        vcpus: vec![0],
        memory: Vec::new(),
        coherence: None,
        channels: vec![None],
        tsc: TscLaunch {
            offset: 0,
            ratio: Ratio::ONE,
            khz: None,
            is_relied_on: true,
        },
        cpuid: Vec::new(),
    };
    let channels = Channels::take(&span, &mut Files::default()).unwrap();
    SpanSetup::new(&span, channels)
}

/// Writes the program and its processor tables to guest memory.
fn load(program: &Program, entry: Entry, memory: &GuestRam) {
    const GATE: u64 = 0x8E00 << 32;
    const CODE_SELECTOR: u64 = 0x10 << 16;
    for (place, descriptor) in (GDT_START..).step_by(8).zip(registers::gdt(entry)) {
        memory.write_obj(descriptor, GuestAddress(place)).unwrap();
    }
    start::write_page_tables(memory).unwrap();
    memory.write_slice(program.bytes(), GuestAddress(CODE)).unwrap();
    let [_, nmi, interrupt, _] = program.head();
    for (vector, handler) in [(2, nmi), (0x41, interrupt)] {
        let place = CODE + u64::from(handler);
        let gate = place & 0xFFFF | CODE_SELECTOR | GATE | (place >> 16 & 0xFFFF) << 48;
        memory.write_obj(gate, GuestAddress(IDT + 16 * vector)).unwrap();
    }
}
