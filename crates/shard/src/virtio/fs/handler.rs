//! Moves requests from the guest's queues to the folder's process, and replies back.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use folders::packet::{
    PACKET_BYTES_MAX, REPLY_HEADER_BYTES, REQUEST_HEADER_BYTES, ReplyHeader, RequestHeader, lent_node,
    node_of, opcode, read_offset, set_unique,
};
use nix::errno::Errno;
use nix::sys::epoll::EpollFlags;
use nix::sys::socket::{MsgFlags, send};
use virtio_queue::QueueT;

use super::in_flight::{InFlight, ReadOf, Waiting};
use super::metrics::{FsMetrics, add};
use super::receiver::Receiver;
use crate::sharing::FolderSharing;
use crate::virtio::segments::Segments;
use crate::virtio::serve::{broken, listen, requeue, signal, take};
use crate::virtio::transport::Log;
use crate::virtio::worker::{Event, Handler, Sources};
use crate::virtio::{Activation, ActiveQueue, DeviceError};

/// Token of the socket.
const SOCKET: u32 = 0;
/// Replies that are taken for one event, after which other events are served.
const REPLIES_PER_EVENT: usize = 64;
/// Flags of all packets: the thread waits for nothing but events.
const NOW: MsgFlags = MsgFlags::MSG_DONTWAIT.union(MsgFlags::MSG_NOSIGNAL);

/// The half of a shared folder that runs on its thread.
pub struct FsHandler {
    tag: String,
    /// Socket to the folder's process; none after the end of the process.
    socket: Option<OwnedFd>,
    active: Option<Activation>,
    in_flight: InFlight,
    /// A request for which the socket had no room.
    held: Option<Vec<u8>>,
    /// Whether queues were left with requests, until there is room for more.
    is_stalled: bool,
    receiver: Receiver,
    /// Sharing of the pages that the guest reads.
    sharing: Option<FolderSharing>,
    metrics: Arc<FsMetrics>,
    log: Log,
}

/// Outcome of sending a request.
enum Sent {
    /// The process receives the request.
    Whole,
    /// The socket has no room now.
    NoRoom,
    /// The request can't be sent at all.
    Never,
    /// The process has ended.
    Ended,
}

impl FsHandler {
    /// Creates a handler that waits for its first activation.
    pub fn new(
        tag: &str,
        socket: OwnedFd,
        sharing: Option<FolderSharing>,
        metrics: Arc<FsMetrics>,
        log: Log,
    ) -> Self {
        Self {
            tag: tag.to_owned(),
            socket: Some(socket),
            active: None,
            in_flight: InFlight::default(),
            held: None,
            is_stalled: false,
            receiver: Receiver::default(),
            sharing,
            metrics,
            log,
        }
    }

    /// Takes requests from a queue, at most its size.
    fn serve(&mut self, index: u16, sources: &Sources) -> Result<(), DeviceError> {
        let Some(mut active) = self.active.take() else {
            return Ok(());
        };
        let served = self.serve_active(&mut active, index, sources);
        self.active = Some(active);
        served
    }

    fn serve_active(
        &mut self,
        active: &mut Activation,
        index: u16,
        sources: &Sources,
    ) -> Result<(), DeviceError> {
        let memory = active.memory.clone();
        let Some(queue) = active.queues.iter_mut().find(|queue| queue.index == index) else {
            return Ok(());
        };
        let mut used = false;
        for _ in 0..queue.queue.size() {
            if self.has_no_room() {
                // A reply, or room in the socket, serves the queue again.
                self.is_stalled = true;
                break;
            }
            let Some(chain) = take(queue, &memory)? else {
                break;
            };
            let head = chain.head_index();
            let (request, room) = Segments::of_request(&memory, chain)?;
            if let Some(written) = self.begin(index, head, &request, room, sources)? {
                queue.queue.add_used(&*memory, head, written).map_err(broken)?;
                used = true;
            }
        }
        if used {
            signal(queue, &memory, &*active.interrupt)?;
        }
        if self.socket.is_none() {
            self.refuse_all(active)?;
        }
        let queue = active.queues.iter_mut().find(|queue| queue.index == index);
        match queue {
            Some(queue) if !self.is_stalled => listen(queue, &memory),
            _ => Ok(()),
        }
    }

    fn has_no_room(&self) -> bool {
        self.held.is_some() || self.in_flight.is_full()
    }

    /// Begins a request. Returns the number of bytes written to its chain if it is done already.
    fn begin(
        &mut self,
        queue: u16,
        head: u16,
        request: &Segments,
        room: Segments,
        sources: &Sources,
    ) -> Result<Option<u32>, DeviceError> {
        let length = request.bytes();
        let mut start = [0; REQUEST_HEADER_BYTES];
        request.read_at(0, &mut start);
        let header = RequestHeader::read(&start).filter(|_| length >= REQUEST_HEADER_BYTES);
        let header = header.ok_or_else(|| short("a request without a whole header"))?;
        if header.has_reply() && room.bytes() < REPLY_HEADER_BYTES {
            return Err(short("a request without room for its reply"));
        }
        // The process would not find a request that it has not begun, and finishes the others.
        if header.opcode == opcode::INTERRUPT {
            return Ok(Some(0));
        }
        if length > PACKET_BYTES_MAX || self.socket.is_none() {
            return Ok(Some(match header.has_reply() {
                true => self.refuse(&room, header.unique),
                false => 0,
            }));
        }
        let mut bytes = vec![0; length];
        request.read_at(0, &mut bytes);
        // The guest may have changed the bytes since they were read first.
        let header = RequestHeader {
            unique: header.unique,
            ..header
        };
        let read = self.read_of(header, &bytes);
        let id = header.has_reply().then(|| {
            self.in_flight.add(Waiting {
                queue,
                head,
                unique: header.unique,
                room,
                read,
            })
        });
        write_header(&mut bytes, header, id.unwrap_or(0));
        self.send(bytes, sources)?;
        Ok(id.is_none().then_some(0))
    }

    /// Returns what a request reads, if pages of this folder are shared.
    fn read_of(&mut self, header: RequestHeader, request: &[u8]) -> Option<ReadOf> {
        let sharing = self.sharing.as_mut()?;
        match header.opcode {
            opcode::INIT => sharing.forget(),
            opcode::READ => {
                let (node, offset) = (node_of(request)?, read_offset(request)?);
                return Some(ReadOf { node, offset });
            }
            _ => {}
        }
        None
    }

    /// Sends a request, or holds it until the socket has room.
    fn send(&mut self, request: Vec<u8>, sources: &Sources) -> Result<(), DeviceError> {
        match self.try_send(&request) {
            Sent::Whole => {
                add(&self.metrics.requests, 1);
                add(&self.metrics.request_bytes, request.len());
            }
            Sent::NoRoom => {
                self.held = Some(request);
                self.watch(sources, EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT)?;
            }
            Sent::Ended => self.end(sources, "has ended"),
            Sent::Never => self.end(
                sources,
                "can't be reached: the host's sockets take no such packets",
            ),
        }
        Ok(())
    }

    fn try_send(&self, bytes: &[u8]) -> Sent {
        let Some(socket) = &self.socket else {
            return Sent::Ended;
        };
        loop {
            return match send(socket.as_raw_fd(), bytes, NOW) {
                Ok(_) => Sent::Whole,
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN | Errno::ENOBUFS | Errno::ENOMEM) => Sent::NoRoom,
                Err(Errno::EMSGSIZE) => Sent::Never,
                Err(_) => Sent::Ended,
            };
        }
    }

    /// Serves the socket: the held request, then replies.
    fn serve_socket(&mut self, sources: &Sources) -> Result<(), DeviceError> {
        if let Some(held) = self.held.take() {
            self.watch(sources, EpollFlags::EPOLLIN)?;
            self.send(held, sources)?;
        }
        let Some(mut active) = self.active.take() else {
            return Ok(());
        };
        let received = self.receive(&mut active, sources);
        self.active = Some(active);
        received
    }

    fn receive(&mut self, active: &mut Activation, sources: &Sources) -> Result<(), DeviceError> {
        let mut used = BTreeSet::new();
        for _ in 0..REPLIES_PER_EVENT {
            let Some(socket) = &self.socket else { break };
            match self.receiver.receive(socket, self.sharing.is_some()) {
                Ok((0, _)) => self.end(sources, "has ended"),
                Ok((length, file)) => match self.reply(active, length, file)? {
                    Reply::To(queue) => {
                        used.insert(queue);
                    }
                    Reply::WithFile => {}
                    Reply::ToNothing => add(&self.metrics.strays, 1),
                    Reply::Malformed => self.end(sources, "sent a malformed reply"),
                },
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => {}
                Err(_) => self.end(sources, "has ended"),
            }
        }
        for queue in active
            .queues
            .iter_mut()
            .filter(|queue| used.contains(&queue.index))
        {
            signal(queue, &active.memory, &*active.interrupt)?;
        }
        if self.socket.is_none() {
            self.refuse_all(active)?;
        }
        if self.is_stalled && !self.has_no_room() {
            self.is_stalled = false;
            active.queues.iter().for_each(requeue);
        }
        Ok(())
    }

    /// Writes a reply to the guest.
    fn reply(
        &mut self,
        active: &mut Activation,
        length: usize,
        file: Option<File>,
    ) -> Result<Reply, DeviceError> {
        let packet = self.receiver.packet.get_mut(..length);
        let Some(packet) = packet else {
            return Ok(Reply::Malformed);
        };
        let Some(mut header) = ReplyHeader::of_packet(packet) else {
            return Ok(Reply::Malformed);
        };
        if let (Some(sharing), Some(node), Some(file)) = (&mut self.sharing, lent_node(packet), file) {
            let taken = sharing.receive(node, file);
            add(&self.metrics.lent_files, usize::from(taken));
            return Ok(Reply::WithFile);
        }
        let Some(request) = self.in_flight.take(header.unique) else {
            return Ok(Reply::ToNothing);
        };
        header.unique = request.unique;
        let written = if request.room.bytes() < length {
            // A guest that requests more than it has room for.
            add(&self.metrics.refused, 1);
            write_error(&request.room, request.unique)
        } else {
            packet[..REPLY_HEADER_BYTES].copy_from_slice(&header.bytes());
            add(&self.metrics.replies, 1);
            add(&self.metrics.reply_bytes, length);
            if let (Some(sharing), Some(read)) = (&self.sharing, request.read) {
                let data = request
                    .room
                    .ranges(REPLY_HEADER_BYTES, length - REPLY_HEADER_BYTES);
                let recorded = sharing.before_copy(read.node, read.offset, data.into_iter());
                recorded.map_err(DeviceError::host("cannot release mapped pages"))?;
            }
            // At most PACKET_BYTES_MAX.
            request.room.write_at(0, packet) as u32
        };
        finish(active, &request, written)?;
        Ok(Reply::To(request.queue))
    }

    /// Ends the connection: from now on every request gets an error.
    fn end(&mut self, sources: &Sources, how: &str) {
        if let Some(socket) = self.socket.take() {
            // It was added at the start.
            let _ = sources.remove(&socket);
            self.metrics.has_ended.store(true, Ordering::Relaxed);
            let tag = &self.tag;
            (self.log)(&format!(
                "folder {tag}: its server {how}; its files give EIO until the VM boots again"
            ));
        }
        self.held = None;
    }

    /// Gives an error to every request in flight.
    fn refuse_all(&mut self, active: &mut Activation) -> Result<(), DeviceError> {
        let mut used = BTreeSet::new();
        for request in self.in_flight.take_all() {
            let written = self.refuse(&request.room, request.unique);
            finish(active, &request, written)?;
            used.insert(request.queue);
        }
        for queue in active
            .queues
            .iter_mut()
            .filter(|queue| used.contains(&queue.index))
        {
            signal(queue, &active.memory, &*active.interrupt)?;
        }
        Ok(())
    }

    fn refuse(&self, room: &Segments, unique: u64) -> u32 {
        add(&self.metrics.refused, 1);
        write_error(room, unique)
    }

    fn watch(&self, sources: &Sources, interest: EpollFlags) -> Result<(), DeviceError> {
        let Some(socket) = &self.socket else {
            return Ok(());
        };
        let changed = sources.modify(socket, SOCKET, interest);
        changed.map_err(DeviceError::host("cannot wait for the folder's process"))
    }
}

/// Meaning of a packet of the folder's process.
enum Reply {
    /// A reply to a request of this queue.
    To(u16),
    /// A file whose pages may be shared.
    WithFile,
    /// A reply to no request.
    ToNothing,
    /// No reply.
    Malformed,
}

/// Writes the header of a request with the device's id.
fn write_header(request: &mut [u8], header: RequestHeader, id: u64) {
    if let Some(fields) = request.get_mut(..8) {
        fields[..4].copy_from_slice(&header.length.to_le_bytes());
        fields[4..].copy_from_slice(&header.opcode.to_le_bytes());
    }
    set_unique(request, id);
}

/// Writes an error for a request that the folder's process does not get.
fn write_error(room: &Segments, unique: u64) -> u32 {
    // At most the header's length.
    room.write_at(0, &ReplyHeader::of_error(unique, libc::EIO).bytes()) as u32
}

/// Returns the chain of a request to the guest.
fn finish(active: &mut Activation, request: &Waiting, written: u32) -> Result<(), DeviceError> {
    let queues = &mut active.queues;
    let queue: Option<&mut ActiveQueue> = queues.iter_mut().find(|queue| queue.index == request.queue);
    queue.map_or(Ok(()), |queue| {
        let memory = &*active.memory;
        queue
            .queue
            .add_used(memory, request.head, written)
            .map_err(broken)
    })
}

fn short(what: &str) -> DeviceError {
    DeviceError::Protocol(what.to_owned())
}

impl Handler for FsHandler {
    fn start(&mut self, activation: Activation, sources: &Sources) -> Result<(), DeviceError> {
        if let Some(socket) = &self.socket {
            let added = sources.add(socket, SOCKET, EpollFlags::EPOLLIN);
            added.map_err(DeviceError::host("cannot wait for the folder's process"))?;
        }
        let queues: Vec<u16> = activation.queues.iter().map(|queue| queue.index).collect();
        self.active = Some(activation);
        queues
            .into_iter()
            .try_for_each(|queue| self.serve(queue, sources))
    }

    fn handle(&mut self, event: Event, sources: &Sources) -> Result<(), DeviceError> {
        match event {
            Event::Queue(index) => self.serve(index, sources),
            Event::Source(_) => self.serve_socket(sources),
        }
    }

    fn stop(&mut self, sources: &Sources) {
        if let Some(socket) = &self.socket {
            // It was added at the start.
            let _ = sources.remove(socket);
        }
        self.active = None;
        self.held = None;
        self.is_stalled = false;
        // Late replies find no request.
        drop(self.in_flight.take_all());
    }
}
