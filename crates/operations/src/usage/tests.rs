use registry::cluster::interface;
use registry::vms::Record;
use serde_json::{Value, json};

use super::sources::{moved_by, queue, vcpus_of_vm};
use super::*;

/// A vCPU whose counters are `ran`, `waited` and `halted` milliseconds and `halts`, read at `at_ms`.
fn vcpu(at_ms: u64, [ran, waited, halted, halts]: [u64; 4], is_halted: bool) -> VcpuReading {
    VcpuReading {
        vm: "web".to_owned(),
        at_ms,
        cell: Some(0),
        shard_pid: Some(7),
        thread_id: Some(8),
        last_cpu: Some(1),
        is_halted: Some(is_halted),
        counters: Counters {
            ran_ms: Some(ran),
            waited_ms: Some(waited),
            halted_ms: Some(halted),
            halts: Some(halts),
            exits: Some(10 * halts),
            ..Counters::default()
        },
        ..VcpuReading::default()
    }
}

fn vm(vcpus: u8) -> VmReading {
    VmReading {
        vm: "web".to_owned(),
        state: VmState::Running,
        cell: Some(0),
        host_cell: None,
        span: Vec::new(),
        vcpus,
        cpu_weight: None,
        cpu_limit: Some(1.5),
        cpu_reservation: None,
        memory_bytes: 64 << 20,
        host_bytes: None,
        swapped_bytes: None,
        borrowed: Vec::new(),
    }
}

fn reading(at_ms: u64, vcpus: Vec<VcpuReading>) -> Reading {
    Reading {
        at_ms,
        vms: vec![vm(vcpus.len().max(1).try_into().unwrap())],
        vcpus,
        ..Reading::default()
    }
}

fn of_vcpu(before: VcpuReading, after: VcpuReading) -> VcpuUse {
    let (before, after) = (
        reading(before.at_ms, vec![before]),
        reading(after.at_ms, vec![after]),
    );
    let mut sample = Sample::between(Some(&before), &after);
    sample.vcpus.remove(0)
}

#[test]
fn rates_are_differences_of_counters_by_the_time_between_them() {
    let used = of_vcpu(
        vcpu(1_000, [500, 100, 300, 40], false),
        vcpu(3_000, [1_500, 200, 600, 61], false),
    );
    let shares = [used.run_milli, used.wait_milli, used.halt_milli];
    assert_eq!(shares, [Some(500), Some(50), Some(150)]);
    // 21 halts in 2 s.
    assert_eq!((used.halts_per_s, used.exits_per_s), (Some(11), Some(105)));
    assert_eq!(used.reading.counters.ran_ms, Some(1_500));
    assert_eq!((used.spin_milli, used.migrated), (None, None));
}

#[test]
fn first_reading_has_no_rates() {
    let after = reading(1_000, vec![vcpu(1_000, [500, 100, 300, 40], false)]);
    let sample = Sample::between(None, &after);
    assert_eq!(sample.interval_ms, None);
    assert_eq!((sample.vcpus[0].run_milli, sample.vms[0].run_milli), (None, None));
    assert_eq!(sample.vcpus[0].reading.counters.ran_ms, Some(500));
}

#[test]
fn counters_that_begin_anew_have_no_rates() {
    let before = || vcpu(1_000, [500, 100, 300, 40], false);
    let unknown = |used: VcpuUse| {
        let all = [
            used.run_milli,
            used.wait_milli,
            used.halt_milli,
            used.halts_per_s,
            used.exits_per_s,
        ];
        assert_eq!(all, [None; 5], "{used:?}");
    };
    // The guest has rebooted: each counter that went back concerns all.
    unknown(of_vcpu(before(), vcpu(2_000, [20, 0, 0, 1], false)));
    unknown(of_vcpu(before(), vcpu(2_000, [900, 100, 300, 39], false)));
    // Another VM of this name, whose counters are higher by chance.
    let mut another = vcpu(2_000, [900, 200, 400, 50], false);
    another.thread_id = Some(9);
    unknown(of_vcpu(before(), another));
    let mut another = vcpu(2_000, [900, 200, 400, 50], false);
    another.shard_pid = Some(9);
    unknown(of_vcpu(before(), another));
    // The same answer twice, or a clock that stood still.
    unknown(of_vcpu(before(), vcpu(1_001, [501, 100, 300, 40], false)));
    unknown(of_vcpu(before(), vcpu(900, [501, 100, 300, 40], false)));
}

#[test]
fn counter_that_nobody_reports_is_unknown_and_not_zero() {
    let (mut before, mut after) = (
        vcpu(1_000, [500, 100, 300, 40], false),
        vcpu(2_000, [600, 100, 300, 40], false),
    );
    before.counters.waited_ms = None;
    after.counters.halted_ms = None;
    let used = of_vcpu(before, after);
    assert_eq!(
        (used.run_milli, used.wait_milli, used.halt_milli),
        (Some(100), None, None)
    );
}

#[test]
fn halt_that_goes_on_counts_though_kvm_counts_it_at_its_end() {
    // One halt all the time, which KVM has not counted.
    let idle = of_vcpu(
        vcpu(1_000, [500, 0, 0, 1], true),
        vcpu(3_000, [500, 0, 0, 1], true),
    );
    assert_eq!((idle.run_milli, idle.halt_milli), (Some(0), Some(1_000)));
    // A halt of an hour ends: of the difference, only what fits between the readings.
    let awake = of_vcpu(
        vcpu(1_000, [500, 0, 0, 1], true),
        vcpu(3_000, [900, 100, 3_600_000, 1], false),
    );
    assert_eq!(awake.halt_milli, Some(750));
    // Many halts, in one of which each reading is.
    let ticking = of_vcpu(
        vcpu(1_000, [500, 0, 1_000, 10], true),
        vcpu(3_000, [700, 0, 2_795, 20], true),
    );
    assert_eq!(ticking.halt_milli, Some(900));
}

#[test]
fn vm_has_the_sum_of_its_vcpus_and_none_if_one_is_unknown() {
    let other = |mut vcpu: VcpuReading| {
        vcpu.vcpu = 1;
        vcpu.thread_id = Some(9);
        vcpu
    };
    let both = |at_ms, ran| {
        let own = vcpu(at_ms, [ran, 0, 0, 0], false);
        reading(at_ms, vec![own.clone(), other(own)])
    };
    let (before, after) = (both(1_000, 0), both(2_000, 1_000));
    let sample = Sample::between(Some(&before), &after);
    assert_eq!(sample.vms[0].run_milli, Some(2_000));
    let mut lost = after.clone();
    lost.vcpus.pop();
    let sample = Sample::between(Some(&before), &lost);
    assert_eq!(sample.vms[0].run_milli, None, "one of two vCPUs");
    assert_eq!(sample.vcpus[0].run_milli, Some(1_000));
    // A vCPU that was not there before.
    let mut came = before.clone();
    came.vcpus.pop();
    let sample = Sample::between(Some(&came), &after);
    assert_eq!((sample.vms[0].run_milli, sample.vcpus[1].run_milli), (None, None));
}

#[test]
fn vm_that_came_or_went_between_two_readings_is_no_error() {
    let with = reading(1_000, vec![vcpu(1_000, [500, 0, 0, 1], true)]);
    let without = Reading {
        at_ms: 2_000,
        ..Reading::default()
    };
    let gone = Sample::between(Some(&with), &without);
    assert_eq!((gone.vms.len(), gone.vcpus.len()), (0, 0));
    let came = Sample::between(Some(&without), &with);
    assert_eq!((came.vms.len(), came.vcpus[0].run_milli), (1, None));
}

#[test]
fn vcpu_that_changes_its_cell_names_the_one_before() {
    let before = vcpu(1_000, [500, 0, 0, 1], true);
    let mut after = vcpu(2_000, [500, 0, 0, 1], true);
    assert_eq!(of_vcpu(before.clone(), after.clone()).moved_from, None);
    after.cell = Some(1);
    assert_eq!(of_vcpu(before.clone(), after.clone()).moved_from, Some(0));
    // Of no cell now, or not known.
    after.cell = None;
    assert_eq!(of_vcpu(before, after).moved_from, None);
}

#[test]
fn cpu_has_the_vcpus_bound_to_it_and_those_that_ran_there_last() {
    let on = |vcpu: u8, cpus: &[usize], last_cpu| VcpuReading {
        vm: "web".to_owned(),
        vcpu,
        cpus: Some(cpus.to_vec()),
        last_cpu,
        ..VcpuReading::default()
    };
    let cpu = |cpu, busy_ticks, total_ticks| CpuReading {
        cpu,
        busy_ticks,
        total_ticks,
        queue: None,
    };
    let cell = |cell, is_here, cpus: &[usize]| CellReading {
        cell,
        is_here,
        cpus: cpus.to_vec(),
        ..CellReading::default()
    };
    let mut after = reading(
        2_000,
        vec![
            on(0, &[0, 1], Some(1)),
            on(1, &[1], Some(0)),
            on(2, &[0, 1], None),
            VcpuReading {
                cell: Some(2),
                ..on(3, &[0], Some(0))
            },
        ],
    );
    after.cells = vec![cell(0, true, &[0]), cell(1, true, &[1]), cell(2, false, &[0, 1])];
    after.cpus = vec![cpu(0, 130, 400), cpu(1, 90, 400), cpu(2, 5, 5)];
    let before = Reading {
        at_ms: 1_000,
        cpus: vec![cpu(0, 100, 200), cpu(1, 100, 200)],
        ..Reading::default()
    };
    let sample = Sample::between(Some(&before), &after);
    let names = |cpu: usize| {
        let vcpus = sample.cpus[cpu].vcpus.iter();
        vcpus.map(|vcpu| (vcpu.vcpu, vcpu.is_bound)).collect::<Vec<_>>()
    };
    assert_eq!((names(0), names(1)), (vec![], vec![(0, false), (1, true)]));
    assert_eq!(sample.cpus[1].cells, [1], "cells of other hosts have CPUs, too");
    // A counter that went back, and a CPU that came, are unknown.
    let busy: Vec<_> = sample.cpus.iter().map(|cpu| cpu.busy_milli).collect();
    assert_eq!(busy, [Some(150), None, None]);
}

#[test]
fn unknown_figures_are_null_in_json() {
    let after = reading(1_000, vec![vcpu(1_000, [500, 100, 300, 40], false)]);
    let mut sample = Sample::between(None, &after);
    sample.cpus.push(CpuUse::default());
    let json = serde_json::to_value(&sample).unwrap();
    let vcpu = &json["vcpus"][0];
    for key in ["run_milli", "spin_milli", "spun_ms", "migrated", "moved_from"] {
        assert_eq!(vcpu.get(key), Some(&Value::Null), "{key}");
    }
    assert_eq!((&vcpu["ran_ms"], &vcpu["cell"]), (&json!(500), &json!(0)));
    assert_eq!(json["cpus"][0].get("queue"), Some(&Value::Null));
    assert_eq!(json["vms"][0]["state"], "running");
}

fn record(json: Value) -> Record {
    let mut all = json!({
        "name": "web", "state": "running", "monitor_pid": 1, "shard_pid": 7, "started_unix_s": 0, "boots": 1,
        "cid": 3, "sandbox_missing": [], "spec": { "image": "tiny" },
    });
    for (key, value) in json.as_object().unwrap() {
        all[key] = value.clone();
    }
    serde_json::from_value(all).unwrap()
}

#[test]
fn vcpus_of_a_vm_outside_cells_are_read_from_its_own_status() {
    let status = json!({ "vcpus": [
        { "vcpu": 0, "shard_pid": 7, "thread_id": 8, "cpus": [0, 1], "last_cpu": 1, "ran_ms": 500,
          "waited_ms": 3, "kvm": { "halts": 4, "is_halted": true } },
        // As a process of the release before reports it.
        { "vcpu": 1, "thread_id": 9, "ran_ms": 600, "waited_ms": 4 },
        { "vcpu": 256 }, { "vcpu": "x" }, 7,
    ] });
    let vcpus = vcpus_of_vm(&record(json!({})), &status, 50);
    assert_eq!(vcpus.len(), 2, "{vcpus:?}");
    assert_eq!(
        (vcpus[0].last_cpu, vcpus[0].is_halted, vcpus[0].counters.halts),
        (Some(1), Some(true), Some(4))
    );
    assert_eq!(
        (vcpus[1].shard_pid, vcpus[1].cpus.clone(), vcpus[1].counters.halts),
        (Some(7), None, None)
    );
    assert!(vcpus_of_vm(&record(json!({})), &json!(7), 0).is_empty());
}

#[test]
fn vm_over_cells_that_a_monitor_serves_shows_the_cell_of_each_vcpu() {
    let status = json!({ "span": { "vcpus": [0, 3, 70_000] } });
    let vcpus = vcpus_of_vm(&record(json!({ "cell": 0 })), &status, 0);
    let cells: Vec<_> = vcpus.iter().map(|vcpu| (vcpu.vcpu, vcpu.cell)).collect();
    assert_eq!(cells, [(0, Some(0)), (1, Some(3)), (2, None)]);
    assert_eq!(vcpus[1].counters, Counters::default());
}

#[test]
fn vcpu_on_another_cells_cpu_has_the_origin_of_its_move() {
    let record = record(json!({ "cell": 0, "borrowed_cpus": [
        { "vcpu": 1, "cell": 1, "cpu": 4, "is_automatic": true },
        { "vcpu": 2, "cell": 1, "cpu": 5 },
    ] }));
    let origins = [0, 1, 2].map(|vcpu| moved_by(&record, vcpu));
    assert_eq!(origins, [None, Some(MovedBy::Decision), Some(MovedBy::Command)]);
}

#[test]
fn reason_from_another_process_is_one_bounded_line() {
    let unknown = Unknown::new("cell 1", &format!("a\n\x1b[2Jb{}", "x".repeat(10_000)));
    assert!(unknown.why.starts_with("a  [2Jb"), "{}", unknown.why);
    assert_eq!(unknown.why.chars().count(), 200);
}

#[test]
fn run_queue_that_a_cell_reports_is_in_the_reading() {
    let reported = interface::CpuQueue {
        cpu: 3,
        gang: Some("web".to_owned()),
        waiting: 2,
        ungated: 1,
        load: 3,
        moved_idle: 4,
        moved_periodic: 5,
        moved_ordered: 6,
        refused: 7,
    };
    let moves = QueueMoves {
        idle: Some(4),
        periodic: Some(5),
        ordered: Some(6),
    };
    let expected = CpuQueue {
        gang: Some("web".to_owned()),
        waiting: Some(2),
        ungated: Some(1),
        load_milli: Some(3_000),
        moves: Some(moves),
        refused: Some(7),
    };
    assert_eq!(queue(&reported), expected);
}
