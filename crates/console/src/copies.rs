//! Clones, snapshots and restores, carried out by the program that starts VMs.
//!
//! They read guest memory and snapshots of untrusted authors, which this process never does. The command
//! continues when this process ends.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::{Path as FilePath, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::{Extension, Json};
use nix::sys::memfd::{MFdFlags, memfd_create};
use registry::vms;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::{Context, Result, folder};
use crate::caller::Caller;
use crate::problem::Problem;
use crate::request_body::body;
use crate::slots::run_in_slot;
use crate::views::Vm;

/// Time limit for copies to run.
const START_LIMIT: Duration = Duration::from_secs(300);
/// Time limit for a snapshot to be written.
const WRITE_LIMIT: Duration = Duration::from_secs(1800);
/// Poll interval for the end of a command.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum bytes that are read of a command's output.
const OUTPUT_BYTES_MAX: u64 = 256 << 10;
/// Exit status of a command with wrong arguments.
const USAGE: i32 = 2;
/// Environment variable that keeps a command on this host.
const STAY: (&str, &str) = ("MIRRORBALL_FORWARDED", "1");

/// Copies to make of a VM.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CloneOrder {
    /// Number of copies, 1 to 1000.
    pub count: u16,
    /// Their names; `{}` stands for a number. The VM's name, `-` and a number when absent.
    pub name: Option<String>,
    /// Leave the guests who they are: host name, hardware addresses, random numbers and time stay the
    /// parent's.
    pub as_is: bool,
}

impl Default for CloneOrder {
    fn default() -> Self {
        Self {
            count: 1,
            name: None,
            as_is: false,
        }
    }
}

/// VMs that resumed from another VM's state.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Copies {
    /// The copies that run.
    pub vms: Vec<Vm>,
    /// Messages of the command, one per line.
    pub notes: Vec<String>,
}

/// Makes running copies of a running VM. Responds when they run.
#[utoipa::path(post, path = "/v1/vms/{name}/clone", params(("name" = String, Path)),
    request_body = CloneOrder, responses(
    (status = 201, body = Copies), (status = 400, body = Problem), (status = 403, body = Problem),
    (status = 404, body = Problem), (status = 422, body = Problem, description = "It can't be cloned."),
    (status = 429, body = Problem)))]
pub(crate) async fn clone(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    request: Request<Body>,
) -> Result<(StatusCode, Json<Copies>)> {
    let wanted: CloneOrder = body(request).await?;
    caller.must_own("a clone, which takes memory of the host and keeps what its parent has,")?;
    let slot = context.slots.take(caller)?;
    run_in_slot(slot, move |_| {
        folder(&name)?;
        let mut words = vec![OsString::from("clone")];
        words.extend(counted(wanted.count, wanted.name.as_deref()));
        words.extend(wanted.as_is.then(|| "--as-is".into()));
        words.extend(["--".into(), name.into()]);
        copies(run(&context, &words, START_LIMIT)?)
    })
    .await
}

/// Location for a new snapshot.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotOrder {
    /// The absolute path of a directory on the host that does not exist yet.
    #[schema(value_type = String)]
    pub directory: PathBuf,
}

/// Outcome of an operation.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Reported {
    /// Messages of the command, one per line.
    pub notes: Vec<String>,
}

/// Writes a running VM into a new directory of the host. The VM continues; responds when all is written.
#[utoipa::path(post, path = "/v1/vms/{name}/snapshot", params(("name" = String, Path)),
    request_body = SnapshotOrder, responses(
    (status = 201, body = Reported), (status = 400, body = Problem), (status = 403, body = Problem),
    (status = 404, body = Problem),
    (status = 422, body = Problem, description = "No snapshot can be made of it, or not there."),
    (status = 429, body = Problem)))]
pub(crate) async fn snapshot(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    request: Request<Body>,
) -> Result<(StatusCode, Json<Reported>)> {
    let wanted: SnapshotOrder = body(request).await?;
    caller.must_own("a snapshot, which is written where the owner may write,")?;
    absolute(&wanted.directory)?;
    let slot = context.slots.take(caller)?;
    run_in_slot(slot, move |_| {
        folder(&name)?;
        let words = [
            "snapshot".into(),
            "--".into(),
            name.into(),
            wanted.directory.into(),
        ];
        let notes = run(&context, &words, WRITE_LIMIT)?.notes();
        Ok((StatusCode::CREATED, Json(Reported { notes })))
    })
    .await
}

/// VMs to start from a snapshot. The keys have the meaning of `mirrorball restore`'s flags.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreOrder {
    /// The absolute path of the snapshot on the host.
    #[schema(value_type = String)]
    pub directory: PathBuf,
    /// Number of VMs, 1 to 1000; 1 when absent.
    pub count: Option<u16>,
    /// Their names; `{}` stands for a number. The name of the snapshot's VM when absent.
    pub name: Option<String>,
    /// Disks by number, each with the absolute path of its file.
    #[serde(default)]
    #[schema(value_type = BTreeMap<String, String>)]
    pub disks: BTreeMap<usize, PathBuf>,
    /// File of the kernel.
    #[schema(value_type = Option<String>)]
    pub kernel: Option<PathBuf>,
    /// File of the initramfs.
    #[schema(value_type = Option<String>)]
    pub initrd: Option<PathBuf>,
    /// Weakest accepted sandbox: `auto`, `require` or `off`; `auto` when absent.
    pub sandbox: Option<String>,
    /// Weight among VMs that share CPUs, 1 to 10000.
    pub cpu_weight: Option<u16>,
    /// Maximum host CPUs.
    pub cpu_limit: Option<f64>,
    /// Maximum host memory, as `2G`.
    pub memory_limit: Option<String>,
    /// Maximum I/O on the host's devices, as `reads=500,write_bytes=10M`.
    pub io_limit: Option<String>,
    /// Maximum size of each disk's temporary overlay, as `4G`.
    pub scratch_limit: Option<String>,
    /// Whether nothing else runs on a core of the host while the VM does.
    #[serde(default)]
    pub core_scheduling: bool,
    /// The share group of the snapshot's VM.
    pub share_group: Option<String>,
    /// Network of its cards of a subnet.
    pub network: Option<String>,
    /// The cell of this host to run in.
    pub cell: Option<u16>,
    /// Leave the guests who they are, and give them the TAP devices, ports and nodes of the host that the
    /// snapshot asks for.
    #[serde(default)]
    pub as_is: bool,
}

impl RestoreOrder {
    /// Returns the arguments of the command.
    fn words(self) -> Result<Vec<OsString>> {
        absolute(&self.directory)?;
        let mut words = vec![OsString::from("restore"), "--lab=never".into()];
        words.extend(counted(self.count.unwrap_or(1), self.name.as_deref()));
        for (number, path) in &self.disks {
            absolute(path)?;
            let mut word = OsString::from(format!("--disk={number}="));
            word.push(path);
            words.push(word);
        }
        for (flag, path) in [("--kernel=", &self.kernel), ("--initrd=", &self.initrd)] {
            if let Some(path) = path {
                absolute(path)?;
                let mut word = OsString::from(flag);
                word.push(path);
                words.push(word);
            }
        }
        for (flag, value) in [
            ("sandbox", self.sandbox),
            ("cpu-weight", self.cpu_weight.map(|value| value.to_string())),
            ("cpu-limit", self.cpu_limit.map(|value| value.to_string())),
            ("memory-limit", self.memory_limit),
            ("io-limit", self.io_limit),
            ("scratch-limit", self.scratch_limit),
            ("share-group", self.share_group),
            ("network", self.network),
            ("cell", self.cell.map(|value| value.to_string())),
        ] {
            words.extend(value.map(|value| format!("--{flag}={value}").into()));
        }
        words.extend(self.core_scheduling.then(|| "--core-scheduling".into()));
        words.extend(self.as_is.then(|| "--as-is".into()));
        words.extend(["--".into(), self.directory.into()]);
        Ok(words)
    }
}

/// Starts VMs from a snapshot. Responds when they run.
#[utoipa::path(post, path = "/v1/snapshots/restore", request_body = RestoreOrder, responses(
    (status = 201, body = Copies), (status = 400, body = Problem), (status = 403, body = Problem),
    (status = 422, body = Problem,
        description = "It is no snapshot, or wants what the request does not allow."),
    (status = 429, body = Problem)))]
pub(crate) async fn restore(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<(StatusCode, Json<Copies>)> {
    let wanted: RestoreOrder = body(request).await?;
    caller.must_own("a snapshot, whose files are found by the owner's rights,")?;
    let words = wanted.words()?;
    let slot = context.slots.take(caller)?;
    run_in_slot(slot, move |_| copies(run(&context, &words, START_LIMIT)?)).await
}

/// Returns the flags for several copies. A value follows `=`, so that it is never taken for a flag.
fn counted(count: u16, name: Option<&str>) -> Vec<OsString> {
    let mut words = vec![OsString::from(format!("--count={count}"))];
    words.extend(name.map(|name| format!("--name={name}").into()));
    words
}

fn absolute(path: &FilePath) -> Result<()> {
    if path.is_absolute() {
        return Ok(());
    }
    Err(Problem::bad_request(format!(
        "{}: write an absolute path",
        path.display()
    )))
}

/// Returns the VMs whose names a command has printed.
fn copies(said: Output) -> Result<(StatusCode, Json<Copies>)> {
    let records = said.out.lines().map(|name| {
        let record = vms::read(&folder(name)?).map_err(Problem::internal)?;
        Ok(Vm::from(&record))
    });
    // A VM that has ended since is left out.
    let vms = records.filter_map(Result::ok).collect();
    let notes = said.notes();
    Ok((StatusCode::CREATED, Json(Copies { vms, notes })))
}

/// Output of a command.
pub(crate) struct Output {
    out: String,
    errors: String,
}

impl Output {
    /// Returns the lines of standard output.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.out.lines().map(str::to_owned).collect()
    }

    /// Returns the lines about the command, without the program's name.
    fn notes(&self) -> Vec<String> {
        let lines = self.errors.lines();
        lines
            .map(|line| line.strip_prefix("mirrorball: ").unwrap_or(line).to_owned())
            .collect()
    }
}

/// Runs the program with these arguments, for at most `limit`. It continues if this process ends.
pub(crate) fn run(context: &Context, words: &[OsString], limit: Duration) -> Result<Output> {
    let file = |name| memfd_create(name, MFdFlags::MFD_CLOEXEC).map(File::from);
    let (out, errors) = (
        file(c"output").map_err(Problem::internal)?,
        file(c"errors").map_err(Problem::internal)?,
    );
    let own = |file: &File| file.try_clone().map_err(Problem::internal);
    let mut child = Command::new(context.program.as_path())
        .args(words)
        .env(STAY.0, STAY.1)
        .stdin(Stdio::null())
        .stdout(own(&out)?)
        .stderr(own(&errors)?)
        .process_group(0)
        .spawn()
        .map_err(Problem::internal)?;
    let status = wait(&mut child, limit).map_err(Problem::internal)?;
    let said = Output {
        out: text(out)?,
        errors: text(errors)?,
    };
    match status {
        Some(status) if status.success() => Ok(said),
        Some(status) => {
            let kind = if status.code() == Some(USAGE) {
                StatusCode::BAD_REQUEST
            } else {
                StatusCode::UNPROCESSABLE_ENTITY
            };
            let notes = said.notes();
            let why = notes.last().cloned();
            Err(Problem::new(kind, why.unwrap_or_else(|| status.to_string())))
        }
        None => Err(Problem::new(
            StatusCode::GATEWAY_TIMEOUT,
            format!("not done within {} s; it was ended", limit.as_secs()),
        )),
    }
}

/// Waits for the end of a process. Kills a process that has not ended within the limit.
fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begun.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn text(mut file: File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()
        .and_then(|()| file.take(OUTPUT_BYTES_MAX).read_to_end(&mut bytes))
        .map_err(Problem::internal)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_restore_are_never_flags_of_the_command() {
        let restore: RestoreOrder = serde_json::from_value(serde_json::json!({
            "directory": "/srv/--as-is", "name": "--as-is", "disks": {"0": "/d --as-is"},
            "sandbox": "--as-is", "cpu_limit": 1.5,
            "network": "--as-is", "cell": 1, "count": 2,
        }))
        .unwrap();
        let words = restore.words().unwrap();
        assert_eq!(
            words,
            [
                "restore",
                "--lab=never",
                "--count=2",
                "--name=--as-is",
                "--disk=0=/d --as-is",
                "--sandbox=--as-is",
                "--cpu-limit=1.5",
                "--network=--as-is",
                "--cell=1",
                "--",
                "/srv/--as-is"
            ]
        );
        for wrong in [
            serde_json::json!({"directory": "snap"}),
            serde_json::json!({"directory": "/snap", "kernel": "vmlinuz"}),
            serde_json::json!({"directory": "/snap", "disks": {"1": "disk"}}),
        ] {
            let restore: RestoreOrder = serde_json::from_value(wrong).unwrap();
            assert!(restore.words().unwrap_err().detail.contains("absolute path"));
        }
    }

    #[test]
    fn command_that_takes_too_long_is_ended() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let begun = Instant::now();
        assert_eq!(wait(&mut child, Duration::from_millis(50)).unwrap(), None);
        assert!(begun.elapsed() < Duration::from_secs(10));
        let mut child = Command::new("true").spawn().unwrap();
        let status = wait(&mut child, Duration::from_secs(10)).unwrap();
        assert!(status.is_some_and(|status| status.success()));
    }
}
