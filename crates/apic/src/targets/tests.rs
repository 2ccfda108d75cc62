use proptest::prelude::*;

use super::*;
use crate::local::LocalApic;

const DELIVERIES: [Delivery; 7] = [
    Delivery::Fixed,
    Delivery::LowestPriority,
    Delivery::Smi,
    Delivery::Nmi,
    Delivery::Init,
    Delivery::Startup,
    Delivery::External,
];

fn interrupt(destination: Destination, delivery: Delivery, vector: u8) -> Interrupt {
    Interrupt {
        destination,
        delivery,
        vector,
        level: false,
    }
}

/// The definition: each vCPU compares the destination to the registers of its APIC (SDM 11.6.2).
fn is_named(vcpu: u32, destination: Destination) -> bool {
    let register = |msr| LocalApic::new(vcpu, 1).read(msr, 0).expect("a register") as u32;
    match destination {
        Destination::Physical(id) => id == u32::MAX || id == register(0x802),
        Destination::Logical(logical) => {
            let own = register(0x80D);
            let (same_cluster, members) = (own >> 16 == logical >> 16, own & logical & 0xFFFF);
            logical == u32::MAX || same_cluster && members != 0
        }
    }
}

fn is_matched(vcpu: u32, destination: Destination, shorthand: Shorthand, from: Option<u32>) -> bool {
    match shorthand {
        Shorthand::None => is_named(vcpu, destination),
        Shorthand::Own => from == Some(vcpu),
        Shorthand::All => true,
        Shorthand::Others => from != Some(vcpu),
    }
}

fn destination() -> impl Strategy<Value = Destination> {
    let number = prop_oneof![
        any::<u32>(),
        0..300_u32,
        Just(u32::MAX),
        (0..18_u32, any::<u16>()).prop_map(|(cluster, members)| cluster << 16 | u32::from(members)),
    ];
    (any::<bool>(), number).prop_map(|(is_logical, number)| match is_logical {
        true => Destination::Logical(number),
        false => Destination::Physical(number),
    })
}

fn shorthand() -> impl Strategy<Value = Shorthand> {
    prop_oneof![
        4 => Just(Shorthand::None),
        1 => Just(Shorthand::Own),
        1 => Just(Shorthand::All),
        1 => Just(Shorthand::Others),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn targets_match_the_definition(
        destination in destination(),
        shorthand in shorthand(),
        delivery in prop::sample::select(&DELIVERIES[..]),
        vector: u8,
        from in prop::option::of(0..300_u32),
        count in 0..300_u32,
        enabled in prop::collection::vec(0..256_u32, 0..60),
    ) {
        let enabled: Targets = enabled.into_iter().collect();
        let interrupt = interrupt(destination, delivery, vector);
        let found: Vec<u32> = targets(&interrupt, shorthand, from, count, &enabled).iter().collect();
        let matched: Vec<u32> =
            (0..count.min(256)).filter(|&vcpu| is_matched(vcpu, destination, shorthand, from)).collect();
        if delivery == Delivery::LowestPriority {
            let willing: Vec<u32> = matched.into_iter().filter(|&vcpu| enabled.contains(vcpu)).collect();
            prop_assert_eq!(found.len(), willing.len().min(1));
            prop_assert!(found.iter().all(|vcpu| willing.contains(vcpu)));
        } else {
            prop_assert_eq!(found, matched);
        }
    }

    #[test]
    fn set_contains_what_was_inserted(numbers in prop::collection::btree_set(any::<u8>(), 0..40), other: u8) {
        let mut set: Targets = numbers.iter().map(|&number| u32::from(number)).collect();
        prop_assert!(set.iter().eq(numbers.iter().map(|&number| u32::from(number))));
        prop_assert_eq!(set.contains(other.into()), numbers.contains(&other));
        set.remove(other.into());
        prop_assert!(!set.contains(other.into()));
        prop_assert_eq!(set.is_empty(), numbers.iter().all(|&number| number == other));
    }
}

/// Vectors are spread over all enabled APICs; each vector has one fixed target.
#[test]
fn lowest_priority_interrupts_are_spread_by_vector() {
    let enabled: Targets = [1, 4, 5].into_iter().collect();
    let destination = Destination::Logical(0xFFFF);
    let chosen = |vector| {
        let interrupt = interrupt(destination, Delivery::LowestPriority, vector);
        targets(&interrupt, Shorthand::None, None, 8, &enabled)
    };
    let mut received = [0; 8];
    for vector in 0x30..0x90 {
        let first = chosen(vector).iter().next().expect("one");
        assert_eq!(chosen(vector), chosen(vector));
        received[first as usize] += 1;
    }
    assert_eq!(received, [0, 32, 0, 0, 32, 32, 0, 0]);
}

/// An INIT also reaches a disabled APIC.
#[test]
fn disabled_apic_is_excluded_from_lowest_priority_only() {
    for delivery in DELIVERIES {
        let interrupt = interrupt(Destination::Physical(2), delivery, 0x40);
        let found = targets(&interrupt, Shorthand::None, None, 4, &Targets::default());
        assert_eq!(found.is_empty(), delivery == Delivery::LowestPriority);
    }
}

#[test]
fn out_of_range_vcpus_are_ignored() {
    let mut set = Targets::default();
    set.insert(256);
    set.insert(u32::MAX);
    assert!(set.is_empty() && !set.contains(256));
    assert_eq!(Targets::all(1000).iter().count(), 256);
}
