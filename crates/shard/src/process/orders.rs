//! The monitor's orders as they arrive, and reports to the monitor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use shard_api::control::ControlSocket;
use shard_api::message::ReceiveError;
use shard_api::version::VERSIONS;
use tracing::{debug, warn};

use crate::chain::chain;
use crate::launch::{Answer, Ending, Order, OrderId, Report};
use crate::sandbox::Threads;
use crate::span::router::Router;

use super::order_reader::{Arrived, OrderQueue, Received};

/// Changes the TSC offset of this shard's vCPUs to `offset`. An invalid step is ignored and logged.
pub fn step(router: &Router, offset: u64) {
    if let Err(error) = router.step(offset) {
        warn!("{error}");
    }
}

/// Returns the reason for the refusal of an order that this version does not have.
fn unknown(error: &serde_json::Error) -> String {
    format!(
        "the VM's shard speaks {VERSIONS} of its protocol, and does not know the order ({error}); help: \
         stop the VM and start it again, by \
         this release"
    )
}

/// The queue of orders for the first thread, and the socket of reports.
pub struct Orders {
    socket: ControlSocket,
    queue: OrderQueue,
    answered: StoredAnswer,
}

/// Result of an order.
pub enum Outcome {
    /// The order has this answer.
    Answer(Answer),
    /// The order has this answer, with files.
    AnswerWithFiles(Answer, Vec<OwnedFd>),
    /// The VM ends, and the reported end is the answer.
    End(Ending),
}

/// The last order that was performed.
#[derive(Debug, Default)]
struct StoredAnswer {
    last: OrderId,
    /// Answer to the order, if the order changed something.
    answer: Option<Answer>,
}

/// Action for an order.
#[derive(Debug, PartialEq)]
enum Decision {
    CarryOut,
    Answer(Answer),
}

impl StoredAnswer {
    /// Decides by the number of an order.
    fn decide(&self, id: OrderId) -> Decision {
        let refused = |why| Decision::Answer(Answer::Refused { why });
        let last = self.last;
        if id.incarnation < last.incarnation {
            return refused(format!(
                "the order is of incarnation {}; the VM obeys incarnation {}",
                id.incarnation, last.incarnation
            ));
        }
        if id < last {
            return refused(format!(
                "the order has number {}; the last one had number {}",
                id.request, last.request
            ));
        }
        match &self.answer {
            Some(answer) if id == last => Decision::Answer(answer.clone()),
            // An order that only reads is performed again: storing its answer would waste memory.
            _ => Decision::CarryOut,
        }
    }

    /// Stores the answer to an order that was performed.
    fn note(&mut self, id: OrderId, answer: &Answer) {
        self.last = id;
        self.answer = match answer {
            Answer::Status(_) | Answer::VcpuStatistics { .. } | Answer::PageMap(_) => None,
            other => Some(other.clone()),
        };
    }
}

impl AsFd for Orders {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

impl Orders {
    /// Starts the thread that receives orders from the monitor's socket.
    ///
    /// # Errors
    /// Fails if the process has no descriptors or threads left.
    pub fn start(socket: &ControlSocket, threads: &Threads) -> io::Result<Self> {
        Ok(Self {
            socket: socket.try_clone()?,
            queue: OrderQueue::start(socket.try_clone()?, threads)?,
            answered: StoredAnswer::default(),
        })
    }

    /// Sends a report. The next order shows whether the monitor is gone.
    pub fn report(&self, report: &Report) {
        let _ = self.socket.send(report, &[]);
    }

    /// Receives the next order and performs it. Returns an ending if the order requests one. Ends the process
    /// at once if the monitor has died.
    pub fn receive(&mut self, perform: impl FnOnce(Order) -> Outcome) -> Option<Ending> {
        let failed = |error: &ReceiveError| {
            let detail = format!("the monitor's order is not understood: {}", chain(error));
            Some(Ending::ShardFailed { detail })
        };
        let Arrived { id: to, order } = match self.queue.next() {
            Received::Order(arrived) => arrived,
            Received::Rest => return None,
            Received::Malformed(error) => return failed(&error),
            Received::MonitorGone => std::process::exit(1),
        };
        let carry_out = || match serde_json::from_value(order) {
            Ok(order) => {
                debug!(?order, "the monitor orders");
                perform(order)
            }
            // A monitor of the next release may send new kinds of orders.
            Err(error) => Outcome::Answer(Answer::Refused { why: unknown(&error) }),
        };
        let (answer, files) = match self.answered.decide(to) {
            Decision::Answer(answer) => (answer, Vec::new()),
            Decision::CarryOut => {
                let (answer, files) = match carry_out() {
                    Outcome::End(ending) => return Some(ending),
                    Outcome::Answer(answer) => (answer, Vec::new()),
                    Outcome::AnswerWithFiles(answer, files) => (answer, files),
                };
                self.answered.note(to, &answer);
                (answer, files)
            }
        };
        self.answer(to, answer, &files);
        None
    }

    fn answer(&self, to: OrderId, answer: Answer, files: &[OwnedFd]) {
        if answer == Answer::Done {
            // A monitor that does not read its reports must not block the VM: it can repeat the order.
            let _ = self.socket.try_send(&Report::Answer { to, answer });
            return;
        }
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        let too_long = self.socket.send(&Report::Answer { to, answer }, &files).err();
        if let Some(error @ ReceiveError::TooLong(_)) = too_long {
            let why = error.to_string();
            let answer = Answer::Refused { why };
            self.report(&Report::Answer { to, answer });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::json;
    use shard_api::control::{MESSAGE_BYTES_MAX, PACKET_BYTES_MAX};
    use shard_api::launch::NumberedOrder;

    use super::*;

    const fn id(incarnation: u64, request: u64) -> OrderId {
        OrderId { incarnation, request }
    }

    /// A shard's orders and the monitor that sends them.
    struct OrderHarness {
        monitor: ControlSocket,
        orders: Orders,
        /// Orders that were performed.
        performed: Vec<Order>,
    }

    impl OrderHarness {
        fn new() -> Self {
            let (monitor, shard) = ControlSocket::pair().unwrap();
            Self {
                monitor,
                orders: Orders::start(&shard, &Threads::open()).unwrap(),
                performed: Vec::new(),
            }
        }

        /// Returns the answer to an order that is performed with `answer`.
        fn order(&mut self, id: OrderId, order: Order, answer: Answer) -> Answer {
            self.monitor.try_send(&NumberedOrder { id, order }).unwrap();
            let performed = &mut self.performed;
            let ending = self.orders.receive(|order| {
                performed.push(order);
                Outcome::Answer(answer)
            });
            assert_eq!(ending, None);
            let (message, _) = self.monitor.receive_with_files().unwrap();
            let Report::Answer { to, answer } = serde_json::from_slice(&message).unwrap() else {
                panic!("an answer");
            };
            assert_eq!(to, id);
            answer
        }

        fn press(&mut self, id: OrderId) -> Answer {
            self.order(id, Order::PowerButton, Answer::Done)
        }
    }

    fn refused(answer: &Answer) -> &str {
        match answer {
            Answer::Refused { why } => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn order_of_an_older_incarnation_is_refused_and_changes_nothing() {
        let mut given = OrderHarness::new();
        assert_eq!(given.press(id(1, 7)), Answer::Done);
        // The successor starts a new sequence.
        assert_eq!(given.press(id(2, 1)), Answer::Done);
        for request in [1, 7, 8, u64::MAX] {
            let answer = given.press(id(1, request));
            let why = "the order is of incarnation 1; the VM obeys incarnation 2";
            assert_eq!(refused(&answer), why);
        }
        assert_eq!(given.press(id(2, 2)), Answer::Done);
        assert_eq!(given.performed.len(), 3);
    }

    #[test]
    fn repeated_order_returns_the_stored_answer_and_is_not_performed_again() {
        let mut given = OrderHarness::new();
        let order = || Order::Move { vcpu: 1, shard: 2 };
        let moved = |still_ns| Answer::Moved(crate::launch::MoveReport::Done { still_ns });
        for still_ns in [5, 6, 7] {
            assert_eq!(given.order(id(1, 3), order(), moved(still_ns)), moved(5));
        }
        assert_eq!(given.performed, [order()]);
        let answer = given.press(id(1, 2));
        assert_eq!(
            refused(&answer),
            "the order has number 2; the last one had number 3"
        );
        // A refused order does not replace the stored answer.
        assert_eq!(given.order(id(1, 3), order(), moved(8)), moved(5));
        assert_eq!(given.performed.len(), 1);
    }

    #[test]
    fn repeated_order_for_the_status_returns_the_current_counters() {
        let mut given = OrderHarness::new();
        for count in [1, 2] {
            let answer = Answer::Status(json!({ "exits": count }));
            assert_eq!(given.order(id(1, 1), Order::Status, answer.clone()), answer);
        }
    }

    #[test]
    fn answer_of_several_packets_arrives_whole_and_too_long_a_one_is_replaced() {
        let mut given = OrderHarness::new();
        let long = Answer::Status("x".repeat(2 * PACKET_BYTES_MAX).into());
        assert_eq!(given.order(id(1, 1), Order::Status, long.clone()), long);
        let too_long = Answer::Status("x".repeat(MESSAGE_BYTES_MAX).into());
        let answer = given.order(id(1, 2), Order::Status, too_long);
        let why = refused(&answer);
        assert!(why.ends_with("more than it may have"), "{why}");
        assert_eq!(given.press(id(1, 3)), Answer::Done);
    }

    #[test]
    fn answer_that_only_confirms_does_not_wait_for_a_monitor_that_reads_none() {
        const ORDERS: u64 = 2000;
        let mut given = OrderHarness::new();
        for request in 1..=ORDERS {
            let (id, order) = (id(1, request), Order::PowerButton);
            given.monitor.try_send(&NumberedOrder { id, order }).unwrap();
            let ending = given.orders.receive(|_| Outcome::Answer(Answer::Done));
            assert_eq!(ending, None);
        }
        let mut answers = 0;
        while given
            .monitor
            .wait_until(Instant::now() + Duration::from_millis(1))
            .unwrap()
        {
            given.monitor.receive_with_files().unwrap();
            answers += 1;
        }
        assert!((1..ORDERS).contains(&answers), "{answers}");
        // The monitor has missed the last answer, and receives it when it repeats the order.
        assert_eq!(given.press(id(1, ORDERS)), Answer::Done);
        assert!(given.performed.is_empty(), "the order was performed twice");
    }

    #[test]
    fn order_to_quit_ends_the_vm_and_a_message_that_is_no_order_does_too() {
        let ended = |message: &serde_json::Value| {
            let (monitor, shard) = ControlSocket::pair().unwrap();
            monitor.try_send(message).unwrap();
            let mut orders = Orders::start(&shard, &Threads::open()).unwrap();
            orders.receive(|order| {
                assert_eq!(order, Order::Quit);
                Outcome::End(Ending::Quit)
            })
        };
        let id = json!({ "incarnation": 1, "request": 1 });
        assert_eq!(ended(&json!({ "id": id, "order": "quit" })), Some(Ending::Quit));
        let ending = ended(&json!("quit"));
        assert!(
            matches!(&ending, Some(Ending::ShardFailed { detail }) if detail.contains("not understood")),
            "{ending:?}"
        );
    }

    #[test]
    fn order_of_an_unknown_kind_is_refused_with_the_versions_and_help() {
        let mut given = OrderHarness::new();
        for wrong in [json!("levitate"), json!({ "balloon": {} }), json!(1)] {
            let message = json!({ "id": id(1, 1), "order": wrong });
            given.monitor.try_send(&message).unwrap();
            assert_eq!(given.orders.receive(|order| panic!("{order:?}")), None);
            let (message, _) = given.monitor.receive_with_files().unwrap();
            let Report::Answer { answer, .. } = serde_json::from_slice(&message).unwrap() else {
                panic!("an answer");
            };
            let why = refused(&answer);
            let begin = format!("the VM's shard speaks {VERSIONS} of its protocol");
            assert!(why.starts_with(&begin) && why.contains("; help: "), "{why}");
        }
        assert_eq!(given.press(id(1, 2)), Answer::Done);
    }
}
