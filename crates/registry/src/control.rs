//! Protocol of a VM's control socket: one request and one response per connection, a line of JSON each.
//!
//! Clients call [`ask`]. The monitor serves the socket (`cell::control`), which is `control.sock` in the VM's
//! directory. A line has at most [`LINE_BYTES_MAX`] bytes.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use shard_api::launch::VCPU_STOP_MS_MAX;
pub use shard_api::page_map::{HostPage, PageMapPart, PageRun};
use urpc::version::Versions;

use crate::cluster::interface::LentMemory;
use crate::json_line::Protocol;
use crate::update::{MemoryReport, Update};

/// The client's side of the protocol.
pub const OF_CLIENT: Protocol = Protocol {
    name: "the protocol of a VM's clients",
    peer: "the process that serves the VM",
    versions: Versions::up_to(1),
};
/// The side of the process that serves the VM.
pub const OF_VM: Protocol = Protocol {
    peer: "the client",
    ..OF_CLIENT
};

/// Maximum length of a line, in bytes.
pub const LINE_BYTES_MAX: u64 = 1 << 20;

/// Time limit between a VM's entry in the registry and its control socket. The monitor opens the VM's files
/// meanwhile, and may wait for the lock of one.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Poll interval for the control socket of a VM that is starting.
const START_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A request to a running VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum Request {
    /// Press the power button, and kill the VM after the limit. The response comes when the VM has ended.
    Stop {
        /// Time limit for the guest, in seconds.
        limit_s: u64,
    },
    /// End the VM at once. The response comes when it has ended.
    Kill,
    /// Report the shard's counters.
    Status,
    /// Report the origins of the VM's pages from this one on. The response is [`Answer::PageMap`].
    PageMap {
        /// Number of the first page.
        from: u64,
    },
    /// Freeze the VM and resume it. The response is a `cell::frozen::FreezeAnswer` with files.
    Freeze,
    /// Send the descriptor of a shared region that the VM has. The response is [`Answer::Done`] with the
    /// file.
    Region {
        /// The region's name.
        name: String,
    },
    /// Record the cells of the memory of a shared region that the VM has.
    RegionLenders {
        /// The region's name.
        name: String,
        /// Memory by cell, as in a [`RegionGrant`](crate::cluster::interface::RegionGrant).
        borrowed: Vec<LentMemory>,
    },
    /// Move a vCPU of a VM that spans cells.
    Move {
        /// The vCPU's number.
        vcpu: u8,
        /// Cell to which it moves.
        cell: u16,
    },
    /// Have a vCPU run on a CPU of the host.
    Place {
        /// The vCPU's number.
        vcpu: u8,
        /// The host's number of the CPU.
        cpu: usize,
    },
    /// Set the balloon.
    Balloon {
        /// Bytes that the guest gives back.
        bytes: u64,
    },
    /// Pause until [`Request::Resume`].
    Pause,
    /// Resume after [`Request::Pause`].
    Resume,
    /// Stop one vCPU, or renew its stop. It goes on by itself.
    PauseVcpu {
        /// The vCPU's number.
        vcpu: u8,
        /// Length of the stop from now, in milliseconds: [`VCPU_STOP_MS_MAX`] at most.
        for_ms: u16,
    },
    /// End a [`Request::PauseVcpu`] before its deadline.
    ResumeVcpu {
        /// The vCPU's number.
        vcpu: u8,
    },
    /// Restart the guest, as by a machine's reset button. The response comes when the VM starts.
    Reset,
    /// Send each vCPU a non-maskable interrupt.
    Nmi,
    /// Change the host resources that the VM uses.
    Update(Update),
    /// Wait until the vCPUs run. The response is [`Answer::Done`], [`Answer::Ended`] or [`Answer::TimedOut`].
    AwaitRunning {
        /// Longest time to wait, in seconds.
        limit_s: u64,
    },
    /// Wait until the VM has ended. The response is [`Answer::Ended`] or [`Answer::TimedOut`].
    AwaitEnd {
        /// Longest time to wait, in seconds.
        limit_s: u64,
    },
}

/// Response to a [`Request`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum Answer {
    /// The request was carried out.
    Done,
    /// The VM has ended, by itself or by force after the limit.
    Ended {
        /// Whether it was killed.
        killed: bool,
    },
    /// The shard's counters.
    Status {
        /// The counters, as the shard sent them.
        status: Value,
    },
    /// The origins of some pages.
    PageMap(PageMapPart),
    /// The vCPU runs in the requested cell.
    Moved {
        /// Pause of the vCPU, in nanoseconds.
        still_ns: u64,
        /// CPUs that it was pinned to, if the move has removed its pin.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        dropped_pin: Option<Vec<usize>>,
    },
    /// The vCPU runs on the requested CPU.
    Placed(Placement),
    /// The memory is bound as a [`Request::Update`] requested, and has moved.
    MemoryPlaced(MemoryReport),
    /// The awaited state was not reached within the limit.
    TimedOut,
    /// The request can't be carried out.
    Refused {
        /// The reason, in one line for people.
        why: String,
    },
}

/// Outcome of a [`Request::Place`].
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Placement {
    /// Means that keep the vCPU on the CPU.
    pub by: PlacedBy,
    /// The cell of the CPU, if that is another than the VM's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cell: Option<u16>,
    /// Cell on which the VM depends from now on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<u16>,
    /// Cell on which the VM depends no longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<u16>,
    /// CPUs that it was pinned to, if the move has removed its pin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped_pin: Option<Vec<usize>>,
}

/// Means that keep a vCPU on the CPU to which it was moved.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlacedBy {
    /// A pin, as [`Update`] sets it.
    #[default]
    Pin,
    /// The driver of the CPU. Drivers may move the vCPU again.
    Driver,
    /// A loan of the CPU's time by another cell.
    Loan,
}

impl PlacedBy {
    /// The word for it in the API.
    pub fn word(self) -> &'static str {
        match self {
            Self::Pin => "pin",
            Self::Driver => "driver",
            Self::Loan => "loan",
        }
    }
}

/// Connects to the VM's control socket. Waits for the socket of a VM that is starting.
fn connect(folder: &Path, limit: Duration) -> io::Result<UnixStream> {
    let deadline = Instant::now() + limit;
    loop {
        match UnixStream::connect(folder.join("control.sock")) {
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    && folder.exists()
                    && Instant::now() < deadline =>
            {
                std::thread::sleep(START_POLL_INTERVAL);
            }
            other => return other,
        }
    }
}

impl Request {
    /// Whether repeating a request has the same outcome, as after a monitor died between carrying it out and
    /// replying.
    fn is_repeatable(&self) -> bool {
        match self {
            Self::Stop { .. }
            | Self::Kill
            | Self::Status
            | Self::PageMap { .. }
            | Self::Region { .. }
            | Self::RegionLenders { .. }
            | Self::Move { .. }
            | Self::Place { .. }
            | Self::Balloon { .. }
            | Self::Pause
            | Self::Resume
            | Self::PauseVcpu { .. }
            | Self::ResumeVcpu { .. }
            | Self::Update(_)
            | Self::AwaitRunning { .. }
            | Self::AwaitEnd { .. } => true,
            Self::Freeze | Self::Reset | Self::Nmi => false,
        }
    }
}

/// Sends `request` to the VM with the directory `folder`. Without a `limit` it waits until the response
/// comes. If the monitor dies meanwhile and the VM does not, the request is repeated at the monitor's
/// successor.
///
/// # Errors
/// If no monitor serves the socket, the limit passes, or the monitor dies and the request can't be repeated.
/// A directory that is gone, or that no monitor serves any more, is no error: the VM has ended.
pub fn ask(folder: &Path, request: &Request, limit: Option<Duration>) -> io::Result<Answer> {
    let ended = Answer::Ended {
        killed: matches!(request, Request::Kill),
    };
    let begun = Instant::now();
    let left = || {
        limit.map(|limit| {
            limit
                .saturating_sub(begun.elapsed())
                .max(Duration::from_millis(1))
        })
    };
    let mut was_served = false;
    loop {
        let socket = match connect(folder, left().unwrap_or(START_LIMIT).min(START_LIMIT)) {
            Ok(socket) => socket,
            Err(_) if !folder.exists() => return Ok(ended),
            // The monitor has died, and with its keeper the listening socket.
            Err(error) if was_served && error.kind() == io::ErrorKind::ConnectionRefused => return Ok(ended),
            Err(error) => return Err(error),
        };
        socket.set_read_timeout(left())?;
        if let Some(answer) = ask_once(&socket, request)? {
            return Ok(answer);
        }
        was_served = true;
        // A monitor ends with its last VM, possibly before it has sent its response.
        if !folder.exists() {
            return Ok(ended);
        }
        if !request.is_repeatable() {
            return Err(io::Error::other(
                "the VM's monitor died before it answered; its successor can be asked again",
            ));
        }
        if limit.is_some_and(|limit| begun.elapsed() >= limit) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(START_POLL_INTERVAL);
    }
}

/// Returns the response; none if the connection ends without one.
fn ask_once(mut socket: &UnixStream, request: &Request) -> io::Result<Option<Answer>> {
    let line = OF_CLIENT.write(request)?;
    let mut answer = String::new();
    let is_end = |error: &io::Error| {
        matches!(
            error.kind(),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
        )
    };
    match socket.write_all(&line) {
        Err(error) if is_end(&error) => return Ok(None),
        sent => sent?,
    }
    match BufReader::new(socket.take(LINE_BYTES_MAX)).read_line(&mut answer) {
        Err(error) if is_end(&error) => return Ok(None),
        read => read.map(drop)?,
    }
    if answer.is_empty() {
        return Ok(None);
    }
    OF_CLIENT.read(&answer).map(Some).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_request_to_a_vm_that_is_being_started_waits_for_its_control_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let monitor = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            let (client, _) = UnixListener::bind(path).unwrap().accept().unwrap();
            let mut line = String::new();
            BufReader::new(&client).read_line(&mut line).unwrap();
            (&client)
                .write_all(b"{\"answer\":\"ended\",\"killed\":false}\n")
                .unwrap();
            line
        });
        let answer = ask(folder.path(), &Request::Stop { limit_s: 5 }, None).unwrap();
        assert!(matches!(answer, Answer::Ended { killed: false }), "{answer:?}");
        assert!(monitor.join().unwrap().contains("\"stop\""));
    }

    #[test]
    fn a_vm_that_is_gone_has_ended_and_one_that_never_starts_fails_in_time() {
        let folder = tempfile::tempdir().unwrap();
        let begin = Instant::now();
        let limit = Some(Duration::from_millis(100));
        ask(folder.path(), &Request::Status, limit).unwrap_err();
        let gone = folder.path().join("gone");
        let answer = ask(&gone, &Request::Kill, None).unwrap();
        assert!(matches!(answer, Answer::Ended { killed: true }), "{answer:?}");
        assert!(begin.elapsed() < Duration::from_secs(5));
    }

    /// A monitor that dies may have carried the request out.
    #[test]
    fn request_to_a_monitor_that_dies_is_repeated_only_if_that_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("control.sock")).unwrap();
        let successor = std::thread::spawn(move || {
            let mut requests = Vec::new();
            for answers in [false, true, false] {
                let (client, _) = listener.accept().unwrap();
                let mut line = String::new();
                BufReader::new(&client).read_line(&mut line).unwrap();
                if answers {
                    (&client).write_all(b"{\"answer\":\"done\"}\n").unwrap();
                }
                requests.push(line);
            }
            requests
        });
        let limit = Some(Duration::from_secs(20));
        let answer = ask(folder.path(), &Request::Pause, limit).unwrap();
        assert!(matches!(answer, Answer::Done), "{answer:?}");
        let refused = ask(folder.path(), &Request::Reset, limit)
            .unwrap_err()
            .to_string();
        assert!(refused.contains("died before it answered"), "{refused}");
        let requests = successor.join().unwrap();
        assert_eq!(requests[0], requests[1], "the same request");
        assert!(requests[2].contains("\"reset\""), "{}", requests[2]);
    }
}
