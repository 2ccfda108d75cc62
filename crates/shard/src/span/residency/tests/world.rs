//! Model of the shards of one VM without threads and KVM. It carries out the decisions of
//! [`super::super::VcpuResidency`], [`PendingEvents`] and [`OwnerTable`] step by step, as `Router` and
//! `SpanVcpu` do.

use std::collections::VecDeque;

use super::super::{ArrivalResult, Dispatch, Effect, VcpuResidency};
use super::history::{FakeVcpuState, History};
use crate::span::owner_table::{Owner, OwnerTable};
use crate::span::packet::Packet;
use crate::span::pending_events::PendingEvents;
use crate::span::router::HOME;
use crate::span::startup::Startup;
use crate::span::vcpu_migration::{MoveOrder, Outcome};

const VCPU: u8 = 0;

/// Model of one shard, as far as it concerns the vCPU.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct ModelShard {
    owner: Owner,
    events: PendingEvents<FakeVcpuState>,
    residency: VcpuResidency,
    state: FakeVcpuState,
    /// Effects that the vCPU's thread carries out first.
    effects: VecDeque<Effect<FakeVcpuState>>,
    /// Events that the thread has taken and handles after the effects.
    taken: Option<PendingEvents<FakeVcpuState>>,
    leaving: Option<MoveOrder>,
}

/// Model of all shards and their channels.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct World {
    shards: Vec<ModelShard>,
    /// Channels by source and target.
    channels: Vec<Vec<VecDeque<Packet<FakeVcpuState>>>>,
    pub history: History,
    /// Messages sent so far. The number grows without bound if a message circulates.
    pub messages: usize,
    is_lost: bool,
}

impl World {
    /// Returns the model at the start of the VM, with the vCPU in shard `at`.
    pub fn new(shards: u8, at: u8) -> Self {
        let shard = |me| ModelShard {
            owner: Owner {
                shard: at,
                version: 0,
            },
            events: PendingEvents::default(),
            residency: VcpuResidency::new(VCPU, me, me == at),
            state: FakeVcpuState::default(),
            effects: VecDeque::new(),
            taken: None,
            leaving: None,
        };
        let count = usize::from(shards);
        Self {
            shards: (0..shards).map(shard).collect(),
            channels: vec![vec![VecDeque::new(); count]; count],
            history: History::default(),
            messages: 0,
            is_lost: false,
        }
    }

    /// Sends an interrupt from shard `from`. Each vector is sent once.
    pub fn interrupt(&mut self, from: u8, vector: u8) {
        self.history.sent.accept(vector);
        let level = false;
        self.route(
            from,
            Packet::Interrupt {
                vcpu: VCPU,
                vector,
                level,
            },
        );
    }

    /// Sends an NMI from shard `from`.
    pub fn nmi(&mut self, from: u8) {
        self.history.sent.nmis += 1;
        self.route(from, Packet::Nmi { vcpu: VCPU });
    }

    /// Sends an INIT or start-up interrupt from shard `from`. Each is sent once.
    pub fn startup(&mut self, from: u8, startup: Startup) {
        if from == HOME {
            self.number(startup);
        } else {
            self.send(from, HOME, Packet::Startup { vcpu: VCPU, startup });
        }
    }

    /// Orders a move, as the home does.
    pub fn order(&mut self, to: u8) {
        self.history.orders += 1;
        let number = self.history.orders;
        let order = MoveOrder { to, number };
        self.route(HOME, Packet::Leave { vcpu: VCPU, order });
    }

    /// Returns the source and target of each channel that is not empty.
    pub fn under_way(&self) -> impl Iterator<Item = (u8, u8)> {
        let all = (0_u8..).zip(&self.channels);
        all.flat_map(|(from, channels)| {
            (0_u8..)
                .zip(channels)
                .map(move |(to, channel)| (from, to, channel))
        })
        .filter(|(_, _, channel)| !channel.is_empty())
        .map(|(from, to, _)| (from, to))
    }

    /// Returns the shards whose thread of the vCPU has a step to take.
    pub fn busy(&self) -> impl Iterator<Item = u8> {
        let is_busy = |shard: &ModelShard| {
            !shard.effects.is_empty()
                || shard.taken.is_some()
                || shard.leaving.is_some()
                || !shard.events.is_empty()
        };
        (0_u8..)
            .zip(&self.shards)
            .filter(move |(_, shard)| is_busy(shard))
            .map(|(shard, _)| shard)
    }

    /// Returns whether no channel and no thread has a step to take.
    pub fn is_at_rest(&self) -> bool {
        self.under_way().next().is_none() && self.busy().next().is_none()
    }

    /// Receives the next packet of a channel, as `Router::receive` does.
    pub fn deliver(&mut self, from: u8, to: u8) {
        let packet = self.channels[usize::from(from)][usize::from(to)].pop_front();
        match packet.expect("seen before") {
            Packet::Startup { startup, .. } => self.number(startup),
            Packet::Owner { outcome, .. } => {
                let version = outcome.version;
                self.update(to, Owner { shard: from, version });
                self.record(to, outcome);
            }
            packet => self.post(to, packet),
        }
    }

    /// Takes one step of a shard's thread of the vCPU, as `SpanVcpu::prepare_entry` and `depart` do. `takes`
    /// is whether its KVM accepts an arriving vCPU.
    pub fn step(&mut self, me: u8, takes: bool) {
        let shard = self.shard(me);
        if let Some(effect) = shard.effects.pop_front() {
            return self.apply(me, effect);
        }
        if let Some(order) = shard.leaving.take() {
            if order.to == me {
                shard.effects.push_back(shard.residency.stay(order, false));
                // The thread checks its events again before it enters the guest.
                shard.taken = Some(PendingEvents::default());
            } else {
                let state = std::mem::take(&mut shard.state);
                shard
                    .effects
                    .extend(shard.residency.depart(order, state, false, 0));
            }
            self.history.begun += 1;
            return;
        }
        let mut events = shard.taken.take().unwrap_or_else(|| shard.events.take());
        let Some(migrating) = events.arrival.take() else {
            return shard.dispatch(events);
        };
        shard.taken = Some(events);
        shard.state = migrating.state;
        let refused = migrating.transfer.refused;
        let is_taken = takes || refused;
        let state = &mut shard.state;
        let accept = |vector, _| state.accept(vector);
        match shard.residency.arrive(migrating.transfer, is_taken, 0, accept) {
            ArrivalResult::Resident(effect) => shard.effects.push_back(effect),
            ArrivalResult::Returned {
                order,
                still_since_ns,
            } => {
                let state = std::mem::take(&mut shard.state);
                shard
                    .effects
                    .extend(shard.residency.depart(order, state, true, still_since_ns));
            }
            ArrivalResult::Lost => self.is_lost = true,
        }
    }

    /// Returns an invariant that is violated, if any.
    pub fn broken(&self) -> Option<&'static str> {
        if self.is_lost {
            return Some("neither shard accepts the vCPU");
        }
        let states: Vec<&FakeVcpuState> = self.states().collect();
        let [state] = states[..] else {
            return Some("the vCPU is in no place or in two");
        };
        let fault = self.history.fault(state);
        if fault.is_none() && self.is_at_rest() {
            return self.broken_at_rest(state);
        }
        fault
    }

    fn broken_at_rest(&self, state: &FakeVcpuState) -> Option<&'static str> {
        let Some(shard) = self.shards.iter().find(|shard| shard.residency.is_here) else {
            return Some("the vCPU is in transit forever");
        };
        let owner = Owner {
            shard: shard.residency.me,
            version: shard.residency.version(),
        };
        if self.shards.iter().any(|shard| shard.owner != owner) {
            return Some("a shard does not know the owner");
        }
        self.history.fault_at_rest(state, owner.version)
    }

    /// Returns all states of the vCPU: in shards, in channels, and in effects between the two.
    fn states(&self) -> impl Iterator<Item = &FakeVcpuState> {
        let here = self.shards.iter().filter(|shard| shard.residency.is_here);
        let come = self
            .shards
            .iter()
            .filter_map(|shard| shard.events.arrival.as_ref());
        let effects = self.shards.iter().flat_map(|shard| &shard.effects);
        let leaving = effects.filter_map(|effect| match effect {
            Effect::Send { packet, .. } => Some(packet),
            _ => None,
        });
        let sent = self.channels.iter().flatten().flatten();
        let gone = leaving.chain(sent).filter_map(|packet| match packet {
            Packet::Arrive { migrating, .. } => Some(migrating),
            _ => None,
        });
        here.map(|shard| &shard.state)
            .chain(come.chain(gone).map(|migrating| &migrating.state))
    }

    fn apply(&mut self, me: u8, effect: Effect<FakeVcpuState>) {
        match effect {
            Effect::Send { to, packet } => self.send(me, to, packet),
            Effect::Departed(owner) => self.update(me, owner),
            Effect::Arrived(outcome) => {
                let version = outcome.version;
                self.update(me, Owner { shard: me, version });
                self.record(me, outcome);
                for to in (0..self.shards.len() as u8).filter(|to| *to != me) {
                    let news = Packet::Owner { vcpu: VCPU, outcome };
                    self.send(me, to, news);
                }
            }
        }
    }

    fn route(&mut self, from: u8, packet: Packet<FakeVcpuState>) {
        let to = self.shard(from).owner.shard;
        if to == from {
            self.post(from, packet);
        } else {
            self.send(from, to, packet);
        }
    }

    fn post(&mut self, me: u8, packet: Packet<FakeVcpuState>) {
        let events = &mut self.shard(me).events;
        let is_merged = matches!(packet, Packet::Leave { .. }) && events.leave.is_some();
        events.add(packet);
        self.history.merged += u64::from(is_merged);
    }

    /// Sends a packet. A shard has no channel to itself, so a packet to itself is dropped.
    fn send(&mut self, from: u8, to: u8, packet: Packet<FakeVcpuState>) {
        self.messages += 1;
        if to != from {
            self.channels[usize::from(from)][usize::from(to)].push_back(packet);
        }
    }

    fn number(&mut self, startup: Startup) {
        let startups = &mut self.history.sent.startups;
        startups.push(startup);
        let number = startups.len() as u64;
        let vcpu = VCPU;
        self.shard(HOME).events.add(Packet::Numbered {
            vcpu,
            number,
            startup,
        });
    }

    fn update(&mut self, me: u8, news: Owner) {
        let shard = self.shard(me);
        let owners = OwnerTable::new(&[0]);
        owners.update(0, shard.owner);
        owners.update(0, news);
        shard.owner = owners.of(0).expect("there is one");
    }

    fn record(&mut self, me: u8, outcome: Outcome) {
        if me == HOME {
            self.history.outcomes.push(outcome);
        }
    }

    fn shard(&mut self, shard: u8) -> &mut ModelShard {
        &mut self.shards[usize::from(shard)]
    }
}

impl ModelShard {
    fn dispatch(&mut self, events: PendingEvents<FakeVcpuState>) {
        let state = &mut self.state;
        match self
            .residency
            .dispatch(events, self.owner, |vector, _| state.accept(vector))
        {
            Dispatch::Idle => {}
            Dispatch::Forward(effects) => self.effects.extend(effects),
            Dispatch::Migrate(order) => self.leaving = Some(order),
            Dispatch::Resident => {
                while let Some(startup) = self.residency.take_startup() {
                    self.state.startups.push(startup);
                }
                self.state.nmis += self.residency.take_nmis();
            }
        }
    }
}
