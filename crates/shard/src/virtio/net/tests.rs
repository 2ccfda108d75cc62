//! Tests of the card with a queue that the test drives; those with a TAP device need root and /dev/net/tun.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use virtio_bindings::virtio_net as spec;
use vm_memory::{Bytes, GuestAddress};

use super::{Backend, Net};
use crate::memory::GuestRam;
use crate::sandbox::Threads;
use crate::virtio::device::{Activation, VirtioDevice, VirtioId};
use crate::virtio::test_driver::{DriverQueue, RecordedSignals, memory, wait};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(super) const TX_BUFFER: u64 = 1 << 20;
const RX_BUFFER: u64 = 2 << 20;

pub(super) struct Bench {
    pub(super) memory: GuestRam,
    pub(super) signals: Arc<RecordedSignals>,
    pub(super) net: Net,
    pub(super) queues: Vec<DriverQueue>,
}

pub(super) fn bench(backend: Backend, queues: u16, features: &[u32]) -> Bench {
    let memory = memory();
    let signals = Arc::new(RecordedSignals::default());
    let mut net = Net::new(&Threads::sealed(), "net0", MAC, backend).unwrap();
    let queues: Vec<_> = (0..queues)
        .map(|index| DriverQueue::new(&memory, index))
        .collect();
    net.activate(Activation {
        memory: memory.clone(),
        features: features.iter().fold(0, |bits, bit| bits | 1 << bit),
        queues: queues.iter().map(DriverQueue::active).collect(),
        interrupt: signals.clone(),
        resumed: false,
    })
    .unwrap();
    Bench {
        memory,
        signals,
        net,
        queues,
    }
}

fn stream_bench() -> (Bench, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    (
        bench(Backend::Stream(ours.into()), 2, &[spec::VIRTIO_NET_F_MRG_RXBUF]),
        theirs,
    )
}

impl Bench {
    pub(super) fn send(&mut self, queue: usize, frame: &[u8]) {
        self.send_with(&[0; 12], queue, frame);
    }

    pub(super) fn send_with(&mut self, header: &[u8; 12], queue: usize, frame: &[u8]) {
        self.memory.write_slice(header, GuestAddress(TX_BUFFER)).unwrap();
        self.memory
            .write_slice(frame, GuestAddress(TX_BUFFER + 12))
            .unwrap();
        // Cut into pieces of odd sizes.
        let length = frame.len() as u32;
        self.queues[queue].add(
            &[(TX_BUFFER, 7), (TX_BUFFER + 7, 12), (TX_BUFFER + 19, length - 7)],
            false,
        );
    }

    pub(super) fn receive(&mut self) -> Vec<u8> {
        let (head, length) = self.queues[0].take_used().expect("a frame for the guest");
        let mut frame = vec![0; length as usize];
        self.memory
            .read_slice(&mut frame, GuestAddress(RX_BUFFER + u64::from(head) * 4096))
            .unwrap();
        frame
    }

    pub(super) fn post(&mut self, buffers: u64) {
        for index in 0..buffers {
            self.queues[0].add(&[(RX_BUFFER + index * 4096, 4096)], true);
        }
    }
}

pub(super) fn arp_request() -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(MAC);
    frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame.extend(MAC);
    frame.extend([10, 9, 0, 2, 0, 0, 0, 0, 0, 0, 10, 9, 0, 1]);
    frame.resize(60, 0);
    frame
}

fn with_tap(kind: &str, test: impl FnOnce() + Send + 'static) {
    let kind = kind.to_owned();
    let thread = std::thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
            .expect("this test needs root (CAP_SYS_ADMIN) to make a network namespace");
        let add = format!("tuntap add tap0 mode tap{kind}");
        for line in [&*add, "addr add 10.9.0.1/24 dev tap0", "link set tap0 up"] {
            let status = Command::new("ip")
                .args(line.split(' '))
                .status()
                .expect("this test needs iproute2");
            assert!(status.success(), "ip {line}");
        }
        test();
    });
    thread.join().unwrap();
}

/// Waits until the kernel has noticed that the TAP device is open: before, it sends nothing.
fn wait_until_up() {
    wait(|| {
        let shown = Command::new("ip").args(["-br", "link", "show", "tap0"]).output();
        let shown = String::from_utf8(shown.unwrap().stdout).unwrap();
        (shown.split_whitespace().nth(1) == Some("UP")).then_some(())
    })
    .expect("the TAP device should be up");
}

fn is_arp_reply(frame: &[u8]) -> bool {
    frame[12 + 12..12 + 14] == [8, 6] && frame[12 + 20..12 + 22] == [0, 2]
}

#[test]
fn the_kernel_answers_a_guest_through_a_tap_device() {
    with_tap("", || {
        let files = subnet::tap::open("tap0", 1).unwrap();
        let offloads = [
            spec::VIRTIO_NET_F_MRG_RXBUF,
            spec::VIRTIO_NET_F_GUEST_CSUM,
            spec::VIRTIO_NET_F_GUEST_TSO4,
        ];
        let mut bench = bench(Backend::Tap(files), 2, &offloads);
        bench.post(40);
        wait_until_up();
        bench.send(1, &arp_request());
        assert!(
            bench.queues[1].take_used().is_some(),
            "{:?}",
            bench.signals.failure
        );
        let reply = wait(|| Some(bench.receive()).filter(|frame| is_arp_reply(frame))).unwrap();
        assert_eq!(reply[10..12], [1, 0], "num_buffers");
    });
}

#[test]
fn queue_pairs_are_switched_by_the_control_queue() {
    with_tap(" multi_queue", || {
        let files = subnet::tap::open("tap0", 2).unwrap();
        let features = [
            spec::VIRTIO_NET_F_MQ,
            spec::VIRTIO_NET_F_CTRL_VQ,
            spec::VIRTIO_NET_F_MRG_RXBUF,
        ];
        let mut bench = bench(Backend::Tap(files), 5, &features);
        for (pairs, answer) in [(2_u16, 0_u8), (1, 0), (2, 0), (3, 1), (0, 1)] {
            let mut command = vec![4, 0];
            command.extend(pairs.to_le_bytes());
            bench
                .memory
                .write_slice(&command, GuestAddress(TX_BUFFER))
                .unwrap();
            bench
                .memory
                .write_obj(0xff_u8, GuestAddress(TX_BUFFER + 64))
                .unwrap();
            let at = 2 * (u16::from(answer) + pairs) % 32;
            bench.queues[4].descriptor(at, TX_BUFFER, 4, 1, at + 1);
            bench.queues[4].descriptor(at + 1, TX_BUFFER + 64, 1, 2, 0);
            bench.queues[4].offer(at);
            bench.queues[4].take_used().expect("an answer");
            let status: u8 = bench.memory.read_obj(GuestAddress(TX_BUFFER + 64)).unwrap();
            assert_eq!(status, answer, "{pairs} pairs: {:?}", bench.signals.failure);
        }
        // The second pair sends, too.
        bench.send(3, &arp_request());
        assert!(bench.queues[3].take_used().is_some());
        assert_eq!(bench.net.metrics().counts().tx_frames, 1);
    });
}

#[test]
fn frames_cross_a_stream_both_ways() {
    let (mut bench, mut peer) = stream_bench();
    bench.post(8);
    bench.send(1, &arp_request());
    let mut sent = [0; 64];
    peer.read_exact(&mut sent).unwrap();
    assert_eq!(sent[..4], 60_u32.to_be_bytes());
    assert_eq!(sent[4..], arp_request()[..]);
    // A frame in two pieces, and two frames at once.
    peer.write_all(&sent[..3]).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    peer.write_all(&[&sent[3..], &sent[..]].concat()).unwrap();
    for _ in 0..2 {
        assert_eq!(bench.receive()[12..], arp_request()[..]);
    }
}

fn packet_bench() -> (Bench, OwnedFd) {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
    (
        bench(Backend::Packets(ours), 2, &[spec::VIRTIO_NET_F_MRG_RXBUF]),
        theirs,
    )
}

pub(super) fn packet(socket: &OwnedFd) -> Option<Vec<u8>> {
    let mut frame = vec![0; 1 << 17];
    let length = recv(socket.as_raw_fd(), &mut frame, MsgFlags::empty()).ok()?;
    frame.truncate(length);
    Some(frame)
}

#[test]
fn frames_cross_a_packet_socket_whole_both_ways_and_packets_that_are_none_are_dropped() {
    let (mut bench, peer) = packet_bench();
    bench.post(40);
    bench.send(1, &arp_request());
    let sent = wait(|| packet(&peer)).expect("a frame of the guest");
    assert_eq!(sent, arp_request());
    let longest: Vec<u8> = (0..14 + 4 + 65_535_u32).map(|place| place as u8).collect();
    let too_long = vec![1; longest.len() + 1];
    for frame in [&[1; 13][..], &arp_request(), &too_long, &longest, &arp_request()] {
        let sent = wait(|| send(peer.as_raw_fd(), frame, MsgFlags::empty()).ok());
        assert_eq!(sent, Some(frame.len()));
    }
    assert_eq!(bench.receive()[12..], arp_request()[..]);
    let counts = wait(|| Some(bench.net.metrics().counts()).filter(|counts| counts.rx_frames == 3));
    let counts = counts.expect("three whole frames");
    assert_eq!(counts.rx_bytes, 2 * 60 + longest.len() as u64);
    assert!(bench.signals.failure.lock().unwrap().is_none());
}

/// The monitor keeps a copy of the gateway's end, and gives it to the next gateway.
#[test]
fn card_outlives_the_process_at_the_other_end_of_its_packet_socket() {
    let (mut bench, peer) = packet_bench();
    let kept = peer.try_clone().unwrap();
    drop(peer);
    bench.post(2);
    // More than the socket's queue holds.
    const FRAMES: usize = 700;
    for _ in 0..FRAMES {
        bench.send(1, &arp_request());
        bench.queues[1]
            .take_used()
            .expect("the buffer of a frame that waits");
    }
    let mut status = [0; 2];
    bench.net.read_config(6, &mut status);
    assert_eq!(status, [1, 0], "the link stays up");
    for frame in 0..FRAMES {
        assert_eq!(wait(|| packet(&kept)), Some(arp_request()), "frame {frame}");
    }
    bench.send(1, &arp_request());
    assert_eq!(wait(|| packet(&kept)), Some(arp_request()));
    drop(kept);
    wait(|| (bench.signals.configs.load(Ordering::SeqCst) > 0).then_some(()))
        .expect("the link goes down with the last copy");
}

#[test]
fn frames_wait_for_a_guest_without_buffers() {
    let (mut bench, mut peer) = stream_bench();
    let frame = [&60_u32.to_be_bytes()[..], &arp_request()].concat();
    for _ in 0..20 {
        peer.write_all(&frame).unwrap();
    }
    wait(|| (bench.net.metrics().counts().rx_stalls > 0).then_some(())).expect("a stall");
    bench.post(20);
    for _ in 0..20 {
        assert_eq!(bench.receive().len(), 72);
    }
    // A stalled card does not spin.
    assert!(bench.net.metrics().counts().rx_stalls < 30);
}

#[test]
fn the_link_goes_down_with_its_peer() {
    let (mut bench, peer) = stream_bench();
    drop(peer);
    wait(|| (bench.signals.configs.load(Ordering::SeqCst) > 0).then_some(()))
        .expect("a configuration change");
    let mut status = [0xff; 2];
    bench.net.read_config(6, &mut status);
    assert_eq!(status, [0, 0]);
    bench.send(1, &arp_request());
    bench.queues[1]
        .take_used()
        .expect("the guest receives its buffer again");
    assert_eq!(bench.net.metrics().counts().tx_dropped, 1);
    assert!(bench.signals.failure.lock().unwrap().is_none());
    bench.net.reset();
}

#[test]
fn broken_chains_request_a_reset() {
    type Break = fn(&mut DriverQueue);
    let breaks: [(&str, Break); 8] = [
        ("loop", |queue| queue.descriptor(0, TX_BUFFER, 100, 1, 0)),
        ("wild address", |queue| {
            queue.descriptor(0, u64::MAX - 50, 100, 0, 0)
        }),
        ("outside memory", |queue| queue.descriptor(0, 8 << 20, 100, 0, 0)),
        ("wild next", |queue| queue.descriptor(0, TX_BUFFER, 100, 1, 9999)),
        ("writable", |queue| queue.descriptor(0, TX_BUFFER, 100, 2, 0)),
        ("no header", |queue| queue.descriptor(0, TX_BUFFER, 11, 0, 0)),
        ("huge", |queue| queue.descriptor(0, TX_BUFFER, 1 << 20, 0, 0)),
        ("indirect table outside memory", |queue| {
            queue.descriptor(0, u64::MAX - 15, 16, 4, 0)
        }),
    ];
    for (name, broken) in breaks {
        let (mut bench, _peer) = stream_bench();
        broken(&mut bench.queues[1]);
        bench.queues[1].offer(0);
        println!("{name}: {}", bench.signals.failure());
        bench.net.reset();
    }
    let (mut bench, _peer) = stream_bench();
    bench.queues[1].offer(9999);
    bench.signals.failure();
}

#[test]
fn card_offers_its_address_link_queues_and_mtu() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let make = |socket: UnixStream| Net::new(&Threads::sealed(), "net0", MAC, Backend::Stream(socket.into()));
    let plain = make(ours.try_clone().unwrap()).unwrap();
    assert_eq!(plain.id(), VirtioId::Net);
    assert_eq!(plain.queue_sizes(), [256, 256], "one pair has no control queue");
    let has = |net: &Net, feature: u32| net.features() & 1 << feature != 0;
    assert!(has(&plain, spec::VIRTIO_NET_F_MAC) && !has(&plain, spec::VIRTIO_NET_F_MTU));
    assert!(!has(&plain, spec::VIRTIO_NET_F_MQ) && !has(&plain, spec::VIRTIO_NET_F_CTRL_VQ));
    let mut config = [0xFF; 14];
    plain.read_config(0, &mut config);
    assert_eq!(config, [2, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0]);
    let large = make(ours).unwrap().with_mtu(9000);
    assert!(has(&large, spec::VIRTIO_NET_F_MTU));
    large.read_config(10, &mut config);
    assert_eq!(config[..2], 9000_u16.to_le_bytes());
    let smallest = large.with_mtu(1);
    smallest.read_config(10, &mut config);
    assert_eq!(config[..2], [68, 0], "no link of IPv4 has less");
}

#[test]
fn each_counter_of_a_card_is_reported_under_its_name() {
    let metrics = super::NetMetrics::default();
    let counters = [
        ("rx_frames", &metrics.rx_frames),
        ("rx_bytes", &metrics.rx_bytes),
        ("rx_dropped", &metrics.rx_dropped),
        ("rx_stalls", &metrics.rx_stalls),
        ("tx_frames", &metrics.tx_frames),
        ("tx_bytes", &metrics.tx_bytes),
        ("tx_dropped", &metrics.tx_dropped),
    ];
    for (value, (_, counter)) in (1..).zip(&counters) {
        super::metrics::add(counter, value);
    }
    let reported = serde_json::to_value(metrics.counts()).unwrap();
    for (value, (name, _)) in (1..).zip(&counters) {
        assert_eq!(reported[*name], value, "{name}");
    }
}
