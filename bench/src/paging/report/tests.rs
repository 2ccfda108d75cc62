use super::*;
use crate::sample::HostPages;

const SIZES: Sizes = Sizes {
    resident_mib: 48,
    memory_mib: 128,
    array_mib: 64,
};

const FAULTS: Faults = Faults {
    zero: 10,
    second_chance: 20,
    read_ahead: 30,
    with_io: 1280,
    unchanged_pages: 512,
};

/// A run that took `run_s`, with 10 MiB of each sort.
fn run(run_s: f64, without_io: Option<u64>) -> Run {
    Run::Done(Sample {
        run_s,
        host: HostPages {
            read: 2560,
            written: 2560,
            without_io,
            faults: without_io.map(|_| FAULTS),
        },
        guest_read: 2560,
        guest_written: 2560,
    })
}

fn report(runs: &[Vec<Run>; Kind::ALL.len()]) -> Report<'static> {
    Report::of("lab", SIZES, runs, None).unwrap()
}

fn runs(disk_s: f64) -> [Vec<Run>; Kind::ALL.len()] {
    [
        vec![run(20.0, None)],
        vec![run(10.0, None), run(100.0, None), run(30.0, None)],
        vec![run(disk_s, Some(5120))],
        vec![Run::Refused("no swap: mkswap".to_owned())],
        vec![run(60.0, None)],
    ]
}

#[test]
fn each_kind_is_compared_with_the_medians_of_the_ordinary_disk() {
    let report = report(&runs(9.0));
    let times: Vec<_> = report.rows.iter().map(|row| row.of_the_ordinary_disk).collect();
    assert_eq!(times, [Some(20.0 / 30.0), Some(1.0), Some(0.3), None, Some(2.0)]);
}

#[test]
fn pages_that_the_guest_swaps_are_io_on_an_ordinary_disk_only() {
    let report = report(&runs(9.0));
    let io: Vec<_> = report
        .rows
        .iter()
        .map(|row| row.io_mib.first().copied())
        .collect();
    assert_eq!(io, [Some(20.0), Some(40.0), Some(20.0), None, Some(40.0)]);
    assert_eq!(report.rows[2].io_of_the_ordinary_disk, Some(0.5));
}

#[test]
fn record_has_every_sample_and_the_reason_of_a_refusal() {
    let record = serde_json::to_value(report(&runs(9.0))).unwrap();
    let rows = &record["rows"];
    assert_eq!(rows[1]["run_s"], serde_json::json!([10.0, 100.0, 30.0]));
    assert_eq!(rows[2]["without_io_mib"], serde_json::json!([20.0]));
    assert_eq!(rows[3]["refused"], "no swap: mkswap");
    assert_eq!(rows[3]["run_s"], serde_json::json!([]));
}

#[test]
fn table_has_a_verdict_on_each_goal_and_the_reason_of_a_refusal() {
    let text = report(&runs(9.0)).markdown().unwrap();
    assert!(text.contains("at most 0.40 of the time. met: 0.30."), "{text}");
    assert!(text.contains("at most 0.33 of the I/O. not met: 0.50."), "{text}");
    assert!(text.contains("| refused: no swap: mkswap |"), "{text}");
    let text = report(&runs(15.0)).markdown().unwrap();
    assert!(text.contains("of the time. not met: 0.50."), "{text}");
}

#[test]
fn faults_are_shown_by_kind_for_mirrorball_alone() {
    let report = report(&runs(9.0));
    assert_eq!(report.rows[2].pages_per_read, [2.0]);
    assert_eq!(report.rows[2].unchanged_mib, [2.0]);
    assert!(report.rows[4].faults_with_io.is_empty());
    let text = report.markdown().unwrap();
    let disk = Kind::PagingDisk.name();
    assert!(
        text.contains(&format!("| {disk} | 10 | 20 | 30 | 1280 | 2.00 | 2.0 |")),
        "{text}"
    );
}

#[test]
fn kind_that_is_repeated_alone_is_added_to_an_earlier_record_of_the_same_sizes() {
    let mut earlier = serde_json::to_value(report(&runs(9.0))).unwrap();
    let mut again = Kind::ALL.map(|_| Vec::new());
    again[2] = vec![run(15.0, Some(5120))];
    let both = Report::of("lab", SIZES, &again, Some(&earlier)).unwrap();
    assert_eq!(both.rows[1].run_s, [10.0, 100.0, 30.0]);
    assert_eq!(both.rows[2].run_s, [9.0, 15.0]);
    assert_eq!(both.rows[2].of_the_ordinary_disk, Some(0.5));
    assert_eq!(both.rows[3].refused.as_deref(), Some("no swap: mkswap"));
    // A record from before these figures has none of them.
    earlier["rows"][2].as_object_mut().unwrap().remove("zero_faults");
    let both = Report::of("lab", SIZES, &again, Some(&earlier)).unwrap();
    assert_eq!(both.rows[2].zero_faults, [10.0]);
    earlier["array_mib"] = 80.into();
    let error = Report::of("lab", SIZES, &again, Some(&earlier))
        .err()
        .unwrap()
        .to_string();
    assert_eq!(
        error,
        "--add: array_mib of the record is 80, not 64; help: run without --add, or with the record's sizes"
    );
}
