//! Watch of the host's memory, in each process that serves VMs which can be trimmed: a cell, or the monitor
//! of one VM.
//!
//! [`policy::memory::pressure`] decides. The watch measures the host and the VMs, and orders the limits. It
//! asks no shard for anything: the kernel counts what a VM has in memory, and a shard that does not answer an
//! order gets no second one.
//!
//! A process that serves a VM anew, after its predecessor has died, begins with the user's limit and orders
//! it in its first round, or a lower one if the host is short of memory. So no lowered limit outlives its
//! watch.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use config::Size;
use hostinfo::pressure::{MemoryPressure, guest_resident_bytes};
use page::PAGE_BYTES;
use policy::memory::pressure::{HostPages, PagedVm, Pressure, ROUND_MS, WaterMarks};
use tracing::{info, warn};

use crate::handle::{TrimmableVm, VmHandle};

/// Time between two rounds.
pub(crate) const ROUND: Duration = Duration::from_millis(ROUND_MS);

/// Limits of the VMs that a process serves.
#[derive(Debug)]
pub(crate) struct MemoryWatch {
    /// The low water that the cluster file names, bytes.
    low_water: Option<Size>,
    /// The NUMA nodes whose memory the VMs have; any if there are none.
    nodes: Vec<u32>,
    pressure: Pressure<u32>,
    /// Whether some limit was lowered at the last round.
    is_trimming: bool,
    /// Whether the host's figures could not be read, which is logged once.
    is_blind: bool,
}

impl MemoryWatch {
    /// A watch of the memory of these NUMA nodes, or of any, with this low water, or one by the host's
    /// memory.
    pub(crate) fn new(low_water: Option<Size>, nodes: Vec<u32>) -> Self {
        Self {
            low_water,
            nodes,
            pressure: Pressure::default(),
            is_trimming: false,
            is_blind: false,
        }
    }

    /// Measures the host and these VMs, and orders their limits. Never blocks on a shard.
    pub(crate) fn round(&mut self, vms: &[VmHandle]) {
        let host = match MemoryPressure::now(&self.nodes) {
            Ok(host) => host,
            Err(error) => {
                if !std::mem::replace(&mut self.is_blind, true) {
                    warn!(%error, "the host's memory is not watched");
                }
                return;
            }
        };
        let measured: BTreeMap<u32, (TrimmableVm, &VmHandle)> = vms
            .iter()
            .filter_map(|handle| handle.trimmable().map(|vm| (vm.cid, (vm, handle))))
            .collect();
        let limits = self.decide(&host, measured.values().map(|(vm, _)| *vm), |vm| {
            vm.shard.and_then(guest_resident_bytes).unwrap_or(0)
        });
        for (cid, (_, handle)) in &measured {
            if let Some(limit) = limits.get(cid) {
                handle.limit_resident_to(*limit);
            }
        }
    }

    /// Decides the limits, bytes by the VMs' numbers.
    fn decide(
        &mut self,
        host: &MemoryPressure,
        vms: impl Iterator<Item = TrimmableVm>,
        resident_bytes: impl Fn(&TrimmableVm) -> u64,
    ) -> BTreeMap<u32, u64> {
        let marks = match self.low_water {
            Some(low) => WaterMarks::new(low.0 / PAGE_BYTES),
            None => WaterMarks::of_host(host.total_bytes / PAGE_BYTES),
        };
        let vms: BTreeMap<u32, PagedVm> = vms
            .map(|vm| {
                let paged = PagedVm {
                    limit: vm.limit_bytes / PAGE_BYTES,
                    promise: vm.promised_bytes / PAGE_BYTES,
                    weight: u32::from(vm.weight),
                    resident: resident_bytes(&vm) / PAGE_BYTES,
                };
                (vm.cid, paged)
            })
            .collect();
        let pages = HostPages {
            available: host.available_bytes / PAGE_BYTES,
            shared: host.shared_bytes / PAGE_BYTES,
            stalled_centipercent: host.stalled_centipercent,
        };
        let limits = self.pressure.round(pages, marks, &vms);
        let is_trimming = limits.iter().any(|(cid, limit)| *limit < vms[cid].limit);
        if is_trimming != self.is_trimming {
            let available_mib = host.available_bytes >> 20;
            match is_trimming {
                true => info!(
                    available_mib,
                    "the host is short of memory: paged VMs are trimmed"
                ),
                false => info!(available_mib, "paged VMs have their limits again"),
            }
            self.is_trimming = is_trimming;
        }
        let bytes = |(cid, pages): (u32, u64)| (cid, pages.saturating_mul(PAGE_BYTES));
        limits.into_iter().map(bytes).collect()
    }
}

/// Starts a thread that watches the memory for one VM until that has ended; none for a VM that can't be
/// trimmed.
///
/// # Errors
/// If the host has no threads left.
pub(crate) fn begin_for(vm: &VmHandle) -> io::Result<()> {
    let nodes = vm.recorder().read(|record| record.spec.memory_nodes.clone());
    let (Some(nodes), Some(_)) = (nodes, vm.trimmable()) else {
        return Ok(());
    };
    let vm = vm.clone();
    let watch = move || {
        let mut watch = MemoryWatch::new(None, nodes);
        let vms = [vm];
        loop {
            watch.round(&vms);
            if vms[0].wait_over(ROUND) {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("memory".into())
        .spawn(watch)
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn vm(cid: u32, promised_mib: u64, weight: u16) -> TrimmableVm {
        TrimmableVm {
            cid,
            shard: None,
            limit_bytes: 512 * MIB,
            // Not a multiple of a page.
            promised_bytes: promised_mib * MIB + 7,
            weight,
        }
    }

    fn host(available_mib: u64) -> MemoryPressure {
        MemoryPressure {
            total_bytes: 4096 * MIB,
            available_bytes: available_mib * MIB,
            shared_bytes: 1024 * MIB,
            stalled_centipercent: 0,
        }
    }

    #[test]
    fn low_water_of_the_file_or_of_the_host_starts_the_trim() {
        // A twentieth of 4 GiB is 204 MiB.
        for (low_water, plenty, short) in [(None, 205, 204), (Some(Size(1024 * MIB)), 1024, 1023)] {
            let mut watch = MemoryWatch::new(low_water, Vec::new());
            let mut limit = |available| {
                let limits = watch.decide(&host(available), [vm(1, 64, 100)].into_iter(), |_| 512 * MIB);
                limits[&1]
            };
            assert_eq!(limit(plenty), 512 * MIB);
            let lowered = limit(short);
            assert!(lowered < 512 * MIB, "{lowered}");
            assert!(lowered.is_multiple_of(PAGE_BYTES));
        }
    }

    #[test]
    fn vms_are_trimmed_in_the_order_of_their_weights_down_to_their_promises() {
        let mut watch = MemoryWatch::new(Some(Size(1024 * MIB)), Vec::new());
        let vms = || [vm(1, 64, 100), vm(2, 64, 300), vm(3, 400, 100)].into_iter();
        let mut limits = BTreeMap::new();
        for _ in 0..3 {
            limits = watch.decide(&host(700), vms(), |_| 512 * MIB);
        }
        // 956 MiB are left to them: 139 for each 100 of weight, beside the promise of the third.
        let mib = |cid| limits[&cid] / MIB;
        assert_eq!([mib(1), mib(2), mib(3)], [139, 417, 400]);
        for _ in 0..100 {
            limits = watch.decide(&host(0), vms(), |_| 512 * MIB);
        }
        assert_eq!(
            limits,
            BTreeMap::from([(1, 64 * MIB), (2, 64 * MIB), (3, 400 * MIB)])
        );
        // The VM that has ended is forgotten.
        let limits = watch.decide(&host(5000), [vm(2, 64, 300)].into_iter(), |_| 64 * MIB);
        assert_eq!(limits.len(), 1);
    }
}
