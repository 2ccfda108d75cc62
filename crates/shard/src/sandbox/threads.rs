//! Starts the shard's threads, each sealed with the allow-list of its kind before it runs its work.

use std::io;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use super::filter;
use crate::quiescer::Quiescer;

/// Stack size of a thread, bytes. A vCPU's thread in a device's registers has the deepest stack; untouched
/// pages cost no memory.
const STACK_BYTES: usize = 256 << 10;

/// Kind of a thread, which determines its system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThreadKind {
    /// Serves the monitor's orders and waits for the end of the VM.
    Control,
    /// Receives the monitor's orders for the first thread.
    Orders,
    /// Runs one vCPU.
    Vcpu,
    /// Runs one vCPU of a VM that spans cells.
    SpanVcpu,
    /// Receives packets of another shard of the VM.
    Link,
    /// Serves a stripe of coherent memory: a page server.
    PageServer,
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
    /// Serves the cards of a user's subnet, in a process of its own, which connects to the outside.
    Gateway,
    /// Serves the socket device's queues.
    Vsock,
    /// Serves the entropy queue.
    Rng,
    /// Serves the balloon's queues.
    Balloon,
    /// Serves a persistent memory's queue.
    Pmem,
    /// Serves a shared folder's queues.
    Fs,
    /// Serves the files of a shared folder, in a process of its own.
    Folder,
    /// Shares memory in the background.
    Sharing,
    /// Pages guest memory: answers faults, writes pages out, or serves the paging disk.
    Pager,
}

/// Starts threads. Can be cloned; holds the policy of the sandbox, and the quiescer that pauses the VM's
/// threads.
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
    /// Creates a starter of threads without system call filters: for tests and for `--sandbox=off`.
    pub fn open() -> Self {
        Self {
            sealed: false,
            quiescer: Quiescer::new(),
            begun: Arc::default(),
        }
    }

    /// Creates a starter of threads that seal themselves.
    pub(crate) fn sealed() -> Self {
        Self {
            sealed: true,
            quiescer: Quiescer::new(),
            begun: Arc::default(),
        }
    }

    /// Returns the quiescer of this VM.
    pub fn quiescer(&self) -> &Arc<Quiescer> {
        &self.quiescer
    }

    /// Starts a thread named `name` (the kernel keeps 15 bytes), which seals itself as `kind`, then runs
    /// `work`.
    ///
    /// A thread that can't seal itself ends the process: [`super::close`] has verified that the kernel
    /// supports it.
    pub fn spawn(
        &self,
        kind: ThreadKind,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        self.spawn_prepared(kind, name, || (), work)
    }

    /// Works as [`Threads::spawn`], and calls `first` before the thread seals itself, with the remaining
    /// rights of the process.
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

    /// Works as [`Threads::spawn`], but `work`, which may run the guest, waits until the first thread is
    /// sealed too.
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

    /// Seals the calling thread, which is the first, then releases the threads that wait for it
    /// ([`Threads::spawn_held`]).
    pub fn seal_first(&self) -> io::Result<()> {
        self.seal(ThreadKind::Control)?;
        // A second call has no effect.
        let _ = self.begun.set(());
        Ok(())
    }

    /// Seals the calling thread as `kind`, irrevocably.
    fn seal(&self, kind: ThreadKind) -> io::Result<()> {
        if self.sealed { filter::apply(kind) } else { Ok(()) }
    }
}
