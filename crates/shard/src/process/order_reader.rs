//! Thread that receives the monitor's orders for the first thread, and acknowledges an order to quit.
//!
//! The first thread may be busy for seconds: with another order, a freeze, or the flush of the disks at the
//! VM's end. A monitor kills a shard that does not acknowledge its end within 500 ms
//! (`cell::shard_process::ACKNOWLEDGEMENT_LIMIT`), so this thread acknowledges it at once.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use serde::Deserialize;
use serde_json::Value;
use shard_api::control::{Assembly, ControlSocket, ORDER_BYTES_MAX};
use shard_api::message::ReceiveError;
use vmm_sys_util::eventfd::{EFD_SEMAPHORE, EventFd};

use crate::launch::{Answer, Order, OrderId, Report};
use crate::sandbox::{Syscall, ThreadKind, Threads};

/// The system calls that the thread makes beyond those of every thread.
pub const SYSCALLS: &[Syscall] = &[libc::SYS_recvfrom, libc::SYS_recvmsg, libc::SYS_sendmsg];

/// Greatest number of orders that wait for the first thread. Further ones wait in the socket, where the
/// monitor notices a shard that does not read them.
const WAITING_ORDERS_MAX: usize = 64;

/// An order as it arrives: its kind may be unknown to this version.
#[derive(Debug, Deserialize)]
pub struct Arrived {
    /// Number of the order.
    pub id: OrderId,
    /// JSON of the order, not parsed yet.
    pub order: Value,
}

impl Arrived {
    /// Returns whether the order ends the shard.
    fn is_quit(&self) -> bool {
        matches!(serde_json::from_value(self.order.clone()), Ok(Order::Quit))
    }
}

/// A message of the control socket, or its end.
#[derive(Debug)]
pub enum Received {
    /// An order of the monitor with its number.
    Order(Arrived),
    /// The rest of a message whose beginning is gone.
    Rest,
    /// The message is no order.
    Malformed(ReceiveError),
    /// The monitor has died. Nothing follows.
    MonitorGone,
}

/// The first thread's end of the queue of received orders.
#[derive(Debug)]
pub struct OrderQueue {
    received: Receiver<Received>,
    /// Number of messages in the queue.
    waiting: EventFd,
}

impl AsFd for OrderQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to `self.waiting` and lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(self.waiting.as_raw_fd()) }
    }
}

impl OrderQueue {
    /// Starts the thread, which receives from `socket`.
    ///
    /// # Errors
    /// Fails if the process has no descriptors or threads left.
    pub fn start(socket: ControlSocket, threads: &Threads) -> io::Result<Self> {
        let waiting = EventFd::new(EFD_SEMAPHORE)?;
        let counter = waiting.try_clone()?;
        let (sender, received) = sync_channel(WAITING_ORDERS_MAX);
        threads.spawn(ThreadKind::Orders, "orders", move || {
            read_all(&socket, &sender, &counter);
        })?;
        Ok(Self { received, waiting })
    }

    /// Waits for the next message, and returns it.
    pub fn next(&self) -> Received {
        let next = self.received.recv().unwrap_or(Received::MonitorGone);
        // The thread counts each message after it has queued it, so this waits for a moment at most.
        if !matches!(next, Received::MonitorGone) {
            let _ = self.waiting.read();
        }
        next
    }
}

/// Queues messages until the monitor has died, or the first thread has ended.
fn read_all(socket: &ControlSocket, sender: &SyncSender<Received>, waiting: &EventFd) {
    loop {
        let received = receive(socket);
        if let Received::Order(arrived) = &received
            && arrived.is_quit()
        {
            let (to, answer) = (arrived.id, Answer::Done);
            // A monitor that does not read its reports does not read this one either. The first thread may be
            // sending a long answer. The monitor loses the rest of it, which is useless at the end of the VM.
            let _ = socket.try_send(&Report::Answer { to, answer });
        }
        let is_last = matches!(received, Received::MonitorGone);
        // The counter stays readable after the last one. It can't overflow.
        if sender.send(received).is_err() || waiting.write(1).is_err() || is_last {
            return;
        }
    }
}

fn receive(socket: &ControlSocket) -> Received {
    let message = match socket.receive_packet(ORDER_BYTES_MAX) {
        // An order is one packet.
        Ok(Some(packet)) => Assembly::default().take(&packet),
        Ok(None) | Err(ReceiveError::Io(_)) => return Received::MonitorGone,
        Err(error) => return Received::Malformed(error),
    };
    match message {
        Ok(Some(message)) => match serde_json::from_slice(&message) {
            Ok(arrived) => Received::Order(arrived),
            Err(error) => Received::Malformed(error.into()),
        },
        Ok(None) => Received::Rest,
        Err(error) => Received::Malformed(error),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::json;
    use shard_api::launch::NumberedOrder;

    use super::*;

    fn id(request: u64) -> OrderId {
        OrderId {
            incarnation: 1,
            request,
        }
    }

    #[test]
    fn order_to_quit_is_acknowledged_while_the_first_thread_is_busy_and_stays_queued() {
        let (monitor, shard) = ControlSocket::pair().unwrap();
        let queue = OrderQueue::start(shard, &Threads::open()).unwrap();
        for (request, order) in [(1, Order::Pause), (2, Order::Quit)] {
            let id = id(request);
            monitor.try_send(&NumberedOrder { id, order }).unwrap();
        }
        // Nothing takes an order from the queue.
        let limit = Instant::now() + Duration::from_secs(60);
        assert!(monitor.wait_until(limit).unwrap());
        let (report, _) = monitor.receive_with_files().unwrap();
        let report: Report = serde_json::from_slice(&report).unwrap();
        let (to, answer) = (id(2), Answer::Done);
        assert_eq!(report, Report::Answer { to, answer }, "the pause is not answered");
        for order in ["pause", "quit"] {
            match queue.next() {
                Received::Order(arrived) => assert_eq!(arrived.order, json!(order)),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn monitor_finds_the_socket_full_when_the_first_thread_leaves_its_orders() {
        let (monitor, shard) = ControlSocket::pair().unwrap();
        let queue = OrderQueue::start(shard, &Threads::open()).unwrap();
        let order = |request| {
            let (id, order) = (id(request), Order::Status);
            monitor.try_send(&NumberedOrder { id, order })
        };
        let refused = (1..).find_map(|request| order(request).err().map(|error| (request, error)));
        let (request, error) = refused.unwrap();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(request > WAITING_ORDERS_MAX as u64);
        drop(monitor);
        let orders = std::iter::repeat_with(|| queue.next())
            .take_while(|received| !matches!(received, Received::MonitorGone));
        assert_eq!(orders.count() as u64, request - 1, "no order is lost");
    }
}
