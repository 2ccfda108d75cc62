//! The channels between this shard and another of its VM: a ring each way, in memory that only the two map, or for a shard of
//! another host a [`stream`]. Who sends and who receives can't tell.

pub mod stream;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use stream::{FromStream, ToStream};
use urpc::fragment::{Assembly, Parts};
use urpc::host::{Block, BlockingReceiver, BlockingSender, MemoryError, SharedRing};

use super::packet::Packet;

/// The longest packet, bytes: a vCPU with all its registers.
const PACKET_BYTES_MAX: usize = 64 << 10;
/// All packets are of one kind.
const PORT: u16 = 0;
/// Receivers do not poll: the CPUs are the vCPUs'.
const BLOCK_NS: u64 = 0;

/// The way to another shard. Any thread may send.
#[derive(Debug)]
pub enum Sending {
    /// Of this host.
    Ring(Mutex<BlockingSender>),
    /// Of another.
    Stream(ToStream),
}

/// The way from another shard.
#[derive(Debug)]
pub enum Receiving {
    /// Of this host.
    Ring(BlockingReceiver),
    /// Of another.
    Stream(FromStream),
}

impl Sending {
    /// Of the ring in that file.
    pub fn ring(file: File) -> Result<Self, MemoryError> {
        let ring = SharedRing::attach(&OwnedFd::from(file))?;
        Ok(Self::Ring(Mutex::new(BlockingSender::new(
            ring,
            Block::Futex,
            BLOCK_NS,
        ))))
    }

    /// Sends a packet, and waits for room if need be. What is sent to a shard that is gone is dropped: the VM ends with it.
    pub fn send(&self, packet: &Packet) {
        let outbox = match self {
            Self::Ring(outbox) => outbox,
            Self::Stream(stream) => return stream.send(packet),
        };
        encoded::<0>(packet, &mut [0; 256], |bytes| {
            let mut outbox = outbox.lock().unwrap_or_else(PoisonError::into_inner);
            for part in Parts::of(PORT, bytes) {
                if outbox.post(&part).is_err() && outbox.send(&part, None).is_err() {
                    return;
                }
            }
            outbox.flush();
        });
    }

    /// The VM ends: nobody waits for room in a stream any more, whose other end may be cut off and not known to be. (A ring's
    /// room comes at once, or its other end is seen to be gone.)
    pub fn end(&self) {
        if let Self::Stream(stream) = self {
            stream.end();
        }
    }
}

/// Gives the bytes of a packet to `send`, behind so many free ones; `room` is for those of most packets.
fn encoded<const BEFORE: usize>(packet: &Packet, room: &mut [u8; 256], send: impl FnOnce(&mut [u8])) {
    let length = postcard::to_slice(packet, &mut room[BEFORE..]).map(|bytes| bytes.len());
    match length {
        Ok(length) => send(&mut room[..BEFORE + length]),
        Err(_) => {
            // Packets hold nothing that can't be encoded.
            let long = postcard::to_extend(packet, vec![0; BEFORE]).unwrap_or_default();
            send(&mut { long });
        }
    }
}

impl Receiving {
    /// Of the ring in that file.
    pub fn ring(file: File) -> Result<Self, MemoryError> {
        let ring = SharedRing::attach(&OwnedFd::from(file))?;
        Ok(Self::Ring(BlockingReceiver::new(ring, Block::Futex, BLOCK_NS)))
    }

    /// Gives every packet to `heard`. Returns when the other shard is gone.
    ///
    /// # Errors
    /// When something comes that is no packet.
    pub fn run(self, mut heard: impl FnMut(Packet)) -> io::Result<()> {
        let mut inbox = match self {
            Self::Ring(inbox) => inbox,
            Self::Stream(stream) => return stream.run(heard),
        };
        let mut assembly = Assembly::new(vec![0; PACKET_BYTES_MAX].into_boxed_slice());
        while let Ok(Some(part)) = inbox.recv(None) {
            let whole = assembly.add(&part).map_err(io::Error::other)?;
            if let Some((_, bytes)) = whole {
                heard(postcard::from_bytes(bytes).map_err(io::Error::other)?);
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
    fn packets_come_in_order_and_the_end_is_seen() {
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
