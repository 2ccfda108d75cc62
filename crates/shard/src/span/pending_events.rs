//! Pending events of one vCPU: interrupts, orders and replies. They form a set rather than a queue: events
//! that a guest can send without end merge as in the interrupt controller. So their size is bounded.

use serde::{Deserialize, Serialize};

use super::packet::Packet;
use super::startup::Startups;
use super::vcpu_migration::{MigratingVcpu, MoveOrder, VcpuState};

/// Set of interrupt vectors, one bit each.
pub type Vectors = [u64; 4];

/// Calls `each` with every vector of the set.
fn each_of(vectors: &Vectors, mut each: impl FnMut(u8)) {
    for (index, mut word) in (0_u8..).zip(*vectors) {
        while word != 0 {
            each(index * 64 + word.trailing_zeros() as u8);
            word &= word - 1;
        }
    }
}

/// Non-maskable interrupts that a vCPU has not taken, two at most. A processor handles one and latches one
/// more meanwhile (SDM vol. 3, 7.7.1). KVM has the same limit for its own controllers.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Nmis(u8);

impl Nmis {
    const MAX: u8 = 2;

    /// Adds one NMI.
    pub fn add(&mut self) {
        self.join(Self(1));
    }

    /// Adds other NMIs.
    pub fn join(&mut self, others: Self) {
        self.0 = self.0.saturating_add(others.0).min(Self::MAX);
    }

    /// Takes all NMIs and returns their number.
    pub fn take(&mut self) -> u8 {
        std::mem::take(&mut self.0)
    }

    /// Returns whether no NMI is pending.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// A device's reply to an access.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct DeviceReply {
    /// The value that was read; 0 for a write.
    pub value: u64,
}

/// Events that migrate with a vCPU.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Signals {
    /// Edge-triggered interrupts.
    pub edges: Vectors,
    /// Level-triggered interrupts.
    pub levels: Vectors,
    /// Non-maskable interrupts.
    pub nmis: Nmis,
    /// INIT and start-up interrupts.
    pub startups: Startups,
}

impl Signals {
    /// Adds an interrupt.
    pub fn interrupt(&mut self, vector: u8, level: bool) {
        let vectors = if level { &mut self.levels } else { &mut self.edges };
        vectors[usize::from(vector / 64)] |= 1 << (vector % 64);
    }

    /// Calls `each` with every interrupt, and whether it is level-triggered.
    pub fn interrupts(&self, mut each: impl FnMut(u8, bool)) {
        each_of(&self.levels, |vector| each(vector, true));
        each_of(&self.edges, |vector| each(vector, false));
    }

    /// Returns whether no event is pending.
    pub fn is_empty(&self) -> bool {
        self.edges == [0; 4] && self.levels == [0; 4] && self.nmis.is_empty() && self.startups.is_empty()
    }
}

/// All pending events of a vCPU. `S` is the state of a migrating vCPU.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct PendingEvents<S = VcpuState> {
    /// Events for the vCPU in whichever shard it is.
    pub signals: Signals,
    /// Order to migrate.
    pub leave: Option<MoveOrder>,
    /// The vCPU itself, which has arrived in this shard.
    pub arrival: Option<Box<MigratingVcpu<S>>>,
    /// Reply of a device.
    pub reply: Option<DeviceReply>,
    /// Number of INITs from this vCPU that their targets have completed.
    pub inits_done: u32,
}

impl<S> Default for PendingEvents<S> {
    fn default() -> Self {
        Self {
            signals: Signals::default(),
            leave: None,
            arrival: None,
            reply: None,
            inits_done: 0,
        }
    }
}

impl<S> PendingEvents<S> {
    /// Adds the event in a packet for a vCPU. Packets for the shard itself change nothing.
    pub fn add(&mut self, packet: Packet<S>) {
        match packet {
            Packet::Interrupt { vector, level, .. } => self.signals.interrupt(vector, level),
            Packet::Nmi { .. } => self.signals.nmis.add(),
            Packet::Numbered { number, startup, .. } => self.signals.startups.insert(number, startup),
            Packet::Answer { value, .. } => self.reply = Some(DeviceReply { value }),
            Packet::Obeyed { .. } => self.inits_done += 1,
            Packet::Leave { order, .. } => self.leave = Some(order),
            Packet::Arrive { migrating, .. } => self.arrival = Some(migrating),
            Packet::Startup { .. }
            | Packet::Enabled { .. }
            | Packet::After { .. }
            | Packet::AfterAll { .. }
            | Packet::EndOfInterrupt { .. }
            | Packet::Access { .. }
            | Packet::Doorbell { .. }
            | Packet::Owner { .. } => {}
        }
    }

    /// Takes all events that the loop of the vCPU serves: all but replies and completed INITs.
    pub fn take(&mut self) -> Self {
        Self {
            signals: std::mem::take(&mut self.signals),
            leave: self.leave.take(),
            arrival: self.arrival.take(),
            ..Self::default()
        }
    }

    /// Returns whether no event waits for the vCPU's loop. Replies and completed INITs do not count: their
    /// waiter takes them.
    pub fn is_empty(&self) -> bool {
        self.signals.is_empty() && self.leave.is_none() && self.arrival.is_none()
    }

    /// Returns the events as packets, to forward to the owner of `vcpu`. A reply stays, since the thread that
    /// sent the request waits here.
    pub fn into_packets(mut self, vcpu: u8) -> Vec<Packet<S>> {
        let mut packets = Vec::new();
        self.signals.interrupts(|vector, level| {
            packets.push(Packet::Interrupt { vcpu, vector, level });
        });
        packets.extend((0..self.signals.nmis.take()).map(|_| Packet::Nmi { vcpu }));
        packets.extend(
            self.signals
                .startups
                .drain()
                .map(|(number, startup)| Packet::Numbered {
                    vcpu,
                    number,
                    startup,
                }),
        );
        packets.extend(self.leave.map(|order| Packet::Leave { vcpu, order }));
        packets
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn forwarded_packets_equal_the_merged_events(
            came in prop::collection::vec((any::<u8>(), any::<bool>()), 0..50),
            nmis in 0..4_u8,
        ) {
            let mut events = PendingEvents::<()>::default();
            for (vector, level) in &came {
                events.signals.interrupt(*vector, *level);
            }
            for _ in 0..nmis {
                events.add(Packet::Nmi { vcpu: 3 });
            }
            prop_assert_eq!(events.is_empty(), came.is_empty() && nmis == 0);
            let mut expected = came;
            expected.sort_unstable();
            expected.dedup();
            let packets = events.into_packets(3);
            let mut sent: Vec<_> = packets
                .iter()
                .filter_map(|packet| match packet {
                    Packet::Interrupt { vcpu: 3, vector, level } => Some((*vector, *level)),
                    _ => None,
                })
                .collect();
            sent.sort_unstable();
            prop_assert_eq!(sent, expected);
            let sent_nmis = packets.iter().filter(|packet| matches!(packet, Packet::Nmi { vcpu: 3 })).count();
            prop_assert_eq!(sent_nmis, usize::from(nmis.min(2)));
        }
    }
}
