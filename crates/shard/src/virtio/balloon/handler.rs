//! Serves the balloon's queues.
//!
//! The specification numbers all queues, present or not: statistics 2, free-page hints 3, reporting 4. Linux
//! and QEMU count the present ones: reporting is 3 without hints, and 2 without statistics. There are no
//! hints here. Every queue from 2 on that is not for statistics is therefore for reporting, which serves both
//! kinds of driver.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use locks::IgnorePoison;
use nix::sys::epoll::EpollFlags;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestMemoryMmap};

use super::metrics::BalloonMetrics;
use super::release::Release;
use super::state::{State, UNIT_BYTES};
use crate::virtio::serve::{Chain, broken, listen, serve, signal, take};
use crate::virtio::worker::{Event, Handler, Sources};
use crate::virtio::{Activation, ActiveQueue, DeviceError};

/// Feature `VIRTIO_BALLOON_F_STATS_VQ`: the statistics queue.
pub const F_STATISTICS: u64 = 1 << 1;
/// Feature `VIRTIO_BALLOON_F_REPORTING`: free-page reporting.
pub const F_REPORTING: u64 = 1 << 5;

const INFLATE: u16 = 0;
const DEFLATE: u16 = 1;
const OPTIONAL: u16 = 2;
/// Greatest size of a chain's page numbers, bytes: Linux sends 256 numbers.
const NUMBERS_BYTES_MAX: usize = 64 << 10;
/// Greatest number of statistics: Linux has 10.
const STATISTICS_MAX: usize = 64;
const STATISTIC_BYTES: usize = 10;
const REFRESH: u32 = 0;

pub struct BalloonHandler {
    state: Arc<State>,
    metrics: Arc<BalloonMetrics>,
    release: Release,
    active: Option<Activation>,
    /// The driver's statistics buffer; returning it requests new statistics.
    held: Option<u16>,
}

impl BalloonHandler {
    pub fn new(state: Arc<State>, metrics: Arc<BalloonMetrics>, release: Release) -> Self {
        Self {
            state,
            metrics,
            release,
            active: None,
            held: None,
        }
    }

    fn queue_event(&mut self, index: u16) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let statistics = active.features & F_STATISTICS != 0;
        let Some(queue) = active.queues.iter_mut().find(|queue| queue.index == index) else {
            return Ok(());
        };
        let memory: &GuestMemoryMmap<()> = &active.memory;
        match index {
            INFLATE => serve(queue, &active.memory, &active.interrupt, |chain| {
                let bytes = inflate(memory, &self.release, chain)?;
                self.metrics.inflated_bytes.fetch_add(bytes, Ordering::Relaxed);
                Ok(0)
            }),
            // The guest's next access brings a deflated page back.
            DEFLATE => serve(queue, &active.memory, &active.interrupt, |_| Ok(0)),
            OPTIONAL if statistics => {
                // The driver has one buffer; of several, the last counts and the others are returned.
                while let Some(chain) = take(queue, memory)? {
                    let head = chain.head_index();
                    read_statistics(&self.state, memory, chain)?;
                    if let Some(before) = self.held.replace(head) {
                        queue.queue.add_used(memory, before, 0).map_err(broken)?;
                        break;
                    }
                }
                listen(queue, memory)
            }
            OPTIONAL.. if active.features & F_REPORTING != 0 => {
                serve(queue, &active.memory, &active.interrupt, |chain| {
                    let ranges = chain
                        .writable()
                        .map(|range| (range.addr().0, u64::from(range.len())));
                    let bytes = self.release.ranges(memory, ranges)?;
                    self.metrics.reported_bytes.fetch_add(bytes, Ordering::Relaxed);
                    Ok(0)
                })
            }
            _ => Ok(()),
        }
    }

    /// Returns the statistics buffer, so that the driver fills it again.
    fn refresh(&mut self) -> Result<(), DeviceError> {
        let _ = self.state.refresh.read();
        let (Some(active), Some(head)) = (&mut self.active, self.held.take()) else {
            return Ok(());
        };
        let memory: &GuestMemoryMmap<()> = &active.memory;
        let Some(queue) = statistics_queue(&mut active.queues) else {
            return Ok(());
        };
        queue.queue.add_used(memory, head, 0).map_err(broken)?;
        signal(queue, memory, &*active.interrupt)
    }
}

fn statistics_queue(queues: &mut [ActiveQueue]) -> Option<&mut ActiveQueue> {
    queues.iter_mut().find(|queue| queue.index == OPTIONAL)
}

impl Handler for BalloonHandler {
    fn start(&mut self, activation: Activation, sources: &Sources) -> Result<(), DeviceError> {
        self.active = Some(activation);
        // SAFETY: the file lives in `state`, which this handler owns a share of until after `stop`.
        let refresh = unsafe { BorrowedFd::borrow_raw(self.state.refresh.as_raw_fd()) };
        sources
            .add(refresh, REFRESH, EpollFlags::EPOLLIN)
            .map_err(DeviceError::host("cannot wait for requests of statistics"))
    }

    fn handle(&mut self, event: Event, _sources: &Sources) -> Result<(), DeviceError> {
        match event {
            Event::Queue(index) => self.queue_event(index),
            Event::Source(_) => self.refresh(),
        }
    }

    fn stop(&mut self, sources: &Sources) {
        // SAFETY: as in `start`.
        let refresh = unsafe { BorrowedFd::borrow_raw(self.state.refresh.as_raw_fd()) };
        // Not registered if `start` failed.
        let _ = sources.remove(refresh);
        self.active = None;
        self.held = None;
    }
}

/// Releases the pages whose numbers a chain lists, adjacent ones together. Returns the number of bytes.
fn inflate(memory: &GuestMemoryMmap<()>, release: &Release, chain: Chain<'_>) -> Result<u64, DeviceError> {
    let mut numbers = read_chain(memory, chain, NUMBERS_BYTES_MAX)?
        .chunks_exact(4)
        .map(|number| u64::from(u32::from_le_bytes([number[0], number[1], number[2], number[3]])))
        .collect::<Vec<_>>();
    numbers.sort_unstable();
    numbers.dedup();
    let runs = numbers.chunk_by(|before, after| before + 1 == *after);
    release.ranges(
        memory,
        runs.map(|run| (run[0] * UNIT_BYTES, run.len() as u64 * UNIT_BYTES)),
    )
}

fn read_statistics(state: &State, memory: &GuestMemoryMmap<()>, chain: Chain<'_>) -> Result<(), DeviceError> {
    let bytes = read_chain(memory, chain, STATISTICS_MAX * STATISTIC_BYTES)?;
    let mut statistics = state.statistics.lock().ignore_poison();
    statistics.clear();
    for entry in bytes.chunks_exact(STATISTIC_BYTES) {
        let mut value = [0; 8];
        value.copy_from_slice(&entry[2..]);
        statistics.insert(
            u16::from_le_bytes([entry[0], entry[1]]),
            u64::from_le_bytes(value),
        );
    }
    Ok(())
}

/// Returns the readable bytes of a chain, at most `limit`.
fn read_chain(memory: &GuestMemoryMmap<()>, chain: Chain<'_>, limit: usize) -> Result<Vec<u8>, DeviceError> {
    let mut bytes = Vec::new();
    for descriptor in chain.readable() {
        let start = bytes.len();
        let length = (descriptor.len() as usize).min(limit - start);
        bytes.resize(start + length, 0);
        memory
            .read_slice(&mut bytes[start..], descriptor.addr())
            .map_err(broken)?;
        if bytes.len() == limit {
            break;
        }
    }
    Ok(bytes)
}
