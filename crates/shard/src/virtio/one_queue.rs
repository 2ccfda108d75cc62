//! Handler of a device with one queue that serves each request at once.

use vm_memory::GuestMemoryMmap;

use super::serve::{Chain, serve};
use super::worker::{Event, Handler, Sources};
use super::{Activation, DeviceError};

/// Requests of such a device.
pub trait Requests: Send + 'static {
    /// Serves one request; returns the number of bytes written to its chain.
    fn answer(&mut self, memory: &GuestMemoryMmap<()>, request: Chain<'_>) -> Result<u32, DeviceError>;
}

/// The half of such a device that runs on its thread.
pub struct OneQueue<R> {
    requests: R,
    active: Option<Activation>,
}

impl<R> OneQueue<R> {
    /// Creates a handler that waits for its first activation.
    pub fn new(requests: R) -> Self {
        Self {
            requests,
            active: None,
        }
    }
}

impl<R: Requests> Handler for OneQueue<R> {
    fn start(&mut self, activation: Activation, _sources: &Sources) -> Result<(), DeviceError> {
        self.active = Some(activation);
        Ok(())
    }

    fn handle(&mut self, event: Event, _sources: &Sources) -> Result<(), DeviceError> {
        let (Event::Queue(_), Some(active)) = (event, &mut self.active) else {
            return Ok(());
        };
        let Some(queue) = active.queues.first_mut() else {
            return Ok(());
        };
        serve(queue, &active.memory, &active.interrupt, |request| {
            self.requests.answer(&active.memory, request)
        })
    }

    fn stop(&mut self, _sources: &Sources) {
        self.active = None;
    }
}
