//! Memory that the hosts of all nodes share, or processes of one host, for pipes beside the streams of their links.
//!
//! A page with a number that node 0 leaves and says, so that each node finds out whether it sees the same memory; then for each two nodes
//! and lane four pipes: control from the lower node and from the higher one, and bulk likewise. One memory is used by one set of nodes
//! at a time, which is for who starts them to see to.

use std::fs::File;
use std::io;
use std::path::Path;

use dsm::{Pipes, Shape};
use urpc::host::{MemoryError, SharedPipe};
use urpc::pipe::{Pipe, Reader, WORD_BYTES, Writer};

use crate::stream::StreamError;

/// 128 KiB: 31 pages.
const WORDS: usize = 1 << 14;
/// What a pipe takes, from where a page begins.
const ROOM_BYTES: u64 = (Pipe::bytes(WORDS) as u64).next_multiple_of(PROOF_BYTES);
const PROOF_WORDS: usize = 2;
const PROOF_BYTES: u64 = 4096;

/// The memory, as one node sees it.
#[derive(Debug)]
pub struct Memory<'a> {
    path: &'a Path,
    file: File,
    nodes: u64,
    lanes: u64,
}

impl<'a> Memory<'a> {
    /// Opens a file, which is made if it is not there, and as large as it has to be if it is no device.
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

    /// As node 0, before it calls: empties all pipes, and leaves the number.
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
        // SAFETY: borrowed as long as the call. There is room for it; who wrote there since breaks the proof, and is found out by that.
        let _ = unsafe { Writer::new(proof).write([&raw const number[..], &raw const number[..0]]) };
        Ok(())
    }

    /// As another node, once it was told the number.
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

    /// The pipes of node `me` beside a lane's streams to another node: control and bulk.
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
