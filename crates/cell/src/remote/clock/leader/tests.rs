//! The clocks of hosts whose counters drift apart, in virtual time, by seed.

use fastrand::Rng;
use shard_api::relation::{Counter, Ratio, Relation, Round};

use super::*;

const KHZ: u32 = 2_000_000;
const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;
/// Nanoseconds times hertz, in parts of a thousand millions, to ticks. One division: of 128 bits they take
/// most of the time here.
const HZ_TO_TICKS: u128 = 1_000_000_000_000_000;
/// Maximum time of a step on its way to a shard, nanoseconds.
const ORDER_NS: u64 = 2 * MS;
/// Rounds in one measurement.
const ROUNDS: usize = 4;

/// A host with its true state, which no process in it can see.
struct Host {
    khz: u64,
    /// Deviation of its crystal from the nominal frequency, parts of a thousand millions.
    ppb: i64,
    ratio: Ratio,
    start: u64,
    /// Time for which its counter stood still, nanoseconds.
    stood: u64,
    /// The offsets of its shard, each with the time of the change.
    orders: Vec<(u64, u64)>,
    offset: u64,
}

impl Host {
    fn counter(&self, now: u64) -> u64 {
        let run = u128::from(now - self.stood);
        let hz = u128::from(self.khz) * (1_000_000_000_i64 + self.ppb) as u128;
        self.start.wrapping_add((run * hz / HZ_TO_TICKS) as u64)
    }

    fn guest(&mut self, now: u64) -> u64 {
        while let Some((_, offset)) = self.orders.first().filter(|(at, _)| *at <= now).copied() {
            self.offset = offset;
            self.orders.remove(0);
        }
        self.ratio.scaled(self.counter(now)).wrapping_add(self.offset)
    }
}

/// Hosts and the network between them.
struct World {
    random: Rng,
    now: u64,
    hosts: Vec<Host>,
    leader: Leader,
    /// The fastest message, nanoseconds.
    fastest: u64,
    /// Maximum additional time of most messages, nanoseconds.
    jitter: u64,
    /// No bound is checked before this time: a counter has just stood still.
    unbound_until: u64,
    /// The round of each shard but the home that is under way.
    under_way: Vec<UnderWay>,
    /// Time of the next comparison of the clocks.
    look_at: u64,
}

/// A round under way.
struct UnderWay {
    round: Round,
    due: u64,
    count: usize,
}

impl World {
    /// Counters as far apart as `ppm` allows, of `count` hosts. One in two has a frequency of its own.
    fn new(seed: u64, count: usize, ppm: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let fastest = 3_000 + random.u64(..40_000);
        let jitter = fastest * (1 + random.u64(..20));
        let host = |index: usize, random: &mut Rng| {
            let other = index > 0 && random.u64(..2) == 0;
            let khz = if other { 2_600_000 } else { KHZ };
            let counter = Counter {
                khz,
                digits: Some(48),
            };
            let ratio = Ratio::of(counter, KHZ).expect("it scales");
            let ppm_here = random.u64(..2 * ppm + 1) as i64 - ppm as i64;
            // The home is the slowest in some, the fastest in others.
            let ppm_here = match (index, random.u64(..4)) {
                (0, 0) => ppm as i64,
                (0, 1) => -(ppm as i64),
                _ => ppm_here,
            };
            Host {
                khz: khz.into(),
                ppb: ppm_here * 1000,
                ratio,
                start: random.u64(..1 << 62) * 4,
                stood: 0,
                orders: Vec::new(),
                offset: 0,
            }
        };
        let hosts: Vec<Host> = (0..count).map(|index| host(index, &mut random)).collect();
        let mut world = Self {
            random,
            now: SECOND,
            hosts,
            leader: Leader::new(KHZ, Vec::new()),
            fastest,
            jitter,
            unbound_until: 0,
            under_way: Vec::new(),
            look_at: 0,
        };
        let offset = world.hosts[0].counter(world.now).wrapping_neg();
        let mut clocks = vec![Clock::new(offset, None)];
        for shard in 1..count {
            let rounds: Vec<Round> = (0..400)
                .map(|number| world.round(shard, SECOND + number * MS).0)
                .collect();
            let relation = Relation::of(rounds).expect("some rounds");
            clocks.push(Clock::there(relation, offset, world.hosts[shard].ratio, KHZ));
        }
        for (host, clock) in world.hosts.iter_mut().zip(&clocks) {
            host.offset = clock.offset;
        }
        world.leader = Leader::new(KHZ, clocks);
        world.now += 500 * MS;
        world.look_at = world.now;
        for shard in 1..count {
            let (round, due) = world.round(shard, world.now);
            world.under_way.push(UnderWay { round, due, count: 0 });
        }
        // Until the guest begins, no clock steps.
        world.unbound_until = world.now + SECOND;
        world
    }

    /// Time of a message: a little more than the fastest, or much, or that of a busy host.
    fn way(&mut self) -> u64 {
        let more = match self.random.u64(..100) {
            0 => 50 * MS,
            1..20 => self.jitter,
            _ => self.fastest / 2,
        };
        self.fastest + self.random.u64(..more)
    }

    /// A round that begins at this time, and the time of its end.
    fn round(&mut self, shard: usize, begin: u64) -> (Round, u64) {
        let (there, back) = (self.way(), self.way());
        let round = Round {
            asked: self.hosts[0].counter(begin),
            read: self.hosts[shard].counter(begin + there),
            answered: self.hosts[0].counter(begin + there + back),
        };
        (round, begin + there + back)
    }

    /// Advances to the next round that comes back, or the next comparison of the clocks.
    fn next(&mut self) {
        let rounds = self.under_way.iter().enumerate();
        let (first, due) = rounds
            .map(|(index, way)| (index, way.due))
            .min_by_key(|(_, due)| *due)
            .expect("a shard");
        self.now = due.min(self.look_at);
        self.check();
        if due <= self.look_at {
            let shard = first + 1;
            // One in ten is lost.
            if self.random.u64(..10) > 0 {
                self.leader.learn(shard, self.under_way[first].round);
            }
            let count = self.under_way[first].count + 1;
            let pause = if count.is_multiple_of(ROUNDS) {
                self.look_ns()
            } else {
                0
            };
            let (round, due) = self.round(shard, due + pause);
            self.under_way[first] = UnderWay { round, due, count };
        } else {
            self.look_at = self.now + self.look_ns();
        }
        let counter = self.hosts[0].counter(self.now);
        for step in self.leader.steps(counter) {
            let takes = self.random.u64(..ORDER_NS);
            let last = self.hosts[step.shard].orders.last().map_or(0, |(at, _)| *at);
            let due = (self.now + takes).max(last);
            self.hosts[step.shard].orders.push((due, step.offset));
        }
    }

    fn look_ns(&self) -> u64 {
        self.leader.look_ns(self.hosts[0].counter(self.now))
    }

    /// Checks that the readings of two hosts' guests differ by the bound at most, and that no message is seen
    /// before it was sent.
    fn check(&mut self) {
        let now = self.now;
        let counter = self.hosts[0].counter(now);
        let guests: Vec<u64> = self.hosts.iter_mut().map(|host| host.guest(now)).collect();
        let leads: Vec<Estimate> = (0..guests.len())
            .map(|shard| self.leader.lead(shard, counter))
            .collect();
        if now < self.unbound_until {
            return;
        }
        for (one, &here) in guests.iter().enumerate() {
            for (other, &there) in guests.iter().enumerate().skip(one + 1) {
                let apart = here.wrapping_sub(there) as i64;
                let error = leads[one].error + leads[other].error;
                let rate = leads[one].rate_ppb.abs() + leads[other].rate_ppb.abs();
                let rate = rate as u64 + leads[one].rate_error_ppb + leads[other].rate_error_ppb;
                // Since the last comparison, and while orders are on their way.
                let waited = self.leader.look_ns(counter) + ORDER_NS;
                let drifted = u128::from(waited * 2) * u128::from(rate) / 1_000_000_000;
                let bound = error + 2 * self.leader.worth(error) + drifted as u64 * 2;
                assert!(
                    apart.unsigned_abs() <= bound,
                    "at {now}: {one} and {other} are {apart} apart, not {bound}: {leads:?}"
                );
                let fastest = self.fastest * u64::from(KHZ) / MS;
                assert!(
                    apart.unsigned_abs() <= fastest,
                    "at {now}: {one} and {other} are {apart} apart, a message takes {fastest}: {leads:?}"
                );
            }
        }
    }

    fn run(&mut self, time: u64) {
        let end = self.now + time;
        while self.now < end {
            let before: Vec<(u64, u64)> = self.readings();
            self.next();
            for ((host, (was, at)), now) in self.hosts.iter_mut().zip(before).zip(std::iter::repeat(self.now))
            {
                assert!(host.guest(now) >= was, "no counter goes back: at {at}");
            }
        }
    }

    fn readings(&mut self) -> Vec<(u64, u64)> {
        let now = self.now;
        self.hosts.iter_mut().map(|host| (host.guest(now), now)).collect()
    }

    /// Excess of the guest's time over the fastest host's counter, parts of a thousand millions.
    fn excess_ppb(&self, time: u64) -> i64 {
        let hosts = self.hosts.iter();
        let fastest = hosts.map(|host| host.ppb).max().expect("hosts");
        let home = self.leader.clocks()[0].stepped;
        let gained = home as i128 * 1_000_000_000 / (i128::from(time) * i128::from(KHZ) / 1_000_000);
        (gained as i64) - (fastest - self.hosts[0].ppb)
    }
}

/// Lifetime of the guest: six hours with the first seed and one with others, and less in a build without
/// optimisation.
fn life(seed: u64) -> u64 {
    match (cfg!(debug_assertions), seed) {
        (true, _) => 40 * SECOND,
        (false, 0) => 6 * 3_600 * SECOND,
        (false, _) => 3_600 * SECOND,
    }
}

#[test]
fn counters_of_hosts_that_drift_apart_stay_together_for_hours() {
    for seed in 0..6 {
        let mut world = World::new(seed, 2 + (seed as usize % 3), 100);
        world.run(life(seed));
        let refused: u64 = world.leader.clocks().iter().map(|clock| clock.refused).sum();
        assert_eq!(refused, 0, "seed {seed}");
        // The error of estimates makes steps too long: some parts of ten millions, in the long run, and some
        // hundred microseconds at the beginning.
        let excess_ppb = world.excess_ppb(life(seed));
        let limit_ppb = if cfg!(debug_assertions) { 30_000 } else { 300 };
        assert!(excess_ppb.abs() < limit_ppb, "seed {seed}: {excess_ppb}");
    }
}

/// One host answers no rounds for seconds, while its counter and its vCPUs run on.
#[test]
fn a_host_that_does_not_answer_keeps_its_time() {
    for seed in 10..18 {
        let mut world = World::new(seed, 3, 100);
        world.run(30 * SECOND);
        for shard in [1, 2] {
            world.under_way[shard - 1].due += 5 * SECOND;
            world.run(10 * SECOND);
        }
        world.run(10 * SECOND);
    }
}

/// A host stops with its counter, as a virtual machine may: a part's falls behind, the home's finds
/// all others ahead. All catch up, and no counter goes back.
#[test]
fn a_host_whose_counter_stood_still_catches_up() {
    for seed in 20..28 {
        let mut world = World::new(seed, 3, 100);
        world.run(30 * SECOND);
        for host in [2, 0] {
            let stood = (1 + seed % 8) * SECOND;
            world.now += stood;
            world.look_at = world.now;
            for way in &mut world.under_way {
                way.due = way.due.max(world.now);
            }
            world.hosts[host].stood += stood;
            world.unbound_until = world.now + 2 * SECOND;
            world.run(20 * SECOND);
            let refused: u64 = world.leader.clocks().iter().map(|clock| clock.refused).sum();
            assert!(refused > 0, "its rounds were refused at first");
        }
    }
}

/// Two equal clocks: a small estimated lead is worth no step.
#[test]
fn clock_that_may_not_be_behind_does_not_step() {
    let relation = |here, there, error| Relation { here, there, error };
    let leader = |error| {
        let there = Clock::there(relation(1_000, 1_000, error), 0, Ratio::ONE, KHZ);
        Leader::new(KHZ, vec![Clock::new(0, None), there])
    };
    // One microsecond, or an eighth of the error.
    for (error, worth) in [(0, 2_000), (16_000, 2_000), (80_000, 10_000)] {
        let mut exact = leader(error);
        assert_eq!(exact.worth(error), worth);
        exact.shards[0].offset += worth - 1;
        assert_eq!(exact.steps(1_000), []);
        exact.shards[0].offset += 1;
        assert_eq!(
            exact.steps(1_000),
            [Step {
                shard: 1,
                offset: worth
            }]
        );
        assert_eq!(exact.steps(1_000), [], "the step was ordered");
    }
}
