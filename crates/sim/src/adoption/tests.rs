//! Stories by seed, and a proof for each rule that it finds its flaw.

use super::story::{Plot, run_story};
use super::{Counts, Flaw};

#[track_caller]
fn all(plot: &Plot, seeds: std::ops::Range<u64>) -> Counts {
    let mut all = Counts::default();
    for seed in seeds {
        let counts = run_story(plot, seed, None).unwrap_or_else(|what| panic!("{what}\nseed {seed}"));
        all.add(&counts);
    }
    all
}

#[test]
fn vms_outlive_deaths_stops_and_upgrades_of_their_cells_processes() {
    let counts = all(&Plot::ROUGH, 0..300);
    assert!(counts.adoptions > 1000 && counts.cell_deaths > 1000, "{counts:?}");
    assert!(counts.monitors > 100 && counts.ended > 50, "{counts:?}");
    assert!(counts.upgrades > 50 && counts.failed_upgrades > 50, "{counts:?}");
}

#[test]
fn vms_outlive_processes_that_die_while_they_adopt() {
    let counts = all(&Plot::QUICK, 0..600);
    assert!(counts.adoptions > 1000 && counts.repeated > 20, "{counts:?}");
    assert!(counts.set_aside > 50, "{counts:?}");
}

#[test]
fn vm_that_ends_two_adopters_is_set_aside_and_no_other() {
    let counts = all(&Plot::POISON, 0..300);
    assert!(counts.set_aside > 100, "{counts:?}");
}

#[test]
fn same_seed_tells_the_same_story() {
    let [first, second] = [7, 7].map(|seed| run_story(&Plot::ROUGH, seed, None).unwrap());
    assert_eq!(format!("{first:?}"), format!("{second:?}"));
}

/// The last line of a story that fails because of this flaw.
#[track_caller]
fn ends_badly(plot: &Plot, flaw: Flaw) -> String {
    let bad = (0..200).find_map(|seed| run_story(plot, seed, Some(flaw)).err());
    bad.unwrap_or_else(|| panic!("no rule sees {flaw:?}")).rule
}

#[test]
fn each_flaw_of_an_adopter_breaks_a_rule() {
    for (plot, flaw, rule) in [
        (&Plot::QUICK, Flaw::AcknowledgesFirst, "is lost"),
        (&Plot::QUICK, Flaw::KeepsFormerBoot, "does not run"),
        (&Plot::QUICK, Flaw::KillsNothing, "runs twice"),
        (&Plot::POISON, Flaw::CountsNothing, "is not set aside"),
        (&Plot::ROUGH, Flaw::NamesNoSuccessor, "is lost"),
        (&Plot::ROUGH, Flaw::AcceptsAtOnce, "is served by two processes"),
    ] {
        let what = ends_badly(plot, flaw);
        assert!(what.contains(rule), "{flaw:?}: {what}");
    }
}
