//! Calls of a driver to the other CPUs of its gangs, under views that are arbitrary and change all the time.

use std::cell::Cell;

use proptest::prelude::*;

use super::super::gang_calls::CALLS_MAX;
use super::*;

const CPUS: u16 = 4;

/// A machine whose state is another one at each read.
struct Arbitrary(Cell<u64>);

impl Arbitrary {
    /// The next number of xorshift.
    fn next(&self) -> u64 {
        let mut x = self.0.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.0.set(x);
        x
    }
}

impl View for Arbitrary {
    fn word(&self, _: CpuId) -> Word {
        Word {
            beat_ms: beat_ms(NOW),
            ..Word::unpack([self.next(), self.next() % 1_000])
        }
    }
    fn vcpu(&self, vcpu: VcpuId) -> VcpuEntry {
        let states = [VcpuState::Idle, VcpuState::Waiting, VcpuState::Running];
        VcpuEntry {
            cpu: CpuId(vcpu.index % CPUS),
            state: states[self.next() as usize % 3],
            vtime: self.next() % 1_000 * MILLISECOND,
            period: super::super::period(NOW, Tunables::default().entitlement_period_ns),
            used_us: self.next() as u32 % 100_000,
            ..VcpuEntry::default()
        }
    }
    fn queued(&self, _: CpuId, _: usize) -> Option<VcpuId> {
        None
    }
    fn load(&self, _: CpuId, _: usize) -> u32 {
        0
    }
    fn terms(&self, vm: VmId) -> Terms {
        Terms {
            vcpus: CPUS,
            reservation_permille: u32::from(vm.0) * 500,
            ..Terms::default()
        }
    }
    fn may_run(&self, _: VcpuId, _: CpuId) -> bool {
        true
    }
    fn depends_on(&self, _: VcpuId, _: u16) -> bool {
        false
    }
}

/// Receivers of the calls among some effects.
fn called(effects: &[Effect]) -> Vec<CpuId> {
    let to = |effect: &Effect| match effect {
        Effect::Send {
            to,
            message: Message::Reconsider { .. },
        } => Some(*to),
        _ => None,
    };
    effects.iter().filter_map(to).collect()
}

proptest! {
    /// With arbitrary views, a driver calls each other CPU once for an event at most, and [`CALLS_MAX`] times
    /// between two ticks at most.
    #[test]
    fn driver_calls_each_cpu_once_for_an_event_and_a_bounded_number_of_times_in_a_tick(
        seed in 1..u64::MAX,
        events in 100..400_usize,
    ) {
        let view = Arbitrary(Cell::new(seed));
        let mut driver = driver();
        let mut out = Vec::new();
        for vm in 0..3 {
            driver.handle(NOW, add(vm, 0), &view, &mut out);
        }
        let mut counts = [0; CPUS as usize];
        // All within one tick, after the first one.
        for _ in 0..events {
            let (from, vm) = (1 + (view.next() % 3) as u16, VmId((view.next() % 3) as u16));
            let is_displaced = view.next().is_multiple_of(2);
            let word = view.word(CpuId(from));
            let event = message(from, Message::Reconsider { vm, is_displaced, word });
            out.clear();
            driver.handle(NOW + MILLISECOND, event, &view, &mut out);
            let mut called = called(&out);
            called.iter().for_each(|cpu| counts[cpu.index()] += 1);
            let calls = called.len();
            called.sort_unstable();
            called.dedup();
            prop_assert_eq!(called.len(), calls, "a CPU is called twice for one event");
        }
        prop_assert!(counts.iter().all(|count| *count <= u32::from(CALLS_MAX)), "{:?}", counts);
        // Calls that were left out are made up for at the next tick, if the gang still runs.
        let left_out = driver.counters().calls_left_out;
        prop_assert!(left_out > 0 || counts.iter().any(|count| *count < u32::from(CALLS_MAX)));
    }

    /// A VM that has been seen beyond its reservation stays so in the period, whichever entries come later.
    #[test]
    fn vm_that_was_seen_beyond_its_reservation_stays_beyond_it_in_the_period(
        times in prop::collection::vec(0..200_000_u32, 1..50)
    ) {
        let mut seen = super::super::super::run_queue::SeenTimes::default();
        let mut most = 0;
        for (now, used_us) in (0..).zip(times) {
            most = most.max(u64::from(used_us));
            seen.note(7, used_us.into(), 0, now, 100);
            prop_assert_eq!(seen.used_us(7), most);
        }
        prop_assert_eq!((seen.used_us(6), seen.used_us(8)), (0, 0));
    }

    /// The greatest virtual time of the last 100 ns counts, and an older one does not.
    #[test]
    fn virtual_time_falls_only_once_the_greater_one_is_old(
        vtimes in prop::collection::vec((1..60_u64, 0..1_000_u64), 1..60)
    ) {
        let mut seen = super::super::super::run_queue::SeenTimes::default();
        let (mut now, mut held, mut since) = (1_000, 0, 0);
        for (step, vtime) in vtimes {
            now += step;
            seen.note(7, 0, vtime, now, 100);
            if vtime >= held || now - since >= 100 {
                (held, since) = (vtime, now);
            }
            prop_assert_eq!(seen.vtime(now, 100), held);
        }
        seen.forget_vtime();
        prop_assert_eq!(seen.vtime(now, 100), 0);
    }
}
