//! Shards of one process, each with its replica and page servers that are sealed as in a shard. They fail if
//! userfaultfd is refused.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Instant;

use dsm::Batches;
use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryRegion};

use super::*;
use crate::kind::VmKind;
use crate::launch::{CoherenceLaunch, Fd, LaneSockets, Ratio, ShardMemory, TscLaunch};
use crate::process::{receive, send};
use crate::span::link::{Receiving, Sending};
use crate::span::packet::Packet;
use crate::span::router::Router;
use crate::virtio::balloon::{Balloon, Release};
use crate::virtio::test_driver::{DriverQueue, RecordedSignals, wait};
use crate::virtio::{Activation, VirtioDevice};

const BYTES: u64 = 64 << 20;
/// Size of a memory with a hole below 4 GiB, bytes.
const MUCH: u64 = (3 << 30) + (64 << 20);
const LANES: usize = 2;
const LIMIT: Duration = Duration::from_secs(30);

/// Sockets of one page server of a shard: for each other shard, its sockets to that one.
type Lane = Vec<Option<[UnixStream; 2]>>;

/// Returns the launch message that a monitor would send to one shard, and its files.
fn launch(shard: u8, bytes: u64, sockets: &[Lane]) -> (SpanLaunch, Vec<BorrowedFd<'_>>) {
    let mut files: Vec<BorrowedFd<'_>> = Vec::new();
    let mut add = |socket: &'_ UnixStream| {
        // SAFETY: open as long as `sockets`, which outlives the list.
        files.push(unsafe { BorrowedFd::borrow_raw(socket.as_raw_fd()) });
        Fd(files.len() - 1)
    };
    let shards = sockets[0].len();
    let mut lanes = Vec::new();
    for lane in sockets {
        let mut row = Vec::new();
        for ends in lane {
            row.push(ends.as_ref().map(|[control, bulk]| LaneSockets {
                control: add(control),
                bulk: add(bulk),
            }));
        }
        lanes.push(row);
    }
    let part = ShardMemory {
        bytes: bytes / shards as u64,
        file: None,
        host_nodes: Vec::new(),
    };
    let span = SpanLaunch {
        shard,
        vcpus: (0..shards as u8).collect(),
        memory: vec![part; shards],
        coherence: Some(CoherenceLaunch {
            userfaultfd: None,
            lanes,
            names: (0..shards)
                .map(|cell| format!("the shard in cell {cell}"))
                .collect(),
            kernel: 0..0,
            shared: Vec::new(),
            notes: Vec::new(),
            encrypted: false,
        }),
        channels: (0..shards).map(|_| None).collect(),
        tsc: TscLaunch {
            offset: 0,
            ratio: Ratio::ONE,
            khz: None,
            is_relied_on: true,
        },
        cpuid: Vec::new(),
    };
    (span, files)
}

/// Returns the sockets of all page servers of each shard.
fn meshed(shards: usize, lanes: usize) -> Vec<Vec<Lane>> {
    let pair = || UnixStream::pair().expect("sockets");
    let none = || (0..shards).map(|_| None).collect();
    let mut all: Vec<Vec<Lane>> = (0..shards)
        .map(|_| (0..lanes).map(|_| none()).collect())
        .collect();
    for high in 1..shards {
        let (lower, others) = all.split_at_mut(high);
        for (low, lower) in lower.iter_mut().enumerate() {
            for (near, far) in lower.iter_mut().zip(&mut others[0]) {
                let ((control, far_control), (bulk, far_bulk)) = (pair(), pair());
                near[high] = Some([control, bulk]);
                far[low] = Some([far_control, far_bulk]);
            }
        }
    }
    all
}

fn pairs() -> (Vec<Lane>, Vec<Lane>) {
    let mut both = meshed(2, LANES).into_iter();
    both.next().zip(both.next()).expect("two")
}

/// Returns one shard's memory in the state after its sandbox is closed.
fn shard(number: u8, sockets: Vec<Lane>) -> (GuestRam, &'static Coherence, Arc<EndSignal>) {
    shard_of(BYTES, number, sockets)
}

fn shard_of(bytes: u64, number: u8, sockets: Vec<Lane>) -> (GuestRam, &'static Coherence, Arc<EndSignal>) {
    let (span, files) = launch(number, bytes, &sockets);
    let (mut near, mut far) = UnixStream::pair().expect("sockets");
    send(&mut near, &span, &files).expect("a message");
    drop(files);
    drop(sockets);
    let (span, mut files) = receive::<SpanLaunch>(&mut far).expect("a message");
    let coherence = span.coherence.as_ref().expect("coherent memory");
    let replica = Replica::take(&span, coherence, bytes, &mut files).expect("a replica");
    let ram = replica
        .ram(&Layout::new(bytes, &[]).expect("a layout"))
        .expect("memory");
    let end = Arc::new(EndSignal::new().expect("an event"));
    let coherence = replica.start(&Threads::sealed(), &end).expect("lanes");
    (ram, coherence, end)
}

#[test]
fn page_servers_poll_while_all_vcpus_wait_but_not_beside_encryption() {
    assert!(matches!(polls(true, 2), Polls::Never));
    assert!(matches!(polls(false, 2), Polls::Waiting(2)));
    // Devices' threads wait in a shard without vCPUs.
    assert!(matches!(polls(false, 0), Polls::Waiting(1)));
}

#[test]
fn writes_of_one_shard_are_read_by_the_other_at_every_home() {
    let (near, far) = pairs();
    let (home, here, _) = shard(0, near);
    let (part, there, _) = shard(1, far);
    assert_eq!(home.iter().map(|region| region.len()).sum::<u64>(), BYTES);
    // Both homes, both page servers, and words over the edge of a page.
    let places = [
        0,
        4096,
        8190,
        BYTES / 2 - 4,
        BYTES / 2,
        BYTES - 8,
        (16 << 20) + 512 * 4096,
    ];
    for round in 0..50_u64 {
        for place in places.map(GuestAddress) {
            let (writer, reader) = if round % 2 == 0 {
                (&home, &part)
            } else {
                (&part, &home)
            };
            writer.write_obj(place.0 ^ round, place).expect("in memory");
            assert_eq!(reader.read_obj::<u64>(place).expect("in memory"), place.0 ^ round);
        }
    }
    let statuses = [here.status(), there.status()];
    for status in &statuses {
        assert!(status["faults"]["read"]["count"].as_u64() > Some(0), "{status:#}");
        assert!(status["pages"].as_u64() > Some(0), "{status:#}");
    }
    let hottest = statuses[0]["heat"].as_array().expect("a list");
    assert!(
        !hottest.is_empty() && hottest.len() <= HOTTEST_PAGES,
        "{hottest:?}"
    );
    assert!(here.is_whole() && there.is_whole());
}

#[test]
fn pages_above_the_hole_have_the_numbers_that_the_guest_gives_them() {
    let (near, far) = pairs();
    let (home, here, _) = shard_of(MUCH, 0, near);
    let (part, ..) = shard_of(MUCH, 1, far);
    let layout = Layout::new(MUCH, &[]).expect("a layout");
    let [below, above] = &layout.ram[..] else {
        panic!("no hole: {:?}", layout.ram);
    };
    // Its offset in the region equals that in the guest's memory, the hole included.
    let at = |place| home.get_host_address(GuestAddress(place)).expect("in memory") as u64;
    assert_eq!(at(above.start) - at(0), above.start);
    for place in [below.end - 8, above.start, above.end - 8].map(GuestAddress) {
        part.write_obj(place.0, place).expect("in memory");
        assert_eq!(home.read_obj::<u64>(place).expect("in memory"), place.0);
    }
    let heat = here.status()["heat"].to_string();
    assert!(heat.contains(&format!("{:#x}", above.start)), "{heat}");
}

#[test]
fn system_calls_wait_for_pages_as_threads_do() {
    let (near, far) = pairs();
    let (home, _, _) = shard(0, near);
    let (part, _, _) = shard(1, far);
    home.write_slice(&[7; 3 * 4096], GuestAddress(1 << 20))
        .expect("in memory");
    let (from, to) = UnixStream::pair().expect("sockets");
    // Like a device: the kernel reads one shard's memory and writes the other's.
    let address = |ram: &GuestRam, at| ram.get_host_address(GuestAddress(at)).expect("in memory");
    let (source, target) = (address(&part, 1 << 20), address(&home, 40 << 20));
    // SAFETY: three pages of guest memory each, which no other code uses.
    let (sent, came) = unsafe {
        let sent = libc::write(from.as_raw_fd(), source.cast(), 3 * 4096);
        let came = libc::recv(to.as_raw_fd(), target.cast(), 3 * 4096, libc::MSG_WAITALL);
        (sent, came)
    };
    assert_eq!((sent, came), (3 * 4096, 3 * 4096));
    let mut bytes = [0; 3 * 4096];
    part.read_slice(&mut bytes, GuestAddress(40 << 20))
        .expect("in memory");
    assert!(bytes.iter().all(|byte| *byte == 7));
}

/// Returns the cause of the end of a shard's VM, once it has ended.
fn cause(end: &EndSignal) -> Option<Ending> {
    let start = Instant::now();
    while end.cause().is_none() && start.elapsed() < LIMIT {
        thread::sleep(Duration::from_millis(5));
    }
    end.cause()
}

#[test]
fn shard_whose_peer_is_lost_ends_the_vm_and_names_the_peer() {
    let (near, far) = pairs();
    let (ram, coherence, end) = shard(0, near);
    ram.write_obj(1_u64, GuestAddress(0)).expect("its own home");
    // A thread waits for a page of the other shard, forever.
    thread::spawn(move || ram.read_obj::<u64>(GuestAddress(BYTES - 8)));
    thread::sleep(Duration::from_millis(50));
    drop(far);
    let cause = cause(&end);
    let Some(Ending::PeerLost { detail }) = cause else {
        panic!("{cause:?}");
    };
    assert_eq!(
        detail,
        "the shard in cell 1 is gone (it closed its streams), and its pages with it"
    );
    assert!(!coherence.is_whole());
}

#[test]
fn invalid_bytes_of_a_peer_end_the_vm_and_are_reported() {
    use std::io::Write;
    let (near, mut far) = pairs();
    let (_, _, end) = shard(0, near);
    let [control, _] = far[0][0].as_mut().expect("to the home");
    control.write_all(&[0x55; 16]).expect("it takes it");
    let cause = cause(&end);
    let Some(Ending::ShardFailed { detail }) = cause else {
        panic!("{cause:?}");
    };
    assert!(detail.starts_with("the shard in cell 1: "), "{detail}");
}

fn resident(shards: [&Coherence; 2]) -> u64 {
    let bytes = shards.map(|shard| shard.status()["resident_bytes"].as_u64());
    bytes
        .map(|bytes| bytes.expect("the status has the size"))
        .iter()
        .sum()
}

/// Creates the balloon over the home's replica, with free-page reporting alone: that queue has number 2.
fn balloon(
    home: &GuestRam,
    bytes: u64,
    coherence: &'static Coherence,
) -> (Balloon, Vec<DriverQueue>, Arc<RecordedSignals>) {
    let queues: Vec<DriverQueue> = (0..3).map(|index| DriverQueue::new(home, index)).collect();
    let signals = Arc::new(RecordedSignals::default());
    let release = Release(VmKind::CoherentSpan((), coherence));
    let mut balloon = Balloon::new(&Threads::sealed(), bytes, release).expect("a thread");
    let activation = Activation {
        memory: home.clone(),
        features: 1 << 5,
        queues: queues.iter().map(DriverQueue::active).collect(),
        interrupt: signals.clone(),
        resumed: false,
    };
    balloon.activate(activation).expect("a device");
    (balloon, queues, signals)
}

#[test]
fn the_balloon_takes_pages_of_both_homes_from_both_shards() {
    const TAKEN: u64 = 2 << 20;
    let (near, far) = pairs();
    let (home, here, _) = shard(0, near);
    let (part, there, _) = shard(1, far);
    let (balloon, mut queues, _told) = balloon(&home, BYTES, here);
    let list = GuestAddress(1 << 20);
    for (queue, starts) in [
        (0, [8 << 20, BYTES / 2 + (8 << 20)]),
        (2, [16 << 20, BYTES - TAKEN]),
    ] {
        let pages = || {
            starts
                .into_iter()
                .flat_map(|start| (start..start + TAKEN).step_by(4096))
        };
        for page in pages() {
            home.write_obj(page, GuestAddress(page)).expect("in memory");
            assert_eq!(part.read_obj::<u64>(GuestAddress(page)).expect("in memory"), page);
        }
        let numbers: Vec<u8> = pages()
            .flat_map(|page| ((page / 4096) as u32).to_le_bytes())
            .collect();
        home.write_slice(&numbers, list).expect("in memory");
        let full = resident([here, there]);
        match queue {
            0 => queues[0].add(&[(list.0, numbers.len() as u32)], false),
            _ => queues[2].add(&starts.map(|start| (start, TAKEN as u32)), true),
        };
        queues[queue].take_used().expect("the request is complete");
        // The other shard frees its memory when it receives the message. The memory that the device uses for
        // the first time counts too.
        let goal = full - 4 * TAKEN + (256 << 10);
        let is_less = wait(|| (resident([here, there]) <= goal).then_some(()));
        let left = resident([here, there]);
        is_less.unwrap_or_else(|| panic!("{left} bytes of {full}, after {TAKEN} twice of two copies"));
        for page in pages() {
            let shard = if page % 8192 == 0 { &home } else { &part };
            assert_eq!(shard.read_obj::<u64>(GuestAddress(page)).expect("in memory"), 0);
            part.write_obj(page + 1, GuestAddress(page)).expect("in memory");
            assert_eq!(
                home.read_obj::<u64>(GuestAddress(page)).expect("in memory"),
                page + 1
            );
        }
    }
    let status = balloon.status();
    assert_eq!(
        (&status["inflated_bytes"], &status["reported_bytes"]),
        (&json!(2 * TAKEN), &json!(2 * TAKEN))
    );
    let counted = [here, there].map(|shard| shard.status()["discarded"].as_u64());
    assert_eq!(counted, [Some(TAKEN / 2048); 2]);
}

#[test]
fn the_balloon_takes_pages_above_the_hole_and_none_in_it() {
    let (near, far) = pairs();
    let (home, here, _) = shard_of(MUCH, 0, near);
    let (part, ..) = shard_of(MUCH, 1, far);
    let layout = Layout::new(MUCH, &[]).expect("a layout");
    let [below, above] = &layout.ram[..] else {
        panic!("no hole: {:?}", layout.ram);
    };
    let (_balloon, mut queues, signals) = balloon(&home, MUCH, here);
    let places = [below.end - 4096, above.start, above.end - 4096];
    for place in places {
        part.write_obj(7_u64, GuestAddress(place)).expect("in memory");
    }
    queues[2].add(&places.map(|place| (place, 4096)), true);
    queues[2].take_used().expect("the request is complete");
    for place in places {
        assert_eq!(home.read_obj::<u64>(GuestAddress(place)).expect("in memory"), 0);
    }
    queues[2].add(&[(below.end, 4096)], true);
    assert!(signals.failure().contains("not all memory"));
}

/// Creates three shards' routers, with channels between them, whose packets are causal.
fn routers(coherence: &[&'static Coherence]) -> Vec<Arc<Router>> {
    let count = coherence.len();
    let places: Vec<u8> = (0..count as u8).collect();
    let mut ways: Vec<Vec<_>> = (0..count).map(|_| (0..count).map(|_| None).collect()).collect();
    let mut heard = Vec::new();
    for (from, to) in (0..count).flat_map(|from| (0..count).map(move |to| (from, to))) {
        if from != to {
            let file = std::fs::File::from(shard_api::memory::channel().expect("memory for a channel"));
            ways[from][to] = Some(Sending::ring(file.try_clone().expect("a copy")).expect("a channel"));
            heard.push((from, to, Receiving::ring(file).expect("a channel")));
        }
    }
    let router = |(me, links)| Arc::new(Router::new(me, &places, links, None));
    let routers: Vec<_> = (0..).zip(ways).map(router).collect();
    for (router, coherence) in routers.iter().zip(coherence) {
        router.set_causal(coherence.causal().expect("it merges page tables"));
    }
    for (from, to, receiving) in heard {
        let router = routers[to].clone();
        thread::spawn(move || receiving.run(|packet| router.receive(from as u8, packet)));
    }
    routers
}

#[test]
fn packets_of_three_shards_follow_page_tables_and_an_impossible_one_ends_the_vm() {
    let made = meshed(3, 1).into_iter();
    let shards: Vec<_> = (0..)
        .zip(made)
        .map(|(number, sockets)| shard(number, sockets))
        .collect();
    let coherence: Vec<_> = shards.iter().map(|(_, coherence, _)| *coherence).collect();
    let routers = routers(&coherence);
    for (from, to) in [(0, 1), (1, 2), (2, 0), (2, 1)] {
        routers[from].send(to, &Packet::Nmi { vcpu: to });
        let slot = routers[usize::from(to)].event_slot(to).expect("its own");
        let nmis = slot.wait_for(None, |events| {
            Some(events.signals.nmis.take()).filter(|nmis| *nmis > 0)
        });
        assert_eq!(nmis, Some(1), "from {from} to {to}");
    }
    // Shard 1 reports more batches of shard 2 than possible.
    let batches = Batches::only(2, 1 << 30);
    let router = routers[0].clone();
    let hears = thread::spawn(move || router.receive(1, Packet::AfterAll { batches }));
    let cause = cause(&shards[0].2);
    let Some(Ending::ShardFailed { detail }) = cause else {
        panic!("{cause:?}");
    };
    assert_eq!(
        detail,
        "the shard in cell 1: its packet comes after changes that there can't be"
    );
    hears.join().expect("the receiver does not wait forever");
}

#[test]
fn packet_has_counts_for_the_shards_of_its_vm_only() {
    let length = |packet: &Packet| postcard::to_allocvec(packet).expect("a packet").len();
    assert_eq!(length(&Packet::After { count: 100 }), 2, "two shards");
    let one = length(&Packet::AfterAll {
        batches: Batches::only(1, u32::MAX),
    });
    // Even with numbers of the greatest length it fits into one line of a ring.
    assert!(one + 4 * (dsm::SHARERS_MAX - 1) <= 56, "{one}");
}
