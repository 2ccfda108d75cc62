//! A process that serves a VM after its predecessor has ended: a monitor, or the process of the VM's cell.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fault_point::fault_point;
use keeper::client::Keeper;
use registry::monitor::Event;
use registry::vms::{self, Entry, Record, State};
use shard_api::Platform;

use super::lease::{Lease, hold, hold_one, tell};
use super::{Begun, events, fail, hand_over, raise_file_limit, unix_now};
use crate::adoption::{AdoptionRecord, FirstBoot, LeftBoot, MonitorFiles, Places, adopt_programs};
use crate::cluster::reservation::Reservation;
use crate::handle::VmHandle;
use crate::left::LeftFiles;
use crate::memory_watch;
use crate::open::{HOME_LOG, VmResources};
use crate::programs::Programs;
use crate::spanning::Span;
use crate::vm::keeper::succeed_by_this_program;
use crate::vm::{Adopted, AdoptedBoot};

/// Serves the VM whose keeper is at the other end of `keeper`, in place of a predecessor of this process;
/// returns when the VM has ended. `platform` answers what only KVM can.
///
/// # Errors
/// If the keeper has nothing that a predecessor left.
pub fn adopt(keeper: OwnedFd, platform: Platform) -> io::Result<()> {
    raise_file_limit()?;
    let (keeper, files) = Keeper::adopt(keeper)?;
    let read = LeftFiles::read::<AdoptionRecord>(files);
    let (record, files) = read.unwrap_or_else(|error| give_up(None, &error));
    let begin_serving = |lease: &Lease, handle: VmHandle| {
        hold(lease, handle.clone())?;
        memory_watch::begin_for(&handle)?;
        hand_over::begin(handle)
    };
    go_on(keeper, record, files, platform, begin_serving);
    Ok(())
}

/// A VM that this process has to serve: its keeper waits for no other process.
pub(crate) struct Accepted {
    keeper: Keeper,
    record: AdoptionRecord,
    files: LeftFiles,
}

impl Accepted {
    /// Waits until the process that serves the VM now has ended, for 20 s at most. `keeper` is a connection
    /// to its keeper.
    ///
    /// # Errors
    /// If that process does not end in time, or the keeper has nothing that it left to a program of this
    /// version (`InvalidData`). The keeper has a monitor serve the VM then.
    pub(crate) fn by(keeper: OwnedFd) -> io::Result<Self> {
        let (keeper, files) = Keeper::adopt(keeper)?;
        match LeftFiles::read(files) {
            Ok((record, files)) => Ok(Self {
                keeper,
                record,
                files,
            }),
            Err(error) => {
                keeper.release();
                Err(io::Error::new(io::ErrorKind::InvalidData, error))
            }
        }
    }

    /// Serves the VM in the process of a cell, which has other VMs; returns when it has ended. `served` is
    /// called when clients can reach it again. An error ends this process, and no VM.
    pub(crate) fn serve(self, platform: Platform, served: impl FnOnce(&VmHandle)) {
        let begin_serving = |lease: &Lease, handle: VmHandle| {
            hold_one(lease, handle.clone())?;
            served(&handle);
            Ok(())
        };
        go_on(self.keeper, self.record, self.files, platform, begin_serving);
    }
}

/// Serves the VM that was left so, for its client and with the settings of `begin_serving`, until it has
/// ended.
fn go_on(
    keeper: Keeper,
    record: AdoptionRecord,
    mut files: LeftFiles,
    platform: Platform,
    begin_serving: impl FnOnce(&Lease, VmHandle) -> io::Result<()>,
) {
    let files = &mut files;
    let (left, left_places, boot) = (record.monitor, record.places, record.boot);
    let folder = left.folder.clone();
    keeper.note_watch(left.keeper_watches_lease);
    // A value that is dropped on an error would end the VM, which the next process may be able to take over.
    let programs = adopt_programs(&left, files).or_give_up(&folder);
    if let Err(error) = succeed_by_this_program(&keeper) {
        // The program of the VM's first monitor, or of a later process, is the next one's.
        tracing::warn!(%error, "the next monitor of a VM may have an older program");
    }
    let reservation = left_places.own.map(|place| Reservation::adopt(place, files));
    let reservation = reservation.transpose().or_give_up(&folder);
    if let Some(place) = &reservation {
        // Processes that this thread starts for the VM stay in its cell; without the right to bind them they
        // use all of this process's CPUs.
        let _ = place.settle();
    }
    let span = (!left_places.span.is_empty()).then(|| Span::adopt(left_places.span, files, platform));
    let span = span.transpose().or_give_up(&folder);
    let places = Places {
        own: reservation.as_ref().map(Reservation::handle),
        span: span.as_ref().map_or_else(Vec::new, Span::handles),
    };
    let own = MonitorFiles::adopt(&left, places, files).or_give_up(&folder);
    let about = vms::read(&folder).or_give_up(&folder);
    let name = about.name.clone();
    let spec = about.spec.clone();
    let opened = VmResources::adopt(record.opened, files, spec, &name, &programs.shard).or_give_up(&folder);
    let keeper = Arc::new(keeper);
    let adopted = take(
        boot,
        record.first.as_ref(),
        files,
        &keeper,
        (&programs, &opened),
        &about,
    );
    let mut adopted = adopted.or_give_up(&folder);
    let about = taken_over(about, &adopted, &keeper, &opened);
    let runs = about.shard_pid.is_some();
    let cell = about.cell;
    let handle = VmHandle::default();
    let kept = files
        .take(left.kept)
        .and_then(|kept| handle.console().adopt(kept));
    kept.or_give_up(&folder);
    let lock = own.entry.try_clone();
    let entry = lock.and_then(|lock| Entry::adopt(folder.clone(), lock.into()));
    let running = Event::Running {
        name: name.clone(),
        sandbox_missing: about.sandbox_missing.clone(),
        keeps_writes: opened.keeps_writes,
        paused_us: None,
    };
    let lease = Arc::new(Mutex::new(own.lease.try_clone().or_give_up(&folder)));
    let ran = since(about.started_unix_s);
    let recording = handle.recorder().begin(entry.or_give_up(&folder), about);
    let begun = Begun {
        name: &name,
        start: Instant::now().checked_sub(ran).unwrap_or_else(Instant::now),
        reservation,
        span,
        recording: recording.or_give_up(&folder),
        monitor: own,
        paused_us: record.first.as_ref().and_then(|first| first.paused_us),
    };
    if let Adopted::Boot(boot) = &mut adopted {
        // This comes before a client's order reaches the shard: a next successor must not number its own like
        // this one's.
        let began = boot.begin(begun.vm(&programs, &handle), &opened);
        began.or_give_up(&folder);
    }
    fault_point!(adopt_taken);
    let _served = begun.serve(&handle, &opened.spec).or_give_up(&folder);
    begin_serving(&lease, handle.clone()).or_give_up(&folder);
    events::adopted(&name, cell);
    if let Some(first) = record.first {
        first.begin_to_record(&handle);
    }
    if runs {
        // The predecessor may have died before it reported to the client.
        tell(&lease, &running);
        handle.set_left(true);
    }
    if let Err(why) = begun.run(opened, adopted, &programs, &handle, &lease) {
        fail(&lease, name.clone(), why);
    }
    handle.over();
    handle.all_answered();
}

/// Takes over the boot of the VM `about`, or what is left between two boots. The first boot, if it is still
/// to come, is `first`.
fn take(
    boot: Option<LeftBoot>,
    first: Option<&FirstBoot>,
    files: &mut LeftFiles,
    keeper: &Arc<Keeper>,
    program: (&Programs, &VmResources),
    about: &Record,
) -> io::Result<Adopted> {
    if let Some(boot) = boot {
        return take_boot(boot, files, keeper, program, about).map(Adopted::Boot);
    }
    // The predecessor may have started the next boot, and died before that ran.
    keeper.kill_all()?;
    keeper.reap_all();
    Ok(match first {
        Some(first) => Adopted::Before(keeper.clone(), first.clone()),
        None => Adopted::Between(keeper.clone()),
    })
}

/// Returns the record of the VM `about` as this process serves it. The predecessor may have died before it
/// recorded that the VM runs.
fn taken_over(about: Record, adopted: &Adopted, keeper: &Keeper, opened: &VmResources) -> Record {
    let runs = match adopted {
        Adopted::Boot(boot) => Some(boot.home.pid),
        Adopted::New(_) | Adopted::Between(_) | Adopted::Before(..) => None,
    };
    Record {
        monitor_pid: std::process::id(),
        state: runs.map_or(State::Starting, |_| State::Running),
        shard_pid: runs,
        keeper_pid: Some(keeper.pid()),
        card_pids: opened
            .card_processes()
            .map(child_process::ServiceProcess::id)
            .collect(),
        ..about
    }
}

/// Takes over the boot of the VM `about`, which is `opened` and started by `programs`.
fn take_boot(
    boot: LeftBoot,
    files: &mut LeftFiles,
    keeper: &Arc<Keeper>,
    (programs, opened): (&Programs, &VmResources),
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
        // This is the last step: a dropped shard ends the VM.
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

/// A result without which the VM can't be taken over.
trait OrGiveUp<T> {
    /// The value. An error ends this process, whether a monitor or a cell, and no VM: no value is dropped,
    /// since some end the VM. The next process tries again. The reason is in the log of the VM, whose
    /// directory is `folder`.
    fn or_give_up(self, folder: &Path) -> T;
}

impl<T, E: Display> OrGiveUp<T> for Result<T, E> {
    fn or_give_up(self, folder: &Path) -> T {
        self.unwrap_or_else(|error| give_up(Some(folder), &error))
    }
}

fn give_up(folder: Option<&Path>, error: &dyn Display) -> ! {
    match folder {
        Some(folder) => {
            // A monitor has no log of its own: then the VM's log alone has the reason.
            tracing::error!(%error, "a VM cannot be taken over");
            let log = OpenOptions::new().append(true).open(folder.join(HOME_LOG));
            // Without a log the reason is lost, and the VM runs on all the same.
            let _ = log.and_then(|mut log| writeln!(log, "monitor: the VM cannot be taken over: {error}"));
        }
        // The output of a monitor without a VM goes to its terminal, if it has one.
        None => eprintln!("a VM cannot be taken over: {error}"),
    }
    // SAFETY: ends the process; no destructor runs, and none is needed.
    unsafe { libc::_exit(1) }
}

/// The time since a second of the clock of the world.
fn since(unix_s: u64) -> Duration {
    unix_now().saturating_sub(Duration::from_secs(unix_s))
}
