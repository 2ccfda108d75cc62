//! State of a paused device as its driver set it up, to be restored in another VM.
//!
//! The position in a queue is not part of it: guest memory has it. Every device here completes requests in
//! the order in which it takes them, or has none in flight while the VM is paused. The next request to take
//! is therefore the one after the last completed one: the index of the used ring.

use std::io;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

use super::VirtioPci;
use super::registers::NO_VECTOR;
use crate::memory::GuestRam;
use crate::virtio::{ActiveQueue, DeviceError, Interrupt};

/// Offset of the index in a used ring.
const USED_INDEX: u64 = 2;

/// Registers that a driver set.
#[derive(Serialize, Deserialize)]
struct TransportState {
    config: Vec<u8>,
    msix_table: Vec<u8>,
    status: u8,
    accepted: u64,
    selects: [u32; 3],
    config_vector: u16,
    queues: Vec<QueueState>,
    needs_reset: bool,
    device: Value,
}

#[derive(Serialize, Deserialize)]
struct QueueState {
    size: u16,
    enabled: bool,
    addresses: [u64; 3],
    vector: u16,
}

impl VirtioPci {
    pub(super) fn state(&self) -> io::Result<Value> {
        let mut config = vec![0; crate::pci::config::CONFIG_BYTES];
        self.config.read(0, &mut config);
        let state = TransportState {
            config,
            msix_table: self.msix.table(),
            status: self.status,
            accepted: self.accepted,
            selects: [
                self.device_feature_select,
                self.driver_feature_select,
                u32::from(self.queue_select),
            ],
            config_vector: self.signals.config_vector(),
            queues: (0..)
                .zip(&self.queues)
                .map(|(index, queue)| QueueState {
                    size: queue.size,
                    enabled: queue.enabled,
                    addresses: queue.addresses,
                    vector: self.signals.queue_vector(index),
                })
                .collect(),
            needs_reset: self.signals.reset_wanted(),
            device: self.device.save(),
        };
        Ok(serde_json::to_value(state)?)
    }

    /// Restores the state of a device of the same kind and queues. The driver finds all registers unchanged,
    /// and receives an interrupt for each queue: notifications in flight are in no state.
    pub(super) fn resume(&mut self, state: &Value) -> io::Result<()> {
        let state: TransportState = serde_json::from_value(state.clone())?;
        if state.queues.len() != self.queues.len() || state.accepted & !self.offered != 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the saved device had other queues or features than this one",
            ));
        }
        self.device.resume(&state.device);
        (self.accepted, self.status) = (state.accepted, state.status);
        [self.device_feature_select, self.driver_feature_select] = [state.selects[0], state.selects[1]];
        self.queue_select = state.selects[2] as u16;
        self.signals.set_config_vector(state.config_vector);
        for (index, (queue, saved)) in (0..).zip(self.queues.iter_mut().zip(&state.queues)) {
            if !saved.size.is_power_of_two() || saved.size > queue.size_max {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "the saved device had larger queues than this one",
                ));
            }
            (queue.size, queue.enabled, queue.addresses) = (saved.size, saved.enabled, saved.addresses);
            self.signals.set_queue_vector(index, saved.vector);
        }
        self.config.restore(&state.config);
        self.follow_bar();
        // The messages precede their masks.
        self.msix.write_table(0, &state.msix_table)?;
        self.msix.configured(&self.config)?;
        if state.status & super::common_config::DRIVER_OK == 0 || state.needs_reset {
            return Ok(());
        }
        self.activate_resumed();
        for (index, queue) in (0..).zip(&self.queues) {
            if queue.enabled && self.active {
                self.notify(u64::from(super::NOTIFY_MULTIPLIER) * u64::from(index));
                if self.signals.queue_vector(index) != NO_VECTOR {
                    self.signals.signal_queue(index);
                }
            }
        }
        Ok(())
    }
}

/// Continues a queue after the last request that was completed.
pub(super) fn resume_queue(
    active: &mut ActiveQueue,
    used_ring: u64,
    memory: &GuestRam,
) -> Result<(), DeviceError> {
    let index: u16 = memory
        .read_obj(GuestAddress(used_ring.wrapping_add(USED_INDEX)))
        .map_err(|error| DeviceError::Protocol(error.to_string()))?;
    active.queue.set_next_avail(u16::from_le(index));
    active.queue.set_next_used(u16::from_le(index));
    Ok(())
}
