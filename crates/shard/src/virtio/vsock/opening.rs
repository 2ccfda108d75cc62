//! The guest's requests for sockets of the host that the monitor has not answered, in the order of its answers.

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

/// The requests. An entry whose guest gave up stays, empty, until its answer comes.
#[derive(Debug, Default)]
pub struct Openings(VecDeque<Option<Opening>>);

impl Openings {
    /// Whether one more may be asked.
    pub fn have_room(&self) -> bool {
        self.0.len() < PENDING_MAX
    }

    /// The monitor was asked for this one, after all others.
    pub fn add(&mut self, opening: Opening) {
        self.0.push_back(Some(opening));
    }

    /// The request that the next answer is for; none if its guest gave up.
    pub fn answered(&mut self) -> Option<Opening> {
        self.0.pop_front().flatten()
    }

    /// The guest gave up the request for `ports`; false if there is none.
    pub fn forget(&mut self, ports: Ports) -> bool {
        let wanted = |entry: &&mut Option<Opening>| entry.is_some_and(|opening| opening.ports == ports);
        self.0
            .iter_mut()
            .find(wanted)
            .is_some_and(|entry| entry.take().is_some())
    }

    /// The guest gave up all requests; their ports.
    pub fn forget_all(&mut self) -> Vec<Ports> {
        self.0
            .iter_mut()
            .filter_map(Option::take)
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

    #[test]
    fn an_answer_to_a_forgotten_request_opens_nothing_and_the_next_answer_its_own() {
        let mut openings = Openings::default();
        (1..=3).for_each(|port| openings.add(opening(port)));
        assert!(openings.forget((2, 1)));
        assert!(!openings.forget((2, 1)) && !openings.forget((1, 2)));
        assert_eq!(openings.answered(), Some(opening(1)));
        assert_eq!(openings.answered(), None);
        assert_eq!(openings.answered(), Some(opening(3)));
        assert_eq!(openings.answered(), None);
    }

    #[test]
    fn forgotten_requests_take_room_until_they_are_answered() {
        let mut openings = Openings::default();
        (0..PENDING_MAX as u32).for_each(|port| openings.add(opening(port)));
        assert_eq!(openings.forget_all().len(), PENDING_MAX);
        assert!(!openings.have_room());
        assert_eq!(openings.answered(), None);
        assert!(openings.have_room());
    }
}
