use proptest::prelude::*;

use super::*;

fn vm(name: u8, weight: u32, cells: &[u16]) -> SpanningVm<u8> {
    SpanningVm {
        vm: name,
        weight,
        cells: cells.iter().copied().collect(),
        most_permille: UNLIMITED,
    }
}

fn limited(vm: SpanningVm<u8>, most_permille: u32) -> SpanningVm<u8> {
    SpanningVm { most_permille, ..vm }
}

fn divided(local: &[(u16, u32)], vms: &[SpanningVm<u8>]) -> Vec<(u8, u64, u64)> {
    let windows = divide(&local.iter().copied().collect(), vms);
    let in_ms = |window: &Window<u8>| (window.vm, window.start / MILLISECOND, window.length / MILLISECOND);
    windows.iter().map(in_ms).collect()
}

#[test]
fn vms_of_the_same_cells_take_turns_by_weight_and_leave_local_vms_their_part() {
    let both = [vm(2, 100, &[0, 1]), vm(1, 100, &[0, 1])];
    assert_eq!(divided(&[], &both), [(1, 0, 60), (2, 60, 60)]);
    let heavy = [vm(1, 300, &[0, 1]), vm(2, 100, &[0, 1])];
    assert_eq!(divided(&[], &heavy), [(1, 0, 90), (2, 90, 30)]);
    // In cell 1 two busy vCPUs of weight 100 compete for each CPU.
    assert_eq!(divided(&[(1, 200)], &both), [(1, 0, 30), (2, 30, 30)]);
    assert_eq!(divided(&[(1, 200)], &both[..1]), [(2, 0, 40)]);
    let light = [vm(1, 1, &[0, 1])];
    assert_eq!(divided(&[(1, 10_000)], &light), [(1, 0, 5)], "the least length");
}

#[test]
fn vm_without_a_rival_has_no_window_and_vms_of_other_cells_run_at_the_same_time() {
    assert_eq!(divided(&[(7, 100)], &[vm(1, 100, &[0, 1])]), []);
    assert_eq!(divided(&[(0, 100)], &[vm(1, 100, &[0])]), [], "it spans no cells");
    let pairs = [
        vm(1, 100, &[0, 1]),
        vm(2, 100, &[0, 1]),
        vm(3, 100, &[2, 3]),
        vm(4, 100, &[2, 3]),
    ];
    assert_eq!(
        divided(&[], &pairs),
        [(1, 0, 60), (2, 60, 60), (3, 0, 60), (4, 60, 60)]
    );
}

#[test]
fn vm_with_a_limit_has_no_longer_window_and_has_one_without_a_rival() {
    let alone = |most| divided(&[], &[limited(vm(1, 100, &[0, 1]), most)]);
    assert_eq!((alone(250), alone(1_000)), (vec![(1, 0, 30)], vec![]));
    assert_eq!(alone(1), [(1, 0, 1)], "the least length");
    let both = |most| divided(&[], &[limited(vm(1, 100, &[0, 1]), most), vm(2, 100, &[0, 1])]);
    assert_eq!(both(250), [(1, 0, 30), (2, 30, 90)], "the other has the rest");
    assert_eq!(both(600), [(1, 0, 60), (2, 60, 60)], "its fair share is less");
}

#[test]
fn limit_is_divided_by_vcpus_and_binds_the_parts_that_use_theirs() {
    let all = |limit, parts: &[&[u32]]| {
        let parts: Vec<Vec<u32>> = parts.iter().map(|part| part.to_vec()).collect();
        limited_permille(limit, &parts)
    };
    assert_eq!(all(500, &[&[1_000], &[1_000]]), 250);
    assert_eq!(all(500, &[&[240], &[10]]), 250, "one part is kept to its share");
    assert_eq!(all(500, &[&[200], &[200]]), UNLIMITED, "both use less");
    // Two of three vCPUs are in the first cell: it has 400 of 600, for one busy vCPU or two.
    assert_eq!(all(600, &[&[1_000, 0], &[0]]), 400);
    assert_eq!(all(600, &[&[1_000, 30], &[0]]), 200);
    assert_eq!(
        all(3_000, &[&[1_000], &[1_000]]),
        UNLIMITED,
        "more than its vCPUs can use"
    );
    assert_eq!((all(0, &[&[1_000]]), all(500, &[])), (0, UNLIMITED));
}

#[test]
fn three_vms_that_compete_in_pairs_have_a_third_each() {
    let ring = [vm(1, 100, &[0, 1]), vm(2, 100, &[1, 2]), vm(3, 100, &[2, 0])];
    assert_eq!(divided(&[], &ring), [(1, 0, 40), (2, 40, 40), (3, 80, 40)]);
}

#[test]
fn schedule_begins_when_all_cells_have_it_and_ends_by_itself() {
    let mut arbiter = Arbiter::default();
    let report = |vms: &[SpanningVm<u8>]| Report {
        local_weight: 0,
        vms: vms.to_vec(),
    };
    let begin = 10_000 * MILLISECOND;
    arbiter.take(begin, 0, report(&[vm(1, 100, &[0, 1])]));
    let known = arbiter
        .take(begin + PERIOD, 1, report(&[vm(2, 100, &[0, 1])]))
        .clone();
    let from = begin + PERIOD + LEAD;
    assert_eq!(
        (known.from, known.until, known.windows.len()),
        (from, from + LEASE, 2)
    );
    let mut follower = Follower::default();
    follower.take(begin + PERIOD, known.clone()).unwrap();
    let windows = follower.windows_of(&1);
    assert_eq!(windows.state(from - 1), WindowState::Absent);
    let next = windows.next_change(from - 1).unwrap();
    assert_eq!(next, from);
    let states = |at| [1, 2].map(|vm| follower.windows_of(&vm).state(at));
    let frame = from.next_multiple_of(FRAME);
    use WindowState::{Absent, Closed, Open};
    assert_eq!(states(frame), [Open, Closed]);
    assert_eq!(states(frame + FRAME / 2 - 1), [Open, Closed]);
    assert_eq!(states(frame + FRAME / 2), [Closed, Open]);
    assert_eq!(states(from + LEASE), [Absent, Absent]);
    assert_eq!(windows.next_change(from + LEASE), None);
    assert_eq!(follower.vms(begin + PERIOD).len(), 2);
    assert_eq!(follower.vms(from + LEASE).len(), 0);
    // Cell 0 has been silent: its VM has no window any more, and the other has no rival.
    let after = arbiter.take(begin + 2 * PERIOD, 1, report(&[vm(2, 100, &[0, 1])]));
    assert_eq!(after.windows, []);
    follower.take(begin + 2 * PERIOD, after.clone()).unwrap();
    assert_eq!(
        follower.windows_of(&1).state(begin + 2 * PERIOD + LEAD),
        Absent,
        "the next one is in force"
    );
}

#[test]
fn schedule_that_no_arbiter_makes_is_refused_and_the_former_one_stands() {
    let window = |start, length| Window {
        vm: 1_u8,
        start,
        length,
    };
    let of = |from, windows: Vec<Window<u8>>| Schedule {
        from,
        until: from + LEASE,
        windows,
    };
    let mut follower = Follower::default();
    let now = 5_000 * MILLISECOND;
    follower.take(now, of(now, vec![window(0, 1)])).unwrap();
    let stands = follower.windows_of(&1);
    for wrong in [
        vec![window(0, 0)],
        vec![window(FRAME, 1)],
        vec![window(1, u64::MAX)],
        vec![window(0, 1); VMS_MAX + 1],
    ] {
        assert_eq!(follower.take(now, of(now, wrong)), Err(ScheduleError::Malformed));
    }
    let late = of(now + LEAD + 1, Vec::new());
    assert_eq!(follower.take(now, late), Err(ScheduleError::TooLong));
    let long = Schedule {
        until: now + LEAD + LEASE + 1,
        ..of(now, Vec::new())
    };
    assert_eq!(follower.take(now, long), Err(ScheduleError::TooLong));
    assert_eq!(follower.windows_of(&1), stands);
}

fn spanning() -> impl Strategy<Value = Vec<SpanningVm<u8>>> {
    let cells = proptest::collection::btree_set(0_u16..5, 1..5);
    let vms = proptest::collection::vec((0_u32..20_000, cells, 0..1_500_u32), 0..24);
    vms.prop_map(|vms| {
        let named = (0..).zip(vms);
        let vm = |(vm, (weight, cells, most_permille))| SpanningVm {
            vm,
            weight,
            cells,
            most_permille,
        };
        named.map(vm).collect()
    })
}

proptest! {
    /// Windows of VMs that share a cell never overlap, each lies in the frame, and other VMs have a tenth.
    #[test]
    fn windows_in_a_cell_do_not_overlap_and_leave_time_to_others(
        local in proptest::collection::btree_map(0_u16..5, 0_u32..10_000, 0..5),
        vms in spanning(),
    ) {
        let windows = divide(&local, &vms);
        prop_assert!(windows.len() <= VMS_MAX);
        let cells = |name: u8| &vms.iter().find(|vm| vm.vm == name).unwrap().cells;
        for (index, one) in windows.iter().enumerate() {
            prop_assert!(one.length > 0 && one.end() <= FRAME, "{one:?}");
            let most = &vms.iter().find(|vm| vm.vm == one.vm).unwrap().most_permille;
            let limit = FRAME * u64::from(*most) / 1_000;
            prop_assert!(one.length <= limit.max(LIMITED_WINDOW_MIN), "{one:?} of {most}");
            for other in &windows[..index] {
                let are_apart = cells(one.vm).is_disjoint(cells(other.vm)) || !one.overlaps(other);
                prop_assert!(are_apart, "{one:?} {other:?}");
            }
        }
        for (cell, _) in local.iter().filter(|(_, weight)| **weight > 0) {
            let open = windows.iter().filter(|window| cells(window.vm).contains(cell));
            prop_assert!(open.map(|window| window.length).sum::<u64>() <= OPEN_MAX);
        }
    }

    /// No vCPU that keeps to its part of the time has its VM's part in a cell exceed that part's share.
    #[test]
    fn parts_that_run_for_the_limited_time_keep_to_the_limit(
        limit in 0..9_000_u32,
        parts in proptest::collection::vec(proptest::collection::vec(0..=1_000_u32, 1..5), 1..5),
    ) {
        let most = limited_permille(limit, &parts);
        let vcpus: usize = parts.iter().map(Vec::len).sum();
        for part in &parts {
            let used: u64 = part.iter().map(|wanted| u64::from((*wanted).min(most))).sum();
            let share = u64::from(limit) * part.len() as u64 / vcpus as u64;
            // vCPUs that count as idle use less than a fiftieth each.
            let idle = u64::from(BUSY_PERMILLE) * part.len() as u64;
            prop_assert!(used <= share + idle, "{used} of {share}, {most}");
        }
    }

    /// Equal VMs of the same cells have equal windows, and none has more than its share in any cell.
    #[test]
    fn equal_vms_have_equal_windows(local in 0_u32..2_000, count in 1_u8..12) {
        let vms: Vec<_> = (0..count).map(|name| vm(name, 100, &[0, 1])).collect();
        let windows = divide(&[(0, local)].into(), &vms);
        let lengths: Vec<u64> = windows.iter().map(|window| window.length).collect();
        let spread = lengths.iter().max().zip(lengths.iter().min()).map_or(0, |(most, least)| most - least);
        prop_assert!(spread <= 1, "{lengths:?}");
        let share = FRAME * 100 / (u64::from(local) + 100 * u64::from(count));
        prop_assert!(lengths.iter().all(|length| *length <= share.max(WINDOW_MIN)));
    }

    /// A VM's state changes at the times of `next_change` only.
    #[test]
    fn state_is_constant_until_the_next_change(
        start in 0..FRAME,
        length in 1..FRAME,
        from in 0..2 * LEASE,
        now in 0..3 * LEASE,
        part in 0..1_000_u64,
    ) {
        let window = Window { vm: 1_u8, start, length: length.min(FRAME - start) };
        let schedule = Schedule { from, until: from + LEASE, windows: vec![window] };
        let mut follower = Follower::default();
        follower.take(from, schedule).unwrap();
        let windows = follower.windows_of(&1);
        let next = windows.next_change(now).unwrap_or(now + 2 * FRAME);
        prop_assert!(next > now);
        let between = now + (next - now) * part / 1_000;
        prop_assert_eq!(windows.state(between), windows.state(now));
    }
}
