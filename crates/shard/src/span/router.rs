//! Brings interrupts and packets to the vCPU they are for, in this shard or another.
//!
//! Who sends waits for room in a channel if need be. The threads that receive never send: they put mail into event slots, and
//! give the home's device proxy server ([`super::device_proxy_server`]) what must be answered. So two shards that flood one another can't wait for each
//! other in a circle.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use apic::{Delivery, Interrupt, Shorthand};
use dsm::{Batches, Causal};

use super::device_proxy_server::IoRequest;
use super::enabled_apics::EnabledApics;
use super::event_slot::EventSlot;
use super::link::Sending;
use super::owner_table::{Owner, OwnerTable};
use super::packet::{Access, Packet};
use super::pending_events::Answer;
use super::startup::{Startup, Waiter};
use super::tsc_step_barrier::{EXIT_TIMEOUT, StepError, TscStepBarrier};
use super::vcpu_migration::{MoveOrder, Outcome};

/// The shard that has the devices.
pub const HOME: u8 = 0;

/// How long a vCPU waits for others to obey its INIT.
const INIT_TIMEOUT: Duration = Duration::from_secs(1);

/// One shard's.
pub struct Router {
    me: u8,
    event_slots: Vec<EventSlot>,
    owners: OwnerTable,
    enabled: Mutex<EnabledApics>,
    /// To the other shards.
    links: Vec<Option<Sending>>,
    /// The home's: how many INIT and start-up interrupts each vCPU was sent.
    startups: Mutex<Vec<u64>>,
    /// The home's: what is to be done for other shards.
    io_requests: Option<mpsc::SyncSender<IoRequest>>,
    /// The home's: how many moves it has ordered.
    orders: AtomicU64,
    /// The last move of each vCPU that was heard of.
    moves: Mutex<Vec<Option<Outcome>>>,
    moved: Condvar,
    /// What packets come after, where the guest's page tables are merged.
    causal: OnceLock<Arc<Causal>>,
    /// Where vCPUs enter the guest, if that has the clocks of several hosts.
    barrier: OnceLock<Arc<TscStepBarrier>>,
}

impl Router {
    /// For shard `me`, with vCPUs where `shards` says. `links` lead to the other shards; `io_requests` is the home's.
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

    /// Has packets come after what the shard's processors changed in merged page tables, from now on.
    pub fn set_causal(&self, causal: Arc<Causal>) {
        // Said once.
        let _ = self.causal.set(causal);
    }

    /// Has the vCPUs of this shard keep time with other hosts, from now on.
    pub fn set_tsc_step_barrier(&self, barrier: Arc<TscStepBarrier>) {
        // Said once.
        let _ = self.barrier.set(barrier);
    }

    /// Where vCPUs enter the guest, if that has the clocks of several hosts.
    pub fn tsc_step_barrier(&self) -> Option<&Arc<TscStepBarrier>> {
        self.barrier.get()
    }

    /// From now on the vCPUs of this shard add that to their host's counter.
    ///
    /// # Errors
    /// If the guest's time would go back, or if there is but one host.
    pub fn step(&self, offset: u64) -> Result<(), StepError> {
        let barrier = self.barrier.get().ok_or(StepError::OneHost)?;
        barrier.step(offset, EXIT_TIMEOUT, || {
            self.event_slots.iter().for_each(EventSlot::request_exit);
        })
    }

    /// This shard.
    pub fn me(&self) -> u8 {
        self.me
    }

    /// The vCPU's slot here; none for a number that no vCPU has.
    pub fn event_slot(&self, vcpu: u8) -> Option<&EventSlot> {
        self.event_slots.get(usize::from(vcpu))
    }

    /// Where the vCPU is, as far as is known here.
    pub fn owner(&self, vcpu: u8) -> Option<Owner> {
        self.owners.of(vcpu)
    }

    /// Where all are.
    pub fn shards(&self) -> Vec<u8> {
        let count = u8::try_from(self.owners.count()).unwrap_or(u8::MAX);
        (0..count)
            .filter_map(|vcpu| Some(self.owners.of(vcpu)?.shard))
            .collect()
    }

    /// The VM ends: nobody waits any more.
    pub fn end(&self) {
        self.event_slots.iter().for_each(EventSlot::end);
        self.links.iter().flatten().for_each(Sending::end);
        self.moved.notify_all();
    }

    /// Sends a packet to another shard. One that does not exist gets nothing.
    pub fn send(&self, shard: u8, packet: &Packet) {
        let Some(Some(link)) = self.links.get(usize::from(shard)) else {
            return;
        };
        if let Some(causal) = self.causal.get() {
            // Whatever others send between the two, the channel keeps their order.
            let batches = causal.before();
            // With two, the other one has its own.
            link.send(&match self.links.len() {
                2 => Packet::After {
                    count: batches.of(usize::from(self.me)),
                },
                _ => Packet::AfterAll { batches },
            });
        }
        link.send(packet);
    }

    /// Delivers an interrupt to every vCPU that it is for; `from` sent it, if a vCPU did. Those to nobody are lost, as on a
    /// real machine. An INIT is obeyed when this returns: what the same vCPU sends next must not overtake it.
    pub fn interrupt(&self, interrupt: &Interrupt, shorthand: Shorthand, from: Option<u8>) {
        let mut inits = 0;
        if let (Some(slot), Delivery::Init) =
            (from.and_then(|from| self.event_slot(from)), interrupt.delivery)
        {
            // Of INITs that were obeyed too late.
            slot.post(|events| events.obeyed = 0);
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
                    // One that resets itself can't wait for that.
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
            // Two that reset one another would wait for ever, a guest's own fault.
            let _ = slot.wait_for(Some(INIT_TIMEOUT), |events| {
                let all = events.obeyed >= inits;
                all.then(|| events.obeyed = 0)
            });
        }
    }

    /// A vCPU of this shard has obeyed the INIT of another, which is told where it waits: what is known here of its place may
    /// be old, and nobody would send this on.
    pub fn report_init_done(&self, by: u8, version: u64, waiter: Waiter) {
        let Waiter { vcpu, shard } = waiter;
        let packet = Packet::Obeyed { vcpu, by, version };
        if shard == self.me {
            self.post(vcpu, packet);
        } else {
            self.send(shard, &packet);
        }
    }

    /// A vCPU of this shard, which has moved `version` times, has enabled or disabled its interrupt controller.
    pub fn report_enabled(&self, vcpu: u8, version: u64, is_enabled: bool) {
        lock(&self.enabled).update(vcpu, version, is_enabled);
        self.broadcast(&Packet::Enabled {
            vcpu,
            version,
            is_enabled,
        });
    }

    /// A vCPU accesses a device from a shard that has none; none when the VM ends first.
    pub fn access(&self, vcpu: u8, access: Access) -> Option<Answer> {
        self.send(HOME, &Packet::Access { vcpu, access });
        self.event_slot(vcpu)?
            .wait_for(None, |events| events.answer.take())
    }

    /// A level-triggered interrupt has been served.
    pub fn end_of_interrupt(&self, vector: u8) {
        if self.me == HOME {
            self.submit_io(IoRequest::EndOfInterrupt { vector });
        } else {
            self.send(HOME, &Packet::EndOfInterrupt { vector });
        }
    }

    /// A vCPU has left for another shard.
    pub fn departed(&self, vcpu: u8, owner: Owner) {
        self.owners.update(vcpu, owner);
    }

    /// A vCPU has come here, or back, or could not leave.
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

    /// Moves a vCPU to a shard, and waits for the outcome until `deadline`, or until `is_over`. The home's.
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
            // An order before may have been given up, and come out now.
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
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// A packet has come from `from`. Never sends.
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

    /// What shard `from` sends next comes after so many changes of page tables: waits until they are here.
    fn after(&self, from: u8, batches: &Batches) {
        if let Some(causal) = self.causal.get() {
            causal.after(usize::from(from), batches);
        }
    }

    /// Puts what a packet brings into the vCPU's slot, or sends it to where the vCPU is.
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

    /// Numbers one, for the vCPU's thread here to take or to send on.
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
            // It ends with the VM.
            let _ = io_requests.send(request);
        }
    }

    fn broadcast(&self, packet: &Packet) {
        for link in self.links.iter().flatten() {
            link.send(packet);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is whole, whoever panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
/// The same tests, with the channels that lead to other hosts.
#[cfg(test)]
#[path = "router/tests.rs"]
#[expect(clippy::duplicate_mod, reason = "each kind of channel must do the same")]
mod tests_over_streams;
