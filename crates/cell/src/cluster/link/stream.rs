//! Channels between hosts: one stream for both directions, on which each message follows its length.
//!
//! A host that is cut off ends no stream. So each side sends an empty message periodically, and takes a peer
//! for dead that has sent nothing for longer than the cluster's file allows.

use std::io::{self, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use locks::IgnorePoison;
use protocol::CellId;

use super::{Link, MESSAGE_BYTES_MAX, MESSAGE_TIMEOUT, ReceiveBytes, SendBytes, Transport};

/// Number of empty messages within the time after which a silent peer counts as dead.
const BEATS: u32 = 4;

#[derive(Debug)]
struct ToStream(Arc<Mutex<UnixStream>>);

#[derive(Debug)]
struct FromStream(UnixStream);

/// The link to `peer` over a stream; `silence` is the time after which it counts as dead.
pub fn link(peer: CellId, stream: UnixStream, silence: Duration) -> io::Result<Link> {
    let (sending, stream) = beating(peer, stream, silence)?;
    Ok(Link::new(
        peer,
        Transport::Stream,
        ToStream(sending),
        FromStream(stream),
    ))
}

/// The two halves of a stream. This side sends heartbeats as long as the first half lives; the other side
/// counts as dead after `silence`.
pub fn beating(
    peer: CellId,
    stream: UnixStream,
    silence: Duration,
) -> io::Result<(Arc<Mutex<UnixStream>>, UnixStream)> {
    stream.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
    stream.set_read_timeout(Some(silence))?;
    let sending = Arc::new(Mutex::new(stream.try_clone()?));
    beat(peer, Arc::downgrade(&sending), silence / BEATS)?;
    Ok((sending, stream))
}

/// Sends an empty message every `interval`, until the other half is dropped.
fn beat(peer: CellId, sending: Weak<Mutex<UnixStream>>, interval: Duration) -> io::Result<()> {
    std::thread::Builder::new()
        .name(format!("beat {peer}"))
        .spawn(move || {
            while let Some(stream) = sending.upgrade() {
                if write_to(&stream, &[]).is_err() {
                    return;
                }
                drop(stream);
                std::thread::sleep(interval);
            }
        })?;
    Ok(())
}

/// Writes a message, from any thread.
pub fn write_to(stream: &Mutex<UnixStream>, bytes: &[u8]) -> io::Result<()> {
    write(&mut *stream.lock().ignore_poison(), bytes)
}

/// Writes a message.
pub fn write(stream: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    let mut message = length.to_le_bytes().to_vec();
    message.extend_from_slice(bytes);
    stream.write_all(&message)
}

/// Reads a message into `bytes`.
pub fn read(stream: &mut impl Read, bytes: &mut Vec<u8>) -> io::Result<()> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MESSAGE_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    bytes.resize(length, 0);
    stream.read_exact(bytes)
}

impl SendBytes for ToStream {
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        write_to(&self.0, bytes).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
            io::ErrorKind::ConnectionReset => io::ErrorKind::BrokenPipe.into(),
            _ => error,
        })
    }
}

impl Drop for ToStream {
    fn drop(&mut self) {
        let stream = self.0.lock().ignore_poison();
        let _ = stream.shutdown(Shutdown::Both);
    }
}

impl ReceiveBytes for FromStream {
    fn run(self: Box<Self>, heard: &mut dyn FnMut(&[u8]) -> io::Result<()>) {
        let mut stream = BufReader::new(self.0);
        let mut bytes = Vec::new();
        while read(&mut stream, &mut bytes).is_ok() {
            if !bytes.is_empty() && heard(&bytes).is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    fn pair(silence: Duration) -> (Link, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        far.set_read_timeout(Some(LIMIT)).unwrap();
        (link(CellId { number: 1, life: 1 }, near, silence).unwrap(), far)
    }

    /// The messages until the end of the link.
    fn heard(link: Link) -> mpsc::Receiver<Vec<u8>> {
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            let sending = link.sending;
            link.receiving
                .0
                .run(&mut |bytes| send.send(bytes.to_vec()).map_err(io::Error::other));
            drop(sending);
        });
        receive
    }

    #[test]
    fn messages_arrive_whole_and_heartbeats_are_not_delivered() {
        let (link, mut far) = pair(LIMIT);
        let heard = heard(link);
        for bytes in [&b"one"[..], b"", b"two"] {
            write(&mut far, bytes).unwrap();
        }
        assert_eq!(heard.recv_timeout(LIMIT).unwrap(), b"one");
        assert_eq!(heard.recv_timeout(LIMIT).unwrap(), b"two");
        // This side sends heartbeats.
        let mut bytes = vec![1];
        read(&mut far, &mut bytes).unwrap();
        assert!(bytes.is_empty());
        far.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert_eq!(
            heard.recv_timeout(LIMIT),
            Err(mpsc::RecvTimeoutError::Disconnected)
        );
    }

    #[test]
    fn silent_peer_is_dead_after_the_allowed_silence() {
        let (link, _far) = pair(Duration::from_millis(100));
        let heard = heard(link);
        assert_eq!(
            heard.recv_timeout(LIMIT),
            Err(mpsc::RecvTimeoutError::Disconnected)
        );
    }

    #[test]
    fn the_end_of_one_half_is_the_end_of_the_link() {
        let (link, mut far) = pair(LIMIT);
        drop(link.sending);
        let mut rest = Vec::new();
        far.read_to_end(&mut rest).unwrap();
    }
}
