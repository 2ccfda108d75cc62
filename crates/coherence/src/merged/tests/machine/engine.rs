//! A simple model of the engine: a requester asks all nodes with the page, and is granted it when all have
//! replied.

use super::{Broken, PendingSend, Plan, Task, World};
use crate::{Page, Right};

/// A pending request, at most one for each page.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Request {
    pub page: u32,
    pub by: usize,
    pub right: Right,
    pub is_taken: bool,
    /// Nodes that have not begun their reply.
    pub unasked: Vec<usize>,
    /// Nodes whose reply is in flight.
    pub awaited: Vec<usize>,
}

impl World {
    /// Begins to acquire the pages that managers want, with one request for a page at a time.
    pub fn take(&mut self) {
        let is_free = |(_, page): &(usize, u32)| self.requests.iter().all(|one| one.page != *page);
        if let Some(at) = self.takes.iter().position(is_free) {
            let (node, page) = self.takes.remove(at);
            self.request(node, page, Right::Write, true);
            self.take();
        }
    }

    /// Requests a page. The nodes reply at any time later.
    pub fn request(&mut self, by: usize, page: u32, right: Right, is_taken: bool) {
        let holds =
            |node: &usize| *node != by && self.nodes[*node].driver.rights[page as usize] > Right::None;
        let mut unasked: Vec<usize> = (0..self.nodes.len()).filter(holds).collect();
        if right == Right::Read {
            unasked.truncate(1);
        }
        self.requests.push(Request {
            page,
            by,
            right,
            is_taken,
            awaited: unasked.clone(),
            unasked,
        });
        self.complete(page);
    }

    pub fn answer(&mut self, plan: &Plan, page: u32, node: usize) {
        let request = self
            .requests
            .iter_mut()
            .find(|one| one.page == page)
            .expect("a request is pending");
        let is_first = request.awaited[0] == node;
        let (by, right) = (request.by, request.right);
        request.unasked.retain(|other| *other != node);
        let has = self.nodes[by].driver.rights[page as usize] > Right::None;
        let task = Task {
            to: by,
            what: PendingSend::Page(page, right, is_first && !has),
            collected: 0,
            ticket: None,
        };
        if plan.broken != Broken::Early {
            self.restrict(node, page, right);
        }
        self.nodes[node].task = Some(task);
    }

    pub fn restrict(&mut self, node: usize, page: u32, right: Right) {
        let to = if right == Right::Write {
            Right::None
        } else {
            Right::Read
        };
        let had = &mut self.nodes[node].driver.rights[page as usize];
        *had = to.min(*had);
    }

    /// Grants the page once all nodes have replied.
    pub fn complete(&mut self, page: u32) {
        let is_done = |one: &Request| one.page == page && one.awaited.is_empty();
        let Some(at) = self.requests.iter().position(is_done) else {
            return;
        };
        let request = self.requests.remove(at);
        let right = &mut self.nodes[request.by].driver.rights[page as usize];
        if request.is_taken {
            *right = Right::None;
            self.held.push(page);
            self.merge(request.by, |merger, driver| merger.taken(Page(page), driver));
        } else {
            *right = request.right;
            self.take();
        }
    }
}
