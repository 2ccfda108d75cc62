//! The channels between this shard and another of its VM: a ring each way, in memory that only the two map.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use urpc::fragment::{Assembly, Parts};
use urpc::host::{Block, Inbox, MemoryError, Outbox, SharedRing};

use super::packet::Packet;

/// Messages that a channel holds: several travelling vCPUs.
pub const LINES: usize = 1024;
/// The longest packet, bytes: a vCPU with all its registers.
const PACKET_BYTES_MAX: usize = 64 << 10;
/// All packets are of one kind.
const PORT: u16 = 0;
/// Receivers do not poll: the CPUs are the vCPUs'.
const BLOCK_NS: u64 = 0;

/// Makes the memory of one channel.
///
/// # Errors
/// As [`SharedRing::create`].
pub fn memory() -> Result<OwnedFd, MemoryError> {
    SharedRing::create(LINES).map(|(_, file)| file)
}

/// The way to another shard. Any thread may send.
#[derive(Debug)]
pub struct Sending(Mutex<Outbox>);

/// The way from another shard.
#[derive(Debug)]
pub struct Receiving(Inbox);

impl Sending {
    /// Of the channel in that file.
    pub fn open(file: File) -> Result<Self, MemoryError> {
        let ring = SharedRing::attach(&OwnedFd::from(file))?;
        Ok(Self(Mutex::new(Outbox::new(ring, Block::Futex, BLOCK_NS))))
    }

    /// Sends a packet, and waits for room if need be. What is sent to a shard that is gone is dropped: the VM ends with it.
    pub fn send(&self, packet: &Packet) {
        let mut room = [0; 256];
        let long;
        let bytes: &[u8] = match postcard::to_slice(packet, &mut room) {
            Ok(bytes) => bytes,
            Err(_) => {
                // Packets hold nothing that can't be encoded.
                long = postcard::to_stdvec(packet).unwrap_or_default();
                &long
            }
        };
        let mut outbox = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for part in Parts::of(PORT, bytes) {
            if outbox.post(&part).is_err() && outbox.send(&part, None).is_err() {
                return;
            }
        }
        outbox.flush();
    }
}

impl Receiving {
    /// Of the channel in that file.
    pub fn open(file: File) -> Result<Self, MemoryError> {
        let ring = SharedRing::attach(&OwnedFd::from(file))?;
        Ok(Self(Inbox::new(ring, Block::Futex, BLOCK_NS)))
    }

    /// Gives every packet to `heard`. Returns when the other shard is gone.
    ///
    /// # Errors
    /// When something comes that is no packet.
    pub fn run(mut self, mut heard: impl FnMut(Packet)) -> io::Result<()> {
        let mut assembly = Assembly::new(vec![0; PACKET_BYTES_MAX].into_boxed_slice());
        while let Ok(Some(part)) = self.0.recv(None) {
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
    use std::thread;

    use super::*;

    #[test]
    fn packets_come_in_order_and_the_end_is_seen() {
        let file = File::from(memory().expect("memory for a channel"));
        let sending = Sending::open(file.try_clone().expect("a copy")).expect("a channel");
        let receiving = Receiving::open(file).expect("a channel");
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
