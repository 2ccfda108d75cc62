//! Residency of one vCPU in one shard: whether the vCPU runs here, and which events follow it when it does
//! not. Pure decisions, which [`super::span_vcpu`] carries out.
//!
//! A vCPU is resident in one shard or in transit between two. The source shard sends the vCPU first and later
//! events after it, in the same channel. So no forwarded event arrives before the vCPU. Each move has a
//! version higher by one, also the return of a refused vCPU. The design follows Cellular Disco (SOSP '99,
//! section 2.2), where messages find the owner of a VCPU.

use super::owner_table::Owner;
use super::packet::Packet;
use super::pending_events::{PendingEvents, Signals};
use super::startup::Startup;
use super::vcpu_migration::{MigratingVcpu, MoveOrder, Outcome, Transfer, VcpuState};

/// An action that the vCPU's thread must carry out.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Effect<S = VcpuState> {
    /// Send a packet to another shard.
    Send {
        /// Index of the receiving shard.
        to: u8,
        /// Packet for that shard.
        packet: Packet<S>,
    },
    /// Record that the vCPU now belongs to another shard.
    Departed(Owner),
    /// Report to all shards that the vCPU is resident here.
    Arrived(Outcome),
}

/// Decision about a vCPU's pending events.
#[derive(Debug)]
pub enum Dispatch<S = VcpuState> {
    /// The vCPU is in another shard and has no events here.
    Idle,
    /// The vCPU is in another shard: its events are forwarded there, in this order.
    Forward(Vec<Effect<S>>),
    /// The vCPU has an order to migrate: call [`VcpuResidency::depart`] or [`VcpuResidency::stay`].
    Migrate(MoveOrder),
    /// The vCPU is resident: its thread serves its events.
    Resident,
}

/// Decision about a vCPU that has arrived.
#[derive(Debug)]
pub enum ArrivalResult<S = VcpuState> {
    /// The vCPU is resident in this shard from now on.
    Resident(Effect<S>),
    /// The vCPU returns to its source: call [`VcpuResidency::depart`].
    Returned {
        /// Order to migrate to the shard that it came from.
        order: MoveOrder,
        /// Start of the vCPU's pause, as in [`Transfer`].
        still_since_ns: u64,
    },
    /// Neither the source nor the target accepts the vCPU.
    Lost,
}

/// Residency of one vCPU in one shard.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct VcpuResidency {
    vcpu: u8,
    me: u8,
    is_here: bool,
    /// Moves so far; for a vCPU in another shard, the moves when it left this one.
    version: u64,
    /// Events that the local APIC does not hold: NMI, INIT and start-up.
    pending: Signals,
}

impl VcpuResidency {
    /// Returns the residency of `vcpu` in shard `me` at the start of the VM.
    pub fn new(vcpu: u8, me: u8, is_here: bool) -> Self {
        Self {
            vcpu,
            me,
            is_here,
            version: 0,
            pending: Signals::default(),
        }
    }

    /// Returns the number of moves of the resident vCPU so far.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns whether the vCPU is resident in this shard.
    pub fn is_resident(&self) -> bool {
        self.is_here
    }

    /// Decides about pending events, from which an arrival has been taken out. `owner` is the vCPU's owner as
    /// this shard knows it. `accept` gives the local APIC a vector and whether it is level-triggered.
    pub fn dispatch<S>(
        &mut self,
        events: PendingEvents<S>,
        owner: Owner,
        accept: impl FnMut(u8, bool),
    ) -> Dispatch<S> {
        if !self.is_here {
            if events.is_empty() {
                return Dispatch::Idle;
            }
            let to = owner.shard;
            let send = |packet| Effect::Send { to, packet };
            return Dispatch::Forward(events.into_packets(self.vcpu).into_iter().map(send).collect());
        }
        self.receive(events.signals, accept);
        match events.leave {
            Some(order) => Dispatch::Migrate(order),
            None => Dispatch::Resident,
        }
    }

    /// Decides about a vCPU that arrived at `now_ns`. `is_taken` is whether this host's KVM accepted its
    /// registers. A refused vCPU returns to its source, which must accept it. In each case the vCPU keeps the
    /// state that arrived.
    pub fn arrive<S>(
        &mut self,
        transfer: Transfer,
        is_taken: bool,
        now_ns: u64,
        accept: impl FnMut(u8, bool),
    ) -> ArrivalResult<S> {
        let Transfer {
            signals,
            order,
            version,
            from,
            refused,
            still_since_ns,
        } = transfer;
        self.version = version;
        self.pending = Signals::default();
        self.receive(signals, accept);
        if is_taken {
            self.is_here = true;
            return ArrivalResult::Resident(Effect::Arrived(Outcome {
                order,
                version,
                still_ns: now_ns.saturating_sub(still_since_ns),
                refused,
            }));
        }
        if refused {
            return ArrivalResult::Lost;
        }
        ArrivalResult::Returned {
            order: MoveOrder {
                to: from,
                number: order,
            },
            still_since_ns,
        }
    }

    /// Returns the effects, in order, by which the vCPU migrates to another shard. `refused` marks the return
    /// of a vCPU that this shard could not accept.
    pub fn depart<S>(
        &mut self,
        order: MoveOrder,
        state: S,
        refused: bool,
        still_since_ns: u64,
    ) -> [Effect<S>; 2] {
        let to = order.to;
        self.version += 1;
        self.is_here = false;
        let transfer = Transfer {
            signals: std::mem::take(&mut self.pending),
            order: order.number,
            version: self.version,
            from: self.me,
            refused,
            still_since_ns,
        };
        let packet = Packet::Arrive {
            vcpu: self.vcpu,
            migrating: Box::new(MigratingVcpu { state, transfer }),
        };
        let version = self.version;
        // Later events are forwarded behind the vCPU.
        [
            Effect::Send { to, packet },
            Effect::Departed(Owner { shard: to, version }),
        ]
    }

    /// Returns the report that the vCPU stays despite an order to migrate. `refused` is whether it stays
    /// because its state could not be read.
    pub fn stay<S>(&self, order: MoveOrder, refused: bool) -> Effect<S> {
        Effect::Arrived(Outcome {
            order: order.number,
            version: self.version,
            still_ns: 0,
            refused,
        })
    }

    /// Takes the next INIT or start-up interrupt.
    pub fn take_startup(&mut self) -> Option<Startup> {
        self.pending.startups.take()
    }

    /// Returns whether an NMI is pending.
    pub fn has_nmi(&self) -> bool {
        !self.pending.nmis.is_empty()
    }

    /// Takes the pending NMIs and returns their number.
    pub fn take_nmis(&mut self) -> u8 {
        self.pending.nmis.take()
    }

    fn receive(&mut self, signals: Signals, accept: impl FnMut(u8, bool)) {
        signals.interrupts(accept);
        self.pending.nmis.join(signals.nmis);
        self.pending.startups.join(signals.startups);
    }
}

#[cfg(test)]
mod tests;
