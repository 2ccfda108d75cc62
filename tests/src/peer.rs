//! One end of a transfer over TCP: a length and bytes from a seed one way, their digest back the other way.
//!
//! The length comes first because the sender does not end its half: passt of 2023 can't carry replies to a
//! guest that did (docs/guide/networking.md).
//!
//! Both the tests and `guest-tool` use it, each as either end.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::pattern::{Digest, Numbers};

const CHUNK_BYTES: usize = 64 << 10;
/// A peer silent for this long is dead.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);

/// Sends `bytes` bytes made from `seed`, then reads the peer's digest; returns the sender's own.
pub fn send(mut stream: TcpStream, seed: u64, bytes: u64) -> io::Result<String> {
    stream.set_read_timeout(Some(SILENCE_LIMIT))?;
    stream.set_write_timeout(Some(SILENCE_LIMIT))?;
    let mut numbers = Numbers::new(seed);
    let mut digest = Digest::default();
    let mut chunk = vec![0; CHUNK_BYTES];
    stream.write_all(&bytes.to_be_bytes())?;
    let mut left = bytes;
    while left > 0 {
        numbers.fill(&mut chunk);
        let part = &chunk[..left.min(CHUNK_BYTES as u64) as usize];
        digest.add(part);
        stream.write_all(part)?;
        left -= part.len() as u64;
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let sent = digest.finish();
    if answer != sent {
        return Err(io::Error::other(format!(
            "sent {sent}, the peer received {answer}"
        )));
    }
    Ok(sent)
}

/// Receives the announced bytes, answers with their digest, and returns it.
pub fn receive(mut stream: TcpStream) -> io::Result<String> {
    stream.set_read_timeout(Some(SILENCE_LIMIT))?;
    let mut digest = Digest::default();
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut announced = [0; 8];
    stream.read_exact(&mut announced)?;
    let mut left = u64::from_be_bytes(announced);
    while left > 0 {
        let wanted = left.min(CHUNK_BYTES as u64) as usize;
        match stream.read(&mut chunk[..wanted])? {
            0 => break,
            count => {
                digest.add(&chunk[..count]);
                left -= count as u64;
            }
        }
    }
    let received = digest.finish();
    stream.write_all(received.as_bytes())?;
    Ok(received)
}
