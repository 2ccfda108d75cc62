//! The server of a VM's control socket. [`registry::control`] has the requests, the answers and the client.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use config::Size;
use nix::sys::socket::{MsgFlags, recv};
use registry::control::{Answer, LINE_BYTES_MAX, OF_CLIENT, OF_VM, Request};
use shard_api::launch::Fd;
use shard_api::message::{receive_by, send};

use crate::handle::VmHandle;
use crate::socket::Served;

/// Time limit for a client's request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between two checks of a client that waits.
const WAIT_SLICE: Duration = Duration::from_secs(1);

/// Serves requests for `vm` until the result is dropped. `balloon_max` is the VM's memory, if it has a
/// balloon.
///
/// # Errors
/// If the host has no threads or descriptors left.
pub(crate) fn serve(listener: UnixListener, vm: VmHandle, balloon_max: Option<Size>) -> io::Result<Served> {
    Served::begin(listener, ("control", "request"), move |client| {
        // A client that is gone needs no answer.
        let _ = one(client, &vm, balloon_max);
    })
}

fn one(mut client: UnixStream, vm: &VmHandle, balloon_max: Option<Size>) -> io::Result<()> {
    client.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    // A client that does not read its answer must not delay the VM.
    client.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let mut line = String::new();
    BufReader::new((&client).take(LINE_BYTES_MAX)).read_line(&mut line)?;
    let _asking = vm.asking();
    let answer = match OF_VM.read(&line) {
        Ok(Request::Freeze) => match vm.freeze(&mut client) {
            Ok(()) => return Ok(()),
            Err(error) => refused(error),
        },
        Ok(Request::Region { name }) => match vm.region(&name) {
            Some(file) => {
                let sent = send(&mut client, &OF_VM.sent(&Answer::Done), &[file.as_fd()]);
                return sent.map_err(io::Error::other);
            }
            None => refused(io::Error::other(format!("the VM has no shared region {name}"))),
        },
        Ok(request) => match obey(vm, &request, &client, balloon_max) {
            Some(answer) => answer,
            None => return Ok(()),
        },
        Err(error) => Answer::Refused {
            why: error.to_string(),
        },
    };
    (&client).write_all(&OF_VM.write(&answer)?)
}

/// Takes the file of a shared region from the VM whose directory is `folder`.
///
/// # Errors
/// If no process serves the VM, or the VM does not have the region.
pub(crate) fn take_region(folder: &Path, region: &str, limit: Duration) -> io::Result<File> {
    let deadline = Instant::now() + limit;
    let mut socket = UnixStream::connect(folder.join("control.sock"))?;
    socket.set_write_timeout(Some(limit))?;
    let name = region.to_owned();
    send(&mut socket, &OF_CLIENT.sent(&Request::Region { name }), &[]).map_err(io::Error::other)?;
    let (answer, mut files) = receive_by(&mut socket, deadline).map_err(io::Error::other)?;
    match answer {
        Answer::Done => files.take(Fd(0)).map_err(io::Error::other),
        Answer::Refused { why } => Err(io::Error::other(why)),
        other => Err(io::Error::other(format!(
            "an answer to another question: {other:?}"
        ))),
    }
}

/// Carries out the request; none when the client has gone meanwhile.
fn obey(vm: &VmHandle, request: &Request, client: &UnixStream, balloon_max: Option<Size>) -> Option<Answer> {
    Some(match request {
        Request::AwaitRunning { limit_s } => match wait(client, *limit_s, |slice| vm.wait_running(slice))? {
            Some(true) => Answer::Done,
            Some(false) => Answer::Ended { killed: false },
            None => Answer::TimedOut,
        },
        Request::AwaitEnd { limit_s } => {
            match wait(client, *limit_s, |slice| vm.wait_over(slice).then_some(()))? {
                Some(()) => Answer::Ended { killed: false },
                None => Answer::TimedOut,
            }
        }
        request => carry_out(vm, request, balloon_max),
    })
}

/// Waits until `ready`, which may block for the time that it receives; for `limit_s` seconds at most, and not
/// for a client that has gone (none).
fn wait<T>(client: &UnixStream, limit_s: u64, ready: impl Fn(Duration) -> Option<T>) -> Option<Option<T>> {
    let start = Instant::now();
    let limit = Duration::from_secs(limit_s);
    loop {
        let left = limit.saturating_sub(start.elapsed());
        if let Some(ready) = ready(left.min(WAIT_SLICE)) {
            return Some(Some(ready));
        }
        if left.is_zero() {
            return Some(None);
        }
        if has_gone(client) {
            return None;
        }
    }
}

/// Whether the client has closed its socket. It sends nothing after its request.
fn has_gone(client: &UnixStream) -> bool {
    let mut byte = [0];
    matches!(
        recv(
            client.as_raw_fd(),
            &mut byte,
            MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT
        ),
        Ok(0)
    )
}

fn carry_out(vm: &VmHandle, request: &Request, balloon_max: Option<Size>) -> Answer {
    let done = match request {
        Request::Stop { limit_s } => {
            return Answer::Ended {
                killed: vm.stop(Duration::from_secs(*limit_s)),
            };
        }
        Request::Kill => {
            vm.kill();
            return Answer::Ended { killed: true };
        }
        // The caller has served it already.
        Request::Freeze
        | Request::Region { .. }
        | Request::AwaitRunning { .. }
        | Request::AwaitEnd { .. } => Err(io::ErrorKind::InvalidInput.into()),
        Request::Status => {
            return vm
                .status()
                .map_or_else(refused, |status| Answer::Status { status });
        }
        Request::PageMap { from } => return vm.page_map(*from).map_or_else(refused, Answer::PageMap),
        Request::RegionLenders { name, borrowed } => vm.record_lenders(name, borrowed),
        Request::Move { vcpu, cell } => {
            return vm
                .move_vcpu(*vcpu, *cell)
                .map_or_else(refused, |moved| Answer::Moved {
                    still_ns: moved.still_ns,
                    dropped_pin: moved.dropped_pin,
                });
        }
        Request::Place { vcpu, cpu } => {
            return vm.place_vcpu(*vcpu, *cpu).map_or_else(refused, Answer::Placed);
        }
        Request::Balloon { bytes } => match balloon_max {
            None => Err(io::Error::other(
                "the VM has no balloon; start it with `balloon = true`, and not on huge pages of the host's \
                 pool",
            )),
            Some(max) if *bytes > max.0 => Err(io::Error::other(format!(
                "the VM has {max} in all; ask for that or less"
            ))),
            Some(_) => vm.order(&shard_api::launch::Order::Balloon { bytes: *bytes }),
        },
        Request::Pause => vm.pause(),
        Request::Resume => vm.resume(),
        Request::PauseVcpu { vcpu, for_ms } => vm.stop_vcpu(*vcpu, *for_ms),
        Request::ResumeVcpu { vcpu } => vm.continue_vcpu(*vcpu),
        Request::Reset => vm.reset(),
        Request::Nmi => vm.nmi(),
        Request::Update(update) => {
            return match vm.update(update) {
                Ok(Some(report)) => Answer::MemoryPlaced(report),
                Ok(None) => Answer::Done,
                Err(error) => refused(error),
            };
        }
    };
    done.map_or_else(refused, |()| Answer::Done)
}

fn refused(error: io::Error) -> Answer {
    Answer::Refused {
        why: error.to_string(),
    }
}
