//! Faults and messages allocate nothing: their handlers must not wait for memory that they may be serving.

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::cell::Cell;

use coherence::{Access, DiscardOutcome, EFFECTS_MAX, Effect, Engine, Layout, Message, NodeId, Page};

thread_local! {
    /// Allocations of this thread. Threads that run other tests allocate at any time.
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

/// Messages in flight and the list of effects, in preallocated memory.
struct Network {
    under_way: Vec<(NodeId, NodeId, Message)>,
    effects: Vec<Effect>,
    most_effects: usize,
}

impl Network {
    /// Passes an event to a node's engine, and performs its effects.
    fn turn<T>(
        &mut self,
        node: NodeId,
        engine: &mut Engine,
        event: impl FnOnce(&mut Engine, &mut Vec<Effect>) -> T,
    ) -> T {
        let result = event(engine, &mut self.effects);
        self.most_effects = self.most_effects.max(self.effects.len());
        for effect in self.effects.drain(..) {
            if let Effect::Send { to, message } = effect {
                self.under_way.push((node, to, message));
            }
        }
        result
    }
}

#[test]
fn engines_do_not_allocate_after_construction() {
    let engine = |me| {
        Engine::new(Layout {
            migratory: true,
            ..Layout::even(NodeId(me), NODES, PAGES)
        })
    };
    let mut engines: Vec<Engine> = (0..NODES).map(|me| engine(me).expect("a layout")).collect();
    let mut network = Network {
        under_way: Vec::with_capacity(1024),
        effects: Vec::with_capacity(EFFECTS_MAX),
        most_effects: 0,
    };

    let (mut messages, mut discards) = (0, 0);
    let before = ALLOCATIONS.get();
    for round in 0..100_u32 {
        for page in (0..PAGES).map(Page) {
            for (node, engine) in (0..NODES).map(NodeId).zip(&mut engines) {
                let is_write = (round + u32::from(node.0) + page.0) % 3 == 0;
                let access = if is_write { Access::Write } else { Access::Read };
                if (round + page.0) % 5 == u32::from(node.0) {
                    network.turn(node, engine, |engine, effects| engine.prefetch(page, effects));
                }
                network.turn(node, engine, |engine, effects| {
                    engine.fault(page, access, effects)
                });
                if (round + page.0).is_multiple_of(5) && engine.manager(page) == node {
                    let discarded =
                        network.turn(node, engine, |engine, effects| engine.discard(page, effects));
                    discards += u64::from(discarded != DiscardOutcome::InUse);
                }
            }
            loop {
                while let Some((from, to, message)) = network.under_way.pop() {
                    messages += 1;
                    let engine = &mut engines[usize::from(to.0)];
                    let is_taken = network.turn(to, engine, |engine, effects| {
                        engine.receive(from, message, effects)
                    });
                    assert_eq!(is_taken, Ok(()));
                }
                for (node, engine) in (0..NODES).map(NodeId).zip(&mut engines) {
                    network.turn(node, engine, |engine, effects| engine.used(page, effects));
                }
                if network.under_way.is_empty() {
                    break;
                }
            }
        }
    }
    let after = ALLOCATIONS.get();
    assert!(messages > 10_000, "{messages} messages");
    assert!(discards > 100, "{discards} discards");
    assert!(
        network.most_effects >= usize::from(NODES),
        "invalidations to all others"
    );
    assert_eq!(after - before, 0);
}
