//! The network between a lab's hosts: each Ethernet frame goes to every other host on the link.
//!
//! QEMU's stream network backend carries each frame after its length, 4 bytes, big-endian. A host that does not read
//! loses frames; it never holds up the others.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

/// The longest frame taken: a full offloaded segment and its headers.
const FRAME_BYTES_MAX: usize = 68 << 10;

/// Frames that wait for one host before more are dropped.
const WAITING_FRAMES_MAX: usize = 256;

/// Connects the hosts behind `ports`; ends when all of them are gone.
pub fn start(ports: Vec<UnixStream>) -> io::Result<()> {
    let mut senders: Vec<SyncSender<Arc<Vec<u8>>>> = Vec::new();
    let mut readers = Vec::new();
    for port in ports {
        let (sender, receiver) = sync_channel(WAITING_FRAMES_MAX);
        senders.push(sender);
        readers.push(port.try_clone()?);
        thread::Builder::new()
            .name("hub".into())
            .spawn(move || deliver(port, &receiver))?;
    }
    for (index, reader) in readers.into_iter().enumerate() {
        let others: Vec<_> = senders
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != index)
            .map(|(_, sender)| sender.clone())
            .collect();
        thread::Builder::new()
            .name("hub".into())
            .spawn(move || forward(reader, &others))?;
    }
    Ok(())
}

fn forward(mut port: impl Read, others: &[SyncSender<Arc<Vec<u8>>>]) {
    while let Ok(frame) = read_frame(&mut port) {
        let frame = Arc::new(frame);
        for other in others {
            // Full or gone: a network loses frames.
            let _ = other.try_send(Arc::clone(&frame));
        }
    }
}

fn deliver(mut port: impl Write, frames: &Receiver<Arc<Vec<u8>>>) {
    while let Ok(frame) = frames.recv() {
        if write_frame(&mut port, &frame).is_err() {
            return;
        }
    }
}

fn read_frame(port: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    port.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame too long"));
    }
    let mut frame = vec![0; length];
    port.read_exact(&mut frame)?;
    Ok(frame)
}

fn write_frame(port: &mut impl Write, frame: &[u8]) -> io::Result<()> {
    let length = u32::try_from(frame.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend_from_slice(frame);
    port.write_all(&bytes)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_frame_reaches_every_other_host_and_not_its_sender() {
        let (mut ends, ports): (Vec<_>, Vec<_>) = (0..3).map(|_| UnixStream::pair().unwrap()).unzip();
        start(ports).unwrap();
        write_frame(&mut ends[0], b"hello").unwrap();
        for end in &mut ends[1..] {
            end.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            assert_eq!(read_frame(end).unwrap(), b"hello");
        }
        ends[0].set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert!(read_frame(&mut ends[0]).is_err());
    }

    #[test]
    fn a_host_that_never_reads_holds_nobody_up() {
        let (mut ends, ports): (Vec<_>, Vec<_>) = (0..3).map(|_| UnixStream::pair().unwrap()).unzip();
        start(ports).unwrap();
        ends[1].set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        for number in 0..2000u32 {
            write_frame(&mut ends[0], &[number.to_be_bytes()[3]; 1500]).unwrap();
            assert_eq!(read_frame(&mut ends[1]).unwrap()[0], number.to_be_bytes()[3]);
        }
    }

    #[test]
    fn an_absurd_length_ends_the_port() {
        assert!(read_frame(&mut &[0xff, 0xff, 0xff, 0xff, 0][..]).is_err());
    }
}
