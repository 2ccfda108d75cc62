//! The guest's requests for sockets of the host to which the monitor has not replied, in the order of its
//! replies.

use std::collections::VecDeque;

use super::packet::Ports;
use crate::ports::PENDING_MAX;

/// Request of the guest for a connection to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenRequest {
    /// Ports of the requested connection.
    pub ports: Ports,
    /// Credit in the guest's request: buffer size and forwarded count.
    pub credit: (u32, u32),
}

/// A request that was sent to the monitor.
#[derive(Debug)]
struct Entry {
    /// The requested port of the host.
    port: u32,
    /// None once the guest dropped the request.
    open_request: Option<OpenRequest>,
}

/// The requests. An entry that the guest dropped stays, empty, until its reply arrives.
#[derive(Debug, Default)]
pub struct OpenRequests(VecDeque<Entry>);

/// The requests that a reply completes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Answered {
    /// The request of the reply; none if the guest dropped it, or no such request exists.
    pub open_request: Option<OpenRequest>,
    /// Ports of earlier requests, whose replies are lost: a monitor that had received them died.
    pub lost: Vec<Ports>,
}

impl OpenRequests {
    /// Returns whether one more request may be sent.
    pub fn have_room(&self) -> bool {
        self.0.len() < PENDING_MAX
    }

    /// Records a request that was sent to the monitor, after all others.
    pub fn add(&mut self, open_request: OpenRequest) {
        self.0.push_back(Entry {
            port: open_request.ports.0,
            open_request: Some(open_request),
        });
    }

    /// Completes the first request for the host's `port`, and those before it, whose replies are lost.
    /// Changes nothing if there is no request for the port.
    pub fn answered(&mut self, port: u32) -> Answered {
        let Some(index) = self.0.iter().position(|entry| entry.port == port) else {
            return Answered::default();
        };
        let before = self.0.drain(..index);
        let lost = before
            .filter_map(|entry| entry.open_request)
            .map(|open_request| open_request.ports)
            .collect();
        let open_request = self.0.pop_front().and_then(|entry| entry.open_request);
        Answered { open_request, lost }
    }

    /// Drops the guest's request for `ports`; returns false if there is none.
    pub fn forget(&mut self, ports: Ports) -> bool {
        self.0
            .iter_mut()
            .map(|entry| &mut entry.open_request)
            .find(|open_request| open_request.is_some_and(|open_request| open_request.ports == ports))
            .is_some_and(|open_request| open_request.take().is_some())
    }

    /// Drops all requests and returns their ports.
    pub fn forget_all(&mut self) -> Vec<Ports> {
        self.0
            .iter_mut()
            .filter_map(|entry| entry.open_request.take())
            .map(|open_request| open_request.ports)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open_request(port: u32) -> OpenRequest {
        OpenRequest {
            ports: (port, 1),
            credit: (2, 3),
        }
    }

    /// Returns the request of the guest's port `from`.
    fn from(from: u32, port: u32) -> OpenRequest {
        OpenRequest {
            ports: (port, from),
            credit: (2, 3),
        }
    }

    fn answer(open_request: impl Into<Option<OpenRequest>>, lost: &[Ports]) -> Answered {
        Answered {
            open_request: open_request.into(),
            lost: lost.to_vec(),
        }
    }

    #[test]
    fn reply_to_a_dropped_request_opens_nothing_and_the_next_opens_its_own() {
        let mut open_requests = OpenRequests::default();
        (1..=3).for_each(|port| open_requests.add(open_request(port)));
        assert!(open_requests.forget((2, 1)));
        assert!(!open_requests.forget((2, 1)) && !open_requests.forget((1, 2)));
        assert_eq!(open_requests.answered(1), answer(open_request(1), &[]));
        assert_eq!(open_requests.answered(2), answer(None, &[]));
        assert_eq!(open_requests.answered(3), answer(open_request(3), &[]));
        assert_eq!(open_requests.answered(3), answer(None, &[]));
    }

    #[test]
    fn dropped_requests_take_room_until_their_reply() {
        let mut open_requests = OpenRequests::default();
        (0..PENDING_MAX as u32).for_each(|port| open_requests.add(open_request(port)));
        assert_eq!(open_requests.forget_all().len(), PENDING_MAX);
        assert!(!open_requests.have_room());
        assert_eq!(open_requests.answered(0), answer(None, &[]));
        assert!(open_requests.have_room());
    }

    #[test]
    fn request_whose_reply_is_lost_is_completed_by_the_reply_to_a_later_one() {
        let mut open_requests = OpenRequests::default();
        (1..=4).for_each(|port| open_requests.add(open_request(port)));
        assert_eq!(
            open_requests.answered(3),
            answer(open_request(3), &[(1, 1), (2, 1)])
        );
        assert_eq!(open_requests.answered(1), answer(None, &[]));
        assert_eq!(open_requests.answered(4), answer(open_request(4), &[]));
    }

    #[test]
    fn replies_to_requests_for_one_port_open_them_in_order() {
        let mut open_requests = OpenRequests::default();
        for (guest, port) in [(1, 9), (2, 8), (3, 9), (4, 8)] {
            open_requests.add(from(guest, port));
        }
        assert_eq!(open_requests.answered(9), answer(from(1, 9), &[]));
        assert_eq!(open_requests.answered(9), answer(from(3, 9), &[(8, 2)]));
        assert_eq!(open_requests.answered(8), answer(from(4, 8), &[]));
    }

    #[test]
    fn dropped_request_whose_reply_is_lost_causes_no_reset() {
        let mut open_requests = OpenRequests::default();
        for (guest, port) in [(1, 7), (2, 8), (3, 7), (4, 9)] {
            open_requests.add(from(guest, port));
        }
        assert!(open_requests.forget((7, 1)) && open_requests.forget((7, 3)));
        // The first request for the port, though the guest dropped it.
        assert_eq!(open_requests.answered(7), answer(None, &[]));
        assert_eq!(open_requests.answered(9), answer(from(4, 9), &[(8, 2)]));
        assert_eq!(open_requests.answered(7), answer(None, &[]));
    }

    #[test]
    fn reply_without_a_request_changes_nothing() {
        let mut open_requests = OpenRequests::default();
        assert_eq!(open_requests.answered(1), answer(None, &[]));
        open_requests.add(open_request(1));
        assert_eq!(open_requests.answered(2), answer(None, &[]));
        assert_eq!(open_requests.answered(1), answer(open_request(1), &[]));
    }
}
