//! Pages of a shared region on the nodes of the host.
//!
//! A node's pages are moved by `mbind`, which acts on pages that the calling process maps. So the file is
//! mapped piece by piece, and the pages that it has are mapped; a hole stays one. Their content is not read.
//! Members map these pages, too, so that the kernel moves them for a process with `CAP_SYS_NICE` only.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use nix::unistd::{SysconfVar, Whence, lseek64, sysconf};

use crate::cluster::state::PagesMoved;

/// Bytes that are mapped at once. Ours: the list of their pages takes 128 KiB.
const PIECE_BYTES: u64 = 64 << 20;
/// Passes over a file. Ours: a page that the host uses at the moment, or that was just touched, moves in the
/// next one.
const PASSES: u32 = 3;
/// Flag of `mbind` that moves pages that no other process maps (linux/mempolicy.h).
const MPOL_MF_MOVE: libc::c_int = 1 << 1;
/// Flag of `mbind` that moves pages that other processes map, too.
const MPOL_MF_MOVE_ALL: libc::c_int = 1 << 2;

/// Moves the pages of a file of `bytes` to nodes. If some can't be moved, those that have moved return to the
/// `former` nodes.
pub(super) fn move_all(file: &File, bytes: u64, nodes: &[u32], former: &[u32]) -> PagesMoved {
    if !has_nodes() {
        return PagesMoved::All { moved_bytes: 0 };
    }
    let why = match bring(file, bytes, nodes) {
        Ok(Brought { before, left: 0, .. }) => return PagesMoved::All { moved_bytes: before },
        Ok(Brought { left, moves_all, .. }) => {
            let help = match moves_all {
                true => "the host uses them at the moment; try again",
                false => {
                    "VMs map them, and only a process with CAP_SYS_NICE moves such pages; run the cells as \
                     root"
                }
            };
            format!("{} KiB of the region did not move: {help}", left >> 10)
        }
        Err(error) => format!("the pages of the region did not move: {error}"),
    };
    match bring(file, bytes, former) {
        Ok(Brought { left: 0, .. }) => PagesMoved::None {
            why: format!("{why}. The region is where it was"),
        },
        _ => PagesMoved::Some {
            why: format!("{why}. The region has memory of both cells; move it to one of them"),
        },
    }
}

/// Whether the host has more than one node.
pub(super) fn has_nodes() -> bool {
    std::fs::metadata("/sys/devices/system/node/node1").is_ok()
}

/// Result of the passes over a file.
struct Brought {
    /// Bytes on other nodes before.
    before: u64,
    /// Bytes on other nodes afterwards.
    left: u64,
    /// Whether the process may move pages that other processes map.
    moves_all: bool,
}

fn bring(file: &File, bytes: u64, nodes: &[u32]) -> io::Result<Brought> {
    let nodes = Nodes::new(nodes);
    // Pages that are touched from now on are on the new nodes.
    for_each_piece(file, bytes, |piece, _| piece.bind(&nodes, 0))?;
    let (mut before, mut left, mut moves_all) = (None, 0, true);
    for _ in 0..PASSES {
        let (mut elsewhere, mut after) = (0, 0);
        for_each_piece(file, bytes, |piece, offset| {
            let pages = piece.populate(file, offset)?;
            let count = piece.elsewhere(&pages, &nodes)?;
            if count > 0 {
                moves_all &= piece.move_pages(&nodes)?;
                after += piece.elsewhere(&pages, &nodes)?;
            }
            elsewhere += count;
            Ok(())
        })?;
        before.get_or_insert(elsewhere);
        left = after;
        if elsewhere == 0 {
            break;
        }
    }
    Ok(Brought {
        before: before.unwrap_or(0),
        left,
        moves_all,
    })
}

fn for_each_piece(
    file: &File,
    bytes: u64,
    mut act: impl FnMut(&Piece, u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut offset = 0;
    while offset < bytes {
        let length = PIECE_BYTES.min(bytes - offset);
        act(&Piece::map(file, offset, length)?, offset)?;
        offset += length;
    }
    Ok(())
}

/// A set of nodes, as the kernel reads it.
pub(super) struct Nodes {
    list: Vec<u32>,
    mask: Vec<u64>,
}

impl Nodes {
    pub(super) fn new(list: &[u32]) -> Self {
        const BITS: usize = u64::BITS as usize;
        let mut mask = vec![0_u64; list.iter().max().map_or(0, |last| *last as usize / BITS) + 1];
        for node in list {
            mask[*node as usize / BITS] |= 1 << (*node as usize % BITS);
        }
        Self {
            list: list.to_vec(),
            mask,
        }
    }

    /// Number of bits of the mask. The kernel reads one bit less than the length that it receives.
    fn bits(&self) -> usize {
        self.mask.len() * u64::BITS as usize + 1
    }

    fn have(&self, node: libc::c_int) -> bool {
        u32::try_from(node).is_ok_and(|node| self.list.contains(&node))
    }
}

/// A mapping of a part of a file. No access to its content is made.
pub(super) struct Piece {
    start: NonNull<libc::c_void>,
    length: usize,
}

impl Piece {
    pub(super) fn map(file: &File, offset: u64, length: u64) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address that the kernel chooses. Nothing reads or writes the memory
        // through it, so that the changes that other processes make to it concern no reference.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset,
            )
        };
        match NonNull::new(start).filter(|_| start != libc::MAP_FAILED) {
            Some(start) => Ok(Self { start, length }),
            None => Err(io::Error::last_os_error()),
        }
    }

    /// Sets the nodes of the memory, for this and all other mappings of the file; with a flag for the pages
    /// that it has already.
    pub(super) fn bind(&self, nodes: &Nodes, flag: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is this mapping, and the mask has that many bits and lives through the call.
        let bound = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start.as_ptr(),
                self.length,
                libc::MPOL_BIND,
                nodes.mask.as_ptr(),
                nodes.bits(),
                flag,
            )
        };
        match bound {
            // A positive number of pages could not be moved.
            0.. => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Moves the pages; returns whether also those that other processes map.
    fn move_pages(&self, nodes: &Nodes) -> io::Result<bool> {
        match self.bind(nodes, MPOL_MF_MOVE_ALL) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                self.bind(nodes, MPOL_MF_MOVE).map(|()| false)
            }
            bound => bound.map(|()| true),
        }
    }

    /// Maps the pages that the file has; returns their addresses.
    fn populate(&self, file: &File, offset: u64) -> io::Result<Vec<*mut libc::c_void>> {
        let page = page_size()?;
        let mut pages = Vec::new();
        for (from, to) in data(file, offset, offset + self.length as u64)? {
            let from = (from - offset) as usize / page * page;
            let to = ((to - offset) as usize).next_multiple_of(page).min(self.length);
            // SAFETY: `from` is less than the mapping's length, as the range of data is within the mapping.
            let start = unsafe { self.start.as_ptr().byte_add(from) };
            // SAFETY: the range is within this mapping. The call maps pages, and changes no memory.
            let populated = unsafe { libc::madvise(start, to - from, libc::MADV_POPULATE_READ) };
            if populated != 0 {
                return Err(io::Error::last_os_error());
            }
            for at in (from..to).step_by(page) {
                // SAFETY: `at` is less than the mapping's length, as `to` is at most that.
                pages.push(unsafe { self.start.as_ptr().byte_add(at) });
            }
        }
        Ok(pages)
    }

    /// Number of bytes of these pages that are not on the nodes.
    fn elsewhere(&self, pages: &[*mut libc::c_void], nodes: &Nodes) -> io::Result<u64> {
        if pages.is_empty() {
            return Ok(0);
        }
        let mut found: Vec<libc::c_int> = vec![0; pages.len()];
        // SAFETY: both arrays have `pages.len()` entries and live through the call, which writes the second
        // one only. Without nodes, it moves nothing.
        let asked = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                pages.len(),
                pages.as_ptr(),
                std::ptr::null::<libc::c_int>(),
                found.as_mut_ptr(),
                0,
            )
        };
        if asked != 0 {
            return Err(io::Error::last_os_error());
        }
        // A page that is not there any more is touched later, and is then where the policy puts it.
        let elsewhere = found.iter().filter(|node| **node >= 0 && !nodes.have(**node));
        Ok(elsewhere.count() as u64 * page_size()? as u64)
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: removes this mapping, to which no reference exists. The policy is the file's, and stays.
        unsafe { libc::munmap(self.start.as_ptr(), self.length) };
    }
}

fn page_size() -> io::Result<usize> {
    let size = sysconf(SysconfVar::PAGE_SIZE)?.and_then(|size| usize::try_from(size).ok());
    size.ok_or_else(|| io::ErrorKind::Unsupported.into())
}

/// The ranges between two offsets in which a file has pages.
fn data(file: &File, from: u64, to: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut ranges = Vec::new();
    let mut at = from;
    while at < to {
        let seek = |at: u64, whence| {
            let at = i64::try_from(at).map_err(io::Error::other)?;
            let found = lseek64(file, at, whence)?;
            Ok::<u64, io::Error>(u64::try_from(found).unwrap_or(0))
        };
        let start = match seek(at, Whence::SeekData) {
            // There is no page from here on.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => break,
            start => start?,
        };
        if start >= to {
            break;
        }
        let end = seek(start, Whence::SeekHole)?.min(to);
        ranges.push((start, end));
        at = end;
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests;
