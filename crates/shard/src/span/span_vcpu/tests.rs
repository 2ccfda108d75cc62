//! Small guests on KVM whose local APIC is that of [`super::SpanVcpu`].

mod guest;

use self::guest::{DONE, INTERRUPT, NMI, Program, program, run};
use crate::span::packet::Packet;

program!(GUEST_OF_PRIORITIES:
    // The TPR masks all classes up to 5. The guest sends itself an interrupt of class 4. Each access to a
    // port is an exit after which the interrupt could be injected.
    "mov ecx, 0x80F; mov eax, 0x1FF; xor edx, edx; wrmsr"
    "mov ecx, 0x808; mov eax, 0x53; wrmsr"
    "mov ecx, 0x83F; mov eax, 0x41; wrmsr"
    "sti; nop; in al, 0x80; in al, 0x80"
    "mov ecx, 0x808; rdmsr; out 0x10, eax"
    "mov rax, cr8; out 0x10, eax"
    // CR8 raises the priority without an exit.
    "mov eax, 9; mov cr8, rax"
    "mov ecx, 0x808; rdmsr; out 0x10, eax"
    "mov eax, 10; mov cr8, rax"
    "mov ecx, 0x80A; rdmsr; out 0x10, eax"
    "in al, 0x80; in al, 0x80"
    // The TPR lowers the priority.
    "mov ecx, 0x808; xor eax, eax; xor edx, edx; wrmsr"
    "nop; in al, 0x80; in al, 0x80"
    "mov rax, cr8; out 0x10, eax"
    // CR8 raises and lowers the priority.
    "mov eax, 5; mov cr8, rax"
    "mov ecx, 0x83F; mov eax, 0x41; wrmsr"
    "in al, 0x80; in al, 0x80"
    "mov eax, 0x5A; out 0x10, eax"
    "xor eax, eax; mov cr8, rax"
    "nop; in al, 0x80; in al, 0x80"
);

#[test]
fn interrupt_waits_for_task_priority_set_by_tpr_or_cr8() {
    if let Some(reported) = run(&Program(&raw const GUEST_OF_PRIORITIES), []) {
        let expected = [0x53, 5, 0x90, 0xA0, INTERRUPT, 0, 0x5A, INTERRUPT, DONE];
        assert_eq!(reported, expected, "{reported:x?}");
    }
}

program!(GUEST_OF_THE_COUNTER:
    "mov ecx, 0x3B; rdmsr; out 0x10, eax"
    // The guest adds 2^40 to its TSC, and some microseconds pass.
    "rdtsc; mov ebx, edx"
    "xor eax, eax; mov edx, 0x100; wrmsr"
    "rdmsr; xchg eax, edx; out 0x10, eax"
    "rdtsc; sub edx, ebx; mov eax, edx; shr eax, 4; out 0x10, eax"
    // A write of the TSC changes TSC_ADJUST.
    "mov ecx, 0x10; xor eax, eax; mov edx, 0x7000000; wrmsr"
    "mov ecx, 0x3B; rdmsr; mov eax, edx; shr eax, 20; out 0x10, eax"
);

#[test]
fn tsc_adjust_moves_the_guest_tsc_and_reads_back() {
    if let Some(reported) = run(&Program(&raw const GUEST_OF_THE_COUNTER), []) {
        if reported.get(2) == Some(&0) {
            println!("left out: this machine's KVM adds nothing to the host's counter");
            assert_eq!(reported[..2], [0, 0x100], "{reported:x?}");
            return;
        }
        assert_eq!(reported[..3], [0, 0x100, 0x10], "{reported:x?}");
        assert!([0x6F, 0x70].contains(&reported[3]), "{reported:x?}");
    }
}

program!(GUEST_OF_THE_BASE:
    "mov eax, 1; xor ecx, ecx; cpuid; and edx, 0x200; mov eax, edx; out 0x10, eax"
    "mov ecx, 0x1B; rdmsr; and eax, 0xFFFFF3FF; wrmsr"
    "mov eax, 1; xor ecx, ecx; cpuid; and edx, 0x200; mov eax, edx; out 0x10, eax"
);

#[test]
fn cpuid_reports_no_apic_after_the_guest_disables_it() {
    if let Some(reported) = run(&Program(&raw const GUEST_OF_THE_BASE), []) {
        assert_eq!(reported, [0x200, 0, DONE], "{reported:x?}");
    }
}

program!(GUEST_OF_NMIS: "mov ecx, 8" "2: in al, 0x80" "dec ecx" "jnz 2b");

#[test]
fn two_back_to_back_nmis_are_both_delivered() {
    let two = [(); 2].map(|()| Packet::Nmi { vcpu: 0 });
    if let Some(reported) = run(&Program(&raw const GUEST_OF_NMIS), two) {
        assert_eq!(reported, [NMI, NMI, DONE], "{reported:x?}");
    }
}
