//! The vCPUs of a VM on this host: their threads, and KVM's statistics of them.

use std::fs::File;
use std::io;
use std::time::Duration;

use hostinfo::kvm_statistics;
use locks::IgnorePoison;
use registry::cluster::interface::{Vcpu, VcpuStatistics};
use serde_json::{Value, json};
use shard_api::launch::{Answer, Order};

use super::VmHandle;
use crate::affinity::{VcpuThread, threads_of};
use crate::vcpu_statistics;

/// Time limit for a shard to pass files. The figures are absent if it is busy for longer.
const STATISTICS_LIMIT: Duration = Duration::from_secs(2);

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
            let statistics = self.statistics();
            return Ok(threads
                .into_iter()
                .map(|thread| {
                    let statistics = statistics.get(usize::from(thread.vcpu)).map(shown);
                    vcpu(&vm, home, shard, thread, statistics)
                })
                .collect());
        }
        let updating = self.try_begin_update();
        let locations = self.locations()?;
        if updating.is_some() {
            self.end_late_pins(&locations);
        }
        let mut vcpus = Vec::new();
        for (number, location) in (0_u8..).zip(&locations) {
            let threads = threads_of(location.shard)?.into_iter();
            let own = threads.filter(|thread| thread.vcpu == number);
            vcpus.extend(own.map(|thread| vcpu(&vm, location.cell, location.shard, thread, None)));
        }
        Ok(vcpus)
    }

    /// The same for `inspect`, whether or not the VM is in a cell. Empty for a VM that spans cells, or does
    /// not run.
    pub(super) fn vcpu_times(&self) -> Vec<Value> {
        if !self.state().cells.is_empty() {
            return Vec::new();
        }
        let Ok((shard, threads)) = self.own_threads() else {
            return Vec::new();
        };
        let statistics = self.statistics();
        let all = threads.into_iter().map(|thread| {
            let mut all = json!({
                "vcpu": thread.vcpu,
                "shard_pid": shard,
                "thread_id": thread.id,
                "cpus": thread.cpus,
                "last_cpu": thread.last_cpu,
                "ran_ms": thread.ran_ms,
                "waited_ms": thread.waited_ms,
            });
            if let Some(statistics) = statistics.get(usize::from(thread.vcpu)) {
                all["kvm"] = json!(shown(statistics));
            }
            all
        });
        all.collect()
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

    /// The files of KVM's statistics of some vCPUs, beginning with `first`. They may be of any type. Empty if
    /// the shard passes none within [`STATISTICS_LIMIT`].
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

    /// KVM's statistics of the vCPUs of a VM that does not span cells, by number. Empty if they are not
    /// known: the host's KVM may have none, and the shard may be of the release before.
    fn statistics(&self) -> Vec<kvm_statistics::VcpuStatistics> {
        let mut all = Vec::new();
        loop {
            let Ok(first) = u8::try_from(all.len()) else {
                return all;
            };
            let files = self.statistics_files(first);
            if files.is_empty() {
                return all;
            }
            for (file, vcpu) in files.iter().zip(first..=u8::MAX) {
                match vcpu_statistics::read(file, vcpu) {
                    Ok(statistics) => all.push(statistics),
                    Err(error) => {
                        tracing::warn!("{error}");
                        return all;
                    }
                }
            }
        }
    }
}

fn shown(statistics: &kvm_statistics::VcpuStatistics) -> VcpuStatistics {
    let halted = statistics.halted();
    VcpuStatistics {
        exits: statistics.exits,
        halts: statistics.halts,
        halted_ms: halted.and_then(|halted| u64::try_from(halted.as_millis()).ok()),
        is_halted: statistics.is_halted,
    }
}

fn vcpu(vm: &str, cell: u16, shard_pid: i32, thread: VcpuThread, kvm: Option<VcpuStatistics>) -> Vcpu {
    Vcpu {
        vm: vm.to_owned(),
        vcpu: thread.vcpu,
        cell,
        shard_pid,
        thread_id: thread.id,
        cpus: thread.cpus,
        last_cpu: thread.last_cpu,
        ran_ms: thread.ran_ms,
        waited_ms: Some(thread.waited_ms),
        kvm,
    }
}
