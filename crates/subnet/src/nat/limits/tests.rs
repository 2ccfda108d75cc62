use proptest::prelude::*;

use super::*;

fn limits() -> Limits {
    Limits::of_descriptors(4096)
}

/// Opens connections of one card until the limits refuse one.
fn fill(limits: &Limits, all: &mut Use, cards: usize) -> Use {
    let mut card = Use::default();
    while limits.admit_connection(&card, all, cards) == Admission::Admitted {
        let bytes = limits.buffers(&card, all, cards).unwrap();
        card.flows += 1;
        card.memory += bytes;
        all.flows += 1;
        all.memory += bytes;
    }
    card
}

#[test]
fn card_has_a_thousand_connections_in_bounded_memory() {
    let mut all = Use::default();
    let card = fill(&limits(), &mut all, 1);
    assert!(card.flows >= 1000, "{card:?}");
    assert!(card.memory <= limits().memory_per_card, "{card:?}");
}

#[test]
fn greedy_card_leaves_flows_to_others() {
    let limits = Limits {
        flows: 1000,
        ..limits()
    };
    let mut all = Use::default();
    let greedy = fill(&limits, &mut all, 4);
    assert!(greedy.flows <= 750, "{greedy:?}");
    let modest = fill(&limits, &mut all, 4);
    assert!(modest.flows >= 240, "{modest:?}");
}

#[test]
fn greedy_cards_leave_memory_to_others() {
    let limits = Limits {
        memory: 128 * MIB,
        ..limits()
    };
    let mut all = Use::default();
    let greedy = fill(&limits, &mut all, 8);
    assert!(greedy.memory <= 97 * MIB, "{greedy:?}");
    assert!(fill(&limits, &mut all, 8).memory >= 8 * MIB);
}

#[test]
fn connecting_connections_of_a_card_are_bounded() {
    let card = Use {
        connecting: limits().connecting_per_card,
        ..Use::default()
    };
    let none = Use::default();
    assert_eq!(limits().admit_connection(&card, &none, 1), Admission::Later);
}

#[test]
fn exchange_replaces_the_cards_oldest_when_its_table_is_full() {
    let limits = limits();
    let full = Use {
        exchanges: limits.exchanges_per_card,
        ..Use::default()
    };
    let none = Use::default();
    assert_eq!(limits.admit_exchange(&none, &none, 1), Admission::Admitted);
    assert_eq!(limits.admit_exchange(&full, &none, 1), Admission::ReplacesOldest);
    let all = Use {
        flows: limits.flows,
        ..Use::default()
    };
    assert_eq!(limits.admit_exchange(&none, &all, 1), Admission::Refused);
    let one = Use {
        exchanges: 1,
        flows: 1,
        ..Use::default()
    };
    assert_eq!(limits.admit_exchange(&one, &all, 2), Admission::ReplacesOldest);
}

proptest! {
    #[test]
    fn admitted_flows_stay_within_all_bounds(
        descriptors in 0_u64..1_000_000, cards in 0_usize..100, flows in 0_usize..100_000,
        mine in 0_usize..100_000, memory in 0_usize..2 << 30, my_memory in 0_usize..200 << 20,
    ) {
        let limits = Limits::of_descriptors(descriptors);
        let card = Use { flows: mine, memory: my_memory, ..Use::default() };
        let all = Use { flows: flows.max(mine), memory: memory.max(my_memory), ..Use::default() };
        if limits.admit_connection(&card, &all, cards) == Admission::Admitted {
            prop_assert!(all.flows < limits.flows);
            let bytes = limits.buffers(&card, &all, cards).unwrap();
            prop_assert!(card.memory + bytes <= limits.memory_per_card);
            prop_assert!(all.memory + bytes <= limits.memory);
        }
    }
}
