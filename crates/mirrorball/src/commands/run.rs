//! `mirrorball run`: starts VMs under a monitor of their own, and follows them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cell::control::{Request, ask};
use cell::ending;
use cell::lease::{Lease, OWN_PROGRAM};
use cell::memory_use::{VmMemory, read_one};
use cell::monitor::{Batch, Event};
use cell::registry::Registry;
use config::{HostFacts, SpanSpec, VmSpec};
use miette::{IntoDiagnostic, Report, Result, miette};
use shard::launch::Ending;

use super::flags::{self, RunArgs};
use super::mem::mib;
use super::{check, hosts, place};
use crate::attach::{Left, attach};
use crate::{exit, guest, progress};

/// How long a guest whose disks keep its writes may take to power off after its command.
const POWER_OFF_LIMIT_S: u64 = 60;

/// How long a guest whose agent broke off may take to end by itself, and so to say why.
const TROUBLE_GRACE: Duration = Duration::from_secs(5);

/// How long a console may take to end once its VM has.
const CONSOLE_END_LIMIT: Duration = Duration::from_secs(2);

/// What happens to the VMs.
enum News {
    /// The monitor says so.
    Monitor(Event),
    /// The monitor is gone.
    MonitorGone,
    /// A command in a guest is done.
    Command {
        name: String,
        result: Result<Done, Trouble>,
    },
    /// The terminal left the console.
    Console(std::io::Result<Left>),
}

/// A command that ran in a guest.
struct Done {
    status: u8,
    seconds: f64,
    last_line: String,
    /// What its VM took of the host's memory then.
    memory: Option<Box<VmMemory>>,
}

/// Why a command did not come to an end.
struct Trouble {
    /// The exit status it amounts to.
    status: u8,
    report: Report,
}

/// One VM as this command follows it.
#[derive(Default)]
struct Followed {
    folder: PathBuf,
    cell: Option<u16>,
    command: Option<Vec<String>>,
    asked: bool,
    running_s: Option<f64>,
    keeps_writes: bool,
    done: Option<Done>,
    trouble: Option<Trouble>,
    ended: Option<Ending>,
    seconds: f64,
}

/// Starts the VMs; the exit status is that of the first that did not end well.
pub fn run(args: &RunArgs) -> Result<ExitCode> {
    let spanned = args.span.as_ref().and_then(SpanSpec::cells);
    let home = args.cell.or_else(|| spanned?.first().copied());
    if let Some(code) = home.map(hosts::at_cell).transpose()?.flatten() {
        return Ok(code);
    }
    let vms = name(specs(args)?, args.count);
    if home.is_none()
        && let Some(code) = at_another_host(&vms)?
    {
        return Ok(code);
    }
    if let Some(code) = place::enter_lab(args.lab)? {
        return Ok(code);
    }
    let lease = Lease::start(
        Path::new(OWN_PROGRAM),
        &Batch {
            vms: vms.clone(),
            source: None,
        },
    )
    .map_err(|error| {
        miette!(
            help = "see whether the host is out of processes",
            "the monitor does not start: {error}"
        )
    })?;
    let (sender, news) = mpsc::channel();
    let (events, from_monitor) = (lease.events().into_diagnostic()?, sender.clone());
    std::thread::spawn(move || {
        for event in events {
            if from_monitor.send(News::Monitor(event)).is_err() {
                return;
            }
        }
        // Nobody listens any more when this fails.
        let _ = from_monitor.send(News::MonitorGone);
    });
    let vms = vms
        .into_iter()
        .map(|(name, spec)| {
            (
                name,
                Followed {
                    command: spec.command,
                    ..Followed::default()
                },
            )
        })
        .collect();
    let boot_limit = Duration::from_secs(args.boot_limit);
    Follower {
        lease,
        sender,
        vms,
        boot_limit,
        detach: args.detach,
        start: Instant::now(),
        console: None,
    }
    .follow(&news)
}

/// Runs this same command where its VMs' files say, if that is another host.
fn at_another_host(vms: &[(String, VmSpec)]) -> Result<Option<ExitCode>> {
    let cells: BTreeSet<u16> = vms.iter().filter_map(|(_, spec)| spec.home_cell()).collect();
    match cells.first() {
        Some(cell) if cells.len() == 1 && vms.iter().all(|(_, spec)| spec.home_cell().is_some()) => {
            hosts::at_cell(*cell)
        }
        _ => Ok(None),
    }
}

fn specs(args: &RunArgs) -> Result<Vec<VmSpec>> {
    if !args.files.is_empty() {
        let mut specs: Vec<VmSpec> = check::read(&args.files)?
            .into_iter()
            .map(|file| file.spec)
            .collect();
        if !args.command.is_empty() {
            specs
                .iter_mut()
                .for_each(|spec| spec.command = Some(args.command.clone()));
        }
        return Ok(specs);
    }
    let spec = flags::spec(args)?;
    config::check_host(&spec, None, &HostFacts::of_this_host())?;
    Ok(vec![spec])
}

/// Gives every VM its name: its own, with a number when there are several of it, or one made of the image's.
fn name(specs: Vec<VmSpec>, count: Option<u16>) -> Vec<(String, VmSpec)> {
    let pid = std::process::id();
    let mut vms = Vec::new();
    for (index, spec) in specs.into_iter().enumerate() {
        let base = spec.name.clone().unwrap_or_else(|| {
            let image = spec.image.as_deref().unwrap_or("vm");
            if index == 0 {
                format!("{image}-{pid}")
            } else {
                format!("{image}-{pid}-{index}")
            }
        });
        match count {
            None => vms.push((base, spec)),
            Some(count) => vms.extend((0..count).map(|number| (format!("{base}-{number}"), spec.clone()))),
        }
    }
    vms
}

/// Follows VMs from their start to their end.
struct Follower {
    lease: Lease,
    sender: mpsc::Sender<News>,
    vms: BTreeMap<String, Followed>,
    boot_limit: Duration,
    detach: bool,
    start: Instant,
    /// Joins this terminal to the console of the only VM.
    console: Option<JoinHandle<()>>,
}

impl Follower {
    fn alone(&self) -> bool {
        self.vms.len() == 1
    }

    fn follow(mut self, news: &mpsc::Receiver<News>) -> Result<ExitCode> {
        let result = self.follow_to_end(news);
        self.give_terminal_back();
        result
    }

    /// Waits until the console's thread has seen its end too and made the terminal what it was.
    fn give_terminal_back(&mut self) {
        let deadline = Instant::now() + CONSOLE_END_LIMIT;
        if let Some(console) = self.console.take() {
            while !console.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    fn follow_to_end(&mut self, news: &mpsc::Receiver<News>) -> Result<ExitCode> {
        while self.vms.values().any(|vm| vm.ended.is_none()) {
            match news.recv().into_diagnostic()? {
                News::Monitor(event) => {
                    if let Some(code) = self.event(event)? {
                        return Ok(code);
                    }
                }
                News::MonitorGone => {
                    return Err(miette!("the monitor of the VMs died; their shards died with it"));
                }
                News::Command { name, result } => self.command_done(&name, result),
                News::Console(left) => match left.into_diagnostic()? {
                    Left::Ended => {}
                    Left::Detached => {
                        self.lease.detach().into_diagnostic()?;
                        let name = self.vms.keys().next().map_or("", String::as_str);
                        eprintln!(
                            "\r\nmirrorball: left {name} running; `mirrorball console {name}` comes back to it"
                        );
                        return Ok(ExitCode::SUCCESS);
                    }
                },
            }
        }
        if !self.alone() {
            self.table();
        }
        Ok(ExitCode::from(
            self.vms
                .values()
                .map(status)
                .find(|status| *status != 0)
                .unwrap_or(0),
        ))
    }

    /// Takes an event; an exit status when this command is done with it.
    fn event(&mut self, event: Event) -> Result<Option<ExitCode>> {
        match event {
            Event::Started { name, folder, cell } => self.started(&name, folder, cell),
            Event::Running {
                name,
                sandbox_missing,
                keeps_writes,
                ..
            } => {
                return self.running(&name, &sandbox_missing, keeps_writes);
            }
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
                // Nobody listens any more once the VM has ended.
                let _ = sender.send(News::Console(attach(&folder)));
            }));
        }
    }

    fn running(&mut self, name: &str, missing: &[String], keeps_writes: bool) -> Result<Option<ExitCode>> {
        let (alone, limit, seconds) = (self.alone(), self.boot_limit, self.start.elapsed().as_secs_f64());
        let Some(vm) = self.vms.get_mut(name) else {
            return Ok(None);
        };
        vm.keeps_writes = keeps_writes;
        if vm.running_s.is_none() {
            vm.running_s = Some(seconds);
            for line in missing {
                eprintln!("mirrorball: {name}: sandbox without {line}");
            }
            if !alone {
                eprintln!("mirrorball: {name}: started");
            }
        }
        if let (Some(argv), false) = (vm.command.clone(), std::mem::replace(&mut vm.asked, true)) {
            let (name, folder, sender) = (name.to_owned(), vm.folder.clone(), self.sender.clone());
            std::thread::spawn(move || {
                let result = command(&name, &folder, &argv, limit, alone);
                sender.send(News::Command { name, result })
            });
        }
        if self.detach && self.vms.values().all(|vm| vm.running_s.is_some()) {
            self.lease.detach().into_diagnostic()?;
            for name in self.vms.keys() {
                println!("{name}");
            }
            return Ok(Some(ExitCode::SUCCESS));
        }
        Ok(None)
    }

    /// A command has ended, or could not run: so does its VM.
    fn command_done(&mut self, name: &str, result: Result<Done, Trouble>) {
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
        // Its end comes as an event; a VM that has gone already has no socket.
        std::thread::spawn(move || {
            std::thread::sleep(grace);
            ask(&folder, &end, None)
        });
    }

    fn ended(&mut self, name: &str, ending: Ending, last_lines: &[String], seconds: f64) {
        let Some(vm) = self.vms.get_mut(name) else { return };
        // After its command, or without hope for it, the VM is ended by us.
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

    /// What each VM did.
    fn table(&self) {
        println!(
            "{:<16} {:>4} {:>9} {:>11} {:>7}  {:<10} {:>8} {:>8} {:>8}  LAST LINE",
            "VM", "CELL", "TOTAL", "COMMAND", "STATUS", "END", "MEMORY", "HOST", "SHARED"
        );
        for (name, vm) in &self.vms {
            let (seconds, last) = vm
                .done
                .as_ref()
                .map_or((0.0, ""), |done| (done.seconds, done.last_line.as_str()));
            let end = match &vm.ended {
                Some(Ending::PowerOff | Ending::Reboot) => "power off",
                Some(Ending::Quit) if vm.done.is_some() => "done",
                Some(Ending::Quit) => "killed",
                Some(Ending::Panic) => "panic",
                Some(_) => "failed",
                None => "-",
            };
            let cell = vm.cell.map_or_else(|| "-".to_owned(), |cell| cell.to_string());
            let memory = vm.done.as_ref().and_then(|done| done.memory.as_deref());
            let column = |bytes: fn(&VmMemory) -> u64| {
                memory.map_or_else(|| "-".to_owned(), |memory| mib(bytes(memory)))
            };
            println!(
                "{name:<16} {cell:>4} {:>7.1} s {seconds:>9.1} s {:>7}  {end:<10} {:>8} {:>8} {:>8}  {last}",
                vm.seconds,
                status(vm),
                column(|memory| memory.memory_bytes),
                column(|memory| memory.host_bytes),
                column(VmMemory::shared_bytes),
            );
        }
        self.memory_sum();
    }

    /// What all guests had and cost; each was looked at when its command was done.
    fn memory_sum(&self) {
        let all = self
            .vms
            .values()
            .filter_map(|vm| vm.done.as_ref()?.memory.as_ref());
        let [had, host, shared] = all.fold([0; 3], |[had, host, shared], memory| {
            [
                had + memory.memory_bytes,
                host + memory.host_bytes,
                shared + memory.shared_bytes(),
            ]
        });
        if had > 0 {
            println!(
                "The guests had {} of memory, for which the host spent {}; {} of their pages were shared with the \
                 page cache of the host, and so with one another.",
                mib(had),
                mib(host),
                mib(shared)
            );
        }
    }
}

/// The exit status that a VM's end amounts to.
fn status(vm: &Followed) -> u8 {
    match (&vm.done, &vm.trouble, &vm.ended) {
        (Some(done), _, _) => done.status,
        (None, Some(trouble), Some(Ending::Quit | Ending::PowerOff)) => trouble.status,
        (None, None, Some(Ending::PowerOff)) if vm.command.is_some() => exit::FAILED,
        (None, _, Some(ending)) => ending::status(ending),
        (None, _, None) => 0,
    }
}

/// Runs a command in a guest: with this process's terminal when it is the only VM, else with its output in lines that
/// start with the VM's name.
fn command(
    name: &str,
    folder: &Path,
    argv: &[String],
    limit: Duration,
    alone: bool,
) -> Result<Done, Trouble> {
    // Of several VMs, their lines tell.
    let bar = (alone && std::io::stderr().is_terminal()).then(|| progress::spinner("the guest starts"));
    let connected = guest::connect(name, folder, limit);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let stream = connected.map_err(|report| Trouble {
        status: exit::LIMIT,
        report,
    })?;
    let start = Instant::now();
    let request = guest::request(argv, alone && std::io::stdin().is_terminal());
    let explain = |error| Trouble {
        status: exit::FAILED,
        report: guest::explain(name, error),
    };
    if alone {
        let status = agent::client::exec(stream, &request).map_err(explain)?.code();
        return Ok(Done {
            status,
            seconds: start.elapsed().as_secs_f64(),
            last_line: String::new(),
            memory: None,
        });
    }
    let (status, out, err) = agent::client::output(stream, &request, &[]).map_err(explain)?;
    let seconds = start.elapsed().as_secs_f64();
    let (out, err) = (printable(&out), printable(&err));
    out.lines().for_each(|line| println!("{name} | {line}"));
    err.lines().for_each(|line| eprintln!("{name} | {line}"));
    let last_line = out.lines().last().unwrap_or_default().to_owned();
    Ok(Done {
        status: status.code(),
        seconds,
        last_line,
        memory: memory(name),
    })
}

/// What a running VM takes of the host's memory; nothing when this user may not read it.
fn memory(name: &str) -> Option<Box<VmMemory>> {
    let running = Registry::open().and_then(|registry| registry.list()).ok()?;
    let record = running.iter().find(|record| record.name == name)?;
    read_one(record, &running).map(Box::new)
}

/// A guest's text without what a terminal would obey.
fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .filter(|&c| c == '\n' || c == '\t' || !c.is_control())
        .collect()
}
