//! Counters of an engine.

/// Numbers of events since the engine was made. They only grow.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Counters {
    /// Read faults that the engine answered at once or sent a request for. A fault that joins a pending
    /// request does not count.
    pub read_faults: u64,
    /// Write faults, counted as `read_faults`.
    pub write_faults: u64,
    /// Write faults on a page that the node could read.
    pub upgrades: u64,
    /// Faults of an owner whose page has no other copy. They send no message.
    pub local: u64,
    /// Pages received with their bytes.
    pub fetched_with_bytes: u64,
    /// Pages received without bytes: the node had a valid copy, or the page was zero.
    pub fetched_without_bytes: u64,
    /// Invalidations sent to nodes with a copy.
    pub invalidations_sent: u64,
    /// Copies that this node gave up because of an invalidation.
    pub invalidated: u64,
    /// Requests and invalidations deferred until the page had arrived and been used.
    pub deferred: u64,
    /// Reads that the page's manager turned into writes because the page is migratory.
    pub migratory_reads: u64,
    /// Discarded pages, counted by their manager.
    pub discarded: u64,
    /// Prefetch requests sent.
    pub prefetches_sent: u64,
    /// Prefetched copies received.
    pub prefetched: u64,
    /// Prefetches that a fault joined before the reply.
    pub joined: u64,
    /// Prefetch requests of other nodes that this node answered with a Nack.
    pub nacked: u64,
    /// Messages sent, of any kind.
    pub messages_sent: u64,
    /// Messages sent with a page attached.
    pub pages_sent: u64,
}
