//! Rate limit on updates of a VM's record about its full disks. Without I/O, clock or threads.
//!
//! A shard may be under a guest's control. One that reports other disks again and again would have the record
//! and the user's journal written each time.

use std::time::{Duration, Instant};

/// Between two changes of the record.
const INTERVAL: Duration = Duration::from_secs(1);

/// The full disks of one boot, as the record has them, and as the shard reported them since.
#[derive(Debug, Default)]
pub(super) struct FullDisks {
    recorded: Vec<String>,
    /// When the record was last changed.
    changed: Option<Instant>,
    /// The last report, if it is not recorded yet.
    waiting: Option<Vec<String>>,
}

impl FullDisks {
    /// Takes a report, in place of those that wait.
    pub(super) fn report(&mut self, disks: Vec<String>) {
        self.waiting = (disks != self.recorded).then_some(disks);
    }

    /// When the record is to be changed; none if it is right.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        self.waiting.as_ref()?;
        Some(self.changed.map_or(now, |changed| changed + INTERVAL))
    }

    /// The disks to record, once their time has come.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<&[String]> {
        if self.due(now)? > now {
            return None;
        }
        self.recorded = self.waiting.take()?;
        self.changed = Some(now);
        Some(&self.recorded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disks(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn record_changes_once_a_second_at_most_and_ends_as_the_last_report() {
        let (begun, mut full) = (Instant::now(), FullDisks::default());
        let mut recorded = Vec::new();
        // 1000 reports a second for 10 s, and no report after that.
        for ms in 0..12_000 {
            let now = begun + Duration::from_millis(ms);
            if ms < 10_000 {
                let name = if ms % 2 == 0 { "root" } else { "data" };
                full.report(disks(&[name]));
            }
            if full.due(now).is_some_and(|due| due <= now) {
                recorded.push((ms, full.take_due(now).unwrap().to_vec()));
            }
        }
        assert!((10..=11).contains(&recorded.len()), "{recorded:?}");
        assert_eq!(
            recorded[0],
            (0, disks(&["root"])),
            "the first is recorded at once"
        );
        assert_eq!(recorded.last().unwrap().1, disks(&["data"]), "the last report");
        assert!(
            recorded.windows(2).all(|pair| pair[1].0 - pair[0].0 >= 1000),
            "{recorded:?}"
        );
    }

    #[test]
    fn report_of_what_is_recorded_withdraws_one_that_waits() {
        let (now, mut full) = (Instant::now(), FullDisks::default());
        full.report(Vec::new());
        assert_eq!(
            (full.due(now), full.take_due(now)),
            (None, None),
            "none is full at first"
        );
        full.report(disks(&["root"]));
        assert_eq!(full.take_due(now), Some(&disks(&["root"])[..]));
        full.report(Vec::new());
        assert_eq!(full.due(now), Some(now + INTERVAL));
        assert_eq!(full.take_due(now), None);
        full.report(disks(&["root"]));
        assert_eq!(full.due(now), None);
    }
}
