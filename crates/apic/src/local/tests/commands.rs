//! Interrupts that a vCPU sends by the command register.

use super::*;

fn sent(value: u64) -> Ipi {
    let mut apic = enabled(1);
    let outcome = apic.write(0x830, value, 0);
    assert_eq!(read(&apic, 0x830), value & !0x1000, "read back");
    let Ok(Written::Send(ipi)) = outcome else {
        panic!("{value:#x}: {outcome:?}")
    };
    assert_eq!(apic.next(), None, "not even to itself: that is the caller's");
    ipi
}

/// SDM 11.6.1, 11.12.9: the destination is the upper half, physical or logical.
#[test]
fn command_encodes_its_destination() {
    let ipi = sent(0x0000_0007_0000_0040);
    let expected = Interrupt {
        destination: Destination::Physical(7),
        delivery: Delivery::Fixed,
        vector: 0x40,
        level: false,
    };
    assert_eq!((ipi.interrupt, ipi.shorthand), (expected, Shorthand::None));
    let destination = sent(0x0003_0005_0000_0840).interrupt.destination;
    assert_eq!(destination, Destination::Logical(0x0003_0005));
    let destination = sent(0xFFFF_FFFF_0000_0040).interrupt.destination;
    assert_eq!(destination, Destination::Physical(u32::MAX));
}

/// SDM 11.6.1, delivery modes: 011 and 111 are reserved in commands.
#[test]
fn command_encodes_each_of_six_delivery_modes() {
    let modes = [
        (0, Delivery::Fixed),
        (1, Delivery::LowestPriority),
        (2, Delivery::Smi),
        (4, Delivery::Nmi),
        (5, Delivery::Init),
        (6, Delivery::Startup),
    ];
    for (bits, delivery) in modes {
        assert_eq!(sent(bits << 8 | 0x4040).interrupt.delivery, delivery);
    }
    for bits in [3, 7] {
        let mut apic = enabled(1);
        assert_eq!(apic.write(0x830, bits << 8 | 0x40, 0), FAULT);
        assert_eq!(read(&apic, 0x830), 0);
    }
}

/// SDM 11.6.1, destination shorthand.
#[test]
fn command_encodes_each_of_four_shorthands() {
    let shorthands = [Shorthand::None, Shorthand::Own, Shorthand::All, Shorthand::Others];
    for (bits, shorthand) in (0..).zip(shorthands) {
        assert_eq!(sent(bits << 18 | 0x40).shorthand, shorthand);
    }
    assert_eq!(sent(0xC_4400).interrupt.delivery, Delivery::Nmi, "to all others");
}

/// SDM 11.6.1, table of valid combinations: only fixed interrupts include their sender by shorthand.
#[test]
fn self_shorthand_cannot_send_init() {
    for shorthand in [1, 2] {
        for delivery in [1, 2, 4, 5, 6] {
            let mut apic = enabled(1);
            write(&mut apic, 0x830, shorthand << 18 | delivery << 8 | 0x4040);
        }
    }
}

/// The same table, note 1: IPIs are edge-triggered. SDM 11.6.1: the end of a level-triggered INIT is not
/// supported.
#[test]
fn commands_send_edge_triggered_interrupts() {
    assert!(!sent(0xC040).interrupt.level);
    assert_eq!(sent(0xC500).interrupt.delivery, Delivery::Init, "asserted");
    assert_eq!(sent(0x0500).interrupt.delivery, Delivery::Init, "edge");
    let mut apic = enabled(1);
    write(&mut apic, 0x830, 0x8500);
    assert_eq!(read(&apic, 0x830), 0x8500);
}

/// SDM 11.5.3, bit 5: vectors 0 to 15 can't be sent. Those of other delivery modes are no such vectors.
#[test]
fn illegal_vectors_are_not_sent() {
    for delivery in [0, 1] {
        let mut apic = enabled(1);
        write(&mut apic, 0x830, delivery << 8 | 0x0F);
        write(&mut apic, 0x828, 0);
        assert_eq!(read(&apic, 0x828), 0x20);
    }
    assert_eq!(sent(0x010).interrupt.vector, 16);
    assert_eq!(sent(0x602).interrupt.vector, 2);
    assert_eq!(sent(0x400).interrupt.delivery, Delivery::Nmi);
}

/// SDM 11.4.7.2: "can still issue IPIs".
#[test]
fn software_disabled_apic_still_sends() {
    let mut apic = LocalApic::new(1, 10);
    assert!(matches!(apic.write(0x830, 0x40, 0), Ok(Written::Send(_))));
}

/// SDM 11.12.11: equal to a fixed edge-triggered IPI to itself.
#[test]
fn self_ipi_is_a_fixed_interrupt_to_its_sender() {
    let mut apic = enabled(9);
    let outcome = apic.write(0x83F, 0x40, 0);
    assert_eq!(read(&apic, 0x830), 0, "no command");
    let interrupt = Interrupt {
        destination: Destination::Physical(9),
        delivery: Delivery::Fixed,
        vector: 0x40,
        level: false,
    };
    let shorthand = Shorthand::Own;
    assert_eq!(outcome, Ok(Written::Send(Ipi { interrupt, shorthand })));
    write(&mut apic, 0x83F, 15);
    write(&mut apic, 0x828, 0);
    assert_eq!(read(&apic, 0x828), 0x20);
}
