//! A process that goes on with a VM where another was that has ended: a monitor, or the process of the VM's cell.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use keeper::client::Keeper;
use nix::sys::socket::{Shutdown, shutdown};
use registry::monitor::Event;
use registry::vms::{self, Entry, Record, State};
use shard_api::Platform;

use super::lease::{Lease, hold, hold_one, tell};
use super::{Begun, hand_over, raise_file_limit, unix_now};
use crate::adoption::{AdoptionRecord, LeftBoot, MonitorFiles, Places, adopt_programs};
use crate::cluster::tenure::Tenure;
use crate::handle::Handle;
use crate::left::LeftFiles;
use crate::open::{HOME_LOG, Opened};
use crate::programs::Programs;
use crate::spanning::Span;
use crate::vm::{Adopted, AdoptedBoot};

/// Goes on with the VM whose keeper is at the other end of `keeper`, where a predecessor of this process was; returns when it
/// has ended. `platform` is asked for what only KVM knows.
///
/// # Errors
/// If the keeper has nothing that its predecessor left.
pub fn adopt(keeper: OwnedFd, platform: Platform) -> io::Result<()> {
    raise_file_limit()?;
    let (keeper, files) = Keeper::adopt(keeper)?;
    let read = LeftFiles::read::<AdoptionRecord>(files);
    let (record, files) = read.unwrap_or_else(|error| Adopter::Monitor.give_up(None, &error));
    let is_served = |lease: &Lease, handle: Handle| {
        hold(lease, vec![handle.clone()])?;
        hand_over::begin(vec![handle], None)
    };
    go_on(keeper, record, files, platform, &Adopter::Monitor, is_served);
    Ok(())
}

/// Goes on with a VM of a cell in this process, which is the cell's; returns when the VM has ended. `keeper` is a connection to
/// its keeper, which waits until the process on ends that serves it now, for 20 s at most. `served` is called when this one does.
///
/// # Errors
/// If that process does not end in time, or the keeper has nothing that it left to a program of this version. The keeper has a
/// monitor serve the VM then.
pub(crate) fn adopt_for_cell(
    keeper: OwnedFd,
    platform: Platform,
    served: impl FnOnce(&Handle),
) -> io::Result<()> {
    let connection = keeper.try_clone()?;
    let (keeper, files) = Keeper::adopt(keeper)?;
    let (record, files) = match LeftFiles::read::<AdoptionRecord>(files) {
        Ok(read) => read,
        Err(error) => {
            keeper.release();
            return Err(error);
        }
    };
    let is_served = |lease: &Lease, handle: Handle| {
        hold_one(lease, handle.clone())?;
        served(&handle);
        Ok(())
    };
    go_on(
        keeper,
        record,
        files,
        platform,
        &Adopter::Cell(connection),
        is_served,
    );
    Ok(())
}

/// Goes on with the VM that was left so, for its client and as `is_served` does, until it has ended.
fn go_on(
    keeper: Keeper,
    record: AdoptionRecord,
    mut files: LeftFiles,
    platform: Platform,
    adopter: &Adopter,
    is_served: impl FnOnce(&Lease, Handle) -> io::Result<()>,
) {
    let files = &mut files;
    let (left, left_places, boot) = (record.monitor, record.places, record.boot);
    let folder = left.folder.clone();
    // A value that is dropped on an error would end the VM, which the next process may be able to take over.
    let attempt = &Attempt {
        adopter,
        folder: &folder,
    };
    let programs = attempt.ok(adopt_programs(&left, files));
    let tenure = left_places.own.map(|place| Tenure::adopt(place, files));
    let tenure = attempt.ok(tenure.transpose());
    let span = (!left_places.span.is_empty()).then(|| Span::adopt(left_places.span, files, platform));
    let span = attempt.ok(span.transpose());
    let places = Places {
        own: tenure.as_ref().map(Tenure::handle),
        span: span.as_ref().map_or_else(Vec::new, Span::handles),
    };
    let own = attempt.ok(MonitorFiles::adopt(&left, places, files));
    let about = attempt.ok(vms::read(&folder));
    let name = about.name.clone();
    let spec = about.spec.clone();
    let opened = attempt.ok(Opened::adopt(record.opened, files, spec, &name, &programs.shard));
    let keeper = Arc::new(keeper);
    let mut adopted = match boot {
        Some(boot) => {
            let boot = take_boot(boot, files, &keeper, (&programs, &opened), &about);
            Adopted::Boot(attempt.ok(boot))
        }
        None => {
            // The predecessor may have started the next one, and died before that ran.
            attempt.ok(keeper.kill_all());
            keeper.reap_all();
            Adopted::Between(keeper.clone())
        }
    };
    // The predecessor may have died before it wrote that the VM runs.
    let runs = match &adopted {
        Adopted::Boot(boot) => Some(boot.home.pid),
        Adopted::Between(_) => None,
    };
    let about = Record {
        monitor_pid: std::process::id(),
        state: runs.map_or(State::Starting, |_| State::Running),
        shard_pid: runs,
        keeper_pid: Some(keeper.pid()),
        card_pids: opened.helpers().map(subnet::HelperProcess::id).collect(),
        ..about
    };
    let handle = Handle::default();
    let kept = files
        .take(left.kept)
        .and_then(|kept| handle.console().adopt(kept));
    attempt.ok(kept);
    let lock = own.entry.try_clone();
    let entry = lock.and_then(|lock| Entry::adopt(folder.clone(), lock.into()));
    let running = Event::Running {
        name: name.clone(),
        sandbox_missing: about.sandbox_missing.clone(),
        keeps_writes: opened.keeps_writes,
        paused_us: None,
    };
    let lease = Arc::new(Mutex::new(attempt.ok(own.lease.try_clone())));
    let ran = since(about.started_unix_s);
    let recording = handle.recorder().begin(attempt.ok(entry), about);
    let begun = Begun {
        name: &name,
        start: Instant::now().checked_sub(ran).unwrap_or_else(Instant::now),
        tenure,
        span,
        recording: attempt.ok(recording),
        monitor: own,
        paused_us: None,
    };
    if let Adopted::Boot(boot) = &mut adopted {
        // Before a client's order reaches the shard: a next successor must not number its own like this one's.
        let began = boot.begin(begun.vm(&programs, &handle), &opened);
        attempt.ok(began);
    }
    let _served = attempt.ok(begun.serve(&handle, &opened.spec));
    attempt.ok(is_served(&lease, handle.clone()));
    if runs.is_some() {
        // The predecessor may have died before it told the client.
        tell(&lease, &running);
        handle.set_left();
    }
    if let Err(why) = begun.run(opened, Some(adopted), &programs, &handle, &lease) {
        let name = name.clone();
        tell(&lease, &Event::Failed { name, why });
    }
    handle.over();
    handle.all_answered();
}

/// Takes over the boot of the VM `about`, which is `opened` and started by `programs`.
fn take_boot(
    boot: LeftBoot,
    files: &mut LeftFiles,
    keeper: &Arc<Keeper>,
    (programs, opened): (&Programs, &Opened),
    about: &Record,
) -> io::Result<AdoptedBoot> {
    let (mut parts, mut part_logs) = (Vec::new(), Vec::new());
    for part in boot.parts {
        let (part, log) = part.take(files, programs.shard.clone())?;
        parts.push(part);
        part_logs.push(log);
    }
    let handover = files.take(boot.handover)?.into();
    let ports = files.take(boot.ports)?;
    let (program, log) = (programs.shard.clone(), opened.log.clone());
    let begun_unix_s = about.boot.begun_unix_s.unwrap_or(about.started_unix_s);
    Ok(AdoptedBoot {
        // The last: one that is dropped ends the VM.
        home: Arc::new(boot.home.take(files, keeper.clone(), program, log)?),
        parts,
        part_logs,
        handover,
        ports,
        killed_before: boot.killed_before,
        ran: since(begun_unix_s),
        is_paused: about.paused,
        keeper: keeper.clone(),
    })
}

/// What takes a VM over.
enum Adopter {
    /// A process for this VM alone.
    Monitor,
    /// The process of a cell, by this connection to the VM's keeper.
    Cell(OwnedFd),
}

/// A VM that is being taken over.
struct Attempt<'a> {
    adopter: &'a Adopter,
    /// The VM's directory.
    folder: &'a Path,
}

impl Attempt<'_> {
    /// The value of a result without which the VM can't be taken over. On an error this never returns, since some values end the VM
    /// when they are dropped.
    fn ok<T, E: Display>(&self, result: Result<T, E>) -> T {
        result.unwrap_or_else(|error| self.adopter.give_up(Some(self.folder), &error))
    }
}

impl Adopter {
    /// Leaves the VM, whose directory is `folder`, to a monitor that its keeper starts. A monitor ends. In a cell's process this
    /// thread stays with what it has taken, until that process ends. The reason is in the VM's log.
    fn give_up(&self, folder: Option<&Path>, error: &dyn Display) -> ! {
        if let Some(folder) = folder {
            let log = OpenOptions::new().append(true).open(folder.join(HOME_LOG));
            // Without a log nobody learns the reason, and the VM runs on all the same.
            let _ = log.and_then(|mut log| writeln!(log, "monitor: the VM cannot be taken over: {error}"));
        }
        match self {
            // SAFETY: ends the process; no destructor runs, and none is needed.
            Self::Monitor => unsafe { libc::_exit(1) },
            Self::Cell(keeper) => {
                let _ = shutdown(keeper.as_raw_fd(), Shutdown::Both);
                loop {
                    std::thread::park();
                }
            }
        }
    }
}

/// The time since a second of the clock of the world.
fn since(unix_s: u64) -> Duration {
    unix_now().saturating_sub(Duration::from_secs(unix_s))
}
