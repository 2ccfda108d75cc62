//! The server of a VM's control socket. [`registry::control`] has the requests, the answers and the client.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use config::Size;
use registry::control::{Answer, LINE_BYTES_MAX, Request};

use crate::handle::Handle;

/// How long a client may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(5);

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
        Request::Pause => vm.pause(),
        Request::Resume => vm.resume(),
        Request::Reset => vm.reset(),
        Request::Nmi => vm.nmi(),
        Request::Update(update) => vm.update(update),
        Request::AwaitRunning { limit_s } => {
            let limit = Duration::from_secs(*limit_s);
            return match vm.wait_running(limit) {
                Some(true) => Answer::Done,
                Some(false) => Answer::Ended { killed: false },
                None => Answer::TimedOut,
            };
        }
        Request::AwaitEnd { limit_s } => {
            return if vm.wait_over(Duration::from_secs(*limit_s)) {
                Answer::Ended { killed: false }
            } else {
                Answer::TimedOut
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
