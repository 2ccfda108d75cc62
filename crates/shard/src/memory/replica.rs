//! A shard's own copy of a guest's memory, kept coherent with those of the VM's other shards (`crates/dsm`).
//!
//! A page can be used here as far as the protocol allows; a vCPU, a device's thread or a system call that
//! wants more waits inside the kernel until one of the shard's *lanes* has fetched it. The memory is made
//! while the shard has one thread and its rights, and served from when its sandbox is closed: until then
//! nobody may touch it.

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

/// Pages told of as the hottest.
const HOTTEST: usize = 20;

/// The memory, before it is served.
#[derive(Debug)]
pub struct Replica {
    prepared: Prepared,
    links: Vec<Vec<Option<dsm::Link>>>,
    names: Vec<String>,
    settings: Settings,
    ways: Ways,
}

/// The memory, served until the process ends.
#[derive(Debug)]
pub struct Coherence {
    node: Node,
    ways: Ways,
}

/// What the lanes go by.
#[derive(Debug)]
struct Ways {
    /// To each shard whether by memory that both hosts share; none to itself.
    shared: Vec<Option<bool>>,
    /// Why by none, where there is some.
    notes: Vec<String>,
}

impl Replica {
    /// That of the shard that `span` is told to.
    ///
    /// # Errors
    /// When the monitor's message lacks files, or this host can't keep memory coherent.
    pub fn take(
        span: &SpanLaunch,
        launch: &CoherenceLaunch,
        memory_bytes: u64,
        files: &mut Files,
    ) -> Result<Self, ReplicaError> {
        let device = launch.userfaultfd.map(|fd| files.take(fd)).transpose()?;
        // Closed again when the pipes are mapped, so that nothing else in it can be reached.
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
        let ways = Ways {
            shared: has_any
                .enumerate()
                .map(|(other, has)| has.then(|| shared.get(other).is_some_and(Option::is_some)))
                .collect(),
            notes: launch.notes.clone(),
        };
        let layout = Layout::new(memory_bytes, &[]).ok_or(MemoryError::Regions)?;
        // Numbered as the guest numbers them, which the treatment of its page tables relies on: those of
        // holes are never used.
        let end = layout.ram.last().map_or(0, |range| page_of(range.end));
        let pages = u32::try_from(end).unwrap_or(u32::MAX);
        let ranges = part_ranges(&layout, span.memory.iter().map(|part| part.bytes));
        let homes: Vec<u32> = ranges
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
            homes: &homes,
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
            ways,
        })
    }

    /// The memory as devices see it.
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

    /// Serves it by threads of the shard, until the process ends. `end` is told when another shard is gone.
    ///
    /// # Errors
    /// When there are no threads.
    pub fn start(self, threads: &Threads, end: &Arc<EndSignal>) -> Result<&'static Coherence, ReplicaError> {
        let signal = end.clone();
        let hook = move |how: &dsm::End| {
            let detail = how.to_string();
            signal.end(match how {
                dsm::End::Closed => Ending::Quit,
                // Why it is gone, it says itself or its monitor knows.
                dsm::End::Lost { .. } | dsm::End::Reported { .. } => Ending::PeerLost { detail },
                dsm::End::ProtocolError(_) | dsm::End::Kernel(_) => Ending::ShardFailed { detail },
            });
        };
        let spawn = |name: String, first: dsm::Step, then: dsm::Step| {
            threads.spawn_prepared(ThreadKind::Lane, &name, first, then)
        };
        let node = Node::serve(
            self.prepared,
            self.links,
            self.names,
            &self.settings,
            Box::new(hook),
            &spawn,
        )?;
        // No other thread is to have such priority.
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: lowers a limit of this process's; that always works, and keeps what threads have.
        unsafe { libc::setrlimit(libc::RLIMIT_RTPRIO, &none) };
        // Threads that wait for a page would find nothing there: it is never unmapped.
        let ways = self.ways;
        Ok(Box::leak(Box::new(Coherence { node, ways })))
    }
}

impl Coherence {
    /// What messages between shards come after, where the guest's page tables are merged.
    pub fn causal(&self) -> Option<Arc<Causal>> {
        self.node.causal().cloned()
    }

    /// How long pages of other shards take to come.
    pub fn latency(&self) -> Arc<Latency> {
        self.node.latency().clone()
    }

    /// Gives memory back to the hosts of all shards, by numbers of pages; [`dsm::Discards::give_back`] says
    /// how and of how many.
    pub fn give_back(&self, pages: impl IntoIterator<Item = Range<u32>>) -> u64 {
        self.node.discards().give_back(pages)
    }

    /// Whether pages of other shards still come.
    pub fn is_whole(&self) -> bool {
        self.node.end().is_none()
    }

    /// What has been counted, for people and programs.
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
        let stalls = |stalls: dsm::Stalls| json!({ "count": stalls.count, "seconds": Duration::from_nanos(stalls.ns).as_secs_f64() });
        let heat: Vec<Value> = self
            .node
            .hottest(HOTTEST)
            .into_iter()
            .map(|(page, times)| {
                let address = u64::from(page) * dsm::PAGE_BYTES as u64;
                json!({ "address": format!("{address:#x}"), "times": times })
            })
            .collect();
        let way = |is_shared: &Option<bool>| is_shared.map(|is| if is { "shared" } else { "streams" });
        let ways: Vec<_> = self.ways.shared.iter().map(way).collect();
        let notes: Vec<_> = self.node.notes().iter().chain(&self.ways.notes).collect();
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
            "ways": ways,
            "notes": notes,
            "heat": heat,
        })
    }
}

/// The pipes of a lane, control and bulk.
fn pipes(memory: &File, at: &LanePipes) -> Result<[dsm::Pipes; 2], urpc::host::MemoryError> {
    let both = |at: PipesAt| {
        Ok(dsm::Pipes {
            outgoing: SharedPipe::at(memory, at.outgoing, at.words)?,
            incoming: SharedPipe::at(memory, at.incoming, at.words)?,
        })
    };
    Ok([both(at.control)?, both(at.bulk)?])
}

/// The page of an address, as the guest numbers its pages.
fn page_of(address: u64) -> u64 {
    address / dsm::PAGE_BYTES as u64
}

/// Why a shard has no coherent memory.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    /// The monitor's message.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// The address map.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The memory that hosts share.
    #[error(transparent)]
    Shared(#[from] urpc::host::MemoryError),
    /// This host.
    #[error(transparent)]
    Node(#[from] dsm::NodeError),
    /// Only ordinary threads could wait for pages.
    #[error(
        "KVM can't wait for pages of other shards: this host gives userfaultfd to root only; give access to \
         /dev/userfaultfd (Linux 6.1 has it), or set sysctl vm.unprivileged_userfaultfd=1"
    )]
    KernelFails,
}

/// When the lanes of a shard with so many vCPUs may poll: the CPUs are the vCPUs', unless all of these wait,
/// and theirs who encrypt. Where lanes polled beside threads with work to do, half as many pages came.
fn polls(encrypted: bool, vcpus: usize) -> Polls {
    match encrypted {
        true => Polls::Never,
        false => Polls::Waiting(vcpus.max(1)),
    }
}

#[cfg(test)]
mod tests;
