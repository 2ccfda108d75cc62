//! Rounds between two hosts by which their time-stamp counters are related ([`shard::span::relation`]): eight bytes there, and
//! eight back with what the other counter reads.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use shard::span::relation::{Relation, Round};

/// Rounds: of so many one is as quick as can be, where the hosts have anything else to do.
const ROUNDS: usize = 400;
/// How long they may take together. With some of them it is known, too, only worse.
const LIMIT: Duration = Duration::from_millis(500);

/// Relates this host's counter to that at the other end of a connection whose reads don't wait for ever.
///
/// # Errors
/// If the other side does not answer.
pub fn relate(socket: OwnedFd) -> io::Result<Relation> {
    let mut socket = File::from(socket);
    let mut rounds = Vec::with_capacity(ROUNDS);
    let start = Instant::now();
    let mut read = [0; 8];
    while rounds.len() < ROUNDS && (rounds.is_empty() || start.elapsed() < LIMIT) {
        let asked = counter();
        socket.write_all(&asked.to_le_bytes())?;
        socket.read_exact(&mut read)?;
        let answered = counter();
        rounds.push(Round {
            asked,
            read: u64::from_le_bytes(read),
            answered,
        });
    }
    Relation::of(rounds).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Answers until the other side ends the connection.
pub fn answer(mut socket: impl Read + Write) -> io::Result<()> {
    let mut asked = [0; 8];
    loop {
        socket.read_exact(&mut asked)?;
        socket.write_all(&counter().to_le_bytes())?;
    }
}

/// This host's.
pub fn counter() -> u64 {
    // SAFETY: reads a counter that every x86-64 processor has.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_counter_is_related_to_itself_within_the_error() {
        let (near, far) = UnixStream::pair().unwrap();
        let answering = std::thread::spawn(|| answer(far));
        let before = counter();
        let relation = relate(near.into()).unwrap();
        assert!((before..counter()).contains(&relation.here), "{relation:?}");
        let off = relation.here.abs_diff(relation.there);
        assert!(off <= relation.error, "{relation:?}");
        let ended = answering.join().unwrap().unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
        let alone = UnixStream::pair().unwrap().0;
        assert!(relate(alone.into()).is_err());
    }
}
