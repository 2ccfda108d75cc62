//! Polling and sleeping of a page server.

use urpc::poll::PollTime;

use super::PageServer;
use crate::link::Link;
use crate::node::Polls;

/// State of the node's threads, as far as it is known: whether one may need this CPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Threads {
    /// Number of threads that wait for a page.
    pub waiting: usize,
    /// Whether a thread was woken since the last sleep.
    pub woke: bool,
    /// Whether a prefetched page was mapped since then, for a thread that runs.
    pub mapped_prefetched: bool,
}

impl Threads {
    /// Returns whether a thread was woken and none waits. The page server then sleeps; pending input ends the
    /// sleep at once.
    pub(super) fn need_the_cpu(self) -> bool {
        self.woke && self.waiting == 0
    }

    /// Returns whether an idle page server may poll. A thread that waits needs the page server more than
    /// other threads need its CPU.
    pub(super) fn allow_polling(self, polls: Polls) -> bool {
        match polls {
            Polls::Never => false,
            Polls::Waiting(all) => self.waiting > 0 && self.waiting >= all,
            Polls::Always => self.waiting > 0 || !(self.woke || self.mapped_prefetched),
        }
    }
}

impl PageServer {
    pub(super) fn threads(&self) -> Threads {
        Threads {
            waiting: self.driver.waiters.len(),
            woke: self.driver.woke,
            mapped_prefetched: self.driver.mapped_prefetched,
        }
    }

    /// Returns the time to poll before sleeping.
    pub(super) fn poll_time(&mut self) -> &mut PollTime {
        if self.driver.waiters.len() > 0 {
            &mut self.asked
        } else {
            &mut self.idle
        }
    }

    /// Sleeps until something arrives, or for `limit_ns`.
    pub(super) fn sleep(&mut self, limit_ns: Option<u64>) {
        let has_request = self
            .driver
            .merging
            .as_ref()
            .is_some_and(|merging| merging.has_request());
        if has_request || self.driver.peers.links.iter().flatten().any(Link::has_more) {
            return;
        }
        self.driver.meter.sleeps += 1;
        let merging = self.driver.merging.as_ref();
        // A message that waits for predecessors that never arrive is found even if nothing else happens.
        let limit_ns = match merging.is_some_and(|merging| merging.waits()) {
            true => Some(limit_ns.unwrap_or(u64::MAX)),
            false => limit_ns,
        };
        // With bytes in a pipe this only checks the other descriptors.
        let may_sleep = self
            .driver
            .peers
            .links
            .iter_mut()
            .flatten()
            .all(Link::prepare_to_sleep);
        let limit_ns = if may_sleep { limit_ns } else { Some(0) };
        let limit = limit_ns.map(|ns| libc::timespec {
            tv_sec: 0,
            tv_nsec: ns.min(999_999_999).cast_signed(),
        });
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the list is ours and has that length, the time outlives the call, and no signal mask is
        // given. For any result, pending input is checked again.
        unsafe {
            libc::ppoll(
                self.polled.as_mut_ptr(),
                self.polled.len() as _,
                limit,
                std::ptr::null(),
            )
        };
        let has_come = |place: &libc::pollfd| place.revents != 0;
        self.faulted |= has_come(&self.polled[1]);
        if has_come(&self.polled[2]) {
            self.driver.mailbox.clear_event();
        }
        let first = 3 + usize::from(self.driver.merging.is_some());
        let streams = self.polled[first..].as_chunks::<2>().0;
        let mut is_silent = may_sleep;
        for (link, streams) in self.driver.peers.links.iter_mut().flatten().zip(streams) {
            let filled = streams.each_ref().map(has_come);
            is_silent &= filled == [false; 2];
            link.unblocked();
            link.fill(filled);
        }
        let merging = self.driver.merging.as_ref().filter(|_| is_silent);
        if let Some(node) = merging.and_then(|merging| merging.overdue()) {
            let why = "its message comes after changes of page tables that do not come";
            self.driver
                .refused(&format!("{}: {why}", self.driver.peers.name(node)));
        }
    }

    /// Marks all inputs as possibly readable.
    pub(super) fn poll_all(&mut self) {
        self.faulted = true;
        self.driver
            .peers
            .links
            .iter_mut()
            .flatten()
            .for_each(Link::poll_streams);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Threads = Threads {
        waiting: 0,
        woke: false,
        mapped_prefetched: false,
    };

    #[test]
    fn page_server_does_not_poll_after_a_prefetched_page() {
        let mapped_prefetched = Threads {
            mapped_prefetched: true,
            ..NONE
        };
        assert!(!mapped_prefetched.allow_polling(Polls::Always));
        // It handles other input: the reader was not woken.
        assert!(!mapped_prefetched.need_the_cpu());
        // A thread waits for the next page all the same.
        let waits = Threads {
            waiting: 1,
            ..mapped_prefetched
        };
        assert!(waits.allow_polling(Polls::Always));
    }

    #[test]
    fn page_server_sleeps_only_after_the_last_thread_was_woken() {
        let woke = Threads { woke: true, ..NONE };
        assert!(woke.need_the_cpu());
        assert!(!woke.allow_polling(Polls::Always));
        let others_wait = Threads { waiting: 1, ..woke };
        assert!(!others_wait.need_the_cpu());
        assert!(others_wait.allow_polling(Polls::Always));
    }

    #[test]
    fn idle_page_server_polls() {
        assert!(NONE.allow_polling(Polls::Always));
        assert!(!NONE.need_the_cpu());
    }

    #[test]
    fn page_server_of_a_guest_polls_only_while_all_vcpus_wait() {
        let one = Threads { waiting: 1, ..NONE };
        let two = Threads { waiting: 2, ..NONE };
        assert!(one.allow_polling(Polls::Waiting(1)));
        assert!(!one.allow_polling(Polls::Waiting(2)));
        assert!(two.allow_polling(Polls::Waiting(2)));
        // A device's thread too.
        assert!(two.allow_polling(Polls::Waiting(1)));
        assert!(!NONE.allow_polling(Polls::Waiting(0)));
        assert!(!NONE.allow_polling(Polls::Waiting(1)));
        assert!(!Threads { woke: true, ..NONE }.allow_polling(Polls::Waiting(1)));
        assert!(!two.allow_polling(Polls::Never));
    }
}
