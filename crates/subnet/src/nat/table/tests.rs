use proptest::prelude::*;

use super::*;

fn key(card: u64, port: u16) -> FlowKey {
    FlowKey {
        card: CardId(card),
        transport: Transport::Udp,
        guest: SocketAddr::new([10, 77, 0, 5].into(), port),
        remote: SocketAddr::new([192, 0, 2, 1].into(), 53),
    }
}

fn exchange() -> Use {
    Use {
        flows: 1,
        exchanges: 1,
        ..Use::default()
    }
}

fn add(table: &mut Table<()>, card: u64, port: u16, now: Instant) -> FlowId {
    let id = table.next_id();
    table.insert(id, key(card, port), exchange(), (), now);
    id
}

#[test]
fn timer_moves_only_to_an_earlier_time() {
    let mut table = Table::new();
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let id = add(&mut table, 1, 1, start);
    table.set_timer(id, at(5));
    table.set_timer(id, at(9));
    assert_eq!(table.deadline(), Some(at(5)));
    table.set_timer(id, at(3));
    assert_eq!(table.expired(at(2)), None);
    assert_eq!(table.expired(at(3)), Some(id));
    assert_eq!(table.expired(at(100)), None);
    table.set_timer(id, at(9));
    table.remove(id);
    assert_eq!(table.deadline(), None);
}

#[test]
fn oldest_exchange_is_that_without_packets_for_longest() {
    let mut table = Table::new();
    let start = Instant::now();
    let first = add(&mut table, 1, 1, start);
    let second = add(&mut table, 1, 2, start + Duration::from_secs(1));
    let other = add(&mut table, 2, 1, start);
    assert_eq!(table.oldest_exchange(CardId(1)), Some(first));
    table.touch(first, start + Duration::from_secs(5));
    assert_eq!(table.oldest_exchange(CardId(1)), Some(second));
    assert_eq!(table.oldest_exchange(CardId(2)), Some(other));
    assert_eq!(table.oldest_exchange(CardId(3)), None);
}

proptest! {
    #[test]
    fn indexes_agree_with_the_flows(
        steps in prop::collection::vec((0_u8..4, 0_u64..3, 0_u16..20, 0_u64..50), 0..200),
    ) {
        let mut table = Table::new();
        let mut now = Instant::now();
        for (step, card, port, time) in steps {
            now += Duration::from_millis(time * 20);
            let found = table.find(&key(card, port));
            match (step, found) {
                (0 | 1, None) => {
                    add(&mut table, card, port, now);
                }
                (0, Some(id)) => table.set_timer(id, now + Duration::from_millis(time)),
                (1, Some(id)) => table.touch(id, now),
                (2, Some(id)) => {
                    prop_assert_eq!(table.remove(id).map(|(key, ())| key), Some(key(card, port)));
                    prop_assert!(table.remove(id).is_none());
                }
                (3, _) => while table.expired(now).is_some() {},
                _ => {}
            }
            let mut flows = 0;
            for card in 0..3 {
                let of_card = table.of_card(CardId(card));
                let (used, all) = table.used(CardId(card));
                prop_assert_eq!((used.flows, used.exchanges), (of_card.len(), of_card.len()));
                prop_assert_eq!(table.oldest_exchange(CardId(card)).is_some(), !of_card.is_empty());
                flows += of_card.len();
                prop_assert_eq!(all.flows, table.keys().count());
            }
            prop_assert_eq!(flows, table.keys().count());
        }
        let ids: Vec<_> = table.keys().map(|(id, _)| id).collect();
        for id in ids {
            table.remove(id);
        }
        prop_assert_eq!(table.used(CardId(0)), (Use::default(), Use::default()));
        prop_assert_eq!(table.deadline(), None);
    }
}
