//! A node of a shared memory: its view of the region, and the page servers.

use std::ffi::CStr;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use coherence::{Engine, Layout, LayoutError, ManagedRange, NodeId, Page};
use locks::IgnorePoison;

use crate::PAGE_LEN;
use crate::batches::SHARERS_MAX;
use crate::calibration::enough_ns;
use crate::causal::Causal;
use crate::discards::{Discards, Mailbox};
use crate::driver::{EngineDriver, Peers};
use crate::heat::Heat;
use crate::latency::Latency;
use crate::link::Link;
use crate::merging::Merging;
use crate::meter::Meter;
use crate::page_server::PageServer;
use crate::region::{Method, Region, RegionError, RegionOptions};
use crate::server_thread::prepare_server_thread;
use crate::shape::Shape;
use crate::shutdown::{End, Hook, Shutdown};

/// When an idle page server polls before it sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Polls {
    /// Never: it sleeps at once.
    #[default]
    Never,
    /// While that many threads wait for pages: all there are, so that their CPUs are idle. For a guest, whose
    /// vCPUs need their CPUs otherwise.
    Waiting(usize),
    /// Always, except after a thread was woken or a prefetched page was mapped. For programs that fetch much.
    Always,
}

/// Settings of a node.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// CPUs of the page servers, in turn. If empty, the kernel chooses.
    pub cpus: Vec<usize>,
    /// Whether page servers ask for real-time priority.
    pub realtime: bool,
    /// CPU time after which a thread has certainly used its page, nanoseconds. Measured if `None`.
    pub enough_ns: Option<u64>,
    /// When page servers poll. They never do on a CPU that other nodes' page servers use too.
    pub polls: Polls,
    /// Whether pages are prefetched for threads that read sequentially or fill zero pages.
    pub ahead: bool,
    /// Number of processors of a guest whose page tables are merged; 0 merges none. Needs one page server and
    /// at most [`SHARERS_MAX`] nodes.
    pub processors: usize,
    /// Pages of the region into which the guest's kernel image was loaded, uncompressed. A root of page
    /// tables among them stays merged while no processor has it loaded, since the guest never reuses it. The
    /// same on all nodes; may be empty.
    pub pinned: Range<u32>,
}

/// Reason why a node can't start.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The region can't be made.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The layout is invalid.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Threads or descriptors can't be made.
    #[error("can't start the threads that serve faults: {0}")]
    Threads(std::io::Error),
}

/// A node of the memory. It ends when dropped; threads that wait for a page then wait forever.
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
    servers: Vec<JoinHandle<()>>,
    enough_ns: Arc<AtomicU64>,
    prefetches: Arc<AtomicBool>,
    notes: Vec<String>,
}

/// Resources that the program provides to its node.
#[derive(Clone, Copy, Debug, Default)]
pub struct Site<'a> {
    /// `/dev/userfaultfd`, opened by a process that may.
    pub device: Option<BorrowedFd<'a>>,
    /// Name of the memory among the process's mappings.
    pub name: Option<&'a CStr>,
    /// First page of each node's managed range, rounded down to whole cycles of stripes. If empty, the ranges
    /// are equal.
    pub range_starts: &'a [u32],
}

/// Starts a thread with that name. The first step runs before the second, and before the thread gives up
/// rights.
pub type Spawn<'a> = &'a dyn Fn(String, Step, Step) -> std::io::Result<JoinHandle<()>>;
/// A step of a page server's thread.
pub type Step = Box<dyn FnOnce() + Send>;

/// Memory of a node before it is served. A thread that touches it blocks.
#[derive(Debug)]
pub struct Prepared {
    layout: Layout,
    region: Region,
    lanes: u16,
    enough_ns: u64,
}

impl Prepared {
    /// Creates the memory of node `me`.
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
        let layout = layout(me, shape, site.range_starts, &region);
        layout.check()?;
        Ok(Self {
            layout,
            region,
            lanes: shape.lanes,
            enough_ns,
        })
    }

    /// Returns the view ([`Node::view`]).
    pub fn view(&self) -> *mut u8 {
        self.region.view()
    }

    /// Returns whether accesses by the kernel, and so by a virtual machine, block as those of threads do.
    pub fn kernel_waits(&self) -> bool {
        self.region.kernel_waits()
    }
}

/// Settings that the servers of a node have in common.
struct ServerSetup<'a> {
    lanes: u16,
    names: Arc<Vec<String>>,
    settings: &'a Settings,
    /// Whether pages of tables are merged.
    merges: bool,
    share_a_cpu: bool,
}

impl Node {
    /// Starts node `me`, with a link to each other node for each page server. `hook` is called at the end
    /// with its reason.
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

    /// Serves a prepared memory by threads that `spawn` starts; otherwise as [`Node::start`].
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
            servers: Vec::new(),
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
        let setup = ServerSetup {
            lanes,
            names: Arc::new(names),
            settings,
            merges,
            // Two page servers of this node on one CPU would wait for each other, as those of two nodes do.
            share_a_cpu: !settings.cpus.is_empty() && settings.cpus.len() < usize::from(lanes),
        };
        let mut refused = None;
        for (number, links) in links.into_iter().enumerate() {
            refused = refused.or(node.start_server(number, links, &setup, spawn)?);
        }
        node.notes.extend(refused);
        Ok(node)
    }

    /// Starts the server of the `number`th stripe of pages, with its links to the other nodes. Returns a
    /// note if its thread was refused a CPU or a priority.
    fn start_server(
        &mut self,
        number: usize,
        links: Vec<Option<Link>>,
        setup: &ServerSetup<'_>,
        spawn: Spawn<'_>,
    ) -> Result<Option<String>, NodeError> {
        let ServerSetup {
            lanes,
            ref names,
            settings,
            merges,
            share_a_cpu,
        } = *setup;
        let (me, nodes) = (self.me, usize::from(self.layout.nodes));
        let layout = Layout {
            stripe: number as u32,
            stripes: u32::from(lanes),
            ..self.layout.clone()
        };
        let mailbox = Mailbox::new().map_err(|error| NodeError::Threads(error.into()))?;
        let mailbox = Arc::new(mailbox);
        self.discards.add_mailbox(mailbox.clone());
        let mut driver = EngineDriver::new(
            me,
            self.region.clone(),
            self.heat.clone(),
            self.latency.clone(),
            Peers::new(links, names.clone()),
            mailbox,
        );
        driver.prefetches = self.prefetches.clone();
        if merges {
            let pinned = settings.pinned.clone();
            let causal = Causal::new(usize::from(me), nodes, settings.processors, pinned);
            let causal = Arc::new(causal.map_err(|error| NodeError::Threads(error.into()))?);
            self.causal = Some(causal.clone());
            let merging = Merging::new(layout.clone(), causal, settings.processors);
            driver.merging = Some(Box::new(merging));
        }
        let meter = Arc::new(Mutex::new(Meter::default()));
        let server = PageServer::new(
            number as u16,
            Engine::new(layout)?,
            driver,
            self.shutdown.clone(),
            meter.clone(),
            self.enough_ns.clone(),
            if share_a_cpu { Polls::Never } else { settings.polls },
        );
        self.meters.push(meter);
        let cpu = (!settings.cpus.is_empty()).then(|| settings.cpus[number % settings.cpus.len()]);
        let realtime = settings.realtime;
        let (prepared, was_prepared) = std::sync::mpsc::channel();
        let first = move || {
            let _ = prepared.send(prepare_server_thread(cpu, realtime));
        };
        let thread = spawn(
            format!("lane {number}"),
            Box::new(first),
            Box::new(move || server.run()),
        );
        let thread = thread.map_err(NodeError::Threads)?;
        self.servers.push(thread);
        Ok(was_prepared.recv().ok().flatten())
    }

    /// Returns the memory, valid as long as the node. Other nodes write it too: it must be used as memory
    /// shared by threads.
    pub fn view(&self) -> *mut u8 {
        self.region.view()
    }

    /// Returns the length of the memory, bytes.
    pub fn bytes(&self) -> usize {
        self.region.pages() as usize * PAGE_LEN
    }

    /// Returns this node's number.
    pub fn me(&self) -> u16 {
        self.me
    }

    /// Returns the manager of a page.
    pub fn manager(&self, page: u32) -> u16 {
        self.layout.manager(Page(self.region.striped(page))).0
    }

    /// Returns how pages are mapped in the view.
    pub fn method(&self) -> Method {
        self.region.method()
    }

    /// Returns the CPU time after which a thread has certainly used its page, nanoseconds.
    pub fn enough_ns(&self) -> u64 {
        self.enough_ns.load(Ordering::Relaxed)
    }

    /// Sets that time, nanoseconds.
    pub fn set_enough_ns(&self, ns: u64) {
        self.enough_ns.store(ns, Ordering::Relaxed);
    }

    /// Enables or disables prefetching.
    pub fn set_ahead(&self, ahead: bool) {
        self.prefetches.store(ahead, Ordering::Relaxed);
    }

    /// Returns what this host does not permit, as notes for the user.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the reason of the end, if the node has ended.
    pub fn end(&self) -> Option<&End> {
        self.shutdown.reason()
    }

    /// Returns the causal order of other threads' messages, if page tables are merged.
    pub fn causal(&self) -> Option<&Arc<Causal>> {
        self.causal.as_ref()
    }

    /// Returns the interface by which pages are given back.
    pub fn discards(&self) -> &Discards {
        &self.discards
    }

    /// Returns the memory of this host that the node uses, bytes.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn resident_bytes(&self) -> std::io::Result<u64> {
        self.region.resident_bytes()
    }

    /// Returns the mean time to fetch a page.
    pub fn latency(&self) -> &Arc<Latency> {
        &self.latency
    }

    /// Returns at most `count` pages that arrived most often, and their counts.
    pub fn hottest(&self, count: usize) -> Vec<(u32, u32)> {
        self.heat.hottest(count)
    }

    /// Returns the sum of all page servers' counters, each as of its last sleep.
    pub fn meter(&self) -> Meter {
        let mut sum = Meter::default();
        for meter in &self.meters {
            sum += *meter.lock().ignore_poison();
        }
        sum
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shutdown.close();
        for server in self.servers.drain(..) {
            // A thread that panicked has printed its reason.
            let _ = server.join();
        }
    }
}

/// Returns the reason why page tables can't be merged, if there is one.
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

/// Returns the layout with the managed ranges that were requested, or equal ones of whole cycles of stripes.
fn layout(me: u16, shape: Shape, range_starts: &[u32], region: &Region) -> Layout {
    let mut layout = Layout::even(NodeId(me), shape.nodes, region.pages());
    let unit = region.stripe_cycle_pages();
    let units = region.pages() / unit;
    if !range_starts.is_empty() {
        let range = |(node, first): (u16, &u32)| ManagedRange {
            first: Page(first / unit * unit),
            manager: NodeId(node),
        };
        layout.ranges = (0..).zip(range_starts).map(range).collect();
        // Of two ranges that begin at the same page the first one is empty.
        layout.ranges.dedup_by_key(|range| range.first);
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
