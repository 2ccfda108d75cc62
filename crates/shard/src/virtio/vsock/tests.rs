//! Tests of two connections with a random scheduler, and of the device with a queue that the test drives.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};

use super::Vsock;
use super::connection::{BUFFER_BYTES, Connection};
use super::packet::{HEADER_BYTES, Header, SHUTDOWN_SEND, op};
use crate::memory::GuestRam;
use crate::ports::{self, PENDING_MAX, Ports};
use crate::sandbox::Threads;
use crate::virtio::device::{Activation, RING_FEATURES, VirtioDevice, VirtioId};
use crate::virtio::test_driver::{DriverQueue, RecordedSignals, SIZE, memory};

const TX_BUFFER: u64 = 1 << 20;
const RX_BUFFER: u64 = 2 << 20;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }
}

/// Bytes arrive in order under every schedule; credit is never exceeded (`receive` would refuse).
#[test]
fn two_connections_deliver_all_bytes_in_order_within_credit() {
    for seed in 1..60 {
        let random = &mut Random(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        let mut ends = [Connection::request(), Connection::accept(BUFFER_BYTES, 0)];
        // The REQUEST created the second end; the response carries its credit.
        assert_eq!(ends[0].next_control(), Some((op::REQUEST, 0)));
        let total = 200_000 + random.below(1_000_000);
        let (mut to_send, mut delivered) = ([0; 2], [0; 2]);
        for step in 0.. {
            assert!(
                step < 2_000_000,
                "seed {seed}: stuck at {to_send:?} {delivered:?} of {total}"
            );
            if delivered == [total; 2] {
                break;
            }
            let from = random.below(2);
            let to = 1 - from;
            if random.below(2) == 0 {
                let waiting = ends[to].waiting();
                let count = random.below(waiting.len() + 1);
                for (offset, byte) in waiting[..count].iter().enumerate() {
                    assert_eq!(*byte, ((delivered[to] + offset) * 7 + to) as u8, "seed {seed}");
                }
                ends[to].forwarded(count);
                delivered[to] += count;
                continue;
            }
            let (operation, flags, payload) = match ends[from].next_control() {
                Some((operation, flags)) => (operation, flags, Vec::new()),
                None => {
                    let most = ends[from].room().min(total - to_send[from]).min(65_536);
                    if most == 0 {
                        continue;
                    }
                    let count = 1 + random.below(most);
                    let bytes = (0..count)
                        .map(|offset| ((to_send[from] + offset) * 7 + to) as u8)
                        .collect();
                    ends[from].sent(count);
                    to_send[from] += count;
                    (op::RW, 0, bytes)
                }
            };
            let (alloc, forwarded) = ends[from].credit();
            ends[to]
                .receive(operation, flags, alloc, forwarded, &payload)
                .unwrap_or_else(|_| {
                    panic!(
                        "seed {seed}: operation {operation} of {} bytes refused",
                        payload.len()
                    );
                });
        }
    }
}

#[test]
fn a_guest_that_ignores_credit_is_refused() {
    let mut connection = Connection::accept(0, 0);
    let payload = vec![0; 65_536];
    assert!(connection.receive(op::RW, 0, 0, 0, &payload).is_ok());
    assert!(connection.receive(op::RW, 0, 0, 0, &payload).is_ok());
    assert!(connection.receive(op::RW, 0, 0, 0, &[0]).is_err());
    assert_eq!(connection.room(), 0);
    // A forwarded count from the future gives no credit beyond the buffer.
    let _ = connection.receive(op::CREDIT_UPDATE, 0, 100, 1000, &[]);
    assert!(connection.room() <= 100);
}

#[test]
fn bytes_sent_before_a_shutdown_still_reach_the_host() {
    let mut connection = Connection::accept(100, 0);
    connection.receive(op::RW, 0, 100, 0, b"last words").unwrap();
    connection.receive(op::SHUTDOWN, 3, 100, 0, &[]).unwrap();
    assert_eq!(connection.next_control(), Some((op::RST, 0)));
    assert!(!connection.is_over());
    connection.forwarded(10);
    assert!(connection.guest_sent_all() && connection.is_over());
}

struct Bench {
    memory: GuestRam,
    signals: Arc<RecordedSignals>,
    device: Vsock,
    rx: DriverQueue,
    tx: DriverQueue,
    directory: tempfile::TempDir,
    /// The monitor's end of the socket.
    monitor: OwnedFd,
    rx_buffer_bytes: u32,
    posted: u64,
    forwarded: u32,
}

fn bench() -> Bench {
    bench_with(8192)
}

/// Creates the device with receive buffers of `rx_buffer_bytes`, at most 8192.
fn bench_with(rx_buffer_bytes: u32) -> Bench {
    let directory = tempfile::tempdir().unwrap();
    let memory = memory();
    let signals = Arc::new(RecordedSignals::default());
    let listener = UnixListener::bind(directory.path().join("listener")).unwrap();
    let (monitor, shard) = ports::pair().unwrap();
    let ports = Some(Ports::new(shard));
    let mut device = Vsock::new(&Threads::sealed(), 3, listener, ports).unwrap();
    let (rx, tx) = (DriverQueue::new(&memory, 0), DriverQueue::new(&memory, 1));
    device
        .activate(Activation {
            memory: memory.clone(),
            features: 0,
            queues: vec![rx.active(), tx.active()],
            interrupt: signals.clone(),
            resumed: false,
        })
        .unwrap();
    let mut bench = Bench {
        memory,
        signals,
        device,
        rx,
        tx,
        directory,
        monitor,
        rx_buffer_bytes,
        posted: 0,
        forwarded: 0,
    };
    for _ in 0..SIZE {
        bench.post();
    }
    bench
}

impl Bench {
    /// Replies to one request as the monitor does.
    fn answer(&self) {
        let directory = File::open(self.directory.path()).unwrap();
        ports::serve_one(self.monitor.as_fd(), directory.as_fd()).unwrap();
    }

    fn post(&mut self) {
        let address = RX_BUFFER + self.posted % u64::from(SIZE) * 8192;
        self.rx.add(&[(address, self.rx_buffer_bytes)], true);
        self.posted += 1;
    }

    fn packet(&mut self) -> (Header, Vec<u8>) {
        let (head, length) = self.rx.take_used().expect("a packet for the guest");
        let mut bytes = vec![0; length as usize];
        self.memory
            .read_slice(&mut bytes, GuestAddress(RX_BUFFER + u64::from(head) * 8192))
            .unwrap();
        self.post();
        let header = Header::read(bytes[..HEADER_BYTES].try_into().unwrap());
        assert_eq!((header.src_cid, header.dst_cid, header.kind), (2, 3, 1));
        (header, bytes[HEADER_BYTES..].to_vec())
    }

    fn send(&mut self, ports: (u32, u32), operation: u16, flags: u32, payload: &[u8]) {
        let header = Header {
            src_cid: 3,
            dst_cid: 2,
            src_port: ports.1,
            dst_port: ports.0,
            len: payload.len() as u32,
            kind: 1,
            op: operation,
            flags,
            buf_alloc: 65_536,
            fwd_cnt: self.forwarded,
        };
        self.memory
            .write_slice(&header.bytes(), GuestAddress(TX_BUFFER))
            .unwrap();
        self.memory
            .write_slice(payload, GuestAddress(TX_BUFFER + 44))
            .unwrap();
        let half = payload.len() as u32 / 2;
        let rest = payload.len() as u32 - half;
        let at = TX_BUFFER + 44;
        self.tx.add(
            &[(TX_BUFFER, 44), (at, half), (at + u64::from(half), rest)],
            false,
        );
        self.tx.take_used().expect("the packet is taken");
    }
}

#[test]
fn a_client_of_the_host_reaches_the_guest() {
    let mut bench = bench();
    let mut client = UnixStream::connect(bench.directory.path().join("listener")).unwrap();
    client.write_all(b"CONN").unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    client.write_all(b"ECT 52\nbytes right behind").unwrap();
    let (header, _) = bench.packet();
    assert_eq!((header.op, header.dst_port), (op::REQUEST, 52));
    let ports = (header.src_port, 52);
    bench.send(ports, op::RESPONSE, 0, &[]);
    let mut line = vec![0; format!("OK {}\n", ports.0).len()];
    client.read_exact(&mut line).unwrap();
    assert_eq!(line, format!("OK {}\n", ports.0).into_bytes());
    let (header, payload) = bench.packet();
    assert_eq!((header.op, &payload[..]), (op::RW, &b"bytes right behind"[..]));

    // A megabyte to the guest, which grants credit as it receives.
    bench.forwarded = payload.len() as u32;
    let sent: Vec<u8> = (0..1 << 20).map(|index: u32| ((index * 31) >> 3) as u8).collect();
    let (expected, mut got) = (sent.clone(), Vec::new());
    let mut writer = client.try_clone().unwrap();
    let thread = std::thread::spawn(move || writer.write_all(&sent).unwrap());
    while got.len() < expected.len() {
        let (header, payload) = bench.packet();
        assert_eq!(header.op, op::RW);
        bench.forwarded += payload.len() as u32;
        got.extend(payload);
        bench.send(ports, op::CREDIT_UPDATE, 0, &[]);
    }
    assert!(got == expected);
    thread.join().unwrap();

    // Half-close, in both directions.
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let (header, _) = bench.packet();
    assert_eq!((header.op, header.flags), (op::SHUTDOWN, SHUTDOWN_SEND));
    bench.send(ports, op::RW, 0, b"answer");
    bench.send(ports, op::SHUTDOWN, 3, &[]);
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"answer");
    assert_eq!(bench.packet().0.op, op::RST);
}

#[test]
fn a_guest_reaches_a_socket_of_the_host() {
    let mut bench = bench();
    let host = UnixListener::bind(bench.directory.path().join("1024")).unwrap();
    bench.send((1024, 77), op::REQUEST, 0, &[]);
    bench.answer();
    let (mut server, _) = host.accept().unwrap();
    assert_eq!(bench.packet().0.op, op::RESPONSE);
    bench.send((1024, 77), op::RW, 0, b"hello");
    let mut hello = [0; 5];
    server.read_exact(&mut hello).unwrap();
    assert_eq!(&hello, b"hello");
    server.write_all(b"world").unwrap();
    drop(server);
    assert_eq!(bench.packet().1, b"world");
    assert_eq!(
        (bench.packet().0.op, bench.device.metrics().counts().opened),
        (op::SHUTDOWN, 1)
    );
}

#[test]
fn connection_to_a_port_without_a_listener_is_reset() {
    let mut bench = bench();
    for operation in [op::REQUEST, op::RW, op::RESPONSE, 99] {
        bench.send((9, 77), operation, 0, &[]);
        if operation == op::REQUEST {
            bench.answer();
        }
        assert_eq!(bench.packet().0.op, op::RST);
    }
}

#[test]
fn guest_that_dropped_a_request_receives_the_next_socket_only() {
    let mut bench = bench();
    let hosts = [1024, 1025].map(|port: u32| {
        let path = bench.directory.path().join(port.to_string());
        UnixListener::bind(path).unwrap()
    });
    bench.send((1024, 77), op::REQUEST, 0, &[]);
    bench.send((1024, 77), op::RST, 0, &[]);
    bench.send((1025, 78), op::REQUEST, 0, &[]);
    bench.answer();
    bench.answer();
    let header = bench.packet().0;
    assert_eq!(
        (header.op, header.src_port, header.dst_port),
        (op::RESPONSE, 1025, 78)
    );
    // The socket of the dropped request is closed.
    assert_eq!(hosts[0].accept().unwrap().0.read(&mut [0]).unwrap(), 0);
    bench.send((1025, 78), op::RW, 0, b"hello");
    let mut hello = [0; 5];
    hosts[1].accept().unwrap().0.read_exact(&mut hello).unwrap();
    assert_eq!(&hello, b"hello");
}

#[test]
fn request_that_a_monitor_lost_is_reset_and_the_next_gets_its_own_socket() {
    let mut bench = bench();
    let hosts = [1024, 1025].map(|port: u32| {
        let path = bench.directory.path().join(port.to_string());
        UnixListener::bind(path).unwrap()
    });
    bench.send((1024, 77), op::REQUEST, 0, &[]);
    // The monitor dies with the request, and its successor uses the same socket.
    let mut question = [0; 4];
    nix::unistd::read(&bench.monitor, &mut question).unwrap();
    assert_eq!(u32::from_le_bytes(question), 1024);
    bench.send((1025, 78), op::REQUEST, 0, &[]);
    bench.answer();
    let header = bench.packet().0;
    assert_eq!((header.op, header.src_port, header.dst_port), (op::RST, 1024, 77));
    let header = bench.packet().0;
    assert_eq!(
        (header.op, header.src_port, header.dst_port),
        (op::RESPONSE, 1025, 78)
    );
    bench.send((1025, 78), op::RW, 0, b"hello");
    let mut hello = [0; 5];
    hosts[1].accept().unwrap().0.read_exact(&mut hello).unwrap();
    assert_eq!(&hello, b"hello");
}

#[test]
fn guest_with_too_many_requests_is_refused_and_all_are_without_a_monitor() {
    let mut bench = bench();
    for port in 0..PENDING_MAX as u32 {
        bench.send((port, 77), op::REQUEST, 0, &[]);
    }
    bench.send((7777, 77), op::REQUEST, 0, &[]);
    let header = bench.packet().0;
    assert_eq!((header.op, header.src_port), (op::RST, 7777));
    bench.monitor = ports::pair().unwrap().0;
    for port in 0..PENDING_MAX as u32 {
        let header = bench.packet().0;
        assert_eq!((header.op, header.src_port), (op::RST, port));
    }
    bench.send((1, 77), op::REQUEST, 0, &[]);
    assert_eq!(bench.packet().0.op, op::RST);
}

#[test]
fn client_with_an_invalid_first_line_is_closed() {
    let bench = bench();
    for line in [
        "GET / HTTP/1.0\r\n",
        "CONNECT 4294967296\n",
        "CONNECT -1\n",
        "CONNECT \n",
        "CONNECT 11111111111111111111",
    ] {
        let mut client = UnixStream::connect(bench.directory.path().join("listener")).unwrap();
        client.write_all(line.as_bytes()).unwrap();
        // End of file, or a reset because the line was not read to its end.
        assert!(!matches!(client.read(&mut [0]), Ok(1)), "{line:?}");
    }
}

#[test]
fn broken_packets_request_a_reset() {
    for (length, claimed) in [(43, 0), (44, 1), (100, 57), (44 + 70_000, 70_000)] {
        let mut bench = bench();
        let header = Header {
            src_cid: 3,
            dst_cid: 2,
            len: claimed,
            kind: 1,
            op: op::RW,
            ..Header::default()
        };
        bench
            .memory
            .write_slice(&header.bytes(), GuestAddress(TX_BUFFER))
            .unwrap();
        bench.tx.add(&[(TX_BUFFER, length)], false);
        println!("{}", bench.signals.failure());
    }
}

#[test]
fn receive_buffers_without_room_for_payload_request_a_reset() {
    let mut bench = bench_with(HEADER_BYTES as u32);
    let host = UnixListener::bind(bench.directory.path().join("1024")).unwrap();
    bench.send((1024, 77), op::REQUEST, 0, &[]);
    bench.answer();
    let server = host.accept().map(|(mut server, _)| server.write_all(b"payload"));
    assert!(server.is_ok());
    assert!(bench.signals.failure().contains("buffer"));
}

#[test]
fn socket_device_has_its_context_id_and_three_queues() {
    let bench = bench();
    assert_eq!(bench.device.id(), VirtioId::Vsock);
    assert_eq!(bench.device.queue_sizes(), [256, 256, 16]);
    assert_eq!(bench.device.features(), RING_FEATURES);
    let mut config = [0xFF; 10];
    bench.device.read_config(0, &mut config);
    assert_eq!(config, [3, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_header_is_read_as_it_was_written_field_by_field() {
    let header = Header {
        src_cid: 0x0102_0304_0506_0708,
        dst_cid: 0x1112_1314_1516_1718,
        src_port: 0x2122_2324,
        dst_port: 0x3132_3334,
        len: 0x4142_4344,
        kind: 0x5152,
        op: 0x6162,
        flags: 0x7172_7374,
        buf_alloc: 0x8182_8384,
        fwd_cnt: 0x9192_9394,
    };
    let bytes = header.bytes();
    assert_eq!(Header::read(&bytes), header);
    assert_eq!(
        (bytes[0], bytes[7], bytes[24], bytes[28], bytes[43]),
        (8, 1, 0x44, 0x52, 0x91)
    );
}

#[test]
fn each_counter_of_the_socket_device_is_reported_under_its_name() {
    let metrics = super::metrics::VsockMetrics::default();
    let counters = [
        ("opened", &metrics.opened),
        ("refused", &metrics.refused),
        ("rx_bytes", &metrics.rx_bytes),
        ("tx_bytes", &metrics.tx_bytes),
    ];
    for (value, (_, counter)) in (1..).zip(&counters) {
        super::metrics::add(counter, value);
    }
    let reported = serde_json::to_value(metrics.counts()).unwrap();
    for (value, (name, _)) in (1..).zip(&counters) {
        assert_eq!(reported[*name], value, "{name}");
    }
}
