//! The first thread, once the VM runs: takes the monitor's orders, waits for the end, stops the others.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::thread::JoinHandleExt;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use diskstore::disk::BaseWatch;
use nix::poll::{PollFd, PollFlags, poll};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use super::freeze::Freezer;
use super::status::status;
use crate::launch::{Ending, Order, Report};
use crate::machine::Running;
use crate::pci::PciBus;
use crate::sharing::{Mapper, Situations};
use crate::vcpu::VcpuCounters;
use crate::virtio::balloon::BalloonHandle;

/// Longest order, bytes.
const ORDER_BYTES_MAX: usize = 4096;
/// How long vCPUs may take to leave the guest; one that waits in the kernel for memory can take longer, and is left behind.
const STOP_LIMIT: Duration = Duration::from_secs(2);
/// How often the first thread looks at the bases of the disks, milliseconds.
const WATCH_INTERVAL: u16 = 1000;
const KICK_INTERVAL: Duration = Duration::from_millis(1);

extern "C" fn kicked(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Lets the kick signal interrupt KVM_RUN and do nothing else.
pub fn catch_kicks() -> io::Result<()> {
    register_signal_handler(SIGRTMIN(), kicked).map_err(io::Error::from)
}

/// Writes a report as one line.
pub fn report(socket: &mut UnixStream, report: &Report) -> io::Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// The running VM as its first thread has it.
pub struct Control {
    pub socket: UnixStream,
    pub running: Running,
    pub vcpu_threads: Vec<JoinHandle<()>>,
    pub counters: Vec<Arc<VcpuCounters>>,
    pub freezer: Freezer,
    pub bus: PciBus,
    pub balloon: Option<BalloonHandle>,
    /// The bases of the disks, which nobody may change.
    pub watch: BaseWatch,
    /// What the disks share by.
    pub sharing: Option<(Arc<Mapper>, Arc<Situations>)>,
    /// Dropping it ends the background of sharing.
    pub _stop_sharing: mpsc::Sender<()>,
    pub console_thread: JoinHandle<()>,
    pub stop_console: EventFd,
    /// Bytes of orders not complete yet.
    pub orders: Vec<u8>,
}

impl Control {
    /// Serves orders until the VM ends, then stops everything.
    pub fn wait(mut self) -> Ending {
        let ending = loop {
            if let Some(ending) = self.running.end.cause() {
                break ending;
            }
            let mut files = [
                PollFd::new(self.running.end.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.socket.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.freezer.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut files, WATCH_INTERVAL) {
                Ok(_) | Err(nix::Error::EINTR) => {
                    if let Some(detail) = self.watch.changed() {
                        break Ending::ShardFailed { detail };
                    }
                }
                Err(error) => {
                    break Ending::ShardFailed {
                        detail: format!("cannot wait: {error}"),
                    };
                }
            }
            let [_, ordered, asked_to_freeze] = files.map(|file| file.any().unwrap_or(false));
            if ordered && let Some(ending) = self.receive() {
                break ending;
            }
            if asked_to_freeze {
                let sharing = self.sharing.as_ref().map(|(mapper, _)| &**mapper);
                self.freezer.serve(&self.running, &self.bus, sharing);
            }
        };
        let end = self.running.end.clone();
        end.end(ending);
        self.stop();
        // The first cause: a power-off may have come while an order to quit was being read.
        end.cause().unwrap_or(Ending::Quit)
    }

    /// Reads orders; an ending when one asks for it.
    fn receive(&mut self) -> Option<Ending> {
        let mut buffer = [0; ORDER_BYTES_MAX];
        match self.socket.read(&mut buffer) {
            // The monitor died: so does the VM, at once.
            Ok(0) => std::process::exit(1),
            Ok(bytes) => self.orders.extend_from_slice(&buffer[..bytes]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return None,
            Err(_) => std::process::exit(1),
        }
        while let Some(end) = self.orders.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.orders.drain(..=end).collect();
            match serde_json::from_slice(&line) {
                Ok(order) => {
                    if let Some(ending) = self.obey(order) {
                        return Some(ending);
                    }
                }
                Err(error) => {
                    let detail = format!("the monitor's order is not understood: {error}");
                    return Some(Ending::ShardFailed { detail });
                }
            }
        }
        (self.orders.len() > ORDER_BYTES_MAX).then(|| Ending::ShardFailed {
            detail: "the monitor's order never ends".to_owned(),
        })
    }

    fn obey(&mut self, order: Order) -> Option<Ending> {
        match order {
            Order::PowerButton => {
                // The counter can't overflow; a press that is pending is enough.
                let _ = self.running.button.press();
                None
            }
            Order::Balloon { bytes } => {
                if let Some(balloon) = &self.balloon {
                    balloon.set_bytes(bytes);
                }
                None
            }
            Order::Status => {
                let answer = Report::Status(status(
                    &self.counters,
                    self.running.console.counters(),
                    &self.bus,
                    self.sharing.as_ref(),
                ));
                // A monitor that is gone shows at the next read.
                let _ = report(&mut self.socket, &answer);
                None
            }
            Order::Quit => Some(Ending::Quit),
        }
    }

    /// Stops the vCPUs, then hands over the rest of the console's output.
    fn stop(self) {
        let deadline = Instant::now() + STOP_LIMIT;
        // A vCPU between its look at the end signal and KVM_RUN would miss one kick: kick until it has left.
        while self.vcpu_threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            for thread in self.vcpu_threads.iter().filter(|thread| !thread.is_finished()) {
                // SAFETY: the thread is not joined yet, so its handle is valid.
                let _ = unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGRTMIN()) };
            }
            std::thread::sleep(KICK_INTERVAL);
        }
        // Disks write what they have acknowledged.
        self.bus.stop();
        let _ = self.stop_console.write(1);
        let _ = self.console_thread.join();
    }
}
