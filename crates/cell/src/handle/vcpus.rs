//! The vCPUs of a VM: their threads, and KVM's statistics of them.

use std::fs::File;
use std::io;

use hostinfo::kvm_statistics::VcpuStatistics;
use locks::IgnorePoison;
use registry::cluster::interface::{BorrowedCpu, Vcpu};
use serde_json::{Value, json};
use shard_api::launch::{Answer, Order};

use super::VmHandle;
use super::pins::{ShardHost, VcpuLocation, locations_in};
use crate::affinity::{VcpuThread, threads_of};
use crate::secondary_shards::SecondaryShards;
use crate::vcpu_statistics::{HaltCounter, STATISTICS_LIMIT, for_plain, for_spans, read_all, row};

impl VmHandle {
    /// The vCPUs of a VM in a cell, each with the thread that runs it. Each shard of a spanning VM has a
    /// thread for each vCPU: the thread in the vCPU's cell runs it.
    ///
    /// # Errors
    /// If the VM does not run, is in no cell, or does not report where its vCPUs are.
    pub(crate) fn vcpus(&self) -> io::Result<Vec<Vcpu>> {
        let cells = self.state().cells.clone();
        let known = self.recorder().read(|record| (record.name.clone(), record.cell));
        let Some((vm, Some(home))) = known else {
            return Err(io::Error::other("it is in no cell"));
        };
        if cells.is_empty() {
            let (shard, threads) = self.own_threads()?;
            let (statistics, borrowed) = (self.statistics(0), self.borrowed_cpus());
            return Ok(threads
                .into_iter()
                .map(|thread| {
                    let kvm = statistics.get(usize::from(thread.vcpu)).map(for_plain);
                    let cell = lender(&borrowed, thread.vcpu).unwrap_or(home);
                    row(&vm, cell, shard, thread, kvm)
                })
                .collect());
        }
        let updating = self.try_begin_update();
        let locations = self.locations()?;
        if updating.is_some() {
            self.end_late_pins(&locations);
        }
        // Neither moves and stops nor the state are locked out during the loop, which waits for the shards.
        drop(updating);
        let shards = self.state().shards_of_cells();
        let mut vcpus = Vec::new();
        for (shard, (cell, host)) in shards.into_iter().enumerate() {
            vcpus.extend(self.vcpus_in(&vm, shard, cell, &host, &locations)?);
        }
        vcpus.sort_by_key(|known| known.vcpu);
        Ok(vcpus)
    }

    /// The vCPUs of a VM that spans cells which are in one of its shards, on this host or another.
    fn vcpus_in(
        &self,
        vm: &str,
        shard: usize,
        cell: u16,
        host: &ShardHost,
        locations: &[VcpuLocation],
    ) -> io::Result<Vec<Vcpu>> {
        if locations.iter().all(|location| location.shard != shard) {
            return Ok(Vec::new());
        }
        let threads = match host {
            ShardHost::Here(pid) => {
                let threads = threads_of(*pid)?;
                let statistics = self.statistics(shard);
                let known = threads.into_iter().map(|thread| {
                    let kvm = statistics.get(usize::from(thread.vcpu)).map(for_spans);
                    row(vm, cell, *pid, thread, kvm)
                });
                known.collect()
            }
            ShardHost::There(part) => part.vcpus()?,
        };
        Ok(resident(threads, vm, (shard, cell), locations))
    }

    /// The same for `inspect`, whether or not the VM is in a cell: `status` has the cells of the vCPUs of a
    /// VM that spans some. Without those of a shard that does not run, or of a host that does not answer.
    pub(super) fn vcpu_times(&self, status: &Value) -> Vec<Value> {
        let cells = self.state().cells.clone();
        if !cells.is_empty() {
            let locations = locations_in(status, &cells).unwrap_or_default();
            let shards = self.state().shards_of_cells();
            let mut vcpus = Vec::new();
            for (shard, (cell, host)) in shards.into_iter().enumerate() {
                let known = self.vcpus_in("", shard, cell, &host, &locations);
                vcpus.extend(known.unwrap_or_default());
            }
            vcpus.sort_by_key(|known| known.vcpu);
            let shown = |vcpu: Vcpu| {
                let mut all = times(&vcpu);
                all["cell"] = json!(vcpu.cell);
                all
            };
            return vcpus.into_iter().map(shown).collect();
        }
        let Ok((shard, threads)) = self.own_threads() else {
            return Vec::new();
        };
        let (statistics, borrowed) = (self.statistics(0), self.borrowed_cpus());
        let all = threads.into_iter().map(|thread| {
            let kvm = statistics.get(usize::from(thread.vcpu)).map(for_plain);
            let lender = lender(&borrowed, thread.vcpu);
            let mut all = times(&row("", 0, shard, thread, kvm));
            if let Some(lender) = lender {
                all["cell"] = json!(lender);
            }
            all
        });
        all.collect()
    }

    /// The threads of the vCPUs of a VM in one cell, with their times.
    ///
    /// # Errors
    /// If it does not run.
    pub(crate) fn vcpu_threads(&self) -> io::Result<Vec<VcpuThread>> {
        self.own_threads().map(|(_, threads)| threads)
    }

    fn borrowed_cpus(&self) -> Vec<BorrowedCpu> {
        let known = self.recorder().read(|record| record.borrowed_cpus.clone());
        known.unwrap_or_default()
    }

    /// The home's process and the threads of its vCPUs.
    ///
    /// # Errors
    /// If it does not run, or has ended meanwhile: its id may be another process's then.
    fn own_threads(&self) -> io::Result<(i32, Vec<VcpuThread>)> {
        let home = self.state().home.clone();
        let home = home.filter(|home| !home.has_ended());
        let home = home.ok_or_else(|| io::Error::other("it does not run"))?;
        let threads = threads_of(home.pid);
        if home.has_ended() {
            return Err(io::Error::other("it has ended"));
        }
        Ok((home.pid, threads?))
    }

    /// The files of the home's statistics of some vCPUs, beginning with `first`. They may be of any type.
    /// Empty if the shard passes none within [`STATISTICS_LIMIT`].
    fn statistics_files(&self, first: u8) -> Vec<File> {
        let _counting = self.0.counting.lock().ignore_poison();
        {
            // Sending never blocks, so the lock may be held: the answer finds the order that it belongs to.
            let mut state = self.state();
            // A shard that loads its VM would obey much later.
            if !state.runs {
                return Vec::new();
            }
            let Ok(id) = state.order(&Order::VcpuStatistics { first }) else {
                return Vec::new();
            };
            (state.statistics_asked, state.statistics) = (Some(id), None);
        }
        let mut state = self.wait(STATISTICS_LIMIT, |state| {
            state.statistics_asked.is_none() || state.orders.is_none()
        });
        state.statistics_asked = None;
        match state.statistics.take() {
            Some((Answer::VcpuStatistics { .. }, files)) => files,
            // Refused, as by a shard of the release before.
            _ => Vec::new(),
        }
    }

    /// The same of one of the shards beside the home, on this host.
    fn statistics_files_of_part(&self, index: usize, first: u8) -> Vec<File> {
        let _counting = self.0.counting.lock().ignore_poison();
        let is_ordered = {
            let state = self.state();
            let parts = state.parts.as_ref().filter(|_| state.runs);
            parts.is_some_and(|parts| parts.order_statistics(index, first))
        };
        if !is_ordered {
            return Vec::new();
        }
        let state = self.wait(STATISTICS_LIMIT, |state| {
            state.parts.as_ref().is_none_or(SecondaryShards::has_statistics)
        });
        let parts = state.parts.as_ref();
        parts.map_or_else(Vec::new, SecondaryShards::take_statistics)
    }

    /// The counters of halts of the vCPUs of a VM that runs in one shard. Blocks for [`STATISTICS_LIMIT`] at
    /// most for each group of files.
    pub(crate) fn halt_counters(&self) -> Vec<HaltCounter> {
        HaltCounter::find_all(|first| self.statistics_files(first))
    }

    /// KVM's statistics of the vCPUs of a shard on this host, 0 for the home, by number.
    fn statistics(&self, shard: usize) -> Vec<VcpuStatistics> {
        read_all(|first| match shard.checked_sub(1) {
            None => self.statistics_files(first),
            Some(index) => self.statistics_files_of_part(index, first),
        })
    }
}

/// The cell on whose CPU a vCPU runs, if that is another than its VM's.
fn lender(borrowed: &[BorrowedCpu], vcpu: u8) -> Option<u16> {
    let known = borrowed.iter().find(|borrowed| borrowed.vcpu == vcpu);
    known.map(|borrowed| borrowed.cell)
}

/// Those of a shard's vCPUs that are in it. Each shard has a thread for each vCPU of its VM, and the monitor
/// of a part on another host knows neither the VM's vCPUs in it nor the VM's name here.
fn resident(
    threads: Vec<Vcpu>,
    vm: &str,
    (shard, cell): (usize, u16),
    locations: &[VcpuLocation],
) -> Vec<Vcpu> {
    let is_here = |known: &Vcpu| {
        let location = locations.get(usize::from(known.vcpu));
        location.is_some_and(|location| location.shard == shard)
    };
    let named = |known: Vcpu| Vcpu {
        vm: vm.to_owned(),
        cell,
        ..known
    };
    threads.into_iter().filter(is_here).map(named).collect()
}

/// The thread of a vCPU and its times, for `inspect`.
fn times(vcpu: &Vcpu) -> Value {
    let mut all = json!({
        "vcpu": vcpu.vcpu,
        "shard_pid": vcpu.shard_pid,
        "thread_id": vcpu.thread_id,
        "cpus": vcpu.cpus,
        "last_cpu": vcpu.last_cpu,
        "ran_ms": vcpu.ran_ms,
        "waited_ms": vcpu.waited_ms,
    });
    if let Some(kvm) = &vcpu.kvm {
        all["kvm"] = json!(kvm);
    }
    all
}

#[cfg(test)]
mod tests {
    use crate::affinity::VcpuThread;

    use super::*;

    #[test]
    fn vcpus_of_a_shard_are_those_in_it_with_the_names_that_the_home_knows() {
        let thread = |vcpu: u8| VcpuThread {
            vcpu,
            id: 100 + i32::from(vcpu),
            cpus: vec![4, 5],
            last_cpu: 4,
            ran_ms: 10,
            waited_ms: 20,
        };
        // As the monitor on another host lists them.
        let listed = |vcpu: u8| row("", 9, 77, thread(vcpu), None);
        let location = |shard| VcpuLocation {
            cell: [3, 5][shard],
            shard,
        };
        let locations = [0, 1, 1].map(location);
        let here = resident((0..5).map(listed).collect(), "web", (1, 5), &locations);
        let known: Vec<_> = here
            .iter()
            .map(|known| (&known.vm[..], known.vcpu, known.cell, known.shard_pid))
            .collect();
        assert_eq!(known, [("web", 1, 5, 77), ("web", 2, 5, 77)]);
        assert_eq!(
            times(&here[0]),
            json!({
                "vcpu": 1, "shard_pid": 77, "thread_id": 101, "cpus": [4, 5], "last_cpu": 4,
                "ran_ms": 10, "waited_ms": 20
            })
        );
    }
}
