//! Faults and messages allocate nothing: they are handled by threads that must not wait for memory which they may be serving.

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::cell::Cell;

use coherence::{Access, Contents, Discarded, Effects, Engine, Layout, Message, NodeId, Page, Right};

thread_local! {
    /// By this thread: those that run tests allocate when they like.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counted;

// SAFETY: all is done by the system's allocator, which keeps the contract; counting allocates nothing.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, memory: Memory) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
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

    fn forget(&mut self, _: Page) {}

    fn came_ahead(&mut self, _: Page) {}
}

#[test]
fn nothing_is_allocated_once_engines_are_made() {
    let engine = |me| {
        Engine::new(Layout {
            migratory: true,
            ..Layout::even(NodeId(me), NODES, PAGES)
        })
    };
    let mut engines: Vec<Engine> = (0..NODES).map(|me| engine(me).expect("a layout")).collect();
    let mut way = Way(Vec::with_capacity(1024));

    let (mut messages, mut discards) = (0, 0);
    let before = ALLOCATIONS.get();
    for round in 0..100_u32 {
        for page in (0..PAGES).map(Page) {
            for (node, engine) in (0..NODES).map(NodeId).zip(&mut engines) {
                let is_write = (round + u32::from(node.0) + page.0) % 3 == 0;
                let access = if is_write { Access::Write } else { Access::Read };
                if (round + page.0) % 5 == u32::from(node.0) {
                    engine.ask_ahead(page, &mut Hands(node, &mut way));
                }
                engine.fault(page, access, &mut Hands(node, &mut way));
                if (round + page.0).is_multiple_of(5) && engine.manager(page) == node {
                    discards +=
                        u64::from(engine.discard(page, &mut Hands(node, &mut way)) != Discarded::InUse);
                }
            }
            loop {
                while let Some((from, to, message)) = way.0.pop() {
                    messages += 1;
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
    let after = ALLOCATIONS.get();
    assert!(messages > 10_000, "{messages} messages");
    assert!(discards > 100, "{discards} discards");
    assert_eq!(after - before, 0);
}
