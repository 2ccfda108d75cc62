//! Orders of the cell's drivers to vCPUs, and the VM's state as drivers see it.
//!
//! A driver waits for no answer: its CPU must not stop because a shard does. It sends by itself, as a
//! send never blocks; a thread for each VM would cost each switch of vCPUs a wake-up. A shard that does not
//! answer gets at most [`UNANSWERED_MAX`] orders, for which its socket has room. Its leases run out then, so
//! that its vCPUs are plain threads of Linux on one CPU each.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use shard_api::launch::Order;

use super::VmHandle;
use crate::shard_process::ShardProcess;

/// Orders to a shard without an answer at most. Ours: the kernel counts an order as 1.3 KB at most, and a
/// socket has room for 208 KiB by default.
pub(crate) const UNANSWERED_MAX: usize = 128;

/// Change of a VM that concerns the drivers of its cell.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum VmChange {
    /// The VM's vCPUs run, by new threads.
    Booted,
    /// The VM's shard has ended.
    Ended,
    /// The VM's weight, limits or pins may have changed.
    Updated,
}

/// Receiver of changes of a VM.
pub(crate) trait VmObserver: Send + Sync {
    /// Takes a change. Does not block.
    fn changed(&self, change: VmChange);

    /// Checks pins before they are set: CPUs by vCPU, of a VM with so many vCPUs.
    ///
    /// # Errors
    /// The reason why they can't hold.
    fn check_pins(&self, vcpus: u8, pins: &BTreeMap<u8, Vec<usize>>) -> Result<(), String>;

    /// Orders a vCPU to a CPU of the host, and waits until it is there. None if the VM is left to Linux.
    fn order(&self, vcpu: u8, cpu: usize) -> Option<Result<(), String>>;

    /// Leaves the VM to Linux, and waits until no driver acts on its threads. Returns false if a driver does
    /// not answer.
    fn release(&self) -> bool;
}

/// Observer of a VM, if its cell has drivers.
#[derive(Default)]
pub(super) struct Observer(OnceLock<Box<dyn VmObserver>>);

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Observer").field(&self.0.get().is_some()).finish()
    }
}

impl Observer {
    pub(super) fn get(&self) -> Option<&dyn VmObserver> {
        self.0.get().map(|observer| &**observer)
    }
}

impl VmHandle {
    /// Sets the receiver of changes. The first call counts.
    pub(crate) fn observe(&self, observer: Box<dyn VmObserver>) {
        let _ = self.0.observer.0.set(observer);
    }

    /// Reports a change to the drivers of its cell, if there are any.
    pub(crate) fn report_change(&self, change: VmChange) {
        if let Some(observer) = self.0.observer.get() {
            observer.changed(change);
        }
    }

    /// The home's process of a VM that runs and does not span cells, and the number of its boot.
    pub(crate) fn running_home(&self) -> Option<(u64, Arc<ShardProcess>)> {
        let state = self.state();
        let home = state
            .home
            .as_ref()
            .filter(|_| state.runs && state.cells.is_empty());
        let home = home.filter(|home| !home.has_ended())?;
        Some((state.starts, home.clone()))
    }

    /// Sends an order to a vCPU of the boot with the number `starts`, and never blocks. Returns whether it
    /// was sent.
    pub(crate) fn gate(&self, starts: u64, order: &Order) -> bool {
        let mut state = self.state();
        if !state.runs || state.starts != starts || state.gated.len() >= UNANSWERED_MAX {
            return false;
        }
        let sent = state.order(order);
        state.gated.extend(sent.as_ref().ok());
        sent.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use shard_api::launch::Answer;

    use super::*;

    #[test]
    fn shard_that_does_not_answer_gets_a_bounded_number_of_orders_and_is_not_killed() {
        let handle = VmHandle::default();
        let order = Order::StopVcpu {
            vcpu: 63,
            for_ms: 100,
        };
        assert!(!handle.gate(1, &order), "it does not run");
        let (process, socket) = ShardProcess::of(Command::new("sleep").arg("100"));
        let process = Arc::new(process);
        {
            let mut state = handle.state();
            state.start(process.clone(), None);
            state.runs = true;
        }
        assert!(!handle.gate(2, &order), "another boot");
        for _ in 0..UNANSWERED_MAX {
            assert!(handle.gate(1, &order));
        }
        assert!(!handle.gate(1, &order));
        assert!(!process.has_ended());
        // An answer, also a refusal, makes room; one to no order does not.
        let (first, stranger) = {
            let state = handle.state();
            (state.gated[0], state.gated[UNANSWERED_MAX - 1].request + 1)
        };
        let why = "no".to_owned();
        let to = shard_api::launch::OrderId {
            request: stranger,
            ..first
        };
        handle.state().note_answer(to, Answer::Done);
        assert!(!handle.gate(1, &order));
        handle.state().note_answer(first, Answer::Refused { why });
        assert!(handle.gate(1, &order) && !handle.gate(1, &order));
        drop(socket);
    }
}
