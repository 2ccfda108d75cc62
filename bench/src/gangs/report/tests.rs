use super::*;

const WORK: Work = Work {
    iterations: 30_000,
    calls: 90,
};

/// Samples of three runs: 100 us alone, and the times under each way of scheduling.
fn samples(linux: f64, balance: f64, gangs: f64) -> Vec<Sample> {
    samples_with(100.0, linux, balance, gangs)
}

/// The same, with another time of a VM alone.
fn samples_with(alone: f64, linux: f64, balance: f64, gangs: f64) -> Vec<Sample> {
    let mut all = Vec::new();
    for run in [0.0, 1.0, 2.0] {
        for program in Program::ALL {
            for guest in Guest::ALL {
                for (scheduling, us) in Scheduling::ALL.into_iter().zip([alone, linux, balance, gangs]) {
                    // Two VMs of unequal times, whose mean is that of the run.
                    let round_us = match scheduling {
                        Scheduling::Alone => vec![us],
                        _ => vec![us + run - 10.0, us + run + 10.0],
                    };
                    all.push(Sample {
                        program,
                        guest,
                        scheduling,
                        round_us,
                    });
                }
            }
        }
    }
    all
}

#[test]
fn gangs_are_compared_with_both_rivals_and_the_fair_share() {
    let report = Report::of("a machine", WORK, &samples(599.0, 319.0, 199.0)).expect("whole");
    let text = report.markdown().expect("a text");
    for line in [
        "| barriers that spin | paravirtual spin locks | one VM alone | 100 | 100 |  |",
        "| barriers that spin | `nopvspin` | two VMs, Linux | 600 | 610 | 3.00 |",
        "| a spin lock of the kernel | `nopvspin` | two VMs, balance scheduling | 320 | 330 | 1.60 |",
        "| barriers that sleep | paravirtual spin locks | two VMs, gangs | 200 | 210 | 1.00 |",
        "| barriers that spin | `nopvspin` | 3.00 | 1.60 | 1.3: met |",
        "| barriers that sleep | paravirtual spin locks | 3.00 | 1.60 | 1.0: met |",
        "| barriers that spin | spanning two cells | 3.00 | 1.60 | 1.3: met |",
    ] {
        assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
    }
}

#[test]
fn rival_that_is_too_close_misses_the_goal_of_its_guest() {
    let report = Report::of("a machine", WORK, &samples(599.0, 219.0, 199.0)).expect("whole");
    for gain in &report.gains {
        let expected = match gain.guest != Guest::Paravirtual.name() {
            true => (1.3, Verdict::Missed),
            false => (1.0, Verdict::Met),
        };
        assert_eq!((gain.goal, gain.verdict), expected, "{gain:?}");
    }
    let report = Report::of("a machine", WORK, &samples(159.0, 599.0, 199.0)).expect("whole");
    let is_missed = |gain: &Gain| gain.verdict == Verdict::Missed;
    assert!(report.gains.iter().all(is_missed), "{:?}", report.gains);
}

#[test]
fn busy_machine_shows_neither_a_met_nor_a_missed_goal() {
    for (alone, is_busy) in [(200.0, false), (201.0, true)] {
        let report = Report::of("a machine", WORK, &samples_with(alone, 599.0, 319.0, 199.0)).expect("whole");
        let as_expected = |gain: &Gain| (gain.verdict == Verdict::Busy) == is_busy;
        assert!(
            report.gains.iter().all(as_expected),
            "{alone}: {:?}",
            report.gains
        );
    }
}

#[test]
fn kind_without_a_sample_is_an_error() {
    let mut samples = samples(599.0, 319.0, 199.0);
    samples.retain(|sample| sample.scheduling != Scheduling::Balance);
    let error = Report::of("a machine", WORK, &samples)
        .err()
        .map(|error| error.to_string());
    let expected = "barriers that spin, paravirtual spin locks, two VMs, balance scheduling: no sample";
    assert_eq!(error.as_deref(), Some(expected));
}
