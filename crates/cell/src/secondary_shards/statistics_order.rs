//! An order for statistics of vCPUs to one shard, and the files that the shard passes. Pure decisions.

use std::fs::File;

use shard_api::launch::OrderId;

/// The order to one shard.
#[derive(Debug)]
pub struct StatisticsOrder {
    shard: usize,
    id: OrderId,
    /// The files, once the shard has answered or ended.
    files: Option<Vec<File>>,
}

impl StatisticsOrder {
    /// The order with this number to a shard, by its number among those of the VM.
    pub fn new(shard: usize, id: OrderId) -> Self {
        let files = None;
        Self { shard, id, files }
    }

    /// Takes the files of an answer, of which a refusal has none. Returns whether it is the answer to this
    /// order. A second answer changes nothing.
    pub fn answered(&mut self, shard: usize, to: OrderId, files: Vec<File>) -> bool {
        let is_own = self.shard == shard && self.id == to;
        if is_own {
            self.files.get_or_insert(files);
        }
        is_own
    }

    /// Records that a shard has ended.
    pub fn lost(&mut self, shard: usize) {
        if self.shard == shard {
            self.files.get_or_insert_default();
        }
    }

    /// Whether no answer can follow.
    pub fn is_over(&self) -> bool {
        self.files.is_some()
    }

    /// The files; none without an answer.
    pub fn into_files(self) -> Vec<File> {
        self.files.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(request: u64) -> OrderId {
        OrderId {
            incarnation: 1,
            request,
        }
    }

    fn files(count: usize) -> Vec<File> {
        (0..count).map(|_| File::open("/dev/null").unwrap()).collect()
    }

    #[test]
    fn files_of_another_shard_or_order_are_dropped() {
        let mut order = StatisticsOrder::new(1, id(5));
        assert!(!order.answered(0, id(5), files(1)));
        assert!(!order.answered(1, id(4), files(1)));
        order.lost(0);
        assert!(!order.is_over());
        assert!(order.answered(1, id(5), files(2)));
        assert!(order.is_over());
        assert!(order.answered(1, id(5), files(3)), "a second answer");
        assert_eq!(order.into_files().len(), 2);
    }

    #[test]
    fn order_to_a_shard_that_ends_is_over_without_files() {
        let mut order = StatisticsOrder::new(1, id(5));
        order.lost(1);
        assert!(order.is_over());
        assert_eq!(order.into_files().len(), 0);
    }
}
