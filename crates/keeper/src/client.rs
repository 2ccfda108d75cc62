//! A monitor's side of its keeper.
//!
//! There is no thread: each call receives the packets that have arrived meanwhile.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use locks::IgnorePoison;
use nix::sys::signal::{SigSet, SigmaskHow};

use crate::message::{FILES_MAX, Message};
use crate::server::BLOCKED;
use crate::socket::{Packet, Socket};
pub use crate::spawn::Spawn;

/// The name of the keeper's program.
pub const NAME: &str = "mirrorball-keeper";
/// Time that a keeper has for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);
/// Time that a keeper has to end with its VM before it is killed.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// Time that processes have to end after they were killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that [`Keeper::note_ending`] waits for another request.
const NOTE_TIMEOUT: Duration = Duration::from_millis(200);
const END_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A process that the keeper has started.
#[derive(Debug)]
pub struct Spawned {
    /// The process id. It stays this process's until it is reaped ([`Keeper::reap`]).
    pub pid: i32,
    /// A descriptor of the process.
    pub pidfd: OwnedFd,
    /// Whether the process has the identity that it was to have.
    pub is_mapped: bool,
}

/// The end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// With this status, as `waitpid` returns it.
    Status(i32),
    /// With its keeper, which is gone.
    KeeperGone,
}

/// A VM's keeper. Dropping it ends the VM's processes and the keeper.
#[derive(Debug)]
pub struct Keeper {
    pid: i32,
    connection: Mutex<Connection>,
    /// The statuses of processes that have ended and are not reaped.
    exits: Mutex<BTreeMap<i32, i32>>,
    is_gone: AtomicBool,
    /// The keeper watches the client's lease.
    watches: AtomicBool,
    /// The process of a keeper that this process started.
    child: Option<Child>,
}

#[derive(Debug)]
struct Connection {
    /// The socket, until this is dropped.
    socket: Option<Socket>,
    last_request: u64,
}

impl Keeper {
    /// Starts a keeper, which executes `program`; `name` is the VM's, and the keeper's only argument.
    ///
    /// # Errors
    /// If the program cannot be executed.
    pub fn start(program: BorrowedFd<'_>, name: &str) -> io::Result<Self> {
        let (socket, theirs) = Socket::pair()?;
        // Inherited by the keeper, which would be without its own mask for a moment.
        let before = SigSet::from_iter(BLOCKED).thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let child = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()))
            .arg0(NAME)
            .arg(name)
            .stdin(Stdio::from(theirs))
            .spawn();
        before.thread_set_mask()?;
        let child = child?;
        Ok(Self::new(child.id() as i32, socket, 0, Some(child)))
    }

    /// Takes a VM over as the successor of its monitor. `socket` is the standard input that the keeper gave
    /// this process, which becomes `/dev/null`, or a connection to the keeper's listening socket
    /// ([`Socket::connect`]). Returns the slot's descriptors, too.
    ///
    /// # Errors
    /// If the descriptor is no keeper's socket, or the keeper is gone.
    pub fn adopt(socket: OwnedFd) -> io::Result<(Self, Vec<OwnedFd>)> {
        let socket = Socket::take(socket)?;
        let keeper = Self::new(socket.maker()?, socket, 0, None);
        match keeper.take_slot() {
            Ok(slot) => Ok((keeper, slot)),
            Err(error) => {
                // Releasing does not end the VM: the keeper may have a monitor that continues.
                keeper.release();
                Err(error)
            }
        }
    }

    /// Resumes the connection that a former monitor had to the keeper with process id `pid`. The former
    /// monitor has sent fewer than `requests` requests.
    ///
    /// # Errors
    /// If the descriptor is no keeper's socket, or the keeper is gone.
    pub fn resume(socket: OwnedFd, pid: i32, requests: u64) -> io::Result<Self> {
        let keeper = Self::new(pid, Socket::take(socket)?, requests, None);
        // The reports that the former monitor has received are sent again.
        keeper.take_slot()?;
        Ok(keeper)
    }

    /// Lets the VM outlive this process: the keeper has the next cell or successor serve it.
    pub fn release(self) {
        let mut connection = self.connection.lock().ignore_poison();
        // Only a message ends the VM.
        connection.socket = None;
    }

    /// The same for the monitor that started the keeper, which would be killed otherwise when its connection
    /// has ended: it has other VMs.
    ///
    /// # Errors
    /// If the keeper is gone.
    pub fn leave(mut self) -> io::Result<()> {
        self.done(&Message::Leave, &[], REPLY_TIMEOUT)?;
        // Not waited for: it runs on.
        self.child = None;
        self.release();
        Ok(())
    }

    /// Returns the connection, for a successor that resumes it ([`Keeper::resume`]).
    ///
    /// # Errors
    /// If this process has no descriptors left, or the keeper is gone.
    pub fn connection(&self) -> io::Result<OwnedFd> {
        let connection = self.connection.lock().ignore_poison();
        let socket = connection.socket.as_ref().ok_or_else(|| self.gone())?;
        socket.as_fd().try_clone_to_owned()
    }

    fn take_slot(&self) -> io::Result<Vec<OwnedFd>> {
        let mut slot = Vec::new();
        self.request(&Message::Take, &[], REPLY_TIMEOUT, |reply, files| match reply {
            Message::Slot { index, total } if index as usize == slot.len() => {
                slot.extend(files);
                (slot.len() as u64 >= u64::from(total)).then_some(Ok(()))
            }
            _ => Some(Err(unexpected())),
        })?;
        Ok(slot)
    }

    fn new(pid: i32, socket: Socket, requests: u64, child: Option<Child>) -> Self {
        Self {
            pid,
            connection: Mutex::new(Connection {
                socket: Some(socket),
                last_request: requests,
            }),
            exits: Mutex::default(),
            is_gone: AtomicBool::new(false),
            watches: AtomicBool::new(false),
            child,
        }
    }

    /// Process id of the keeper.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether the keeper still runs, as far as this process has received. Never waits.
    pub fn is_alive(&self) -> bool {
        if let Ok(connection) = self.connection.try_lock() {
            self.drain(&connection);
        }
        !self.is_gone.load(Ordering::Acquire)
    }

    /// Starts a process of the VM, as the keeper's child. Waits 20 s at most.
    ///
    /// # Errors
    /// If the keeper or the kernel refuses the process, or the keeper is gone.
    pub fn spawn(&self, process: &Spawn<'_>) -> io::Result<Spawned> {
        let message = Message::Spawn {
            flags: process.flags,
            identity: process.identity,
            file_bytes: process.file_bytes,
            words: owned(process.words),
        };
        let files = [process.program, process.control, process.log];
        self.request(&message, &files, REPLY_TIMEOUT, |reply, mut files| match reply {
            Message::Spawned { pid, is_mapped } => {
                Some(files.pop().ok_or_else(unexpected).map(|pidfd| Spawned {
                    pid,
                    pidfd,
                    is_mapped,
                }))
            }
            _ => Some(Err(unexpected())),
        })
    }

    /// Names the program that the keeper starts when this monitor is gone and the slot is whole.
    ///
    /// # Errors
    /// If the command line is too long for a message, or the keeper is gone.
    pub fn succeed_by(&self, program: BorrowedFd<'_>, words: &[&str]) -> io::Result<()> {
        let words = owned(words);
        self.done(&Message::Successor { words }, &[program], REPLY_TIMEOUT)
    }

    /// Has the keeper accept a cell's connection to `socket` ([`Socket::bind`]) when this monitor is gone.
    ///
    /// # Errors
    /// If the keeper can't listen, or is gone.
    pub fn listen(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.done(&Message::Listen, &[socket], REPLY_TIMEOUT)
    }

    /// Has the keeper end the VM when the client closes its `lease`, has not sent `detach`, and no monitor
    /// reports within [`crate::state::NOTICE_TIMEOUT`] that it ends the VM ([`Keeper::note_ending`]).
    ///
    /// # Errors
    /// If the keeper is gone.
    pub fn watch(&self, lease: BorrowedFd<'_>, detach: &str) -> io::Result<()> {
        let detach = detach.to_owned();
        self.done(&Message::Watch { detach }, &[lease], REPLY_TIMEOUT)?;
        self.watches.store(true, Ordering::Release);
        Ok(())
    }

    /// Whether the keeper watches the lease.
    pub fn watches(&self) -> bool {
        self.watches.load(Ordering::Acquire)
    }

    /// Notes that a former monitor has had the keeper watch the lease. Keepers of the release before do not.
    pub fn note_watch(&self, watches: bool) {
        self.watches.store(watches, Ordering::Release);
    }

    /// Reports to the keeper that this monitor ends the VM. Never waits for the keeper, which may be stopped,
    /// and for [`NOTE_TIMEOUT`] at most for another thread's request.
    pub fn note_ending(&self) {
        if !self.watches() {
            return;
        }
        let deadline = Instant::now() + NOTE_TIMEOUT;
        let connection = loop {
            match self.connection.try_lock() {
                Ok(connection) => break connection,
                Err(TryLockError::Poisoned(connection)) => break connection.into_inner(),
                Err(TryLockError::WouldBlock) if Instant::now() > deadline => return,
                Err(TryLockError::WouldBlock) => std::thread::sleep(END_POLL_INTERVAL),
            }
        };
        if let (Some(socket), Ok(packet)) = (&connection.socket, Message::Ending.write(0)) {
            // A keeper that is gone has ended the VM; one that reads nothing ends nothing either.
            let _ = socket.send(&packet, &[]);
        }
    }

    /// Replaces the slot by copies of these descriptors. An empty list empties the slot.
    ///
    /// # Errors
    /// If the keeper may not hold so many, and has no slot now, or is gone.
    pub fn put(&self, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.put_within(files, REPLY_TIMEOUT)
    }

    fn put_within(&self, files: &[BorrowedFd<'_>], timeout: Duration) -> io::Result<()> {
        let count = files.len().div_ceil(FILES_MAX).max(1);
        for index in 0..count {
            let message = Message::Put {
                begin: index == 0,
                end: index + 1 == count,
            };
            let chunk = files.chunks(FILES_MAX).nth(index).unwrap_or_default();
            self.done(&message, chunk, timeout)?;
        }
        Ok(())
    }

    /// Empties the slot: the VM ends with this monitor from now on.
    ///
    /// # Errors
    /// If the keeper is gone.
    pub fn clear(&self) -> io::Result<()> {
        self.put(&[])
    }

    /// The end of a process, if it has ended. Never waits.
    pub fn exit_of(&self, pid: i32) -> Option<Exit> {
        // Another call that holds the connection receives the packets.
        match self.connection.try_lock() {
            Ok(connection) => self.drain(&connection),
            Err(TryLockError::Poisoned(connection)) => self.drain(&connection.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        // Read before the table, which has every report that preceded the keeper's end.
        let is_gone = self.is_gone.load(Ordering::Acquire);
        let status = self.exits().get(&pid).copied();
        status
            .map(Exit::Status)
            .or_else(|| is_gone.then_some(Exit::KeeperGone))
    }

    /// Acknowledges the exit of a process: its process id may be another's from now on.
    pub fn reap(&self, pid: i32) {
        let reaped = self.request(&Message::Reap { pid }, &[], REPLY_TIMEOUT, |reply, _| {
            if reply == Message::Done {
                // Before the connection is free for the start of a process with the same id.
                self.exits().remove(&pid);
            }
            Some(Ok(()))
        });
        // A keeper that is gone has given all its children back.
        let _ = reaped;
    }

    /// Kills all processes of the VM, and waits until they have ended, for 10 s at most.
    ///
    /// # Errors
    /// If one does not end in time, or the keeper is gone.
    pub fn kill_all(&self) -> io::Result<()> {
        let deadline = Instant::now() + KILL_TIMEOUT;
        loop {
            let left = self.request(&Message::KillAll, &[], REPLY_TIMEOUT, |reply, _| match reply {
                Message::Left { running } => Some(Ok(running)),
                _ => Some(Err(unexpected())),
            })?;
            if left == 0 {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "a process of the VM does not end though it was killed",
                ));
            }
            std::thread::sleep(END_POLL_INTERVAL);
        }
    }

    /// Acknowledges all exits that were reported.
    pub fn reap_all(&self) {
        let ended: Vec<i32> = self.exits().keys().copied().collect();
        ended.into_iter().for_each(|pid| self.reap(pid));
    }

    fn done(&self, message: &Message, files: &[BorrowedFd<'_>], timeout: Duration) -> io::Result<()> {
        self.request(message, files, timeout, |reply, _| match reply {
            Message::Done => Some(Ok(())),
            _ => Some(Err(unexpected())),
        })
    }

    /// Sends a request, and passes its replies to `take` until that returns something.
    fn request<T>(
        &self,
        message: &Message,
        files: &[BorrowedFd<'_>],
        timeout: Duration,
        mut take: impl FnMut(Message, Vec<OwnedFd>) -> Option<io::Result<T>>,
    ) -> io::Result<T> {
        let deadline = Instant::now() + timeout;
        let mut connection = self.connection.lock().ignore_poison();
        connection.last_request += 1;
        let request = connection.last_request;
        let packet = message
            .write(request)
            .map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, format!("keeper: {why}")))?;
        let socket = connection.socket.as_ref().ok_or_else(|| self.gone())?;
        loop {
            match socket.send(&packet, files) {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.drain(&connection);
                    if !socket.wait_until(deadline, true)? {
                        return Err(late());
                    }
                }
                Err(error) if is_end(&error) => {
                    // Reports that preceded the end.
                    self.drain(&connection);
                    return Err(self.gone());
                }
                Err(error) => return Err(error),
            }
        }
        loop {
            let Some(packet) = self.receive(socket)? else {
                if !socket.wait_until(deadline, false)? {
                    return Err(late());
                }
                continue;
            };
            let (number, reply) = Message::read(&packet.bytes).map_err(|_| self.gone())?;
            if let Message::Exited { pid, status } = reply {
                self.exits().insert(pid, status);
                continue;
            }
            // The reply to a request that timed out.
            if number != request {
                continue;
            }
            if packet.is_short_of_files {
                return Err(io::Error::from_raw_os_error(libc::EMFILE));
            }
            if let Message::Failed { errno, what } = reply {
                return Err(refusal(errno, what));
            }
            if let Some(taken) = take(reply, packet.files) {
                return taken;
            }
        }
    }

    /// Receives a packet, or none if none has arrived.
    fn receive(&self, socket: &Socket) -> io::Result<Option<Packet>> {
        match socket.receive() {
            Ok(Some(packet)) => Ok(Some(packet)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            // The peer left packets unread: this error occurs once, before the packets that it sent.
            Err(error) if error.raw_os_error() == Some(libc::ECONNRESET) => match socket.receive() {
                Ok(Some(packet)) => Ok(Some(packet)),
                _ => Err(self.gone()),
            },
            Ok(None) | Err(_) => Err(self.gone()),
        }
    }

    /// Receives all reports that have arrived.
    fn drain(&self, connection: &Connection) {
        let Some(socket) = &connection.socket else { return };
        while let Ok(Some(packet)) = self.receive(socket) {
            match Message::read(&packet.bytes) {
                Ok((_, Message::Exited { pid, status })) => {
                    self.exits().insert(pid, status);
                }
                // The reply to a request that timed out.
                Ok(_) => {}
                Err(_) => {
                    self.gone();
                    return;
                }
            }
        }
    }

    /// Notes that the keeper is gone. Returns the error that reports it.
    fn gone(&self) -> io::Error {
        self.is_gone.store(true, Ordering::Release);
        io::Error::new(
            io::ErrorKind::BrokenPipe,
            format!(
                "the VM's keeper (process {}) is gone, and the VM's processes with it",
                self.pid
            ),
        )
    }

    fn exits(&self) -> MutexGuard<'_, BTreeMap<i32, i32>> {
        self.exits.lock().ignore_poison()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.put_within(&[], END_TIMEOUT);
        let connection = self.connection.get_mut().ignore_poison();
        connection.socket = None;
        let Some(child) = &mut self.child else { return };
        // SAFETY: opens a child that is not waited for yet; no memory is involved.
        let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) } as libc::c_int;
        let mut ended = libc::pollfd {
            fd: pidfd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: reads and writes one structure of ours. Without a descriptor it waits for the whole time.
        let ready = unsafe { libc::poll(&raw mut ended, 1, END_TIMEOUT.as_millis() as libc::c_int) };
        if pidfd >= 0 {
            // SAFETY: closes a descriptor that was made here.
            unsafe { libc::close(pidfd) };
        }
        if ready != 1 {
            // Its children are killed by their death signals.
            let _ = child.kill();
        }
        let _ = child.wait();
    }
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn is_end(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPIPE | libc::ECONNRESET))
}

fn refusal(errno: i32, what: String) -> io::Error {
    io::Error::new(io::Error::from_raw_os_error(errno).kind(), what)
}

fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the VM's keeper does not reply")
}

fn unexpected() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the VM's keeper sent an unexpected reply",
    )
}
