use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use super::*;

const MARKS: WaterMarks = WaterMarks {
    low: 100_000,
    high: 150_000,
};
const LEAST: u64 = LIMIT_MIN_PAGES as u64;

fn host(available: u64) -> HostPages {
    HostPages {
        available,
        shared: 0,
        stalled_centipercent: 0,
    }
}

fn vm(limit: u64, promise: u64, weight: u32, resident: u64) -> PagedVm {
    PagedVm {
        limit,
        promise,
        weight,
        resident,
    }
}

fn any_pages() -> impl Strategy<Value = u64> {
    prop_oneof![0..2_000_000_u64, Just(u64::MAX), Just(0), any::<u64>()]
}

prop_compose! {
    fn any_vm()(
        limit in prop_oneof![1..2_000_000_u64, any::<u64>()],
        promise in any_pages(),
        weight in prop_oneof![1..=WEIGHT_MAX, any::<u32>()],
        resident in any_pages(),
    ) -> PagedVm {
        PagedVm { limit, promise, weight, resident }
    }
}

prop_compose! {
    fn any_host()(available in any_pages(), shared in any_pages(), stalled_centipercent: u32) -> HostPages {
        HostPages { available, shared, stalled_centipercent }
    }
}

/// A VM that the configuration permits, whose resident size is that of a working VM.
fn sane_vm() -> impl Strategy<Value = PagedVm> {
    (LEAST..2_000_000_u64, 1..=WEIGHT_MAX, 0..=1000_u64, 0..=1000_u64).prop_map(
        |(limit, weight, promise, resident)| {
            vm(limit, limit * promise / 1000, weight, limit * resident / 1000)
        },
    )
}

/// The least limit of a VM.
fn kept(vm: &PagedVm) -> u64 {
    vm.promise.max(LEAST).min(vm.limit)
}

/// Memory that limits take from the VMs, pages.
fn freed(vms: &BTreeMap<u8, PagedVm>, limits: &BTreeMap<u8, u64>) -> u64 {
    sum(vms
        .iter()
        .map(|(key, vm)| vm.resident.saturating_sub(limits[key])))
}

proptest! {
    /// With all reports of a host and of shards, in any order.
    #[test]
    fn limit_is_never_below_the_promise_nor_above_the_users_limit(
        rounds in vec((any_host(), any::<u64>(), btree_map(0..6_u8, any_vm(), 0..6)), 1..20),
    ) {
        let mut pressure = Pressure::default();
        for (host, low, vms) in rounds {
            let limits = pressure.round(host, WaterMarks::new(low), &vms);
            prop_assert_eq!(limits.len(), vms.len());
            for (key, vm) in &vms {
                prop_assert!((kept(vm)..=vm.limit).contains(&limits[key]), "{vm:?}: {}", limits[key]);
            }
        }
    }

    #[test]
    fn trim_frees_what_is_short_or_all_that_is_not_promised(
        vms in btree_map(any::<u8>(), sane_vm(), 1..12), available in 0..MARKS.low, stalled: bool,
    ) {
        let stalled_centipercent = if stalled { STALLED_CENTIPERCENT } else { 0 };
        let host = HostPages { stalled_centipercent, ..host(available) };
        let limits = Pressure::default().round(host, MARKS, &vms);
        let goal = if stalled { MARKS.high } else { (MARKS.low + MARKS.high) / 2 };
        let wanted = goal - available;
        let trimmable = sum(vms.values().map(|vm| vm.resident.saturating_sub(kept(vm))));
        let freed = freed(&vms, &limits);
        prop_assert!(freed >= wanted.min(trimmable));
        // A step of the level is a page of each VM at most.
        prop_assert!(freed <= wanted + vms.len() as u64, "{freed} of {wanted}");
    }

    #[test]
    fn greater_weight_keeps_no_less_and_memory_is_taken_above_the_common_level_alone(
        mut vms in btree_map(any::<u8>(), sane_vm(), 2..12), available in 0..MARKS.low,
        weights in (1..=WEIGHT_MAX, 1..=WEIGHT_MAX),
    ) {
        // Two VMs that differ in their weights.
        let like = *vms.values().next().unwrap();
        let (light, heavy) = (weights.0.min(weights.1), weights.0.max(weights.1));
        vms.insert(0, PagedVm { weight: light, ..like });
        vms.insert(1, PagedVm { weight: heavy, ..like });
        let limits = Pressure::default().round(host(available), MARKS, &vms);
        prop_assert!(limits[&0] <= limits[&1]);
        // Fairness: no VM is above its promise and above the level of one that was trimmed.
        let level = |vm: &PagedVm, limit: u64| {
            u128::from(limit) * u128::from(WEIGHT_MAX) / u128::from(vm.weight)
        };
        let all = vms.iter().map(|(key, vm)| (vm, limits[key]));
        for (trimmed, limit) in all.filter(|(vm, limit)| *limit < vm.limit) {
            for (key, other) in &vms {
                let slack = u128::from(WEIGHT_MAX / trimmed.weight + 1);
                prop_assert!(
                    limits[key] <= kept(other)
                        || level(other, limits[key]) <= level(trimmed, limit) + slack,
                    "{other:?} has {}, and {trimmed:?} {limit}", limits[key]
                );
            }
        }
    }

    #[test]
    fn stalls_alone_take_nothing_from_vms_of_a_host_with_free_memory(
        vms in btree_map(any::<u8>(), any_vm(), 1..8), more in prop_oneof![0..MARKS.high, any::<u64>()],
        stalled_centipercent: u32,
    ) {
        let host = HostPages {
            stalled_centipercent,
            ..host(MARKS.low.saturating_add(more))
        };
        let limits = Pressure::default().round(host, MARKS, &vms);
        for (key, vm) in &vms {
            prop_assert_eq!(limits[key], vm.limit);
        }
    }

    #[test]
    fn limits_stay_between_the_marks_and_return_above_them(
        vms in btree_map(any::<u8>(), sane_vm(), 1..8), between in MARKS.low..MARKS.high,
    ) {
        let mut pressure = Pressure::default();
        let trimmed = pressure.round(host(0), MARKS, &vms);
        prop_assert_eq!(&pressure.round(host(between), MARKS, &vms), &trimmed);
        let mut before = trimmed;
        for _ in 0..100_000 {
            let risen = pressure.round(host(4_000_000), MARKS, &vms);
            prop_assert!(before.iter().all(|(key, limit)| limit <= &risen[key]));
            if vms.iter().all(|(key, vm)| risen[key] == vm.limit) {
                return Ok(());
            }
            before = risen;
        }
        prop_assert!(false, "limits are lowered forever: {before:?} of {vms:?}");
    }

    /// Cells and monitors that see the same host, each with VMs of its own.
    #[test]
    fn processes_of_one_host_take_together_what_is_short(
        processes in vec(btree_map(any::<u8>(), sane_vm(), 1..4), 1..8), available in 0..MARKS.low,
    ) {
        let resident = |vms: &BTreeMap<u8, PagedVm>| sum(vms.values().map(|vm| vm.resident));
        let shared = sum(processes.iter().map(resident));
        let host = HostPages { shared, ..host(available) };
        let taken = processes.iter().map(|vms| freed(vms, &Pressure::default().round(host, MARKS, vms)));
        let wanted = (MARKS.low + MARKS.high) / 2 - available;
        let slack = processes.len() as u64 * (STEP_MIN_PAGES + 4);
        prop_assert!(sum(taken) <= wanted + slack);
    }

    /// A closed loop: VMs that obey, and programs outside that take and leave memory.
    #[test]
    fn host_with_enough_that_is_not_promised_stays_above_nothing_and_all_limits_return(
        vms in vec((20_000..200_000_u64, 1..=WEIGHT_MAX), 1..6), outside in vec(0..300_u64, 1..30),
    ) {
        let mut vms: BTreeMap<usize, PagedVm> = vms.into_iter().enumerate()
            .map(|(key, (limit, weight))| (key, vm(limit, LEAST, weight, limit)))
            .collect();
        let total = sum(vms.values().map(|vm| vm.limit)) + 200_000;
        let mut pressure = Pressure::default();
        let mut used_outside = 0_u64;
        let mut step = |target: u64, vms: &mut BTreeMap<usize, PagedVm>| {
            let resident = sum(vms.values().map(|vm| vm.resident));
            // A program outside grows by half of the low water in a round at most.
            used_outside = target.min(used_outside + MARKS.low / 2).min(total - resident);
            let shared = sum(vms.values().map(|vm| vm.resident));
            let available = total - shared - used_outside;
            let limits = pressure.round(HostPages { shared, ..host(available) }, MARKS, vms);
            for (key, vm) in vms.iter_mut() {
                vm.resident = limits[key];
            }
            (available, limits)
        };
        let promised = vms.len() as u64 * LEAST;
        for permille in outside {
            let target = (total - promised - MARKS.high) * permille / 300;
            let (available, _) = step(target, &mut vms);
            prop_assert!(available > 0, "the host has nothing left");
        }
        for _ in 0..10_000 {
            let (_, limits) = step(0, &mut vms);
            if vms.iter().all(|(key, vm)| limits[key] == vm.limit) {
                return Ok(());
            }
        }
        prop_assert!(false, "limits are lowered forever: {vms:?}");
    }
}

#[test]
fn shard_that_keeps_its_pages_holds_up_no_trim_of_others() {
    let mut pressure = Pressure::default();
    let honest = |resident| vm(500_000, LEAST, 100, resident);
    let mut resident = 500_000;
    // It reports more each time, and more than there is.
    for round in 0..GRACE_ROUNDS * 40 {
        let stubborn = vm(500_000, LEAST, 100, 500_000 + u64::from(round) * 1_000_000);
        let limits = pressure.round(
            host(50_000),
            MARKS,
            &BTreeMap::from([(0, stubborn), (1, honest(resident))]),
        );
        resident = resident.min(limits[&1]);
    }
    assert_eq!(
        resident, LEAST,
        "the honest VM is trimmed as far as the shortage lasts"
    );

    // The same shard does not keep limits low.
    for _ in 0..200 {
        let stubborn = vm(500_000, LEAST, 100, u64::MAX);
        let limits = pressure.round(
            host(900_000),
            MARKS,
            &BTreeMap::from([(0, stubborn), (1, honest(resident))]),
        );
        resident = limits[&1];
    }
    assert_eq!(resident, 500_000);
}

#[test]
fn shard_that_claims_to_have_nothing_takes_no_room_from_others() {
    let mut pressure = Pressure::default();
    let vms = |resident| {
        BTreeMap::from([
            (0, vm(500_000, LEAST, 100, 0)),
            (1, vm(500_000, LEAST, 100, resident)),
        ])
    };
    let limits = pressure.round(host(50_000), MARKS, &vms(500_000));
    // 75,000 pages are short of the middle between the marks.
    assert_eq!(limits, BTreeMap::from([(0, 425_000), (1, 425_000)]));
    let resident = limits[&1];
    for _ in 0..200 {
        pressure.round(host(900_000), MARKS, &vms(resident));
    }
    assert_eq!(pressure.round(host(900_000), MARKS, &vms(resident))[&1], 500_000);
}

#[test]
fn memory_that_is_leaving_is_not_taken_twice_while_it_makes_progress() {
    let mut pressure = Pressure::default();
    let round = |pressure: &mut Pressure<u8>, resident| {
        let vms = BTreeMap::from([(0, vm(500_000, LEAST, 100, resident))]);
        let available = 50_000 + (500_000 - resident);
        pressure.round(host(available), MARKS, &vms)[&0]
    };
    assert_eq!(round(&mut pressure, 500_000), 425_000);
    // A slow disk: 2 MiB in a round.
    for passed in 1..=50 {
        assert_eq!(round(&mut pressure, 500_000 - passed * 512), 425_000, "{passed}");
    }
    // It stands still: from then on it does not count as leaving.
    let mut limit = 425_000;
    for _ in 0..GRACE_ROUNDS {
        limit = round(&mut pressure, 500_000 - 50 * 512);
    }
    assert!(limit < 425_000, "{limit}");
}

#[test]
fn user_changes_the_limit_while_it_is_lowered() {
    let mut pressure = Pressure::default();
    let round = |pressure: &mut Pressure<u8>, limit, available| {
        let vms = BTreeMap::from([(0, vm(limit, LEAST, 100, 400_000))]);
        pressure.round(host(available), MARKS, &vms)[&0]
    };
    assert_eq!(round(&mut pressure, 400_000, 50_000), 325_000);
    assert_eq!(round(&mut pressure, 300_000, MARKS.low), 300_000, "less");
    assert_eq!(
        round(&mut pressure, 900_000, MARKS.low),
        300_000,
        "more, once there is memory"
    );
    assert_eq!(round(&mut pressure, 900_000, MARKS.high), 300_000);
    assert!(round(&mut pressure, 900_000, u64::MAX) > 300_000);
}

#[test]
fn low_water_follows_the_host_within_its_bounds() {
    let low = |pages| WaterMarks::of_host(pages).low();
    assert_eq!(low(0), LOW_WATER_MIN_PAGES);
    assert_eq!(low(1 << 20), (1 << 20) / 20);
    assert_eq!(low(u64::MAX), LOW_WATER_MAX_PAGES);
    assert_eq!(WaterMarks::new(100).high, 150);
    assert_eq!(WaterMarks::new(u64::MAX).high, u64::MAX);
}
