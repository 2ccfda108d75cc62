//! Signals from the device to the driver: queue and configuration interrupts, and the request for a reset.
//! Any thread may send them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};

use super::Log;
use super::registers::NO_VECTOR;
use crate::interrupt::Vector;
use crate::virtio::{DeviceError, Interrupt};

const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

/// State shared by the device's thread and the transport.
pub struct Signals {
    name: String,
    log: Log,
    vectors: Arc<[Vector]>,
    config_vector: AtomicU16,
    queue_vectors: Vec<AtomicU16>,
    isr: AtomicU8,
    generation: AtomicU8,
    needs_reset: AtomicBool,
}

impl Signals {
    pub fn new(name: &str, log: Log, vectors: Arc<[Vector]>, queues: usize) -> Self {
        Self {
            name: name.to_owned(),
            log,
            vectors,
            config_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            isr: AtomicU8::new(0),
            generation: AtomicU8::new(0),
            needs_reset: AtomicBool::new(false),
        }
    }

    pub fn log(&self, line: &str) {
        (self.log)(&format!("{}: {line}", self.name));
    }

    pub fn config_vector(&self) -> u16 {
        self.config_vector.load(Ordering::Relaxed)
    }

    /// Sets the vector of configuration changes; a vector that does not exist reads back as none.
    pub fn set_config_vector(&self, vector: u16) {
        self.config_vector.store(self.existing(vector), Ordering::Relaxed);
    }

    pub fn queue_vector(&self, queue: u16) -> u16 {
        self.queue_vectors
            .get(usize::from(queue))
            .map_or(NO_VECTOR, |vector| vector.load(Ordering::Relaxed))
    }

    pub fn set_queue_vector(&self, queue: u16, vector: u16) {
        if let Some(register) = self.queue_vectors.get(usize::from(queue)) {
            register.store(self.existing(vector), Ordering::Relaxed);
        }
    }

    pub fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    pub fn reset_wanted(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Returns and clears the interrupt status.
    pub fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    pub fn reset(&self) {
        self.config_vector.store(NO_VECTOR, Ordering::Relaxed);
        self.queue_vectors
            .iter()
            .for_each(|vector| vector.store(NO_VECTOR, Ordering::Relaxed));
        self.isr.store(0, Ordering::Release);
        self.needs_reset.store(false, Ordering::Release);
    }

    fn existing(&self, vector: u16) -> u16 {
        if usize::from(vector) < self.vectors.len() {
            vector
        } else {
            NO_VECTOR
        }
    }

    fn raise(&self, vector: u16) {
        if let Some(vector) = self.vectors.get(usize::from(vector)) {
            vector.signal();
        }
    }
}

impl Interrupt for Signals {
    fn signal_queue(&self, index: u16) {
        self.isr.fetch_or(ISR_QUEUE, Ordering::Release);
        self.raise(self.queue_vector(index));
    }

    fn signal_config(&self) {
        self.generation.fetch_add(1, Ordering::Release);
        self.isr.fetch_or(ISR_CONFIG, Ordering::Release);
        self.raise(self.config_vector());
    }

    fn needs_reset(&self, error: &DeviceError) {
        let cause = std::error::Error::source(error)
            .map(|cause| format!(": {cause}"))
            .unwrap_or_default();
        self.log(&format!("stopped until the guest resets it: {error}{cause}"));
        self.needs_reset.store(true, Ordering::Release);
        self.signal_config();
    }
}
