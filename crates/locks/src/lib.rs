//! Locks whose data stay valid when a thread panics while it holds them.
//!
//! The standard library marks such a lock as *poisoned*, and every later use fails. With this crate the other
//! threads go on with the data as they are. That is right where each critical section leaves valid data at
//! every point that may panic.

use std::sync::{LockResult, Mutex, MutexGuard};

/// Use of a lock's data though a thread has panicked while it held the lock.
pub trait IgnorePoison {
    /// A guard of the lock, or the data.
    type Held;

    /// Returns the data, poisoned or not.
    fn ignore_poison(self) -> Self::Held;
}

impl<T> IgnorePoison for LockResult<T> {
    type Held = T;

    fn ignore_poison(self) -> T {
        self.unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Locks a mutex, poisoned or not.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().ignore_poison()
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::RwLock;

    use super::*;

    #[test]
    fn data_is_reachable_after_a_panic_under_the_lock() {
        let mutex = Mutex::new(1);
        let readers = RwLock::new(1);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let mut one = lock(&mutex);
            let mut other = readers.write().ignore_poison();
            (*one, *other) = (2, 3);
            panic!("while both are held");
        }));
        assert!(panicked.is_err() && mutex.is_poisoned() && readers.is_poisoned());
        assert_eq!((*lock(&mutex), *readers.read().ignore_poison()), (2, 3));
    }
}
