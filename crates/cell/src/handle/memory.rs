//! The memory of a running VM: the host's NUMA nodes that it lies on, and the origins of its pages.
//!
//! The shard binds its memory and moves it, step by step, by orders; `shard::memory::nodes` has the reasons.
//! Orders of other clients come in between. The position of the memory is read from the host afterwards,
//! since a shard under a guest's control may report anything.

use std::io;
use std::time::{Duration, Instant};

use config::vm::ShareSpec;
use hostinfo::memory_use::numa_maps;
use registry::update::MemoryReport;
use registry::vms::Record;
use shard_api::launch::{Answer, Order};
use shard_api::page_map::PageMapPart;

use super::{VmHandle, not_an_answer};
use crate::memory_nodes::{HostMemory, Wanted, check, lenders};

/// Time limit for a move: 600 GiB at 1 GiB/s.
const MOVE_LIMIT: Duration = Duration::from_secs(600);

impl VmHandle {
    /// Returns the origins of the VM's pages from page `from` on, of which one part is reported at a time.
    ///
    /// # Errors
    /// If the VM does not record them, or reports something else.
    pub(crate) fn page_map(&self, from: u64) -> io::Result<PageMapPart> {
        match self.act(&Order::PageMap { from })? {
            Answer::PageMap(part) if part.answers(from) => Ok(part),
            Answer::PageMap(_) => Err(io::Error::other(
                "the VM's shard reports pages that do not follow",
            )),
            other => Err(not_an_answer(&other)),
        }
    }

    /// Binds the memory of a VM to these nodes, or to none in particular, moves it there, and records that.
    /// Returns the nodes of its pages.
    ///
    /// # Errors
    /// If the VM's memory may not be there, or the VM ends meanwhile. Memory that was bound stays so.
    pub(super) fn place_memory(&self, record: &Record, nodes: &[u32]) -> io::Result<MemoryReport> {
        let shard = {
            let state = self.state();
            let shard = state.shards().first().copied().filter(|_| state.runs);
            shard.ok_or_else(|| io::Error::other("the VM does not run yet"))?
        };
        let is_scanned = record.spec.share == Some(ShareSpec::Scan);
        if !nodes.is_empty() {
            let present = numa_maps::guest_pages(shard, is_scanned).ok();
            let wanted = Wanted::of(&record.spec, present);
            let host = HostMemory::read(shard, wanted.pool_kib())?;
            check(nodes, &wanted, &host, &lenders(record)?).map_err(io::Error::other)?;
        }
        let deadline = Instant::now() + MOVE_LIMIT;
        let mut from = 0;
        loop {
            let order = Order::MemoryNodes {
                nodes: nodes.to_vec(),
                from,
            };
            let next = match self.act(&order)? {
                Answer::MemoryMoved { next } => next,
                other => return Err(not_an_answer(&other)),
            };
            if from == 0 {
                // All of it is bound from now on.
                self.recorder()
                    .change(|record| record.spec.memory_nodes = nodes.to_vec());
            }
            match next {
                None => break,
                Some(next) if next <= from => {
                    return Err(io::Error::other("the VM's shard does not go on with the move"));
                }
                Some(_) if Instant::now() >= deadline => {
                    return Err(io::Error::other(format!(
                        "its memory is bound, and not all of it has moved within {} s; help: repeat the \
                         command",
                        MOVE_LIMIT.as_secs()
                    )));
                }
                Some(next) => from = next,
            }
        }
        Ok(match numa_maps::guest_pages(shard, is_scanned) {
            Ok(pages) => MemoryReport {
                pages: Some(pages),
                unknown: None,
            },
            Err(error) => MemoryReport {
                pages: None,
                unknown: Some(error.to_string()),
            },
        })
    }
}
