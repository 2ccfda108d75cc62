use std::collections::{BTreeSet, VecDeque};

use coherence::{Access, Body, Effect, Engine, Layout, Message, NodeId, Page, Right};

use super::*;

/// A page past all pages of these tests.
const END: u32 = 10_000;

/// Reads pages of which only prefetched ones are here. Returns the length of each window.
fn windows(ahead: &mut ReadPrefetcher, pages: impl Iterator<Item = u32>) -> Vec<(u32, u32)> {
    let mut here = BTreeSet::new();
    let mut windows = Vec::new();
    for page in pages {
        if here.contains(&page) {
            continue;
        }
        let asked = ahead.on_read_fault(page, END, |page| here.contains(&page));
        windows.push((page, asked.end - asked.start));
        here.insert(page);
        here.extend(asked);
    }
    windows
}

#[test]
fn sequential_reads_double_the_window_up_to_the_largest() {
    let windows = windows(&mut ReadPrefetcher::default(), 100..200);
    let expected = [
        (100, 0),
        (101, 2),
        (104, 4),
        (109, 8),
        (118, 16),
        (135, 16),
        (152, 16),
    ];
    assert_eq!(windows[..7], expected);
}

#[test]
fn random_reads_prefetch_nothing() {
    let mut random = fastrand::Rng::with_seed(7);
    let mut pages: Vec<u32> = (0..END).step_by(GAP as usize + 2).collect();
    random.shuffle(&mut pages);
    let windows = windows(&mut ReadPrefetcher::default(), pages.into_iter());
    assert!(windows.iter().all(|(_, asked)| *asked == 0), "{windows:?}");
}

/// Pages past the end of a short run are wasted, and disturb their owner.
#[test]
fn at_most_two_pages_are_prefetched_past_a_short_run() {
    for (run, past) in [(1, 0), (2, 2), (3, 1), (4, 0)] {
        let mut ahead = ReadPrefetcher::default();
        for start in (0..END - 32).step_by(32) {
            let windows = windows(&mut ahead, start..start + run);
            let last = windows.iter().map(|(page, asked)| page + asked).max().unwrap();
            assert_eq!(last + 1 - (start + run), past, "a run of {run}");
        }
    }
}

#[test]
fn interleaved_streams_are_each_followed() {
    let mut ahead = ReadPrefetcher::default();
    let pages = (0..60).flat_map(|at| (0..STREAMS as u32).map(move |stream| stream * 1000 + at));
    let windows = windows(&mut ahead, pages);
    assert!(windows.len() <= 7 * STREAMS, "{windows:?}");
}

#[test]
fn only_a_gap_of_absent_pages_ends_a_stream() {
    let mut ahead = ReadPrefetcher::default();
    let mut on_read_fault =
        |page, here: Range<u32>| ahead.on_read_fault(page, END, |page| here.contains(&page));
    assert_eq!(on_read_fault(10, 0..0), 10..10);
    assert_eq!(on_read_fault(11, 0..0), 12..14);
    assert_eq!(
        on_read_fault(20, 12..20),
        21..25,
        "12 and 13 came, and the rest was here"
    );
    let beyond = 25 + GAP + 1;
    assert_eq!(
        on_read_fault(beyond, 21..beyond),
        beyond..beyond,
        "too far to be seen"
    );
    assert_eq!(on_read_fault(100, 0..0), 100..100);
    assert_eq!(on_read_fault(102, 0..0), 102..102, "101 was not read");
}

#[test]
fn only_a_fault_in_the_second_half_of_a_window_extends_it() {
    let mut ahead = ReadPrefetcher::default();
    for page in [0, 1, 4] {
        ahead.on_read_fault(page, END, |_| false);
    }
    // Pages 5 to 8 are in flight.
    assert_eq!(ahead.on_read_fault(5, END, |_| false), 5..5);
    assert_eq!(ahead.on_read_fault(6, END, |_| false), 6..6);
    assert_eq!(ahead.on_read_fault(7, END, |_| false), 9..16);
    assert_eq!(
        ahead.on_read_fault(7, END, |_| false),
        7..7,
        "a second thread waits for it"
    );
    assert_eq!(ahead.on_read_fault(15, END, |_| false), 16..32);
}

#[test]
fn nothing_is_prefetched_past_the_end() {
    let mut ahead = ReadPrefetcher::default();
    let mut asked = Vec::new();
    for page in 0..40 {
        asked.extend(ahead.on_read_fault(page, 37, |_| false));
        assert_eq!(ahead.on_read_fault(page, 37, |_| false).len(), 0, "once");
    }
    assert!(asked.iter().all(|page| *page < 37), "{asked:?}");
}

#[test]
fn stream_with_nacks_or_invalidations_pauses_longer_each_time() {
    let mut ahead = ReadPrefetcher::default();
    let mut rests = Vec::new();
    let mut page = 0;
    for _ in 0..5 {
        let mut rest = 0;
        loop {
            let asked = ahead.on_read_fault(page, END, |_| false);
            page = asked.end.max(page + 1);
            if !asked.is_empty() {
                asked.for_each(|page| ahead.on_nack(page));
                break;
            }
            rest += 1;
        }
        rests.push(rest);
    }
    assert_eq!(rests, [1, 8, 16, 32, 64]);
}

#[test]
fn nack_of_one_page_halves_the_window_once() {
    let mut ahead = ReadPrefetcher::default();
    for page in [0, 1, 4, 9, 18] {
        ahead.on_read_fault(page, END, |_| false);
    }
    ahead.on_nack(500);
    ahead.on_nack(18);
    assert_eq!(
        ahead.on_read_fault(35, END, |_| false),
        36..52,
        "others' pages say nothing of it"
    );
    ahead.on_nack(40);
    ahead.on_nack(41);
    assert_eq!(ahead.on_read_fault(52, END, |_| false), 53..61);
}

#[test]
fn invalidated_page_is_not_prefetched_for_a_while() {
    let mut ahead = ReadPrefetcher::default();
    ahead.on_invalidation(70);
    assert!(ahead.was_invalidated_lately(70));
    assert!(
        !ahead.was_invalidated_lately(70 + TAKEN as u32),
        "another with the same remainder"
    );
    for page in 0..TAKEN_FOR {
        assert!(ahead.was_invalidated_lately(70), "{page}");
        ahead.on_read_fault(page * 100, END, |_| false);
    }
    assert!(!ahead.was_invalidated_lately(70));
}

/// Two nodes: the first one has written all pages and invalidates some; the second reads.
struct EnginePair {
    engines: [Engine; 2],
    rights: [Vec<Right>; 2],
    way: VecDeque<(usize, Message)>,
    /// Pages that node 1 has requested.
    asked: BTreeSet<u32>,
    granted: Vec<(usize, Page)>,
}

const PAGES: u32 = 200;

impl EnginePair {
    fn new() -> Self {
        let mut layout = Layout::even(NodeId(0), 2, PAGES);
        layout.ranges.truncate(1);
        let engine = |me| {
            Engine::new(Layout {
                me: NodeId(me),
                ..layout.clone()
            })
        };
        Self {
            engines: [engine(0).unwrap(), engine(1).unwrap()],
            rights: [
                vec![Right::None; PAGES as usize],
                vec![Right::None; PAGES as usize],
            ],
            way: VecDeque::new(),
            asked: BTreeSet::new(),
            granted: Vec::new(),
        }
    }

    fn with<T>(&mut self, node: usize, event: impl FnOnce(&mut Engine, &mut Vec<Effect>) -> T) -> T {
        let mut effects = Vec::new();
        let result = event(&mut self.engines[node], &mut effects);
        for effect in effects {
            self.perform(node, effect);
        }
        result
    }

    fn perform(&mut self, node: usize, effect: Effect) {
        match effect {
            Effect::Send { to, message } => {
                let page = message.page.0;
                match message.body {
                    Body::Request { .. } | Body::Prefetch => {
                        assert!(
                            self.asked.insert(page),
                            "asked for page {page} again before the answer"
                        );
                    }
                    Body::Copy { .. } | Body::Ownership { .. } | Body::Nack => {
                        assert!(self.asked.remove(&page));
                    }
                    _ => {}
                }
                self.way.push_back((usize::from(to.0), message));
            }
            Effect::Restrict { page, to } => self.rights[node][page.0 as usize] = to,
            Effect::Grant { page, right, .. } => {
                self.rights[node][page.0 as usize] = right;
                self.granted.push((node, page));
            }
            Effect::MapPrefetched { page } => self.rights[node][page.0 as usize] = Right::Read,
            Effect::Store { .. } | Effect::Forget { .. } => {}
        }
    }

    /// Delivers any one message; a granted page is used.
    fn deliver(&mut self, ahead: &mut ReadPrefetcher, random: &mut fastrand::Rng) {
        let Some((to, message)) = self.way.remove(random.usize(..self.way.len().max(1))) else {
            return;
        };
        if to == 1 {
            match message.body {
                Body::Nack => ahead.on_nack(message.page.0),
                Body::Invalidate => ahead.on_invalidation(message.page.0),
                _ => {}
            }
        }
        let from = NodeId(1 - to as u16);
        self.with(to, |engine, effects| {
            engine.receive(from, message, effects).unwrap()
        });
        self.use_all();
    }

    fn use_all(&mut self) {
        for (node, page) in std::mem::take(&mut self.granted) {
            self.with(node, |engine, effects| engine.used(page, effects));
        }
    }
}

/// In every order of reads, invalidations and replies: at most one window is pending, each page is requested
/// once until its reply, nothing past the end, and every read completes.
#[test]
fn no_page_is_prefetched_twice_before_its_reply_and_windows_are_bounded() {
    let (mut total, mut joined) = (0, 0);
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut two, mut ahead) = (EnginePair::new(), ReadPrefetcher::default());
        let mut places = [0_u32; 3];
        for _ in 0..400 {
            match random.u32(..10) {
                0..4 => {
                    let place = &mut places[random.usize(..3)];
                    *place = if random.u32(..30) == 0 {
                        random.u32(..PAGES)
                    } else {
                        (*place + 1) % PAGES
                    };
                    let page = *place;
                    if two.rights[1][page as usize] != Right::None {
                        continue;
                    }
                    two.with(1, |engine, effects| {
                        engine.fault(Page(page), Access::Read, effects)
                    });
                    let rights = two.rights[1].clone();
                    let end = (page / 64 + 1) * 64;
                    let range = ahead
                        .on_read_fault(page, end.min(PAGES), |page| rights[page as usize] != Right::None);
                    assert!(range.len() <= WINDOW_MAX as usize && range.start > page || range.is_empty());
                    assert!(range.is_empty() || range.end <= end.min(PAGES), "{range:?}");
                    for page in range {
                        let was_asked = two.with(1, |engine, effects| engine.prefetch(Page(page), effects));
                        total += u32::from(was_asked);
                    }
                }
                4 => {
                    let page = Page(random.u32(..PAGES));
                    two.with(0, |engine, effects| engine.fault(page, Access::Write, effects));
                    two.use_all();
                }
                _ => two.deliver(&mut ahead, &mut random),
            }
        }
        while !two.way.is_empty() {
            two.deliver(&mut ahead, &mut random);
        }
        assert!(
            two.asked.is_empty(),
            "seed {seed}: {:?} without an answer",
            two.asked
        );
        joined += two.engines[1].counters().joined;
    }
    assert!(
        total > 10_000 && joined > 1_000,
        "{total} asked, {joined} joined: too quiet"
    );
}
