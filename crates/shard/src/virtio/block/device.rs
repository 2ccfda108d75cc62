//! The block device's front end: features, configuration space, one worker for each queue.

use std::io;
use std::sync::Arc;

use diskstore::disk::{IoQueue, SECTOR_BYTES, Store};
use serde::{Deserialize, Serialize};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_ID_BYTES,
};
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::handler::{BlockHandler, QUEUE_SIZE, ReadOrigins};
use super::limiter::{DiskLimiter, LimitedQueue};
use super::metrics::Metrics;
use super::paging_disk::PagingDiskHandler;
use super::request::{Disk, RANGE_SECTORS_MAX};
use super::waiting::WaitingRequests;
use crate::launch::OnFull;
use crate::paging::PagingDiskIo;
use crate::sandbox::{ThreadKind, Threads};
use crate::virtio::worker::Worker;
use crate::virtio::{Activation, DeviceError, VirtioDevice, VirtioId};

/// Greatest number of queues of a disk, each with a thread.
const QUEUES_MAX: u16 = 64;
/// Greatest number of data buffers of a request: the queue size without header and status.
const SEGMENTS_MAX: u32 = QUEUE_SIZE as u32 - 2;
/// Logarithm of a page's sectors: the host writes pages, which is the useful alignment.
const PAGE_SECTORS_LOG2: u8 = 3;
/// Bytes of the configuration space up to `write_zeroes_may_unmap` and its padding.
const CONFIG_BYTES: usize = 60;

/// A block device.
pub struct Block {
    workers: Vec<Worker>,
    queue_sizes: Vec<u16>,
    features: u64,
    config: [u8; CONFIG_BYTES],
    metrics: Arc<Metrics>,
    /// Limits of the requests; none of a virtual paging disk.
    limiter: Option<Arc<DiskLimiter>>,
    note: Option<String>,
    /// Size that the driver of a resumed VM has read, in sectors; none if it is unknown.
    size_read: Option<u64>,
}

/// State of a disk of a frozen VM, beyond that of its driver.
#[derive(Serialize, Deserialize)]
struct SavedDisk {
    sectors: u64,
}

impl Block {
    /// Starts the threads of a disk. Must be called before the sandbox closes: its rings and event files are
    /// created here.
    ///
    /// `id` is the serial that the guest reads (its first 20 bytes). `queues` is limited to 1 to 64.
    /// `origins` is the use of the origins of reads, if there is one. `on_full` is the policy for a write
    /// that finds no room.
    pub fn new(
        threads: &Threads,
        id: &str,
        store: Arc<dyn Store>,
        read_only: bool,
        queues: u16,
        origins: Option<ReadOrigins>,
        on_full: OnFull,
    ) -> io::Result<Self> {
        let queues = queues.clamp(1, QUEUES_MAX);
        let disk = Disk {
            sectors: store.size() / SECTOR_BYTES,
            read_only,
            id: name(id),
        };
        let metrics = Arc::new(Metrics::default());
        let limiter = Arc::new(DiskLimiter::default());
        let mut note = None;
        let mut workers = Vec::with_capacity(queues.into());
        for index in 0..queues {
            let io = IoQueue::new(store.clone(), QUEUE_SIZE);
            if let Err(why) = io.in_background() {
                let why = why.map_or_else(|| "not asked for".to_owned(), ToString::to_string);
                note = Some(format!(
                    "disk {id}: no io_uring ({why}); a slow read stalls its queue"
                ));
            }
            let waiting = match on_full {
                OnFull::Error => None,
                OnFull::Pause => Some(WaitingRequests::new(metrics.clone())?),
            };
            let quiescer = threads.quiescer().clone();
            let limits = LimitedQueue::new(limiter.clone())?;
            let origins = origins.clone();
            let handler = BlockHandler::new(io, disk, metrics.clone(), quiescer, origins, waiting, limits);
            let thread = format!("blk-{id:.8}-{index}");
            workers.push(Worker::spawn(threads, ThreadKind::Block, &thread, handler)?);
        }
        Ok(Self {
            workers,
            queue_sizes: vec![QUEUE_SIZE; queues.into()],
            features: features(read_only),
            config: config(disk.sectors, queues),
            metrics,
            limiter: Some(limiter),
            note,
            size_read: None,
        })
    }

    /// Starts the thread of a VM's virtual paging disk, with the serial `id`.
    pub fn paging(threads: &Threads, id: &str, io: PagingDiskIo) -> io::Result<Self> {
        let disk = Disk {
            sectors: io.bytes() / SECTOR_BYTES,
            read_only: false,
            id: name(id),
        };
        let metrics = Arc::new(Metrics::default());
        let handler = PagingDiskHandler::new(io, disk, metrics.clone(), threads.quiescer().clone());
        let worker = Worker::spawn(threads, ThreadKind::Pager, "blk-paging", handler)?;
        Ok(Self {
            workers: vec![worker],
            queue_sizes: vec![QUEUE_SIZE],
            features: features(disk.read_only),
            config: config(disk.sectors, 1),
            metrics,
            limiter: None,
            note: None,
            size_read: None,
        })
    }

    /// Returns the size that the driver reads, in sectors.
    fn sectors(&self) -> u64 {
        let mut sectors = [0; 8];
        self.read_config(0, &mut sectors);
        u64::from_le_bytes(sectors)
    }

    /// Returns the counters of the disk's queues.
    pub fn metrics(&self) -> Arc<Metrics> {
        self.metrics.clone()
    }

    /// Returns the limits of the disk's requests; none of a virtual paging disk.
    pub fn limiter(&self) -> Option<Arc<DiskLimiter>> {
        self.limiter.clone()
    }

    /// Returns the text about this disk for the log of the VM.
    pub fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }
}

/// Returns one queue's handler without its thread, for [`crate::fuzzing`].
#[cfg(fuzzing)]
pub(crate) fn bare(store: Arc<dyn Store>, read_only: bool) -> impl crate::virtio::worker::Handler {
    let disk = Disk {
        sectors: store.size() / SECTOR_BYTES,
        read_only,
        id: *b"fuzz................",
    };
    BlockHandler::new(
        IoQueue::new(store, QUEUE_SIZE),
        disk,
        Arc::default(),
        Arc::default(),
        None,
        None,
        LimitedQueue::new(Arc::default()).expect("a timer"),
    )
}

/// Returns a serial as the guest reads it.
fn name(id: &str) -> [u8; VIRTIO_BLK_ID_BYTES as usize] {
    let mut name = [0; VIRTIO_BLK_ID_BYTES as usize];
    let length = id.len().min(name.len());
    name[..length].copy_from_slice(&id.as_bytes()[..length]);
    name
}

fn features(read_only: bool) -> u64 {
    let mut bits = vec![
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_MQ,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
    ];
    if read_only {
        bits.push(VIRTIO_BLK_F_RO);
    } else {
        bits.extend([VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES]);
    }
    bits.iter().fold(0, |features, bit| features | 1 << bit)
}

/// Returns the `struct virtio_blk_config` (Virtio 1.2, section 5.2.4).
fn config(sectors: u64, queues: u16) -> [u8; CONFIG_BYTES] {
    let mut config = [0; CONFIG_BYTES];
    let mut put = |offset: usize, bytes: &[u8]| config[offset..offset + bytes.len()].copy_from_slice(bytes);
    put(0, &sectors.to_le_bytes());
    put(12, &SEGMENTS_MAX.to_le_bytes());
    put(20, &(SECTOR_BYTES as u32).to_le_bytes());
    // Topology: a physical block is a page; minimum and best I/O sizes in sectors.
    put(24, &[PAGE_SECTORS_LOG2]);
    put(26, &(1_u16 << PAGE_SECTORS_LOG2).to_le_bytes());
    // Write-back cache.
    put(32, &[1]);
    put(34, &queues.to_le_bytes());
    put(36, &RANGE_SECTORS_MAX.to_le_bytes());
    put(40, &1_u32.to_le_bytes());
    put(44, &(1_u32 << PAGE_SECTORS_LOG2).to_le_bytes());
    put(48, &RANGE_SECTORS_MAX.to_le_bytes());
    put(52, &1_u32.to_le_bytes());
    put(56, &[1]);
    config
}

impl VirtioDevice for Block {
    fn id(&self) -> VirtioId {
        VirtioId::Block
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(CONFIG_BYTES);
        let known = &self.config[start..];
        let length = known.len().min(data.len());
        data[..length].copy_from_slice(&known[..length]);
        data[length..].fill(0);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let has_other_size = self.size_read.take().is_some_and(|read| read != self.sectors());
        let interrupt = activation.interrupt.clone();
        for queue in activation.queues {
            let Some(worker) = self.workers.get(usize::from(queue.index)) else {
                continue;
            };
            worker.activate(Activation {
                memory: activation.memory.clone(),
                features: activation.features,
                queues: vec![queue],
                interrupt: activation.interrupt.clone(),
                resumed: activation.resumed,
            })?;
        }
        // The driver of the frozen VM has read the size of another disk.
        if activation.resumed && has_other_size {
            interrupt.signal_config();
        }
        Ok(())
    }

    fn save(&self) -> serde_json::Value {
        let sectors = self.sectors();
        serde_json::to_value(SavedDisk { sectors }).unwrap_or_default()
    }

    fn resume(&mut self, state: &serde_json::Value) {
        // A state of an older release has no size.
        let saved = serde_json::from_value::<SavedDisk>(state.clone());
        self.size_read = saved.ok().map(|saved| saved.sectors);
    }

    fn status(&self) -> serde_json::Value {
        let mut status = serde_json::to_value(self.metrics.snapshot()).unwrap_or_default();
        if let Some(limiter) = &self.limiter {
            status["limit_waits"] = limiter.waits().into();
        }
        status
    }

    fn reset(&mut self) {
        self.workers.iter().for_each(Worker::reset);
    }
}
