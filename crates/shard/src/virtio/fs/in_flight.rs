//! Requests without a reply, by ids of the device's own.
//!
//! An id is used once, so that a late or repeated reply never reaches another request.

use std::collections::BTreeMap;

use crate::virtio::segments::Segments;

/// Greatest number of requests without a reply. A driver that respects its queues' sizes has fewer.
pub const IN_FLIGHT_MAX: usize = 512;

/// A request whose chain is not used yet.
pub struct Waiting {
    /// Number of the queue.
    pub queue: u16,
    /// Head of the chain.
    pub head: u16,
    /// Id that the guest gave the request.
    pub unique: u64,
    /// Buffers for the reply.
    pub room: Segments,
    /// Place in a file that the guest reads, if its pages may be shared.
    pub read: Option<ReadOf>,
}

/// The file that a request reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOf {
    /// Node of the file.
    pub node: u64,
    /// Offset in the file, bytes.
    pub offset: u64,
}

/// The requests of one activation.
#[derive(Default)]
pub struct InFlight {
    requests: BTreeMap<u64, Waiting>,
    last: u64,
}

impl InFlight {
    /// Whether no further request may begin.
    pub fn is_full(&self) -> bool {
        self.requests.len() >= IN_FLIGHT_MAX
    }

    /// Adds a request and returns its id.
    pub fn add(&mut self, request: Waiting) -> u64 {
        // 2^64 requests take longer than any VM runs.
        self.last = self.last.wrapping_add(1);
        self.requests.insert(self.last, request);
        self.last
    }

    /// Removes the request with this id.
    pub fn take(&mut self, id: u64) -> Option<Waiting> {
        self.requests.remove(&id)
    }

    /// Removes all requests, the oldest first. Their ids stay used.
    pub fn take_all(&mut self) -> impl Iterator<Item = Waiting> + use<> {
        std::mem::take(&mut self.requests).into_values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(head: u16) -> Waiting {
        Waiting {
            queue: 1,
            head,
            unique: 5,
            room: Segments::default(),
            read: None,
        }
    }

    #[test]
    fn id_is_answered_once_and_never_used_again() {
        let mut all = InFlight::default();
        let first = all.add(request(1));
        let second = all.add(request(2));
        assert_ne!(first, second);
        assert_eq!(all.take(first).map(|request| request.head), Some(1));
        assert!(all.take(first).is_none());
        assert_eq!(
            all.take_all().map(|request| request.head).collect::<Vec<_>>(),
            [2]
        );
        assert!(all.take(second).is_none());
        let third = all.add(request(3));
        assert!(third != first && third != second);
    }

    #[test]
    fn number_of_requests_is_bounded() {
        let mut all = InFlight::default();
        for _ in 0..IN_FLIGHT_MAX {
            assert!(!all.is_full());
            all.add(request(0));
        }
        assert!(all.is_full());
    }
}
