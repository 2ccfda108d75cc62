//! Starts the shard's threads, each sealed with the allow-list of its kind before it runs its work.

use std::io;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use super::filter;
use crate::quiescer::Quiescer;

/// Stack of a thread. The deepest user is a vCPU thread in a device's registers; pages not touched cost
/// nothing.
const STACK_BYTES: usize = 256 << 10;

/// What a thread is for; it decides what the thread may ask of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThreadKind {
    /// Waits for the monitor and for the end of the VM.
    Control,
    /// Receives the monitor's orders for the first thread.
    Orders,
    /// Runs one vCPU.
    Vcpu,
    /// Runs one vCPU of a VM that spans cells.
    SpanVcpu,
    /// Takes what another shard of the VM sends.
    Link,
    /// Keeps a part of the memory coherent with other shards'.
    Lane,
    /// Watches the events of the IOAPIC's pins.
    Pins,
    /// Moves the serial console's bytes.
    Serial,
    /// Serves a disk's queues.
    Block,
    /// Serves a network card's queues.
    Net,
    /// Moves frames between a card and its passt, in a process of its own.
    Relay,
    /// Serves the socket device's queues.
    Vsock,
    /// Serves the entropy queue.
    Rng,
    /// Serves the balloon's queues.
    Balloon,
    /// Serves a persistent memory's queue.
    Pmem,
    /// Shares memory in the background.
    Sharing,
}

/// Starts threads. Cloned freely; carries the policy of the sandbox, and the quiescer that holds the VM's
/// threads still.
#[derive(Clone)]
pub struct Threads {
    sealed: bool,
    quiescer: Arc<Quiescer>,
    /// Set once the first thread is sealed.
    begun: Arc<OnceLock<()>>,
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Threads")
            .field("sealed", &self.sealed)
            .finish_non_exhaustive()
    }
}

impl Threads {
    /// Threads without system call filters: for tests and for `--sandbox=off`.
    pub fn open() -> Self {
        Self {
            sealed: false,
            quiescer: Quiescer::new(),
            begun: Arc::default(),
        }
    }

    /// Threads that seal themselves.
    pub(crate) fn sealed() -> Self {
        Self {
            sealed: true,
            quiescer: Quiescer::new(),
            begun: Arc::default(),
        }
    }

    /// The quiescer of this VM.
    pub fn quiescer(&self) -> &Arc<Quiescer> {
        &self.quiescer
    }

    /// Starts a thread named `name` (15 bytes are kept by the kernel) that seals itself as `kind`, then runs
    /// `work`.
    ///
    /// A thread that can't seal itself ends the process: [`super::close`] has shown that the kernel can.
    pub fn spawn(
        &self,
        kind: ThreadKind,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        self.spawn_prepared(kind, name, || (), work)
    }

    /// As [`Threads::spawn`], and does `first` before it seals itself: with the rights that are left to the
    /// process.
    pub fn spawn_prepared(
        &self,
        kind: ThreadKind,
        name: &str,
        first: impl FnOnce() + Send + 'static,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let threads = self.clone();
        std::thread::Builder::new()
            .name(name.to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                first();
                if let Err(error) = threads.seal(kind) {
                    tracing::error!(%error, "the {kind:?} thread cannot be sealed");
                    std::process::abort();
                }
                work();
            })
    }

    /// As [`Threads::spawn`], but `work` waits until the first thread is sealed too: it may run the guest.
    pub fn spawn_held(
        &self,
        kind: ThreadKind,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let begun = self.begun.clone();
        self.spawn(kind, name, move || {
            begun.wait();
            work();
        })
    }

    /// Seals the calling thread, which is the first, then lets those go on that are held
    /// ([`Threads::spawn_held`]).
    pub fn seal_first(&self) -> io::Result<()> {
        self.seal(ThreadKind::Control)?;
        // A second call changes nothing.
        let _ = self.begun.set(());
        Ok(())
    }

    /// Seals the calling thread as `kind`; nothing can widen it again.
    fn seal(&self, kind: ThreadKind) -> io::Result<()> {
        if self.sealed { filter::apply(kind) } else { Ok(()) }
    }
}
