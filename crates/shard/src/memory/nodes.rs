//! The host's NUMA nodes of guest memory: binding by `mbind` (mbind(2)), and moving pages to the bound nodes.
//!
//! The shard sets the policy and moves the pages itself, on an order of its cell. `mbind` moves pages that
//! the calling process alone maps. A shard without a privileged process beside it has no other way:
//! `migrate_pages` and `move_pages` from outside need root, since a shard can't be traced, and would move its
//! program too. The control thread makes the call, which it also needs for a freeze; its filter allows only
//! the modes and flags of this module. A shard's report of a move is progress only: the cell reads the place
//! of pages from the host's `numa_maps`.
//!
//! A move is divided into steps. Between them the control thread serves other orders, and faults of vCPUs
//! wait for one piece at most: some kernels hold the lock of the address space while they copy.

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::{MemoryError, host, part_ranges};
use crate::arch::x86_64::layout::Layout;
use crate::launch::{HomeMemory, MemoryLaunch, NodeLaunch, Pages};

/// Time after which a step of a move ends, once the current piece is moved.
const STEP_LIMIT: Duration = Duration::from_millis(20);
/// Bytes that one call moves at most: about 10 ms of copying. A huge page of 1 GiB is moved whole.
const PIECE_BYTES: u64 = 8 << 20;
/// Flag that moves pages that no other process maps (linux/mempolicy.h).
pub const MPOL_MF_MOVE: libc::c_int = 1 << 1;
/// Greatest number of nodes of a kernel.
const NODES_MAX: usize = 1024;

/// The nodes of a VM's memory.
#[derive(Debug)]
pub struct MemoryNodes {
    /// The guest's nodes, each of which may be bound to a host node.
    guest: Vec<NodeLaunch>,
    /// The host nodes of all guest memory, if any are chosen.
    host: Vec<u32>,
    /// Memory by home cell, if the VM has memory of several cells.
    homes: Vec<HomeMemory>,
    /// Multiple at which memory of one home ends and that of the next begins: a huge page is of one node.
    home_step_bytes: u64,
    /// Bytes that one call moves at most; a multiple of the page size.
    piece_bytes: u64,
}

impl MemoryNodes {
    /// Returns the nodes with which a VM starts.
    pub fn new(launch: &MemoryLaunch, guest: &[NodeLaunch]) -> Self {
        Self {
            guest: guest.to_vec(),
            host: launch.host_nodes.clone(),
            homes: launch.homes.clone(),
            home_step_bytes: match launch.pages {
                Pages::Small | Pages::Transparent | Pages::Huge2M => 2 << 20,
                Pages::Huge1G => 1 << 30,
            },
            piece_bytes: match launch.pages {
                Pages::Small | Pages::Transparent | Pages::Huge2M => PIECE_BYTES,
                Pages::Huge1G => 1 << 30,
            },
        }
    }

    /// Binds memory to its nodes. Must be called again after its mappings were replaced.
    ///
    /// # Errors
    /// Fails if the host has no such node, or does not let this process use it.
    pub fn bind(&self, memory: &GuestMemoryMmap<()>, layout: &Layout) -> Result<(), MemoryError> {
        if !self.host.is_empty() {
            return bind_all(memory, layout, &self.host);
        }
        if self.guest.iter().all(|node| node.host_node.is_none()) {
            self.bind_homes(memory, layout);
            return Ok(());
        }
        let bytes = self.guest.iter().map(|node| node.memory_bytes);
        for (node, ranges) in self.guest.iter().zip(part_ranges(layout, bytes)) {
            if let Some(host_node) = node.host_node {
                for range in ranges {
                    bind(memory, &range, &[host_node])?;
                }
            }
        }
        Ok(())
    }

    /// Binds the memory of each home cell to that cell's nodes. Where the host does not let this process use
    /// them, the memory lies on any node of the VM's place.
    fn bind_homes(&self, memory: &GuestMemoryMmap<()>, layout: &Layout) {
        let sizes = whole_steps(&self.homes, self.home_step_bytes);
        for (home, ranges) in self.homes.iter().zip(part_ranges(layout, sizes.into_iter())) {
            for range in ranges {
                let _ = bind(memory, &range, &home.nodes);
            }
        }
    }

    /// Binds all memory to other nodes, or to none if `nodes` is empty. Pages stay where they are.
    ///
    /// # Errors
    /// Fails as [`MemoryNodes::bind`]; then the old binding stays.
    pub fn change(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        layout: &Layout,
        nodes: &[u32],
    ) -> Result<(), MemoryError> {
        if self.host == nodes {
            return Ok(());
        }
        if let Err(error) = bind_all(memory, layout, nodes) {
            bind_all(memory, layout, &self.host)?;
            return Err(error);
        }
        self.host = nodes.to_vec();
        if nodes.is_empty() {
            self.bind_homes(memory, layout);
        }
        Ok(())
    }

    /// Moves pages at guest-physical address `from` and above to the nodes, for one step. Ranges in `stays`
    /// are not moved. Returns the address at which the next step begins, or none at the end.
    ///
    /// # Errors
    /// Fails if the host refuses the call. A page that can't be moved now (it is locked, or there is no room)
    /// stays without an error.
    pub fn move_from(
        &self,
        memory: &GuestMemoryMmap<()>,
        layout: &Layout,
        from: u64,
        stays: impl Fn(&Range<u64>) -> Vec<Range<u64>>,
    ) -> Result<Option<u64>, MemoryError> {
        if self.host.is_empty() {
            // Without bound nodes every place is right.
            return Ok(None);
        }
        let start = Instant::now();
        for piece in pieces(&layout.ram, from, self.piece_bytes) {
            for range in without(&piece, &stays(&piece)) {
                mbind(memory, &range, libc::MPOL_BIND, &self.host, MPOL_MF_MOVE)?;
                if start.elapsed() >= STEP_LIMIT {
                    return Ok(Some(range.end));
                }
            }
        }
        Ok(None)
    }
}

/// The sizes of homes, each end rounded down to a multiple of `step_bytes`, but for the last one.
fn whole_steps(homes: &[HomeMemory], step_bytes: u64) -> Vec<u64> {
    let (mut end, mut last) = (0_u64, 0);
    let mut sizes = Vec::with_capacity(homes.len());
    for (index, home) in homes.iter().enumerate() {
        end = end.saturating_add(home.bytes);
        let rounded = match index + 1 == homes.len() {
            true => end,
            false => end / step_bytes * step_bytes,
        };
        sizes.push(rounded - last);
        last = rounded;
    }
    sizes
}

/// Divides the part of `ram` at `from` and above into pieces of at most `bytes`. Each piece ends at a
/// multiple of that, or with its region.
fn pieces(ram: &[Range<u64>], from: u64, bytes: u64) -> impl Iterator<Item = Range<u64>> + '_ {
    ram.iter().flat_map(move |region| {
        let mut at = region.start.max(from);
        std::iter::from_fn(move || {
            let end = region
                .end
                .min((at / bytes).saturating_add(1).saturating_mul(bytes));
            let piece = at..end;
            at = at.max(end);
            (!piece.is_empty()).then_some(piece)
        })
    })
}

/// Returns the parts of `range` outside of `stays`, which is sorted and inside `range`.
fn without(range: &Range<u64>, stays: &[Range<u64>]) -> Vec<Range<u64>> {
    let starts = std::iter::once(range.start).chain(stays.iter().map(|stay| stay.end));
    let ends = stays
        .iter()
        .map(|stay| stay.start)
        .chain(std::iter::once(range.end));
    starts
        .zip(ends)
        .map(|(start, end)| start..end)
        .filter(|part| !part.is_empty())
        .collect()
}

fn bind_all(memory: &GuestMemoryMmap<()>, layout: &Layout, nodes: &[u32]) -> Result<(), MemoryError> {
    layout.ram.iter().try_for_each(|range| bind(memory, range, nodes))
}

/// Binds a range inside one mapped region to host nodes, or to none in particular.
pub(super) fn bind(
    memory: &GuestMemoryMmap<()>,
    range: &Range<u64>,
    nodes: &[u32],
) -> Result<(), MemoryError> {
    let mode = if nodes.is_empty() {
        libc::MPOL_DEFAULT
    } else {
        libc::MPOL_BIND
    };
    mbind(memory, range, mode, nodes, 0)
}

fn mbind(
    memory: &GuestMemoryMmap<()>,
    range: &Range<u64>,
    mode: libc::c_int,
    nodes: &[u32],
    flags: libc::c_int,
) -> Result<(), MemoryError> {
    let what = "cannot bind memory to the host's nodes that it is to lie on";
    let mut mask = [0u64; NODES_MAX / 64];
    for node in nodes {
        let word = mask
            .get_mut(*node as usize / 64)
            .ok_or_else(|| host(what)(io::Error::from(io::ErrorKind::InvalidInput)))?;
        *word |= 1 << (node % 64);
    }
    let start = memory
        .get_host_address(GuestAddress(range.start))
        .map_err(|_| MemoryError::Regions)?;
    // SAFETY: callers give ranges inside one mapped region of guest memory, whose contents `mbind` keeps
    // wherever it moves them; the mask outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start,
            range.end - range.start,
            mode,
            mask.as_ptr(),
            NODES_MAX as u64 + 1,
            flags,
        )
    };
    if result != 0 {
        Err(host(what)(io::Error::last_os_error()))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::super::create;
    use super::*;

    const BYTES: u64 = 64 << 20;

    fn launch(host_nodes: &[u32]) -> MemoryLaunch {
        MemoryLaunch {
            bytes: BYTES,
            pages: Pages::Small,
            prefault: false,
            host_nodes: host_nodes.to_vec(),
            homes: Vec::new(),
            paging: None,
            scan: false,
        }
    }

    #[test]
    fn pieces_cover_what_is_left_of_all_regions_and_end_at_multiples() {
        let ram = [0..20, 30..36];
        let from = |at| pieces(&ram, at, 8).collect::<Vec<_>>();
        assert_eq!(from(0), [0..8, 8..16, 16..20, 30..32, 32..36]);
        assert_eq!(from(5), [5..8, 8..16, 16..20, 30..32, 32..36]);
        assert_eq!(from(16), [16..20, 30..32, 32..36]);
        assert_eq!(from(20), [30..32, 32..36]);
        assert_eq!(from(35), vec![35..36]);
        assert_eq!(from(36), []);
        assert_eq!(from(u64::MAX), []);
    }

    #[test]
    fn memory_of_a_home_ends_at_a_whole_huge_page_and_none_is_left_out() {
        let home = |bytes| HomeMemory {
            bytes,
            nodes: vec![0],
        };
        let sizes = |bytes: &[u64]| {
            let homes: Vec<HomeMemory> = bytes.iter().map(|bytes| home(*bytes)).collect();
            whole_steps(&homes, 8)
        };
        assert_eq!(sizes(&[20, 4, 8]), [16, 8, 8]);
        assert_eq!(sizes(&[7, 9]), [0, 16]);
        assert_eq!(sizes(&[16]), [16]);
        assert_eq!(sizes(&[]), [] as [u64; 0]);
    }

    #[test]
    fn excluded_ranges_are_not_moved_wherever_they_lie() {
        assert_eq!(without(&(0..10), &[]), vec![0..10]);
        assert_eq!(without(&(0..10), &[0..2, 4..5, 8..10]), [2..4, 5..8]);
        let whole = 3..6;
        assert!(without(&whole, std::slice::from_ref(&whole)).is_empty());
    }

    #[test]
    fn memory_keeps_its_contents_through_a_move_in_steps() {
        let layout = Layout::new(BYTES, &[]).unwrap();
        let memory = create(&layout, &launch(&[]), &[], None).unwrap();
        for at in (0..BYTES).step_by(1 << 20) {
            memory.write_obj(at ^ 0x5a5a, GuestAddress(at)).unwrap();
        }
        let mut nodes = MemoryNodes::new(&launch(&[]), &[]);
        let none = |_: &Range<u64>| Vec::new();
        // Every place is right until nodes are chosen.
        assert_eq!(nodes.move_from(&memory, &layout, 0, none).unwrap(), None);
        // Each host has node 0.
        nodes.change(&memory, &layout, &[0]).unwrap();
        let (mut from, mut steps) = (0, 0);
        while let Some(next) = nodes.move_from(&memory, &layout, from, none).unwrap() {
            assert!(next > from, "{next} after {from}");
            (from, steps) = (next, steps + 1);
            assert!(steps <= BYTES / PIECE_BYTES);
        }
        for at in (0..BYTES).step_by(1 << 20) {
            assert_eq!(memory.read_obj::<u64>(GuestAddress(at)).unwrap(), at ^ 0x5a5a);
        }
    }

    #[test]
    fn node_that_the_host_has_not_is_refused_and_the_memory_stays_bound_as_before() {
        let layout = Layout::new(BYTES, &[]).unwrap();
        let memory = create(&layout, &launch(&[0]), &[], None).unwrap();
        let mut nodes = MemoryNodes::new(&launch(&[0]), &[]);
        for absent in [NODES_MAX as u32 - 1, NODES_MAX as u32, u32::MAX] {
            nodes.change(&memory, &layout, &[absent]).unwrap_err();
            assert_eq!(nodes.host, [0]);
        }
        nodes.bind(&memory, &layout).unwrap();
        nodes.change(&memory, &layout, &[]).unwrap();
        assert!(create(&layout, &launch(&[1023]), &[], None).is_err());
    }
}
