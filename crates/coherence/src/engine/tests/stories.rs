//! Random long runs by seed: four to sixteen nodes of up to three processors, hundreds of pages of which a
//! few are hot, and random delays of messages and holds.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use protocol::rng::Rng;

use super::world::{Op, Packet, World};
use crate::{Counters, Layout, NodeId, Page, Right, Want};

const STORIES: u64 = 3000;
const STEPS_MAX: u32 = 200_000;

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Event {
    Go(u16, usize),
    Deliver(u64),
    Used(u16, u32),
}

/// Sharing patterns (Munin).
#[derive(Clone, Copy, Debug)]
enum SharingPattern {
    /// Random accesses.
    Any,
    /// Each node reads a page and then writes it.
    Migratory,
    /// One node writes each page, the others read it.
    ProducerConsumer,
}

/// An instruction, which completes once the processor has the rights for all of it at the same time.
#[derive(Clone, Copy, Debug)]
struct Instruction {
    op: Op,
    also: Option<Op>,
    /// Of a discard in progress: steps that the processor had done before.
    begun: Option<usize>,
}

struct Story {
    rng: Rng,
    world: World,
    pages: u32,
    pattern: SharingPattern,
    asks_ahead: bool,
    /// Next instruction of each processor, and how many are left.
    programs: Vec<Vec<(Instruction, u32)>>,
    agenda: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// Messages in flight by number.
    under_way: BTreeMap<u64, Packet>,
    /// Held pages whose end of hold is scheduled.
    holds: BTreeSet<(u16, u32)>,
    now: u64,
    count: u64,
    value: u32,
    /// Largest delay of a message or hold.
    delay: usize,
    /// Discards of pages with a pending prefetch, or with a prefetched copy at the manager.
    met: u64,
}

impl Story {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let number = |below: usize| u32::try_from(below).expect("small");
        let nodes = u16::try_from(4 + rng.below(13)).expect("small");
        let pages = number(1 + rng.below(400));
        let pattern = [
            SharingPattern::Any,
            SharingPattern::Migratory,
            SharingPattern::ProducerConsumer,
        ][rng.below(3)];
        let layout = Layout {
            migratory: rng.below(2) == 0,
            ..Layout::even(NodeId(0), nodes, pages)
        };
        let processors: Vec<usize> = (0..nodes).map(|_| 1 + rng.below(3)).collect();
        let mut story = Self {
            world: World::new(&layout, &processors),
            pages,
            pattern,
            asks_ahead: rng.below(2) == 0,
            programs: Vec::new(),
            agenda: BinaryHeap::new(),
            under_way: BTreeMap::new(),
            holds: BTreeSet::new(),
            now: 0,
            count: 0,
            value: 0,
            delay: [1, 10, 100][rng.below(3)],
            met: 0,
            rng,
        };
        for (node, count) in (0..nodes).zip(&processors) {
            let mut programs = Vec::new();
            for processor in 0..*count {
                let steps = number(10 + story.rng.below(20));
                programs.push((story.instruction(node, None), steps));
                story.plan(50, Event::Go(node, processor));
            }
            story.programs.push(programs);
        }
        story
    }

    fn plan(&mut self, within: usize, event: Event) {
        let delay = u64::try_from(self.rng.below(within)).expect("small");
        self.count += 1;
        self.agenda.push(Reverse((self.now + delay, self.count, event)));
    }

    /// Returns a processor's next instruction: one of eight needs two pages.
    fn instruction(&mut self, node: u16, last: Option<Op>) -> Instruction {
        let op = self.op(node, last);
        let begun = None;
        // One of eight accesses of a manager to its page is a discard.
        if self.world.engines[usize::from(node)].manager(op.page).0 == node && self.rng.below(8) == 0 {
            let want = Want::Discard;
            let op = Op { want, ..op };
            return Instruction {
                op,
                also: None,
                begun,
            };
        }
        let is_long = self.rng.below(8) == 0;
        let also = is_long.then(|| self.op(node, None));
        Instruction { op, also, begun }
    }

    /// Returns the part of an instruction for which the processor has no right yet.
    fn lacks(&self, node: u16, instruction: Instruction) -> Option<Op> {
        let rights = &self.world.environment.rights[usize::from(node)];
        let mut parts = [Some(instruction.op), instruction.also].into_iter().flatten();
        parts.find(|op| {
            let right = rights[usize::try_from(op.page.0).expect("few")];
            match op.want {
                Want::Read => right < Right::Read,
                Want::Write => right < Right::Write,
                Want::Discard => false,
            }
        })
    }

    /// Returns a processor's next operation.
    fn op(&mut self, node: u16, last: Option<Op>) -> Op {
        // Half of all operations use few pages.
        let of = [self.pages, self.pages.min(3)][self.rng.below(2)];
        let below = self.rng.below(usize::try_from(of).expect("few"));
        let page = Page(u32::try_from(below).expect("few"));
        let reads = Op {
            want: Want::Read,
            page,
        };
        let writes = Op {
            want: Want::Write,
            page,
        };
        match (self.pattern, last) {
            (SharingPattern::Any, _) => [reads, writes][self.rng.below(2)],
            (SharingPattern::Migratory, Some(last)) if last.want == Want::Read => Op {
                want: Want::Write,
                ..last
            },
            (SharingPattern::Migratory, _) => reads,
            (SharingPattern::ProducerConsumer, _) if page.0 % 4 == u32::from(node) % 4 => writes,
            (SharingPattern::ProducerConsumer, _) => reads,
        }
    }

    /// Runs the next event; `None` when there is none.
    fn step(&mut self) -> Option<Result<Page, String>> {
        let Reverse((now, _, event)) = self.agenda.pop()?;
        self.now = now;
        let page = match event {
            Event::Go(node, processor) => {
                let (instruction, left) = self.programs[usize::from(node)][processor];
                self.value += 1;
                let lacks = self.lacks(node, instruction);
                let is_discard = instruction.op.want == Want::Discard;
                if !is_discard {
                    self.world
                        .go(node, processor, lacks.unwrap_or(instruction.op), self.value);
                } else if !self.discards(node, processor) {
                    self.plan(50, Event::Go(node, processor));
                    self.follow(instruction.op.page);
                    return Some(Ok(instruction.op.page));
                }
                if lacks.is_none() {
                    if let Some(also) = instruction.also {
                        self.world.go(node, processor, also, self.value);
                    }
                    let state = &mut self.world.environment.processors[usize::from(node)][processor];
                    state.seen.clear();
                    let next = self.instruction(node, Some(instruction.op));
                    self.programs[usize::from(node)][processor] = (next, left - 1);
                    if left > 1 {
                        self.plan(50, Event::Go(node, processor));
                    }
                }
                lacks.unwrap_or(instruction.op).page
            }
            Event::Deliver(number) => {
                let packet = self.under_way.remove(&number).expect("planned once");
                if let Err(refusal) = self.world.deliver(packet) {
                    return Some(Err(format!("{refusal}")));
                }
                packet.message().page
            }
            Event::Used(node, page) => {
                self.holds.remove(&(node, page));
                self.world.used(node, Page(page));
                Page(page)
            }
        };
        self.follow(page);
        self.prefetch(page);
        Some(Ok(page))
    }

    /// Continues or begins a processor's discard. Returns whether it is done.
    fn discards(&mut self, node: u16, processor: usize) -> bool {
        let state = |story: &Self| {
            let state = &story.world.environment.processors[usize::from(node)][processor];
            (state.done, state.waits.is_some())
        };
        let (done, waits) = state(self);
        let (instruction, _) = &mut self.programs[usize::from(node)][processor];
        let before = *instruction.begun.get_or_insert(done);
        let op = instruction.op;
        if done == before && !waits {
            self.met += u64::from(self.world.has_ahead(node, op.page));
            self.world.go(node, processor, op, 0);
        }
        state(self).0 > before
    }

    /// Sometimes prefetches the next pages.
    fn prefetch(&mut self, page: Page) {
        if !self.asks_ahead || self.rng.below(24) > 0 {
            return;
        }
        let node = u16::try_from(self.rng.below(self.programs.len())).expect("few");
        for next in (page.0..self.pages).take(1 + self.rng.below(4)).map(Page) {
            self.world.prefetch(node, next);
            self.follow(next);
        }
    }

    /// Schedules the messages sent, the woken processors, and the end of new holds.
    fn follow(&mut self, page: Page) {
        for packet in std::mem::take(&mut self.world.environment.outbox) {
            let number = self.count;
            self.under_way.insert(number, packet);
            self.plan(self.delay, Event::Deliver(number));
        }
        let nodes = u16::try_from(self.programs.len()).expect("few");
        for node in 0..nodes {
            let place = usize::from(node);
            for processor in 0..self.programs[place].len() {
                let state = &mut self.world.environment.processors[place][processor];
                if state.woken.take().is_some() {
                    self.plan(3, Event::Go(node, processor));
                }
            }
            let is_held = self.world.engines[place].is_held(page);
            if is_held && self.holds.insert((node, page.0)) {
                self.plan(4 * self.delay, Event::Used(node, page.0));
            }
        }
    }

    fn wrong(&self, page: Page) -> Option<&'static str> {
        let packets = self.under_way.values().copied();
        let about = packets.filter(|packet| packet.message().page == page);
        self.world.wrong(page, about)
    }
}

/// Runs a seed. Returns the number of steps and counts of rare events.
fn tell(seed: u64) -> Result<[u64; 8], String> {
    let mut story = Story::new(seed);
    let mut steps = 0;
    while let Some(step) = story.step() {
        let page = step?;
        steps += 1;
        if steps > STEPS_MAX {
            return Err("it does not come to rest".into());
        }
        if let Some(wrong) = story.wrong(page) {
            return Err(format!("step {steps}, page {page}: {wrong}"));
        }
    }
    let programs = story.programs.iter().flatten();
    if programs.into_iter().any(|(_, left)| *left > 0) {
        return Err("a processor waits forever".into());
    }
    let mut pages = (0..story.pages).map(Page);
    match pages.find_map(|page| story.world.wrong_at_rest(page)) {
        Some(wrong) => Err(wrong.into()),
        None => {
            let count = |of: fn(&Counters) -> u64| {
                story
                    .world
                    .engines
                    .iter()
                    .map(|engine| of(engine.counters()))
                    .sum()
            };
            let deferred = count(|counters| counters.deferred);
            Ok([
                steps.into(),
                count(|counters| counters.migratory_reads),
                deferred,
                count(|counters| counters.discarded),
                count(|counters| counters.prefetched),
                count(|counters| counters.joined),
                count(|counters| counters.nacked),
                story.met,
            ])
        }
    }
}

#[test]
fn random_runs_of_four_to_sixteen_nodes_are_coherent() {
    let mut total = [0; 8];
    for seed in 0..STORIES {
        match tell(seed) {
            Ok(counts) => total = std::array::from_fn(|at| total[at] + counts[at]),
            Err(wrong) => panic!("seed {seed}: {wrong}"),
        }
    }
    let [steps, migratory_reads, deferred, discarded, ahead @ ..] = total;
    let [prefetched, joined, nacked, met] = ahead;
    println!(
        "{steps} steps, {migratory_reads} reads granted for writing, {deferred} deferred, {discarded} \
         discarded; {prefetched} copies \
         were prefetched, {joined} were joined, {nacked} were nacked; {met} discards were begun meanwhile"
    );
    let is_quiet = [prefetched, joined, nacked].iter().any(|count| *count < 3_000);
    assert!(
        migratory_reads > 5_000 && deferred > 100_000 && discarded > 10_000 && !is_quiet && met > 100,
        "stories are too quiet"
    );
}
