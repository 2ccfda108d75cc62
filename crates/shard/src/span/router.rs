//! Routes interrupts and packets to the vCPU that they are for, in this shard or another.
//!
//! A sender blocks until its channel has room. The threads that receive never send: they post events to event
//! slots, and submit requests that need a reply to the home's device proxy server
//! ([`super::device_proxy_server`]). So two shards that flood each other cannot deadlock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

use apic::{Delivery, Interrupt, Shorthand};
use dsm::{Batches, Causal};
use locks::{IgnorePoison, lock};

use super::device_proxy_server::IoRequest;
use super::enabled_apics::EnabledApics;
use super::event_slot::EventSlot;
use super::link::Sending;
use super::owner_table::{Owner, OwnerTable};
use super::packet::{Access, Packet};
use super::pending_events::DeviceReply;
use super::startup::{Startup, Waiter};
use super::tsc_step_barrier::{EXIT_TIMEOUT, StepError, TscStepBarrier};
use super::vcpu_migration::{MoveOrder, Outcome};

/// The home: the shard with the devices.
pub const HOME: u8 = 0;

/// Time limit for other vCPUs to complete an INIT, for which its sender blocks. A host that stands still for
/// a second, as emulated ones do, must not let the sender go on: it relies on the others being stopped. Linux
/// reports a processor that is blocked for 20 s.
const INIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Router of one shard.
pub struct Router {
    me: u8,
    event_slots: Vec<EventSlot>,
    owners: OwnerTable,
    enabled: Mutex<EnabledApics>,
    /// Channels to the other shards.
    links: Vec<Option<Sending>>,
    /// In the home: number of INIT and start-up interrupts sent to each vCPU.
    startups: Mutex<Vec<u64>>,
    /// In the home: I/O requests for the device proxy server.
    io_requests: Option<mpsc::SyncSender<IoRequest>>,
    /// In the home: number of moves ordered.
    orders: AtomicU64,
    /// Latest reported move of each vCPU.
    moves: Mutex<Vec<Option<Outcome>>>,
    moved: Condvar,
    /// Causal order of packets after changes of page tables, if the guest's page tables are merged.
    causal: OnceLock<Arc<Causal>>,
    /// TSC step barrier, if the VM spans several hosts.
    barrier: OnceLock<Arc<TscStepBarrier>>,
}

impl Router {
    /// Creates the router of shard `me`. `shards` has the shard of each vCPU, `links` the channels to the
    /// other shards. Only the home has `io_requests`.
    pub fn new(
        me: u8,
        shards: &[u8],
        links: Vec<Option<Sending>>,
        io_requests: Option<mpsc::SyncSender<IoRequest>>,
    ) -> Self {
        Self {
            me,
            event_slots: shards.iter().map(|_| EventSlot::default()).collect(),
            owners: OwnerTable::new(shards),
            enabled: Mutex::new(EnabledApics::new(shards.len())),
            links,
            startups: Mutex::new(vec![0; shards.len()]),
            io_requests,
            orders: AtomicU64::new(0),
            moves: Mutex::new(vec![None; shards.len()]),
            moved: Condvar::new(),
            causal: OnceLock::new(),
            barrier: OnceLock::new(),
        }
    }

    /// Makes each later packet arrive after the changes that this shard's vCPUs have made to merged page
    /// tables.
    pub fn set_causal(&self, causal: Arc<Causal>) {
        // It is set once.
        let _ = self.causal.set(causal);
    }

    /// Makes the vCPUs of this shard follow the clocks of other hosts.
    pub fn set_tsc_step_barrier(&self, barrier: Arc<TscStepBarrier>) {
        // It is set once.
        let _ = self.barrier.set(barrier);
    }

    /// Returns the TSC step barrier, if the VM spans several hosts.
    pub fn tsc_step_barrier(&self) -> Option<&Arc<TscStepBarrier>> {
        self.barrier.get()
    }

    /// Changes the TSC offset of the vCPUs of this shard to `offset`.
    ///
    /// # Errors
    /// Fails if the guest's time would go back, or if all shards are on one host.
    pub fn step(&self, offset: u64) -> Result<(), StepError> {
        let barrier = self.barrier.get().ok_or(StepError::OneHost)?;
        barrier.step(offset, EXIT_TIMEOUT, || {
            self.event_slots.iter().for_each(EventSlot::request_exit);
        })
    }

    /// Returns the index of this shard.
    pub fn me(&self) -> u8 {
        self.me
    }

    /// Returns the vCPU's event slot in this shard; none for a number that no vCPU has.
    pub fn event_slot(&self, vcpu: u8) -> Option<&EventSlot> {
        self.event_slots.get(usize::from(vcpu))
    }

    /// Returns the owner of a vCPU by the records of this shard.
    pub fn owner(&self, vcpu: u8) -> Option<Owner> {
        self.owners.of(vcpu)
    }

    /// Returns the shard of each vCPU.
    pub fn shards(&self) -> Vec<u8> {
        let count = u8::try_from(self.owners.count()).unwrap_or(u8::MAX);
        (0..count)
            .filter_map(|vcpu| Some(self.owners.of(vcpu)?.shard))
            .collect()
    }

    /// Wakes all waiters permanently, as the VM ends.
    pub fn end(&self) {
        self.event_slots.iter().for_each(EventSlot::end);
        self.links.iter().flatten().for_each(Sending::end);
        self.moved.notify_all();
    }

    /// Returns whether a vCPU is in this shard, as far as this shard knows; none for a number that no vCPU
    /// has.
    pub fn is_here(&self, vcpu: u8) -> Option<bool> {
        Some(self.owner(vcpu)?.shard == self.me)
    }

    /// Wakes the thread of one vCPU of this shard if it waits for any event.
    pub fn wake_waiter(&self, vcpu: u8) {
        self.event_slot(vcpu).into_iter().for_each(EventSlot::wake);
    }

    /// Wakes the vCPUs' threads of this shard that wait for any event.
    pub fn wake_waiters(&self) {
        self.event_slots.iter().for_each(EventSlot::wake);
    }

    /// Sends a non-maskable interrupt to each vCPU, in whichever shard it is.
    pub fn nmi_all(&self) {
        let nmi = Interrupt {
            destination: apic::Destination::Physical(0),
            delivery: Delivery::Nmi,
            vector: 0,
            level: false,
        };
        self.interrupt(&nmi, Shorthand::All, None);
    }

    /// Sends a packet to another shard. A packet to a shard that does not exist is dropped.
    pub fn send(&self, shard: u8, packet: &Packet) {
        let Some(Some(link)) = self.links.get(usize::from(shard)) else {
            return;
        };
        if let Some(causal) = self.causal.get() {
            // Other threads may send between the two packets; the channel keeps their order.
            let batches = causal.before();
            // With two shards the receiver has the count of its own.
            link.send(&match self.links.len() {
                2 => Packet::After {
                    count: batches.of(usize::from(self.me)),
                },
                _ => Packet::AfterAll { batches },
            });
        }
        link.send(packet);
    }

    /// Delivers an interrupt to all its target vCPUs. `from` is the vCPU that sent it, if one did. An
    /// interrupt without a target is lost, as on a real machine. Returns after the targets of an INIT have
    /// reset, since the next interrupt of the same vCPU must not overtake it.
    pub fn interrupt(&self, interrupt: &Interrupt, shorthand: Shorthand, from: Option<u8>) {
        let mut inits = 0;
        if let (Some(slot), Delivery::Init) =
            (from.and_then(|from| self.event_slot(from)), interrupt.delivery)
        {
            // Clears the count of INITs that completed after their time limit.
            slot.post(|events| events.inits_done = 0);
        }
        let count = self.event_slots.len() as u32;
        let enabled = lock(&self.enabled).now();
        let targets = apic::targets(interrupt, shorthand, from.map(u32::from), count, &enabled);
        for vcpu in targets.iter().filter_map(|vcpu| u8::try_from(vcpu).ok()) {
            match interrupt.delivery {
                Delivery::Fixed | Delivery::LowestPriority => {
                    let (vector, level) = (interrupt.vector, interrupt.level);
                    self.route(vcpu, Packet::Interrupt { vcpu, vector, level });
                }
                Delivery::Nmi => self.route(vcpu, Packet::Nmi { vcpu }),
                Delivery::Init => {
                    // A vCPU that resets itself cannot wait for that.
                    let shard = self.me;
                    let from = from
                        .filter(|from| *from != vcpu)
                        .map(|vcpu| Waiter { vcpu, shard });
                    inits += u32::from(from.is_some());
                    self.startup(vcpu, Startup::Init { from });
                }
                Delivery::Startup => self.startup(
                    vcpu,
                    Startup::Start {
                        page: interrupt.vector,
                    },
                ),
                // No vCPU here has a system-management mode or an 8259.
                Delivery::Smi | Delivery::External => {}
            }
        }
        if let (Some(slot), 1..) = (from.and_then(|from| self.event_slot(from)), inits) {
            // Two vCPUs that reset each other, a fault of the guest, would otherwise wait forever.
            let _ = slot.wait_for(Some(INIT_TIMEOUT), |events| {
                let all = events.inits_done >= inits;
                all.then(|| events.inits_done = 0)
            });
        }
    }

    /// Reports that vCPU `by` of this shard has completed the INIT of another. The report goes to the shard
    /// recorded in `waiter`: the owner table may be stale, and no shard forwards this report.
    pub fn report_init_done(&self, by: u8, version: u64, waiter: Waiter) {
        let Waiter { vcpu, shard } = waiter;
        let packet = Packet::Obeyed { vcpu, by, version };
        if shard == self.me {
            self.post(vcpu, packet);
        } else {
            self.send(shard, &packet);
        }
    }

    /// Reports that a vCPU of this shard, after `version` moves, has enabled or disabled its local APIC.
    pub fn report_enabled(&self, vcpu: u8, version: u64, is_enabled: bool) {
        lock(&self.enabled).update(vcpu, version, is_enabled);
        self.broadcast(&Packet::Enabled {
            vcpu,
            version,
            is_enabled,
        });
    }

    /// Performs an access of a vCPU to a device of the home, and returns the reply; none when the VM ends
    /// first.
    pub fn access(&self, vcpu: u8, access: Access) -> Option<DeviceReply> {
        self.send(HOME, &Packet::Access { vcpu, access });
        self.event_slot(vcpu)?
            .wait_for(None, |events| events.reply.take())
    }

    /// Reports the end of a level-triggered interrupt.
    pub fn end_of_interrupt(&self, vector: u8) {
        if self.me == HOME {
            self.submit_io(IoRequest::EndOfInterrupt { vector });
        } else {
            self.send(HOME, &Packet::EndOfInterrupt { vector });
        }
    }

    /// Records that a vCPU has left for another shard.
    pub fn departed(&self, vcpu: u8, owner: Owner) {
        self.owners.update(vcpu, owner);
    }

    /// Records and reports that a vCPU has arrived, has returned, or could not leave.
    pub fn arrived(&self, vcpu: u8, outcome: Outcome) {
        self.owners.update(
            vcpu,
            Owner {
                shard: self.me,
                version: outcome.version,
            },
        );
        self.record_outcome(vcpu, outcome);
        self.broadcast(&Packet::Owner { vcpu, outcome });
    }

    /// Migrates a vCPU to a shard, and blocks until its outcome, `deadline`, or `is_over`. Only the home
    /// calls it.
    pub fn move_vcpu(
        &self,
        vcpu: u8,
        to: u8,
        deadline: Instant,
        mut is_over: impl FnMut() -> bool,
    ) -> Option<Outcome> {
        const MOVE_POLL_INTERVAL: Duration = Duration::from_millis(20);
        let number = 1 + self.orders.fetch_add(1, Ordering::Relaxed);
        let order = MoveOrder { to, number };
        self.route(vcpu, Packet::Leave { vcpu, order });
        let mut moves = lock(&self.moves);
        loop {
            // The outcome may be that of an earlier order, which its caller has given up.
            let last = *moves.get(usize::from(vcpu))?;
            if let Some(outcome) = last.filter(|outcome| outcome.order == number) {
                return Some(outcome);
            }
            if is_over() || Instant::now() >= deadline {
                return None;
            }
            moves = self
                .moved
                .wait_timeout(moves, MOVE_POLL_INTERVAL)
                .ignore_poison()
                .0;
        }
    }

    /// Receives a packet from shard `from`. Never sends.
    pub fn receive(&self, from: u8, packet: Packet) {
        match packet {
            Packet::After { count } => self.after(from, &Batches::only(usize::from(from), count)),
            Packet::AfterAll { batches } => self.after(from, &batches),
            Packet::Interrupt { vcpu, .. }
            | Packet::Nmi { vcpu }
            | Packet::Numbered { vcpu, .. }
            | Packet::Answer { vcpu, .. }
            | Packet::Leave { vcpu, .. }
            | Packet::Arrive { vcpu, .. } => self.post(vcpu, packet),
            Packet::Obeyed { vcpu, by, version } => {
                self.owners.update(by, Owner { shard: from, version });
                self.post(vcpu, packet);
            }
            Packet::Startup { vcpu, startup } => self.number(vcpu, startup),
            Packet::Enabled {
                vcpu,
                version,
                is_enabled,
            } => lock(&self.enabled).update(vcpu, version, is_enabled),
            Packet::EndOfInterrupt { vector } => self.submit_io(IoRequest::EndOfInterrupt { vector }),
            Packet::Access { vcpu, access } => self.submit_io(IoRequest::Access { from, vcpu, access }),
            Packet::Doorbell { access } => self.submit_io(IoRequest::Doorbell { access }),
            Packet::Owner { vcpu, outcome } => {
                let version = outcome.version;
                self.owners.update(vcpu, Owner { shard: from, version });
                self.record_outcome(vcpu, outcome);
            }
        }
    }

    /// Blocks until this shard has the changes of page tables that precede the next packet of shard `from`.
    fn after(&self, from: u8, batches: &Batches) {
        if let Some(causal) = self.causal.get() {
            causal.after(usize::from(from), batches);
        }
    }

    /// Posts the event in a packet to the vCPU's slot, or sends the packet to the vCPU's owner.
    fn route(&self, vcpu: u8, packet: Packet) {
        match self.owners.of(vcpu) {
            Some(owner) if owner.shard == self.me => self.post(vcpu, packet),
            Some(owner) => self.send(owner.shard, &packet),
            None => {}
        }
    }

    fn post(&self, vcpu: u8, packet: Packet) {
        if let Some(slot) = self.event_slot(vcpu) {
            slot.post(|events| events.add(packet));
        }
    }

    fn startup(&self, vcpu: u8, startup: Startup) {
        if self.me == HOME {
            self.number(vcpu, startup);
        } else {
            self.send(HOME, &Packet::Startup { vcpu, startup });
        }
    }

    /// Numbers an INIT or start-up interrupt, which the vCPU's thread here takes or forwards.
    fn number(&self, vcpu: u8, startup: Startup) {
        let number = {
            let mut startups = lock(&self.startups);
            let Some(count) = startups.get_mut(usize::from(vcpu)) else {
                return;
            };
            *count += 1;
            *count
        };
        self.post(
            vcpu,
            Packet::Numbered {
                vcpu,
                number,
                startup,
            },
        );
    }

    fn record_outcome(&self, vcpu: u8, outcome: Outcome) {
        if let Some(last) = lock(&self.moves).get_mut(usize::from(vcpu))
            && last.is_none_or(|last| last.order < outcome.order)
        {
            *last = Some(outcome);
        }
        self.moved.notify_all();
    }

    fn submit_io(&self, request: IoRequest) {
        if let Some(io_requests) = &self.io_requests {
            // The server ends with the VM.
            let _ = io_requests.send(request);
        }
    }

    fn broadcast(&self, packet: &Packet) {
        for link in self.links.iter().flatten() {
            link.send(packet);
        }
    }
}

#[cfg(test)]
mod tests;
/// The same tests with the channels between hosts.
#[cfg(test)]
#[path = "router/tests.rs"]
#[expect(clippy::duplicate_mod, reason = "each kind of channel must do the same")]
mod tests_over_streams;
