mod model;

use super::*;

const RISING: u32 = 0x0041;
const ON_LEVEL: u32 = 0x8041;

fn select(chip: &mut IoApic, register: u8) {
    assert_eq!(chip.write(0x00, register.into()), []);
}

fn read(chip: &mut IoApic, register: u8) -> u32 {
    select(chip, register);
    chip.read(0x10)
}

fn write(chip: &mut IoApic, register: u8, value: u32) -> Vec<Interrupt> {
    select(chip, register);
    chip.write(0x10, value)
}

/// Pin 4 to vCPU 2.
fn wired(low: u32) -> IoApic {
    let mut chip = IoApic::new();
    assert_eq!(write(&mut chip, 0x19, 0x0200_0000), []);
    assert_eq!(write(&mut chip, 0x18, low), []);
    chip
}

fn to_2(level: bool) -> Interrupt {
    Interrupt {
        destination: Destination::Physical(2),
        delivery: Delivery::Fixed,
        vector: 0x41,
        level,
    }
}

/// 82093AA 3.1, 3.2
#[test]
fn registers_are_accessed_through_select_and_window() {
    let mut chip = IoApic::new();
    assert_eq!(
        read(&mut chip, 1),
        0x0017_0020,
        "24 entries, with an EOI register"
    );
    for entry in 0..24 {
        assert_eq!(read(&mut chip, 0x10 + 2 * entry), 0x1_0000, "masked");
        assert_eq!(read(&mut chip, 0x11 + 2 * entry), 0);
    }
    assert_eq!(write(&mut chip, 0, u32::MAX), []);
    assert_eq!(read(&mut chip, 0), 0x0F00_0000);
    assert_eq!(read(&mut chip, 2), 0x0F00_0000, "arbitration id");
    assert_eq!(chip.read(0x00), 2);
    let before = chip.clone();
    for register in [1, 2, 3, 0x0F, 0x40, 0xFF] {
        assert_eq!(write(&mut chip, register, u32::MAX), []);
    }
    select(&mut chip, 2);
    assert_eq!(chip, before, "read-only, or not there");
    for offset in [1, 4, 0x11, 0x20, 0x40, 0x1000, u64::MAX] {
        assert_eq!(chip.read(offset), 0);
        assert_eq!(chip.write(offset, 0), []);
    }
    assert_eq!(chip, before);
}

/// 82093AA 3.2.4: delivery status and remote IRR can only be read, 17 to 55 are reserved.
#[test]
fn redirection_entry_stores_writable_bits_only() {
    let mut chip = wired(u32::MAX);
    assert_eq!(read(&mut chip, 0x18), 0x0001_AFFF);
    assert_eq!(write(&mut chip, 0x19, u32::MAX), []);
    assert_eq!(read(&mut chip, 0x19), 0xFF00_0000);
    assert_eq!(read(&mut chip, 0x18), 0x0001_AFFF, "the other half stays");
    assert!(chip.is_sane());
}

/// 82093AA 3.2.4, trigger mode
#[test]
fn rising_edge_is_sent_once() {
    let mut chip = wired(RISING);
    assert_eq!(chip.set_line(4, true), Some(to_2(false)));
    assert_eq!(chip.set_line(4, true), None);
    assert_eq!(chip.set_line(4, false), None);
    assert_eq!(chip.set_line(4, true), Some(to_2(false)));
    assert_eq!(chip.end_of_interrupt(0x41), []);
}

/// 82093AA 3.2.4, mask: "When this bit is 1, the interrupt signal is masked. Edge-sensitive interrupts
/// signaled on a masked interrupt pin are ignored"
#[test]
fn masked_edge_is_lost() {
    let mut chip = wired(RISING | 0x1_0000);
    assert_eq!(chip.set_line(4, true), None);
    assert_eq!(write(&mut chip, 0x18, RISING), []);
    assert_eq!(chip.set_line(4, true), None);
}

/// The same: a level that is masked is sent when it is unmasked, if it is still there.
#[test]
fn masked_level_is_sent_when_unmasked() {
    let mut chip = wired(ON_LEVEL | 0x1_0000);
    assert_eq!(chip.set_line(4, true), None);
    assert_eq!(write(&mut chip, 0x18, ON_LEVEL), [to_2(true)]);
    assert_eq!(write(&mut chip, 0x18, ON_LEVEL), []);
    let mut chip = wired(ON_LEVEL | 0x1_0000);
    assert_eq!(chip.set_line(4, true), None);
    assert_eq!(chip.set_line(4, false), None);
    assert_eq!(write(&mut chip, 0x18, ON_LEVEL), []);
}

/// 82093AA 3.2.4, remote IRR: set when the message is accepted, cleared by the end of service with the
/// entry's vector.
#[test]
fn level_is_resent_after_eoi_while_the_line_is_asserted() {
    let mut chip = wired(ON_LEVEL);
    assert_eq!(chip.set_line(4, true), Some(to_2(true)));
    assert_eq!(read(&mut chip, 0x18), ON_LEVEL | 0x4000);
    assert_eq!(chip.set_line(4, true), None);
    assert_eq!(chip.set_line(4, false), None);
    assert_eq!(chip.set_line(4, true), None, "still in service");
    assert_eq!(chip.end_of_interrupt(0x42), [], "another vector");
    assert_eq!(chip.end_of_interrupt(0x41), [to_2(true)]);
    assert_eq!(chip.set_line(4, false), None);
    assert_eq!(chip.end_of_interrupt(0x41), []);
    assert_eq!(read(&mut chip, 0x18), ON_LEVEL);
}

#[test]
fn masked_level_is_not_resent_after_eoi() {
    let mut chip = wired(ON_LEVEL);
    assert_eq!(chip.set_line(4, true), Some(to_2(true)));
    assert_eq!(write(&mut chip, 0x18, ON_LEVEL | 0x1_0000), []);
    assert_eq!(chip.end_of_interrupt(0x41), []);
    assert_eq!(write(&mut chip, 0x18, ON_LEVEL), [to_2(true)]);
}

/// Linux, `__eoi_ioapic_pin`: by the register of version 0x20; before it masked, edge-triggered, and back.
#[test]
fn linux_ends_service_by_the_eoi_register() {
    let mut chip = wired(ON_LEVEL);
    assert_eq!(chip.set_line(4, true), Some(to_2(true)));
    assert_eq!(chip.write(0x40, 0x41), [to_2(true)]);
    assert_eq!(write(&mut chip, 0x18, RISING | 0x1_0000), []);
    assert_eq!(read(&mut chip, 0x18), RISING | 0x1_0000, "no remote IRR");
    assert_eq!(write(&mut chip, 0x18, ON_LEVEL), [to_2(true)]);
}

#[test]
fn eoi_ends_service_of_all_pins_with_the_vector() {
    let mut chip = wired(ON_LEVEL);
    assert_eq!(write(&mut chip, 0x1A, ON_LEVEL), []);
    assert!(chip.set_line(4, true).is_some());
    assert!(chip.set_line(5, true).is_some());
    assert_eq!(chip.end_of_interrupt(0x41).len(), 2);
}

/// 82093AA 3.2.4, destination: physical or logical; 0xFF is all vCPUs.
#[test]
fn ioapic_destinations_have_8_bits() {
    let destination = |low, high| {
        let mut chip = wired(low);
        assert_eq!(write(&mut chip, 0x19, high), []);
        chip.set_line(4, true).expect("an interrupt").destination
    };
    assert_eq!(destination(RISING, 0x0700_0000), Destination::Physical(7));
    assert_eq!(destination(RISING, 0xFF00_0000), Destination::Physical(u32::MAX));
    assert_eq!(
        destination(RISING | 0x800, 0xFF00_0000),
        Destination::Logical(0xFF)
    );
}

/// 82093AA 3.2.4, delivery mode: 011 and 110 are reserved; NMI and similar modes are edges, whatever the
/// entry has.
#[test]
fn delivery_modes_without_a_vector_are_edge_triggered() {
    let modes = [
        (0x200, Some(Delivery::Smi)),
        (0x300, None),
        (0x400, Some(Delivery::Nmi)),
        (0x500, Some(Delivery::Init)),
        (0x600, None),
        (0x700, Some(Delivery::External)),
    ];
    for (bits, delivery) in modes {
        let mut chip = wired(ON_LEVEL | bits);
        let sent = chip.set_line(4, true);
        assert_eq!(
            sent.map(|interrupt| (interrupt.delivery, interrupt.level)),
            delivery.map(|mode| (mode, false))
        );
        assert_eq!(chip.set_line(4, true), None);
        assert_eq!(read(&mut chip, 0x18) & 0x4000, 0);
    }
    let mut chip = wired(ON_LEVEL | 0x100);
    let sent = chip.set_line(4, true).expect("an interrupt");
    assert_eq!((sent.delivery, sent.level), (Delivery::LowestPriority, true));
}

#[test]
fn pins_beyond_23_are_ignored() {
    let mut chip = IoApic::new();
    for pin in [24, 31, 32, 255] {
        assert_eq!(chip.set_line(pin, true), None);
    }
    assert_eq!(chip, IoApic::new());
    let mut chip = IoApic::new();
    assert_eq!(write(&mut chip, 0x3E, RISING), []);
    assert!(chip.set_line(23, true).is_some());
}

#[test]
fn unreachable_states_are_rejected() {
    let spoils: [fn(&mut IoApic); 6] = [
        |chip| chip.id = 16,
        |chip| chip.lines |= 1 << 24,
        |chip| chip.entries[0] |= 1 << 17,
        |chip| chip.entries[0] |= 1 << 12,
        |chip| chip.entries[0] |= REMOTE_IRR,
        // Asserted, not masked, and never sent
        |chip| chip.lines |= 1 << 4,
    ];
    for (number, spoil) in spoils.iter().enumerate() {
        let mut chip = wired(ON_LEVEL);
        assert!(chip.is_sane());
        spoil(&mut chip);
        assert!(!chip.is_sane(), "{number}");
    }
}
