//! The monitor's process: a cell of its own for the VMs of one `mirrorball run`.
//!
//! It outlives the command that started it only when that command says so: the command holds a *lease*, one end of a
//! socket. When the lease ends without [`LeaseOrder::Detach`] (the command was killed, its terminal went away), the VMs
//! end. When the monitor dies, its shards do.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use config::VmSpec;
use hostinfo::known;
use hostinfo::nodes::span_nodes;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::geteuid;
use registry::cluster::files::Files;
use registry::monitor::{Batch, Event, LeaseOrder, Source};
use registry::share_group::{Grouping, ShareGroup};
use registry::vms::{Record, Registry, State};
use shard_api::Platform;
use shard_api::chain::chain;
use shard_api::launch::Ending;

use crate::cluster::tenure::{self, Tenure};
use crate::frozen::FrozenVm;
use crate::handle::Handle;
use crate::shard_program::ShardProgram;
use crate::share_group::Claims;
use crate::snapshot::directory::Directory;
use crate::spanning::Span;
use crate::vm;
use crate::{control, ending, open, snapshot};

/// Lines of the console that go with an ending.
const LAST_LINES: usize = 8;
/// How long after a restore its pages are looked at: by then it has answered whoever waited for it.
const RECORD_AFTER: Duration = Duration::from_secs(5);
/// What a Linux kernel says first when it panics.
const PANIC_TEXT: &str = "Kernel panic";

/// Settings of all VMs of a batch.
#[derive(Clone, Debug)]
struct Terms {
    grouping: Grouping,
    member: Option<u32>,
    boot_limit_s: u64,
    platform: Platform,
    program: Arc<ShardProgram>,
}

impl Terms {
    fn of(batch: &Batch, platform: Platform, program: ShardProgram) -> io::Result<Self> {
        Ok(Self {
            grouping: Grouping {
                between: batch.share_between,
                uid: geteuid(),
                run: ShareGroup::of_run()?,
            },
            member: batch.member,
            boot_limit_s: batch.boot_limit_s,
            platform,
            program: Arc::new(program),
        })
    }

    /// The share group of a VM; one that goes on where another stood has that one's, with which it has its memory in common.
    fn share_group(&self, spec: &VmSpec, frozen: Option<&FrozenVm>) -> ShareGroup {
        let brought = frozen.and_then(|frozen| frozen.share_group.clone());
        brought.unwrap_or_else(|| self.grouping.of(spec))
    }
}

/// Opens the state that VMs go on from.
fn open_source(source: &Source) -> io::Result<FrozenVm> {
    match source {
        Source::Running(folder) => FrozenVm::of(folder),
        Source::Snapshot { directory, owners } => Directory::open(directory, owners)
            .and_then(|directory| snapshot::open(&directory))
            .map_err(io::Error::other),
    }
}

type Lease = Arc<Mutex<UnixStream>>;

/// Runs the batch that comes over `lease`; returns when every VM has ended. `platform` is asked for what only KVM knows; shards
/// execute the program at `program`.
pub fn run(lease: UnixStream, platform: Platform, program: &Path) -> io::Result<()> {
    let program = ShardProgram::open(program);
    raise_file_limit()?;
    let mut lines = BufReader::new(lease.try_clone()?);
    let mut line = String::new();
    lines.read_line(&mut line)?;
    let batch: Batch = serde_json::from_str(&line)?;
    let lease = Arc::new(Mutex::new(lease));
    let program = match program {
        Ok(program) => program,
        Err(error) => {
            fail_all(&lease, &batch, &error.to_string());
            return Ok(());
        }
    };
    let terms = Terms::of(&batch, platform, program)?;
    let recorder = batch.source.as_ref().and_then(Source::directory);
    let frozen = match batch.source.as_ref().map(open_source).transpose() {
        Ok(frozen) => frozen.map(Arc::new),
        Err(error) => {
            fail_all(&lease, &batch, &error.to_string());
            return Ok(());
        }
    };
    let mut handles = HashMap::new();
    let mut threads = Vec::new();
    for (name, spec) in batch.vms {
        let handle = Handle::default();
        handles.insert(name.clone(), handle.clone());
        let (lease, frozen, terms) = (lease.clone(), frozen.clone(), terms.clone());
        // The shard dies with the thread that starts it, so this one stays to the end.
        threads.push(std::thread::Builder::new().name(name.clone()).spawn(move || {
            if let Err(why) = one(&name, &spec, frozen.as_deref(), &terms, &handle, &lease) {
                tell(&lease, &Event::Failed { name, why });
            }
            handle.over();
        })?);
    }
    let answering: Vec<Handle> = handles.values().cloned().collect();
    if let (Some(directory), Some(first)) = (recorder, answering.first().cloned()) {
        // One of several that started alike says it for all. It never holds up the monitor's end.
        std::thread::Builder::new()
            .name("recorder".into())
            .spawn(move || {
                std::thread::sleep(RECORD_AFTER);
                // Without it the next restore is slower, no more.
                let _ = first
                    .touched()
                    .and_then(|runs| snapshot::record(&directory, &runs));
            })?;
    }
    std::thread::Builder::new()
        .name("lease".into())
        .spawn(move || hold(lines, &handles))?;
    for thread in threads {
        // A thread that panicked has dropped its entry and lost its shard.
        let _ = thread.join();
    }
    for handle in answering {
        handle.all_answered();
    }
    Ok(())
}

/// Reports that no VM of the batch has started.
fn fail_all(lease: &Lease, batch: &Batch, why: &str) {
    for (name, _) in &batch.vms {
        let (name, why) = (name.clone(), why.to_owned());
        tell(lease, &Event::Failed { name, why });
    }
}

/// Every VM takes some dozens of this process' open files. The usual limit, 1024, is for programs that use `select`; each
/// may raise it as far as the host lets it.
pub(crate) fn raise_file_limit() -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

/// Waits for the command's word, and ends the VMs if it dies without one.
fn hold(mut lines: BufReader<UnixStream>, handles: &HashMap<String, Handle>) {
    let mut line = String::new();
    let read = lines.read_line(&mut line);
    if read.is_ok() && serde_json::from_str(&line).is_ok_and(|order: LeaseOrder| order == LeaseOrder::Detach)
    {
        return;
    }
    std::thread::scope(|scope| {
        for handle in handles.values() {
            scope.spawn(|| handle.kill());
        }
    });
}

fn tell(lease: &Lease, event: &Event) {
    let Ok(mut line) = serde_json::to_vec(event) else {
        return;
    };
    line.push(b'\n');
    // A command that has gone needs no telling.
    let _ = lease
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .write_all(&line);
}

/// Runs one VM; an error is one line.
fn one(
    name: &str,
    spec: &VmSpec,
    frozen: Option<&FrozenVm>,
    terms: &Terms,
    handle: &Handle,
    lease: &Lease,
) -> Result<(), String> {
    let start = Instant::now();
    let line = |error: &dyn std::error::Error| chain(error);
    let span = Span::begin(name, spec, terms.platform).map_err(|error| line(&error))?;
    let own = match &span {
        Some(_) => None,
        None => tenure::begin(name, spec).map_err(|error| line(&error))?,
    };
    let tenure = own.as_ref().or_else(|| span.as_ref()?.home());
    if let Some(tenure) = tenure {
        tenure.settle().map_err(|error| line(&error))?;
    }
    let registry = Registry::open().map_err(|error| format!("the directory of running VMs: {error}"))?;
    let entry = registry.claim(name).map_err(|error| line(&error))?;
    let cid = registry.next_cid().map_err(|error| line(&error))?;
    let mut record = Record::new(name.to_owned(), spec.clone(), cid);
    record.member = terms.member;
    record.boot.limit_s = terms.boot_limit_s;
    record.cell = tenure.map(Tenure::cell);
    record.borrowed = tenure.map_or_else(Vec::new, |tenure| tenure.borrowed().to_vec());
    record.span = span.as_ref().map_or_else(Vec::new, Span::parts);
    let cell = record.cell;
    let folder = entry.folder().to_owned();
    let recorder = handle.recorder();
    let recording = recorder.begin(entry, record).map_err(|error| line(&error))?;
    let group = terms.share_group(spec, frozen);
    let claims = Claims::new(group.clone());
    let mut opened =
        open::open(spec, name, &folder, cid, claims, &terms.program).map_err(|error| line(&error))?;
    recorder.change(|record| {
        record.share_group = Some(group);
        record.kept_apart = opened.claims.refused().to_vec();
        record.spec = opened.spec.clone();
    });
    if let Some((span, how)) = span.as_ref().zip(spec.span.as_ref()) {
        let files = Files::open().map_err(|error| line(&error))?;
        let known = known::all(&files).map_err(|error| line(&error))?;
        opened.launch.nodes = span_nodes(&span.parts(), &known, how.memory());
    }
    if let Some(frozen) = frozen {
        opened
            .claim_frozen(&frozen.memory)
            .map_err(|error| line(&error))?;
        frozen
            .resume(&mut opened.launch, &mut opened.files)
            .map_err(|error| line(&error))?;
    }
    serve(&folder, handle, spec).map_err(|error| format!("the VM's sockets: {error}"))?;
    tell(
        lease,
        &Event::Started {
            name: name.to_owned(),
            folder: folder.clone(),
            cell,
        },
    );
    let keeps_writes = opened.keeps_writes;
    let progress = |progress: vm::Progress<'_>| {
        let booted = match progress {
            vm::Progress::Booted(booted) => booted,
            vm::Progress::FullDisks(disks) => {
                if recorder.read(|record| record.full_disks != disks) == Some(true) {
                    recorder.change(|record| record.full_disks = disks.to_vec());
                    tell(lease, &full_disks(name, disks));
                }
                return;
            }
            vm::Progress::StartsAgain(ending) => {
                let why = ending::reason(ending).unwrap_or_else(|| "the guest powered off".to_owned());
                let name = name.to_owned();
                tell(lease, &Event::StartsAgain { name, why });
                return;
            }
            vm::Progress::Paused(paused) => {
                if recorder.read(|record| record.paused != paused) == Some(true) {
                    recorder.change(|record| record.paused = paused);
                    let name = name.to_owned();
                    tell(lease, &Event::Paused { name, paused });
                }
                return;
            }
        };
        recorder.change(|record| {
            record.full_disks.clear();
            record.paused = false;
            record.core_cookies = booted.core_cookies.to_vec();
            record.state = State::Running;
            record.shard_pid = Some(booted.pid);
            record.part_pids = booted.parts.to_vec();
            record.boots += 1;
            record.boot.begun_unix_s = Some(unix_now().as_secs());
            record.sandbox_missing = [booted.sandbox_missing, booted.sandbox_notes].concat();
        });
        let sandbox_missing = booted.sandbox_missing.to_vec();
        tell(
            lease,
            &Event::Running {
                name: name.to_owned(),
                sandbox_missing,
                keeps_writes,
                paused_us: frozen.map(|frozen| frozen.paused_us),
            },
        );
    };
    let program = &terms.program;
    let ending = vm::run(opened, program, name, &folder, handle, span.as_ref(), progress)
        .map_err(|error| line(&error))?;
    let last_lines = match &ending {
        Ending::Panic => handle.console().lines_from(PANIC_TEXT, LAST_LINES),
        other if ending::reason(other).is_some() => handle.console().last_lines(LAST_LINES),
        _ => Vec::new(),
    };
    // Nothing of the VM is left when its end is told.
    drop(recording);
    own.into_iter().for_each(Tenure::leave);
    span.into_iter().for_each(Span::leave);
    let seconds = start.elapsed().as_secs_f64();
    tell(
        lease,
        &Event::Ended {
            name: name.to_owned(),
            ending,
            last_lines,
            seconds,
        },
    );
    Ok(())
}

fn full_disks(name: &str, disks: &[String]) -> Event {
    Event::FullDisks {
        name: name.to_owned(),
        disks: disks.to_vec(),
    }
}

fn unix_now() -> Duration {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or(Duration::ZERO)
}

/// Opens the VM's sockets: console and control.
fn serve(folder: &Path, handle: &Handle, spec: &VmSpec) -> io::Result<()> {
    handle.console().serve(bind(&folder.join("console.sock"))?)?;
    let socket = bind(&folder.join("control.sock"))?;
    control::serve(socket, handle.clone(), spec.has_balloon().then_some(spec.memory))
}

/// Listens on a socket that only this user may connect to.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}
