//! A unix stream socket between processes.

use std::io::{BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use bench::Outcome;
use bench::tables::{each_ns, per_second};

use super::TRIPS_SLOW;
use crate::patience::LIMIT;
use crate::pinned::one;
use crate::process::Other;

const BYTES: usize = 64;
/// Messages one way.
const FLOW: u64 = 100_000;

fn with_other<T: Send>(role: &str, here: impl FnOnce(UnixStream) -> Outcome<T> + Send) -> Outcome<T> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_read_timeout(Some(LIMIT))?;
    ours.set_write_timeout(Some(LIMIT))?;
    let other = Other::start(role, &[], Stdio::from(OwnedFd::from(theirs)))?;
    let measured = one(|| here(ours))?;
    other.finish()?;
    Ok(measured)
}

fn stdin() -> Outcome<UnixStream> {
    Ok(UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?))
}

pub fn round_trip() -> Outcome<f64> {
    with_other("socket-echo", |mut stream| {
        let mut line = [7; BYTES];
        each_ns(TRIPS_SLOW, |_| {
            stream.write_all(&line)?;
            Ok(stream.read_exact(&mut line)?)
        })
    })
}

/// Sends with a write for each message; the reader takes as many at once as there are.
pub fn one_way() -> Outcome<f64> {
    with_other("socket-flood", |stream| {
        let mut stream = BufReader::new(stream);
        let mut line = [0; BYTES];
        stream.read_exact(&mut line)?;
        per_second(FLOW - 1, || Ok(stream.read_exact(&mut line)?))
    })
}

/// The other process of [`round_trip`].
pub fn echo_role() -> Outcome<()> {
    let mut stream = stdin()?;
    let mut line = [0; BYTES];
    while stream.read_exact(&mut line).is_ok() {
        stream.write_all(&line)?;
    }
    Ok(())
}

/// The other process of [`one_way`].
pub fn flood_role() -> Outcome<()> {
    let mut stream = stdin()?;
    (0..FLOW).try_for_each(|_| Ok(stream.write_all(&[7; BYTES])?))
}
