//! Against a timer that counts every TSC tick, as the hardware does.

use proptest::prelude::*;

use super::*;

/// Prescaler and counter, stepped once each TSC tick.
struct Naive {
    tsc_per_tick: u64,
    divisor: u64,
    lvt: u32,
    initial: u32,
    current: u32,
    prescaler: u64,
    deadline: u64,
    now: u64,
    /// Number of expirations, unmasked, since the last query.
    fired: u32,
}

impl Naive {
    fn is_deadline(&self) -> bool {
        self.lvt & 0x6_0000 == 0x4_0000
    }

    fn step(&mut self) {
        self.now += 1;
        if self.is_deadline() {
            if self.deadline != 0 && self.deadline <= self.now {
                self.deadline = 0;
                self.fire();
            }
        } else if self.current > 0 {
            self.prescaler += 1;
            if self.prescaler == self.tsc_per_tick * self.divisor {
                self.prescaler = 0;
                self.current -= 1;
                if self.current == 0 {
                    self.fire();
                    if self.lvt & 0x6_0000 == 0x2_0000 {
                        self.current = self.initial;
                    }
                }
            }
        }
    }

    fn fire(&mut self) {
        if self.lvt & 0x1_0000 == 0 {
            self.fired += 1;
        }
    }

    fn set_lvt(&mut self, lvt: u32) {
        let was = self.is_deadline();
        self.lvt = lvt;
        if was != self.is_deadline() {
            (self.initial, self.current, self.deadline) = (0, 0, 0);
        }
    }
}

#[derive(Clone, Debug)]
enum Event {
    Lvt(u32),
    InitialCount(u32),
    Divide(u32),
    /// From now on; negative: in the past.
    Deadline(i64),
    Disarm,
    Expire,
}

fn event() -> impl Strategy<Value = Event> {
    let lvt = prop::sample::select(vec![0x40, 0x2_0040, 0x4_0040, 0x1_0040, 0x3_0040, 0x5_0040]);
    prop_oneof![
        2 => lvt.prop_map(Event::Lvt),
        3 => (0..6_u32).prop_map(Event::InitialCount),
        1 => prop::sample::select(vec![0b1011, 0b0000, 0b0001]).prop_map(Event::Divide),
        3 => (-20..60_i64).prop_map(Event::Deadline),
        1 => Just(Event::Disarm),
        6 => Just(Event::Expire),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Queried at any times, the timer has fired if and only if the naive one has since: never early, never
    /// lost, never twice for one query. All registers read the same.
    #[test]
    fn timer_matches_the_per_tick_model(
        tsc_per_tick in 1..4_u32,
        events in prop::collection::vec((0..40_u64, event()), 0..60),
    ) {
        let mut timer = Timer::new(tsc_per_tick);
        let mut naive = Naive {
            tsc_per_tick: tsc_per_tick.into(),
            divisor: 2,
            lvt: 0x1_0000,
            initial: 0,
            current: 0,
            prescaler: 0,
            deadline: 0,
            now: 1000,
            fired: 0,
        };
        for (wait, event) in events {
            let armed = timer.due();
            for _ in 0..wait {
                naive.step();
                prop_assert_eq!(timer.current_count(naive.now), naive.current);
                prop_assert_eq!(timer.deadline(naive.now), naive.deadline);
                prop_assert_eq!(armed.is_some_and(|due| due <= naive.now), naive.fired > 0);
            }
            let now = naive.now;
            // As `LocalApic::write` does before each change
            let vector = timer.expire(now);
            prop_assert_eq!(vector, (naive.fired > 0).then_some(0x40));
            prop_assert_eq!(timer.expire(now), None);
            naive.fired = 0;
            match event {
                Event::Lvt(lvt) => {
                    timer.set_lvt(lvt);
                    naive.set_lvt(lvt);
                }
                Event::InitialCount(count) => {
                    timer.set_initial_count(count, now);
                    if !naive.is_deadline() {
                        (naive.initial, naive.current, naive.prescaler) = (count, count, 0);
                    }
                }
                Event::Divide(value) => {
                    timer.set_divide(value, now);
                    naive.divisor = match value { 0b1011 => 1, 0 => 2, _ => 4 };
                    naive.prescaler = 0;
                }
                Event::Deadline(from_now) => {
                    let deadline = now.saturating_add_signed(from_now);
                    timer.set_deadline(deadline);
                    if naive.is_deadline() {
                        naive.deadline = deadline;
                        if deadline <= now {
                            // Due at once: the naive timer only checks when it steps.
                            naive.deadline = 0;
                            naive.fire();
                        }
                    }
                }
                Event::Disarm => {
                    timer.set_deadline(0);
                    naive.deadline = 0;
                }
                Event::Expire => {}
            }
            prop_assert!(timer.is_sane());
            prop_assert_eq!(timer.current_count(now), naive.current);
            prop_assert_eq!(timer.deadline(now), naive.deadline);
        }
    }
}
