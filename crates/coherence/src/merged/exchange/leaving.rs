//! Pages that must leave before this node's next message, and the Settled messages that wait for them.

use super::Ticket;
use crate::Page;

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Leave {
    page: Page,
    round: u64,
    since: u64,
    /// The page leaves in any case; otherwise only if no other node has it loaded.
    must_leave: bool,
}

impl Leave {
    fn is_of(&self, page: Page, round: u64) -> bool {
        (self.page, self.round) == (page, round)
    }
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Leaving {
    leaves: Vec<Leave>,
    owed: Vec<(Page, u64, Ticket)>,
    asked: u64,
}

impl Leaving {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            leaves: Vec::with_capacity(limit),
            owed: Vec::with_capacity(limit),
            asked: 0,
        }
    }

    /// Returns a ticket for all pages added until now.
    pub(super) fn ticket(&self) -> Ticket {
        Ticket(self.asked)
    }

    pub(super) fn is_over(&self, ticket: Ticket) -> bool {
        self.leaves.iter().all(|leave| leave.since > ticket.0)
    }

    /// Returns when the page was added, if it has not left yet.
    pub(super) fn since(&self, page: Page, round: u64) -> Option<u64> {
        let leave = self.leaves.iter().find(|leave| leave.is_of(page, round))?;
        Some(leave.since)
    }

    fn add(&mut self, page: Page, round: u64, must_leave: bool, since: Option<u64>) {
        self.asked += 1;
        let since = since.unwrap_or(self.asked);
        if let Some(leave) = self.leaves.iter_mut().find(|leave| leave.is_of(page, round)) {
            leave.must_leave |= must_leave;
            leave.since = leave.since.min(since);
            return;
        }
        self.leaves.push(Leave {
            page,
            round,
            since,
            must_leave,
        });
    }

    /// Adds a page that leaves in any case.
    pub(super) fn add_unconditional(&mut self, page: Page, round: u64, since: Option<u64>) {
        self.add(page, round, true, since);
    }

    /// Adds a root that leaves if this node was the last to have it loaded.
    pub(super) fn add_unloaded(&mut self, page: Page, round: u64) {
        self.add(page, round, false, None);
    }

    /// Removes a root that another node has loaded.
    pub(super) fn kept(&mut self, page: Page, round: u64) {
        self.leaves
            .retain(|leave| leave.must_leave || !leave.is_of(page, round));
    }

    /// Removes a page that has left.
    pub(super) fn left(&mut self, page: Page, round: u64) {
        self.leaves.retain(|leave| !leave.is_of(page, round));
    }

    /// Records that the page's manager is to be sent Settled when all pages added until now have left.
    pub(super) fn owe_settled(&mut self, page: Page, round: u64) {
        self.owed.push((page, round, self.ticket()));
    }

    /// Returns the next page whose Settled message is due.
    pub(super) fn next_settled(&mut self) -> Option<(Page, u64)> {
        let at = self
            .owed
            .iter()
            .position(|(_, _, ticket)| self.is_over(*ticket))?;
        let (page, round, _) = self.owed.swap_remove(at);
        Some((page, round))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_of_a_page_leave_independently() {
        let mut leaving = Leaving::new(2);
        let page = Page(3);
        leaving.add_unconditional(page, 1, None);
        let first = leaving.ticket();
        leaving.add_unloaded(page, 2);
        let both = leaving.ticket();
        leaving.left(page, 1);
        assert!(leaving.is_over(first) && !leaving.is_over(both));
        leaving.kept(page, 2);
        assert!(leaving.is_over(both));
    }
}
