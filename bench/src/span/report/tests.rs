use serde_json::json;

use super::*;
use crate::exits::Exits;

/// A sample of which every figure is `scale` times that of the first kind.
fn sample(scale: f64) -> Sample {
    let names = [
        "interrupt_far_ns",
        "interrupt_near_ns",
        "wake_far_ns",
        "wake_near_ns",
        "switch_ns",
        "fault_fresh_ns",
        "fault_again_ns",
        "late_ns",
        "arm_ns",
    ];
    let guest = names.map(|name| (name.to_owned(), json!(2000.0 * scale)));
    let count = |kind: &str, count: u64| (kind.to_owned(), count);
    Sample {
        answer_s: 8.0 * scale,
        guest: guest.into_iter().collect(),
        compile_s: vec![10.0 * scale, 30.0 * scale, 11.0 * scale],
        start_exits: Exits([count("port", 700)].into()),
        compile_exits: vec![Exits([count("halt", 9), count("port", 50)].into())],
        idle_moves_us: Vec::new(),
        storm_moves_us: Vec::new(),
    }
}

fn samples(two: f64) -> [Vec<Sample>; Kind::ALL.len()] {
    let mut all = [1.0, 1.5, two].map(|scale| vec![sample(scale)]);
    all[2][0].idle_moves_us = vec![300.0, 100.0, 200.0];
    all[2][0].compile_exits[0].0.insert("msr".to_owned(), 7);
    all
}

#[test]
fn every_figure_is_compared_with_the_first_kind() {
    let report = Report::of("a machine", &samples(1.04), &[0.5]).expect("whole");
    let text = report.markdown().expect("a text");
    for line in [
        "| start until the agent answers | 8.00 s | 12.00 s | 1.50 | 8.32 s | 1.04 |",
        "| bzip2 compiled, `make -j4` | 11.00 s | 16.50 s | 1.50 | 11.44 s | 1.04 |",
        "| timer set and stopped | 2.00 us | 3.00 us | 1.50 | 2.08 us | 1.04 |",
        "| a start: port | 700 | 700 | 1.00 | 700 | 1.00 |",
        "| a compilation: msr |  |  |  | 7 |  |",
        "| a vCPU of an idle guest | 200 | 100 | 300 | 400 |",
        "| while all vCPUs interrupt one another |  |  |  |  |",
        "| Cellular Disco | 1520 | | | |",
        "Goal: compiling in two shards takes at most 1.05 of the first's time. met: 1.04.",
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
    }
}

#[test]
fn missed_goal_is_reported() {
    let report = Report::of("a machine", &samples(1.2), &[]).expect("whole");
    let text = report.markdown().expect("a text");
    assert!(text.ends_with("not met: 1.20.\n"), "{text}");
}

#[test]
fn a_guest_that_leaves_a_figure_out_is_an_error() {
    let mut samples = samples(1.0);
    samples[1][0].guest = json!({ "switch_ns": 1.0 });
    assert!(Report::of("a machine", &samples, &[]).is_err());
}

#[test]
fn a_record_has_every_sample() {
    let report = Report::of("a machine", &samples(1.0), &[0.4, 0.6]).expect("whole");
    let record = serde_json::to_value(&report).expect("JSON");
    assert_eq!(record["figures"][1]["samples"][0], json!([10.0, 30.0, 11.0]));
    assert_eq!(record["channel_round_trip_us"], json!([0.4, 0.6]));
    assert_eq!(record["moves"][0]["pauses_us"], json!([300.0, 100.0, 200.0]));
}
