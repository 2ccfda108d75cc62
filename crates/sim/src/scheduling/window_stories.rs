//! Stories by seed: processes of cells that die, hang or are slow while they agree on windows.

use std::collections::BTreeMap;

use policy::cpu::windows::{
    Arbiter, FRAME, Follower, LEAD, LEASE, PERIOD, Report, Schedule, SpanningVm, UNLIMITED, WindowState,
};

use crate::chance::Chance;
use crate::{MILLISECOND, SECOND, Time};

/// Step of the stories.
const STEP: Time = MILLISECOND;
/// End of the faults, and time after which cells have to agree: a cell that did not answer is left out for
/// 5 s in the product; then one schedule ends and the next begins.
const FAULTS_UNTIL: Time = 12 * SECOND;
const AVOIDANCE: Time = 5 * SECOND;
const AGREED_AFTER: Time = AVOIDANCE + LEASE + 2 * PERIOD + LEAD;
const END: Time = FAULTS_UNTIL + AGREED_AFTER + 5 * SECOND;

/// Process of a cell.
struct Process {
    arbiter: Arbiter<u8>,
    follower: Follower<u8>,
    /// Time until which there is no process, or none that answers.
    dead_until: Time,
    hangs_until: Time,
    report_at: Time,
    avoided: BTreeMap<usize, Time>,
}

struct Story {
    chance: Chance,
    now: Time,
    cells: Vec<Process>,
    vms: Vec<SpanningVm<u8>>,
    local: Vec<u32>,
    /// Replies on their way: time of arrival, receiver, schedule.
    replies: Vec<(Time, usize, Schedule<u8>)>,
    deaths: u64,
    lost: u64,
}

impl Story {
    fn new(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let cells = 2 + chance.below(3) as usize;
        let mut vms = Vec::new();
        for vm in 0..2 + chance.below(5) as u8 {
            let mut all: Vec<u16> = (0..cells as u16).collect();
            while all.len() > 2 && chance.once_in(2) {
                let index = chance.below(all.len() as u64) as usize;
                all.swap_remove(index);
            }
            vms.push(SpanningVm {
                vm,
                weight: [50, 100, 200][chance.below(3) as usize],
                cells: all.into_iter().collect(),
                most_permille: UNLIMITED,
            });
        }
        Self {
            local: (0..cells).map(|_| 100 * chance.below(3) as u32).collect(),
            cells: (0..cells).map(|_| process(chance.below(SECOND))).collect(),
            now: 10 * SECOND,
            chance,
            vms,
            replies: Vec::new(),
            deaths: 0,
            lost: 0,
        }
    }

    fn step(&mut self) {
        self.now += STEP;
        let (now, faulty) = (self.now, self.now < 10 * SECOND + FAULTS_UNTIL);
        let (due, later) = std::mem::take(&mut self.replies)
            .into_iter()
            .partition(|reply| reply.0 <= now);
        self.replies = later;
        let due: Vec<(Time, usize, Schedule<u8>)> = due;
        for (_, cell, schedule) in due {
            // A late one may be out of date, and is refused or superseded.
            let _ = self.cells[cell].follower.take(now, schedule);
        }
        for cell in 0..self.cells.len() {
            if faulty && self.chance.once_in(4_000) {
                let dead_for = 100 * MILLISECOND + self.chance.below(3 * SECOND);
                self.cells[cell] = process(now + dead_for);
                self.cells[cell].dead_until = now + dead_for;
                self.replies.retain(|reply| reply.1 != cell);
                self.deaths += 1;
            }
            if faulty && self.chance.once_in(8_000) {
                self.cells[cell].hangs_until = now + self.chance.below(3 * SECOND);
            }
            if self.is_up(cell) && now >= self.cells[cell].report_at {
                self.report(cell, faulty);
            }
        }
    }

    fn is_up(&self, cell: usize) -> bool {
        let cell = &self.cells[cell];
        self.now >= cell.dead_until && self.now >= cell.hangs_until
    }

    /// As `cluster::serve::span_windows` of the product.
    fn report(&mut self, cell: usize, faulty: bool) {
        let now = self.now;
        self.cells[cell].report_at = now + 200 * MILLISECOND + self.chance.below(20 * MILLISECOND);
        let homes = self
            .vms
            .iter()
            .filter(|vm| usize::from(vm.vm) % self.cells.len() == cell);
        let report = Report {
            local_weight: self.local[cell],
            vms: homes.cloned().collect(),
        };
        self.cells[cell].avoided.retain(|_, until| *until > now);
        for arbiter in 0..=cell {
            if self.cells[cell].avoided.contains_key(&arbiter) {
                continue;
            }
            let is_lost = faulty && self.chance.once_in(20);
            if !self.is_up(arbiter) || is_lost {
                self.lost += 1;
                self.cells[cell].avoided.insert(arbiter, now + AVOIDANCE);
                continue;
            }
            let schedule = self.cells[arbiter].arbiter.take(now, cell as u16, report).clone();
            let delay = if faulty {
                self.chance.below(300 * MILLISECOND)
            } else {
                MILLISECOND
            };
            self.replies.push((now + delay, cell, schedule));
            return;
        }
    }

    fn states(&self, vm: u8) -> Vec<WindowState> {
        let cells = &self.vms[usize::from(vm)].cells;
        let of = |cell: &u16| {
            self.cells[usize::from(*cell)]
                .follower
                .windows_of(&vm)
                .state(self.now)
        };
        cells.iter().map(of).collect()
    }
}

fn process(report_at: Time) -> Process {
    Process {
        arbiter: Arbiter::default(),
        follower: Follower::default(),
        dead_until: 0,
        hangs_until: 0,
        report_at,
        avoided: BTreeMap::new(),
    }
}

#[test]
fn cells_agree_on_windows_after_deaths_and_no_vm_is_shut_out_meanwhile() {
    let (mut deaths, mut lost, mut windows) = (0, 0, 0_u64);
    for seed in 0..200 {
        let mut story = Story::new(seed);
        // Time since which each VM's window has been closed, by cell.
        let mut closed: BTreeMap<(u8, usize), Time> = BTreeMap::new();
        let mut open: BTreeMap<u8, Time> = BTreeMap::new();
        let begin = story.now;
        while story.now < begin + END {
            story.step();
            let is_settled = story.now >= begin + FAULTS_UNTIL + AGREED_AFTER;
            for vm in 0..story.vms.len() as u8 {
                let states = story.states(vm);
                for (cell, state) in states.iter().enumerate() {
                    let since = *closed.entry((vm, cell)).or_insert(story.now);
                    if *state != WindowState::Closed {
                        closed.remove(&(vm, cell));
                    }
                    let waited = story.now - since;
                    assert!(
                        waited <= 2 * FRAME,
                        "seed {seed}: VM {vm} is stopped for {waited} ns"
                    );
                }
                if is_settled {
                    let is_equal = states.iter().all(|state| *state == states[0]);
                    assert!(is_equal, "seed {seed} at {}: VM {vm} {states:?}", story.now);
                    windows += u64::from(states[0] == WindowState::Open);
                    *open.entry(vm).or_default() += if states[0] == WindowState::Open { STEP } else { 0 };
                }
            }
            if is_settled {
                let is_open = |vm: &&SpanningVm<u8>| story.states(vm.vm)[0] == WindowState::Open;
                let vms: Vec<&SpanningVm<u8>> = story.vms.iter().filter(is_open).collect();
                for (index, one) in vms.iter().enumerate() {
                    let other = vms[..index]
                        .iter()
                        .find(|other| !other.cells.is_disjoint(&one.cells));
                    assert!(other.is_none(), "seed {seed}: {one:?} and {other:?} at once");
                }
            }
        }
        check_shares(seed, &story, &open);
        deaths += story.deaths;
        lost += story.lost;
    }
    assert!(
        deaths > 500 && lost > 500 && windows > 10_000,
        "{deaths} {lost} {windows}"
    );
}

/// A VM with rivals has a third of its least fair share at least: three VMs that compete in pairs, and least
/// lengths, make windows shorter.
fn check_shares(seed: u64, story: &Story, open: &BTreeMap<u8, Time>) {
    let total = 5 * SECOND;
    for vm in &story.vms {
        let competing = |cell: &u16| {
            let here = story.vms.iter().filter(|other| other.cells.contains(cell));
            story.local[usize::from(*cell)] + here.map(|other| other.weight).sum::<u32>()
        };
        let most = vm.cells.iter().map(competing).max().unwrap_or(0);
        if most == vm.weight {
            continue;
        }
        let fair = total * u64::from(vm.weight) / u64::from(most);
        let had = open[&vm.vm];
        assert!(had * 3 >= fair, "seed {seed}: VM {vm:?} had {had} of {fair} ns");
        assert!(
            had <= fair * 11 / 10 + total / 20,
            "seed {seed}: VM {vm:?} had {had} of {fair} ns"
        );
    }
}
