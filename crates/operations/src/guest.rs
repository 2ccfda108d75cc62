//! Connections to the agent of a running VM.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use agent::client::{ClientError, connect_vsock_while};
use registry::vms::Record;

use crate::failure::{Failure, Kind, chain};

/// Time limit for a reply of the agent in a guest that has booted.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// Time limit where pages come from other shards: a reply needs hundreds of them.
const COHERENT_ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Time limits of the wait for an agent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct AgentTimeouts {
    /// Wait without a report to the user.
    silent: Duration,
    /// Further wait if the guest may still be booting.
    booting: Duration,
}

impl AgentTimeouts {
    /// Returns the limits for a VM whose guest began its boot `age` ago and may take `limit` for it.
    fn of(is_coherent: bool, age: Duration, limit: Duration) -> Self {
        let silent = if is_coherent {
            COHERENT_ANSWER_LIMIT
        } else {
            ANSWER_LIMIT
        };
        let booting = limit.saturating_sub(age).saturating_sub(silent);
        Self { silent, booting }
    }

    fn of_vm(record: &Record) -> Self {
        let limit = Duration::from_secs(record.boot.limit_s);
        Self::of(record.spec.is_coherent(), age(record), limit)
    }
}

/// Time since the guest began its last boot.
fn age(record: &Record) -> Duration {
    let begun_s = record.boot.begun_unix_s.unwrap_or(record.started_unix_s);
    let begun = UNIX_EPOCH.checked_add(Duration::from_secs(begun_s));
    begun.and_then(|begun| begun.elapsed().ok()).unwrap_or_default()
}

/// Time that the guest has left to boot. A reboot starts the time again.
fn left_to_boot(record: &Record) -> Duration {
    Duration::from_secs(record.boot.limit_s).saturating_sub(age(record))
}

/// Parameters of a wait for an agent.
pub struct AgentWait<'a> {
    /// Time limit that replaces those derived from the guest's boot.
    pub limit: Option<Duration>,
    /// Receives the remaining seconds when the agent has not replied and the guest may still boot.
    pub on_booting: &'a dyn Fn(u64),
    /// Whether the caller still waits.
    pub goes_on: &'a dyn Fn() -> bool,
}

/// Connects to the agent of the VM `name`, whose directory is `folder`. Waits for a guest that still boots.
///
/// # Errors
/// If the VM is paused or ends, no agent replies in time, or the caller stops waiting.
pub fn connect_booting(name: &str, folder: &Path, waiting: &AgentWait<'_>) -> Result<UnixStream, Failure> {
    if registry::vms::read(folder).is_ok_and(|record| record.paused) {
        let paused = Failure::new(Kind::Refused, format!("{name}: the VM is paused"));
        return Err(paused.help("`mirrorball resume` lets it go on"));
    }
    let vsock = folder.join("vsock.sock");
    let runs = || folder.exists();
    let connect = |limit, goes_on: &dyn Fn() -> bool| {
        connect_vsock_while(&vsock, agent::VSOCK_PORT, limit, || {
            goes_on() && (waiting.goes_on)()
        })
    };
    if let Some(limit) = waiting.limit {
        return connect(limit, &|| true).map_err(|error| explain(name, error));
    }
    // A VM without a record is ending and does not boot again.
    let silent =
        registry::vms::read(folder).map_or(ANSWER_LIMIT, |record| AgentTimeouts::of_vm(&record).silent);
    let mut answer = connect(silent, &runs);
    // Reads the record again: the guest may have rebooted meanwhile.
    while let (Err(ClientError::NoAgent), Ok(record)) = (&answer, registry::vms::read(folder)) {
        let left = left_to_boot(&record);
        if left.as_secs() == 0 || !(waiting.goes_on)() {
            break;
        }
        (waiting.on_booting)(left.as_secs());
        answer = connect(left, &runs);
    }
    match answer {
        Err(ClientError::NoAgent) if !runs() => Err(Failure::new(
            Kind::Refused,
            format!("{name}: the VM ended before an agent answered in its guest"),
        )),
        answer => answer.map_err(|error| explain(name, error)),
    }
}

/// Whether the VM in the directory `folder` has a monitor, or a keeper that starts the next one. If both were
/// killed, the directory stays.
fn has_monitor(folder: &Path) -> bool {
    let runs = |pid: &dyn std::fmt::Display| Path::new("/proc").join(pid.to_string()).exists();
    let record = registry::vms::read(folder);
    record.is_ok_and(|record| runs(&record.monitor_pid) || record.keeper_pid.is_some_and(|pid| runs(&pid)))
}

/// Waits until the agent of the VM in the directory `folder` replies, for at most `limit`. Returns false when
/// the VM has ended, and none after the limit or when the caller stops waiting.
pub fn await_agent(folder: &Path, limit: Duration, goes_on: &dyn Fn() -> bool) -> Option<bool> {
    let vsock = folder.join("vsock.sock");
    let runs = || has_monitor(folder);
    match connect_vsock_while(&vsock, agent::VSOCK_PORT, limit, || runs() && goes_on()) {
        Ok(_) => Some(true),
        Err(_) if !runs() => Some(false),
        Err(_) => None,
    }
}

/// Converts an error of the agent's client to a failure.
pub fn explain(name: &str, error: ClientError) -> Failure {
    match error {
        ClientError::NoAgent => Failure::new(Kind::Late, format!("{name}: no agent answers in the guest"))
            .help(
                "images built by `mirrorball image build` have the agent; in others install mirrorball-agent \
             and start it as root",
            ),
        other => Failure::new(Kind::Refused, format!("{name}: {}", chain(&other))),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::time::{Instant, SystemTime};

    use registry::vms::BOOT_LIMIT_S;

    use super::*;

    const UNTIL_BOOTED: AgentWait<'static> = AgentWait {
        limit: None,
        on_booting: &|_| {},
        goes_on: &|| true,
    };

    /// Returns a registry record of a VM that started `age` seconds ago.
    fn record(age_s: u64, limit_s: u64, rebooted_s: Option<u64>) -> Record {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let boot = serde_json::json!({ "limit_s": limit_s, "begun_unix_s": rebooted_s.map(|ago| now - ago) });
        serde_json::from_value(serde_json::json!({
            "name": "a", "state": "running", "monitor_pid": 1, "shard_pid": 2,
            "started_unix_s": now - age_s, "boots": 1,
            "cid": 3, "sandbox_missing": [], "boot": boot, "spec": { "image": "tiny" },
        }))
        .unwrap()
    }

    #[test]
    fn an_agent_has_the_time_of_a_boot_from_the_start_of_its_vm() {
        let seconds = |is_coherent, age_s| {
            let AgentTimeouts { silent, booting } = AgentTimeouts::of(
                is_coherent,
                Duration::from_secs(age_s),
                Duration::from_secs(BOOT_LIMIT_S),
            );
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

    #[test]
    fn a_guest_has_its_users_limit_for_each_of_its_boots() {
        let left = |record: &Record| left_to_boot(record).as_secs();
        // Seconds may pass while the test runs.
        assert!((190..=200).contains(&left(&record(100, 300, None))));
        assert_eq!(left(&record(301, 300, None)), 0);
        assert_eq!(left(&record(5, 1, None)), 0);
        assert!((290..=299).contains(&left(&record(1000, 300, Some(1)))));
        let record = record(100, 300, None);
        assert!(AgentTimeouts::of_vm(&record).booting > Duration::from_secs(100));
    }

    #[test]
    fn a_vm_of_an_earlier_version_has_the_usual_limit() {
        let mut value = serde_json::to_value(record(10, 300, None)).unwrap();
        value.as_object_mut().unwrap().remove("boot");
        let record: Record = serde_json::from_value(value).unwrap();
        assert!((100..=110).contains(&left_to_boot(&record).as_secs()));
    }

    #[test]
    fn an_agent_that_answers_late_in_the_boot_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let registered = serde_json::to_vec(&record(0, 60, None)).unwrap();
        std::fs::write(folder.path().join("vm.json"), registered).unwrap();
        let path = folder.path().join("vsock.sock");
        let agent = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            let listener = UnixListener::bind(path).unwrap();
            let (mut client, _) = listener.accept().unwrap();
            // Closing a socket with unread data resets the other end.
            let mut line = String::new();
            BufReader::new(&client).read_line(&mut line).unwrap();
            std::io::Write::write_all(&mut client, b"OK 1024\n").unwrap();
        });
        assert!(connect_booting("a", folder.path(), &UNTIL_BOOTED).is_ok());
        agent.join().unwrap();
    }

    #[test]
    fn a_vm_that_ends_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let registered = serde_json::to_vec(&record(0, 60, None)).unwrap();
        std::fs::write(folder.path().join("vm.json"), registered).unwrap();
        let path = folder.path().to_owned();
        let ending = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            std::fs::remove_dir_all(path).unwrap();
        });
        let begin = Instant::now();
        let error = connect_booting("a", folder.path(), &UNTIL_BOOTED)
            .unwrap_err()
            .to_string();
        ending.join().unwrap();
        assert!(
            error.contains("ended") && begin.elapsed() < Duration::from_secs(10),
            "{error}"
        );
    }

    #[test]
    fn wait_for_an_agent_ends_when_the_caller_stops_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let registered = serde_json::to_vec(&record(0, 60, None)).unwrap();
        std::fs::write(folder.path().join("vm.json"), registered).unwrap();
        let begin = Instant::now();
        let waiting = AgentWait {
            goes_on: &|| begin.elapsed() < Duration::from_millis(200),
            ..UNTIL_BOOTED
        };
        let error = connect_booting("a", folder.path(), &waiting).unwrap_err();
        assert!(
            error.kind == Kind::Late && begin.elapsed() < Duration::from_secs(10),
            "{error:?}"
        );
    }
}
