use proptest::prelude::*;

use super::*;

fn fixed(destination: Destination, vector: u8) -> Interrupt {
    Interrupt {
        destination,
        delivery: Delivery::Fixed,
        vector,
        level: false,
    }
}

/// SDM 11.11.1: 0xFEE, then the destination.
#[test]
fn write_to_the_msi_window_is_an_interrupt() {
    let expected = fixed(Destination::Physical(5), 0x41);
    assert_eq!(message(0xFEE0_5000, 0x41), Some(expected));
    assert_eq!(message(0xFEE0_5FF0, 0x41), Some(expected), "reserved bits");
    for address in [0xFED0_5000, 0xFEF0_5000, 0x1_FEE0_5000, 0, u64::MAX] {
        assert_eq!(message(address, 0x41), None);
    }
}

#[test]
fn physical_destination_0xff_is_broadcast() {
    let expected = fixed(Destination::Physical(u32::MAX), 0x41);
    assert_eq!(message(0xFEEF_F000, 0x41), Some(expected));
}

/// SDM 11.11.1, destination mode; Linux sets it without the redirection hint and means it.
#[test]
fn logical_destination_is_in_cluster_0() {
    let expected = fixed(Destination::Logical(0xFF), 0x41);
    assert_eq!(message(0xFEEF_F004, 0x41), Some(expected));
}

/// SDM 11.11.1, redirection hint
#[test]
fn redirection_hint_targets_one_vcpu() {
    let delivery = |address, data| message(address, data).expect("a message").delivery;
    assert_eq!(delivery(0xFEE0_F00C, 0x41), Delivery::LowestPriority);
    assert_eq!(delivery(0xFEE0_F004, 0x141), Delivery::LowestPriority);
    assert_eq!(delivery(0xFEE0_F00C, 0x441), Delivery::Nmi);
}

/// SDM 11.11.2, delivery modes: 011 and 110 are reserved.
#[test]
fn reserved_delivery_modes_are_rejected() {
    let modes = [
        Some(Delivery::Fixed),
        Some(Delivery::LowestPriority),
        Some(Delivery::Smi),
        None,
        Some(Delivery::Nmi),
        Some(Delivery::Init),
        None,
        Some(Delivery::External),
    ];
    for (bits, expected) in (0..).zip(modes) {
        let found = message(0xFEE0_0000, bits << 8 | 0x41);
        assert_eq!(found.map(|interrupt| interrupt.delivery), expected);
    }
}

/// SDM 11.11.2, level and trigger mode
#[test]
fn level_deassert_is_no_interrupt() {
    let level = |data| message(0xFEE0_0000, data).map(|interrupt| interrupt.level);
    assert_eq!(level(0xC041), Some(true));
    assert_eq!(level(0x8041), None);
    assert_eq!(level(0x4041), Some(false));
    assert_eq!(level(0xC441), Some(false), "an NMI has no end of service");
}

proptest! {
    #[test]
    fn decoding_accepts_any_write_without_panic(
        address in prop_oneof![any::<u64>(), 0xFEDF_0000..0xFEF1_0000_u64],
        data: u32
    ) {
        if let Some(interrupt) = message(address, data) {
            prop_assert!((0xFEE0_0000..=0xFEEF_FFFF).contains(&address));
            prop_assert_eq!(interrupt.vector, data as u8);
            prop_assert!(interrupt.delivery != Delivery::Startup);
            prop_assert!(interrupt.delivery.has_vector() || !interrupt.level);
        }
    }
}
