//! A shard's replica of guest memory, kept coherent with those of the VM's other shards (`crates/dsm`).
//!
//! The protocol limits the accesses to each page. A thread or system call that needs more rights blocks in
//! the kernel until one of the shard's page servers has fetched the page. The memory is created while the
//! shard has one thread and its rights. It is served once the sandbox is closed, and must not be accessed
//! before.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use dsm::{Causal, Latency, Meter, Node, Polls, Prepared, Settings, Shape, Site};
pub use dsm::{SHARERS_MAX, USERFAULT_DEVICE};
use serde_json::{Value, json};
use urpc::host::SharedPipe;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use super::{GuestRam, MemoryError, part_ranges};
use crate::arch::x86_64::layout::Layout;
use crate::ending::EndSignal;
use crate::launch::{CoherenceLaunch, Ending, LanePipes, PipesAt, SharedLanes, SpanLaunch};
use crate::process::{Files, ReceiveError};
use crate::sandbox::{ThreadKind, Threads};

/// Number of the hottest pages that the status lists.
const HOTTEST_PAGES: usize = 20;

/// The memory, before it is served.
#[derive(Debug)]
pub struct Replica {
    prepared: Prepared,
    links: Vec<Vec<Option<dsm::Link>>>,
    names: Vec<String>,
    settings: Settings,
    transport: TransportReport,
}

/// The memory, served until the process ends.
#[derive(Debug)]
pub struct Coherence {
    node: Node,
    transport: TransportReport,
}

/// Transport of the page servers, for the status.
#[derive(Debug)]
struct TransportReport {
    /// For each shard whether the transport is memory shared by both hosts; none for the shard itself.
    shared: Vec<Option<bool>>,
    /// Reasons why shared memory is not used.
    notes: Vec<String>,
}

impl Replica {
    /// Takes the memory of the shard that `span` describes.
    ///
    /// # Errors
    /// Fails if the monitor's message lacks files, or this host can't keep memory coherent.
    pub fn take(
        span: &SpanLaunch,
        launch: &CoherenceLaunch,
        memory_bytes: u64,
        files: &mut Files,
    ) -> Result<Self, ReplicaError> {
        let device = launch.userfaultfd.map(|fd| files.take(fd)).transpose()?;
        // The file is closed once the pipes are mapped, so that the rest of it is inaccessible.
        let mut shared = Vec::with_capacity(launch.shared.len());
        for lanes in &launch.shared {
            let open =
                |lanes: &SharedLanes| Ok::<_, ReceiveError>((files.take(lanes.memory)?, lanes.lanes.clone()));
            shared.push(lanes.as_ref().map(open).transpose()?);
        }
        let mut links = Vec::with_capacity(launch.lanes.len());
        for (number, lane) in launch.lanes.iter().enumerate() {
            let mut row = Vec::with_capacity(lane.len());
            for (other, sockets) in lane.iter().enumerate() {
                let Some(sockets) = sockets else {
                    row.push(None);
                    continue;
                };
                let control = OwnedFd::from(files.take(sockets.control)?);
                let bulk = OwnedFd::from(files.take(sockets.bulk)?);
                let beside = shared.get(other).and_then(Option::as_ref);
                let beside = beside.and_then(|(memory, lanes)| Some((memory, lanes.get(number)?)));
                let pipes = beside.map(|(memory, at)| pipes(memory, at)).transpose()?;
                row.push(Some(dsm::Link::new([control, bulk], pipes)));
            }
            links.push(row);
        }
        let has_any = launch.lanes.first().into_iter().flatten().map(Option::is_some);
        let transport = TransportReport {
            shared: has_any
                .enumerate()
                .map(|(other, has)| has.then(|| shared.get(other).is_some_and(Option::is_some)))
                .collect(),
            notes: launch.notes.clone(),
        };
        let layout = Layout::new(memory_bytes, &[]).ok_or(MemoryError::Regions)?;
        // Pages have the guest's numbers, on which the handling of its page tables relies. Pages of holes are
        // never used.
        let end = layout.ram.last().map_or(0, |range| page_of(range.end));
        let pages = u32::try_from(end).unwrap_or(u32::MAX);
        let ranges = part_ranges(&layout, span.memory.iter().map(|part| part.bytes));
        let range_starts: Vec<u32> = ranges
            .iter()
            .filter_map(|ranges| u32::try_from(page_of(ranges.first()?.start)).ok())
            .collect();
        let shape = Shape {
            nodes: span.memory.len() as u16,
            pages,
            lanes: links.len() as u16,
            migratory: true,
            method: None,
        };
        let kernel = &launch.kernel;
        let standing = page_of(kernel.start)..page_of(kernel.end);
        let vcpus = span.vcpus.iter().filter(|shard| **shard == span.shard).count();
        let settings = Settings {
            polls: polls(launch.encrypted, vcpus),
            realtime: true,
            ahead: true,
            processors: span.vcpus.len(),
            pinned: standing.start.min(end) as u32..standing.end.min(end) as u32,
            ..Settings::default()
        };
        let site = Site {
            device: device.as_ref().map(AsFd::as_fd),
            name: Some(c"guest-memory"),
            range_starts: &range_starts,
        };
        let prepared = Prepared::new(u16::from(span.shard), shape, &settings, site)?;
        if !prepared.kernel_waits() {
            return Err(ReplicaError::KernelFails);
        }
        Ok(Self {
            prepared,
            links,
            names: launch.names.clone(),
            settings,
            transport,
        })
    }

    /// Returns the memory as devices use it.
    pub fn ram(&self, layout: &Layout) -> Result<GuestRam, MemoryError> {
        let mut regions = Vec::with_capacity(layout.ram.len());
        for range in &layout.ram {
            let start = self.prepared.view().wrapping_add(range.start as usize);
            let builder = MmapRegionBuilder::new((range.end - range.start) as usize)
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE);
            // SAFETY: a part of the region's view, which goes to the end of RAM and is never unmapped
            // (`start`).
            let builder = unsafe { builder.with_raw_mmap_pointer(start) };
            let mapping = builder.build().map_err(|_| MemoryError::Regions)?;
            let region = GuestRegionMmap::new(mapping, GuestAddress(range.start));
            regions.push(Arc::new(region.ok_or(MemoryError::Regions)?));
        }
        let memory = GuestMemoryMmap::from_arc_regions(regions).map_err(|_| MemoryError::Regions)?;
        Ok(Arc::new(memory))
    }

    /// Serves the memory by threads of the shard, until the process ends. `end` is signalled if another shard
    /// is lost.
    ///
    /// # Errors
    /// Fails if threads can't be started.
    pub fn start(self, threads: &Threads, end: &Arc<EndSignal>) -> Result<&'static Coherence, ReplicaError> {
        let signal = end.clone();
        let hook = move |how: &dsm::End| {
            let detail = how.to_string();
            signal.end(match how {
                dsm::End::Closed => Ending::Quit,
                // The lost shard or its monitor reports the reason.
                dsm::End::Lost { .. } | dsm::End::Reported { .. } => Ending::PeerLost { detail },
                dsm::End::ProtocolError(_) | dsm::End::Kernel(_) => Ending::ShardFailed { detail },
            });
        };
        let spawn = |name: String, first: dsm::Step, then: dsm::Step| {
            threads.spawn_prepared(ThreadKind::PageServer, &name, first, then)
        };
        let node = Node::serve(
            self.prepared,
            self.links,
            self.names,
            &self.settings,
            Box::new(hook),
            &spawn,
        )?;
        // Other threads of the shard may not have such priority.
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: lowers a limit of this process's; that always works, and keeps what threads have.
        unsafe { libc::setrlimit(libc::RLIMIT_RTPRIO, &none) };
        // Threads that wait for a page access the memory, so it is never unmapped.
        let transport = self.transport;
        Ok(Box::leak(Box::new(Coherence { node, transport })))
    }
}

impl Coherence {
    /// Returns the order that messages between shards keep, if the guest's page tables are merged.
    pub fn causal(&self) -> Option<Arc<Causal>> {
        self.node.causal().cloned()
    }

    /// Returns the latency of fetching pages from other shards.
    pub fn latency(&self) -> Arc<Latency> {
        self.node.latency().clone()
    }

    /// Releases memory, given as ranges of page numbers, on the hosts of all shards, as
    /// [`dsm::Discards::give_back`] describes. Returns the number of released pages.
    pub fn give_back(&self, pages: impl IntoIterator<Item = Range<u32>>) -> u64 {
        self.node.discards().give_back(pages)
    }

    /// Returns whether pages of other shards can still be fetched.
    pub fn is_whole(&self) -> bool {
        self.node.end().is_none()
    }

    /// Returns the counters, for people and programs.
    pub fn status(&self) -> Value {
        let Meter {
            reads,
            writes,
            upgrades,
            messages,
            pages,
            bytes,
            landed,
            invalidated,
            deferred,
            overdue,
            discarded,
            sleeps,
            ahead,
            joined,
            declined,
            filled,
            merged,
            unmerged,
            words,
            conflicts,
        } = self.node.meter();
        let stalls = |stalls: dsm::Stalls| {
            let seconds = Duration::from_nanos(stalls.ns).as_secs_f64();
            json!({ "count": stalls.count, "seconds": seconds })
        };
        let heat: Vec<Value> = self
            .node
            .hottest(HOTTEST_PAGES)
            .into_iter()
            .map(|(page, times)| {
                let address = u64::from(page) * page::PAGE_BYTES;
                json!({ "address": format!("{address:#x}"), "times": times })
            })
            .collect();
        let way = |is_shared: &Option<bool>| is_shared.map(|is| if is { "shared" } else { "streams" });
        let transport: Vec<_> = self.transport.shared.iter().map(way).collect();
        let notes: Vec<_> = self.node.notes().iter().chain(&self.transport.notes).collect();
        json!({
            "faults": { "read": stalls(reads), "write": stalls(writes), "upgrade": stalls(upgrades) },
            "messages": messages,
            "pages": pages,
            "bytes": bytes,
            "landed": landed,
            "invalidated": invalidated,
            "deferred": deferred,
            "overdue": overdue,
            "discarded": discarded,
            "resident_bytes": self.node.resident_bytes().ok(),
            "sleeps": sleeps,
            "ahead": { "pages": ahead, "joined": joined, "declined": declined, "filled": filled },
            "tables": { "merged": merged, "unmerged": unmerged, "words": words, "conflicts": conflicts },
            "enough_ns": self.node.enough_ns(),
            "ways": transport,
            "notes": notes,
            "heat": heat,
        })
    }
}

/// Maps the pipes of a page server, control and bulk.
fn pipes(memory: &File, at: &LanePipes) -> Result<[dsm::Pipes; 2], urpc::host::MemoryError> {
    let both = |at: PipesAt| {
        Ok(dsm::Pipes {
            outgoing: SharedPipe::at(memory, at.outgoing, at.words)?,
            incoming: SharedPipe::at(memory, at.incoming, at.words)?,
        })
    };
    Ok([both(at.control)?, both(at.bulk)?])
}

/// Returns the guest's page number of an address.
fn page_of(address: u64) -> u64 {
    address / page::PAGE_BYTES
}

/// Reason why a shard has no coherent memory.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    /// The monitor's message lacks files.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// The memory can't be created.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Memory shared by the hosts can't be mapped.
    #[error(transparent)]
    Shared(#[from] urpc::host::MemoryError),
    /// This host can't keep memory coherent.
    #[error(transparent)]
    Node(#[from] dsm::NodeError),
    /// Only ordinary threads could wait for pages; KVM could not.
    #[error(
        "KVM can't wait for pages of other shards: this host gives userfaultfd to root only; give access to \
         /dev/userfaultfd (Linux 6.1 has it), or set sysctl vm.unprivileged_userfaultfd=1"
    )]
    KernelFails,
}

/// Returns when the page servers of a shard with this many vCPUs may poll. The CPUs belong to the vCPUs,
/// unless all of these wait, and to the threads that encrypt. With page servers that polled beside threads
/// with work to do, half as many pages were fetched.
fn polls(encrypted: bool, vcpus: usize) -> Polls {
    match encrypted {
        true => Polls::Never,
        false => Polls::Waiting(vcpus.max(1)),
    }
}

#[cfg(test)]
mod tests;
