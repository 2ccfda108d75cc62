//! Nodes in one process, each with its own view, over sockets.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use dsm::{End, Link, Method, Node, PAGE_LEN, Pipes, Settings, Shape};
use urpc::host::SharedPipe;
use urpc::pipe::Pipe;

/// Longer than any test may take.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Nodes of one memory, all in this process.
#[allow(dead_code, reason = "not every test program has one in its own process")]
pub struct Nodes {
    pub nodes: Vec<Node>,
    /// Reason of each node's end, in order.
    pub ends: std::sync::Mutex<mpsc::Receiver<(u16, End)>>,
}

/// Shape with which all tests begin.
pub fn shape(nodes: u16, pages: u32) -> Shape {
    Shape {
        nodes,
        pages,
        lanes: 1,
        migratory: false,
        method: None,
    }
}

/// Starts nodes. Fails if userfaultfd is refused.
#[allow(dead_code, reason = "not every test program starts nodes so")]
pub fn start(shape: Shape) -> Nodes {
    start_with(shape, &Settings::default())
}

/// As [`start`], with other settings.
#[allow(dead_code, reason = "as above")]
pub fn start_with(shape: Shape, settings: &Settings) -> Nodes {
    start_over(shape, settings, |_, _| UnixStream::pair().unwrap())
}

/// As [`start_with`], over streams that `pair` makes for two nodes, the lower one first.
#[allow(dead_code, reason = "as above")]
pub fn start_over(
    shape: Shape,
    settings: &Settings,
    pair: impl Fn(usize, usize) -> (UnixStream, UnixStream),
) -> Nodes {
    start_linked(shape, settings, |low, high| {
        let (control, far_control) = pair(low, high);
        let (bulk, far_bulk) = pair(low, high);
        [[control, bulk], [far_control, far_bulk]].map(|streams| Link::new(streams.map(OwnedFd::from), None))
    })
}

/// Transport of the nodes' streams.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "as above")]
pub enum Way {
    Sockets,
    /// Pipes beside the sockets, of that many words each.
    Pipes(usize),
}

/// All transports: sockets; pipes as VMs have them; pipes that hold no page.
#[allow(dead_code, reason = "as above")]
pub const WAYS: [Way; 3] = [Way::Sockets, Way::Pipes(1 << 14), Way::Pipes(1 << 8)];

/// As [`start`], over that transport.
#[allow(dead_code, reason = "as above")]
pub fn start_by(way: Way, shape: Shape) -> Nodes {
    match way {
        Way::Sockets => start(shape),
        Way::Pipes(words) => start_linked(shape, &Settings::default(), |_, _| piped(words)),
    }
}

/// Both ends of a link with pipes of that many words.
#[allow(dead_code, reason = "as above")]
pub fn piped(words: usize) -> [Link; 2] {
    let memory = tempfile::tempfile_in("/dev/shm").unwrap();
    let room = Pipe::bytes(words).next_multiple_of(PAGE_LEN) as u64;
    memory.set_len(4 * room).unwrap();
    let pipe = |number: usize| SharedPipe::at(&memory, number as u64 * room, words).unwrap();
    let pipes = |side: usize| {
        [0, 2].map(|first| Pipes {
            outgoing: pipe(first + side),
            incoming: pipe(first + 1 - side),
        })
    };
    let (control, far_control) = UnixStream::pair().unwrap();
    let (bulk, far_bulk) = UnixStream::pair().unwrap();
    [
        Link::new([control.into(), bulk.into()], Some(pipes(0))),
        Link::new([far_control.into(), far_bulk.into()], Some(pipes(1))),
    ]
}

/// Starts nodes over links that `link` makes for two nodes, the lower one's end first.
#[allow(dead_code, reason = "as above")]
pub fn start_linked(shape: Shape, settings: &Settings, link: impl Fn(usize, usize) -> [Link; 2]) -> Nodes {
    let count = usize::from(shape.nodes);
    let mut links: Vec<Vec<Vec<Option<Link>>>> = (0..count)
        .map(|_| {
            (0..shape.lanes)
                .map(|_| (0..count).map(|_| None).collect())
                .collect()
        })
        .collect();
    for low in 0..count {
        for high in low + 1..count {
            let (lower, higher) = links.split_at_mut(high);
            for (lane, far_lane) in lower[low].iter_mut().zip(&mut higher[0]) {
                let [near, far] = link(low, high);
                (lane[high], far_lane[low]) = (Some(near), Some(far));
            }
        }
    }
    let (told, ends) = mpsc::channel();
    let nodes = links
        .into_iter()
        .enumerate()
        .map(|(me, links)| {
            let told = told.clone();
            let hook = Box::new(move |end: &End| drop(told.send((me as u16, end.clone()))));
            let names = (0..count).map(|node| format!("node {node}")).collect();
            Node::start(me as u16, shape, links, names, settings, hook).unwrap()
        })
        .collect();
    Nodes {
        nodes,
        ends: ends.into(),
    }
}

/// A stream with that delay.
#[allow(dead_code, reason = "as above")]
pub fn slow(by: Duration) -> (UnixStream, UnixStream) {
    let (near, inner_near) = UnixStream::pair().unwrap();
    let (inner_far, far) = UnixStream::pair().unwrap();
    for (mut from, to) in [
        (inner_near.try_clone().unwrap(), inner_far.try_clone().unwrap()),
        (inner_far, inner_near),
    ] {
        let (put, take) = mpsc::channel::<(Instant, Vec<u8>)>();
        std::thread::spawn(move || {
            let mut bytes = [0; 1 << 16];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                if put.send((Instant::now() + by, bytes[..count].to_vec())).is_err() {
                    return;
                }
            }
        });
        std::thread::spawn(move || {
            for (due, bytes) in take {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                if (&to).write_all(&bytes).is_err() {
                    return;
                }
            }
            // The writer is gone: close the other end.
            let _ = to.shutdown(Shutdown::Both);
        });
    }
    (near, far)
}

/// Returns a word of a node's view.
pub fn word(node: &Node, page: u32, index: usize) -> &std::sync::atomic::AtomicU64 {
    assert!(page as usize * PAGE_LEN < node.bytes() && index < PAGE_LEN / 8);
    // SAFETY: within the view, aligned, and used as atomics only.
    unsafe { &*node.view().add(page as usize * PAGE_LEN + index * 8).cast() }
}

/// Page servers publish their counters when they sleep.
#[allow(dead_code, reason = "not every test program looks")]
pub fn published() {
    std::thread::sleep(Duration::from_millis(20));
}

/// Fills zero pages at node 0, their manager, by few faults; node 1 then reads the words written and zeroes
/// elsewhere.
#[allow(dead_code, reason = "not every test program looks")]
pub fn fill_at_manager(memory: &Nodes, pages: Range<u32>) {
    let [manager, other] = &memory.nodes[..] else {
        unreachable!("two nodes");
    };
    published();
    let before = manager.meter().writes.count;
    for page in pages.clone() {
        word(manager, page, 1).store(u64::from(page) + 1, Relaxed);
    }
    published();
    let faults = manager.meter().writes.count - before;
    let most = pages.len() as u64 / 8;
    assert!(
        faults > 0 && faults <= most,
        "{faults} faults for {} pages",
        pages.len()
    );
    // Claimed pages are like any other.
    for page in pages {
        assert_eq!(word(other, page, 1).load(Relaxed), u64::from(page) + 1);
        assert_eq!(word(other, page, 7).load(Relaxed), 0);
    }
}

/// Both methods of mapping pages in the view.
#[allow(dead_code, reason = "not every test program looks")]
pub const METHODS: [Option<Method>; 2] = [None, Some(Method::Copy)];

/// Runs `work`, and fails if it takes too long instead of waiting for a page forever.
pub fn within(limit: Duration, work: impl FnOnce() + Send + 'static) {
    let (done, was_done) = mpsc::channel();
    let worker = std::thread::spawn(move || {
        work();
        let _ = done.send(());
    });
    match was_done.recv_timeout(limit) {
        Ok(()) => worker.join().unwrap(),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            let panic = worker.join().unwrap_err();
            std::panic::resume_unwind(panic);
        }
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("not done within {limit:?}"),
    }
}
