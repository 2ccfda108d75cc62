//! Both ends of a vCPU's migration: departure from the source shard and arrival in the target.

use std::time::Duration;

use kvm_ioctls::VcpuFd;

use super::SpanVcpu;
use crate::arch::x86_64::state::{Processor, StateError};
use crate::span::clock::wait_until;
use crate::span::residency::ArrivalResult;
use crate::span::vcpu_migration::{MigratingVcpu, MoveOrder, VcpuState};
use fault_point::fault_point;

/// Time limit for this host's clock to reach that of the vCPU's source host.
const CLOCK_CATCH_UP_TIMEOUT: Duration = Duration::from_secs(1);

impl SpanVcpu {
    /// Sends the paused vCPU to another shard. No access of it may be incomplete.
    pub(super) fn leave(&mut self, fd: &VcpuFd, order: MoveOrder) {
        let still_since_ns = self.tsc.nanoseconds();
        if order.to == self.router.me() {
            self.apply([self.residency.stay(order, false)]);
            return;
        }
        fault_point!(move_stopped);
        match Processor::save(fd, &self.register_numbers) {
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

    /// Installs a vCPU that has arrived. A vCPU that this host's KVM refuses returns to its source, which
    /// must accept it.
    ///
    /// # Errors
    /// Fails if the state is invalid, or if KVM refuses a vCPU that has returned.
    pub(super) fn arrive(&mut self, fd: &mut VcpuFd, migrating: MigratingVcpu) -> Result<(), StateError> {
        let MigratingVcpu { state, transfer } = migrating;
        let is_sane = state.apic.is_sane() && state.apic.id() == u32::from(self.vcpu);
        if !is_sane {
            // Only shards of this VM have handled the state, so this is a fault of one of them.
            return Err(StateError::Insane);
        }
        // This does not wait if the clocks differ by less than the latency of the message.
        wait_until(transfer.still_since_ns, CLOCK_CATCH_UP_TIMEOUT, || {
            self.refresh_tsc_offset();
            self.tsc.nanoseconds()
        });
        fault_point!(move_received);
        let installed = state.processor.restore(fd, || Ok(()));
        self.apic = state.apic;
        // The register accepted this value before.
        self.pv_eoi.set_register(state.pv_eoi, &mut self.apic);
        self.activity = state.activity;
        self.tsc_adjustment = state.tsc_adjustment;
        // The source may not have copied the base register to its KVM yet.
        self.kvm_apic_base = None;
        let apic = &mut self.apic;
        let accept = |vector, level| apic.accept(vector, level);
        match self
            .residency
            .arrive(transfer, installed.is_ok(), self.tsc.nanoseconds(), accept)
        {
            ArrivalResult::Resident(effect) => {
                // The page that KVM shares is of this vCPU's last run here.
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
