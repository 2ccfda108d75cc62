//! One boot of a VM: its shards from their start to their end.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use child_process::ServiceProcess;
use fault_point::fault_point;
use keeper::client::Keeper;
use keeper::limits::Limits;
use keeper::spawn::Namespaces;
use registry::vms::Record;
use shard_api::launch::{DiskLaunch, Ending, Fd, HomeMemory, Launch, Report};
use shard_api::ports;

use super::full_disks::FullDisks;
use super::keeper::start_keeper;
use super::{Booted, IfLost, Progress, RunError, Vm, namespaces};
use crate::adoption::{Leave, LeaveBoot};
use crate::coherence;
use crate::core_scheduling;
use crate::ending::{of_part, of_silent};
use crate::frozen::Freezable;
use crate::handle::{VmChange, VmHandle};
use crate::identity::{Given, IdOwner};
use crate::link::Reports;
use crate::memory_nodes::{self, HostMemory, Wanted};
use crate::oom;
use crate::open::{VmResources, disk_limits};
use crate::programs::ProgramError;
use crate::remote::clock::keeper::ClockKeeper;
use crate::secondary_shards::{SecondaryShard, SecondaryShards};
use crate::shard_log::ShardLog;
use crate::shard_process::{self, ShardProcess};
use crate::spanning::Span;
use crate::spanning::boot::Boot;

/// A boot that is to be started.
pub(super) struct NewBoot<'a> {
    pub(super) vm: Vm<'a>,
    pub(super) opened: &'a VmResources,
    /// The log of each shard.
    pub(super) logs: &'a [Arc<ShardLog>],
    pub(super) keeper: &'a Arc<Keeper>,
    pub(super) if_lost: IfLost,
}

/// The state of a boot before its home runs.
#[derive(Default)]
pub(super) struct Prepared {
    /// Keeps the clocks of a VM on several hosts.
    clock_keeper: Option<ClockKeeper>,
    part_pids: Vec<i32>,
    /// Missing layers of the sandboxes of parts on other hosts.
    missing_elsewhere: Vec<String>,
    /// The kernel's cookie of each shard's cores.
    cookies: Vec<u64>,
}

/// A started boot, which is followed to its end.
pub(super) struct RunningBoot<'a> {
    pub(super) vm: Vm<'a>,
    pub(super) opened: &'a VmResources,
    pub(super) keeper: &'a Arc<Keeper>,
    pub(super) home: Arc<ShardProcess>,
    pub(super) reports: Reports,
    /// The monitor's ends of the sockets of this boot.
    pub(super) handover: UnixStream,
    pub(super) ports: OwnedFd,
    pub(super) prepared: Prepared,
    /// Number of the VM's processes that were killed for memory before this boot.
    pub(super) killed_before: u64,
    /// Whether the vCPUs run.
    pub(super) ran: bool,
}

impl NewBoot<'_> {
    /// Starts the VM's shards, and returns when they have ended.
    pub(super) fn run(&self, progress: &mut impl FnMut(Progress<'_>)) -> Result<Ending, RunError> {
        let (opened, Vm { handle, span, .. }) = (self.opened, self.vm);
        self.leave_between_boots()?;
        fault_point!(boot_begun);
        let cookies = RefCell::new(Vec::new());
        // The group outlives the boot.
        let killed_before = killed_for_memory(handle);
        let boot = span
            .map(|span| {
                let is_coherent = opened.spec.is_coherent();
                let kernel = is_coherent.then(|| opened.kernel_file()).transpose()?;
                let image = kernel.map(|mut file| span.kernel_image(&mut file));
                Boot::new(span, &opened.launch.memory, image)
            })
            .transpose()?;
        let timed = handle.clone();
        let keep_time = |boot: &Boot| boot.keep_time(move |step| timed.step(step));
        let clock_keeper = boot.as_ref().map(keep_time).transpose()?.flatten();
        let (mut parts, mut missing_elsewhere) = (None, Vec::new());
        if let (Some(span), Some(boot)) = (span, &boot) {
            handle.state().clocks = boot.clocks().cloned();
            let (told, home) = (handle.clone(), handle.clone());
            let start = |shard| self.start_shard(shard, &cookies);
            let (started, missing) = start_parts(opened, start, span, boot)?;
            missing_elsewhere = missing;
            // The home may not be there yet, or not any more.
            let watched = SecondaryShards::watch(started, move || told.changed(), move || home.part_ended());
            parts = Some(watched?);
            span.settle(0)?;
        }
        let part_pids = parts.as_ref().map_or_else(Vec::new, SecondaryShards::pids);
        let mut files: Vec<_> = opened.files.iter().map(AsFd::as_fd).collect();
        let mut launch = opened.launch.clone();
        launch.memory.host_nodes = self.memory_nodes()?;
        launch.memory.homes = self.homes()?;
        if let (Some(paging), Some(bytes)) = (&mut launch.memory.paging, self.resident_bytes()) {
            paging.resident_bytes = bytes;
        }
        if let Some(limits) = self.vm.handle.recorder().read(|record| disk_limits(&record.spec)) {
            launch.disk_limits = limits;
        }
        let (handover, shards) = UnixStream::pair()?;
        launch.handover = Fd(files.len());
        files.push(shards.as_fd());
        let (connects, asks) = ports::pair()?;
        if let Some(vsock) = &mut launch.vsock {
            vsock.ports = Some(Fd(files.len()));
            files.push(asks.as_fd());
        }
        launch.log = Fd(files.len());
        files.push(self.logs[0].as_fd());
        launch.span = boot.as_ref().map(|boot| boot.launch(0, &mut files));
        let freezable = boot
            .is_none()
            .then(|| Freezable::new(opened, handover.try_clone()?))
            .transpose()?;
        let home = Arc::new(self.start_shard(0, &cookies)?);
        fault_point!(boot_spawned);
        launch.sandbox = home.sandbox.clone();
        let reports = home.link.reports()?;
        handle.state().start(home.clone(), parts);
        // A group that was made while these processes started did not find them.
        let group = handle.state().group.clone();
        if let Some(group) = group {
            std::iter::once(home.pid)
                .chain(part_pids.iter().copied())
                .try_for_each(|pid| group.add(pid))?;
        }
        // A shard that dies at once breaks the socket; its log has the reason.
        if home.link.launch(&Launch::Vm(Box::new(launch)), &files).is_ok() {
            handle.set_freezable(freezable);
        }
        fault_point!(boot_launched);
        let running = RunningBoot {
            vm: self.vm,
            opened,
            keeper: self.keeper,
            home,
            reports,
            handover,
            ports: connects,
            prepared: Prepared {
                clock_keeper,
                part_pids,
                missing_elsewhere,
                cookies: cookies.into_inner(),
            },
            killed_before,
            ran: false,
        };
        running.follow(progress)
    }

    /// Records in the keeper's slot that no boot runs, since the end of the last one has been handled.
    fn leave_between_boots(&self) -> io::Result<()> {
        let (monitor, first) = match &self.if_lost {
            IfLost::End => (None, None),
            IfLost::FirstBoot(first) => (self.vm.monitor, Some(first.clone())),
            IfLost::Boot => (self.vm.monitor, None),
        };
        let what = Leave {
            handle: self.vm.handle,
            programs: self.vm.programs,
            opened: self.opened,
            boot: None,
            first,
        };
        if monitor.is_none_or(|monitor| monitor.leave(&what, self.keeper).is_err()) {
            self.vm.handle.set_left(false);
            self.keeper.clear()?;
        }
        self.keeper.reap_all();
        Ok(())
    }

    /// The limit of guest memory in the host's memory: it may have been changed since its start, or be lower
    /// while the host is short of memory.
    fn resident_bytes(&self) -> Option<u64> {
        let record = self.vm.handle.recorder().read(Record::clone)?;
        let limit = |resident| self.vm.handle.resident_limit(resident);
        record.spec.resident.map(limit)
    }

    /// The host's nodes for the VM's memory, by its record: they may have been changed since its start.
    fn memory_nodes(&self) -> Result<Vec<u32>, RunError> {
        let record = self.vm.handle.recorder().read(Record::clone);
        let Some(record) = record.filter(|record| !record.spec.memory_nodes.is_empty()) else {
            return Ok(Vec::new());
        };
        let wanted = Wanted::of(&record.spec, None);
        let host = HostMemory::read(self.keeper.pid(), wanted.pool_kib())?;
        let lenders = memory_nodes::lenders(&record)?;
        let nodes = record.spec.memory_nodes;
        memory_nodes::check(&nodes, &wanted, &host, &lenders).map_err(RunError::MemoryNodes)?;
        Ok(nodes)
    }

    /// The VM's memory by home cell, its own cell first; empty if all of it is on the same nodes.
    fn homes(&self) -> Result<Vec<HomeMemory>, RunError> {
        let record = self.vm.handle.recorder().read(Record::clone);
        let Some(record) = record.filter(|record| !record.borrowed.is_empty()) else {
            return Ok(Vec::new());
        };
        Ok(memory_nodes::homes(&record)?)
    }

    /// Starts the process of a shard.
    fn start_shard(&self, shard: usize, cookies: &RefCell<Vec<u64>>) -> Result<ShardProcess, RunError> {
        let (opened, vm) = (self.opened, self.vm);
        let cid = opened.launch.vsock.as_ref().map_or(0, |vsock| vsock.cid);
        // Only the home has disks.
        let disk_file_bytes = if shard == 0 { opened.disk_file_bytes } else { 0 };
        // A part has the CPUs and the nodes of its keeper, which has those of this thread.
        let own_keeper = (shard > 0)
            .then(|| start_keeper(vm.programs, vm.name).map(Arc::new))
            .transpose()?;
        let start = |namespaces: &Namespaces| {
            let start = shard_process::Start {
                keeper: own_keeper.as_ref().unwrap_or(self.keeper),
                program: &vm.programs.shard,
                name: vm.name,
                file_bytes: Limits::new(opened.launch.memory.bytes, disk_file_bytes).file_bytes,
                policy: opened.launch.sandbox.policy,
                namespaces,
                given: &Given::of(IdOwner::Vm(cid)),
            };
            ShardProcess::start(start, self.logs[shard].clone())
        };
        let process = namespaces::with_those_of_host(opened.launch.sandbox.policy, start)?;
        let group = vm.handle.state().group.clone();
        if let Some(group) = group {
            group.add(process.pid)?;
        }
        if opened.spec.is_coherent() {
            coherence::permit_priority(process.pid);
        }
        // Where this user may not, the kernel chooses by size; `inspect` has the score.
        let _ = oom::prefer(process.pid, opened.spec.unpromised_permille());
        if opened.spec.core_scheduling {
            // Its one thread waits for its launch: the threads that it starts have the cookie too.
            cookies.borrow_mut().push(core_scheduling::isolate(process.pid)?);
        }
        Ok(process)
    }
}

impl RunningBoot<'_> {
    /// Receives the home's reports until it has ended. Returns the ending of the VM.
    pub(super) fn follow(mut self, progress: &mut impl FnMut(Progress<'_>)) -> Result<Ending, RunError> {
        let (opened, Vm { handle, .. }) = (self.opened, self.vm);
        let home = self.home.clone();
        let ports = ports::Service::start(self.ports.try_clone()?, opened.ports.try_clone()?)?;
        let (mut reported, mut refused, mut is_broken) = (None, None, false);
        let mut full_disks = FullDisks::default();
        loop {
            let now = Instant::now();
            if let Some(disks) = full_disks.take_due(now) {
                progress(Progress::FullDisks(disks));
            }
            if let Some(due) = full_disks.due(now)
                && matches!(self.reports.wait_until(due), Ok(false))
            {
                continue;
            }
            let Some(report) = self.reports.next_report() else {
                break;
            };
            match report {
                // A shard runs once: one that reports it again could rewrite the user's journal without end.
                Report::Running { .. } if self.ran => {
                    is_broken = true;
                    break;
                }
                Report::Running {
                    sandbox_missing,
                    sandbox_notes,
                    versions,
                } => {
                    // Before the VM is left to a successor, which has to know it.
                    home.note_versions(versions);
                    self.begin((sandbox_missing, sandbox_notes), progress);
                }
                Report::Answer { to, answer } => {
                    let paused = handle.state().paused_by(to, &answer);
                    // The client that waits for the answer finds the record true.
                    paused
                        .iter()
                        .for_each(|paused| progress(Progress::Paused(*paused)));
                    let files = self.reports.take_files();
                    handle.state().note_answer_with_files(to, answer, files);
                    handle.changed();
                }
                Report::FullDisks { disks } => {
                    full_disks.report(names_of_disks(&disks, &opened.launch.disks));
                }
                Report::Ended(how) => {
                    reported = Some(how);
                    break;
                }
                Report::Unlike { versions } => {
                    // Later it makes no sense: then the shard is broken.
                    is_broken = self.ran;
                    refused = (!self.ran).then(|| home.program.unlike(versions));
                    break;
                }
            }
        }
        fault_point!(boot_ended);
        drop(self.prepared.clock_keeper.take());
        handle.end_freezable();
        handle.end_orders();
        // A broken shard sends no further reports.
        let gone = if reported.is_none() {
            home.end_without_report(is_broken || self.reports.is_broken())
        } else {
            home.wait()
        };
        drop(ports);
        self.ending(reported, refused, gone)
    }

    /// Handles the report that the vCPUs are about to run.
    fn begin(
        &mut self,
        (mut missing, notes): (Vec<String>, Vec<String>),
        progress: &mut impl FnMut(Progress<'_>),
    ) {
        let Vm { handle, .. } = self.vm;
        self.ran = true;
        handle.state().runs = true;
        handle.pin_again();
        handle.report_change(VmChange::Booted);
        let prepared = &mut self.prepared;
        prepared.clock_keeper.iter().for_each(ClockKeeper::begin);
        missing.append(&mut prepared.missing_elsewhere);
        let boot = LeaveBoot {
            home: &self.home,
            killed_before: self.killed_before,
            handover: &self.handover,
            ports: &self.ports,
        };
        let what = Leave {
            handle,
            programs: self.vm.programs,
            opened: self.opened,
            boot: Some(boot),
            first: None,
        };
        // This is before the client learns that the VM runs, and lets it outlive this process.
        let left = self.vm.monitor.map(|monitor| monitor.leave(&what, self.keeper));
        let is_left = matches!(left, Some(Ok(())));
        fault_point!(boot_left);
        if let Some(Err(error)) = left {
            let line =
                format!("the VM will end with this process, which can't leave it to a successor: {error}");
            self.opened.log.note(&line);
            // With the record of the time before this boot a successor would boot the VM again.
            if let Err(error) = self.keeper.clear() {
                self.opened
                    .log
                    .note(&format!("its keeper still has the former state: {error}"));
            }
        }
        let cards: Vec<u32> = self.opened.card_processes().map(ServiceProcess::id).collect();
        let prepared = &self.prepared;
        progress(Progress::Booted(Booted {
            pid: self.home.pid,
            keeper: self.keeper.pid(),
            cards: &cards,
            parts: &prepared.part_pids,
            sandbox_missing: &missing,
            sandbox_notes: &notes,
            core_cookies: &prepared.cookies,
            is_left,
        }));
        fault_point!(boot_told);
        // An order to end that came before could not reach the shard.
        if handle.state().is_to_end() {
            let _ = handle.state().order_to_quit();
        }
        // Most code of a start is not needed until the next one.
        page::program::release_after_start();
    }

    /// The ending of a VM whose home sent this last report, and whose process ended so.
    fn ending(
        self,
        reported: Option<Ending>,
        refused: Option<ProgramError>,
        gone: String,
    ) -> Result<Ending, RunError> {
        let (Vm { handle, .. }, ran) = (self.vm, self.ran);
        // Before the shard ran, the status may be another program's.
        let mut ending = reported.or_else(|| self.home.ending_of_exit(&gone).filter(|_| ran));
        let is_out_of_memory = killed_for_memory(handle) > self.killed_before;
        let (parts, was_told, was_killed) = {
            let mut state = handle.state();
            (state.home, state.runs) = (None, false);
            if ending.is_none() && state.is_cut_off {
                ending = Some(Ending::Quit);
            }
            (state.parts.take(), state.ending, state.is_killed)
        };
        handle.report_change(VmChange::Ended);
        let cause = parts.and_then(|parts| parts.end(ending.as_ref()));
        if let Some(detail) = handle.state().lost.clone() {
            return Ok(Ending::ShardFailed { detail });
        }
        if let Some(cause) = of_part(ending.as_ref(), cause, was_told) {
            return Ok(cause);
        }
        if let Some(refused) = refused {
            return Err(refused.into());
        }
        if let (Some(Ending::ShardFailed { detail }), false) = (&ending, ran) {
            return Err(RunError::Refused {
                kernel: self.opened.kernel.clone(),
                detail: detail.clone(),
            });
        }
        Ok(ending.unwrap_or_else(|| of_silent(gone, was_killed, is_out_of_memory)))
    }
}

/// Number of the VM's processes that the kernel has killed for the VM's limit of memory.
pub(super) fn killed_for_memory(handle: &VmHandle) -> u64 {
    let group = handle.state().group.clone();
    group.map_or(0, |group| group.killed_for_memory())
}

/// The names of the disks with these numbers. A shard under a guest's control may report any number.
fn names_of_disks(numbers: &[u16], disks: &[DiskLaunch]) -> Vec<String> {
    let is_named = |number: &usize| numbers.iter().any(|named| usize::from(*named) == *number);
    let named = disks.iter().enumerate().filter(|(number, _)| is_named(number));
    named.map(|(_, disk)| disk.id.clone()).collect()
}

/// Starts the shards beside the home, each in its cell, and waits until they are ready. Returns the missing
/// layers of the sandboxes on other hosts, too.
fn start_parts(
    opened: &VmResources,
    start: impl Fn(usize) -> Result<ShardProcess, RunError>,
    span: &Span,
    boot: &Boot,
) -> Result<(Vec<SecondaryShard>, Vec<String>), RunError> {
    let (mut parts, mut missing_elsewhere) = (Vec::new(), Vec::new());
    for (shard, cell) in span.cells().into_iter().enumerate().skip(1) {
        let refused = |detail| RunError::Refused {
            kernel: opened.kernel.clone(),
            detail,
        };
        if let Some(remote) = span.remote(shard) {
            let place = remote.endpoint().to_string();
            let told = boot.remote(span, shard, &opened.launch);
            let told = told.ok_or_else(|| refused(format!("{place}: it has no coherent memory")))?;
            let started = remote.start(told);
            started.map_err(|error| refused(format!("{place}: {error}")))?;
            let part = SecondaryShard::There(remote.clone());
            missing_elsewhere.extend(part.wait_until_ready().map_err(refused)?);
            parts.push(part);
            continue;
        }
        span.settle(shard)?;
        let process = start(shard)?;
        let kvm = opened.files[opened.launch.kvm.0].as_fd();
        let sandbox = process.sandbox.clone();
        let (launch, files) = boot.part(shard, &opened.launch, kvm, process.log.as_fd(), sandbox);
        // A shard that dies at once breaks the socket; its log has the reason.
        let _ = process.link.launch(&Launch::Secondary(Box::new(launch)), &files);
        let part = SecondaryShard::Here { cell, process };
        part.wait_until_ready().map_err(refused)?;
        parts.push(part);
    }
    Ok((parts, missing_elsewhere))
}
