//! Follows VMs from their start to their end.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cell::ending;
use config::VmSpec;
use miette::{IntoDiagnostic, Result, miette};
use registry::control::{Request, ask};
use registry::lease::Lease;
use registry::monitor::Event;
use registry::vms::Registry;
use shard::launch::Ending;

use super::command::{CommandFailure, CommandOutcome, command};
use super::table;
use crate::attach::{AttachEnd, attach};
use crate::commands::template::Parent;
use crate::exit;

/// Time limit in seconds for a guest with persistent disks to power off after its command.
const POWER_OFF_LIMIT_S: u64 = 60;

/// Time limit for a guest whose agent disconnected to end by itself, which gives a reason.
const TROUBLE_GRACE: Duration = Duration::from_secs(5);

/// Poll interval for VMs that ended with their monitor.
const EXIT_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum time between the removal of a VM's entry and the event of its end: cells that hang delay it.
const EVENT_LIMIT: Duration = Duration::from_secs(12);

/// Time limit for a console to end after its VM.
const CONSOLE_END_LIMIT: Duration = Duration::from_secs(2);

/// Events that the follower handles.
enum FollowEvent {
    /// Event from the monitor.
    Monitor(Event),
    /// The monitor has closed its end of the lease.
    MonitorGone,
    /// A command in a guest has ended.
    Command {
        name: String,
        result: Result<CommandOutcome, CommandFailure>,
    },
    /// A guest that resumed from a template has its own identity, or has got none.
    Renewed {
        name: String,
        start: StartReport,
        result: Result<()>,
    },
    /// The terminal left the console.
    Console(std::io::Result<AttachEnd>),
}

/// The monitor's report that a VM runs.
struct StartReport {
    sandbox_missing: Vec<String>,
    keeps_writes: bool,
}

/// One followed VM.
#[derive(Default)]
pub(super) struct Followed {
    folder: PathBuf,
    pub cell: Option<u16>,
    pub command: Option<Vec<String>>,
    /// The line about its promise of memory, if the VM has one.
    promise: Option<String>,
    asked: bool,
    /// Spec of a VM that resumes from a template and has the template's identity until now.
    unrenewed: Option<VmSpec>,
    running_s: Option<f64>,
    keeps_writes: bool,
    pub done: Option<CommandOutcome>,
    trouble: Option<CommandFailure>,
    pub ended: Option<Ending>,
    /// Time since which it is not among the running VMs.
    missed: Option<Instant>,
    pub seconds: f64,
}

/// Follows the VMs of a monitor; returns the exit status of the first that failed. `parent` is the VM of the
/// template from which they resume.
pub(super) fn follow(
    lease: Lease,
    vms: Vec<(String, VmSpec)>,
    boot_limit: Duration,
    detach: bool,
    parent: Option<Parent>,
) -> Result<ExitCode> {
    let (sender, news) = mpsc::channel();
    let (events, from_monitor) = (lease.events().into_diagnostic()?, sender.clone());
    std::thread::spawn(move || {
        for event in events {
            if from_monitor.send(FollowEvent::Monitor(event)).is_err() {
                return;
            }
        }
        // A failure means that the receiver is gone.
        let _ = from_monitor.send(FollowEvent::MonitorGone);
    });
    let vms = vms
        .into_iter()
        .map(|(name, spec)| {
            (
                name,
                Followed {
                    promise: promise(&spec),
                    command: spec.command.clone(),
                    unrenewed: parent.is_some().then_some(spec),
                    ..Followed::default()
                },
            )
        })
        .collect();
    Follower {
        lease,
        sender,
        vms,
        boot_limit,
        detach,
        parent,
        start: Instant::now(),
        console: None,
    }
    .follow(&news)
}

/// Returns the promise of a VM that has one of its own, and its worst case.
fn promise(spec: &VmSpec) -> Option<String> {
    let promised = spec.memory_min?;
    Some(format!(
        "{promised} of memory are promised, {} are needed at worst",
        spec.worst()
    ))
}

/// Follows VMs from their start to their end.
struct Follower {
    lease: Lease,
    sender: mpsc::Sender<FollowEvent>,
    vms: BTreeMap<String, Followed>,
    boot_limit: Duration,
    detach: bool,
    /// The VM of the template from which they resume.
    parent: Option<Parent>,
    start: Instant,
    /// Thread that attaches this terminal to the console of the only VM.
    console: Option<JoinHandle<()>>,
}

impl Follower {
    fn alone(&self) -> bool {
        self.vms.len() == 1
    }

    /// Whether each VM has run.
    fn all_run(&self) -> bool {
        self.vms.values().all(|vm| vm.running_s.is_some())
    }

    fn follow(mut self, news: &mpsc::Receiver<FollowEvent>) -> Result<ExitCode> {
        let result = self.follow_to_end(news);
        self.give_terminal_back();
        result
    }

    /// Waits until the console's thread has seen the end too and restored the terminal.
    fn give_terminal_back(&mut self) {
        let deadline = Instant::now() + CONSOLE_END_LIMIT;
        if let Some(console) = self.console.take() {
            while !console.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    fn follow_to_end(&mut self, news: &mpsc::Receiver<FollowEvent>) -> Result<ExitCode> {
        while self.vms.values().any(|vm| vm.ended.is_none()) {
            let news = match news.recv_timeout(EXIT_POLL_INTERVAL) {
                Ok(news) => news,
                Err(RecvTimeoutError::Timeout) => {
                    self.end_those_without_monitor();
                    continue;
                }
                Err(error) => return Err(error).into_diagnostic(),
            };
            match news {
                FollowEvent::Monitor(event) => {
                    if let Some(code) = self.event(event)? {
                        return Ok(code);
                    }
                }
                FollowEvent::MonitorGone => {
                    return Err(miette!(
                        help = "see `mirrorball events` for their ends, and start them again",
                        "the monitors of the VMs and their keepers died; the VMs ended with them"
                    ));
                }
                FollowEvent::Command { name, result } => self.command_done(&name, result),
                FollowEvent::Renewed { name, start, result } => {
                    if let Some(code) = self.renewed(&name, &start, result)? {
                        return Ok(code);
                    }
                }
                // Its socket is gone with the VM, whose end an event reports.
                FollowEvent::Console(Err(error))
                    if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {}
                FollowEvent::Console(left) => match left.into_diagnostic()? {
                    AttachEnd::Ended => {}
                    AttachEnd::Detached => {
                        self.lease.detach().into_diagnostic()?;
                        let name = self.vms.keys().next().map_or("", String::as_str);
                        eprintln!(
                            "\r\nmirrorball: left {name} running; help: `mirrorball console {name}` attaches \
                             again"
                        );
                        return Ok(ExitCode::SUCCESS);
                    }
                },
            }
        }
        if !self.alone() {
            table::print(&self.vms);
        }
        Ok(ExitCode::from(
            self.vms
                .values()
                .map(status)
                .find(|status| *status != 0)
                .unwrap_or(0),
        ))
    }

    /// Records the end of VMs that ended with their monitor, which no event reports while others run.
    fn end_those_without_monitor(&mut self) {
        let lost = |name: &str| self.lease.has_lost_monitor(name);
        if !self.vms.keys().any(|name| lost(name)) {
            return;
        }
        let Ok(records) = Registry::open().and_then(|registry| registry.list()) else {
            return;
        };
        let is_gone = |name: &str| records.iter().all(|record| record.name != name);
        for (name, vm) in self.vms.iter_mut().filter(|(_, vm)| vm.ended.is_none()) {
            if !(lost(name) && is_gone(name)) {
                vm.missed = None;
                continue;
            }
            // The event of a VM that has just ended may be in transit.
            let since = vm.missed.get_or_insert_with(Instant::now);
            if since.elapsed() > EVENT_LIMIT {
                eprintln!(
                    "mirrorball: {name}: the process that served it was killed, and the VM ended with it"
                );
                let detail = "the process that served it was killed".to_owned();
                vm.ended = Some(Ending::ShardFailed { detail });
            }
        }
    }

    /// Handles an event; returns an exit status when this command is done.
    fn event(&mut self, event: Event) -> Result<Option<ExitCode>> {
        match event {
            Event::Started { name, folder, cell } => self.started(&name, folder, cell),
            Event::Running {
                name,
                sandbox_missing,
                keeps_writes,
                ..
            } => {
                let start = StartReport {
                    sandbox_missing,
                    keeps_writes,
                };
                return self.runs(&name, start);
            }
            Event::FullDisks { name, disks } => {
                // The terminal may be raw.
                eprint!("mirrorball: {name}: {}\r\n", room(&disks));
            }
            Event::StartsAgain { name, why } => eprint!("mirrorball: {name}: {why}; it starts again\r\n"),
            Event::Paused { name, paused: true } => {
                eprint!("mirrorball: {name} is paused; `mirrorball resume {name}` lets it go on\r\n");
            }
            Event::Paused { name, paused: false } => eprint!("mirrorball: {name} goes on\r\n"),
            Event::Failed { name, why } => {
                self.lease.end();
                return Err(miette!("{name}: {why}"));
            }
            Event::Ended {
                name,
                ending,
                last_lines,
                seconds,
            } => self.ended(&name, ending, &last_lines, seconds),
        }
        Ok(None)
    }

    fn started(&mut self, name: &str, folder: PathBuf, cell: Option<u16>) {
        let alone = self.alone();
        let Some(vm) = self.vms.get_mut(name) else { return };
        vm.folder = folder.clone();
        vm.cell = cell;
        if vm.command.is_none() && alone && !self.detach {
            let sender = self.sender.clone();
            self.console = Some(std::thread::spawn(move || {
                // The receiver is gone once the VM has ended.
                let _ = sender.send(FollowEvent::Console(attach(&folder)));
            }));
        }
    }

    /// A VM runs. One that has resumed from a template gets its identity before anything else.
    fn runs(&mut self, name: &str, start: StartReport) -> Result<Option<ExitCode>> {
        let unrenewed = self.vms.get_mut(name).and_then(|vm| {
            let spec = vm.unrenewed.take()?;
            Some((spec, vm.folder.clone()))
        });
        let Some(((spec, folder), parent)) = unrenewed.zip(self.parent.clone()) else {
            return self.running(name, &start);
        };
        let (name, sender) = (name.to_owned(), self.sender.clone());
        std::thread::spawn(move || {
            let result = parent.renew(&name, &spec, &folder);
            sender.send(FollowEvent::Renewed { name, start, result })
        });
        Ok(None)
    }

    /// A guest has its own identity. One that has got none must not serve, and ends with all of the command.
    fn renewed(&mut self, name: &str, start: &StartReport, result: Result<()>) -> Result<Option<ExitCode>> {
        if self.vms.get(name).is_some_and(|vm| vm.ended.is_some()) {
            return Ok(None);
        }
        if let Err(error) = result {
            self.lease.end();
            return Err(error);
        }
        self.running(name, start)
    }

    fn running(&mut self, name: &str, report: &StartReport) -> Result<Option<ExitCode>> {
        let (alone, limit, seconds) = (self.alone(), self.boot_limit, self.start.elapsed().as_secs_f64());
        let Some(vm) = self.vms.get_mut(name) else {
            return Ok(None);
        };
        vm.keeps_writes = report.keeps_writes;
        let is_first_boot = vm.running_s.is_none();
        if is_first_boot {
            vm.running_s = Some(seconds);
            for line in &report.sandbox_missing {
                eprintln!("mirrorball: {name}: sandbox without {line}");
            }
            if let Some(promise) = &vm.promise {
                eprintln!("mirrorball: {name}: {promise}");
            }
            if !alone {
                eprintln!("mirrorball: {name}: started");
            }
        }
        if let (Some(argv), false) = (vm.command.clone(), std::mem::replace(&mut vm.asked, true)) {
            let (name, folder, sender) = (name.to_owned(), vm.folder.clone(), self.sender.clone());
            std::thread::spawn(move || {
                let result = command(&name, &folder, &argv, limit, alone);
                sender.send(FollowEvent::Command { name, result })
            });
        }
        if self.detach && self.all_run() {
            self.lease.detach().into_diagnostic()?;
            for name in self.vms.keys() {
                println!("{name}");
            }
            return Ok(Some(ExitCode::SUCCESS));
        }
        if is_first_boot && self.all_run() {
            // From now on the command passes on a console, and waits for the end.
            page::program::release_after_start();
        }
        Ok(None)
    }

    /// A command has ended or could not run, so its VM ends.
    fn command_done(&mut self, name: &str, result: Result<CommandOutcome, CommandFailure>) {
        let Some(vm) = self.vms.get_mut(name) else { return };
        let grace = match result {
            Ok(done) => {
                vm.done = Some(done);
                Duration::ZERO
            }
            Err(error) => {
                vm.trouble = Some(error);
                TROUBLE_GRACE
            }
        };
        let end = if vm.keeps_writes {
            Request::Stop {
                limit_s: POWER_OFF_LIMIT_S,
            }
        } else {
            Request::Kill
        };
        let folder = vm.folder.clone();
        // An event reports its end; a VM that is already gone has no socket.
        std::thread::spawn(move || {
            std::thread::sleep(grace);
            ask(&folder, &end, None)
        });
    }

    fn ended(&mut self, name: &str, ending: Ending, last_lines: &[String], seconds: f64) {
        let Some(vm) = self.vms.get_mut(name) else { return };
        // After its command, or after a failure, this process ends the VM.
        let expected =
            (vm.done.is_some() || vm.trouble.is_some()) && matches!(ending, Ending::Quit | Ending::PowerOff);
        if let (Some(reason), false) = (ending::reason(&ending), expected) {
            eprintln!("mirrorball: {name}: {reason}");
            for line in last_lines {
                eprintln!("  | {line}");
            }
        } else if let Some(trouble) = &vm.trouble {
            crate::complain(&trouble.report);
        } else if vm.command.is_some() && vm.done.is_none() {
            eprintln!("mirrorball: {name}: the guest powered off before its command ended");
        }
        (vm.ended, vm.seconds) = (Some(ending), seconds);
    }
}

/// Message about a changed set of full disks.
fn room(disks: &[String]) -> String {
    if disks.is_empty() {
        return "its disks have room again".to_owned();
    }
    let disks = disks.join(", ");
    format!("paused: no room on the host for writes to {disks}; they go on when there is some")
}

/// Exit status for a VM's end.
pub(super) fn status(vm: &Followed) -> u8 {
    match (&vm.done, &vm.trouble, &vm.ended) {
        (Some(done), _, _) => done.status,
        (None, Some(trouble), Some(Ending::Quit | Ending::PowerOff)) => trouble.status,
        (None, None, Some(Ending::PowerOff)) if vm.command.is_some() => exit::FAILED,
        (None, _, Some(ending)) => ending::status(ending),
        (None, _, None) => 0,
    }
}
