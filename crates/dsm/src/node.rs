//! One node's part in a shared memory: its view of the region, and the lanes that serve it.

use std::ffi::CStr;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use coherence::{Engine, ManagedRange, Layout, LayoutError, NodeId, Page};

use crate::PAGE_BYTES;
use crate::batches::SHARERS_MAX;
use crate::calibration::enough_ns;
use crate::causal::Causal;
use crate::discards::{Discards, Mailbox};
use crate::driver::{EngineDriver, Peers};
use crate::shutdown::{End, Shutdown, Hook};
use crate::heat::Heat;
use crate::latency::Latency;
use crate::link::Link;
use crate::merging::Merging;
use crate::meter::Meter;
use crate::page_server::PageServer;
use crate::region::{Method, Region, RegionError, RegionOptions};
use crate::server_thread::prepare_server_thread;
use crate::shape::Shape;

/// When a lane that has nothing to do polls a while, before it sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Polls {
    /// It sleeps at once.
    #[default]
    Never,
    /// While so many threads wait for pages: all that there are, whose CPUs have nothing better to do then. For a guest, whose vCPUs
    /// want theirs otherwise.
    Waiting(usize),
    /// Unless a thread was just woken, or may run by a page that came ahead. For programs that fetch much.
    Always,
}

/// How a node serves.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// CPUs of the lanes, in turn; where the kernel likes if there are none.
    pub cpus: Vec<usize>,
    /// Ask for real-time priority.
    pub realtime: bool,
    /// How long a thread runs that has used its page for sure, nanoseconds; found by trying if it is not said.
    pub enough_ns: Option<u64>,
    /// When lanes poll a while before they sleep. On a CPU that other nodes' lanes use too they never do.
    pub polls: Polls,
    /// Ask for the next pages too where threads read one after the other, or fill fresh ones.
    pub ahead: bool,
    /// Processors of a guest whose page tables are merged, which a memory of one lane and at most [`SHARERS_MAX`] nodes can do; none
    /// if 0.
    pub processors: usize,
    /// Of that guest, the region's pages that its kernel's image, not a compressed one, was loaded into: a page of theirs that is a root
    /// of page tables stays merged when no processor has it loaded, since it is never used for anything else. The same on all nodes;
    /// none if empty.
    pub pinned: Range<u32>,
}

/// Why there is no node.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// No memory.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Not a layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No threads, or no descriptors.
    #[error("can't start the threads that serve faults: {0}")]
    Threads(std::io::Error),
}

/// A node. Its part ends when it is dropped; a thread that waits for a page then waits for ever.
#[derive(Debug)]
pub struct Node {
    me: u16,
    layout: Layout,
    region: Arc<Region>,
    heat: Arc<Heat>,
    latency: Arc<Latency>,
    causal: Option<Arc<Causal>>,
    discards: Discards,
    shutdown: Arc<Shutdown>,
    meters: Vec<Arc<Mutex<Meter>>>,
    lanes: Vec<JoinHandle<()>>,
    enough_ns: Arc<AtomicU64>,
    prefetches: Arc<AtomicBool>,
    notes: Vec<String>,
}

/// What a node that is a part of a larger program is given by it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Site<'a> {
    /// `/dev/userfaultfd`, opened by somebody who may.
    pub device: Option<BorrowedFd<'a>>,
    /// Of the memory, among the process's mappings.
    pub name: Option<&'a CStr>,
    /// The first page that each node manages, to whole rows of pages; equal parts if empty.
    pub homes: &'a [u32],
}

/// Starts a lane's thread of that name: the first is done before the second, and before the thread gives up rights.
pub type Spawn<'a> = &'a dyn Fn(String, Step, Step) -> std::io::Result<JoinHandle<()>>;
/// A part of what a lane's thread does.
pub type Step = Box<dyn FnOnce() + Send>;

/// A node's memory, which nobody serves yet: who touches it waits.
#[derive(Debug)]
pub struct Prepared {
    layout: Layout,
    region: Region,
    lanes: u16,
    enough_ns: u64,
}

impl Prepared {
    /// The memory of node `me`.
    ///
    /// # Errors
    /// [`NodeError`].
    pub fn new(me: u16, shape: Shape, settings: &Settings, site: Site<'_>) -> Result<Self, NodeError> {
        let mut options = RegionOptions {
            device: site.device,
            ..RegionOptions::default()
        };
        let enough_ns = match settings.enough_ns {
            Some(ns) => ns,
            None => enough_ns(shape.method, options)?,
        };
        options.name = site.name.unwrap_or(options.name);
        let region = Region::with(shape.pages, shape.lanes, shape.method, options)?;
        let layout = layout(me, shape, site.homes, &region);
        layout.check()?;
        Ok(Self {
            layout,
            region,
            lanes: shape.lanes,
            enough_ns,
        })
    }

    /// As [`Node::view`].
    pub fn view(&self) -> *mut u8 {
        self.region.view()
    }

    /// Whether the kernel's own accesses, and so a virtual machine's, wait as threads do.
    pub fn kernel_waits(&self) -> bool {
        self.region.kernel_waits()
    }
}

impl Node {
    /// Starts the part of node `me`, with a way to each other node for each lane. `hook` is told of the end, whatever it is.
    ///
    /// # Errors
    /// [`NodeError`].
    pub fn start(
        me: u16,
        shape: Shape,
        links: Vec<Vec<Option<Link>>>,
        names: Vec<String>,
        settings: &Settings,
        hook: Hook,
    ) -> Result<Self, NodeError> {
        let prepared = Prepared::new(me, shape, settings, Site::default())?;
        let spawn = |name, first: Step, then: Step| {
            std::thread::Builder::new().name(name).spawn(move || {
                first();
                then();
            })
        };
        Self::serve(prepared, links, names, settings, hook, &spawn)
    }

    /// Serves a memory, by threads that `spawn` starts. As [`Node::start`] otherwise.
    ///
    /// # Errors
    /// [`NodeError`].
    pub fn serve(
        prepared: Prepared,
        links: Vec<Vec<Option<Link>>>,
        names: Vec<String>,
        settings: &Settings,
        hook: Hook,
        spawn: Spawn<'_>,
    ) -> Result<Self, NodeError> {
        let Prepared {
            layout,
            region,
            lanes,
            enough_ns,
        } = prepared;
        let me = layout.me.0;
        let shutdown = Shutdown::new(lanes, hook).map_err(|error| NodeError::Threads(error.into()))?;
        let region = Arc::new(region);
        let mut node = Self {
            me,
            layout,
            heat: Arc::new(Heat::new(region.pages())),
            latency: Arc::default(),
            discards: Discards::new(region.clone()),
            region,
            causal: None,
            shutdown,
            meters: Vec::new(),
            lanes: Vec::new(),
            enough_ns: Arc::new(AtomicU64::new(enough_ns)),
            prefetches: Arc::new(AtomicBool::new(settings.ahead)),
            notes: Vec::new(),
        };
        if !node.region.kernel_waits() {
            let note =
                "system calls can't use pages that are elsewhere: only root's userfaultfd waits for these";
            node.notes.push(note.into());
        }
        let nodes = usize::from(node.layout.nodes);
        let has_tables = settings.processors > 0 && nodes > 1;
        let obstacle = cannot_merge(nodes, lanes).filter(|_| has_tables);
        let merges = has_tables && obstacle.is_none();
        node.notes.extend(obstacle);
        let names = Arc::new(names);
        // Two of this node on one CPU would wait for each other as those of two nodes do.
        let share_a_cpu = !settings.cpus.is_empty() && settings.cpus.len() < usize::from(lanes);
        let mut refused = None;
        for (number, links) in links.into_iter().enumerate() {
            let layout = Layout {
                stripe: number as u32,
                stripes: u32::from(lanes),
                ..node.layout.clone()
            };
            let mailbox = Mailbox::new().map_err(|error| NodeError::Threads(error.into()))?;
            let mailbox = Arc::new(mailbox);
            node.discards.add_mailbox(mailbox.clone());
            let mut driver = EngineDriver::new(
                me,
                node.region.clone(),
                node.heat.clone(),
                node.latency.clone(),
                Peers::new(links, names.clone()),
                mailbox,
            );
            driver.prefetches = node.prefetches.clone();
            if merges {
                let pinned = settings.pinned.clone();
                let causal = Causal::new(usize::from(me), nodes, settings.processors, pinned);
                let causal = Arc::new(causal.map_err(|error| NodeError::Threads(error.into()))?);
                node.causal = Some(causal.clone());
                let merging = Merging::new(layout.clone(), causal, settings.processors);
                driver.merging = Some(Box::new(merging));
            }
            let meter = Arc::new(Mutex::new(Meter::default()));
            let lane = PageServer::new(
                number as u16,
                Engine::new(layout)?,
                driver,
                node.shutdown.clone(),
                meter.clone(),
                node.enough_ns.clone(),
                if share_a_cpu { Polls::Never } else { settings.polls },
            );
            node.meters.push(meter);
            let cpu = (!settings.cpus.is_empty()).then(|| settings.cpus[number % settings.cpus.len()]);
            let realtime = settings.realtime;
            let (prepared, was_prepared) = std::sync::mpsc::channel();
            let first = move || {
                let _ = prepared.send(prepare_server_thread(cpu, realtime));
            };
            let thread = spawn(
                format!("lane {number}"),
                Box::new(first),
                Box::new(move || lane.run()),
            );
            let thread = thread.map_err(NodeError::Threads)?;
            node.lanes.push(thread);
            refused = refused.or(was_prepared.recv().ok().flatten());
        }
        node.notes.extend(refused);
        Ok(node)
    }

    /// The memory, as long as the node lives. Other nodes write it too: it is to be used as memory of several threads is.
    pub fn view(&self) -> *mut u8 {
        self.region.view()
    }

    /// Bytes of it.
    pub fn bytes(&self) -> usize {
        self.region.pages() as usize * PAGE_BYTES
    }

    /// This node's number.
    pub fn me(&self) -> u16 {
        self.me
    }

    /// Which node manages a page.
    pub fn home(&self, page: u32) -> u16 {
        self.layout.manager(Page(self.region.striped(page))).0
    }

    /// How pages get into the view.
    pub fn method(&self) -> Method {
        self.region.method()
    }

    /// How long a thread runs that has used its page for sure, nanoseconds.
    pub fn enough_ns(&self) -> u64 {
        self.enough_ns.load(Ordering::Relaxed)
    }

    /// Changes that.
    pub fn set_enough_ns(&self, ns: u64) {
        self.enough_ns.store(ns, Ordering::Relaxed);
    }

    /// Whether the next pages are asked for too where threads read one after the other.
    pub fn set_ahead(&self, ahead: bool) {
        self.prefetches.store(ahead, Ordering::Relaxed);
    }

    /// What this host does not permit, for people.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Why it has ended, if it has.
    pub fn end(&self) -> Option<&End> {
        self.shutdown.reason()
    }

    /// What other threads have to do with merged page tables, where there are some.
    pub fn causal(&self) -> Option<&Arc<Causal>> {
        self.causal.as_ref()
    }

    /// By which pages are given back.
    pub fn discards(&self) -> &Discards {
        &self.discards
    }

    /// Memory of this host's that the node's pages take, bytes.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn resident_bytes(&self) -> std::io::Result<u64> {
        self.region.resident_bytes()
    }

    /// How long pages of other nodes take to come.
    pub fn latency(&self) -> &Arc<Latency> {
        &self.latency
    }

    /// The pages that came here most often, at most `count`, and how often each.
    pub fn hottest(&self, count: usize) -> Vec<(u32, u32)> {
        self.heat.hottest(count)
    }

    /// What all lanes have counted, as of when each slept last.
    pub fn meter(&self) -> Meter {
        let mut sum = Meter::default();
        for meter in &self.meters {
            sum += *meter.lock().unwrap_or_else(PoisonError::into_inner);
        }
        sum
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shutdown.close();
        for lane in self.lanes.drain(..) {
            // One that panicked has said so.
            let _ = lane.join();
        }
    }
}

/// Why the page tables of a guest on so many nodes can't be merged pages, if they can't.
fn cannot_merge(nodes: usize, lanes: u16) -> Option<String> {
    let why = match lanes {
        _ if nodes > SHARERS_MAX => format!("there are {nodes} nodes, of {SHARERS_MAX} at most"),
        1 => return None,
        _ => format!("there are {lanes} lanes, of which one alone could"),
    };
    Some(format!(
        "page tables are not merged, but go from node to node: {why}"
    ))
}

/// Homes as they are asked for, or in equal parts, of whole rows of pages where there are enough.
fn layout(me: u16, shape: Shape, homes: &[u32], region: &Region) -> Layout {
    let mut layout = Layout::even(NodeId(me), shape.nodes, region.pages());
    let unit = region.stripe_cycle_pages();
    let units = region.pages() / unit;
    if !homes.is_empty() {
        let home = |(node, first): (u16, &u32)| ManagedRange {
            first: Page(first / unit * unit),
            manager: NodeId(node),
        };
        layout.ranges = (0..).zip(homes).map(home).collect();
        // Of one that has less than a row, another one's begins at the same page.
        layout.ranges.dedup_by_key(|home| home.first);
    } else if units >= u32::from(shape.nodes) {
        layout.ranges = (0..shape.nodes)
            .map(|node| ManagedRange {
                first: Page(units * u32::from(node) / u32::from(shape.nodes) * unit),
                manager: NodeId(node),
            })
            .collect();
    }
    layout.migratory = shape.migratory;
    layout
}
