//! Rounds between two hosts that relate their time-stamp counters ([`shard_api::relation`]): the caller sends
//! eight bytes, and receives them back with the other counter's reading. Rounds go on as long as the VM
//! lives: [`drift`] computes estimates from them, [`leader`] decides the steps of the guest's clocks, and
//! [`keeper`] carries them out.

pub mod drift;
pub mod keeper;
pub mod leader;

use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use shard_api::relation::{Relation, Round};

/// Number of rounds in a series: of so many one is as quick as possible, on busy hosts too.
const ROUNDS: usize = 400;
/// Time limit for all rounds together. With fewer rounds the relation is known as well, with a greater error.
const LIMIT: Duration = Duration::from_millis(500);
/// Bytes of an answer: the request, and the other counter's reading.
const ANSWER_BYTES: usize = 16;

/// The calling side of a connection to another host's monitor, whose reads have a time limit.
#[derive(Debug)]
pub struct Rounds {
    /// The connection, a stream of any kind.
    socket: UnixStream,
    /// Bytes of an answer that has not arrived whole.
    answer: [u8; ANSWER_BYTES],
    filled: usize,
}

impl Rounds {
    /// Rounds over a connection.
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket: socket.into(),
            answer: [0; ANSWER_BYTES],
            filled: 0,
        }
    }

    /// A handle that ends the rounds from another thread.
    pub fn end(&self) -> io::Result<End> {
        self.socket.try_clone().map(End)
    }

    /// Makes one round; none if its answer has not arrived in time. An answer that arrives later is
    /// recognized and dropped.
    ///
    /// # Errors
    /// If the other side is gone.
    pub fn round(&mut self) -> io::Result<Option<Round>> {
        let asked = counter();
        self.socket.write_all(&asked.to_le_bytes())?;
        loop {
            match self.socket.read(&mut self.answer[self.filled..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
            if self.filled < ANSWER_BYTES {
                continue;
            }
            let answered = counter();
            self.filled = 0;
            let (echo, read) = self.answer.split_at(size_of::<u64>());
            let [echo, read] =
                [echo, read].map(|bytes| bytes.iter().rfold(0, |word, &byte| word << 8 | u64::from(byte)));
            if echo == asked {
                return Ok(Some(Round {
                    asked,
                    read,
                    answered,
                }));
            }
        }
    }
}

/// Ends rounds of another thread, when it is dropped.
#[derive(Debug)]
pub struct End(UnixStream);

impl Drop for End {
    fn drop(&mut self) {
        // A connection that is gone has ended.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// Relates this host's counter to that at the other end.
///
/// # Errors
/// If the other side does not answer.
pub fn relate(rounds: &mut Rounds) -> io::Result<Relation> {
    let mut made = Vec::with_capacity(ROUNDS);
    let start = Instant::now();
    while made.len() < ROUNDS && (made.is_empty() || start.elapsed() < LIMIT) {
        made.push(rounds.round()?.ok_or(ErrorKind::TimedOut)?);
    }
    Relation::of(made).ok_or_else(|| ErrorKind::InvalidData.into())
}

/// Answers rounds until the other side ends the connection.
pub fn answer(socket: impl Read + Write) -> io::Result<()> {
    answer_by(socket, counter)
}

fn answer_by(mut socket: impl Read + Write, counter: impl Fn() -> u64) -> io::Result<()> {
    let mut answer = [0; ANSWER_BYTES];
    loop {
        let (echo, read) = answer.split_at_mut(size_of::<u64>());
        socket.read_exact(echo)?;
        read.copy_from_slice(&counter().to_le_bytes());
        socket.write_all(&answer)?;
    }
}

/// The time-stamp counter of this host.
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
        let mut rounds = Rounds::new(near.into());
        let relation = relate(&mut rounds).unwrap();
        assert!((before..counter()).contains(&relation.here), "{relation:?}");
        let off = relation.here.abs_diff(relation.there);
        assert!(off <= relation.error, "{relation:?}");
        drop(rounds);
        let ended = answering.join().unwrap().unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
        let (alone, far) = UnixStream::pair().unwrap();
        drop(far);
        assert!(relate(&mut Rounds::new(alone.into())).is_err());
    }

    /// An answer that arrives in pieces, and after the next request, is of no round.
    #[test]
    fn late_answers_are_left_out() {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let mut rounds = Rounds::new(near.into());
        let mut far = far;
        let mut echo = [0; 8];
        assert_eq!(rounds.round().unwrap(), None);
        far.read_exact(&mut echo).unwrap();
        far.write_all(&echo[..5]).unwrap();
        assert_eq!(rounds.round().unwrap(), None);
        far.write_all(&echo[5..]).unwrap();
        far.write_all(&7_u64.to_le_bytes()).unwrap();
        let answering = std::thread::spawn(|| answer_by(far, || 9));
        // On a busy machine that answer may be late, too.
        let round = (0..500).find_map(|_| rounds.round().unwrap()).unwrap();
        assert_eq!(round.read, 9);
        drop(rounds);
        answering.join().unwrap().unwrap_err();
    }
}
