//! What an engine has counted.

/// Events since the engine was made. They only grow.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Counters {
    /// Faults that began something: an answer at once, or a request. Not those that only joined the wait.
    pub read_faults: u64,
    /// As `read_faults`.
    pub write_faults: u64,
    /// Of the write faults, those on a page that could be read.
    pub upgrades: u64,
    /// Faults that needed no message: of an owner without copies elsewhere.
    pub local: u64,
    /// Pages that came with their bytes.
    pub fetched_with_bytes: u64,
    /// Pages that came as a word alone: kept here, or fresh.
    pub fetched_without_bytes: u64,
    /// Invalidations sent.
    pub invalidations_sent: u64,
    /// Copies given up because of an invalidation.
    pub invalidated: u64,
    /// Requests and invalidations that had to wait until the page had come and been used.
    pub deferred: u64,
    /// Reads answered with the right to write, as the page was migratory. Counted by the page's manager.
    pub migratory_reads: u64,
    /// Pages whose contents were forgotten. Counted by the page's manager.
    pub discarded: u64,
    /// Copies asked for before anybody here wanted them.
    pub prefetches_sent: u64,
    /// Of these, those that came.
    pub prefetched: u64,
    /// Of those asked for, those that somebody waited for before the answer.
    pub joined: u64,
    /// Requests of others for copies that nobody waits for, which got none. Counted by who declines.
    pub nacked: u64,
    /// Messages sent, of any kind.
    pub messages_sent: u64,
    /// Of these, with a page beside them.
    pub pages_sent: u64,
}
