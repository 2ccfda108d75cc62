//! Model checking of every interleaving of processors' steps, messages and ends of holds.

use model_checker::{Model, Property, check};

use super::world::{Op, Packet, World};
use crate::{Layout, ManagedRange, NodeId, Page, Want};

/// More messages than any interleaving of these worlds takes.
const MESSAGES_MAX: usize = 60;

/// Whether the values read by each processor of each node are forbidden.
type Forbidden = fn(&[Vec<Vec<u32>>]) -> bool;

/// A small world: the program of each processor of each node.
#[derive(Clone, Debug)]
struct Small {
    programs: Vec<Vec<Vec<Op>>>,
    /// Manager of each page.
    managers: Vec<u16>,
    /// A page stays until the faulting thread has used it. Otherwise it may leave at any time once it has
    /// arrived.
    patient: bool,
    migratory: bool,
    /// Number of prefetches of each node, at any time.
    aheads: u8,
    /// Check of the values read when all programs have ended.
    forbidden: Option<Forbidden>,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct State {
    world: World,
    /// Messages in flight, sorted: they have no order.
    under_way: Vec<Packet>,
    /// Messages sent so far, in patient worlds. It grows without bound if a message circulates.
    messages: usize,
    /// Prefetches of each node so far.
    aheads: Vec<u8>,
    is_refused: bool,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Step {
    Go(u16, usize),
    Deliver(Packet),
    Used(u16, u32),
    Prefetching(u16, u32),
}

impl Small {
    fn layout(&self) -> Layout {
        let firsts = (0_u32..).zip(&self.managers);
        let range = |(first, manager): (u32, &u16)| ManagedRange {
            first: Page(first),
            manager: NodeId(*manager),
        };
        Layout {
            me: NodeId(0),
            nodes: u16::try_from(self.programs.len()).expect("few"),
            pages: u32::try_from(self.managers.len()).expect("few"),
            ranges: firsts.map(range).collect(),
            stripe: 0,
            stripes: 1,
            migratory: self.migratory,
        }
    }

    /// Value of a write, different for each.
    fn value(node: u16, processor: usize, done: usize) -> u32 {
        let place = usize::from(node) * 100 + processor * 10 + done + 1;
        u32::try_from(place).expect("small")
    }

    fn pages(&self) -> impl Iterator<Item = Page> {
        (0_u32..).take(self.managers.len()).map(Page)
    }

    fn wrong(&self, state: &State) -> Option<&'static str> {
        if state.is_refused {
            return Some("an honest message is refused");
        }
        let under_way = |page| {
            let packets = state.under_way.iter().copied();
            packets.filter(move |packet| packet.message().page == page)
        };
        let wrong = self
            .pages()
            .find_map(|page| state.world.wrong(page, under_way(page)));
        let mut steps = Vec::new();
        self.actions(state, &mut steps);
        let can_move = || {
            steps
                .into_iter()
                .any(|step| self.next_state(state, step).is_some())
        };
        if wrong.is_some() || can_move() {
            return wrong;
        }
        if !self.is_done(state) {
            return Some("a processor waits forever");
        }
        self.pages().find_map(|page| state.world.wrong_at_rest(page))
    }

    fn is_done(&self, state: &State) -> bool {
        let programs = self.programs.iter().flatten();
        let processors = state.world.environment.processors.iter().flatten();
        programs
            .zip(processors)
            .all(|(program, processor)| processor.done == program.len())
    }

    fn is_forbidden(&self, state: &State) -> bool {
        let Some(forbidden) = self.forbidden.filter(|_| self.is_done(state)) else {
            return false;
        };
        let nodes = state.world.environment.processors.iter();
        let seen: Vec<Vec<Vec<u32>>> = nodes
            .map(|processors| {
                processors
                    .iter()
                    .map(|processor| processor.seen.clone())
                    .collect()
            })
            .collect();
        forbidden(&seen)
    }
}

impl Model for Small {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let processors: Vec<usize> = self.programs.iter().map(Vec::len).collect();
        vec![State {
            world: World::new(&self.layout(), &processors),
            under_way: Vec::new(),
            messages: 0,
            aheads: vec![0; self.programs.len()],
            is_refused: false,
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let world = &state.world;
        for (node, programs) in (0_u16..).zip(&self.programs) {
            let processors = &world.environment.processors[usize::from(node)];
            for (place, (program, processor)) in programs.iter().zip(processors).enumerate() {
                if processor.waits.is_none() && processor.done < program.len() {
                    steps.push(Step::Go(node, place));
                }
            }
            for page in self.pages() {
                // The end of a hold may be reported late, or for a page that is not held.
                let is_held = world.engines[usize::from(node)].is_held(page);
                if !self.patient || is_held && !world.is_awaited(node, page) {
                    steps.push(Step::Used(node, page.0));
                }
                if state.aheads[usize::from(node)] < self.aheads {
                    steps.push(Step::Prefetching(node, page.0));
                }
            }
        }
        // Equal packets are the same step.
        let mut packets = state.under_way.clone();
        packets.dedup();
        steps.extend(packets.into_iter().map(Step::Deliver));
    }

    fn next_state(&self, state: &State, step: Step) -> Option<State> {
        let mut next = state.clone();
        let world = &mut next.world;
        match step {
            Step::Go(node, processor) => {
                let done = world.environment.processors[usize::from(node)][processor].done;
                let op = self.programs[usize::from(node)][processor][done];
                world.go(node, processor, op, Self::value(node, processor, done));
                if self.forbidden.is_none() {
                    world.environment.processors[usize::from(node)][processor]
                        .seen
                        .clear();
                }
            }
            Step::Deliver(packet) => {
                let place = next.under_way.iter().position(|other| *other == packet)?;
                next.under_way.remove(place);
                next.is_refused = world.deliver(packet).is_err();
            }
            Step::Used(node, page) => world.used(node, Page(page)),
            Step::Prefetching(node, page) => {
                next.aheads[usize::from(node)] += u8::from(world.prefetch(node, Page(page)));
            }
        }
        world.forget_counters();
        let sent = std::mem::take(&mut world.environment.outbox);
        if self.patient {
            next.messages += sent.len();
        }
        next.under_way.extend(sent);
        next.under_way.sort_unstable();
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("sound", |model: &Small, state: &State| {
                let wrong = model.wrong(state);
                if let Some(wrong) = wrong {
                    println!("{wrong}");
                }
                wrong.is_none()
            }),
            Property::always("comes to rest", |_, state: &State| state.messages <= MESSAGES_MAX),
            Property::always("nothing forbidden is seen", |model: &Small, state: &State| {
                !model.is_forbidden(state)
            }),
            Property::sometimes("all done", |model: &Small, state: &State| model.is_done(state)),
        ]
    }

    fn within_boundary(&self, state: &State) -> bool {
        state.messages <= MESSAGES_MAX + 1
    }
}

/// Parses a program. `"RWD"` reads page 0, writes it, then discards it; `"rwd"` does the same with page 1.
fn program(text: &str) -> Vec<Op> {
    let op = |letter| match letter {
        'R' => (Want::Read, 0),
        'W' => (Want::Write, 0),
        'D' => (Want::Discard, 0),
        'r' => (Want::Read, 1),
        'w' => (Want::Write, 1),
        'd' => (Want::Discard, 1),
        _ => panic!("{letter}"),
    };
    let ops = text.chars().map(op);
    ops.map(|(want, page)| Op {
        want,
        page: Page(page),
    })
    .collect()
}

impl Small {
    /// Creates a model. Spaces separate the programs of one node's processors.
    fn new(nodes: &[&str], managers: &[u16]) -> Self {
        let node = |text: &&str| text.split(' ').map(program).collect();
        Self {
            programs: nodes.iter().map(node).collect(),
            managers: managers.to_vec(),
            patient: true,
            migratory: false,
            aheads: 0,
            forbidden: None,
        }
    }

    fn impatient(self) -> Self {
        let patient = false;
        Self { patient, ..self }
    }

    fn migratory(self) -> Self {
        let migratory = true;
        Self { migratory, ..self }
    }

    fn aheads(self, aheads: u8) -> Self {
        Self { aheads, ..self }
    }

    fn forbidden(self, forbidden: Forbidden) -> Self {
        let forbidden = Some(forbidden);
        Self { forbidden, ..self }
    }
}

#[test]
fn two_nodes_of_two_processors_are_coherent_on_one_page() {
    check(Small::new(&["WR RW", "RW WR"], &[0]), 10_000);
}

#[test]
fn two_nodes_of_two_processors_are_coherent_without_minimum_residency() {
    check(Small::new(&["WR R", "RW W"], &[0]).impatient(), 100_000);
}

#[test]
fn three_nodes_are_coherent_on_one_page() {
    check(Small::new(&["RWR", "RWR", "RWR"], &[0]), 10_000);
}

#[test]
fn three_nodes_are_coherent_without_minimum_residency() {
    check(Small::new(&["RW", "RW", "W"], &[0]).impatient(), 100_000);
}

#[test]
fn three_nodes_are_coherent_with_two_processors_at_two_of_them() {
    check(Small::new(&["R", "W RW", "RW R"], &[0]), 10_000);
}

/// After two nodes that read and wrote, a third is granted the page for writing at its read, while others
/// still wait for copies.
#[test]
fn three_nodes_are_coherent_on_a_migratory_page() {
    check(Small::new(&["RW R", "RWR", "RWR"], &[0]).migratory(), 10_000);
    let small = Small::new(&["R", "RW", "RWR"], &[0]).impatient();
    check(small.migratory(), 10_000);
}

/// Nodes prefetch at any time, the manager too: a zero page, one invalidated meanwhile, or one just
/// requested.
#[test]
fn prefetches_at_any_time_are_coherent() {
    for nodes in [&["WR R", "RW W"][..], &["W", "RW", "R"]] {
        check(Small::new(nodes, &[0]).aheads(1), 1_000);
    }
    check(Small::new(&["R", "W", "W"], &[0]).impatient().aheads(1), 10_000);
}

/// As above with a migratory page: a prefetch never grants it for writing.
#[test]
fn prefetches_of_a_migratory_page_are_coherent() {
    check(Small::new(&["RW", "RW", "R"], &[0]).migratory().aheads(1), 1_000);
}

#[test]
fn two_nodes_are_coherent_on_two_pages() {
    for managers in [[0, 0], [0, 1]] {
        check(Small::new(&["WrW Rw", "wRw rW"], &managers), 10_000);
    }
}

/// Checks all interleavings for a forbidden outcome, with each assignment of managers to the two pages.
fn litmus(nodes: &[&str], forbidden: Forbidden) {
    for managers in [[0, 0], [0, 1], [1, 0], [1, 1]] {
        check(Small::new(nodes, &managers).forbidden(forbidden), 100);
    }
}

/// MP: a reader of the second write also reads the first. Another processor of its node requests the first
/// page meanwhile, so that a copy may be in flight when it is written.
#[test]
fn message_passing() {
    litmus(&["Ww r", "rR Rr"], |seen| {
        seen[1][0][0] != 0 && seen[1][0][1] == 0
    });
}

/// As above, and the reader prefetches the pages: a copy that no thread waited for is as old as any other.
#[test]
fn message_passing_holds_with_prefetches() {
    let forbidden: Forbidden = |seen| seen[1][0][0] != 0 && seen[1][0][1] == 0;
    for managers in [[0, 0], [0, 1], [1, 0], [1, 1]] {
        let small = Small::new(&["Ww", "rR"], &managers);
        check(small.aheads(2).forbidden(forbidden), 100);
    }
}

/// SB: of two processors that write and then read the other's variable, one reads a write.
#[test]
fn store_buffering() {
    litmus(&["Wr R", "wR r"], |seen| seen[0][0][1] == 0 && seen[1][0][1] == 0);
}

/// IRIW: two readers of two independent writes see them in the same order.
#[test]
fn independent_reads_of_independent_writes_agree() {
    litmus(&["W Rr", "w rR"], |seen| are_reversed(&seen[0][1], &seen[1][1]));
    litmus(&["W", "w Rr", "rR"], |seen| {
        are_reversed(&seen[1][1], &seen[2][0])
    });
}

/// One reader sees only the write to the first page, the other only that to the second.
fn are_reversed(first: &[u32], second: &[u32]) -> bool {
    first[0] != 0 && first[1] == 0 && second[0] != 0 && second[1] == 0
}

/// The manager discards its page while other nodes, and another processor of its own, use it.
#[test]
fn discard_is_coherent_while_two_nodes_use_the_page() {
    check(Small::new(&["WDR RW", "RW WR"], &[0]), 10_000);
    check(Small::new(&["DW D", "RWR W"], &[0]), 5_000);
}

#[test]
fn discard_is_coherent_without_minimum_residency() {
    check(Small::new(&["WDR", "RW W"], &[0]).impatient(), 10_000);
}

#[test]
fn discard_is_coherent_while_three_nodes_use_the_page() {
    check(Small::new(&["DR W", "RWR", "RW"], &[0]), 10_000);
    check(Small::new(&["D", "WR", "RW"], &[0]).impatient(), 10_000);
}

#[test]
fn discard_of_a_migratory_page_is_coherent() {
    check(Small::new(&["RWD", "RWR", "RW"], &[0]).migratory(), 10_000);
}

/// Nodes prefetch at any time, the manager too: before, during and after a discard.
#[test]
fn discard_is_coherent_with_prefetches() {
    for nodes in [&["WD", "RW"][..], &["D R", "WR"], &["D", "W", "R"]] {
        check(Small::new(nodes, &[0]).aheads(1), 500);
    }
    check(Small::new(&["D", "WW"], &[0]).aheads(2), 500);
    check(Small::new(&["DR", "W"], &[0]).impatient().aheads(1), 500);
}

#[test]
fn discard_of_a_prefetched_migratory_page_is_coherent() {
    check(Small::new(&["D", "RW", "RW"], &[0]).migratory().aheads(1), 1_000);
}

#[test]
fn discard_of_one_of_two_pages_is_coherent() {
    check(Small::new(&["WdrW Rw", "DwRw"], &[1, 0]), 10_000);
}

/// As below, and both nodes prefetch the pages: a prefetched copy is gone when the discard completes, and no
/// old copy is sent afterwards.
#[test]
fn discarded_contents_are_never_prefetched() {
    let forbidden: Forbidden = |seen| seen[1][0][0] != 0 && seen[1][0][1] != 0;
    for managers in [[0, 0], [0, 1]] {
        let small = Small::new(&["WDw", "rR"], &managers);
        check(small.aheads(1).forbidden(forbidden), 1_000);
    }
}

/// A reader of a write after a discard reads nothing older than the discard; later writes are kept.
#[test]
fn discarded_contents_are_never_read_again() {
    let forbidden: Forbidden = |seen| seen[1][0][0] != 0 && seen[1][0][1] != 0;
    for managers in [[0, 0], [0, 1]] {
        check(
            Small::new(&["WDw R", "rR R"], &managers).forbidden(forbidden),
            1_000,
        );
    }
    let forbidden: Forbidden = |seen| seen[1][0][0] != 0 && seen[1][0][2] == 0;
    for managers in [[0, 0], [0, 1]] {
        check(
            Small::new(&["RDw", "rWR R"], &managers).forbidden(forbidden),
            1_000,
        );
    }
}
