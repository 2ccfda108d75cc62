//! Talking to the agent of a running VM.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use agent::client::{ClientError, window_size};
use agent::protocol::ExecRequest;
use miette::{Report, miette};

/// How long the agent of a running guest, whose directory is `folder`, may take to answer. Where pages come from other shards an answer
/// needs hundreds of them.
pub fn answer_limit(folder: &Path) -> Duration {
    let is_slow = cell::registry::read(folder).is_ok_and(|record| record.spec.is_coherent());
    Duration::from_secs(if is_slow { 60 } else { 20 })
}

/// Connects to the agent of the VM `name` whose directory is `folder`, waiting for it until `limit`.
pub fn connect(name: &str, folder: &Path, limit: Duration) -> Result<UnixStream, Report> {
    agent::client::connect_vsock(&folder.join("vsock.sock"), agent::VSOCK_PORT, limit)
        .map_err(|error| explain(name, error))
}

/// What a failed request means for the person.
pub fn explain(name: &str, error: ClientError) -> Report {
    match error {
        ClientError::NoAgent => miette!(
            help = "images built by `mirrorball image build` have the agent; in others install mirrorball-agent and \
                    start it as root",
            "{name}: no agent answers in the guest"
        ),
        other => miette!("{name}: {}", chain(&other)),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}

/// The request to run `argv`, with a terminal when this process has one on both sides.
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
