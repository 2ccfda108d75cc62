//! The admission server: gives users whom root's cluster admits places in its cells.
//!
//! It is a separate process beside the cells, since any process on the host may connect to it: a flood
//! reaches no cell, and a fault in it stops no cell. It requests places from the cells as a monitor does,
//! under names that have the owner's id ([`registry::cluster::interface::owned_name`]), and holds a place as
//! long as the user's connection lasts.
//!
//! | module | holds |
//! | --- | --- |
//! | `quota` | the VMs and the limits of each user |
//! | `callers` | bounds on connections |
//! | `closing` | the close of a connection, which never blocks |
//! | `peer` | identity of a connection's other end, by the kernel |
//! | `groups` | the control groups of users' VMs |
//! | `lines` | requests of bounded length, in bounded time |
//! | `end` | the end of a user's VM when a cell fails |
//!
//! Events that users cause are logged at the level `debug` only, so that no user fills root's log.
//!
//! The server opens no path of a user's, writes in no directory of a user's, and serves no VM: monitor,
//! keeper and shard are the user's own processes. State that must outlive the server is in
//! [`registry::cluster::user_vms`].

mod callers;
mod closing;
mod end;
mod groups;
mod lines;
mod peer;
mod quota;

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use config::cluster::{CellPlan, UserPlan};
use config::is_name;
use hostfiles::lock::{Flock, Share, at_once};
use hostfiles::private;
use locks::lock;
use nix::unistd::geteuid;
use registry::cluster::admission::{
    CellRoom, Limits, OF_SERVER, PlaceRequest, Reply, Request, UserStatus, directory, lock_in,
    make_directory, socket_in,
};
use registry::cluster::client;
use registry::cluster::files::Files;
use registry::cluster::interface::{CellStatus, LentMemory, Status};
use registry::cluster::user_vms::UserVm;
use registry::lease::keep_stacks_small;
use tracing::{debug, error, info, warn};

use self::callers::Callers;
use self::groups::Groups;
use self::lines::Lines;
use self::peer::{Peer, Process};
use self::quota::{Holder, Quotas, Refusal};
use super::limits::ORPHANS_LIMIT;
use super::reservation::{Reservation, ReservationError, begin_for_user};
use crate::monitor::raise_file_limit;

pub use self::end::end;

/// Time limit for a request on a connection that has no place.
const REQUEST_LIMIT: Duration = Duration::from_secs(2);
/// Time limit for a peer to receive a reply.
const REPLY_LIMIT: Duration = Duration::from_secs(2);
/// Interval between two removals of groups without places.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after a refusal by the cells, before the same user's next request to them.
const REFUSED_PAUSE: Duration = Duration::from_millis(20);
/// Age up to which a report of the cells' state is used for users' status requests.
const STATUS_AGE_MAX: Duration = Duration::from_millis(200);
/// Pause before the next `accept` when this process has too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
const STACK_BYTES: usize = 256 << 10;

/// Serves admitted users until this process ends.
///
/// # Errors
/// If this user is not root, another process is the server, or the socket can't be made.
pub fn serve() -> io::Result<()> {
    if !geteuid().is_root() {
        return Err(io::Error::other("only root's cluster admits other users"));
    }
    raise_file_limit()?;
    keep_stacks_small();
    let files = Files::open()?;
    let (listener, _lock) = listen()?;
    let server = Arc::new(Server::new(files)?);
    server.begin_upkeep()?;
    info!("users are admitted");
    for number in 1.. {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                debug!(%error, "a connection is not accepted");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        let server = server.clone();
        if let Err(error) = server.take(stream, number) {
            debug!(%error, "a connection is not served");
        }
    }
    Ok(())
}

/// The socket, which all users may connect to, and the lock that gives the right to have it.
fn listen() -> io::Result<(UnixListener, Flock<File>)> {
    let directory = directory();
    make_directory(&directory)?;
    let lock = at_once(private::lock_file(&lock_in(&directory))?, Share::Exclusive)?;
    let lock = lock.ok_or_else(|| {
        let why = format!("{} belongs to another cluster that runs", directory.display());
        io::Error::new(io::ErrorKind::ResourceBusy, why)
    })?;
    let path = socket_in(&directory);
    // The socket of a server that has died.
    let _ = fs::remove_file(&path);
    let listener = UnixListener::bind(&path)?;
    fs::set_permissions(&path, Permissions::from_mode(0o666))?;
    Ok((listener, lock))
}

/// Removes the socket of a cluster that has ended, unless another cluster has it.
///
/// # Errors
/// If the directory is not root's.
pub fn remove_socket() -> io::Result<()> {
    let directory = directory();
    make_directory(&directory)?;
    if let Some(_lock) = at_once(private::lock_file(&lock_in(&directory))?, Share::Exclusive)? {
        let _ = fs::remove_file(socket_in(&directory));
    }
    Ok(())
}

/// Whether the server of some cluster runs.
///
/// # Errors
/// If the directory is not root's.
pub fn is_served() -> io::Result<bool> {
    let directory = directory();
    make_directory(&directory)?;
    let lock = at_once(private::lock_file(&lock_in(&directory))?, Share::Exclusive)?;
    Ok(lock.is_none())
}

struct Server {
    files: Files,
    plan: Vec<CellPlan>,
    /// None where limits are best effort.
    groups: Option<Groups>,
    quotas: Mutex<Quotas>,
    callers: Mutex<Callers>,
    /// The places, by the connections that hold them.
    places: Mutex<BTreeMap<Holder, Placed>>,
    /// One lock for each user: one request to the cells at a time.
    turns: BTreeMap<u32, Mutex<()>>,
    status: Mutex<Option<(Instant, Status)>>,
}

/// A place that a user holds.
struct Placed {
    uid: u32,
    name: String,
    reservation: Reservation,
    group: Option<PathBuf>,
    /// Ends with the place.
    stream: UnixStream,
}

/// A reason why a user's VM has no place, for a user, who cannot start cells.
#[derive(Debug, thiserror::Error)]
enum AdmissionError {
    #[error("that is no VM's name")]
    Name,
    #[error("this connection holds a place already")]
    SecondPlace,
    #[error("{0}")]
    Quota(Refusal),
    /// The cells' own words.
    #[error("{0}")]
    Refused(String),
    #[error("no cell of this host has room for it; give it less, or try again when VMs have ended")]
    OtherHost,
    #[error("the host's cluster does not answer; try again in a moment, or tell its administrator")]
    NoAnswer,
    #[error("the cluster can't hold the VM to a place: {0}")]
    Hold(io::Error),
}

impl AdmissionError {
    /// The cells' refusal.
    fn of(error: ReservationError) -> Self {
        match error {
            ReservationError::Refused(why) => Self::Refused(why),
            ReservationError::OtherHost { .. } => Self::OtherHost,
            other => {
                debug!(error = %other, "the cells give no place");
                Self::NoAnswer
            }
        }
    }
}

impl Server {
    fn new(files: Files) -> io::Result<Self> {
        let users = files.users()?;
        let plan = files.plan()?;
        let groups = match Groups::open(users.iter().map(|user| user.uid)) {
            Ok(groups) => Some(groups),
            Err(error) => {
                warn!(%error, "limits are best effort");
                None
            }
        };
        let turns = users.iter().map(|user| (user.uid, Mutex::new(()))).collect();
        let mut quotas = Quotas::new(users);
        for vm in files.user_vms()? {
            quotas.expect(vm.uid, vm.name, vm.share, vm.cell);
        }
        Ok(Self {
            files,
            plan,
            groups,
            quotas: Mutex::new(quotas),
            callers: Mutex::default(),
            places: Mutex::default(),
            turns,
            status: Mutex::default(),
        })
    }

    /// Starts a thread that drops VMs of the last process whose monitors do not come, and removes empty
    /// groups.
    fn begin_upkeep(self: &Arc<Self>) -> io::Result<()> {
        let server = self.clone();
        let upkeep = move || {
            let begun = Instant::now();
            let mut has_lapsed = false;
            loop {
                std::thread::sleep(SWEEP_INTERVAL);
                if !has_lapsed && begun.elapsed() > ORPHANS_LIMIT {
                    has_lapsed = true;
                    server.lapse();
                }
                if let Some(groups) = &server.groups {
                    groups.sweep();
                }
            }
        };
        std::thread::Builder::new()
            .name("upkeep".into())
            .stack_size(STACK_BYTES)
            .spawn(upkeep)
            .map(drop)
    }

    /// Drops the VMs of the server's last process whose monitors have not come.
    fn lapse(&self) {
        let mut quotas = lock(&self.quotas);
        quotas.lapse();
        for vm in self.files.user_vms().unwrap_or_default() {
            // This includes users who are not admitted any more.
            if quotas.holder(vm.uid, &vm.name).is_none() {
                self.forget(vm.uid, &vm.name);
            }
        }
    }

    /// Starts a thread that serves a connection, if its user has room for it.
    fn take(self: Arc<Self>, stream: UnixStream, number: Holder) -> io::Result<()> {
        let uid = Peer::uid(&stream)?;
        let vcpus = lock(&self.quotas).plan(uid).map(|plan| plan.vcpus);
        if !lock(&self.callers).begin(uid, vcpus) {
            let reply = match vcpus {
                Some(_) => refused("you have too many connections to the cluster; try again in a moment"),
                None => Reply::NotAdmitted,
            };
            // The write does not block: the socket's buffer is empty.
            let answered = answer(&stream, &reply);
            closing::close(stream);
            return answered;
        }
        let server = self.clone();
        // The thread is the only holder: any other last holder would close the connection in its place.
        let (give, take) = mpsc::sync_channel::<UnixStream>(1);
        let serve = move || {
            let Ok(stream) = take.recv() else { return };
            if let Err(error) = server.serve(&stream, uid, number) {
                debug!(uid, %error, "a connection ends");
            }
            server.leave(number);
            // The close may block on descriptors that the peer has sent. The connection counts until then.
            drop(stream);
            lock(&server.callers).end(uid);
        };
        let begun = std::thread::Builder::new()
            .name("user".into())
            .stack_size(STACK_BYTES)
            .spawn(serve);
        match begun {
            // The thread receives only this connection.
            Ok(_) => give.send(stream).map_err(io::Error::other),
            Err(error) => {
                lock(&self.callers).end(uid);
                closing::close(stream);
                Err(error)
            }
        }
    }

    /// Answers the requests of a user on a connection, until it ends.
    fn serve(&self, stream: &UnixStream, uid: u32, number: Holder) -> io::Result<()> {
        stream.set_write_timeout(Some(REPLY_LIMIT))?;
        let mut lines = Lines::new(stream);
        loop {
            // The place lasts as long as the connection, which usually sends nothing more.
            let limit = (!lock(&self.places).contains_key(&number)).then_some(REQUEST_LIMIT);
            let Some(line) = lines.next(limit)? else {
                return Ok(());
            };
            let line = String::from_utf8(line).map_err(io::Error::other)?;
            let reply = match OF_SERVER.read(&line) {
                Ok(request) => self.reply(request, stream, uid, number),
                Err(error) => Reply::Refused {
                    why: error.to_string(),
                },
            };
            answer(stream, &reply)?;
        }
    }

    fn reply(&self, request: Request, stream: &UnixStream, uid: u32, number: Holder) -> Reply {
        debug!(uid, ?request, "a user asks");
        if let Request::Taken {} = request {
            let cells = self.plan.clone();
            return Reply::Taken { cells };
        }
        if uid == 0 && request == (Request::Status {}) {
            let users = lock(&self.quotas).all(self.limits());
            return Reply::Users { users };
        }
        let Some(user) = lock(&self.quotas).plan(uid).cloned() else {
            return Reply::NotAdmitted;
        };
        match request {
            Request::Place(request) => self
                .place(&request, stream, &user, number)
                .unwrap_or_else(|error| Reply::Refused {
                    why: error.to_string(),
                }),
            Request::Leave { name } => {
                let holder = lock(&self.quotas).holder(uid, &name);
                if let Some(holder) = holder {
                    self.leave(holder);
                }
                Reply::Done
            }
            Request::Status {} => self.status_of(&user),
            Request::Taken {} => Reply::NotAdmitted,
        }
    }

    fn limits(&self) -> Limits {
        match self.groups {
            Some(_) => Limits::Group,
            None => Limits::BestEffort,
        }
    }

    /// Gives a VM a place. An error is one line.
    fn place(
        &self,
        request: &PlaceRequest,
        stream: &UnixStream,
        user: &UserPlan,
        number: Holder,
    ) -> Result<Reply, AdmissionError> {
        let PlaceRequest { name, share, cell } = request;
        if !is_name(name) {
            return Err(AdmissionError::Name);
        }
        if lock(&self.places).contains_key(&number) {
            return Err(AdmissionError::SecondPlace);
        }
        let turn = self
            .turns
            .get(&user.uid)
            .ok_or(AdmissionError::Quota(Refusal::NotAdmitted))?;
        let _turn = lock(turn);
        lock(&self.quotas)
            .reserve(user.uid, name, *share, number)
            .map_err(AdmissionError::Quota)?;
        let placed = begin_for_user(&self.files, user.uid, name, *share, *cell)
            .map_err(AdmissionError::of)
            .and_then(|reservation| self.settle(reservation, request, stream, user));
        match placed {
            Ok(placed) => {
                let place = placed.reservation.place().clone();
                lock(&self.quotas).placed(user.uid, name, place.plan.number);
                debug!(
                    uid = user.uid,
                    vm = name,
                    cell = place.plan.number,
                    "a VM has a place"
                );
                lock(&self.places).insert(number, placed);
                let limits = self.limits();
                Ok(Reply::Placed { place, limits })
            }
            Err(why) => {
                lock(&self.quotas).release(user.uid, name, number);
                std::thread::sleep(REFUSED_PAUSE);
                Err(why)
            }
        }
    }

    /// Puts the user's process into the group of its place, and records the place. If that fails, gives the
    /// place back; an error is one line.
    fn settle(
        &self,
        reservation: Reservation,
        request: &PlaceRequest,
        stream: &UnixStream,
        user: &UserPlan,
    ) -> Result<Placed, AdmissionError> {
        let mut group = None;
        let settled = (|| -> io::Result<UnixStream> {
            let peer = Peer::of(stream)?;
            let session = Process::of(peer.pid)?.session;
            if let Some(groups) = &self.groups {
                let place = reservation.place();
                group = Some(groups.join(&peer, user, &request.name, place, request.share)?);
            }
            self.files.keep_user_vm(&UserVm {
                uid: user.uid,
                name: request.name.clone(),
                cell: reservation.cell(),
                share: request.share,
                borrowed: reservation.borrowed().to_vec(),
                session,
                group: group.clone(),
            })?;
            stream.try_clone()
        })();
        let placed = |stream| Placed {
            uid: user.uid,
            name: request.name.clone(),
            reservation,
            group,
            stream,
        };
        match settled {
            Ok(stream) => Ok(placed(stream)),
            Err(error) => {
                debug!(uid = user.uid, vm = request.name, %error, "a place is not given");
                match stream.try_clone() {
                    Ok(stream) => self.give_back(placed(stream)),
                    // The cell takes the end of its connection for the end of this process, and waits for a
                    // while.
                    Err(_) => self.forget(user.uid, &request.name),
                }
                Err(AdmissionError::Hold(error))
            }
        }
    }

    /// Frees the place of a connection, if it has one, before it returns.
    fn leave(&self, number: Holder) {
        let placed = lock(&self.places).remove(&number);
        if let Some(placed) = placed {
            let (uid, name) = (placed.uid, placed.name.clone());
            debug!(uid, vm = name, "a VM gives its place back");
            self.give_back(placed);
            lock(&self.quotas).release(uid, &name, number);
        }
    }

    fn give_back(&self, placed: Placed) {
        // The cell's next process must not find it.
        self.forget(placed.uid, &placed.name);
        if let (Some(groups), Some(group)) = (&self.groups, &placed.group) {
            groups.part(placed.uid, group, &placed.name);
        }
        placed.reservation.leave();
        let _ = placed.stream.shutdown(std::net::Shutdown::Both);
    }

    fn forget(&self, uid: u32, name: &str) {
        if let Err(error) = self.files.remove_user_vm(uid, name) {
            error!(uid, vm = name, %error, "what is written of a VM stays");
        }
    }

    fn status_of(&self, user: &UserPlan) -> Reply {
        let own = lock(&self.quotas).use_of(user.uid, self.limits());
        match (own, self.cells()) {
            (Some(own), Ok(status)) => Reply::Status(UserStatus {
                cells: self.rooms(&status),
                own,
            }),
            (None, _) => Reply::NotAdmitted,
            (_, Err(error)) => {
                debug!(%error, "the cells do not tell their state");
                refused("the host's cluster does not answer; try again in a moment")
            }
        }
    }

    /// The state of the cells. It is cached, so that users' requests do not load the cells.
    fn cells(&self) -> io::Result<Status> {
        let mut known = lock(&self.status);
        if let Some((when, status)) = &*known
            && when.elapsed() < STATUS_AGE_MAX
        {
            return Ok(status.clone());
        }
        let status = client::status(&self.files)?.unwrap_or_default();
        *known = Some((Instant::now(), status.clone()));
        Ok(status)
    }

    /// Capacity of the cells of this host that take VMs.
    fn rooms(&self, status: &Status) -> Vec<CellRoom> {
        let is_here = |cell: &&CellStatus| self.plan.iter().any(|own| own.number == cell.plan.number);
        let living = status
            .cells
            .iter()
            .filter(|cell| cell.life.is_some() && !cell.failed && !cell.cordoned);
        living.filter(is_here).map(room).collect()
    }
}

/// Free resources of a cell, its borrowed memory included.
fn room(cell: &CellStatus) -> CellRoom {
    let sum = |parts: &[LentMemory]| parts.iter().map(|part| part.bytes).sum::<u64>();
    let bytes = cell.plan.memory_bytes.saturating_add(sum(&cell.borrowed));
    CellRoom {
        number: cell.plan.number,
        cpus: cell.plan.cpus.clone(),
        nodes: cell.plan.nodes.clone(),
        free_bytes: bytes
            .saturating_sub(sum(&cell.lent))
            .saturating_sub(cell.given_bytes),
    }
}

fn refused(why: &str) -> Reply {
    Reply::Refused { why: why.to_owned() }
}

fn answer(mut stream: &UnixStream, reply: &Reply) -> io::Result<()> {
    stream.write_all(&OF_SERVER.write(reply)?)
}

#[cfg(test)]
mod tests;
