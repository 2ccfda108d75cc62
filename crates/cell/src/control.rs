//! A VM's control socket: one request, one answer, a line of JSON each.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use config::Size;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::handle::Handle;

/// Bytes of a line at most.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// How long a client may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a VM may take from its entry in the registry to its control socket: it opens its files meanwhile, and may wait for
/// the lock of one.
const START_LIMIT: Duration = Duration::from_secs(30);
/// How often a client looks whether a VM that is being started has its control socket.
const START_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// What a client asks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum Request {
    /// Press the power button; after the limit, kill. Answered when the VM has ended.
    Stop {
        /// Seconds the guest may take.
        limit_s: u64,
    },
    /// End at once. Answered when the VM has ended.
    Kill,
    /// What the shard counted.
    Status,
    /// Freeze the VM and go on. Answered by a [`crate::frozen::FreezeAnswer`] with files.
    Freeze,
    /// Move a vCPU of a VM that spans cells.
    Move {
        /// Which.
        vcpu: u8,
        /// To which cell.
        cell: u16,
    },
    /// Set the balloon.
    Balloon {
        /// Bytes that the guest is to give back.
        bytes: u64,
    },
}

/// The answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum Answer {
    /// Done.
    Done,
    /// The VM has ended; whether by itself, or by force after the limit.
    Ended {
        /// It had to be killed.
        killed: bool,
    },
    /// What the shard counted.
    Status {
        /// As the shard gave it.
        status: Value,
    },
    /// The vCPU runs where it is to run.
    Moved {
        /// How long it stood still, nanoseconds.
        still_ns: u64,
    },
    /// It can't be done.
    Refused {
        /// Why.
        why: String,
    },
}

/// Serves requests for `vm` until the process ends. `balloon_max` is what the VM's balloon can take, if it has one.
pub fn serve(listener: UnixListener, vm: Handle, balloon_max: Option<Size>) -> io::Result<()> {
    std::thread::Builder::new()
        .name("control".into())
        .spawn(move || {
            for client in listener.incoming().flatten() {
                let vm = vm.clone();
                // A host without threads to spare loses this client, not the VM.
                let _ = std::thread::Builder::new().name("request".into()).spawn(move || {
                    // A client that is gone needs no answer.
                    let _ = one(client, &vm, balloon_max);
                });
            }
        })?;
    Ok(())
}

fn one(mut client: UnixStream, vm: &Handle, balloon_max: Option<Size>) -> io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    // A client that does not read its answer must not hold up the VM.
    client.set_write_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new((&client).take(LINE_BYTES_MAX)).read_line(&mut line)?;
    let _asking = vm.asking();
    let answer = match serde_json::from_str(&line) {
        Ok(Request::Freeze) => match vm.freeze(&mut client) {
            Ok(()) => return Ok(()),
            Err(error) => refused(error),
        },
        Ok(request) => obey(vm, &request, balloon_max),
        Err(error) => Answer::Refused {
            why: format!("not a request: {error}"),
        },
    };
    let mut text = serde_json::to_string(&answer)?;
    text.push('\n');
    (&client).write_all(text.as_bytes())
}

fn obey(vm: &Handle, request: &Request, balloon_max: Option<Size>) -> Answer {
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
        // Served before.
        Request::Freeze => Err(io::ErrorKind::InvalidInput.into()),
        Request::Status => {
            return vm
                .status()
                .map_or_else(refused, |status| Answer::Status { status });
        }
        Request::Move { vcpu, cell } => {
            return vm
                .move_vcpu(*vcpu, *cell)
                .map_or_else(refused, |still_ns| Answer::Moved { still_ns });
        }
        Request::Balloon { bytes } => match balloon_max {
            None => Err(io::Error::other(
                "the VM has no balloon; start it with `balloon = true`, and not on huge pages of the host's pool",
            )),
            Some(max) if *bytes > max.0 => Err(io::Error::other(format!(
                "the VM has {max} in all; ask for that or less"
            ))),
            Some(_) => vm.order(&shard_api::launch::Order::Balloon { bytes: *bytes }),
        },
    };
    done.map_or_else(refused, |()| Answer::Done)
}

fn refused(error: io::Error) -> Answer {
    Answer::Refused {
        why: error.to_string(),
    }
}

/// Connects to the VM's control socket. One that is being started is waited for.
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

/// Asks the VM whose directory is `folder`. Waits for the answer for as long as it takes, unless `limit` says otherwise.
pub fn ask(folder: &Path, request: &Request, limit: Option<Duration>) -> io::Result<Answer> {
    let ended = Answer::Ended {
        killed: matches!(request, Request::Kill),
    };
    let socket = match connect(folder, limit.unwrap_or(START_LIMIT).min(START_LIMIT)) {
        Ok(socket) => socket,
        Err(_) if !folder.exists() => return Ok(ended),
        Err(error) => return Err(error),
    };
    socket.set_read_timeout(limit)?;
    let mut line = serde_json::to_string(request)?;
    line.push('\n');
    (&socket).write_all(line.as_bytes())?;
    let mut answer = String::new();
    BufReader::new((&socket).take(LINE_BYTES_MAX)).read_line(&mut answer)?;
    if answer.is_empty() {
        // The monitor ends with its last VM, and may be quicker than its answer.
        return Ok(ended);
    }
    Ok(serde_json::from_str(&answer)?)
}

#[cfg(test)]
mod tests {
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
}
