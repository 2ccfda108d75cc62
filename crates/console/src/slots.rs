//! Bounds on one user's share of this process: connections, long requests, and streams of events.
//!
//! A connection holds a descriptor, and a long request may hold a thread and memory for its output. A stream
//! of events polls the state of the host. Without the bounds, one user could block the requests of others.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use axum::http::StatusCode;
use locks::IgnorePoison;

use crate::api::{Result, blocking};
use crate::caller::Caller;
use crate::problem::Problem;

/// Maximum simultaneous long requests of a member.
const MEMBERS_LONG_MAX: usize = 16;
/// Maximum simultaneous long requests of an owner.
const OWNERS_LONG_MAX: usize = 128;
/// Maximum simultaneous streams of events of a member.
const MEMBERS_STREAMS_MAX: usize = 4;
/// Maximum simultaneous streams of events of an owner.
const OWNERS_STREAMS_MAX: usize = 16;

/// Taken slots of one resource, by user id; connections without an id count together.
#[derive(Clone, Debug)]
pub(crate) struct Slots {
    /// Name of the resource, in the plural.
    what: &'static str,
    /// Maximum for a member.
    members: usize,
    /// Maximum for an owner.
    owners: usize,
    taken: Arc<Mutex<BTreeMap<Option<u32>, usize>>>,
}

/// A slot, held until dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    slots: Slots,
    uid: Option<u32>,
}

impl Slots {
    /// Creates slots with a maximum for each member and for each owner.
    pub(crate) fn of(what: &'static str, members: usize, owners: usize) -> Self {
        Self {
            what,
            members,
            owners,
            taken: Arc::default(),
        }
    }

    /// Creates the slots of long requests.
    pub(crate) fn of_long_requests() -> Self {
        Self::of("long requests", MEMBERS_LONG_MAX, OWNERS_LONG_MAX)
    }

    /// Creates the slots of event streams. A stream takes no slot of long requests.
    pub(crate) fn of_event_streams() -> Self {
        Self::of("streams of events", MEMBERS_STREAMS_MAX, OWNERS_STREAMS_MAX)
    }

    fn most(&self, caller: Caller) -> usize {
        match caller {
            Caller::Owner(_) => self.owners,
            Caller::Member(_) => self.members,
        }
    }

    /// Takes a slot.
    ///
    /// # Errors
    /// 429 if the caller has none left.
    pub(crate) fn take(&self, caller: Caller) -> Result<Slot> {
        self.take_free(caller).ok_or_else(|| {
            Problem::new(
                StatusCode::TOO_MANY_REQUESTS,
                format!(
                    "{} {} of this user are under way; wait until one has ended",
                    self.most(caller),
                    self.what
                ),
            )
        })
    }

    /// Takes a slot, if the caller has one left.
    pub(crate) fn take_free(&self, caller: Caller) -> Option<Slot> {
        let uid = caller.uid();
        let mut taken = self.taken.lock().ignore_poison();
        let count = taken.entry(uid).or_default();
        if *count >= self.most(caller) {
            return None;
        }
        *count += 1;
        Some(Slot {
            slots: self.clone(),
            uid,
        })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.slots.taken.lock().ignore_poison();
        if let Some(count) = taken.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.uid);
            }
        }
    }
}

/// Whether the client of a request is still connected.
#[derive(Clone, Debug)]
pub(crate) struct ClientPresence(Arc<AtomicBool>);

impl ClientPresence {
    pub(crate) fn is_connected(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Clears the presence when the request's future is dropped.
struct Client(ClientPresence);

impl Drop for Client {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Release);
    }
}

/// Runs long work in a thread. The work holds the slot until it returns, and can check the client's presence.
pub(crate) async fn run_in_slot<T: Send + 'static>(
    slot: Slot,
    work: impl FnOnce(&ClientPresence) -> Result<T> + Send + 'static,
) -> Result<T> {
    let client = Client(ClientPresence(Arc::new(AtomicBool::new(true))));
    let presence = client.0.clone();
    blocking(move || {
        let result = work(&presence);
        drop(slot);
        result
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_users_long_requests_are_bounded_and_leave_those_of_others_alone() {
        let slots = Slots::of_long_requests();
        let (one, other) = (Caller::Member(Some(1)), Caller::Member(Some(2)));
        let held: Vec<Slot> = (0..MEMBERS_LONG_MAX).map(|_| slots.take(one).unwrap()).collect();
        let refused = slots.take(one).unwrap_err();
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
        assert!(refused.detail.contains("16 long requests"), "{}", refused.detail);
        slots.take(other).unwrap();
        slots.take(Caller::Member(None)).unwrap();
        let owner = Caller::Owner(Some(0));
        let owners: Vec<Slot> = (0..OWNERS_LONG_MAX).map(|_| slots.take(owner).unwrap()).collect();
        assert!(slots.take(owner).is_err());
        drop((held, owners));
        assert!(slots.taken.lock().unwrap().is_empty());
        slots.take(one).unwrap();
    }
}
