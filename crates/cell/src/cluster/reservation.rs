//! A VM's place in a cell, held by the process that serves the VM.
//!
//! The VM keeps the place as long as a connection to the cell lasts. When the cell's process dies, the VM
//! runs on, and the process that serves it then connects to the cell's next process and claims the place
//! again.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use config::VmSpec;
use config::cluster::CellPlan;
use locks::lock;
use nix::unistd::geteuid;
use registry::cluster::admission::{self, Limits, Reply};
use registry::cluster::client::Connection;
use registry::cluster::files::Files;
use registry::cluster::interface::{
    AdmitVm, CellResponse, LentMemory, RegionGrant, VmPlacement, VmShare, owned_name,
};
use serde::{Deserialize, Serialize};
use shard_api::launch::Fd;

use self::authority::Authority;
use super::limits::{HOPS_MAX, RETRY};
use crate::left::{Leaving, LeftFiles};

mod authority;
mod error;
pub(crate) mod regions;
mod span;

pub use error::ReservationError;
pub use span::{PartPlace, begin_part, begin_span, foresee, leave_span};

/// Maximum interval between two attempts to reach a cell that is restarting.
const RETRY_MAX: Duration = Duration::from_secs(1);
/// Time limit for the first of a cluster's cells to start again.
const RESTART_LIMIT: Duration = Duration::from_secs(3);

/// Time limit for the admission server of the host's cluster to start again.
const ADMISSION_LIMIT: Duration = Duration::from_secs(1);

/// Time limit for a cell to take a VM back before it counts as lost: longer than
/// [`super::limits::ORPHANS_LIMIT`], and than its guard takes to start it again.
const LOST_LIMIT: Duration = Duration::from_secs(10);

/// A place in a cell.
#[derive(Debug)]
pub struct Reservation {
    place: VmPlacement,
    authority: Authority,
    /// Enforcement of the place's limits by the host's cluster; none in a cluster of the VM's user.
    limits: Option<Limits>,
    /// The request to the VM's cell after it has lost the VM.
    host: AdmitVm,
    held: Arc<Mutex<Held>>,
}

/// A place that a monitor leaves to its successor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LeftReservation {
    host: AdmitVm,
    place: VmPlacement,
    /// Enforcement of the place's limits, if the place is in the host's cluster.
    #[serde(default)]
    limits: Option<Limits>,
    /// The connection, which the cell takes for the monitor's.
    stream: Option<Fd>,
}

/// A place for other parts of its monitor. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct ReservationHandle {
    host: AdmitVm,
    place: VmPlacement,
    limits: Option<Limits>,
    held: Arc<Mutex<Held>>,
}

impl ReservationHandle {
    /// Leaves the place to a successor of this process.
    ///
    /// # Errors
    /// If this process has no descriptors left.
    pub(crate) fn leave(&self, leaving: &mut Leaving) -> io::Result<LeftReservation> {
        let held = lock(&self.held);
        let stream = held.stream.as_ref().map(|stream| leaving.add(stream));
        Ok(LeftReservation {
            host: self.host.clone(),
            place: self.place.clone(),
            limits: self.limits,
            stream: stream.transpose()?,
        })
    }

    /// Whether it is in a cluster of its user's, whose cell serves the VM.
    pub(crate) fn is_own(&self) -> bool {
        self.limits.is_none()
    }
}

#[derive(Debug)]
struct Held {
    /// The connection, while there is one.
    stream: Option<UnixStream>,
    /// The time since which the cell has not had the VM, if there is a cluster.
    away: Option<Instant>,
    /// The VM has ended.
    over: bool,
}

/// Requests a place: of the user's own cluster, else of the host's if that admits the user; none without
/// either.
pub fn begin(name: &str, spec: &VmSpec) -> Result<Option<Reservation>, ReservationError> {
    let files = Files::open()?;
    let own_cells = !files.plan()?.is_empty();
    if let Some(region) = spec.shared.first().filter(|_| !own_cells) {
        return Err(no_region_here(&region.name));
    }
    let host = AdmitVm {
        only: spec.cell,
        cells: spec.cells.clone(),
        regions: regions::grants(&files, spec)?,
        ..AdmitVm::new(
            name.to_owned(),
            VmShare {
                vcpus: u32::from(spec.cpus),
                memory_bytes: spec.counted().0,
                cpu_reservation_permille: spec.cpu_reservation_permille(),
            },
        )
    };
    if !own_cells && spec.cpu_reservation.is_some() {
        return Err(ReservationError::NoClusterForCpu);
    }
    if !own_cells {
        return begin_at_host(&host, spec);
    }
    begin_of_cells(&files, &host).map(Some)
}

/// The reason why a VM outside a cluster of its user's has no shared region.
fn no_region_here(region: &str) -> ReservationError {
    match admission::connect() {
        Ok(Some(_)) if !geteuid().is_root() => ReservationError::RegionOfOthers(region.to_owned()),
        _ => ReservationError::NoClusterForRegion(region.to_owned()),
    }
}

/// Requests a place for a user's VM from the host's cluster.
///
/// # Errors
/// If there is no cluster, it does not run, or it refuses.
pub(in crate::cluster) fn begin_for_user(
    files: &Files,
    uid: u32,
    name: &str,
    share: VmShare,
    only: Option<u16>,
) -> Result<Reservation, ReservationError> {
    let host = AdmitVm {
        only,
        ..AdmitVm::new(owned_name(uid, name), share)
    };
    begin_of_cells(files, &host)
}

/// Requests a place in a cluster that has cells.
fn begin_of_cells(files: &Files, host: &AdmitVm) -> Result<Reservation, ReservationError> {
    let mut running = wait_for_cells(files)?;
    // The VM's own cell has a record of it: another one would count its memory as used by another VM.
    running.sort_by_key(|cell| Some(cell.number) != host.only);
    let mut silent = ReservationError::Dead;
    for first in running {
        match ask(files, first.number, host) {
            // A cell that hangs does not keep the others from it.
            Err(error @ (ReservationError::Silent { .. } | ReservationError::Broken(_))) => silent = error,
            other => return other,
        }
    }
    Err(silent)
}

/// Requests a place from root's cluster; none where there is none, or it does not admit this user.
///
/// It counts all that a VM may have in memory: the group of a user's VM is limited to what is counted.
fn begin_at_host(host: &AdmitVm, spec: &VmSpec) -> Result<Option<Reservation>, ReservationError> {
    let share = VmShare {
        memory_bytes: spec.counted_for_others().0,
        ..host.share
    };
    let host = &AdmitVm {
        share,
        ..host.clone()
    };
    let named = host.only.or_else(|| host.cells.first().copied());
    let alone = |error: ReservationError| named.map_or(Ok(None), |_| Err(error));
    // Root's own cluster is the host's.
    if geteuid().is_root() {
        return named.map_or(Ok(None), |cell| Err(ReservationError::NoCluster(cell)));
    }
    // The host's cluster gives users places, and no choice of lenders.
    if let Some(cell) = host.cells.first() {
        return Err(match admission::connect() {
            Ok(None) => ReservationError::NoCluster(*cell),
            _ => ReservationError::NotAdmitted(*cell),
        });
    }
    let deadline = Instant::now() + ADMISSION_LIMIT;
    let request = authority::place_request(host, host.only);
    let (connection, reply) = loop {
        let asked = admission::connect().and_then(|connection| match connection {
            Some(mut connection) => connection
                .exchange(&admission::OF_USER, &request)
                .map(|reply| Some((connection, reply))),
            None => Ok(None),
        });
        match asked {
            Ok(Some(answered)) => break answered,
            Ok(None) => {
                let cell = host.only.unwrap_or_default();
                return alone(ReservationError::NoCluster(cell));
            }
            // It may be restarting. A cluster that is out of order keeps no user from a VM outside it.
            Err(error) if Instant::now() > deadline => return alone(ReservationError::Broken(error)),
            Err(_) => std::thread::sleep(RETRY),
        }
    };
    match reply {
        Reply::Placed { place, limits } => {
            let host = AdmitVm {
                only: Some(place.plan.number),
                runs: true,
                borrowed: place.borrowed.clone(),
                ..host.clone()
            };
            Reservation::begin(Authority::Host, connection, host, place, Some(limits)).map(Some)
        }
        Reply::NotAdmitted => alone(ReservationError::NotAdmitted(host.only.unwrap_or_default())),
        Reply::Refused { why } => Err(ReservationError::Refused(why)),
        other => Err(io::Error::other(format!("an answer to another question: {other:?}")).into()),
    }
}

/// The cells that run; those that have just died start again soon.
fn wait_for_cells(files: &Files) -> Result<Vec<CellPlan>, ReservationError> {
    let deadline = Instant::now() + RESTART_LIMIT;
    loop {
        let running = files.running()?;
        if !running.is_empty() {
            return Ok(running);
        }
        if Instant::now() > deadline {
            return Err(ReservationError::Dead);
        }
        std::thread::sleep(RETRY);
    }
}

/// Requests the place from a cell, and from those that it names.
fn ask(files: &Files, first: u16, host: &AdmitVm) -> Result<Reservation, ReservationError> {
    let (mut cell, mut host) = (first, host.clone());
    let authority = Authority::Own(files.clone());
    for _ in 0..HOPS_MAX {
        let (connection, answer) = authority
            .ask(cell, &host)
            .map_err(|source| ReservationError::Silent { cell, source })?;
        match answer {
            CellResponse::Hosted(place) => {
                let host = AdmitVm {
                    runs: true,
                    borrowed: place.borrowed.clone(),
                    ..host
                };
                return Reservation::begin(authority, connection, host, place, None);
            }
            CellResponse::Elsewhere { cell: other } => {
                let site = files.site()?;
                if let Some(site) = site.filter(|site| site.is_elsewhere(other)) {
                    let host = site.host_of(other).map(|host| host.name.clone());
                    return Err(ReservationError::OtherHost {
                        cell: other,
                        host: host.unwrap_or_default(),
                    });
                }
                (cell, host.sent) = (other, true);
            }
            CellResponse::Refused { why } => return Err(ReservationError::Refused(why)),
            other => {
                return Err(io::Error::other(format!("an answer to another question: {other:?}")).into());
            }
        }
    }
    Err(ReservationError::Refused(
        "the cells do not agree where there is room: try again".into(),
    ))
}

impl Reservation {
    /// The place that was given over `connection`, which holds it.
    fn begin(
        authority: Authority,
        connection: Connection,
        host: AdmitVm,
        place: VmPlacement,
        limits: Option<Limits>,
    ) -> Result<Self, ReservationError> {
        let held = Arc::new(Mutex::new(Held {
            stream: Some(connection.stream()?),
            away: None,
            over: false,
        }));
        let reconnector = Reconnector {
            authority: authority.clone(),
            cell: place.plan.number,
            host: host.clone(),
            held: held.clone(),
        };
        std::thread::Builder::new()
            .name("reservation".into())
            .spawn(move || reconnector.keep(Some(connection)))?;
        Ok(Self {
            place,
            authority,
            limits,
            host,
            held,
        })
    }

    /// Takes over the place that a predecessor of this process had for a VM that runs. Where the connection
    /// has ended, the cell receives the claim again, as after its restart.
    ///
    /// # Errors
    /// If the descriptor is missing, or the host has no threads left.
    pub(crate) fn adopt(left: LeftReservation, files: &mut LeftFiles) -> io::Result<Self> {
        let LeftReservation {
            host,
            place,
            limits,
            stream,
        } = left;
        let stream = stream.map(|stream| files.take(stream)).transpose()?;
        let stream = stream.map(UnixStream::from);
        let connection = stream.as_ref().map(UnixStream::try_clone).transpose()?;
        let held = Arc::new(Mutex::new(Held {
            away: stream.is_none().then(Instant::now),
            stream,
            over: false,
        }));
        let authority = match limits {
            Some(_) => Authority::Host,
            None => Authority::Own(Files::open()?),
        };
        let reconnector = Reconnector {
            authority: authority.clone(),
            cell: place.plan.number,
            host: host.clone(),
            held: held.clone(),
        };
        std::thread::Builder::new()
            .name("reservation".into())
            .spawn(move || reconnector.keep(connection.map(Connection::of)))?;
        Ok(Self {
            place,
            authority,
            limits,
            host,
            held,
        })
    }

    /// A handle of the place, for other parts of the monitor.
    pub(crate) fn handle(&self) -> ReservationHandle {
        ReservationHandle {
            host: self.host.clone(),
            place: self.place.clone(),
            limits: self.limits,
            held: self.held.clone(),
        }
    }

    /// Enforcement of the place's limits by the host's cluster; none if the place is in a cluster of its
    /// user's.
    pub fn limits_of_host(&self) -> Option<Limits> {
        self.limits
    }

    /// Whether it is in a cluster of its user's.
    pub fn is_own(&self) -> bool {
        self.limits.is_none()
    }

    /// The place, with its cell's CPUs and nodes.
    pub(in crate::cluster) fn place(&self) -> &VmPlacement {
        &self.place
    }

    /// Number of the cell that has reserved the place.
    pub fn cell(&self) -> u16 {
        self.place.plan.number
    }

    /// The VM's grants of shared regions.
    pub(crate) fn regions(&self) -> &[RegionGrant] {
        &self.host.regions
    }

    /// The VM's memory that is other cells'.
    pub fn borrowed(&self) -> &[LentMemory] {
        &self.place.borrowed
    }

    /// Number of the cell's CPUs.
    pub fn cpus(&self) -> usize {
        self.place.plan.cpus.len()
    }

    /// The host's nodes of its memory in the cell.
    pub fn nodes(&self) -> &[u32] {
        &self.place.plan.nodes
    }

    /// Whether the cell died, and has not taken the VM back since for 10 s. False when the whole cluster is
    /// down: then VMs run on alone. An ordinary VM runs on anyway; one that spans cells has lost a part of
    /// itself.
    pub fn lost(&self) -> bool {
        self.is_away_for(LOST_LIMIT)
    }

    fn is_away_for(&self, limit: Duration) -> bool {
        lock(&self.held)
            .away
            .is_some_and(|since| since.elapsed() >= limit)
    }

    /// Binds the calling thread, and the processes that it starts, to the cell's CPUs and memory.
    pub fn settle(&self) -> Result<(), ReservationError> {
        let failed = |what| {
            move |source: io::Error| ReservationError::Settle {
                what,
                cell: self.place.plan.number,
                source,
            }
        };
        let mut set = nix::sched::CpuSet::new();
        for cpu in &self.place.plan.cpus {
            set.set(*cpu).map_err(|error| failed("CPUs")(error.into()))?;
        }
        nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set)
            .map_err(|error| failed("CPUs")(error.into()))?;
        keep_to_nodes(&self.place.plan.nodes).map_err(failed("memory"))
    }

    /// Frees the place of a VM that has ended: returns when all cells have received that, or none runs.
    pub fn leave(self) {
        // The other side may end the connection now.
        lock(&self.held).over = true;
        // A cell that is restarting misses the VM and frees its name by itself.
        let _ = self.authority.leave(self.place.plan.number, &self.host.name);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut held = lock(&self.held);
        held.over = true;
        if let Some(stream) = held.stream.take() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// Keeps the connection up.
struct Reconnector {
    authority: Authority,
    cell: u16,
    host: AdmitVm,
    held: Arc<Mutex<Held>>,
}

impl Reconnector {
    fn keep(self, mut connection: Option<Connection>) {
        loop {
            if let Some(mut connection) = connection {
                connection.wait_for_end();
            }
            let mut pause = RETRY;
            connection = loop {
                let is_up = self.authority.is_up();
                {
                    let mut held = lock(&self.held);
                    held.stream = None;
                    if held.over {
                        return;
                    }
                    let since = held.away.unwrap_or_else(Instant::now);
                    held.away = is_up.then_some(since);
                }
                let back = self.come_back();
                if back.is_some() {
                    break back;
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(RETRY_MAX);
            };
        }
    }

    fn come_back(&self) -> Option<Connection> {
        let (connection, answer) = self.authority.ask_again(self.cell, &self.host).ok()?;
        let stream = connection.stream().ok()?;
        let mut held = lock(&self.held);
        if held.over || !matches!(answer, CellResponse::Hosted(_)) {
            return None;
        }
        held.stream = Some(stream);
        held.away = None;
        Some(connection)
    }
}

/// Binds the allocations of the calling thread and its children to these nodes. On a host with one node there
/// is nothing to bind.
fn keep_to_nodes(nodes: &[u32]) -> io::Result<()> {
    if std::fs::metadata("/sys/devices/system/node/node1").is_err() {
        return Ok(());
    }
    const BITS: usize = u64::BITS as usize;
    let mut mask = vec![0_u64; nodes.iter().max().map_or(0, |last| *last as usize / BITS) + 1];
    for node in nodes {
        mask[*node as usize / BITS] |= 1 << (*node as usize % BITS);
    }
    // The kernel reads one bit less than the length that it receives.
    let bits = mask.len() * BITS + 1;
    // SAFETY: the mask has that many bits and lives through the call, which changes no memory of this
    // process.
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND, mask.as_ptr(), bits) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
