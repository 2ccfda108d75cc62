//! An order to one or several shards, which is carried out when each of them has done so. Pure decisions,
//! without clock, threads or sockets.
//!
//! An answer may arrive before the sender knows the number of its order. So answers of a shard are kept until
//! then.

use shard_api::launch::{Answer, OrderId};

/// Maximum number of answers of one shard that are kept until its order has a number. A shard answers the few
/// orders that it has; one under a guest's control may send more.
const EARLY_MAX: usize = 8;

/// An order to several shards, by their numbers among these.
#[derive(Debug)]
pub struct GroupOrder {
    shards: Vec<Reply>,
}

/// The state of one shard.
#[derive(Debug)]
enum Reply {
    /// The order is not known to be sent. These answers have arrived.
    Unsent(Vec<(OrderId, Answer)>),
    /// The order has this number, and no answer.
    Asked(OrderId),
    /// The shard has carried it out.
    Done,
    /// The shard has not carried it out.
    Failed(Failure),
}

/// Reason why a shard has not carried out the order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The shard has refused, or could not be reached.
    #[error("{0}")]
    Refused(String),
    /// The shard has ended.
    #[error("it has ended")]
    Lost,
    /// The shard has not answered within the time limit.
    #[error("it does not answer")]
    Silent,
}

impl GroupOrder {
    /// An order that `count` shards are about to receive.
    pub fn new(count: usize) -> Self {
        let shards = (0..count).map(|_| Reply::Unsent(Vec::new())).collect();
        Self { shards }
    }

    /// An order that one of `count` shards is about to receive.
    pub fn to_one(count: usize, shard: usize) -> Self {
        let reply = |of: usize| match of == shard {
            true => Reply::Unsent(Vec::new()),
            false => Reply::Done,
        };
        let shards = (0..count).map(reply).collect();
        Self { shards }
    }

    /// Records the number of the order to a shard, or the reason why it was not sent.
    pub fn sent(&mut self, shard: usize, sent: Result<OrderId, String>) {
        let Some(reply) = self.shards.get_mut(shard) else {
            return;
        };
        let Reply::Unsent(early) = reply else { return };
        let early = std::mem::take(early);
        match sent {
            Ok(id) => {
                *reply = Reply::Asked(id);
                early
                    .iter()
                    .for_each(|(to, answer)| self.answered(shard, *to, answer));
            }
            Err(why) => *reply = Reply::Failed(Failure::Refused(why)),
        }
    }

    /// Records an answer of a shard. An answer to another order changes nothing, nor does a second one.
    pub fn answered(&mut self, shard: usize, to: OrderId, answer: &Answer) {
        match self.shards.get_mut(shard) {
            Some(Reply::Unsent(early)) if early.len() < EARLY_MAX => early.push((to, answer.clone())),
            Some(reply @ Reply::Asked(_)) => {
                if !matches!(reply, Reply::Asked(id) if *id == to) {
                    return;
                }
                *reply = match answer {
                    Answer::Done => Reply::Done,
                    Answer::Refused { why } => Reply::Failed(Failure::Refused(why.clone())),
                    other => Reply::Failed(Failure::Refused(format!(
                        "it gave an answer to another order: {other:?}"
                    ))),
                };
            }
            _ => {}
        }
    }

    /// Records that a shard has ended.
    pub fn lost(&mut self, shard: usize) {
        if let Some(reply) = self.shards.get_mut(shard) {
            *reply = Reply::Failed(Failure::Lost);
        }
    }

    /// The outcome: none while answers are missing and the time limit has not passed (`is_late`). An error
    /// names the first shard that has failed.
    pub fn outcome(&self, is_late: bool) -> Option<Result<(), (usize, Failure)>> {
        let failed = |(shard, reply): (usize, &Reply)| match reply {
            Reply::Failed(failure) => Some((shard, failure.clone())),
            _ => None,
        };
        if let Some(failed) = self.shards.iter().enumerate().find_map(failed) {
            return Some(Err(failed));
        }
        match self.shards.iter().position(|reply| !matches!(reply, Reply::Done)) {
            None => Some(Ok(())),
            Some(shard) => is_late.then_some(Err((shard, Failure::Silent))),
        }
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

    fn refused(why: &str) -> Answer {
        Answer::Refused { why: why.to_owned() }
    }

    fn sent_to(count: usize) -> GroupOrder {
        let mut order = GroupOrder::new(count);
        (0..count).for_each(|shard| order.sent(shard, Ok(id(10 + shard as u64))));
        order
    }

    #[test]
    fn order_is_carried_out_when_all_shards_have_done_so() {
        assert_eq!(GroupOrder::new(0).outcome(false), Some(Ok(())));
        let mut order = sent_to(2);
        order.answered(1, id(11), &Answer::Done);
        assert_eq!(order.outcome(false), None, "one of two");
        order.answered(0, id(10), &Answer::Done);
        assert_eq!(order.outcome(false), Some(Ok(())));
        assert_eq!(order.outcome(true), Some(Ok(())), "all have answered in time");
    }

    #[test]
    fn refusal_or_loss_of_one_shard_fails_the_order_at_once() {
        let mut order = sent_to(3);
        order.answered(1, id(11), &refused("no"));
        assert_eq!(
            order.outcome(false),
            Some(Err((1, Failure::Refused("no".to_owned()))))
        );
        let mut order = sent_to(3);
        order.answered(0, id(10), &Answer::Done);
        order.lost(0);
        assert_eq!(
            order.outcome(false),
            Some(Err((0, Failure::Lost))),
            "after its answer"
        );
        let mut order = GroupOrder::new(2);
        order.sent(1, Err("its socket is full".to_owned()));
        let unsent = Failure::Refused("its socket is full".to_owned());
        assert_eq!(order.outcome(false), Some(Err((1, unsent))));
    }

    #[test]
    fn shard_without_an_answer_at_the_time_limit_is_named() {
        let mut order = sent_to(3);
        order.answered(0, id(10), &Answer::Done);
        order.answered(2, id(12), &Answer::Done);
        assert_eq!(order.outcome(false), None);
        assert_eq!(order.outcome(true), Some(Err((1, Failure::Silent))));
        let order = GroupOrder::new(1);
        assert_eq!(
            order.outcome(true),
            Some(Err((0, Failure::Silent))),
            "not even sent"
        );
    }

    #[test]
    fn answer_before_the_number_of_its_order_counts_and_one_to_another_order_does_not() {
        let mut order = GroupOrder::new(2);
        order.answered(0, id(9), &refused("an earlier order"));
        order.answered(0, id(10), &Answer::Done);
        assert_eq!(order.outcome(false), None);
        order.sent(0, Ok(id(10)));
        order.sent(1, Ok(id(11)));
        order.answered(1, id(10), &refused("an earlier order"));
        assert_eq!(order.outcome(false), None);
        order.answered(1, id(11), &Answer::Done);
        order.answered(1, id(11), &refused("a second answer"));
        assert_eq!(order.outcome(false), Some(Ok(())));
    }

    #[test]
    fn order_to_one_shard_waits_for_no_other() {
        let mut order = GroupOrder::to_one(3, 1);
        assert_eq!(order.outcome(false), None);
        order.answered(0, id(11), &refused("a shard without the order"));
        assert_eq!(order.outcome(false), None);
        order.sent(1, Ok(id(11)));
        order.answered(2, id(11), &refused("a shard without the order"));
        order.answered(1, id(11), &Answer::Done);
        assert_eq!(order.outcome(false), Some(Ok(())));
        let mut order = GroupOrder::to_one(3, 2);
        order.sent(2, Ok(id(12)));
        assert_eq!(order.outcome(true), Some(Err((2, Failure::Silent))));
        order.lost(2);
        assert_eq!(order.outcome(false), Some(Err((2, Failure::Lost))));
    }

    #[test]
    fn flood_of_early_answers_is_dropped() {
        let mut order = GroupOrder::new(1);
        (0..1000).for_each(|request| order.answered(0, id(request), &Answer::Done));
        assert!(matches!(&order.shards[0], Reply::Unsent(early) if early.len() == EARLY_MAX));
        order.sent(0, Ok(id(2000)));
        assert_eq!(order.outcome(true), Some(Err((0, Failure::Silent))));
    }
}
