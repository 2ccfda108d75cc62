//! Threads of this node that wait for a page of one page server.

use coherence::{Access, Right};

use crate::clock::{now_ns, ran_ns};
use crate::userfault::Fault;

/// Initial capacity of the list.
const ROOM: usize = 256;

/// A thread that waits for a page.
#[derive(Clone, Copy, Debug)]
pub struct Waiter {
    pub page: u32,
    pub access: Access,
    /// Right that the node had when the thread began to wait.
    pub had: Right,
    pub thread: libc::pid_t,
    pub since_ns: u64,
    /// CPU time of the thread when it began to wait, nanoseconds; 0 until it is read.
    pub ran_ns: u64,
    /// Whether another node wants the page already.
    pub wanted: bool,
}

/// The list, in the order in which the threads began to wait.
#[derive(Debug)]
pub struct Waiters(Vec<Waiter>);

impl Default for Waiters {
    fn default() -> Self {
        Self(Vec::with_capacity(ROOM))
    }
}

impl Waiters {
    /// Returns the number of threads.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Adds a thread.
    pub fn add(&mut self, page: u32, access: Access, had: Right, fault: &Fault) {
        self.0.push(Waiter {
            page,
            access,
            had,
            thread: fault.thread,
            since_ns: now_ns(),
            ran_ns: 0,
            wanted: false,
        });
    }

    /// Records the CPU time of the thread added last. Apart from [`Waiters::add`], as there is time for it
    /// once the request is sent.
    pub fn note_ran(&mut self) {
        if let Some(waiter) = self.0.last_mut().filter(|waiter| waiter.ran_ns == 0) {
            waiter.ran_ns = ran_ns(waiter.thread).unwrap_or(0);
        }
    }

    /// Removes the thread added last.
    pub fn remove_last(&mut self) {
        self.0.pop();
    }

    /// Records that another node wants the page.
    pub fn want(&mut self, page: u32) {
        for waiter in self.0.iter_mut().filter(|waiter| waiter.page == page) {
            waiter.wanted = true;
        }
    }

    /// Returns whether a thread waits for any page.
    pub fn has_thread(&self, thread: libc::pid_t) -> bool {
        self.0.iter().any(|waiter| waiter.thread == thread)
    }

    /// Returns whether any thread waits for the page.
    pub fn has_page(&self, page: u32) -> bool {
        self.0.iter().any(|waiter| waiter.page == page)
    }

    /// Removes all threads that wait for the page and passes each to `woken` in order. Returns whether there
    /// were any.
    pub fn remove(&mut self, page: u32, mut woken: impl FnMut(&Waiter)) -> bool {
        let before = self.0.len();
        self.0.retain(|waiter| {
            let waits_for_another = waiter.page != page;
            if !waits_for_another {
                woken(waiter);
            }
            waits_for_another
        });
        self.0.len() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(thread: libc::pid_t) -> Fault {
        Fault {
            thread,
            ..Fault::NONE
        }
    }

    #[test]
    fn removing_a_page_wakes_only_its_threads_in_order() {
        let mut waiters = Waiters::default();
        for (thread, page) in [(1, 7), (2, 8), (3, 7)] {
            waiters.add(page, Access::Read, Right::None, &fault(thread));
        }
        waiters.want(7);
        let mut woken = Vec::new();
        assert!(waiters.remove(7, |waiter| woken.push((waiter.thread, waiter.wanted))));
        assert_eq!(woken, [(1, true), (3, true)]);
        assert!(!waiters.remove(7, |_| panic!("nobody waits for it")));
        assert!(waiters.has_page(8) && waiters.has_thread(2) && !waiters.has_thread(1));
        assert_eq!(waiters.len(), 1);
    }
}
