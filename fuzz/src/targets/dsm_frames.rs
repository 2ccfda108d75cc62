//! Frames of another node of distributed memory, of every class, of which the messages go to an engine; and
//! faults of this node.

use coherence::{Access, EFFECTS_MAX, Effect, Engine, Layout, MESSAGE_BYTES, Message, NodeId, Page};
use dsm::fuzzing::{FrameRead, FrameReader};

const NODES: u16 = 3;
const PAGES: u32 = 6;
const ME: NodeId = NodeId(1);

/// Checks the effects of an event, and empties their list.
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

/// Checks that a frame that was read is written in the same form.
fn reads_again(frame: &[u8; MESSAGE_BYTES], read: &FrameRead) {
    let mut again = FrameReader::new(usize::from(NODES));
    match read {
        FrameRead::Message(message, None) => assert_eq!(message.encode(), *frame),
        // The number lies beyond the copysets of so few nodes.
        FrameRead::Message(message, Some(_)) => assert_eq!(message.encode()[..12], frame[..12]),
        FrameRead::Fragment(Some(frames)) => {
            let last = frames.as_chunks().0.iter().map(|frame| again.read(frame)).last();
            assert_eq!(last.as_ref(), Some(&Ok(read.clone())));
        }
        FrameRead::Block(written) => assert_eq!(again.read(written).as_ref(), Ok(read)),
        FrameRead::Fragment(None) | FrameRead::Stamp | FrameRead::End => {}
    }
}

pub fn fuzz(data: &[u8]) {
    let mut engine = Engine::new(Layout::even(ME, NODES, PAGES)).expect("a layout");
    let mut effects = Vec::with_capacity(EFFECTS_MAX);
    let mut reader = FrameReader::new(usize::from(NODES));
    for step in data.chunks_exact(2 + MESSAGE_BYTES).take(256) {
        let page = Page(u32::from(step[1]) % PAGES);
        let frame = step[2..].try_into().expect("as many bytes");
        match step[0] % 8 {
            0 => drop(engine.fault(page, Access::Read, &mut effects)),
            1 => drop(engine.fault(page, Access::Write, &mut effects)),
            2 => engine.used(page, &mut effects),
            3 => match reader.read(frame) {
                // A node that sends an invalid frame is disconnected.
                Err(_) => return,
                Ok(read) => reads_again(frame, &read),
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
