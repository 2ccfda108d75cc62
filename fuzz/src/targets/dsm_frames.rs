//! What another node of distributed memory sends: messages of the protocol, and messages about merged pages in pieces.

use coherence::{Access, Contents, Effects, Engine, Layout, MESSAGE_BYTES, Message, NodeId, Page, Right};
use dsm::fuzzing::Assembler;

const NODES: u16 = 3;
const PAGES: u32 = 6;
const ME: NodeId = NodeId(1);

/// Checks each effect, and counts them.
#[derive(Default)]
struct Checked(usize);

impl Checked {
    fn is_of(&mut self, page: Page) {
        self.0 += 1;
        assert!(page.0 < PAGES, "page {page}");
    }
}

impl Effects for Checked {
    fn send(&mut self, to: NodeId, message: Message) {
        self.is_of(message.page);
        assert!(to != ME && to.0 < NODES, "{message:?} to node {to}");
        assert_eq!(Message::decode(&message.encode()), Ok(message));
    }
    fn restrict(&mut self, page: Page, _: Right) {
        self.is_of(page);
    }
    fn store(&mut self, page: Page) {
        self.is_of(page);
    }
    fn grant(&mut self, page: Page, _: Right, _: Contents) {
        self.is_of(page);
    }
    fn forget(&mut self, page: Page) {
        self.is_of(page);
    }
    fn came_ahead(&mut self, page: Page) {
        self.is_of(page);
    }
}

fn receive(engine: &mut Engine, from: NodeId, message: Message) {
    let (before, mut effects) = (engine.clone(), Checked::default());
    if engine.receive(from, message, &mut effects).is_err() {
        assert!(*engine == before && effects.0 == 0, "{message:?} was refused");
    }
}

pub fn fuzz(data: &[u8]) {
    let mut engine = Engine::new(Layout::even(ME, NODES, PAGES)).expect("a layout");
    let mut assembler = Assembler::new(usize::from(NODES));
    for step in data.chunks_exact(2 + MESSAGE_BYTES).take(256) {
        let page = Page(u32::from(step[1]) % PAGES);
        let frame = step[2..].try_into().expect("as many bytes");
        match step[0] % 8 {
            0 => drop(engine.fault(page, Access::Read, &mut Checked::default())),
            1 => drop(engine.fault(page, Access::Write, &mut Checked::default())),
            2 => engine.used(page, &mut Checked::default()),
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
                    receive(&mut engine, NodeId(u16::from(step[1]) % 4), message);
                }
            }
        }
    }
}
