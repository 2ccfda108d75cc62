//! A device's thread: waits for the driver's notifications and the device's own files, and runs the handler.
//!
//! The thread handles one event at a time. It shares nothing with the vCPUs but the queues in guest memory.
//! It exists from before the sandbox closes until the shard ends; a channel carries activations and resets.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::device::{Activation, DeviceError, Interrupt};
use crate::quiescer::Quiescer;
use crate::sandbox::{ThreadKind, Threads};

/// Event for a handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The driver notified this queue.
    Queue(u16),
    /// A file that the handler registered with [`Sources::add`], with this token, is ready.
    Source(u32),
}

/// The half of a device that runs on the device's thread.
pub trait Handler: Send + 'static {
    /// Takes the queues when the driver is ready. An error requests a reset from the guest.
    fn start(&mut self, activation: Activation, sources: &Sources) -> Result<(), DeviceError>;
    /// Serves one event. Called only between `start` and `stop`. An error requests a reset from the guest,
    /// and the handler is stopped.
    fn handle(&mut self, event: Event, sources: &Sources) -> Result<(), DeviceError>;
    /// Drops the queues. Finishes or abandons I/O in flight, so that guest memory is not accessed afterwards.
    fn stop(&mut self, sources: &Sources);
}

/// Files that a handler waits for beside its queues.
pub struct Sources {
    epoll: Epoll,
}

const CONTROL_TOKEN: u64 = u64::MAX;
const QUEUE_TOKEN: u64 = 1 << 32;
/// Greatest number of events received at once.
const EVENTS_MAX: usize = 16;

impl Sources {
    /// Creates an empty set of sources, for a handler without its thread.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
        })
    }

    /// Returns the tokens of the files that are ready now, for [`crate::fuzzing`].
    #[cfg(fuzzing)]
    pub(crate) fn ready(&self) -> io::Result<Vec<u32>> {
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO)?;
        Ok(events[..count].iter().map(|event| event.data() as u32).collect())
    }

    /// Waits for `fd` (level-triggered) and reports it as `Event::Source(token)`.
    pub fn add(&self, fd: impl AsFd, token: u32, interest: EpollFlags) -> io::Result<()> {
        Ok(self.epoll.add(fd, EpollEvent::new(interest, u64::from(token)))?)
    }

    /// Changes the events of `fd` to wait for.
    pub fn modify(&self, fd: impl AsFd, token: u32, interest: EpollFlags) -> io::Result<()> {
        Ok(self
            .epoll
            .modify(fd, &mut EpollEvent::new(interest, u64::from(token)))?)
    }

    /// Stops waiting for `fd`.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(self.epoll.delete(fd)?)
    }
}

enum Command {
    Activate(Box<Activation>),
    Reset(mpsc::Sender<()>),
}

/// The front end's handle of its device's thread. Dropping it ends the thread.
pub struct Worker {
    commands: Option<mpsc::Sender<Command>>,
    wake: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread `name`, sealed as `kind`, which runs `handler`.
    pub fn spawn(threads: &Threads, kind: ThreadKind, name: &str, handler: impl Handler) -> io::Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let wake = EventFd::new(EFD_NONBLOCK)?;
        let sources = Sources {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
        };
        let control = wake.try_clone()?;
        // SAFETY: `control` moves into the thread below and outlives every wait on it.
        let control_fd = unsafe { BorrowedFd::borrow_raw(control.as_raw_fd()) };
        sources
            .epoll
            .add(control_fd, EpollEvent::new(EpollFlags::EPOLLIN, CONTROL_TOKEN))?;
        let quiescer = threads.quiescer().clone();
        let thread = threads.spawn(kind, name, move || {
            Loop {
                quiescer,
                handler,
                sources,
                inbox,
                control,
                running: None,
            }
            .run();
        })?;
        Ok(Self {
            commands: Some(commands),
            wake,
            thread: Some(thread),
        })
    }

    /// Passes an activation to the handler.
    pub fn activate(&self, activation: Activation) -> Result<(), DeviceError> {
        self.send(Command::Activate(Box::new(activation)))
            .map_err(|source| DeviceError::Host {
                what: "the device's thread is gone",
                source,
            })
    }

    /// Stops the handler and waits until it has dropped the queues.
    pub fn reset(&self) {
        let (done, wait) = mpsc::channel();
        if self.send(Command::Reset(done)).is_ok() {
            // An error means that the thread has ended, and dropped the queues.
            let _ = wait.recv();
        }
    }

    fn send(&self, command: Command) -> io::Result<()> {
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        self.commands
            .as_ref()
            .ok_or_else(gone)?
            .send(command)
            .map_err(|_| gone())?;
        self.wake.write(1)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.commands.take();
        let _ = self.wake.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// State between an activation and a reset.
struct Running {
    notify: Vec<(u16, EventFd)>,
    interrupt: std::sync::Arc<dyn Interrupt>,
}

struct Loop<H> {
    quiescer: Arc<Quiescer>,
    handler: H,
    sources: Sources,
    inbox: mpsc::Receiver<Command>,
    control: EventFd,
    running: Option<Running>,
}

impl<H: Handler> Loop<H> {
    fn run(mut self) {
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        loop {
            let count = match self.sources.epoll.wait(&mut events, EpollTimeout::NONE) {
                Ok(count) => count,
                Err(nix::Error::EINTR) => continue,
                // epoll_wait on this process's own epoll file fails for no other reason; without it the
                // device can't work.
                Err(_) => break,
            };
            for event in &events[..count] {
                match event.data() {
                    CONTROL_TOKEN => {
                        let _ = self.control.read();
                        if !self.control_event() {
                            self.stop();
                            return;
                        }
                    }
                    data if data >= QUEUE_TOKEN => self.queue_event((data - QUEUE_TOKEN) as u16),
                    data => self.dispatch(Event::Source(data as u32)),
                }
            }
        }
        self.stop();
    }

    /// Serves the front end's commands; returns false if the front end was dropped.
    fn control_event(&mut self) -> bool {
        loop {
            match self.inbox.try_recv() {
                Ok(Command::Activate(activation)) => self.start(*activation),
                Ok(Command::Reset(done)) => {
                    self.stop();
                    let _ = done.send(());
                }
                Err(mpsc::TryRecvError::Empty) => return true,
                Err(mpsc::TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn start(&mut self, activation: Activation) {
        let interrupt = activation.interrupt.clone();
        match self.listen(&activation) {
            Ok(notify) => {
                self.running = Some(Running {
                    notify,
                    interrupt: interrupt.clone(),
                })
            }
            Err(source) => {
                interrupt.needs_reset(&DeviceError::Host {
                    what: "cannot wait for the queues",
                    source,
                });
                return;
            }
        }
        let quiescer = self.quiescer.clone();
        let _working = quiescer.work();
        if let Err(error) = self.handler.start(activation, &self.sources) {
            self.fail(&error);
        }
    }

    fn listen(&self, activation: &Activation) -> io::Result<Vec<(u16, EventFd)>> {
        let mut notify = Vec::with_capacity(activation.queues.len());
        for queue in &activation.queues {
            let fd = queue.notify.try_clone()?;
            // SAFETY: `fd` is kept in `Running` until `stop` removes it from the epoll file.
            let borrowed = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
            let token = QUEUE_TOKEN + u64::from(queue.index);
            self.sources
                .epoll
                .add(borrowed, EpollEvent::new(EpollFlags::EPOLLIN, token))?;
            notify.push((queue.index, fd));
        }
        Ok(notify)
    }

    fn queue_event(&mut self, index: u16) {
        let Some(running) = &self.running else { return };
        let Some((_, notify)) = running.notify.iter().find(|(queue, _)| *queue == index) else {
            return;
        };
        let _ = notify.read();
        self.dispatch(Event::Queue(index));
    }

    fn dispatch(&mut self, event: Event) {
        if self.running.is_none() {
            return;
        }
        let quiescer = self.quiescer.clone();
        let _working = quiescer.work();
        if let Err(error) = self.handler.handle(event, &self.sources) {
            self.fail(&error);
        }
    }

    fn fail(&mut self, error: &DeviceError) {
        if let Some(running) = &self.running {
            running.interrupt.needs_reset(error);
        }
        self.stop();
    }

    fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            for (_, fd) in &running.notify {
                // SAFETY: `fd` is open: `running` owns it until the end of this block.
                let fd = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
                let _ = self.sources.epoll.delete(fd);
            }
            self.handler.stop(&self.sources);
        }
    }
}
