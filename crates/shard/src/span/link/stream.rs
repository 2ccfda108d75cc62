//! Channel between two shards of different hosts: packets on one stream socket, each after its length.
//!
//! A sender writes as much as the socket accepts at once. The rest is queued, and a thread of the channel
//! writes it in order. So a vCPU does not wait for the network; it waits for room only, when
//! [`QUEUE_BYTES_MAX`] are queued. The monitor has connected the socket: to TCP, or to itself, which
//! encrypts. Only `read`, `write` and `poll` are used, which every kind of thread may call.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use locks::IgnorePoison;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::super::packet::Packet;
use super::{PACKET_BYTES_MAX, encoded};

/// Queued bytes at which a sender blocks: a few migrating vCPUs, or some ten thousand interrupts.
const QUEUE_BYTES_MAX: usize = 256 << 10;
/// Largest write or read, bytes.
const CHUNK_BYTES: usize = 64 << 10;
/// Size of the length before each packet, bytes.
const LENGTH_BYTES: usize = size_of::<u32>();

/// Sending half. Queued bytes are still written after it is dropped. The socket closes when the receiving
/// half is dropped, too; every kind of thread may close it.
#[derive(Debug)]
pub struct ToStream(Arc<Shared>);

/// Writer of the queue to the socket.
#[derive(Debug)]
pub struct Writer(Arc<Shared>);

/// Receiving half.
#[derive(Debug)]
pub struct FromStream(BufReader<BlockingReader>);

#[derive(Debug)]
struct Shared {
    socket: File,
    queue: Mutex<Queue>,
    /// Bytes were queued, or the channel ends.
    filled: Condvar,
    /// The queue has room, or the channel ends.
    emptied: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    bytes: VecDeque<u8>,
    /// The writer holds bytes that precede these.
    is_writing: bool,
    /// The sending half was dropped.
    is_closing: bool,
    /// The peer is lost.
    is_lost: bool,
}

/// Opens a channel on a connected stream socket.
///
/// # Errors
/// Fails if the socket cannot be made non-blocking or duplicated.
pub fn open(socket: File) -> io::Result<(ToStream, Writer, FromStream)> {
    // The flag belongs to the open socket, so it holds for both directions.
    let flags = OFlag::from_bits_truncate(fcntl(&socket, FcntlArg::F_GETFL)?);
    fcntl(&socket, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    let incoming = BufReader::with_capacity(CHUNK_BYTES, BlockingReader(socket.try_clone()?));
    let shared = Arc::new(Shared {
        socket,
        queue: Mutex::default(),
        filled: Condvar::new(),
        emptied: Condvar::new(),
    });
    Ok((ToStream(shared.clone()), Writer(shared), FromStream(incoming)))
}

impl ToStream {
    /// Sends a packet. After the peer is lost, packets are dropped.
    pub fn send(&self, packet: &Packet) {
        let mut room = [0; 256];
        encoded::<LENGTH_BYTES>(packet, &mut room, |frame| {
            let (length, bytes) = frame.split_at_mut(LENGTH_BYTES);
            // No packet is as long as 4 GiB.
            length.copy_from_slice(&(bytes.len() as u32).to_le_bytes());
            self.0.send(frame);
        });
    }

    /// Drops the queue and wakes all senders that wait for room.
    pub fn end(&self) {
        self.0.lose(&mut self.0.lock());
    }
}

impl Drop for ToStream {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.is_closing = true;
        self.0.filled.notify_all();
    }
}

impl Shared {
    fn send(&self, frame: &[u8]) {
        let mut queue = self.lock();
        while queue.bytes.len() >= QUEUE_BYTES_MAX && !queue.is_lost {
            queue = self.emptied.wait(queue).ignore_poison();
        }
        let mut sent = 0;
        // A new packet must not overtake queued bytes.
        while queue.bytes.is_empty() && !queue.is_writing && !queue.is_lost && sent < frame.len() {
            match (&self.socket).write(&frame[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.lose(&mut queue),
            }
        }
        if sent < frame.len() && !queue.is_lost {
            queue.bytes.extend(&frame[sent..]);
            self.filled.notify_one();
        }
    }

    /// Marks the peer as lost. The receiver detects and reports that by itself.
    fn lose(&self, queue: &mut Queue) {
        queue.is_lost = true;
        queue.bytes.clear();
        self.filled.notify_all();
        self.emptied.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Each change is complete, so a panic of another thread left no partial one.
        self.queue.lock().ignore_poison()
    }
}

impl Writer {
    /// Writes the queue until the channel ends or the peer is lost.
    pub fn run(self) {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        let shared = &self.0;
        loop {
            let mut queue = shared.lock();
            while queue.bytes.is_empty() && !queue.is_closing && !queue.is_lost {
                queue = shared.filled.wait(queue).ignore_poison();
            }
            if queue.is_lost || queue.bytes.is_empty() {
                return;
            }
            let count = queue.bytes.len().min(CHUNK_BYTES);
            chunk.clear();
            chunk.extend(queue.bytes.drain(..count));
            queue.is_writing = true;
            shared.emptied.notify_all();
            drop(queue);
            let written = write_all(&shared.socket, &chunk);
            let mut queue = shared.lock();
            queue.is_writing = false;
            if written.is_err() {
                shared.lose(&mut queue);
            }
        }
    }
}

impl FromStream {
    /// Passes every packet to `deliver`. Returns when the stream has ended or is broken.
    ///
    /// # Errors
    /// Fails if the peer sends a malformed packet.
    pub fn run(mut self, mut deliver: impl FnMut(Packet)) -> io::Result<()> {
        let mut packet = vec![0; PACKET_BYTES_MAX];
        let mut length = [0; LENGTH_BYTES];
        while self.0.read_exact(&mut length).is_ok() {
            let length = u32::from_le_bytes(length) as usize;
            let bytes = packet.get_mut(..length);
            let bytes = bytes.ok_or_else(|| io::Error::other(format!("a packet of {length} bytes")))?;
            if self.0.read_exact(bytes).is_err() {
                break;
            }
            deliver(postcard::from_bytes(bytes).map_err(io::Error::other)?);
        }
        Ok(())
    }
}

/// Blocking reader of a non-blocking socket.
#[derive(Debug)]
struct BlockingReader(File);

impl Read for BlockingReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => wait(&self.0, PollFlags::POLLIN)?,
                other => return other,
            }
        }
    }
}

fn write_all(mut socket: &File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match socket.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(socket, PollFlags::POLLOUT)?,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn wait(socket: &File, events: PollFlags) -> io::Result<()> {
    match poll(&mut [PollFd::new(socket.as_fd(), events)], PollTimeout::NONE) {
        Ok(_) | Err(nix::Error::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn interrupt(vector: u8) -> Packet {
        Packet::Interrupt {
            vcpu: 1,
            vector,
            level: false,
        }
    }

    fn pair() -> (File, UnixStream) {
        let (near, far) = UnixStream::pair().expect("a pair of sockets");
        (File::from(OwnedFd::from(near)), far)
    }

    /// Sends from another thread until the queue is full. Returns a channel of the number of packets sent.
    fn flood(sending: Arc<ToStream>) -> mpsc::Receiver<usize> {
        let (sent, count) = mpsc::channel();
        thread::spawn(move || {
            for number in 1.. {
                sending.send(&interrupt(number as u8));
                if sent.send(number).is_err() {
                    return;
                }
            }
        });
        count
    }

    /// Returns the last count before the sender blocks for 300 ms.
    fn last(counts: &mpsc::Receiver<usize>) -> usize {
        let mut last = counts.recv_timeout(TIMEOUT).expect("it sends");
        while let Ok(count) = counts.recv_timeout(Duration::from_millis(300)) {
            last = count;
        }
        last
    }

    #[test]
    fn sender_blocks_only_when_the_queue_is_full_and_no_packet_is_lost() {
        let (near, far) = pair();
        let (sending, writer, _) = open(near).expect("a channel");
        thread::spawn(|| writer.run());
        let counts = flood(Arc::new(sending));
        // Each packet takes eight bytes; the socket holds further ones.
        let queued = last(&counts);
        assert!(queued >= QUEUE_BYTES_MAX / 8, "{queued}");
        let (_, writer, receiving) = open(File::from(OwnedFd::from(far))).expect("a channel");
        drop(writer);
        let mut next = 1;
        let limit = queued * 3;
        let mut receiving = receiving.0;
        let mut frame = [0; LENGTH_BYTES];
        while next < limit {
            receiving.read_exact(&mut frame).expect("more comes");
            let mut bytes = vec![0; u32::from_le_bytes(frame) as usize];
            receiving.read_exact(&mut bytes).expect("all of it comes");
            match postcard::from_bytes::<Packet>(&bytes).expect("a packet") {
                Packet::Interrupt { vector, .. } => assert_eq!(vector, next as u8, "packet {next}"),
                other => panic!("{other:?}"),
            }
            next += 1;
        }
    }

    #[test]
    fn blocked_sender_resumes_when_the_peer_is_lost() {
        let (near, far) = pair();
        let (sending, writer, receiving) = open(near).expect("a channel");
        let writing = thread::spawn(|| writer.run());
        let counts = flood(Arc::new(sending));
        let stuck = last(&counts);
        drop(far);
        let deadline = Instant::now() + TIMEOUT;
        while counts.recv_timeout(TIMEOUT).expect("the sender resumes") < 2 * stuck {
            assert!(Instant::now() < deadline);
        }
        drop(counts);
        writing.join().expect("the writer ends");
        receiving.run(|packet| panic!("{packet:?}")).expect("it ends");
    }

    #[test]
    fn packet_is_queued_behind_bytes_that_the_writer_holds() {
        let (near, far) = pair();
        let (sending, _writer, _) = open(near).expect("a channel");
        sending.0.lock().is_writing = true;
        sending.send(&interrupt(1));
        assert_eq!(sending.0.lock().bytes.len(), 8);
        far.set_nonblocking(true).expect("a socket");
        let read = (&far).read(&mut [0]);
        assert_eq!(read.expect_err("it waits").kind(), ErrorKind::WouldBlock);
        sending.0.lock().is_writing = false;
        sending.send(&interrupt(2));
        assert_eq!(sending.0.lock().bytes.len(), 16, "nor what is queued");
    }

    #[test]
    fn blocked_sender_resumes_when_the_vm_ends() {
        let (near, _far) = pair();
        let (sending, writer, _) = open(near).expect("a channel");
        thread::spawn(|| writer.run());
        let sending = Arc::new(sending);
        let counts = flood(sending.clone());
        let stuck = last(&counts);
        sending.end();
        let next = counts.recv_timeout(TIMEOUT).expect("the sender resumes");
        assert!(next > stuck);
    }

    #[test]
    fn malformed_packet_is_an_error() {
        for bytes in [&[0xFF; 8][..], &[1, 0, 0, 0, 0xFF]] {
            let (near, mut far) = pair();
            let (_sending, _writer, receiving) = open(near).expect("a channel");
            far.write_all(bytes).expect("room");
            drop(far);
            assert!(receiving.run(|packet| panic!("{packet:?}")).is_err());
        }
    }

    /// Packets queued before the sending half was dropped arrive, then the end.
    #[test]
    fn queued_packets_are_delivered_before_end_of_stream() {
        let (near, far) = pair();
        let (sending, writer, _) = open(near).expect("a channel");
        let (_, _, receiving) = open(File::from(OwnedFd::from(far))).expect("a channel");
        let count = QUEUE_BYTES_MAX / 8;
        (0..count).for_each(|number| sending.send(&interrupt(number as u8)));
        drop(sending);
        let writing = thread::spawn(|| writer.run());
        let mut received = 0;
        receiving.run(|_| received += 1).expect("nothing but packets");
        assert_eq!(received, count);
        writing.join().expect("the writer ends");
    }
}
