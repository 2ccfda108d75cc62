//! The list of barred addresses that a relay has, and how fresh it is. Pure: time is an argument.

use std::time::{Duration, Instant};

use crate::filter::Barred;

/// How old the list may be when a frame is judged by it.
pub(super) const AGE_MAX: Duration = Duration::from_secs(1);
/// How long frames wait for an answer. A list without a sender stays as it is, rather than the guest losing
/// its network.
pub(super) const HOLD_MAX: Duration = Duration::from_secs(1);

/// A list with its age.
#[derive(Debug)]
pub(super) struct Listing {
    barred: Barred,
    /// Time when it was right.
    listed: Instant,
    /// Time of a question that has no answer yet.
    asked: Option<Instant>,
}

/// What a list is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freshness {
    /// Frames may be judged by it.
    Usable,
    /// Too old: a question for another one is due.
    Stale,
    /// Frames wait for the answer until then.
    Held(Instant),
}

impl Listing {
    pub(super) fn new(barred: Barred, now: Instant) -> Self {
        Self {
            barred,
            listed: now,
            asked: None,
        }
    }

    pub(super) fn barred(&self) -> &Barred {
        &self.barred
    }

    pub(super) fn freshness(&self, now: Instant) -> Freshness {
        match self.asked {
            Some(asked) if now < asked + HOLD_MAX => Freshness::Held(asked + HOLD_MAX),
            Some(_) => Freshness::Usable,
            None if now.saturating_duration_since(self.listed) > AGE_MAX => Freshness::Stale,
            None => Freshness::Usable,
        }
    }

    /// Notes that a question was sent. There is one at most: its answer comes, however late.
    pub(super) fn asked(&mut self, now: Instant) {
        self.asked = Some(now);
    }

    /// Notes the answer that nothing has changed.
    pub(super) fn is_confirmed(&mut self, now: Instant) {
        (self.listed, self.asked) = (now, None);
    }

    /// Notes the answer that brings another list.
    pub(super) fn replace(&mut self, barred: Barred, now: Instant) {
        self.barred = barred;
        self.is_confirmed(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_list_is_asked_for_once_and_holds_frames_until_the_answer() {
        let start = Instant::now();
        let mut listing = Listing::new(Barred::default(), start);
        assert_eq!(listing.freshness(start + AGE_MAX), Freshness::Usable);
        let asked = start + AGE_MAX + Duration::from_millis(1);
        assert_eq!(listing.freshness(asked), Freshness::Stale);
        listing.asked(asked);
        assert_eq!(listing.freshness(asked), Freshness::Held(asked + HOLD_MAX));
        let own = Barred {
            own: [[192, 0, 2, 1].into()].into(),
            ..Barred::default()
        };
        listing.replace(own.clone(), asked);
        assert_eq!(listing.freshness(asked + AGE_MAX), Freshness::Usable);
        assert_eq!(*listing.barred(), own);
        assert_eq!(
            listing.freshness(asked + AGE_MAX + Duration::from_millis(1)),
            Freshness::Stale
        );
    }

    #[test]
    fn list_without_an_answer_stays_usable_until_a_late_answer_renews_it() {
        let start = Instant::now();
        let mut listing = Listing::new(Barred::default(), start);
        listing.asked(start);
        let late = start + HOLD_MAX * 100;
        assert_eq!(listing.freshness(start + HOLD_MAX), Freshness::Usable);
        assert_eq!(listing.freshness(late), Freshness::Usable);
        listing.is_confirmed(late);
        assert_eq!(listing.freshness(late + AGE_MAX), Freshness::Usable);
        assert_eq!(listing.freshness(late + AGE_MAX * 2), Freshness::Stale);
    }
}
