//! One vCPU's place in one shard: whether the vCPU is here, and what that means for what comes for it. Decisions only, which
//! [`super::span_vcpu`] carries out.
//!
//! A vCPU is in one shard or on its way between two. The shard that it leaves sends it first, and afterwards what still comes
//! for it, in the same channel: so nothing that is sent on is there before it. Each move, also the way back of one that was
//! refused, has a version higher by one. After Cellular Disco (SOSP '99, section 2.2), where messages find the owner of a VCPU.

use super::owner_table::Owner;
use super::packet::Packet;
use super::pending_events::{PendingEvents, Signals};
use super::startup::Startup;
use super::vcpu_migration::{MigratingVcpu, MoveOrder, Outcome, Transfer, VcpuState};

/// What the vCPU's thread is to do.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Effect<S = VcpuState> {
    /// Send it to this shard.
    Send {
        /// To whom.
        to: u8,
        /// What.
        packet: Packet<S>,
    },
    /// From here on others of this shard send to that one.
    Departed(Owner),
    /// All are told.
    Arrived(Outcome),
}

/// What comes of the mail.
#[derive(Debug)]
pub enum Dispatch<S = VcpuState> {
    /// The vCPU is elsewhere, and nothing came for it.
    Idle,
    /// It is elsewhere: what came goes there, in this order.
    Forward(Vec<Effect<S>>),
    /// It is to be made ready to leave: [`VcpuResidency::depart`], or [`VcpuResidency::stay`].
    Migrate(MoveOrder),
    /// It is here.
    Resident,
}

/// What comes of an arrival.
#[derive(Debug)]
pub enum ArrivalResult<S = VcpuState> {
    /// The vCPU is here.
    Resident(Effect<S>),
    /// It goes back: [`VcpuResidency::depart`].
    Returned {
        /// To the shard that it came from.
        order: MoveOrder,
        /// As in [`Transfer`].
        still_since_ns: u64,
    },
    /// Neither shard takes it.
    Lost,
}

/// One vCPU's, in one shard.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct VcpuResidency {
    vcpu: u8,
    me: u8,
    is_here: bool,
    /// Moves so far; of one that is elsewhere, when it was here last.
    version: u64,
    /// What its interrupt controller does not hold: NMI, INIT, start-up.
    pending: Signals,
}

impl VcpuResidency {
    /// The residency of `vcpu` in shard `me`, as the VM starts.
    pub fn new(vcpu: u8, me: u8, is_here: bool) -> Self {
        Self {
            vcpu,
            me,
            is_here,
            version: 0,
            pending: Signals::default(),
        }
    }

    /// The vCPU's moves so far. It is here.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Divides mail whose arrival has been taken out. `owner` is where the vCPU is as far as is known here; `accept` is its
    /// controller's, for a vector and whether it is level-triggered.
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

    /// The vCPU has come, at `now_ns`. `is_taken`: this host's KVM takes its registers. One that is not taken goes back; one
    /// that comes back must be taken. Whichever it is, its state is the one that came.
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

    /// The vCPU goes to another shard: what is to be done for it, one after the other. `refused`: it goes back.
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
        // What comes for it is sent on behind it.
        [
            Effect::Send { to, packet },
            Effect::Departed(Owner { shard: to, version }),
        ]
    }

    /// The vCPU, which was to leave, stays. `refused`: because it can't leave.
    pub fn stay<S>(&self, order: MoveOrder, refused: bool) -> Effect<S> {
        Effect::Arrived(Outcome {
            order: order.number,
            version: self.version,
            still_ns: 0,
            refused,
        })
    }

    /// The next INIT or start-up interrupt.
    pub fn take_startup(&mut self) -> Option<Startup> {
        self.pending.startups.take()
    }

    /// Whether an NMI is pending.
    pub fn has_nmi(&self) -> bool {
        !self.pending.nmis.is_empty()
    }

    /// Takes the pending NMIs, and returns how many there were.
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
