//! A list of barred addresses with its age. Pure: time is an argument.

use std::time::{Duration, Instant};

use crate::filter::Barred;

/// Greatest age of the list when a frame is judged by it.
pub(crate) const AGE_MAX: Duration = Duration::from_secs(1);
/// Greatest time that frames wait for a reply. A list without a sender stays valid, so that the guest keeps
/// its network.
pub(crate) const HOLD_MAX: Duration = Duration::from_secs(1);

/// A list with its age.
#[derive(Debug)]
pub(crate) struct Listing {
    barred: Barred,
    /// Time when it was current.
    listed: Instant,
    /// Time of a request that has no reply yet.
    asked: Option<Instant>,
}

/// Validity of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// Frames may be judged by it.
    Usable,
    /// The list is too old, and another one must be requested.
    Stale,
    /// Frames wait for the reply until this time.
    Held(Instant),
}

impl Listing {
    pub(crate) fn new(barred: Barred, now: Instant) -> Self {
        Self {
            barred,
            listed: now,
            asked: None,
        }
    }

    pub(crate) fn barred(&self) -> &Barred {
        &self.barred
    }

    pub(crate) fn freshness(&self, now: Instant) -> Freshness {
        match self.asked {
            Some(asked) if now < asked + HOLD_MAX => Freshness::Held(asked + HOLD_MAX),
            Some(_) => Freshness::Usable,
            None if now.saturating_duration_since(self.listed) > AGE_MAX => Freshness::Stale,
            None => Freshness::Usable,
        }
    }

    /// Records that a request was sent. There is at most one: its reply arrives, however late.
    pub(crate) fn asked(&mut self, now: Instant) {
        self.asked = Some(now);
    }

    /// Records the reply that nothing has changed.
    pub(crate) fn is_confirmed(&mut self, now: Instant) {
        (self.listed, self.asked) = (now, None);
    }

    /// Records the reply with another list.
    pub(crate) fn replace(&mut self, barred: Barred, now: Instant) {
        self.barred = barred;
        self.is_confirmed(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_list_is_requested_again_once_and_holds_frames_until_the_reply() {
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
    fn list_without_a_reply_stays_usable_until_a_late_reply_renews_it() {
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
