//! Memory shared by the hosts of all nodes, or by processes of one host, for pipes beside the streams of
//! their links.
//!
//! The first page holds a number that node 0 writes and sends, so that each node can check that it sees the
//! same memory. Then each pair of nodes has four pipes for each page server: control from the lower node and
//! from the higher one, and bulk likewise. The caller ensures that one session uses a memory at a time.

use std::fs::File;
use std::io;
use std::path::Path;

use dsm::{Pipes, Shape};
use urpc::host::{MemoryError, SharedPipe};
use urpc::pipe::{Pipe, Reader, WORD_BYTES, Writer};

use crate::stream::StreamError;

/// Words of a pipe, 128 KiB: 31 pages.
const WORDS: usize = 1 << 14;
/// Bytes of a pipe, in whole pages.
const ROOM_BYTES: u64 = (Pipe::bytes(WORDS) as u64).next_multiple_of(PROOF_BYTES);
const PROOF_WORDS: usize = 2;
const PROOF_BYTES: u64 = 4096;

/// The memory of one node.
#[derive(Debug)]
pub struct Memory<'a> {
    path: &'a Path,
    file: File,
    nodes: u64,
    lanes: u64,
}

impl<'a> Memory<'a> {
    /// Opens a file. Creates it if it is missing, and extends it unless it is a device.
    pub fn open(path: &'a Path, shape: Shape) -> Result<Self, StreamError> {
        let failed = |error| StreamError::Memory(path.to_owned(), error);
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(false);
        let memory = Self {
            path,
            file: file.open(path).map_err(failed)?,
            nodes: shape.nodes.into(),
            lanes: shape.lanes.into(),
        };
        let known = memory.file.metadata().map_err(failed)?;
        let needed =
            memory.place(0, 0) + memory.nodes * (memory.nodes - 1) / 2 * memory.lanes * 4 * ROOM_BYTES;
        if known.is_file() && known.len() < needed {
            memory.file.set_len(needed).map_err(failed)?;
        }
        Ok(memory)
    }

    /// Prepares the memory at node 0: empties all pipes and writes the session's number.
    pub fn begin(&self, number: u64) -> Result<(), StreamError> {
        for pair in 0..self.nodes * (self.nodes - 1) / 2 {
            for lane in 0..self.lanes {
                for place in self.pipes(pair, lane) {
                    self.at(place, WORDS)?.clear();
                }
            }
        }
        let mut proof = self.at(0, PROOF_WORDS)?;
        proof.clear();
        let number = number.to_ne_bytes();
        // SAFETY: borrowed as long as the call. There is room for it. A process that wrote there since breaks
        // the proof, and the check fails.
        let _ = unsafe { Writer::new(proof).write([&raw const number[..], &raw const number[..0]]) };
        Ok(())
    }

    /// Checks at another node that the memory has the session's number.
    pub fn check(&self, number: u64) -> Result<(), StreamError> {
        let (mut found, mut none) = ([0; WORD_BYTES], []);
        let mut proof = Reader::new(self.at(0, PROOF_WORDS)?);
        // SAFETY: borrowed as long as the call.
        let read = unsafe { proof.read([&raw mut found[..], &raw mut none[..]]) };
        match read == Ok(WORD_BYTES) && found == number.to_ne_bytes() {
            true => Ok(()),
            false => Err(StreamError::Memory(
                self.path.to_owned(),
                io::Error::other("it is not the memory that node 0 has"),
            )),
        }
    }

    /// Returns the pipes of node `me` to another node, for one page server: control and bulk.
    pub fn of(&self, me: u16, other: u16, lane: usize) -> Result<[Pipes; 2], StreamError> {
        let (low, high) = (u64::from(me.min(other)), u64::from(me.max(other)));
        let [control, far_control, bulk, far_bulk] = self.pipes(high * (high - 1) / 2 + low, lane as u64);
        let both = |from_lower, from_higher| {
            let (outgoing, incoming) = match me < other {
                true => (from_lower, from_higher),
                false => (from_higher, from_lower),
            };
            Ok::<_, StreamError>(Pipes {
                outgoing: self.at(outgoing, WORDS)?,
                incoming: self.at(incoming, WORDS)?,
            })
        };
        Ok([both(control, far_control)?, both(bulk, far_bulk)?])
    }

    fn pipes(&self, pair: u64, lane: u64) -> [u64; 4] {
        std::array::from_fn(|number| self.place(pair, lane) + number as u64 * ROOM_BYTES)
    }

    fn place(&self, pair: u64, lane: u64) -> u64 {
        PROOF_BYTES + (pair * self.lanes + lane) * 4 * ROOM_BYTES
    }

    fn at(&self, place: u64, words: usize) -> Result<SharedPipe, StreamError> {
        let failed = |error: MemoryError| StreamError::Memory(self.path.to_owned(), io::Error::other(error));
        SharedPipe::at(&self.file, place, words).map_err(failed)
    }
}
