//! Connects commands to the agent of a running VM.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use agent::client::{ClientError, connect_vsock, window_size};
use agent::protocol::ExecRequest;
use miette::Report;
use operations::guest::{AgentWait, connect_booting as connect_waiting};

use crate::failed;

/// Connects to the agent of the VM `name`, whose directory is `folder`. Waits for `wait`, or else for a guest
/// that still boots, with a message.
pub fn connect_booting(name: &str, folder: &Path, wait: Option<Duration>) -> Result<UnixStream, Report> {
    let waiting = AgentWait {
        limit: wait,
        on_booting: &|left_s| {
            eprintln!(
                "mirrorball: {name}: no agent answers yet; waiting {left_s} s more for the guest to boot"
            );
        },
        goes_on: &|| true,
    };
    connect_waiting(name, folder, &waiting).map_err(failed)
}

/// Waits until the agent of the VM in the directory `folder` replies, for at most `limit`; false when the VM
/// has ended.
pub fn await_agent(folder: &Path, limit: Duration) -> Option<bool> {
    operations::guest::await_agent(folder, limit, &|| true)
}

/// Connects to the agent of the VM `name` whose directory is `folder`; waits for it until `limit`.
pub fn connect(name: &str, folder: &Path, limit: Duration) -> Result<UnixStream, Report> {
    connect_vsock(&folder.join("vsock.sock"), agent::VSOCK_PORT, limit).map_err(|error| explain(name, error))
}

/// Explains a failed request to the user.
pub fn explain(name: &str, error: ClientError) -> Report {
    failed(operations::guest::explain(name, error))
}

/// Request to run `argv`, with a terminal when this process has one at both ends.
pub fn request(argv: &[String], terminal: bool) -> ExecRequest {
    use std::io::IsTerminal;
    let both = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let mut env = Vec::new();
    if let (true, Ok(kind)) = (terminal && both, std::env::var("TERM")) {
        env.push(("TERM".to_owned(), kind));
    }
    ExecRequest {
        argv: argv.to_vec(),
        env,
        cwd: None,
        tty: if terminal && both {
            window_size(std::io::stdout().as_fd())
        } else {
            None
        },
    }
}
