//! The balloon's front end: features, configuration space and status.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use locks::IgnorePoison;
use serde_json::{Value, json};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::handler::{BalloonHandler, F_REPORTING, F_STATISTICS};
use super::metrics::{BalloonMetrics, statistic_name};
use super::release::Release;
use super::state::{BalloonHandle, State, UNIT_BYTES};
use crate::sandbox::{ThreadKind, Threads};
use crate::virtio::device::{RING_FEATURES, read_space};
use crate::virtio::worker::Worker;
use crate::virtio::{Activation, DeviceError, VirtioDevice, VirtioId};

/// Sizes of the queues: inflate, deflate, statistics, reporting as Linux numbers it, reporting as the
/// specification does.
const QUEUE_SIZES: [u16; 5] = [128, 128, 16, 64, 64];
const F_DEFLATE_ON_OOM: u64 = 1 << 2;
/// Offset of `actual` in the configuration.
const ACTUAL: u64 = 4;

/// The traditional memory balloon (Virtio 1.2, section 5.5).
pub struct Balloon {
    worker: Worker,
    state: Arc<State>,
    metrics: Arc<BalloonMetrics>,
}

impl Balloon {
    /// Starts the device's thread for a guest with `ram_bytes` of memory, whose pages `release` releases.
    pub fn new(threads: &Threads, ram_bytes: u64, release: Release) -> io::Result<Self> {
        let state = new_state(ram_bytes)?;
        let metrics = Arc::new(BalloonMetrics::default());
        let handler = BalloonHandler::new(state.clone(), metrics.clone(), release);
        let worker = Worker::spawn(threads, ThreadKind::Balloon, "balloon", handler)?;
        Ok(Self {
            worker,
            state,
            metrics,
        })
    }

    /// Returns the handle that sets the balloon's size.
    pub fn handle(&self) -> BalloonHandle {
        BalloonHandle(self.state.clone())
    }

    fn set_interrupt(&self, interrupt: Option<Arc<dyn crate::virtio::Interrupt>>) {
        *self.state.interrupt.lock().ignore_poison() = interrupt;
    }
}

fn new_state(ram_bytes: u64) -> io::Result<Arc<State>> {
    Ok(Arc::new(State {
        target_pages: AtomicU32::new(0),
        actual_pages: AtomicU32::new(0),
        pages_max: u32::try_from(ram_bytes / UNIT_BYTES).unwrap_or(u32::MAX),
        statistics: Mutex::default(),
        interrupt: Mutex::new(None),
        refresh: EventFd::new(EFD_NONBLOCK)?,
    }))
}

/// Returns the handler without its thread, for [`crate::fuzzing`].
#[cfg(fuzzing)]
pub(crate) fn bare(ram_bytes: u64) -> io::Result<impl crate::virtio::worker::Handler> {
    Ok(BalloonHandler::new(
        new_state(ram_bytes)?,
        Arc::default(),
        Release(crate::kind::VmKind::Plain(super::PlainRelease::Whole)),
    ))
}

impl VirtioDevice for Balloon {
    fn id(&self) -> VirtioId {
        VirtioId::Balloon
    }

    fn features(&self) -> u64 {
        RING_FEATURES | F_STATISTICS | F_DEFLATE_ON_OOM | F_REPORTING
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let pages = [&self.state.target_pages, &self.state.actual_pages];
        let config = pages.map(|pages| pages.load(Ordering::Acquire).to_le_bytes());
        read_space(config.as_flattened(), offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let (ACTUAL, Ok(actual)) = (offset, data.try_into()) {
            self.state.set_actual(u32::from_le_bytes(actual));
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.set_interrupt(Some(activation.interrupt.clone()));
        self.worker.activate(activation)
    }

    fn reset(&mut self) {
        self.set_interrupt(None);
        self.worker.reset();
        // The driver gives up all pages at a reset.
        self.state.actual_pages.store(0, Ordering::Release);
    }

    fn save(&self) -> Value {
        let pages = [&self.state.target_pages, &self.state.actual_pages];
        json!(pages.map(|pages| pages.load(Ordering::Acquire)))
    }

    fn resume(&mut self, state: &Value) {
        if let Ok([target, actual]) = serde_json::from_value::<[u32; 2]>(state.clone()) {
            self.state.target_pages.store(target, Ordering::Release);
            self.state.actual_pages.store(actual, Ordering::Release);
        }
    }

    /// Returns the status, and requests new statistics from the guest for the next call.
    fn status(&self) -> Value {
        let _ = self.state.refresh.write(1);
        let statistics = self.state.statistics.lock().ignore_poison();
        let statistics: serde_json::Map<String, Value> = statistics
            .iter()
            .map(|(tag, value)| (statistic_name(*tag), json!(value)))
            .collect();
        json!({
            "target_bytes": u64::from(self.state.target_pages.load(Ordering::Acquire)) * UNIT_BYTES,
            "actual_bytes": u64::from(self.state.actual_pages.load(Ordering::Acquire)) * UNIT_BYTES,
            "inflated_bytes": self.metrics.inflated_bytes.load(Ordering::Relaxed),
            "reported_bytes": self.metrics.reported_bytes.load(Ordering::Relaxed),
            "guest": statistics,
        })
    }
}
