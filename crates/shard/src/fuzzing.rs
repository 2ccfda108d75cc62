//! The devices' handlers without their threads, for `fuzz/`: a run is fast and depends on its input only.
//!
//! It is compiled under `cfg(fuzzing)` only, which `scripts/fuzz.sh` sets.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use diskstore::disk::Store;

use crate::ports::Ports;
use crate::virtio::worker::{Event, Handler, Sources};
use crate::virtio::{Activation, DeviceError, balloon, block, fs, net, pmem, rng, vsock};

/// A device's handler, driven directly instead of by a [`crate::virtio::worker::Worker`].
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

    /// Creates a block device with one queue.
    pub fn block(store: Arc<dyn Store>, read_only: bool) -> io::Result<Self> {
        Self::new(block::bare(store, read_only))
    }

    /// Creates a network card on a stream socket.
    pub fn net(socket: OwnedFd) -> io::Result<Self> {
        Self::new(net::bare(socket))
    }

    /// Creates a socket device.
    pub fn vsock(cid: u64, listener: UnixListener, ports: Ports) -> io::Result<Self> {
        Self::new(vsock::bare(cid, listener, ports)?)
    }

    /// Creates a shared folder on a socket of packets.
    pub fn fs(socket: OwnedFd) -> io::Result<Self> {
        Self::new(fs::bare(socket))
    }

    /// Creates an entropy source.
    pub fn rng() -> io::Result<Self> {
        Self::new(rng::bare())
    }

    /// Creates the balloon of a guest with `ram_bytes` of memory.
    pub fn balloon(ram_bytes: u64) -> io::Result<Self> {
        Self::new(balloon::bare(ram_bytes)?)
    }

    /// Creates persistent memory that syncs `file`.
    pub fn pmem(file: File) -> io::Result<Self> {
        Self::new(pmem::bare(file))
    }

    /// Activates the device, as a driver that is ready does.
    pub fn start(&mut self, activation: Activation) {
        self.stop();
        self.running = true;
        let result = self.handler.start(activation, &self.sources);
        self.stop_on_error(result);
    }

    /// Serves a notification of a queue by the driver.
    pub fn notified(&mut self, queue: u16) {
        self.handle(Event::Queue(queue));
    }

    /// Serves the device's own files that are ready; returns false if none was.
    pub fn serve_files(&mut self) -> bool {
        let ready = self.sources.ready().unwrap_or_default();
        ready.iter().for_each(|token| self.handle(Event::Source(*token)));
        !ready.is_empty()
    }

    /// Resets the device.
    pub fn stop(&mut self) {
        if std::mem::take(&mut self.running) {
            self.handler.stop(&self.sources);
        }
    }

    /// Returns whether the device is between an activation and a reset or a broken queue.
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
