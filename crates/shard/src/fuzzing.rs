//! The devices' handlers without their threads, for `fuzz/`: a run is a function of its input, and fast.
//!
//! Compiled under `cfg(fuzzing)` only, which `scripts/fuzz.sh` sets.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use diskstore::disk::Store;

use crate::ports::Ports;
use crate::virtio::worker::{Event, Handler, Sources};
use crate::virtio::{Activation, DeviceError, balloon, block, net, pmem, rng, vsock};

/// A device's handler, driven by hand as [`crate::virtio::worker::Worker`] would.
pub struct Bare {
    handler: Box<dyn Handler>,
    sources: Sources,
    running: bool,
}

impl Bare {
    fn new(handler: impl Handler) -> io::Result<Self> {
        Ok(Self {
            handler: Box::new(handler),
            sources: Sources::new()?,
            running: false,
        })
    }

    /// One queue of a block device.
    pub fn block(store: Arc<dyn Store>, read_only: bool) -> io::Result<Self> {
        Self::new(block::bare(store, read_only))
    }

    /// A network card on a stream socket.
    pub fn net(socket: OwnedFd) -> io::Result<Self> {
        Self::new(net::bare(socket))
    }

    /// A socket device.
    pub fn vsock(cid: u64, listener: UnixListener, ports: Ports) -> io::Result<Self> {
        Self::new(vsock::bare(cid, listener, ports)?)
    }

    /// An entropy source.
    pub fn rng() -> io::Result<Self> {
        Self::new(rng::bare())
    }

    /// The balloon of a guest with `ram_bytes` of memory.
    pub fn balloon(ram_bytes: u64) -> io::Result<Self> {
        Self::new(balloon::bare(ram_bytes)?)
    }

    /// Persistent memory that syncs `file`.
    pub fn pmem(file: File) -> io::Result<Self> {
        Self::new(pmem::bare(file))
    }

    /// The driver is ready.
    pub fn start(&mut self, activation: Activation) {
        self.stop();
        self.running = true;
        let result = self.handler.start(activation, &self.sources);
        self.stop_on_error(result);
    }

    /// The driver notified a queue.
    pub fn notified(&mut self, queue: u16) {
        self.handle(Event::Queue(queue));
    }

    /// Serves the device's own files that are ready; false when none was.
    pub fn serve_files(&mut self) -> bool {
        let ready = self.sources.ready().unwrap_or_default();
        ready.iter().for_each(|token| self.handle(Event::Source(*token)));
        !ready.is_empty()
    }

    /// A reset.
    pub fn stop(&mut self) {
        if std::mem::take(&mut self.running) {
            self.handler.stop(&self.sources);
        }
    }

    /// Whether it is between an activation and a reset or a broken queue.
    pub fn is_running(&self) -> bool {
        self.running
    }

    fn handle(&mut self, event: Event) {
        if self.running {
            let result = self.handler.handle(event, &self.sources);
            self.stop_on_error(result);
        }
    }

    fn stop_on_error(&mut self, result: Result<(), DeviceError>) {
        if result.is_err() {
            self.stop();
        }
    }
}
