//! The common configuration structure of Virtio 1.2 (section 4.1.4.3), which all kinds of devices have: the
//! status state machine, features, queue set-up (sections 2.1, 3.1).
//!
//! Writes that the specification forbids are ignored: features after FEATURES_OK, a queue's registers after
//! it is enabled, an unknown select. Accesses of any size and offset are applied byte by byte to whole
//! registers.

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED,
    VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::VirtioPci;
use super::registers::*;
use super::state::resume_queue;
use crate::virtio::{Activation, ActiveQueue, DeviceError, Interrupt};

const ACKNOWLEDGE: u8 = VIRTIO_CONFIG_S_ACKNOWLEDGE as u8;
const DRIVER: u8 = VIRTIO_CONFIG_S_DRIVER as u8;
pub(super) const DRIVER_OK: u8 = VIRTIO_CONFIG_S_DRIVER_OK as u8;
const FEATURES_OK: u8 = VIRTIO_CONFIG_S_FEATURES_OK as u8;
const NEEDS_RESET: u8 = VIRTIO_CONFIG_S_NEEDS_RESET as u8;
const FAILED: u8 = VIRTIO_CONFIG_S_FAILED as u8;

impl VirtioPci {
    pub(super) fn read_common(&self, offset: usize, data: &mut [u8]) {
        let registers = self.common_registers();
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = registers.get(offset + index).copied().unwrap_or(0);
        }
    }

    fn common_registers(&self) -> [u8; COMMON_BYTES] {
        let mut registers = [0; COMMON_BYTES];
        let mut put =
            |offset: usize, bytes: &[u8]| registers[offset..offset + bytes.len()].copy_from_slice(bytes);
        put(DEVICE_FEATURE_SELECT, &self.device_feature_select.to_le_bytes());
        put(
            DEVICE_FEATURE,
            &half(self.offered, self.device_feature_select).to_le_bytes(),
        );
        put(DRIVER_FEATURE_SELECT, &self.driver_feature_select.to_le_bytes());
        put(
            DRIVER_FEATURE,
            &half(self.accepted, self.driver_feature_select).to_le_bytes(),
        );
        put(CONFIG_VECTOR, &self.signals.config_vector().to_le_bytes());
        put(QUEUES, &(self.queues.len() as u16).to_le_bytes());
        put(STATUS, &[self.device_status()]);
        put(GENERATION, &[self.signals.generation()]);
        put(QUEUE_SELECT, &self.queue_select.to_le_bytes());
        put(
            QUEUE_VECTOR,
            &self.signals.queue_vector(self.queue_select).to_le_bytes(),
        );
        if let Some(queue) = self.queues.get(usize::from(self.queue_select)) {
            put(QUEUE_SIZE, &queue.size.to_le_bytes());
            put(QUEUE_ENABLE, &u16::from(queue.enabled).to_le_bytes());
            put(QUEUE_NOTIFY_OFFSET, &self.queue_select.to_le_bytes());
            for (offset, address) in [QUEUE_DESCRIPTORS, QUEUE_DRIVER, QUEUE_DEVICE]
                .iter()
                .zip(queue.addresses)
            {
                put(*offset, &address.to_le_bytes());
            }
        }
        registers
    }

    /// Writes whole registers; a write to an address sets its low or high half alone, or both.
    pub(super) fn write_common(&mut self, offset: usize, data: &[u8]) {
        let value = match *data {
            [a] => u64::from(a),
            [a, b] => u64::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => u64::from(u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => return,
        };
        match (offset, data.len()) {
            (DEVICE_FEATURE_SELECT, 4) => self.device_feature_select = value as u32,
            (DRIVER_FEATURE_SELECT, 4) => self.driver_feature_select = value as u32,
            (DRIVER_FEATURE, 4) => self.accept(value as u32),
            (CONFIG_VECTOR, 2) => self.signals.set_config_vector(value as u16),
            (STATUS, 1) => self.set_status(value as u8),
            (QUEUE_SELECT, 2) => self.queue_select = value as u16,
            (QUEUE_VECTOR, 2) => self.signals.set_queue_vector(self.queue_select, value as u16),
            (QUEUE_DESCRIPTORS..COMMON_BYTES | QUEUE_SIZE | QUEUE_ENABLE, _) => {
                self.write_queue(offset, data.len(), value);
            }
            _ => {}
        }
    }

    fn write_queue(&mut self, offset: usize, length: usize, value: u64) {
        let configurable = self.status & DRIVER_OK == 0;
        let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) else {
            return;
        };
        if queue.enabled || !configurable {
            return;
        }
        match (offset, length) {
            (QUEUE_SIZE, 2) => {
                let size = value as u16;
                if size.is_power_of_two() && size <= queue.size_max {
                    queue.size = size;
                }
            }
            (QUEUE_ENABLE, 2) => queue.enabled = value == 1,
            (QUEUE_DESCRIPTORS..=0x37, 4 | 8) if offset.is_multiple_of(length) => {
                let address = &mut queue.addresses[(offset - QUEUE_DESCRIPTORS) / 8];
                *address = match (length, offset % 8) {
                    (8, _) => value,
                    (_, 0) => *address & !0xFFFF_FFFF | value,
                    _ => *address & 0xFFFF_FFFF | value << 32,
                };
            }
            _ => {}
        }
    }

    fn accept(&mut self, value: u32) {
        if self.status & FEATURES_OK != 0 {
            return;
        }
        self.accepted = match self.driver_feature_select {
            0 => self.accepted & !0xFFFF_FFFF | u64::from(value),
            1 => self.accepted & 0xFFFF_FFFF | u64::from(value) << 32,
            _ => return,
        };
    }

    fn device_status(&self) -> u8 {
        self.status
            | if self.signals.reset_wanted() {
                NEEDS_RESET
            } else {
                0
            }
    }

    /// Sets status bits in order; a write of 0 resets.
    fn set_status(&mut self, value: u8) {
        if value == 0 {
            return self.reset();
        }
        let added = value & !self.status;
        for (bit, before) in [
            (ACKNOWLEDGE, 0),
            (DRIVER, ACKNOWLEDGE),
            (FEATURES_OK, ACKNOWLEDGE | DRIVER),
            (DRIVER_OK, ACKNOWLEDGE | DRIVER | FEATURES_OK),
        ] {
            if added & bit == 0 || self.status & before != before {
                continue;
            }
            if bit == FEATURES_OK && !self.features_agree() {
                continue;
            }
            self.status |= bit;
            if bit == DRIVER_OK {
                self.activate();
            }
        }
        self.status |= added & FAILED;
    }

    fn features_agree(&self) -> bool {
        self.accepted & !self.offered == 0 && self.accepted & (1 << VIRTIO_F_VERSION_1) != 0
    }

    fn activate(&mut self) {
        let result = self.activation();
        self.activate_with(result);
    }

    /// Activates the device of a VM that resumes, with its queues at the driver's positions.
    pub(super) fn activate_resumed(&mut self) {
        let result = self.activation().and_then(|mut activation| {
            activation.resumed = true;
            for active in &mut activation.queues {
                let [_, _, used_ring] = self.queues[usize::from(active.index)].addresses;
                resume_queue(active, used_ring, &self.memory)?;
            }
            Ok(activation)
        });
        self.activate_with(result);
    }

    fn activate_with(&mut self, activation: Result<Activation, DeviceError>) {
        let result = activation.and_then(|activation| self.device.activate(activation));
        match result {
            Ok(()) => self.active = true,
            Err(error) => self.signals.needs_reset(&error),
        }
    }

    fn activation(&self) -> Result<Activation, DeviceError> {
        let event_idx = self.accepted & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        let mut queues = Vec::with_capacity(self.queues.len());
        for (index, (registers, doorbell)) in (0..).zip(self.queues.iter().zip(&self.doorbells)) {
            if registers.enabled {
                let queue = registers.queue(index, event_idx, &self.memory)?;
                let notify = doorbell.try_clone().map_err(|source| DeviceError::Host {
                    what: "cannot copy an event file",
                    source,
                })?;
                queues.push(ActiveQueue { index, queue, notify });
            }
        }
        Ok(Activation {
            memory: self.memory.clone(),
            features: self.accepted,
            queues,
            interrupt: self.signals.clone(),
            resumed: false,
        })
    }

    /// Resets all state. Returns once the device does not access guest memory.
    pub(super) fn reset(&mut self) {
        if std::mem::take(&mut self.active) {
            self.device.reset();
        }
        self.signals.reset();
        self.status = 0;
        self.accepted = 0;
        self.device_feature_select = 0;
        self.driver_feature_select = 0;
        self.queue_select = 0;
        for queue in &mut self.queues {
            *queue = QueueRegisters::new(queue.size_max);
        }
    }
}

/// Returns the 32 feature bits that `select` selects.
fn half(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}
