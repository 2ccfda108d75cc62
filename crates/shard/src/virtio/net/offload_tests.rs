//! Tests of a card on a packet socket whose frames have virtio-net's header.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, socketpair};
use virtio_bindings::virtio_net as spec;

use super::tests::{Bench, arp_request, bench, packet};
use super::{Backend, Net};
use crate::sandbox::Threads;
use crate::virtio::device::{Activation, VirtioDevice};
use crate::virtio::test_driver::{DriverQueue, RecordedSignals, memory, wait};

const ACCEPTS_ALL: &[u32] = &[
    spec::VIRTIO_NET_F_MRG_RXBUF,
    spec::VIRTIO_NET_F_CSUM,
    spec::VIRTIO_NET_F_GUEST_CSUM,
    spec::VIRTIO_NET_F_GUEST_TSO4,
    spec::VIRTIO_NET_F_HOST_TSO4,
];
/// The header of a TCP segment over IPv4 that becomes segments of 1,448 bytes.
const SEGMENTED: [u8; 12] = [1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0];
const WHOLE: [u8; 12] = [0; 12];
const HEADERS_BYTES: usize = 54;

fn sockets() -> (OwnedFd, OwnedFd) {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap()
}

fn offload_bench(features: &[u32]) -> (Bench, OwnedFd) {
    let (ours, theirs) = sockets();
    (bench(Backend::Offloads(ours), 2, features), theirs)
}

/// A frame with a TCP segment over IPv4.
fn segment(payload_bytes: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0];
    frame.extend((40 + payload_bytes as u16).to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0, 10, 213, 0, 2, 10, 213, 0, 3]);
    frame.extend([
        0x9c, 0x40, 0x14, 0x51, 0, 0, 0, 1, 0, 0, 0, 9, 0x50, 0x18, 1, 0, 0, 0, 0, 0,
    ]);
    frame.extend((0..payload_bytes).map(|place| place as u8));
    frame
}

fn give(peer: &OwnedFd, header: &[u8; 12], frame: &[u8]) {
    let packet = [&header[..], frame].concat();
    let sent = wait(|| send(peer.as_raw_fd(), &packet, MsgFlags::empty()).ok());
    assert_eq!(sent, Some(packet.len()));
}

/// Sets the number of buffers that the card writes into a header.
fn in_buffers(header: &[u8; 12], buffers: u8) -> [u8; 12] {
    let mut header = *header;
    header[10] = buffers;
    header
}

#[test]
fn guest_that_accepts_segments_gets_the_uncut_frame_and_its_header() {
    let (mut bench, peer) = offload_bench(ACCEPTS_ALL);
    bench.post(16);
    let frame = segment(10_000);
    give(&peer, &SEGMENTED, &frame);
    let first = bench.receive();
    assert_eq!(first[..12], in_buffers(&SEGMENTED, 3));
    let mut received = first[12..].to_vec();
    for _ in 0..2 {
        received.extend(bench.receive());
    }
    assert!(received == frame);
    let counts = bench.net.metrics().counts();
    assert_eq!((counts.rx_frames, counts.rx_bytes), (1, frame.len() as u64));
}

#[test]
fn guest_without_offloads_gets_segments_with_sums() {
    let (mut bench, peer) = offload_bench(&[spec::VIRTIO_NET_F_MRG_RXBUF]);
    bench.post(16);
    let frame = segment(4000);
    give(&peer, &SEGMENTED, &frame);
    give(&peer, &WHOLE, &arp_request());
    let mut payload: Vec<u8> = Vec::new();
    for bytes in [1448, 1448, 1104] {
        let received = bench.receive();
        assert_eq!(received[..12], in_buffers(&WHOLE, 1));
        assert_eq!(received.len(), 12 + HEADERS_BYTES + bytes);
        assert_ne!(received[12 + 50..12 + 52], [0, 0], "a checksum");
        payload.extend(&received[12 + HEADERS_BYTES..]);
    }
    assert!(payload == frame[HEADERS_BYTES..]);
    assert_eq!(bench.receive()[12..], arp_request()[..]);
    assert_eq!(bench.net.metrics().counts().rx_frames, 4);
}

#[test]
fn longest_frame_is_cut_into_smallest_segments_without_loss() {
    let (mut bench, peer) = offload_bench(&[spec::VIRTIO_NET_F_MRG_RXBUF]);
    let mut header = SEGMENTED;
    header[4..6].copy_from_slice(&[1, 0]);
    let payload_bytes = 65_535 - 40;
    give(&peer, &header, &segment(payload_bytes));
    let mut left = payload_bytes;
    while left > 0 {
        bench.post(1);
        let (_, bytes) = bench.queues[0].take_used().expect("a segment");
        let bytes = bytes as usize - 12 - HEADERS_BYTES;
        assert_eq!(bytes, left.min(512));
        left -= bytes;
    }
    assert_eq!(bench.net.metrics().counts().rx_dropped, 0);
}

#[test]
fn packets_whose_header_contradicts_their_frame_are_dropped() {
    let (mut bench, peer) = offload_bench(ACCEPTS_ALL);
    bench.post(8);
    let mut wrong_version = SEGMENTED;
    wrong_version[1] = 4;
    let mut sum_in_address = SEGMENTED;
    sum_in_address[1] = 0;
    sum_in_address[6..9].copy_from_slice(&[14, 0, 12]);
    for header in [wrong_version, sum_in_address] {
        give(&peer, &header, &segment(4000));
    }
    // A packet without a whole frame, and flags that a guest did not negotiate.
    send(peer.as_raw_fd(), &[0; 12 + 13], MsgFlags::empty()).unwrap();
    give(&peer, &[0xfe, 0, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9], &arp_request());
    let received = bench.receive();
    assert_eq!(received[..12], in_buffers(&WHOLE, 1));
    assert_eq!(received[12..], arp_request()[..]);
    assert!(bench.signals.failure.lock().unwrap().is_none());
}

#[test]
fn header_of_the_guest_reaches_the_gateway_if_it_has_offloads() {
    let frame = segment(3000);
    for (features, expected) in [(ACCEPTS_ALL, SEGMENTED), (&ACCEPTS_ALL[..1], WHOLE)] {
        let (mut bench, peer) = offload_bench(features);
        bench.send_with(&SEGMENTED, 1, &frame);
        let sent = wait(|| packet(&peer)).expect("a frame of the guest");
        assert!(sent == [&expected[..], &frame].concat());
        let counts = bench.net.metrics().counts();
        assert_eq!((counts.tx_frames, counts.tx_bytes), (1, frame.len() as u64));
    }
}

#[test]
fn frames_for_a_guests_former_driver_are_dropped() {
    let (mut bench, peer) = offload_bench(ACCEPTS_ALL);
    // Without buffers, the frame waits in the card.
    give(&peer, &SEGMENTED, &segment(4000));
    wait(|| (bench.net.metrics().counts().rx_stalls > 0).then_some(())).expect("a stall");
    bench.net.reset();
    let memory = memory();
    let signals = Arc::new(RecordedSignals::default());
    bench.queues = (0..2).map(|index| DriverQueue::new(&memory, index)).collect();
    bench.memory = memory.clone();
    let activation = Activation {
        memory,
        features: 1 << spec::VIRTIO_NET_F_MRG_RXBUF,
        queues: bench.queues.iter().map(DriverQueue::active).collect(),
        interrupt: signals.clone(),
        resumed: false,
    };
    bench.net.activate(activation).unwrap();
    bench.signals = signals;
    bench.post(4);
    give(&peer, &WHOLE, &arp_request());
    assert_eq!(bench.receive()[12..], arp_request()[..]);
}

#[test]
fn offloads_are_offered_where_the_socket_has_headers_alone() {
    let features = |backend: Backend| {
        Net::new(&Threads::sealed(), "net0", [2; 6], backend)
            .unwrap()
            .features()
    };
    let ((with, _far), (without, _other)) = (sockets(), sockets());
    let (with, without) = (
        features(Backend::Offloads(with)),
        features(Backend::Packets(without)),
    );
    let offered = [
        spec::VIRTIO_NET_F_CSUM,
        spec::VIRTIO_NET_F_GUEST_CSUM,
        spec::VIRTIO_NET_F_GUEST_TSO4,
        spec::VIRTIO_NET_F_GUEST_TSO6,
        spec::VIRTIO_NET_F_GUEST_ECN,
        spec::VIRTIO_NET_F_HOST_TSO4,
        spec::VIRTIO_NET_F_HOST_TSO6,
        spec::VIRTIO_NET_F_HOST_ECN,
    ];
    let bits = offered.iter().fold(0_u64, |bits, feature| bits | 1 << feature);
    assert_eq!((with & bits, without & bits), (bits, 0));
}
