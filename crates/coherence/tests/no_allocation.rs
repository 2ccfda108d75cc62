//! Faults and messages allocate nothing: they are handled by threads that must not wait for memory which they may be serving.

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::sync::atomic::{AtomicU64, Ordering};

use coherence::link::Link;
use coherence::{Access, Contents, Effects, Engine, Layout, Message, NodeId, Page, Right};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counted;

// SAFETY: all is done by the system's allocator, which keeps the contract; counting touches no memory of it.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, memory: Memory) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of the same method.
        unsafe { System.alloc(memory) }
    }

    unsafe fn dealloc(&self, at: *mut u8, memory: Memory) {
        // SAFETY: `at` is of the system's allocator, as `alloc` gives no others.
        unsafe { System.dealloc(at, memory) }
    }
}

#[global_allocator]
static COUNTED: Counted = Counted;

const NODES: u16 = 4;
const PAGES: u32 = 64;

/// Messages on their way, in room that is there before.
#[derive(Default)]
struct Way(Vec<(NodeId, NodeId, Message)>);

struct Hands<'a>(NodeId, &'a mut Way);

impl Effects for Hands<'_> {
    fn send(&mut self, to: NodeId, message: Message) {
        self.1.0.push((self.0, to, message));
    }

    fn restrict(&mut self, _: Page, _: Right) {}

    fn store(&mut self, _: Page) {}

    fn grant(&mut self, _: Page, _: Right, _: Contents) {}
}

#[test]
fn nothing_is_allocated_once_engines_and_links_are_made() {
    let engine = |me| {
        Engine::new(Layout {
            migratory: true,
            ..Layout::even(NodeId(me), NODES, PAGES)
        })
    };
    let mut engines: Vec<Engine> = (0..NODES).map(|me| engine(me).expect("a layout")).collect();
    let mut link: Link<Message> = Link::new(1000, 0);
    let mut way = Way(Vec::with_capacity(1024));
    let (mut sent, mut again) = (0_u64, 0_u64);

    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for round in 0..100_u32 {
        for page in (0..PAGES).map(Page) {
            for (node, engine) in (0..NODES).map(NodeId).zip(&mut engines) {
                let is_write = (round + u32::from(node.0) + page.0) % 3 == 0;
                let access = if is_write { Access::Write } else { Access::Read };
                engine.fault(page, access, &mut Hands(node, &mut way));
            }
            loop {
                while let Some((from, to, message)) = way.0.pop() {
                    sent += 1;
                    if link.send(message, 0).is_err() {
                        link.tick(u64::MAX, |_, _| again += 1);
                        link = Link::new(1000, 0);
                    }
                    let engine = &mut engines[usize::from(to.0)];
                    let is_taken = engine.receive(from, message, &mut Hands(to, &mut way));
                    assert_eq!(is_taken, Ok(()));
                }
                for (node, engine) in (0..NODES).map(NodeId).zip(&mut engines) {
                    engine.used(page, &mut Hands(node, &mut way));
                }
                if way.0.is_empty() {
                    break;
                }
            }
        }
    }
    let after = ALLOCATIONS.load(Ordering::Relaxed);
    assert!(sent > 10_000 && again > 1000, "{sent} messages, {again} again");
    assert_eq!(after - before, 0);
}
