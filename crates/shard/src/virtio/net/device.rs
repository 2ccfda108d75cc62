//! A network card's front end: features, configuration space, status.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use virtio_bindings::virtio_net as spec;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::handler::{Link, NetHandler};
use super::metrics::NetMetrics;
use super::stream::{Framing, Stream};
use super::tap::Tap;
use crate::sandbox::{ThreadKind, Threads};
use crate::virtio::device::{Activation, DeviceError, VirtioDevice, VirtioId, read_space};
use crate::virtio::worker::Worker;

/// Descriptors of a receive or transmit queue.
const QUEUE_SIZE: u16 = 256;
/// Descriptors of the control queue.
const CONTROL_QUEUE_SIZE: u16 = 64;
/// Greatest number of queue pairs.
const PAIRS_MAX: usize = 64;

/// Connection of a card to the host.
#[derive(Debug)]
pub enum Backend {
    /// TAP files, one for each queue pair, opened with a virtio-net header, non-blocking.
    Tap(Vec<OwnedFd>),
    /// A connected stream socket to passt.
    Stream(OwnedFd),
    /// A connected packet socket to the gateway of a subnet.
    Packets(OwnedFd),
    /// A connected packet socket to the gateway of a subnet, with a virtio-net header before each frame.
    Offloads(OwnedFd),
}

/// A network card.
pub struct Net {
    worker: Worker,
    metrics: Arc<NetMetrics>,
    status: Arc<AtomicU16>,
    features: u64,
    queue_sizes: Vec<u16>,
    mac: [u8; 6],
    pairs: u16,
    mtu: u16,
}

impl Net {
    /// Creates the card `id` and starts its thread.
    pub fn new(threads: &Threads, id: &str, mac: [u8; 6], backend: Backend) -> io::Result<Self> {
        let bit = |feature: u32| 1_u64 << feature;
        let mut features = bit(spec::VIRTIO_NET_F_MAC)
            | bit(spec::VIRTIO_NET_F_STATUS)
            | bit(spec::VIRTIO_NET_F_MRG_RXBUF)
            | bit(VIRTIO_RING_F_EVENT_IDX)
            | bit(VIRTIO_RING_F_INDIRECT_DESC);
        let (link, pairs) = match backend {
            Backend::Tap(files) => {
                if files.is_empty() || files.len() > PAIRS_MAX {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidInput,
                        "a card has 1 to 64 queue pairs",
                    ));
                }
                features |= offloads();
                let pairs = files.len() as u16;
                (Link::Tap(Tap::new(files)), pairs)
            }
            Backend::Stream(socket) => (stream(socket, Framing::Length), 1),
            Backend::Packets(socket) => (stream(socket, Framing::Packet), 1),
            Backend::Offloads(socket) => {
                features |= offloads();
                (stream(socket, Framing::HeaderPacket), 1)
            }
        };
        let mut queue_sizes = vec![QUEUE_SIZE; 2 * usize::from(pairs)];
        if pairs > 1 {
            features |= bit(spec::VIRTIO_NET_F_MQ) | bit(spec::VIRTIO_NET_F_CTRL_VQ);
            queue_sizes.push(CONTROL_QUEUE_SIZE);
        }
        let metrics = Arc::new(NetMetrics::default());
        let status = Arc::new(AtomicU16::new(spec::VIRTIO_NET_S_LINK_UP as u16));
        let handler = NetHandler::new(link, metrics.clone(), status.clone());
        let worker = Worker::spawn(threads, ThreadKind::Net, id, handler)?;
        Ok(Self {
            worker,
            metrics,
            status,
            features,
            queue_sizes,
            mac,
            pairs,
            mtu: 0,
        })
    }

    /// Offers the guest an MTU of `mtu` bytes (VIRTIO_NET_F_MTU), at least 68.
    pub fn with_mtu(mut self, mtu: u16) -> Self {
        self.mtu = mtu.max(68);
        self.features |= 1 << spec::VIRTIO_NET_F_MTU;
        self
    }

    /// Returns the counters of the card.
    pub fn metrics(&self) -> &Arc<NetMetrics> {
        &self.metrics
    }
}

/// Returns the features by which checksums and segmentation of TCP are left to receivers, in both directions.
fn offloads() -> u64 {
    let features = [
        spec::VIRTIO_NET_F_CSUM,
        spec::VIRTIO_NET_F_GUEST_CSUM,
        spec::VIRTIO_NET_F_GUEST_TSO4,
        spec::VIRTIO_NET_F_GUEST_TSO6,
        spec::VIRTIO_NET_F_GUEST_ECN,
        spec::VIRTIO_NET_F_HOST_TSO4,
        spec::VIRTIO_NET_F_HOST_TSO6,
        spec::VIRTIO_NET_F_HOST_ECN,
    ];
    features.iter().fold(0, |bits, feature| bits | 1 << feature)
}

fn stream(socket: OwnedFd, framing: Framing) -> Link {
    Link::Stream(Box::new(Stream::new(socket, framing)))
}

/// Returns the handler of a card on a stream, without its thread, for [`crate::fuzzing`].
#[cfg(fuzzing)]
pub(crate) fn bare(socket: OwnedFd) -> impl crate::virtio::worker::Handler {
    NetHandler::new(
        stream(socket, Framing::Length),
        Arc::default(),
        Arc::new(AtomicU16::new(1)),
    )
}

impl VirtioDevice for Net {
    fn id(&self) -> VirtioId {
        VirtioId::Net
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0_u8; 12];
        config[..6].copy_from_slice(&self.mac);
        config[6..8].copy_from_slice(&self.status.load(Ordering::Acquire).to_le_bytes());
        config[8..10].copy_from_slice(&self.pairs.to_le_bytes());
        config[10..].copy_from_slice(&self.mtu.to_le_bytes());
        read_space(&config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.worker.activate(activation)
    }

    fn status(&self) -> serde_json::Value {
        serde_json::to_value(self.metrics.counts()).unwrap_or_default()
    }

    fn reset(&mut self) {
        self.worker.reset();
    }
}
