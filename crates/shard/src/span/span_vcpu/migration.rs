//! The two ends of a vCPU's move: its departure from one shard and its arrival in another.

use std::time::Duration;

use kvm_ioctls::VcpuFd;

use super::SpanVcpu;
use crate::arch::x86_64::state::{Processor, StateError};
use crate::span::clock::wait_until;
use crate::span::residency::ArrivalResult;
use crate::span::vcpu_migration::{MigratingVcpu, MoveOrder, VcpuState};
use fault_point::fault_point;

/// Time limit for the clock of this host to reach the one of the host that a vCPU comes from.
const CLOCK_CATCH_UP_TIMEOUT: Duration = Duration::from_secs(1);

impl SpanVcpu {
    /// Sends the vCPU to another shard. It stands still, with no access of its own half done.
    pub(super) fn leave(&mut self, fd: &VcpuFd, order: MoveOrder) {
        let still_since_ns = self.tsc.nanoseconds();
        if order.to == self.router.me() {
            self.apply([self.residency.stay(order, false)]);
            return;
        }
        fault_point!(move_stopped);
        match Processor::take(fd, &self.register_numbers) {
            Ok(processor) => {
                fault_point!(move_read);
                self.migrate(processor, order, false, still_since_ns);
                fault_point!(move_departed);
            }
            Err(error) => {
                tracing::warn!(%error, "vCPU {} stays", self.vcpu);
                self.apply([self.residency.stay(order, true)]);
            }
        }
    }

    fn migrate(&mut self, processor: Processor, order: MoveOrder, refused: bool, still_since_ns: u64) {
        let state = VcpuState {
            processor,
            apic: self.apic.clone(),
            activity: self.activity,
            pv_eoi: self.pv_eoi.register(),
            tsc_adjustment: self.tsc_adjustment,
        };
        let effects = self.residency.depart(order, state, refused, still_since_ns);
        self.apply(effects);
    }

    /// Installs a vCPU that has come. One that this host's KVM does not take goes back; one that comes back must be taken.
    pub(super) fn arrive(&mut self, fd: &mut VcpuFd, migrating: MigratingVcpu) -> Result<(), StateError> {
        let MigratingVcpu { state, transfer } = migrating;
        let is_sane = state.apic.is_sane() && state.apic.id() == u32::from(self.vcpu);
        if !is_sane {
            // It has passed through nobody's hands but those of shards of this VM.
            return Err(StateError::Insane);
        }
        // That takes no time, if clocks differ by less than the way takes.
        wait_until(transfer.still_since_ns, CLOCK_CATCH_UP_TIMEOUT, || {
            self.refresh_tsc_offset();
            self.tsc.nanoseconds()
        });
        fault_point!(move_received);
        let installed = state.processor.give(fd, || Ok(()));
        self.apic = state.apic;
        // A value that was taken once is taken again.
        self.pv_eoi.set_register(state.pv_eoi, &mut self.apic);
        self.activity = state.activity;
        self.tsc_adjustment = state.tsc_adjustment;
        // The sender may not have told its KVM yet.
        self.kvm_apic_base = None;
        let apic = &mut self.apic;
        let accept = |vector, level| apic.accept(vector, level);
        match self
            .residency
            .arrive(transfer, installed.is_ok(), self.tsc.nanoseconds(), accept)
        {
            ArrivalResult::Resident(effect) => {
                // What the shared page says is of the last time that it ran here.
                fd.get_kvm_run().ready_for_interrupt_injection = 0;
                self.sync_task_priority(fd);
                fault_point!(move_installed);
                self.apply([effect]);
                fault_point!(move_resumed);
                Ok(())
            }
            ArrivalResult::Returned {
                order,
                still_since_ns,
            } => {
                if let Err(error) = installed {
                    tracing::warn!(%error, "vCPU {} is refused", self.vcpu);
                }
                self.migrate(state.processor, order, true, still_since_ns);
                Ok(())
            }
            ArrivalResult::Lost => installed,
        }
    }
}
