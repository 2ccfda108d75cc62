//! The monitor of a VM: a process, forked from the client, that opens the VM's files, starts its keeper, and
//! serves the VM if no cell does. Outside a cluster it is the VM's private cell. It has one VM.
//!
//! VMs outlive the client that started them only if the client requests that. It holds a *lease*, one end of
//! a socket. When the lease ends without [`LeaseOrder::Detach`] (the client was killed, its terminal went
//! away), the VMs end. The monitors of one command have the same lease.
//!
//! The monitor transfers a VM in a cell to the cell's process, which starts and serves it ([`hand_over`]).
//! When a process that serves VMs dies, its VMs on one host run on. The cell's next process adopts those of a
//! cell. The keeper of any other starts a successor ([`adopt`]), which hands the VM over to its cell as soon
//! as there is one. No process takes the client's order to detach out of the lease's socket, so each
//! successor finds it there. VMs on several hosts end with their monitor.

mod adopt;
mod events;
mod hand_over;
mod lease;
mod start;

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use config::VmSpec;
use hostinfo::facts;
use hostinfo::nodes::span_nodes;
use hostinfo::scanner::Scanner;
use keeper::client::Keeper;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::geteuid;
use registry::cluster::files::Files;
use registry::monitor::{Batch, Event, NameRules};
use registry::share_group::{Grouping, ShareGroup};
use registry::vms::{HostPlace, Record, Registry, State};
use shard_api::Platform;
use shard_api::chain::chain;
use shard_api::launch::Ending;

pub(crate) use self::adopt::Accepted;
pub use self::adopt::adopt;
use self::lease::{Lease, hold, tell};
pub use self::start::{start, start_over};
use crate::adoption::{FirstBoot, Leave, MonitorFiles, Places};
use crate::cluster::reservation::{self, Reservation, ReservationHandle, regions};
use crate::frozen::FrozenVm;
use crate::handle::VmHandle;
use crate::open::VmResources;
use crate::programs::Programs;
use crate::recorder::Recording;
use crate::share_group::Claims;
use crate::socket::{Served, bind};
use crate::spanning::Span;
use crate::vm::{self, Adopted, Vm};
use crate::{control, ending, memory_watch, open, scan, snapshot};

/// Lines of the console that go with an ending.
const LAST_LINES: usize = 8;
/// Time after a restore at which its pages are recorded: by then it has answered all waiting clients.
const RECORD_AFTER: Duration = Duration::from_secs(5);
/// The first words of a Linux kernel that panics.
const PANIC_TEXT: &str = "Kernel panic";

/// Settings of all VMs of a batch.
#[derive(Clone, Debug)]
struct Terms {
    grouping: Grouping,
    member: Option<u32>,
    names: Option<NameRules>,
    boot_limit_s: u64,
    platform: Platform,
    programs: Arc<Programs>,
}

impl Terms {
    fn of(batch: &Batch, platform: Platform, programs: Programs) -> io::Result<Self> {
        Ok(Self {
            grouping: Grouping {
                between: batch.share_between,
                uid: geteuid(),
                run: ShareGroup::of_run()?,
            },
            member: batch.member,
            names: batch.names.clone(),
            boot_limit_s: batch.boot_limit_s,
            platform,
            programs: Arc::new(programs),
        })
    }

    /// The share group of a VM. A VM that resumes from another has that one's group, with which it shares its
    /// memory.
    fn share_group(&self, spec: &VmSpec, frozen: Option<&FrozenVm>) -> ShareGroup {
        let brought = frozen.and_then(|frozen| frozen.share_group.clone());
        brought.unwrap_or_else(|| self.grouping.of(spec))
    }
}

/// Serves the VM `name` from its start to its end, or until its cell serves it. `source` is the state from
/// which it resumes, and the snapshot's directory in which the pages that it touches are recorded.
fn serve_new(
    name: &str,
    spec: &VmSpec,
    source: Option<(&FrozenVm, Option<PathBuf>)>,
    terms: &Terms,
    lease: &Lease,
) -> io::Result<()> {
    raise_file_limit()?;
    let handle = VmHandle::default();
    hold(lease, handle.clone())?;
    if let Err(why) = start_and_serve(name, spec, source, terms, &handle, lease) {
        fail(lease, name.to_owned(), why);
    }
    handle.over();
    handle.all_answered();
    Ok(())
}

/// Reports that a VM has not started.
fn fail(lease: &Lease, name: String, why: String) {
    events::failed(&name, &why);
    tell(lease, &Event::Failed { name, why });
}

/// Raises the limit of open files as far as the host permits: every VM takes some dozens. The usual limit,
/// 1024, is for programs that use `select`.
pub(crate) fn raise_file_limit() -> io::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

/// One line of text with all causes of an error.
fn line(error: impl std::error::Error) -> String {
    chain(&error)
}

/// Starts the VM and serves it, or orders its cell to do so; an error is one line.
fn start_and_serve(
    name: &str,
    spec: &VmSpec,
    source: Option<(&FrozenVm, Option<PathBuf>)>,
    terms: &Terms,
    handle: &VmHandle,
    lease: &Lease,
) -> Result<(), String> {
    let start = Instant::now();
    let (frozen, record_in) = source.unzip();
    let span = Span::begin(name, spec, terms.platform).map_err(line)?;
    let own = match &span {
        Some(_) => None,
        None => reservation::begin(name, spec).map_err(line)?,
    };
    let place = own.as_ref().or_else(|| span.as_ref()?.home());
    if let Some(place) = place {
        place.settle().map_err(line)?;
    }
    let registry = Registry::open().map_err(|error| format!("the directory of running VMs: {error}"))?;
    let entry = registry.claim(name).map_err(line)?;
    let cid = registry.next_cid().map_err(line)?;
    let record = record(name, spec, cid, terms, (place, span.as_ref()));
    let cell = record.cell;
    let shown_cell = cell.or(record.host_place.map(|place| place.cell));
    let folder = entry.folder().to_owned();
    let recorder = handle.recorder();
    let lock = entry.lock().try_clone_to_owned().map_err(line)?;
    let recording = recorder.begin(entry, record).map_err(line)?;
    events::starting(name, cell);
    // The record was there first: either this process sees that the cell failed, or the cells see that a VM
    // must end.
    if let Some(failed) = failed_cell(handle).map_err(line)? {
        return Err(has_failed(failed));
    }
    // It starts while this process opens the VM's files.
    let keeper = vm::start_keeper(&terms.programs, name).map_err(line)?;
    let vm = NewVm {
        name,
        spec,
        folder: &folder,
        cid,
        handle,
    };
    let opened = vm.open(terms, span.as_ref(), frozen)?;
    let places = Places {
        own: own.as_ref().map(Reservation::handle),
        span: span.as_ref().map_or_else(Vec::new, Span::handles),
    };
    let monitor =
        listen(&folder, lock, lease, places).map_err(|error| format!("the VM's sockets: {error}"))?;
    let first = FirstBoot {
        paused_us: frozen.map(|frozen| frozen.paused_us),
        record_in: record_in.flatten(),
        has_begun: false,
    };
    let begun = Begun {
        name,
        start,
        reservation: own,
        span,
        recording,
        monitor,
        paused_us: first.paused_us,
    };
    let started = Event::Started {
        name: name.to_owned(),
        folder: folder.clone(),
        cell: shown_cell,
    };
    if let Some(cell) = cell.filter(|_| !begun.has_remote_parts()) {
        tell(lease, &started);
        let handed_over = begun.hand_over(keeper, opened, first, cell, &terms.programs, handle);
        return handed_over.map(|never| match never {});
    }
    let _served = begun
        .serve(handle, spec)
        .map_err(|error| format!("the VM's sockets: {error}"))?;
    tell(lease, &started);
    memory_watch::begin_for(handle).map_err(|error| format!("the watch of memory: {error}"))?;
    first.begin_to_record(handle);
    begun.run(opened, Adopted::New(keeper), &terms.programs, handle, lease)
}

/// Returns the record of a VM that starts. `places` are its place in a cell, and its places if it spans
/// cells.
fn record(
    name: &str,
    spec: &VmSpec,
    cid: u32,
    terms: &Terms,
    (place, span): (Option<&Reservation>, Option<&Span>),
) -> Record {
    let mut record = Record::new(name.to_owned(), spec.clone(), cid);
    record.member = terms.member;
    record.names.clone_from(&terms.names);
    record.boot.limit_s = terms.boot_limit_s;
    record.host_place = place.and_then(|place| {
        let limits = place.limits_of_host()?;
        Some(HostPlace {
            cell: place.cell(),
            limits,
            resident_max_bytes: spec.is_trimmable().then(|| spec.resident_max().0),
        })
    });
    // Cells of this user's cluster, which serve the VM, and on which it depends.
    let place = place.filter(|place| place.is_own());
    record.cell = place.map(Reservation::cell);
    record.borrowed = place.map_or_else(Vec::new, |place| place.borrowed().to_vec());
    // They are recorded before the VM has one: its home seeks the region's file at the VMs with a record.
    record.regions = place.map_or_else(Vec::new, |place| place.regions().to_vec());
    record.span = span.map_or_else(Vec::new, Span::parts);
    record
}

/// A VM whose record is in the registry, and whose files are to be opened.
struct NewVm<'a> {
    name: &'a str,
    spec: &'a VmSpec,
    /// Directory of the VM in the registry.
    folder: &'a Path,
    cid: u32,
    handle: &'a VmHandle,
}

impl NewVm<'_> {
    /// Opens the VM's files, and records with which VMs it shares memory. `frozen` is the state from which it
    /// resumes. An error is one line.
    fn open(
        &self,
        terms: &Terms,
        span: Option<&Span>,
        frozen: Option<&FrozenVm>,
    ) -> Result<VmResources, String> {
        let between = terms.grouping.between;
        scan::check(self.spec, between, Scanner::of_host).map_err(line)?;
        let group = terms.share_group(self.spec, frozen);
        let claims = Claims::new(group.clone());
        let of_vm = open::OfVm {
            spec: self.spec,
            name: self.name,
            folder: self.folder,
            cid: self.cid,
            names: terms.names.as_ref(),
        };
        let regions = self.handle.recorder().read(|record| record.regions.clone());
        let regions = regions::take(self.name, &regions.unwrap_or_default()).map_err(line)?;
        self.handle.recorder().change(|record| {
            record.regions = regions.iter().map(|(grant, _)| grant.clone()).collect();
        });
        let opened = open::open(of_vm, claims, &terms.programs.shard);
        let mut opened = opened.map_err(line)?;
        opened.add_regions(regions);
        self.handle.recorder().change(|record| {
            record.share_group = Some(group);
            record.kept_apart = opened.claims.refused().to_vec();
            record.spec = opened.spec.clone();
        });
        if let Some((span, how)) = span.zip(self.spec.span.as_ref()) {
            let files = Files::open().map_err(line)?;
            let known = facts::all(&files).map_err(line)?;
            opened.launch.nodes = span_nodes(&span.parts(), &known, how.memory());
        }
        if let Some(frozen) = frozen {
            opened.claim_frozen(frozen).map_err(line)?;
            frozen
                .resume(&mut opened.launch, &mut opened.files)
                .map_err(line)?;
        }
        Ok(opened)
    }
}

/// The cell of the VM's record that has failed, if one has.
fn failed_cell(handle: &VmHandle) -> io::Result<Option<u16>> {
    let files = Files::open()?;
    let depends = |cell: u16| handle.recorder().read(|record| record.depends_on(cell)) == Some(true);
    let numbers = files.plan()?.into_iter().map(|cell| cell.number);
    Ok(numbers
        .filter(|cell| files.cell(*cell).has_failed())
        .find(|cell| depends(*cell)))
}

fn has_failed(cell: u16) -> String {
    format!("cell {cell}, which it would use, has failed")
}

/// A VM that has its files and its sockets.
struct Begun<'a> {
    name: &'a str,
    start: Instant,
    /// Its place in a cell.
    reservation: Option<Reservation>,
    /// Its places, if it spans cells.
    span: Option<Span>,
    recording: Recording<'a>,
    monitor: MonitorFiles,
    /// Time for which the VM that it resumes from was paused, in microseconds.
    paused_us: Option<u64>,
}

impl Begun<'_> {
    /// Serves console and controls until the result is dropped.
    fn serve(&self, handle: &VmHandle, spec: &VmSpec) -> io::Result<[Served; 2]> {
        let console = handle.console().serve(self.monitor.console.try_clone()?)?;
        let balloon_max = spec.has_balloon().then_some(spec.memory);
        let control = control::serve(self.monitor.control.try_clone()?, handle.clone(), balloon_max)?;
        Ok([console, control])
    }

    fn has_remote_parts(&self) -> bool {
        self.span.as_ref().is_some_and(Span::has_remote_parts)
    }

    /// Orders the VM's cell to start and serve it, and ends this process. An error is one line, and ends the
    /// VM.
    fn hand_over(
        self,
        keeper: Keeper,
        opened: VmResources,
        first: FirstBoot,
        cell: u16,
        programs: &Programs,
        handle: &VmHandle,
    ) -> Result<Infallible, String> {
        let vm = self.vm(programs, handle);
        let keeper = vm::keeper::prepare(vm, keeper).map_err(|error| chain(&error))?;
        let what = Leave {
            handle,
            programs,
            opened: &opened,
            boot: None,
            first: Some(first),
        };
        self.monitor
            .leave(&what, &keeper)
            .map_err(|error| format!("the VM's keeper: {error}"))?;
        hand_over::to_cell(self.name, cell, || {
            if handle.state().is_to_end() {
                return Err("it was ended before it started".to_owned());
            }
            match failed_cell(handle).map_err(|error| chain(&error))? {
                Some(failed) => Err(has_failed(failed)),
                None => Ok(()),
            }
        })?;
        // A keeper that is gone has ended the VM, and the cell reports that.
        let _ = keeper.leave();
        // SAFETY: ends the process; no destructor runs, since some end the VM, and the cell has all of it.
        unsafe { libc::_exit(0) }
    }

    fn vm<'b>(&'b self, programs: &'b Programs, handle: &'b VmHandle) -> Vm<'b> {
        let has_remote_parts = self.has_remote_parts();
        Vm {
            name: self.name,
            folder: &self.monitor.folder,
            programs,
            handle,
            span: self.span.as_ref(),
            monitor: (!has_remote_parts).then_some(&self.monitor),
        }
    }

    /// Runs the VM until it ends, from where `adopted` says. An error is one line.
    fn run(
        self,
        opened: VmResources,
        adopted: Adopted,
        programs: &Programs,
        handle: &VmHandle,
        lease: &Lease,
    ) -> Result<(), String> {
        let keeps_writes = opened.keeps_writes;
        let progress = |progress: vm::Progress<'_>| self.note(progress, keeps_writes, handle, lease);
        let vm = self.vm(programs, handle);
        let ran = vm::run(vm, opened, adopted, progress);
        // Nothing of the VM is left when its end is reported.
        drop((self.recording, self.monitor));
        self.reservation.into_iter().for_each(Reservation::leave);
        self.span.into_iter().for_each(Span::leave);
        let ending = ran.map_err(|error| chain(&error))?;
        events::ended(self.name, &ending);
        let last_lines = match &ending {
            Ending::Panic => handle.console().lines_from(PANIC_TEXT, LAST_LINES),
            other if ending::reason(other).is_some() => handle.console().last_lines(LAST_LINES),
            _ => Vec::new(),
        };
        tell(
            lease,
            &Event::Ended {
                name: self.name.to_owned(),
                ending,
                last_lines,
                seconds: self.start.elapsed().as_secs_f64(),
            },
        );
        Ok(())
    }

    /// Updates the record, and reports to the client.
    fn note(&self, progress: vm::Progress<'_>, keeps_writes: bool, handle: &VmHandle, lease: &Lease) {
        let (name, recorder) = (self.name.to_owned(), handle.recorder());
        let booted = match progress {
            vm::Progress::Booted(booted) => booted,
            vm::Progress::FullDisks(disks) => {
                if recorder.read(|record| record.full_disks != disks) == Some(true) {
                    recorder.change(|record| record.full_disks = disks.to_vec());
                    let disks = disks.to_vec();
                    events::full_disks(&name, &disks);
                    tell(lease, &Event::FullDisks { name, disks });
                }
                return;
            }
            vm::Progress::StartsAgain(ending) => {
                let why = ending::reason(ending).unwrap_or_else(|| "the guest powered off".to_owned());
                events::starts_again(&name, &why);
                tell(lease, &Event::StartsAgain { name, why });
                return;
            }
            vm::Progress::Paused(paused) => {
                if recorder.read(|record| record.paused != paused) == Some(true) {
                    recorder.change(|record| record.paused = paused);
                    events::paused(&name, paused);
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
            record.keeper_pid = Some(booted.keeper);
            record.card_pids = booted.cards.to_vec();
            record.part_pids = booted.parts.to_vec();
            record.boots += 1;
            record.boot.begun_unix_s = Some(unix_now().as_secs());
            record.sandbox_missing = [booted.sandbox_missing, booted.sandbox_notes].concat();
        });
        events::booted(&name, recorder.read(|record| record.boots).unwrap_or(1));
        tell(
            lease,
            &Event::Running {
                name,
                sandbox_missing: booted.sandbox_missing.to_vec(),
                keeps_writes,
                paused_us: self.paused_us,
            },
        );
        handle.set_left(booted.is_left);
    }
}

impl FirstBoot {
    /// Starts a thread that records after a while which pages a restored VM has touched. It never delays the
    /// end of the VM.
    fn begin_to_record(self, handle: &VmHandle) {
        let Some(directory) = self.record_in else { return };
        let handle = handle.clone();
        let record = move || {
            std::thread::sleep(RECORD_AFTER);
            let _ = handle
                .touched()
                .and_then(|runs| snapshot::record(&directory, &runs));
        };
        // Without the record the next restore is only slower.
        let _ = std::thread::Builder::new().name("recorder".into()).spawn(record);
    }
}

fn unix_now() -> Duration {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or(Duration::ZERO)
}

/// Opens a monitor's own files, in addition to the VM's: the sockets of its console and its controls.
fn listen(
    folder: &Path,
    entry: OwnedFd,
    lease: &Lease,
    places: Places<ReservationHandle>,
) -> io::Result<MonitorFiles> {
    Ok(MonitorFiles {
        folder: folder.to_owned(),
        entry,
        console: bind(&folder.join("console.sock"))?,
        control: bind(&folder.join("control.sock"))?,
        lease: lease.lock().unwrap_or_else(PoisonError::into_inner).try_clone()?,
        places,
    })
}
