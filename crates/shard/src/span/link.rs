//! Channels between this shard and another of its VM. Within a host a channel is a ring in each direction, in
//! memory that only the two shards map. Between hosts it is a [`stream`]. Senders and receivers see no
//! difference.

pub mod stream;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use locks::IgnorePoison;
use stream::{FromStream, ToStream};
use urpc::fragment::{Assembly, Parts};
use urpc::host::{Block, BlockingReceiver, BlockingSender, MemoryError, SharedRing};

use super::packet::Packet;

/// Largest packet, bytes: a vCPU with all its registers.
const PACKET_BYTES_MAX: usize = 64 << 10;
/// Kind of all packets.
const PORT: u16 = 0;
/// Time for which receivers poll, nanoseconds: none, since the CPUs are for the vCPUs.
const BLOCK_NS: u64 = 0;

/// Sending end of a channel to another shard. Any thread may send.
#[derive(Debug)]
pub enum Sending {
    /// Channel to a shard of this host.
    Ring(Mutex<BlockingSender>),
    /// Channel to a shard of another host.
    Stream(ToStream),
}

/// Receiving end of a channel from another shard.
#[derive(Debug)]
pub enum Receiving {
    /// Channel from a shard of this host.
    Ring(BlockingReceiver),
    /// Channel from a shard of another host.
    Stream(FromStream),
}

impl Sending {
    /// Opens the sending end of the ring in `file`.
    pub fn ring(file: File) -> Result<Self, MemoryError> {
        let ring = SharedRing::attach(&OwnedFd::from(file))?;
        Ok(Self::Ring(Mutex::new(BlockingSender::new(
            ring,
            Block::Futex,
            BLOCK_NS,
        ))))
    }

    /// Sends a packet, and blocks until there is room. A packet to a shard that has exited is dropped: the VM
    /// ends with that shard.
    pub fn send(&self, packet: &Packet) {
        let outbox = match self {
            Self::Ring(outbox) => outbox,
            Self::Stream(stream) => return stream.send(packet),
        };
        encoded::<0>(packet, &mut [0; 256], |bytes| {
            let mut outbox = outbox.lock().ignore_poison();
            for part in Parts::of(PORT, bytes) {
                if outbox.post(&part).is_err() && outbox.send(&part, None).is_err() {
                    return;
                }
            }
            outbox.flush();
        });
    }

    /// Ends all waits for room in a stream, as the VM ends: the peer of a stream may be cut off without
    /// notice. A ring needs no such end: it has room at once, or its peer is known to have exited.
    pub fn end(&self) {
        if let Self::Stream(stream) = self {
            stream.end();
        }
    }
}

/// Encodes a packet and passes its bytes to `send`, after `BEFORE` free ones. `room` holds most packets
/// without an allocation.
fn encoded<const BEFORE: usize>(packet: &Packet, room: &mut [u8; 256], send: impl FnOnce(&mut [u8])) {
    let length = postcard::to_slice(packet, &mut room[BEFORE..]).map(|bytes| bytes.len());
    match length {
        Ok(length) => send(&mut room[..BEFORE + length]),
        Err(_) => {
            // All fields of a packet can be encoded.
            let long = postcard::to_extend(packet, vec![0; BEFORE]).unwrap_or_default();
            send(&mut { long });
        }
    }
}

impl Receiving {
    /// Opens the receiving end of the ring in `file`.
    pub fn ring(file: File) -> Result<Self, MemoryError> {
        let ring = SharedRing::attach(&OwnedFd::from(file))?;
        Ok(Self::Ring(BlockingReceiver::new(ring, Block::Futex, BLOCK_NS)))
    }

    /// Passes every packet to `deliver`. Returns when the other shard has exited.
    ///
    /// # Errors
    /// Fails if the peer sends a malformed packet.
    pub fn run(self, mut deliver: impl FnMut(Packet)) -> io::Result<()> {
        let mut inbox = match self {
            Self::Ring(inbox) => inbox,
            Self::Stream(stream) => return stream.run(deliver),
        };
        let mut assembly = Assembly::new(vec![0; PACKET_BYTES_MAX].into_boxed_slice());
        while let Ok(Some(part)) = inbox.recv(None) {
            let whole = assembly.add(&part).map_err(io::Error::other)?;
            if let Some((_, bytes)) = whole {
                deliver(postcard::from_bytes(bytes).map_err(io::Error::other)?);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    fn ring() -> (Sending, Receiving) {
        let file = File::from(shard_api::memory::channel().expect("memory for a channel"));
        let sending = Sending::ring(file.try_clone().expect("a copy")).expect("a channel");
        (sending, Receiving::ring(file).expect("a channel"))
    }

    fn stream() -> (Sending, Receiving) {
        let (near, far) = UnixStream::pair().expect("a pair of sockets");
        let [near, far] = [near, far].map(|end| File::from(OwnedFd::from(end)));
        let (sending, writer, _) = stream::open(near).expect("a channel");
        thread::spawn(|| writer.run());
        let (_, _, receiving) = stream::open(far).expect("a channel");
        (Sending::Stream(sending), Receiving::Stream(receiving))
    }

    #[test]
    fn packets_are_delivered_in_order_and_peer_exit_ends_the_receiver() {
        all_come(ring());
        all_come(stream());
    }

    fn all_come((sending, receiving): (Sending, Receiving)) {
        let sender = thread::spawn(move || {
            for vector in 0..=u8::MAX {
                sending.send(&Packet::Interrupt {
                    vcpu: 1,
                    vector,
                    level: false,
                });
            }
        });
        let mut next = 0_u16;
        let ended = receiving.run(|packet| match packet {
            Packet::Interrupt { vector, .. } => {
                assert_eq!(u16::from(vector), next);
                next += 1;
            }
            other => panic!("{other:?}"),
        });
        ended.expect("nothing but packets");
        assert_eq!(next, 256);
        sender.join().expect("it sends");
    }
}
