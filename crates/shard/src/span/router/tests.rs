//! Tests of two shards in one process with real channels between them: rings, or sockets where this module is
//! `tests_over_streams`. The tests read the event slots in place of vCPUs' threads.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use apic::Destination;

use super::super::device_proxy_client::DeviceProxyClient;
use super::super::device_proxy_server::{DeviceProxyServer, IO_REQUESTS_MAX};
use super::super::ioapic::IoApicDevice;
use super::super::link::{self, Receiving};
use super::super::packet::Space;
use super::super::pending_events::PendingEvents;
use super::*;
use crate::arch::x86_64::layout::{Layout, MMIO32_START};
use crate::bus::{Bus, BusDevice};

const TIMEOUT: Duration = Duration::from_secs(20);

/// The home, with vCPUs 0 and 1, and another shard, with vCPUs 2 and 3.
struct Shards {
    home: Arc<Router>,
    other: Arc<Router>,
    io_requests: mpsc::Receiver<IoRequest>,
}

/// Channels from the home to the other shard and back.
fn channels() -> ((Sending, Receiving), (Sending, Receiving)) {
    if module_path!().ends_with("over_streams") {
        let (near, far) = UnixStream::pair().expect("a pair of sockets");
        let [(to_other, from_other), (to_home, from_home)] = [near, far].map(|end| {
            let end = link::stream::open(File::from(OwnedFd::from(end)));
            let (sending, writer, receiving) = end.expect("a channel");
            thread::spawn(|| writer.run());
            (Sending::Stream(sending), Receiving::Stream(receiving))
        });
        return ((to_other, from_home), (to_home, from_other));
    }
    let ring = || {
        let file = File::from(shard_api::memory::channel().expect("memory for a channel"));
        let sending = Sending::ring(file.try_clone().expect("a copy")).expect("a channel");
        (sending, Receiving::ring(file).expect("a channel"))
    };
    (ring(), ring())
}

fn shards() -> Shards {
    let ((to_other, from_home), (to_home, from_other)) = channels();
    let (submitter, io_requests) = mpsc::sync_channel(IO_REQUESTS_MAX);
    let places = [0, 0, 1, 1];
    let home = Arc::new(Router::new(
        0,
        &places,
        vec![None, Some(to_other)],
        Some(submitter),
    ));
    let other = Arc::new(Router::new(1, &places, vec![Some(to_home), None], None));
    for (router, from, receiving) in [(&home, 1, from_other), (&other, 0, from_home)] {
        let router = Arc::downgrade(router);
        thread::spawn(move || {
            receiving.run(|packet| {
                if let Some(router) = router.upgrade() {
                    router.receive(from, packet);
                }
            })
        });
    }
    Shards {
        home,
        other,
        io_requests,
    }
}

fn fixed(vcpu: u32, vector: u8) -> Interrupt {
    Interrupt {
        destination: Destination::Physical(vcpu),
        delivery: Delivery::Fixed,
        vector,
        level: false,
    }
}

fn init(vcpu: u32) -> Interrupt {
    Interrupt {
        delivery: Delivery::Init,
        vector: 0,
        ..fixed(vcpu, 0)
    }
}

/// Waits for events in a slot, and takes them.
#[track_caller]
fn events(router: &Router, vcpu: u8) -> PendingEvents {
    let slot = router.event_slot(vcpu).expect("a vCPU");
    slot.wait(Some(TIMEOUT));
    let events = slot.take();
    assert!(!events.is_empty(), "nothing comes for vCPU {vcpu}");
    events
}

/// Waits until the home has received all that the other shard has sent.
#[track_caller]
fn flush(other: &Router, home: &Router) {
    other.interrupt(&fixed(1, 0x99), Shorthand::None, Some(3));
    assert_eq!(vectors(&events(home, 1)), [0x99]);
}

fn vectors(events: &PendingEvents) -> Vec<u8> {
    let mut vectors = Vec::new();
    events.signals.interrupts(|vector, _| vectors.push(vector));
    vectors
}

#[test]
fn nmi_to_all_reaches_each_vcpu_once_in_its_shard() {
    let Shards { home, other, .. } = shards();
    home.nmi_all();
    for (router, vcpu) in [(&home, 0), (&home, 1), (&other, 2), (&other, 3)] {
        let events = events(router, vcpu);
        assert!(!events.signals.nmis.is_empty(), "vCPU {vcpu}");
        assert_eq!(vectors(&events), [0; 0]);
    }
    for (router, vcpu) in [(&home, 2), (&home, 3), (&other, 0), (&other, 1)] {
        assert!(router.event_slot(vcpu).expect("a vCPU").take().is_empty());
    }
}

#[test]
fn wake_up_of_all_ends_the_waits_of_all_vcpus_of_the_shard() {
    let Shards { home, .. } = shards();
    thread::scope(|scope| {
        let waits: Vec<_> = (0..4)
            .map(|vcpu| {
                let slot = home.event_slot(vcpu).expect("a vCPU");
                scope.spawn(move || slot.wait(Some(TIMEOUT)))
            })
            .collect();
        let begun = Instant::now();
        home.wake_waiters();
        waits.into_iter().for_each(|wait| wait.join().expect("it ends"));
        assert!(begun.elapsed() < TIMEOUT);
        // No event is posted.
        assert!((0..4).all(|vcpu| home.event_slot(vcpu).expect("a vCPU").take().is_empty()));
    });
}

#[test]
fn interrupt_is_delivered_only_in_the_owner_shard_of_its_vcpu() {
    let Shards { home, other, .. } = shards();
    home.interrupt(&fixed(1, 0x31), Shorthand::None, Some(0));
    home.interrupt(&fixed(2, 0x32), Shorthand::None, Some(0));
    other.interrupt(&fixed(0, 0x30), Shorthand::None, Some(2));
    assert_eq!(vectors(&events(&home, 1)), [0x31]);
    assert_eq!(vectors(&events(&other, 2)), [0x32]);
    assert_eq!(vectors(&events(&home, 0)), [0x30]);
    other.interrupt(&fixed(0, 0x40), Shorthand::Others, Some(3));
    for (router, vcpu) in [(&home, 0), (&home, 1), (&other, 2)] {
        assert_eq!(vectors(&events(router, vcpu)), [0x40]);
    }
    for (router, vcpu) in [(&home, 2), (&home, 3), (&other, 0), (&other, 1), (&other, 3)] {
        assert!(router.event_slot(vcpu).expect("a vCPU").take().is_empty());
    }
    // No vCPU has this id.
    home.interrupt(&fixed(9, 0x50), Shorthand::None, Some(0));
}

#[test]
fn packet_to_the_previous_owner_is_forwarded() {
    let Shards { home, other, .. } = shards();
    // vCPU 2 has moved to the home, which has no report of that.
    let owner = Owner {
        shard: HOME,
        version: 1,
    };
    other.departed(2, owner);
    home.interrupt(&fixed(2, 0x41), Shorthand::None, Some(0));
    let stray = events(&other, 2);
    for packet in stray.into_packets(2) {
        other.send(other.owner(2).expect("a vCPU").shard, &packet);
    }
    assert_eq!(vectors(&events(&home, 2)), [0x41]);
    home.arrived(
        2,
        Outcome {
            order: 1,
            version: 1,
            still_ns: 7,
            refused: false,
        },
    );
    assert_eq!(home.owner(2), Some(owner));
    home.interrupt(&fixed(2, 0x42), Shorthand::None, Some(0));
    assert_eq!(vectors(&events(&home, 2)), [0x42]);
}

#[test]
fn init_sender_blocks_until_the_target_has_reset() {
    let Shards { home, other, .. } = shards();
    let sender = other.clone();
    let waiting = thread::spawn(move || sender.interrupt(&init(3), Shorthand::None, Some(2)));
    // The home numbers the INIT, and its thread of that vCPU forwards it.
    let packets = events(&home, 3).into_packets(3);
    let [Packet::Numbered { number: 1, .. }] = packets[..] else {
        panic!("{packets:?}");
    };
    home.send(1, &packets[0]);
    let mut startups = events(&other, 3).signals.startups;
    let waiter = Waiter { vcpu: 2, shard: 1 };
    assert_eq!(startups.take(), Some(Startup::Init { from: Some(waiter) }));
    assert!(!waiting.is_finished());
    other.report_init_done(3, 0, waiter);
    waiting.join().expect("the sender resumes");
}

/// With three shards an INIT, which goes through the home, can overtake the report of its sender's new owner.
#[test]
fn init_done_reaches_the_waiter_in_its_recorded_shard() {
    let Shards { home, other, .. } = shards();
    // vCPU 0 was in the other shard and is in the home again; the other shard has no report of that.
    other.departed(0, Owner { shard: 1, version: 1 });
    let waiter = Waiter { vcpu: 0, shard: HOME };
    other.report_init_done(3, 0, waiter);
    let init_done = |events: &mut PendingEvents| (events.inits_done > 0).then_some(());
    let at = |router: &Router, limit| {
        router
            .event_slot(0)
            .expect("a vCPU")
            .wait_for(Some(limit), init_done)
    };
    assert_eq!(at(&other, Duration::ZERO), None);
    assert_eq!(at(&home, TIMEOUT), Some(()));
}

#[test]
fn home_receives_the_outcome_of_a_migration() {
    let Shards { home, other, .. } = shards();
    let mover = home.clone();
    let moving = thread::spawn(move || mover.move_vcpu(3, HOME, Instant::now() + TIMEOUT, || false));
    let refused = Outcome {
        order: order_to(HOME, &events(&other, 3)),
        version: 2,
        still_ns: 5,
        refused: true,
    };
    other.arrived(3, refused);
    assert_eq!(moving.join().expect("it ends"), Some(refused));
    assert_eq!(home.owner(3).map(|owner| owner.shard), Some(1));
}

#[test]
fn late_outcome_is_not_taken_for_a_newer_order() {
    let Shards { home, other, .. } = shards();
    let given_up = home.move_vcpu(3, HOME, Instant::now(), || false);
    assert_eq!(given_up, None);
    let outcome = |order, version| Outcome {
        order,
        version,
        still_ns: 5,
        refused: false,
    };
    let late = outcome(order_to(HOME, &events(&other, 3)), 1);
    // The late outcome arrives while the next is awaited.
    let (mover, is_over) = (home.clone(), Arc::new(AtomicBool::new(false)));
    let over = is_over.clone();
    let moving = thread::spawn(move || {
        let is_over = || over.load(Ordering::SeqCst);
        mover.move_vcpu(3, HOME, Instant::now() + TIMEOUT, is_over)
    });
    let next = outcome(order_to(HOME, &events(&other, 3)), 2);
    other.arrived(3, late);
    flush(&other, &home);
    is_over.store(true, Ordering::SeqCst);
    assert_eq!(moving.join().expect("it ends"), None);
    // From another shard the late outcome may even arrive after the next.
    let next = outcome(next.order + 1, 3);
    other.arrived(3, next);
    other.arrived(3, late);
    flush(&other, &home);
    assert_eq!(home.move_vcpu(3, HOME, Instant::now(), || false), Some(next));
}

/// Returns the number of the order to move to `shard`.
#[track_caller]
fn order_to(shard: u8, events: &PendingEvents) -> u64 {
    let order = events.leave.expect("an order");
    assert_eq!(order.to, shard);
    order.number
}

/// With three shards a report of the previous owner can arrive after one of the next owner.
#[test]
fn lowest_priority_interrupt_skips_apics_disabled_after_their_migration() {
    let Shards { home, other, .. } = shards();
    let chosen = |vector| {
        let interrupt = Interrupt {
            destination: Destination::Logical(0b101),
            delivery: Delivery::LowestPriority,
            ..fixed(0, vector)
        };
        home.interrupt(&interrupt, Shorthand::None, None);
        let is_for = |vcpu: &u8| !home.event_slot(*vcpu).expect("a vCPU").take().is_empty();
        [0, 2].into_iter().find(is_for)
    };
    // vCPU 2 has moved to the home, and its local APIC is disabled there.
    let owner = Owner {
        shard: HOME,
        version: 1,
    };
    home.departed(2, owner);
    home.report_enabled(0, 0, true);
    home.report_enabled(2, 1, false);
    other.report_enabled(2, 0, true);
    flush(&other, &home);
    assert!((0x20..0x60).all(|vector| chosen(vector) == Some(0)));
    // A report after a further move is accepted.
    other.report_enabled(2, 2, true);
    flush(&other, &home);
    let both: BTreeSet<_> = (0x20..0x60).map(chosen).collect();
    assert_eq!(both, [Some(0), Some(2)].into());
}

/// A device that returns the value that was written last.
#[derive(Default)]
struct Register(Mutex<Vec<u8>>);

impl BusDevice for Register {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.copy_from_slice(&lock(&self.0)[..data.len()]);
    }
    fn write(&self, _offset: u64, data: &[u8]) {
        *lock(&self.0) = data.to_vec();
    }
}

#[test]
fn home_devices_serve_vcpus_of_other_shards() {
    const PORT: u64 = 0x3F8;
    let Shards {
        home,
        other,
        io_requests,
    } = shards();
    let mut ports = Bus::default();
    ports
        .claim(PORT..PORT + 8, Arc::new(Register::default()))
        .expect("free ports");
    let mut memory = Bus::default();
    let doorbell = Arc::new(Register::default());
    memory
        .claim(MMIO32_START..MMIO32_START + 0x4000, doorbell.clone())
        .expect("free addresses");
    let server = DeviceProxyServer {
        io_requests,
        ioapic: Arc::new(IoApicDevice::new(home.clone())),
        router: home.clone(),
        ports: Arc::new(ports),
        memory: Arc::new(memory),
    };
    thread::spawn(move || server.run());
    let layout = Arc::new(Layout::new(512 << 20, &[]).expect("a layout"));
    let forward = |space| DeviceProxyClient {
        space,
        vcpu: 2,
        router: other.clone(),
        layout: layout.clone(),
    };
    let (ports, memory) = (forward(Space::Ports), forward(Space::Memory));
    ports.write(PORT, &[0x12, 0x34]);
    let mut data = [0; 2];
    ports.read(PORT, &mut data);
    assert_eq!(data, [0x12, 0x34]);
    // There is no device at this port.
    ports.read(0x80, &mut data);
    assert_eq!(data, [0xFF; 2]);
    // The notification has no reply; the device has it before the next access.
    memory.write(MMIO32_START + 0x3000, &[1, 0]);
    ports.read(PORT, &mut data);
    assert_eq!(*lock(&doorbell.0), [1, 0]);
}
