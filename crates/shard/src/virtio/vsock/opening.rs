//! The guest's requests for sockets of the host that the monitor has not answered, in the order of its
//! answers.

use std::collections::VecDeque;

use super::packet::Ports;
use crate::ports::PENDING_MAX;

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The ports of the connection that it is for.
    pub ports: Ports,
    /// The credit that the guest gave with it: buffer size and forwarded count.
    pub credit: (u32, u32),
}

/// A request that was sent to the monitor.
#[derive(Debug)]
struct Entry {
    /// The host's port that was asked for.
    port: u32,
    /// None once the guest gave up.
    opening: Option<Opening>,
}

/// The requests. An entry whose guest gave up stays, empty, until its answer comes.
#[derive(Debug, Default)]
pub struct Openings(VecDeque<Entry>);

/// The requests that an answer settles.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Answered {
    /// The request that the answer is for; none if its guest gave up, or if there was no such request.
    pub opening: Option<Opening>,
    /// The ports of earlier requests, whose answers are lost: a monitor died that had received them.
    pub lost: Vec<Ports>,
}

impl Openings {
    /// Whether one more may be asked.
    pub fn have_room(&self) -> bool {
        self.0.len() < PENDING_MAX
    }

    /// The monitor was asked for this one, after all others.
    pub fn add(&mut self, opening: Opening) {
        self.0.push_back(Entry {
            port: opening.ports.0,
            opening: Some(opening),
        });
    }

    /// Settles the first request for the host's `port`, and those before it, whose answers are lost. Changes
    /// nothing if there is no request for the port.
    pub fn answered(&mut self, port: u32) -> Answered {
        let Some(index) = self.0.iter().position(|entry| entry.port == port) else {
            return Answered::default();
        };
        let before = self.0.drain(..index);
        let lost = before
            .filter_map(|entry| entry.opening)
            .map(|opening| opening.ports)
            .collect();
        let opening = self.0.pop_front().and_then(|entry| entry.opening);
        Answered { opening, lost }
    }

    /// The guest gave up the request for `ports`; false if there is none.
    pub fn forget(&mut self, ports: Ports) -> bool {
        self.0
            .iter_mut()
            .map(|entry| &mut entry.opening)
            .find(|opening| opening.is_some_and(|opening| opening.ports == ports))
            .is_some_and(|opening| opening.take().is_some())
    }

    /// The guest gave up all requests; their ports.
    pub fn forget_all(&mut self) -> Vec<Ports> {
        self.0
            .iter_mut()
            .filter_map(|entry| entry.opening.take())
            .map(|opening| opening.ports)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opening(port: u32) -> Opening {
        Opening {
            ports: (port, 1),
            credit: (2, 3),
        }
    }

    /// The request of the guest's port `from`.
    fn from(from: u32, port: u32) -> Opening {
        Opening {
            ports: (port, from),
            credit: (2, 3),
        }
    }

    fn answer(opening: impl Into<Option<Opening>>, lost: &[Ports]) -> Answered {
        Answered {
            opening: opening.into(),
            lost: lost.to_vec(),
        }
    }

    #[test]
    fn answer_to_a_forgotten_request_opens_nothing_and_the_next_answer_opens_its_own() {
        let mut openings = Openings::default();
        (1..=3).for_each(|port| openings.add(opening(port)));
        assert!(openings.forget((2, 1)));
        assert!(!openings.forget((2, 1)) && !openings.forget((1, 2)));
        assert_eq!(openings.answered(1), answer(opening(1), &[]));
        assert_eq!(openings.answered(2), answer(None, &[]));
        assert_eq!(openings.answered(3), answer(opening(3), &[]));
        assert_eq!(openings.answered(3), answer(None, &[]));
    }

    #[test]
    fn forgotten_requests_take_room_until_they_are_answered() {
        let mut openings = Openings::default();
        (0..PENDING_MAX as u32).for_each(|port| openings.add(opening(port)));
        assert_eq!(openings.forget_all().len(), PENDING_MAX);
        assert!(!openings.have_room());
        assert_eq!(openings.answered(0), answer(None, &[]));
        assert!(openings.have_room());
    }

    #[test]
    fn request_whose_answer_is_lost_is_settled_by_the_answer_to_a_later_one() {
        let mut openings = Openings::default();
        (1..=4).for_each(|port| openings.add(opening(port)));
        assert_eq!(openings.answered(3), answer(opening(3), &[(1, 1), (2, 1)]));
        assert_eq!(openings.answered(1), answer(None, &[]));
        assert_eq!(openings.answered(4), answer(opening(4), &[]));
    }

    #[test]
    fn answers_to_requests_for_one_port_open_them_in_order() {
        let mut openings = Openings::default();
        for (guest, port) in [(1, 9), (2, 8), (3, 9), (4, 8)] {
            openings.add(from(guest, port));
        }
        assert_eq!(openings.answered(9), answer(from(1, 9), &[]));
        assert_eq!(openings.answered(9), answer(from(3, 9), &[(8, 2)]));
        assert_eq!(openings.answered(8), answer(from(4, 8), &[]));
    }

    #[test]
    fn forgotten_request_whose_answer_is_lost_is_dropped_without_a_reset() {
        let mut openings = Openings::default();
        for (guest, port) in [(1, 7), (2, 8), (3, 7), (4, 9)] {
            openings.add(from(guest, port));
        }
        assert!(openings.forget((7, 1)) && openings.forget((7, 3)));
        // The first request for the port, though its guest gave up.
        assert_eq!(openings.answered(7), answer(None, &[]));
        assert_eq!(openings.answered(9), answer(from(4, 9), &[(8, 2)]));
        assert_eq!(openings.answered(7), answer(None, &[]));
    }

    #[test]
    fn answer_to_no_request_changes_nothing() {
        let mut openings = Openings::default();
        assert_eq!(openings.answered(1), answer(None, &[]));
        openings.add(opening(1));
        assert_eq!(openings.answered(2), answer(None, &[]));
        assert_eq!(openings.answered(1), answer(opening(1), &[]));
    }
}
