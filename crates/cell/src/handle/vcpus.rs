//! The threads of a VM's vCPUs on this host.

use std::io;

use registry::cluster::interface::Vcpu;

use super::Handle;
use crate::affinity::{VcpuThread, threads_of};

impl Handle {
    /// The vCPUs of a VM in a cell, each with the thread that runs it. Each shard of a spanning VM has a
    /// thread for each vCPU: the thread in the vCPU's cell runs it.
    ///
    /// # Errors
    /// If the VM does not run, is in no cell, or does not report where its vCPUs are.
    pub(crate) fn vcpus(&self) -> io::Result<Vec<Vcpu>> {
        let (shards, cells) = {
            let state = self.state();
            (state.shards(), state.cells.clone())
        };
        let known = self.recorder().read(|record| (record.name.clone(), record.cell));
        let Some((vm, Some(home))) = known else {
            return Err(io::Error::other("it is in no cell"));
        };
        let threads = |shard: i32, cell: u16| -> io::Result<Vec<Vcpu>> {
            let of_shard = threads_of(shard)?.into_iter();
            Ok(of_shard.map(|thread| vcpu(&vm, cell, shard, thread)).collect())
        };
        if cells.is_empty() {
            let shard = shards
                .first()
                .ok_or_else(|| io::Error::other("it does not run"))?;
            return threads(*shard, home);
        }
        let updating = self.try_begin_update();
        let locations = self.locations()?;
        if updating.is_some() {
            self.end_late_pins(&locations);
        }
        let mut vcpus = Vec::new();
        for (number, location) in (0_u8..).zip(&locations) {
            let threads = threads(location.shard, location.cell)?.into_iter();
            vcpus.extend(threads.filter(|vcpu| vcpu.vcpu == number));
        }
        Ok(vcpus)
    }
}

fn vcpu(vm: &str, cell: u16, shard_pid: i32, thread: VcpuThread) -> Vcpu {
    Vcpu {
        vm: vm.to_owned(),
        vcpu: thread.vcpu,
        cell,
        shard_pid,
        thread_id: thread.id,
        cpus: thread.cpus,
        last_cpu: thread.last_cpu,
        ran_ms: thread.ran_ms,
    }
}
