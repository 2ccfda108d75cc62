//! Messages that violate the protocol, and invalid layouts.

use proptest::prelude::*;

use crate::engine::{DiscardOutcome, EFFECTS_MAX, Effect, Engine};
use crate::{
    Access, Body, Layout, LayoutError, MESSAGE_BYTES, ManagedRange, Message, NodeId, Nodes, Page, Payload,
    ProtocolError, Want,
};

const NODES: u16 = 3;
const PAGES: u32 = 6;

/// Checks the effects of an event, and empties the list.
fn check(effects: &mut Vec<Effect>) {
    assert!(effects.len() <= EFFECTS_MAX, "{effects:?}");
    for effect in effects.drain(..) {
        assert!(effect.page().0 < PAGES, "{effect:?}");
        if let Effect::Send { to, message } = effect {
            assert!(to.0 < NODES, "{message:?} to {to}");
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
    }
}

fn engine(me: u16) -> Engine {
    let layout = Layout {
        migratory: true,
        ..Layout::even(NodeId(me), NODES, PAGES)
    };
    Engine::new(layout).expect("a layout")
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::Read), Just(Access::Write)]
}

fn want() -> impl Strategy<Value = Want> {
    prop_oneof![Just(Want::Read), Just(Want::Write), Just(Want::Discard)]
}

fn bytes() -> impl Strategy<Value = Payload> {
    prop_oneof![Just(Payload::None), Just(Payload::Attached), Just(Payload::Zero)]
}

fn body() -> impl Strategy<Value = Body> {
    prop_oneof![
        access().prop_map(|access| Body::Request { access }),
        (0..=NODES, want(), 0_u8..3).prop_map(|(node, want, reads)| Body::Forward {
            requester: NodeId(node),
            want,
            reads
        }),
        bytes().prop_map(|bytes| Body::Copy { bytes }),
        (want(), bytes(), 0_u64..16).prop_map(|(want, bytes, copyset)| Body::Ownership {
            want,
            bytes,
            copyset: Nodes(copyset)
        }),
        Just(Body::Invalidate),
        Just(Body::Acknowledge),
        Just(Body::Prefetch),
        (0..=NODES).prop_map(|node| Body::ForwardPrefetch {
            requester: NodeId(node)
        }),
        Just(Body::Nack),
    ]
}

#[derive(Clone, Debug)]
enum Event {
    Fault(Page, Access),
    Used(Page),
    Discard(Page),
    Prefetching(Page),
    Receive(NodeId, Message),
}

fn event() -> impl Strategy<Value = Event> {
    let page = || (0..PAGES).prop_map(Page);
    let message = ((0..=PAGES).prop_map(Page), body()).prop_map(|(page, body)| Message { page, body });
    prop_oneof![
        1 => (page(), access()).prop_map(|(page, access)| Event::Fault(page, access)),
        1 => page().prop_map(Event::Used),
        1 => page().prop_map(Event::Discard),
        1 => page().prop_map(Event::Prefetching),
        4 => ((0..=NODES).prop_map(NodeId), message)
            .prop_map(|(from, message)| Event::Receive(from, message)),
    ]
}

proptest! {
    /// Nothing panics, nothing is sent to nodes that do not exist, and a refused message leaves no trace.
    #[test]
    fn any_message_is_handled_or_refused_without_a_trace(
        me in 0..NODES,
        events in proptest::collection::vec(event(), 0..300)
    ) {
        let mut engine = engine(me);
        let mut effects = Vec::with_capacity(EFFECTS_MAX);
        for event in events {
            match event {
                Event::Fault(page, access) => {
                    engine.fault(page, access, &mut effects);
                }
                Event::Used(page) => engine.used(page, &mut effects),
                Event::Discard(page) if engine.manager(page) == NodeId(me) => {
                    engine.discard(page, &mut effects);
                }
                Event::Discard(_) => {}
                Event::Prefetching(page) => {
                    engine.prefetch(page, &mut effects);
                }
                Event::Receive(from, message) => {
                    let before = engine.clone();
                    if engine.receive(from, message, &mut effects).is_err() {
                        prop_assert_eq!(&engine, &before);
                        prop_assert!(effects.is_empty());
                    }
                }
            }
            check(&mut effects);
        }
    }

    /// Bytes decode to at most one message.
    #[test]
    fn any_bytes_decode_to_at_most_one_message(
        mut bytes: [u8; MESSAGE_BYTES],
        kind in 0_u8..0x18,
        is_short: bool
    ) {
        bytes[4] = kind;
        if is_short {
            bytes[5..].fill(0);
        }
        if let Ok(message) = Message::decode(&bytes) {
            prop_assert_eq!(message.encode(), bytes);
        }
    }
}

#[test]
fn unknown_senders_wrong_stripes_and_unexpected_messages_are_refused() {
    let mut engine = engine(0);
    let invalidate = Message {
        page: Page(0),
        body: Body::Invalidate,
    };
    let mut receive = |from, message: Message| engine.receive(NodeId(from), message, &mut Vec::new());
    assert_eq!(
        receive(0, invalidate),
        Err(ProtocolError::UnknownSender(NodeId(0)))
    );
    assert_eq!(
        receive(NODES, invalidate),
        Err(ProtocolError::UnknownSender(NodeId(NODES)))
    );
    let page = Page(PAGES);
    let from = NodeId(1);
    let past = Message { page, ..invalidate };
    assert_eq!(receive(1, past), Err(ProtocolError::WrongStripe { from, page }));
    let page = Page(0);
    let body = Body::Invalidate;
    let refusal = ProtocolError::Unexpected { from, page, body };
    assert_eq!(receive(1, invalidate), Err(refusal));
    // A node with a copy requests another.
    let ask = Message {
        page,
        body: Body::Request { access: Access::Read },
    };
    assert_eq!(receive(1, ask), Ok(()));
    assert!(receive(1, ask).is_err());
    // This node sends no request for its own page.
    let copy = Body::Copy {
        bytes: Payload::Attached,
    };
    assert!(receive(1, Message { page, body: copy }).is_err());
}

#[test]
fn only_the_manager_discards_a_page_and_receives_no_bytes() {
    // Node 1 manages pages 2 and 3, and node 2 owns one of them.
    let page = Page(2);
    let (mut manager, mut owner) = (engine(1), engine(2));
    let say = |body| Message { page, body };
    let ask = |access| say(Body::Request { access });
    assert_eq!(
        manager.receive(NodeId(2), ask(Access::Write), &mut Vec::new()),
        Ok(())
    );
    owner.fault(page, Access::Write, &mut Vec::new());
    let ownership = |want, bytes| {
        say(Body::Ownership {
            want,
            bytes,
            copyset: Nodes::NONE,
        })
    };
    // A node that requested to write is not granted a discard.
    let told = ownership(Want::Discard, Payload::Zero);
    assert!(owner.receive(NodeId(1), told, &mut Vec::new()).is_err());
    let given = ownership(Want::Write, Payload::Zero);
    assert_eq!(owner.receive(NodeId(1), given, &mut Vec::new()), Ok(()));
    owner.used(page, &mut Vec::new());
    let forward = |requester| {
        say(Body::Forward {
            requester: NodeId(requester),
            want: Want::Discard,
            reads: 0,
        })
    };
    assert!(owner.receive(NodeId(1), forward(0), &mut Vec::new()).is_err());
    assert_eq!(owner.receive(NodeId(1), forward(1), &mut Vec::new()), Ok(()));
    assert_eq!(manager.discard(page, &mut Vec::new()), DiscardOutcome::Pending);
    for (want, bytes) in [
        (Want::Discard, Payload::Attached),
        (Want::Discard, Payload::None),
        (Want::Write, Payload::Zero),
        (Want::Read, Payload::Attached),
    ] {
        let message = ownership(want, bytes);
        assert!(
            manager.receive(NodeId(2), message, &mut Vec::new()).is_err(),
            "{want:?} {bytes:?}"
        );
    }
    assert_eq!(manager.receive(NodeId(2), told, &mut Vec::new()), Ok(()));
    assert!(manager.is_alone(page) && owner.is_absent(page));
    // No request of a node is a discard.
    let mut asks = ask(Access::Read).encode();
    asks[6] |= 1 << 3;
    assert!(Message::decode(&asks).is_err());
}

#[test]
fn invalid_layouts_are_refused() {
    let good = Layout::even(NodeId(1), 3, 10);
    assert_eq!(good.check(), Ok(()));
    let firsts: Vec<u32> = good.ranges.iter().map(|range| range.first.0).collect();
    assert_eq!(firsts, [0, 3, 6]);
    let with = |change: fn(&mut Layout)| {
        let mut layout = good.clone();
        change(&mut layout);
        Engine::new(layout).err()
    };
    assert_eq!(with(|layout| layout.nodes = 65), Some(LayoutError::Nodes(65)));
    assert_eq!(with(|layout| layout.nodes = 0), Some(LayoutError::Nodes(0)));
    assert_eq!(
        with(|layout| layout.me = NodeId(3)),
        Some(LayoutError::NoSuchNode(NodeId(3)))
    );
    assert_eq!(
        with(|layout| layout.ranges[0].manager = NodeId(9)),
        Some(LayoutError::NoSuchNode(NodeId(9)))
    );
    assert_eq!(with(|layout| layout.ranges.clear()), Some(LayoutError::NoManager));
    assert_eq!(
        with(|layout| layout.ranges[0].first = Page(1)),
        Some(LayoutError::Order(Page(1)))
    );
    assert_eq!(
        with(|layout| layout.ranges[2].first = Page(3)),
        Some(LayoutError::Order(Page(3)))
    );
    assert_eq!(
        with(|layout| layout.stripes = 0),
        Some(LayoutError::Stripe {
            stripe: 0,
            stripes: 0
        })
    );
}

#[test]
fn stripes_partition_the_pages_and_each_manages_its_own() {
    let stripes = 4;
    let ranges = [(0, 1), (7, 0), (12, 2), (13, 0)];
    let range = |(first, manager)| ManagedRange {
        first: Page(first),
        manager: NodeId(manager),
    };
    let ranges: Vec<ManagedRange> = ranges.into_iter().map(range).collect();
    for page in (0..21).map(Page) {
        for stripe in 0..stripes {
            let layout = Layout {
                ranges: ranges.clone(),
                stripe,
                stripes,
                ..Layout::even(NodeId(0), 3, 21)
            };
            let mut engine = Engine::new(layout).expect("a layout");
            let is_here = page.0 % stripes == stripe;
            assert_eq!(engine.layout.place(page).is_some(), is_here);
            if let Some(place) = engine.layout.place(page) {
                assert_eq!(engine.layout.page(place), page);
                let is_manager = engine.layout.manager(page) == NodeId(0);
                assert_eq!(engine.managed(place).is_some(), is_manager);
                let ask = Message {
                    page,
                    body: Body::Request {
                        access: Access::Write,
                    },
                };
                assert_eq!(
                    engine.receive(NodeId(1), ask, &mut Vec::new()).is_ok(),
                    is_manager
                );
            }
        }
    }
}
