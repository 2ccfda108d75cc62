use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use folders::packet::{
    DATA_BYTES_MAX, PACKET_BYTES_MAX, REPLY_HEADER_BYTES, REQUEST_HEADER_BYTES, ReplyHeader, RequestHeader,
    lent_file, opcode, set_u32_at, set_unique,
};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recv, send, sendmsg, setsockopt, socketpair,
    sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};
use vm_memory::{Bytes, GuestAddress};

use super::Fs;
use crate::memory::GuestRam;
use crate::sandbox::Threads;
use crate::sharing::{Advice, FolderSharing, Mapper};
use crate::virtio::device::RING_FEATURES;
use crate::virtio::test_driver::{DriverQueue, RecordedSignals, memory, wait};
use crate::virtio::{Activation, VirtioDevice, VirtioId};

/// Buffers of the driver: the request, and the reply.
const REQUEST: u64 = 0x10_0000;
const REPLY: u64 = 0x40_0000;
const WRITABLE: u16 = 2;
const NEXT: u16 = 1;

struct Started {
    device: Fs,
    urgent: DriverQueue,
    queue: DriverQueue,
    signals: Arc<RecordedSignals>,
    memory: GuestRam,
    /// The other end of the device's socket.
    server: Option<OwnedFd>,
    log: Arc<Mutex<Vec<String>>>,
    descriptor: u16,
}

impl Started {
    fn new() -> Self {
        Self::with(memory(), None)
    }

    fn with(memory: GuestRam, sharing: Option<FolderSharing>) -> Self {
        let (urgent, queue) = (DriverQueue::new(&memory, 0), DriverQueue::new(&memory, 1));
        let (socket, server) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .unwrap();
        setsockopt(&server, sockopt::ReceiveTimeout, &TimeVal::seconds(20)).unwrap();
        let log = Arc::<Mutex<Vec<String>>>::default();
        let lines = log.clone();
        let log_line = Arc::new(move |line: &str| lines.lock().unwrap().push(line.to_owned()));
        let device = Fs::new(&Threads::sealed(), "data", socket, sharing, log_line).unwrap();
        let mut started = Self {
            device,
            urgent,
            queue,
            signals: Arc::default(),
            memory,
            server: Some(server),
            log,
            descriptor: 0,
        };
        started.activate();
        started
    }

    fn activate(&mut self) {
        let activation = Activation {
            memory: self.memory.clone(),
            features: 0,
            queues: vec![self.urgent.active(), self.queue.active()],
            interrupt: self.signals.clone(),
            resumed: false,
        };
        self.device.activate(activation).unwrap();
    }

    /// Offers a request of `length` bytes with room for a reply.
    fn offer(&mut self, operation: u32, unique: u64, length: usize, room: u32) {
        let reply = REPLY + u64::from(self.descriptor / 2 % 4) * 0x4_0000;
        self.offer_at(operation, unique, length, reply, room);
    }

    /// The same, with the room at an address.
    fn offer_at(&mut self, operation: u32, unique: u64, length: usize, reply: u64, room: u32) {
        let mut header = vec![0; REQUEST_HEADER_BYTES];
        set_u32_at(&mut header, 0, length as u32);
        set_u32_at(&mut header, 4, operation);
        set_unique(&mut header, unique);
        let slot = u64::from(self.descriptor / 2 % 4);
        let request = REQUEST + slot * 0x4_0000;
        self.memory
            .write_slice(&header[..length.min(header.len())], GuestAddress(request))
            .unwrap();
        let head = self.descriptor;
        let more = if room > 0 { NEXT } else { 0 };
        self.queue
            .descriptor(head, request, length as u32, more, head + 1);
        self.queue.descriptor(head + 1, reply, room, WRITABLE, 0);
        self.descriptor = (head + 2) % 64;
        self.queue.offer(head);
    }

    /// Receives a request as the folder's process does.
    fn receive(&self) -> Vec<u8> {
        let mut packet = vec![0; 2 * PACKET_BYTES_MAX];
        let socket = self.server.as_ref().unwrap().as_raw_fd();
        let length = recv(socket, &mut packet, MsgFlags::empty()).unwrap();
        packet.truncate(length);
        packet
    }

    fn has_request(&self) -> bool {
        let socket = self.server.as_ref().unwrap().as_raw_fd();
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK;
        recv(socket, &mut [0], flags).is_ok()
    }

    fn answer(&self, bytes: &[u8]) {
        let socket = self.server.as_ref().unwrap().as_raw_fd();
        send(socket, bytes, MsgFlags::MSG_NOSIGNAL).unwrap();
    }

    /// Answers a request with data.
    fn answer_with(&self, unique: u64, data: &[u8]) {
        let header = ReplyHeader {
            length: (REPLY_HEADER_BYTES + data.len()) as u32,
            error: 0,
            unique,
        };
        self.answer(&[&header.bytes(), data].concat());
    }

    /// Returns what the guest gets: the length, and the header.
    fn used(&mut self) -> (u32, Option<ReplyHeader>, Vec<u8>) {
        let (head, length) = self.queue.take_used().expect("a used chain");
        let reply = REPLY + u64::from(head / 2 % 4) * 0x4_0000;
        let mut bytes = vec![0; length as usize];
        self.memory.read_slice(&mut bytes, GuestAddress(reply)).unwrap();
        (length, ReplyHeader::of_packet(&bytes), bytes)
    }

    fn status(&self, counter: &str) -> serde_json::Value {
        self.device.status()[counter].clone()
    }

    fn lines(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }
}

fn unique_of(packet: &[u8]) -> u64 {
    RequestHeader::read(packet).unwrap().unique
}

const EIO: Option<i32> = Some(-libc::EIO);

#[test]
fn request_and_reply_pass_with_the_guests_id() {
    let mut started = Started::new();
    started.offer(opcode::GETATTR, 77, 56, 4096);
    let request = started.receive();
    assert_eq!(request.len(), 56);
    let header = RequestHeader::read(&request).unwrap();
    assert_eq!((header.opcode, header.length), (opcode::GETATTR, 56));
    started.answer_with(header.unique, b"data");
    let (length, reply, bytes) = started.used();
    assert_eq!((length, reply.unwrap().unique, reply.unwrap().error), (20, 77, 0));
    assert_eq!(&bytes[16..], b"data");
    assert!(wait(|| (started.status("replies") == 1).then_some(())).is_some());
    assert_eq!(started.status("request_bytes"), 56);
    assert_eq!(started.status("server"), "running");
}

#[test]
fn replies_come_in_any_order_and_equal_ids_of_a_guest_are_kept_apart() {
    let mut started = Started::new();
    started.offer(opcode::GETATTR, 5, 40, 64);
    started.offer(opcode::GETATTR, 5, 40, 64);
    let (first, second) = (started.receive(), started.receive());
    assert_ne!(unique_of(&first), unique_of(&second));
    started.answer_with(unique_of(&second), b"2");
    started.answer_with(unique_of(&first), b"1");
    assert_eq!(started.used().2[16..], *b"2");
    assert_eq!(started.used().2[16..], *b"1");
}

#[test]
fn longest_packets_pass_both_ways() {
    let mut started = Started::new();
    started.offer(opcode::WRITE, 1, PACKET_BYTES_MAX, 64);
    let request = started.receive();
    assert_eq!(request.len(), PACKET_BYTES_MAX);
    started.answer_with(unique_of(&request), &[0; 8]);
    assert_eq!(started.used().0, 24);
    started.offer(opcode::READ, 2, 80, 0x4_0000);
    let request = started.receive();
    started.answer_with(unique_of(&request), &vec![7; DATA_BYTES_MAX]);
    let (length, _, bytes) = started.used();
    assert_eq!(length as usize, REPLY_HEADER_BYTES + DATA_BYTES_MAX);
    assert!(bytes[16..].iter().all(|byte| *byte == 7));
}

#[test]
fn request_that_fits_no_packet_gets_an_error_and_does_not_reach_the_process() {
    let mut started = Started::new();
    started.offer(opcode::WRITE, 9, PACKET_BYTES_MAX + 1, 64);
    let (_, reply, _) = started.used();
    assert_eq!(reply.map(|reply| reply.error), EIO);
    assert!(!started.has_request());
}

#[test]
fn reply_without_room_is_an_error_of_the_guest() {
    let mut started = Started::new();
    started.offer(opcode::READ, 3, 80, 20);
    let request = started.receive();
    started.answer_with(unique_of(&request), b"more than four");
    let (length, reply, _) = started.used();
    assert_eq!((length, reply.map(|reply| reply.error)), (16, EIO));
    assert_eq!(started.status("server"), "running");
}

#[test]
fn request_without_a_reply_is_done_at_once_and_an_interrupt_is_not_passed_on() {
    let mut started = Started::new();
    started.offer(opcode::INTERRUPT, 1, 48, 0);
    assert_eq!(started.used().0, 0);
    started.offer(opcode::FORGET, 2, 48, 0);
    assert_eq!(started.used().0, 0);
    let request = started.receive();
    assert_eq!(RequestHeader::read(&request).unwrap().opcode, opcode::FORGET);
}

#[test]
fn end_of_the_process_gives_every_request_an_error_and_is_reported_once() {
    let mut started = Started::new();
    for unique in 1..=3 {
        started.offer(opcode::GETATTR, unique, 40, 64);
    }
    // A request that can't be sent any more would get its error before those that were.
    for _ in 1..=3 {
        started.receive();
    }
    drop(started.server.take());
    for unique in 1..=3 {
        let (_, reply, _) = started.used();
        let reply = reply.unwrap();
        assert_eq!((reply.error, reply.unique), (-libc::EIO, unique));
    }
    started.offer(opcode::GETATTR, 4, 40, 64);
    assert_eq!(started.used().1.map(|reply| reply.error), EIO);
    assert_eq!(started.status("server"), "ended");
    assert_eq!(started.status("refused"), 4);
    // Also after a reset of the device.
    started.device.reset();
    assert_eq!(
        started.lines(),
        ["folder data: its server has ended; its files give EIO until the VM boots again"]
    );
    assert!(started.signals.failure.lock().unwrap().is_none());
}

#[test]
fn malformed_reply_ends_the_connection() {
    for bytes in [
        &b"short"[..],
        &[0xff; 16],
        &[0; 16],
        &vec![1; PACKET_BYTES_MAX + 1],
    ] {
        let mut started = Started::new();
        started.offer(opcode::GETATTR, 1, 40, 64);
        started.receive();
        started.answer(bytes);
        assert_eq!(started.used().1.map(|reply| reply.error), EIO);
        assert_eq!(
            started.lines(),
            ["folder data: its server sent a malformed reply; its files give EIO until the VM boots again"]
        );
    }
}

#[test]
fn reply_to_no_request_or_a_second_reply_is_dropped() {
    let mut started = Started::new();
    started.offer(opcode::GETATTR, 1, 40, 64);
    let id = unique_of(&started.receive());
    started.answer_with(id.wrapping_add(1), b"stray");
    started.answer_with(id, b"first");
    started.answer_with(id, b"second");
    assert_eq!(started.used().2[16..], *b"first");
    assert!(wait(|| (started.status("strays") == 2).then_some(())).is_some());
    assert_eq!(started.status("server"), "running");
}

#[test]
fn process_that_reads_nothing_delays_requests_and_loses_none() {
    let mut started = Started::new();
    // More than the buffer of a socket holds.
    for unique in 0..4 {
        started.offer(opcode::WRITE, unique, PACKET_BYTES_MAX, 64);
    }
    std::thread::sleep(Duration::from_millis(50));
    for unique in 0..4 {
        let id = unique_of(&started.receive());
        started.answer_with(id, &[0; 8]);
        let (length, reply, _) = started.used();
        assert_eq!((length, reply.unwrap().unique), (24, unique));
    }
}

#[test]
fn reply_after_a_reset_reaches_no_memory() {
    let mut started = Started::new();
    started.offer(opcode::GETATTR, 1, 40, 64);
    let id = unique_of(&started.receive());
    started.device.reset();
    started.answer_with(id, b"late");
    std::thread::sleep(Duration::from_millis(50));
    let mut bytes = [0; 16];
    started
        .memory
        .read_slice(&mut bytes, GuestAddress(REPLY))
        .unwrap();
    assert_eq!(bytes, [0; 16]);
    started.urgent = DriverQueue::new(&started.memory, 0);
    started.queue = DriverQueue::new(&started.memory, 1);
    started
        .memory
        .write_slice(&[0; 0x8000], GuestAddress(0x1_0000))
        .unwrap();
    started.descriptor = 0;
    started.activate();
    assert!(wait(|| (started.status("strays") == 1).then_some(())).is_some());
}

#[test]
fn hostile_chains_request_a_reset() {
    let short = |started: &mut Started| started.offer(opcode::GETATTR, 1, 39, 64);
    let no_room = |started: &mut Started| started.offer(opcode::GETATTR, 1, 40, 15);
    let outside = |started: &mut Started| {
        started.queue.add(&[(u64::MAX - 10, 64)], false);
    };
    let loops = |started: &mut Started| {
        started.queue.descriptor(0, REQUEST, 16, NEXT, 0);
        started.queue.offer(0);
    };
    let huge = |started: &mut Started| {
        started.queue.add(&[(REQUEST, u32::MAX)], false);
    };
    let reversed = |started: &mut Started| {
        started.queue.descriptor(0, REPLY, 64, WRITABLE | NEXT, 1);
        started.queue.descriptor(1, REQUEST, 40, 0, 0);
        started.queue.offer(0);
    };
    let all: [&dyn Fn(&mut Started); 6] = [&short, &no_room, &outside, &loops, &huge, &reversed];
    for attack in all {
        let mut started = Started::new();
        attack(&mut started);
        assert!(!started.signals.failure().is_empty());
        assert!(!started.has_request());
    }
}

#[test]
fn configuration_has_the_tag_and_the_number_of_queues() {
    let started = Started::new();
    let device = &started.device;
    assert_eq!((device.id(), device.features()), (VirtioId::Fs, RING_FEATURES));
    assert_eq!(device.queue_sizes(), [128, 256]);
    let mut space = [0xff; 44];
    device.read_config(0, &mut space);
    assert_eq!(&space[..5], b"data\0");
    assert_eq!(space[5..36], [0; 31]);
    assert_eq!(space[36..], [1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn tag_that_does_not_fit_its_field_is_refused() {
    let (socket, _other) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )
    .unwrap();
    let tag = "x".repeat(37);
    assert!(Fs::new(&Threads::open(), &tag, socket, None, Arc::new(|_| ())).is_err());
}

#[test]
fn pages_of_a_file_that_the_process_passes_are_recorded_and_a_file_without_a_lease_is_not_taken() {
    let memory = crate::sharing::tests::ram_of(None);
    let mapper = Mapper::new(&memory, Vec::new(), Advice::Ordinary).unwrap();
    let sharing = FolderSharing::new(mapper.clone());
    let mut started = Started::with(memory, Some(sharing));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, vec![7; 64 << 10]).unwrap();
    let open = || std::fs::File::open(&path).unwrap();
    let (plain, leased) = (open(), open());
    // SAFETY: the call takes no pointers.
    let taken = unsafe { libc::fcntl(leased.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK as libc::c_int) };
    assert_eq!(taken, 0);
    let pass = |started: &Started, file: &std::fs::File| {
        let (packet, files) = (lent_file(0), [file.as_raw_fd()]);
        let socket = started.server.as_ref().unwrap().as_raw_fd();
        let (parts, rights) = ([IoSlice::new(&packet)], [ControlMessage::ScmRights(&files)]);
        sendmsg::<()>(socket, &parts, &rights, MsgFlags::MSG_NOSIGNAL, None).unwrap();
    };
    let read = |started: &mut Started| {
        // The request of this test has zeroes for its node and its offset; the data begin 16 bytes into a
        // page, so that they fit no page of the file.
        started.offer(opcode::READ, 3, 80, 0x1_0000 + 16);
        let request = started.receive();
        started.answer_with(unique_of(&request), &vec![7; 64 << 10]);
        assert_eq!(started.used().0, 16 + (64 << 10));
    };
    pass(&started, &plain);
    read(&mut started);
    assert_eq!(
        (started.status("lent_files"), started.status("strays")),
        (0.into(), 0.into())
    );
    pass(&started, &leased);
    read(&mut started);
    assert_eq!(started.status("lent_files"), 1);
    assert_eq!(mapper.status()["remembered"], 0, "data across pages");
    started.offer_at(opcode::READ, 4, 80, REPLY + 0x10_0000 - 16, 0x1_0000 + 16);
    let request = started.receive();
    started.answer_with(unique_of(&request), &vec![7; 64 << 10]);
    started.used();
    assert_eq!(mapper.status()["remembered"], 16);
    assert_eq!(started.status("strays"), 0);
}
