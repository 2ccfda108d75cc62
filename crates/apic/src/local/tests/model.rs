//! Compares random traffic with an independent model: sets of vectors, a stack of those in service, and a
//! ledger that counts received, merged and served interrupts.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Event {
    Accept(u8, bool),
    Take,
    End,
    TaskPriority(u8),
    Enable(bool),
    Init,
}

fn event() -> impl Strategy<Value = Event> {
    // Few vectors, so that they meet
    let vector = prop_oneof![
        any::<u8>(),
        prop::sample::select(vec![0x0F, 0x10, 0x41, 0x42, 0x4F, 0x50, 0xFF])
    ];
    prop_oneof![
        16 => (vector, any::<bool>()).prop_map(|(vector, level)| Event::Accept(vector, level)),
        12 => Just(Event::Take),
        12 => Just(Event::End),
        3 => any::<u8>().prop_map(Event::TaskPriority),
        2 => any::<bool>().prop_map(Event::Enable),
        1 => Just(Event::Init),
    ]
}

#[derive(Default)]
struct Model {
    requested: BTreeSet<u8>,
    /// Innermost last.
    in_service: Vec<u8>,
    level: BTreeSet<u8>,
    task_priority: u8,
    is_enabled: bool,
    accepted: u64,
    merged: u64,
    served: u64,
}

impl Model {
    fn priority(&self) -> u8 {
        let in_service = self.in_service.last().map_or(0, |vector| vector / 16 * 16);
        if self.task_priority / 16 >= in_service / 16 {
            self.task_priority
        } else {
            in_service
        }
    }

    fn next(&self) -> Option<u8> {
        let highest = *self.requested.iter().next_back()?;
        (highest / 16 > self.priority() / 16).then_some(highest)
    }

    fn accept(&mut self, vector: u8, level: bool) {
        if !self.is_enabled || vector < 16 {
            return;
        }
        self.accepted += 1;
        if !self.requested.insert(vector) {
            self.merged += 1;
        }
        self.level.remove(&vector);
        if level {
            self.level.insert(vector);
        }
    }

    fn take(&mut self) -> Option<u8> {
        let vector = self.next()?;
        self.requested.remove(&vector);
        self.in_service.push(vector);
        self.served += 1;
        Some(vector)
    }

    fn end(&mut self) -> Option<u8> {
        self.in_service.pop().filter(|vector| self.level.contains(vector))
    }
}

/// The vectors that eight registers show.
fn shown(apic: &LocalApic, first: u32) -> BTreeSet<u8> {
    let words: Vec<u64> = (first..first + 8).map(|msr| read(apic, msr)).collect();
    let is_set = |&vector: &u8| words[usize::from(vector) / 32] >> (vector % 32) & 1 == 1;
    (0..=255).filter(is_set).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Priorities, nesting, order of ends, trigger modes; and none is lost or doubled.
    #[test]
    fn service_order_matches_the_model(events in prop::collection::vec(event(), 0..150)) {
        let mut apic = LocalApic::new(2, 1);
        let mut model = Model::default();
        for event in [Event::Enable(true)].into_iter().chain(events) {
            match event {
                Event::Accept(vector, level) => {
                    apic.accept(vector, level);
                    model.accept(vector, level);
                }
                Event::Take => prop_assert_eq!(apic.take(), model.take()),
                Event::End => {
                    let end = |vector| Written::EndOfInterrupt { vector };
                    let expected = model.end().map_or(Written::Nothing, end);
                    prop_assert_eq!(apic.write(0x80B, 0, 0), Ok(expected));
                }
                Event::TaskPriority(value) => {
                    prop_assert_eq!(apic.write(0x808, value.into(), 0), NOTHING);
                    model.task_priority = value;
                }
                Event::Enable(is_enabled) => {
                    let expected = match is_enabled == model.is_enabled {
                        true => Written::Nothing,
                        false => Written::Enabled(is_enabled),
                    };
                    prop_assert_eq!(apic.write(0x80F, u64::from(is_enabled) << 8 | 0xFF, 0), Ok(expected));
                    model.is_enabled = is_enabled;
                }
                Event::Init => {
                    apic.init();
                    model = Model::default();
                }
            }
            prop_assert!(apic.is_sane());
            prop_assert_eq!(apic.is_enabled(), model.is_enabled);
            prop_assert_eq!(apic.next(), model.next());
            prop_assert_eq!(read(&apic, 0x80A), u64::from(model.priority()));
            prop_assert_eq!(shown(&apic, 0x820), model.requested.clone());
            prop_assert_eq!(shown(&apic, 0x810), model.in_service.iter().copied().collect::<BTreeSet<_>>());
            prop_assert_eq!(shown(&apic, 0x818), model.level.clone());
        }
        // With nothing in the way all that waits is served: each vector is requested and in service once at
        // most.
        apic.set_task_priority(0);
        let mut served = model.served;
        for _ in 0..2 * 256 {
            served += u64::from(apic.take().is_some());
            if apic.next().is_none() {
                apic.end_of_interrupt();
            }
        }
        prop_assert_eq!((shown(&apic, 0x820), shown(&apic, 0x810)), Default::default());
        prop_assert_eq!(served, model.accepted - model.merged);
    }

    /// For any register accesses at any times: a fault changes nothing, the state stays valid, and only
    /// permitted interrupts are served.
    #[test]
    fn every_event_sequence_leaves_a_valid_state(
        id: u32,
        tsc_per_tick: u32,
        traffic in prop::collection::vec((register(), value(), any::<u8>(), 0..50_000_u64), 0..200),
    ) {
        let mut apic = LocalApic::new(id, tsc_per_tick);
        let mut now = 0;
        for (msr, value, other, wait) in traffic {
            now += wait;
            let before = apic.clone();
            let _ = apic.read(msr, now);
            if apic.write(msr, value, now).is_err() {
                prop_assert_eq!(&apic, &before);
            }
            prop_assert!(apic.is_sane());
            if other % 4 == 0 {
                apic.accept(other, other % 8 == 0);
            }
            apic.expire(now);
            prop_assert!(apic.timer_due().is_none_or(|due| due > now));
            if other % 3 == 0 {
                let (expected, task_priority) = (apic.next(), apic.task_priority());
                let taken = apic.take();
                prop_assert_eq!(taken, expected);
                prop_assert!(taken.is_none_or(|vector| vector >= 16 && vector >> 4 > task_priority >> 4));
            }
            prop_assert!(apic.is_sane());
            prop_assert_eq!(apic.id(), id);
        }
    }
}

fn register() -> impl Strategy<Value = u32> {
    prop_oneof![
        8 => 0x800..0x840_u32,
        4 => prop::sample::select(vec![0x80B, 0x80F, 0x830, 0x832, 0x838, 0x83E, 0x83F, 0x6E0]),
        1 => Just(0x1B),
        1 => any::<u32>(),
    ]
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => Just(0),
        2 => any::<u8>().prop_map(u64::from),
        2 => (any::<u8>(), 0..8_u64).prop_map(|(vector, mode)| mode << 16 | u64::from(vector)),
        1 => (0..64_u32).prop_map(|bit| 1 << bit),
        1 => prop::sample::select(vec![0x1FF, 0xFF, 0xFEE0_0000, 0xFEE0_0C00, 0x4_00EC, 0x2_0040, 0x1_0040]),
        1 => any::<u64>(),
    ]
}
