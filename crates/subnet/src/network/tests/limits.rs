//! A card that sends too much loses frames, and the others none.

use std::time::Duration;

use super::*;

fn limited(limits: Limits) -> (World, [Guest; 2]) {
    let mut world = World::new(Settings::new("test"));
    let a = world.attach(Card {
        limits,
        ..card("a", 1)
    });
    let b = world.attach(card("b", 2));
    (world, [a, b])
}

const RATE: Rate = Rate {
    bytes: None,
    packets: Some(100),
};

#[test]
fn card_sends_at_most_its_limit() {
    let limits = Limits {
        from_guest: RATE,
        ..Limits::default()
    };
    let (mut world, [a, b]) = limited(limits);
    let frame = udp(route(a, b), (1, 2), b"");
    let passed = (0..1000).filter(|_| world.receive(a, &frame).len() == 1).count();
    assert_eq!(passed, 16);
    assert_eq!(world.dropped(a, DropReason::RateLimit), 984);
    // In small steps too, a second earns a hundred packets.
    let mut passed = 0;
    for _ in 0..1000 {
        world.now += Duration::from_millis(1);
        passed += world.receive(a, &frame).len();
    }
    assert_eq!(passed, 100);
    // The other has no limit.
    let back = udp(route(b, a), (1, 2), b"");
    assert_eq!(
        (0..1000).filter(|_| world.receive(b, &back).len() == 1).count(),
        1000
    );
}

#[test]
fn card_receives_at_most_its_limit() {
    let limits = Limits {
        to_guest: RATE,
        ..Limits::default()
    };
    let (mut world, [a, b]) = limited(limits);
    let frame = udp(route(b, a), (1, 2), b"");
    assert_eq!(
        (0..1000).filter(|_| world.receive(b, &frame).len() == 1).count(),
        16
    );
    let counts = world.network.counts(a.id).unwrap().to_guest;
    assert_eq!(
        (counts.frames, counts.dropped(DropReason::RateLimit)),
        (1000, 984)
    );
    assert_eq!(world.network.counts(b.id).unwrap().from_guest.dropped_in_all(), 0);
    // Answers to the guest's own requests have no limit.
    let echo = icmp(route(a, world.gateway()), &[8, 0, 0, 0, 0, 1, 0, 1]);
    assert_eq!(
        (0..100).filter(|_| world.receive(a, &echo).len() == 1).count(),
        100
    );
}

#[test]
fn bytes_are_limited_whatever_the_frames_size() {
    let limits = Limits {
        from_guest: Rate {
            bytes: Some(1_000_000),
            packets: None,
        },
        ..Limits::default()
    };
    for data_bytes in [0, 1000, 60_000] {
        let (mut world, [a, b]) = limited(limits);
        let frame = udp(route(a, b), (1, 2), &vec![0; data_bytes]);
        let mut bytes = 0;
        for _ in 0..10_000 {
            world.now += Duration::from_millis(1);
            for _ in 0..(2000 / frame.len()).max(1) {
                bytes += world
                    .receive(a, &frame)
                    .iter()
                    .map(|(_, frame)| frame.len())
                    .sum::<usize>();
            }
        }
        let rate = bytes as f64 / 10.0;
        assert!(
            (900_000.0..1_030_000.0).contains(&rate),
            "{data_bytes}: {rate} bytes a second"
        );
    }
}

#[test]
fn clock_that_steps_back_or_far_ahead_does_no_harm() {
    let mut limiter = rate::Limiter::new(
        Rate {
            bytes: Some(u64::MAX),
            packets: Some(0),
        },
        Instant::now() + Duration::from_secs(10),
    );
    let now = Instant::now();
    let admitted = (0..100).filter(|_| limiter.admits(1, now)).count();
    assert_eq!(admitted, 16, "no packets a second is a burst, and then none");
    assert!(!limiter.admits(1, now + Duration::from_secs(1 << 40)));
}

#[test]
fn broadcasts_reach_all_other_cards_within_a_limit() {
    let (mut world, [a, b, c]) = World::of_three(|_| {});
    let all = Route {
        to_mac: [0xff; 6],
        to: address("255.255.255.255"),
        ..route(a, b)
    };
    let frame = udp(all, (1, 2), &[0; 1000]);
    let sent = world.receive(a, &frame);
    assert_eq!(sent, [b, c].map(|guest| (Target::Card(guest.id), frame.clone())));
    let passed = (0..10_000)
        .filter(|_| !world.receive(a, &frame).is_empty())
        .count();
    // 4 MiB at once, of two copies each; one was sent before.
    assert_eq!(passed + 1, (4 << 20) / (2 * frame.len()));
    assert!(world.dropped(a, DropReason::FloodLimit) > 0);
    // The other's broadcasts, and its own frames to one card, pass.
    let others = Route {
        from_mac: b.mac,
        from: b.ipv4,
        ..all
    };
    assert_eq!(world.receive(b, &udp(others, (1, 2), b"")).len(), 2);
    assert_eq!(world.receive(a, &udp(route(a, b), (1, 2), b"")).len(), 1);
}

#[test]
fn receiver_without_room_loses_the_frame_and_the_sender_goes_on() {
    let (mut world, [a, b, c]) = World::of_three(|_| {});
    world.full.push(Target::Card(b.id));
    let all = Route {
        to_mac: [0xff; 6],
        to: address("255.255.255.255"),
        ..route(a, b)
    };
    let frame = udp(all, (1, 2), b"");
    assert_eq!(world.receive(a, &frame), [(Target::Card(c.id), frame.clone())]);
    let counts = world.network.counts(b.id).unwrap().to_guest;
    assert_eq!((counts.frames, counts.dropped(DropReason::Full)), (1, 1));
    assert_eq!(world.network.counts(a.id).unwrap().from_guest.dropped_in_all(), 0);
}
