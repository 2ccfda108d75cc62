//! Bounds on what one user has of this process: connections, and requests that take long.
//!
//! A connection holds a descriptor, and a long request may hold a thread and memory for its output. Without the bounds, one
//! user's keep others from being answered.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::StatusCode;

use crate::api::{Result, blocking};
use crate::problem::Problem;

/// Long requests of one user at a time.
const LONG_MAX: usize = 16;

/// What users have of something, by user id; connections without one count together.
#[derive(Clone, Debug)]
pub(crate) struct Slots {
    /// How many one user may have.
    most: usize,
    taken: Arc<Mutex<BTreeMap<Option<u32>, usize>>>,
}

/// The right to one of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    slots: Slots,
    uid: Option<u32>,
}

impl Slots {
    /// At most so many for each user.
    pub(crate) fn of(most: usize) -> Self {
        Self {
            most,
            taken: Arc::default(),
        }
    }

    /// For requests that take long.
    pub(crate) fn of_long_requests() -> Self {
        Self::of(LONG_MAX)
    }

    /// Takes a slot for a long request of the user `uid`.
    pub(crate) fn take(&self, uid: Option<u32>) -> Result<Slot> {
        self.take_free(uid).ok_or_else(|| {
            Problem::new(
                StatusCode::TOO_MANY_REQUESTS,
                format!(
                    "{} long requests of this user are under way; wait until one has ended",
                    self.most
                ),
            )
        })
    }

    /// Takes a slot for the user `uid`, if the user has one left.
    pub(crate) fn take_free(&self, uid: Option<u32>) -> Option<Slot> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.entry(uid).or_default();
        if *count == self.most {
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
        let mut taken = self.slots.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.uid);
            }
        }
    }
}

/// Whether the client of a request is still there.
#[derive(Clone, Debug)]
pub(crate) struct Attention(Arc<AtomicBool>);

impl Attention {
    pub(crate) fn is_paid(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Ends the attention when the request's future is dropped.
struct Client(Attention);

impl Drop for Client {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Release);
    }
}

/// Runs what takes long in a thread. The work holds the slot until it returns, and sees when the client has gone.
pub(crate) async fn attended<T: Send + 'static>(
    slot: Slot,
    work: impl FnOnce(&Attention) -> Result<T> + Send + 'static,
) -> Result<T> {
    let client = Client(Attention(Arc::new(AtomicBool::new(true))));
    let attention = client.0.clone();
    blocking(move || {
        let result = work(&attention);
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
        let held: Vec<Slot> = (0..LONG_MAX).map(|_| slots.take(Some(1)).unwrap()).collect();
        let refused = slots.take(Some(1)).unwrap_err();
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
        slots.take(Some(2)).unwrap();
        slots.take(None).unwrap();
        drop(held);
        assert!(slots.taken.lock().unwrap().is_empty());
        slots.take(Some(1)).unwrap();
    }
}
