//! What another node of distributed memory sends: messages of the protocol, and messages about merged pages in pieces.

use coherence::{Access, EFFECTS_MAX, Effect, Engine, Layout, MESSAGE_BYTES, Message, NodeId, Page};
use dsm::fuzzing::Assembler;

const NODES: u16 = 3;
const PAGES: u32 = 6;
const ME: NodeId = NodeId(1);

/// Checks what an event requires of the driver, and empties the list.
fn check(effects: &mut Vec<Effect>) {
    assert!(effects.len() <= EFFECTS_MAX, "{effects:?}");
    for effect in effects.drain(..) {
        assert!(effect.page().0 < PAGES, "{effect:?}");
        if let Effect::Send { to, message } = effect {
            assert!(to != ME && to.0 < NODES, "{message:?} to node {to}");
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
    }
}

fn receive(engine: &mut Engine, from: NodeId, message: Message, effects: &mut Vec<Effect>) {
    let before = engine.clone();
    if engine.receive(from, message, effects).is_err() {
        assert!(*engine == before && effects.is_empty(), "{message:?} was refused");
    }
}

pub fn fuzz(data: &[u8]) {
    let mut engine = Engine::new(Layout::even(ME, NODES, PAGES)).expect("a layout");
    let mut effects = Vec::with_capacity(EFFECTS_MAX);
    let mut assembler = Assembler::new(usize::from(NODES));
    for step in data.chunks_exact(2 + MESSAGE_BYTES).take(256) {
        let page = Page(u32::from(step[1]) % PAGES);
        let frame = step[2..].try_into().expect("as many bytes");
        match step[0] % 8 {
            0 => drop(engine.fault(page, Access::Read, &mut effects)),
            1 => drop(engine.fault(page, Access::Write, &mut effects)),
            2 => engine.used(page, &mut effects),
            3 => match assembler.add(frame) {
                // A node that sends nonsense is left.
                Err(_) => return,
                Ok(None) => {}
                Ok(Some(frames)) => {
                    let mut again = Assembler::new(usize::from(NODES));
                    let last = frames.as_chunks().0.iter().map(|frame| again.add(frame)).last();
                    assert_eq!(last, Some(Ok(Some(frames.clone()))));
                }
            },
            _ => {
                if let Ok(message) = Message::decode(frame) {
                    assert_eq!(message.encode(), *frame);
                    receive(&mut engine, NodeId(u16::from(step[1]) % 4), message, &mut effects);
                }
            }
        }
        check(&mut effects);
    }
}
