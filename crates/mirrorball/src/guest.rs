//! Talking to the agent of a running VM.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use agent::client::{ClientError, connect_vsock, window_size};
use agent::protocol::ExecRequest;
use miette::{Report, miette};

/// How long the agent of a guest that has booted may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// The same where pages come from other shards: an answer needs hundreds of them.
const COHERENT_ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// How long after the start of a VM its agent may answer for the first time: the time that a guest may take to boot on a busy
/// host.
const BOOT_LIMIT: Duration = Duration::from_secs(120);

/// How long to wait for an agent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Patience {
    /// Without a word to the user.
    silent: Duration,
    /// Then, if the guest may still be booting.
    booting: Duration,
}

impl Patience {
    /// That for a VM which started `age` ago.
    fn of(is_coherent: bool, age: Duration) -> Self {
        let silent = if is_coherent {
            COHERENT_ANSWER_LIMIT
        } else {
            ANSWER_LIMIT
        };
        let booting = BOOT_LIMIT.saturating_sub(age).saturating_sub(silent);
        Self { silent, booting }
    }
}

/// Connects to the agent of the VM `name`, whose directory is `folder`. It waits for `wait`, or else for a guest that still
/// boots, and says so.
pub fn connect_booting(name: &str, folder: &Path, wait: Option<Duration>) -> Result<UnixStream, Report> {
    if let Some(wait) = wait {
        return connect(name, folder, wait);
    }
    let patience = match cell::registry::read(folder) {
        Ok(record) => {
            let started = UNIX_EPOCH + Duration::from_secs(record.started_unix_s);
            let age = started.elapsed().unwrap_or_default();
            Patience::of(record.spec.is_coherent(), age)
        }
        // The VM is ending: it boots no more.
        Err(_) => Patience::of(false, BOOT_LIMIT),
    };
    let vsock = folder.join("vsock.sock");
    match connect_vsock(&vsock, agent::VSOCK_PORT, patience.silent) {
        Err(ClientError::NoAgent) if !patience.booting.is_zero() && folder.exists() => {
            let seconds = patience.booting.as_secs();
            eprintln!(
                "mirrorball: {name}: no agent answers yet; waiting {seconds} s more for the guest to boot"
            );
            connect_vsock(&vsock, agent::VSOCK_PORT, patience.booting)
        }
        other => other,
    }
    .map_err(|error| explain(name, error))
}

/// Connects to the agent of the VM `name` whose directory is `folder`, waiting for it until `limit`.
pub fn connect(name: &str, folder: &Path, limit: Duration) -> Result<UnixStream, Report> {
    connect_vsock(&folder.join("vsock.sock"), agent::VSOCK_PORT, limit).map_err(|error| explain(name, error))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_has_the_time_of_a_boot_from_the_start_of_its_vm() {
        let seconds = |is_coherent, age_s| {
            let Patience { silent, booting } = Patience::of(is_coherent, Duration::from_secs(age_s));
            (silent.as_secs(), booting.as_secs())
        };
        assert_eq!(seconds(false, 0), (20, 100));
        assert_eq!(seconds(false, 70), (20, 30));
        assert_eq!(seconds(true, 50), (60, 10));
        for (is_coherent, silent) in [(false, 20), (true, 60)] {
            for age_s in [100, 120, u64::MAX] {
                assert_eq!(seconds(is_coherent, age_s), (silent, 0));
            }
        }
    }
}
