//! Tests of rings between threads of one process; under `--cfg loom` in every order that the memory model
//! allows.

use std::sync::Arc;

use super::*;
use crate::message::Message;

/// Returns both ends of a ring of `N` lines.
fn pair<const N: usize>() -> (Sender<Arc<Ring>>, Receiver<Arc<Ring>>) {
    let ring: Arc<Ring> = Arc::new(Ring {
        credit: Credit::default(),
        receiver: Side::default(),
        sender: Side::default(),
        lines: core::array::from_fn::<Line, N, _>(|_| Line::default()),
    });
    (Sender::new(ring.clone()), Receiver::new(ring))
}

/// Returns a message that has its number in every word.
fn message(number: u64) -> Message {
    Message {
        words: [number; PAYLOAD_WORDS],
        kind: number as u32,
    }
}

#[cfg(loom)]
mod every_order {
    use loom::thread;

    use super::*;

    /// Words of a message are never mixed with those of another; no message is lost or repeated when the ring
    /// wraps.
    #[test]
    fn messages_arrive_whole_once_and_in_order() {
        loom::model(|| {
            let (mut sender, mut receiver) = pair::<2>();
            let writer = thread::spawn(move || {
                for number in 0..3 {
                    while sender.post(&message(number)).is_err() {
                        thread::yield_now();
                    }
                }
            });
            for number in 0..3 {
                let got = loop {
                    match receiver.take().expect("the sender closes after its last message") {
                        Some(got) => break got,
                        None => thread::yield_now(),
                    }
                };
                assert_eq!(got, message(number));
            }
            writer.join().expect("no panic");
            assert_eq!(receiver.take(), Err(RecvError::Closed));
        });
    }

    /// A receiver that decided to block is woken, at whatever time the message arrived.
    #[test]
    fn receiver_never_misses_a_wakeup() {
        loom::model(|| {
            let (mut sender, mut receiver) = pair::<2>();
            let writer = thread::spawn(move || {
                sender.post(&message(0)).expect("room");
                let woken = sender.must_wake();
                (sender, woken)
            });
            let blocked = receiver.prepare_to_block();
            let (_sender, woken) = writer.join().expect("no panic");
            assert!(!blocked || woken, "the receiver would sleep forever");
            assert!(receiver.has_message());
        });
    }

    /// The same for a sender that waits for room.
    #[test]
    fn sender_never_misses_a_wakeup() {
        loom::model(|| {
            let (mut sender, mut receiver) = pair::<2>();
            (0..2).for_each(|number| sender.post(&message(number)).expect("room"));
            let reader = thread::spawn(move || {
                assert!(receiver.take().expect("open").is_some());
                let woken = receiver.must_wake();
                (receiver, woken)
            });
            let blocked = sender.prepare_to_block().expect("open");
            let (_receiver, woken) = reader.join().expect("no panic");
            assert!(!blocked || woken, "the sender would sleep forever");
            sender.post(&message(2)).expect("room");
        });
    }
}

#[cfg(not(loom))]
mod one_order {
    use std::collections::VecDeque;
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use crate::sync::Ordering;

    #[derive(Clone, Debug)]
    enum Step {
        Post,
        Take,
        Block,
    }

    proptest! {
        /// Compared with a queue of the standard library.
        #[test]
        fn ring_is_a_bounded_queue(
            steps in prop::collection::vec(
                prop_oneof![Just(Step::Post), Just(Step::Take), Just(Step::Block)],
                1..300
            )
        ) {
            let (mut sender, mut receiver) = pair::<8>();
            let mut queue = VecDeque::new();
            let mut next = 0;
            for step in steps {
                match step {
                    Step::Post => match sender.post(&message(next)) {
                        Ok(()) => {
                            queue.push_back(next);
                            next += 1;
                        }
                        Err(error) => {
                            prop_assert_eq!(error, SendError::Full);
                            // The receiver publishes credit in halves.
                            prop_assert!(queue.len() > 4, "full with {} of 8", queue.len());
                        }
                    },
                    Step::Take => prop_assert_eq!(receiver.take(), Ok(queue.pop_front().map(message))),
                    Step::Block => {
                        prop_assert_eq!(receiver.prepare_to_block(), queue.is_empty());
                        receiver.unblocked();
                    }
                }
                prop_assert_eq!(receiver.has_message(), !queue.is_empty());
            }
        }
    }

    #[test]
    fn million_messages_cross_two_threads() {
        const COUNT: u64 = 1_000_000;
        let (mut sender, mut receiver) = pair::<64>();
        let writer = thread::spawn(move || {
            for number in 0..COUNT {
                while sender.post(&message(number)) == Err(SendError::Full) {
                    thread::yield_now();
                }
            }
        });
        for number in 0..COUNT {
            let got = loop {
                match receiver.take().expect("the sender closes after its last message") {
                    Some(got) => break got,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(got, message(number));
        }
        writer.join().expect("no panic");
        assert_eq!(receiver.take(), Err(RecvError::Closed));
    }

    #[test]
    fn sequence_number_may_wrap() {
        let (mut sender, mut receiver) = pair::<4>();
        // Early enough that every line is written before the number wraps, as in a real ring.
        let start = u64::from(u32::MAX) - 10;
        sender.start_at(start);
        receiver.start_at(start);
        for number in 0..20 {
            sender.post(&message(number)).expect("room");
            assert_eq!(receiver.take(), Ok(Some(message(number))));
            assert_eq!(receiver.take(), Ok(None));
        }
    }

    #[test]
    fn send_to_a_closed_receiver_fails_at_once() {
        let (mut sender, receiver) = pair::<4>();
        drop(receiver);
        assert_eq!(sender.post(&message(0)), Err(SendError::Closed));
        let (mut sender, mut receiver) = pair::<4>();
        sender.post(&message(0)).expect("room");
        sender.ring().close();
        assert_eq!(sender.post(&message(1)), Err(SendError::Closed));
        assert_eq!(
            receiver.take(),
            Ok(Some(message(0))),
            "messages that were sent before remain"
        );
        assert_eq!(receiver.take(), Err(RecvError::Closed));
    }

    #[test]
    fn invalid_receiver_credit_is_an_error() {
        for claim in [1, u64::MAX] {
            let (mut sender, receiver) = pair::<2>();
            receiver.ring().credit.0.store(claim, Ordering::Release);
            let sent: Vec<_> = (0..3).map(|number| sender.post(&message(number))).collect();
            let expected = if claim == 1 {
                Ok(())
            } else {
                Err(SendError::Corrupt)
            };
            assert_eq!(sent, [Ok(()), Ok(()), expected], "claims {claim}");
        }
    }
}
