//! `console`, `logs`, `exec`, `stop`, `kill`, `pause`, `resume`, `reset`, `nmi`, `wait`, `balloon`, `move`:
//! commands for running VMs.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use agent::client::ClientError;
use agent::protocol::Attached;
use config::cpulist;
use miette::{IntoDiagnostic, Result, miette};
use operations::placement::placed_line;
use registry::console::{FOLLOW, LOG};
use registry::control::{Answer, Request, VCPU_STOP_MS_MAX, ask};
use registry::kill::Killed;

use super::execution_site::{Found, find};
use crate::attach::{AttachEnd, attach, rejoin};
use crate::{exit, guest};

/// Time limit for a VM to carry out an immediate order.
pub(super) const ORDER_LIMIT: Duration = Duration::from_secs(10);

/// Time limit for a reset VM to start again.
const RESET_LIMIT: Duration = Duration::from_secs(65);

macro_rules! here {
    ($name:expr) => {
        match find($name)? {
            Found::Here(folder) => folder,
            Found::Elsewhere(code) => return Ok(code),
        }
    };
}

/// Attaches this terminal to a VM's console.
pub fn console(name: &str) -> Result<ExitCode> {
    let folder = here!(name);
    eprintln!("mirrorball: console of {name}; Ctrl-] leaves it");
    match attach(&folder).map_err(|error| miette!("{name}: its console: {error}"))? {
        AttachEnd::Detached => eprintln!("\r\nmirrorball: left {name} running"),
        AttachEnd::Ended => eprintln!("\r\nmirrorball: {name} has ended"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the output of a VM's console.
pub fn logs(name: &str, follow: bool) -> Result<ExitCode> {
    let folder = here!(name);
    let mut console = UnixStream::connect(folder.join("console.sock")).into_diagnostic()?;
    console
        .write_all(&[if follow { FOLLOW } else { LOG }])
        .into_diagnostic()?;
    let mut output = std::io::stdout().lock();
    let mut buffer = [0; 16 << 10];
    loop {
        let count = match console.read(&mut buffer) {
            Ok(count @ 1..) => count,
            // The monitor is gone. A running VM gets another one soon.
            _ if follow => match rejoin(&folder) {
                Ok(next) => {
                    console = next;
                    continue;
                }
                Err(_) => break,
            },
            read => match read.into_diagnostic()? {
                0 => break,
                count => count,
            },
        };
        output
            .write_all(&buffer[..count])
            .and_then(|()| output.flush())
            .into_diagnostic()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A program of `exec`.
pub enum Program<'a> {
    /// A program that starts.
    New {
        /// The program and its arguments.
        argv: &'a [String],
        /// Whether it has a terminal if this process has one at both ends.
        has_terminal: bool,
        /// Id under which it is kept if the connection is lost.
        keep: Option<&'a str>,
    },
    /// A program that is kept under this id.
    Kept(&'a str),
}

/// Runs a program in a VM, or goes on with one.
pub fn exec(name: &str, wait: Option<Duration>, program: &Program<'_>) -> Result<ExitCode> {
    let folder = here!(name);
    let agent = guest::connect_booting(name, &folder, wait)?;
    let (status, id) = match *program {
        Program::New {
            argv,
            has_terminal,
            keep,
        } => {
            let request = guest::request(argv, has_terminal);
            let status = match keep {
                None => agent::client::exec(agent, &request),
                Some(id) => agent::client::exec_kept(agent, id, &request),
            };
            (status, keep)
        }
        Program::Kept(id) => (agent::client::attach(agent, id, note_dropped), Some(id)),
    };
    let status = status.map_err(|error| match (&error, id) {
        (ClientError::Io(_), Some(id)) => {
            let help = format!("the program runs on for a minute: `mirrorball exec {name} --attach {id}`");
            miette!(help = help, "{name}: the connection to the guest's agent is lost")
        }
        _ => guest::explain(name, error),
    })?;
    Ok(ExitCode::from(status.code()))
}

/// Reports that output of a kept program is missing.
fn note_dropped(attached: Attached) {
    if attached.dropped_bytes > 0 {
        let bytes = attached.dropped_bytes;
        eprintln!("mirrorball: {bytes} bytes of its output were dropped while it had no client");
    }
}

/// Presses the power button; kills the VM when it does not end in time.
pub fn stop(name: &str, folder: &Path, limit: u64) -> Result<ExitCode> {
    let stopped = ask(folder, &Request::Stop { limit_s: limit }, None);
    match stopped.map_err(|error| unreachable(name, &error))? {
        Answer::Ended { killed: true } => {
            eprintln!("mirrorball: {name} did not power off within {limit} s and was killed");
            Ok(ExitCode::from(exit::LIMIT))
        }
        answer => done(name, answer),
    }
}

/// Ends a VM at once.
pub fn kill(name: &str, folder: &Path) -> Result<ExitCode> {
    match registry::kill::kill(folder).map_err(|error| unreachable(name, &error))? {
        Killed::Served(answer) => done(name, answer),
        Killed::Forced => {
            eprintln!(
                "mirrorball: the process that serves {name} does not answer; {name} was killed without it"
            );
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Sets a VM's balloon.
pub fn balloon(name: &str, bytes: u64) -> Result<ExitCode> {
    let folder = here!(name);
    done(
        name,
        ask(&folder, &Request::Balloon { bytes }, Some(ORDER_LIMIT)).into_diagnostic()?,
    )
}

/// Flags of `move`.
#[derive(Debug, clap::Args)]
pub struct MoveArgs {
    /// Name of the VM
    #[arg(required_unless_present = "region")]
    vm: Option<String>,
    /// Number of the vCPU
    #[arg(long, required_unless_present = "region")]
    vcpu: Option<u8>,
    /// Shared region whose memory moves to that of a cell
    #[arg(long, conflicts_with_all = ["vm", "vcpu", "cpu"])]
    region: Option<String>,
    #[command(flatten)]
    to: MoveTarget,
}

/// Target of `move`: one of these.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct MoveTarget {
    /// The cell to run in, of those that the VM spans; or the cell whose memory the region takes
    #[arg(long)]
    cell: Option<u16>,
    /// The CPU of the host to run on
    #[arg(long)]
    cpu: Option<usize>,
}

/// Moves a vCPU to a CPU of the host, or to another of the cells that its VM spans, or a shared region's
/// memory to that of a cell.
pub fn move_by(args: &MoveArgs) -> Result<ExitCode> {
    match (&args.region, &args.vm, args.vcpu, &args.to) {
        (Some(region), _, _, MoveTarget { cell: Some(cell), .. }) => {
            super::cluster::move_region(region, *cell)
        }
        (None, Some(vm), Some(vcpu), MoveTarget { cpu: Some(cpu), .. }) => move_to_cpu(vm, vcpu, *cpu),
        (None, Some(vm), Some(vcpu), MoveTarget { cell: Some(cell), .. }) => move_to_cell(vm, vcpu, *cell),
        // The parser refuses other combinations.
        _ => Err(miette!(
            "name a VM, a vCPU and its target, or a region and a cell"
        )),
    }
}

fn move_to_cpu(name: &str, vcpu: u8, cpu: usize) -> Result<ExitCode> {
    let folder = here!(name);
    let answer = ask(&folder, &Request::Place { vcpu, cpu }, Some(ORDER_LIMIT))
        .map_err(|error| unreachable(name, &error))?;
    if let Answer::Placed(placement) = &answer {
        println!("{}", placed_line(name, vcpu, cpu, placement));
        return Ok(ExitCode::SUCCESS);
    }
    done(name, answer)
}

fn move_to_cell(name: &str, vcpu: u8, cell: u16) -> Result<ExitCode> {
    let folder = here!(name);
    let answer = ask(&folder, &Request::Move { vcpu, cell }, Some(ORDER_LIMIT)).into_diagnostic()?;
    if let Answer::Moved {
        still_ns,
        dropped_pin,
    } = &answer
    {
        let still_us = still_ns.div_ceil(1000);
        println!("vCPU {vcpu} of {name} runs in cell {cell}; it stood still for {still_us} us");
        if let Some(cpus) = dropped_pin {
            let cpus = cpulist::write(cpus);
            println!("its pin to CPUs {cpus} of the host is dropped: they are another cell's");
        }
    }
    done(name, answer)
}

/// Pauses a VM, or only a vCPU for so many milliseconds, [`VCPU_STOP_MS_MAX`] when absent.
pub fn pause(name: &str, folder: &Path, vcpu: Option<(u8, Option<u16>)>) -> Result<ExitCode> {
    let request = vcpu.map_or(Request::Pause, |(vcpu, for_ms)| Request::PauseVcpu {
        vcpu,
        for_ms: for_ms.unwrap_or(VCPU_STOP_MS_MAX),
    });
    order_in(name, folder, &request, ORDER_LIMIT)
}

/// Resumes a VM, or only a vCPU.
pub fn resume(name: &str, folder: &Path, vcpu: Option<u8>) -> Result<ExitCode> {
    let request = vcpu.map_or(Request::Resume, |vcpu| Request::ResumeVcpu { vcpu });
    order_in(name, folder, &request, ORDER_LIMIT)
}

/// Parses the length of a vCPU's stop, such as `100ms`, into milliseconds.
///
/// # Errors
/// If it has another form, or is not within 1 to [`VCPU_STOP_MS_MAX`].
pub fn stop_length(text: &str) -> Result<u16, String> {
    text.strip_suffix("ms")
        .and_then(|number| number.parse().ok())
        .filter(|length| (1..=VCPU_STOP_MS_MAX).contains(length))
        .ok_or_else(|| format!("a vCPU is stopped for 1ms to {VCPU_STOP_MS_MAX}ms at a time"))
}

/// Restarts a VM without its guest's cooperation.
pub fn reset(name: &str, folder: &Path) -> Result<ExitCode> {
    order_in(name, folder, &Request::Reset, RESET_LIMIT)
}

/// Sends each vCPU of a VM a non-maskable interrupt.
pub fn nmi(name: &str) -> Result<ExitCode> {
    order(name, &Request::Nmi, ORDER_LIMIT)
}

/// Sends an order to a VM, which has `limit` to carry it out.
pub(super) fn order(name: &str, request: &Request, limit: Duration) -> Result<ExitCode> {
    let folder = here!(name);
    order_in(name, &folder, request, limit)
}

fn order_in(name: &str, folder: &Path, request: &Request, limit: Duration) -> Result<ExitCode> {
    let answer = ask(folder, request, Some(limit)).map_err(|error| unreachable(name, &error))?;
    match answer {
        Answer::Ended { .. } => Err(miette!("{name}: the VM has ended")),
        answer => done(name, answer),
    }
}

/// States that `wait` waits for.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Awaited {
    /// The VM's vCPUs run
    Running,
    /// The guest's agent answers
    Agent,
    /// The VM has ended
    End,
}

impl Awaited {
    /// Word for a VM in this state.
    pub fn done(self) -> &'static str {
        match self {
            Self::Running => "runs",
            Self::Agent => "its agent answers",
            Self::End => "ended",
        }
    }
}

/// Waits for a state of a VM.
pub fn wait(name: &str, folder: &Path, awaited: Awaited, limit_s: u64) -> Result<ExitCode> {
    let request = match awaited {
        Awaited::Running => Request::AwaitRunning { limit_s },
        Awaited::End => Request::AwaitEnd { limit_s },
        Awaited::Agent => {
            return match guest::await_agent(folder, Duration::from_secs(limit_s)) {
                Some(true) => Ok(ExitCode::SUCCESS),
                Some(false) => Err(miette!("{name}: the VM has ended")),
                None => Ok(late(name, "no agent answered", limit_s)),
            };
        }
    };
    let answer = ask(folder, &request, None).map_err(|error| unreachable(name, &error))?;
    match (awaited, answer) {
        (Awaited::Running, Answer::TimedOut) => Ok(late(name, "its vCPUs did not run", limit_s)),
        (_, Answer::TimedOut) => Ok(late(name, "it did not end", limit_s)),
        (Awaited::Running, Answer::Ended { .. }) => Err(miette!("{name}: the VM has ended")),
        (_, answer) => done(name, answer),
    }
}

fn late(name: &str, what: &str, limit_s: u64) -> ExitCode {
    eprintln!("mirrorball: {name}: {what} within {limit_s} s");
    ExitCode::from(exit::LIMIT)
}

fn unreachable(name: &str, error: &std::io::Error) -> miette::Report {
    miette!(
        help = "help: `mirrorball ps` lists the VMs that run",
        "{name}: its monitor can't be asked: {error}"
    )
}

fn done(name: &str, answer: Answer) -> Result<ExitCode> {
    match answer {
        Answer::Refused { why } => Err(miette!("{name}: {why}")),
        Answer::MemoryPlaced(report) => {
            super::update::print_memory(name, &report);
            Ok(ExitCode::SUCCESS)
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_of_a_vcpu_is_1_to_100_ms_and_refused_in_one_line_otherwise() {
        assert_eq!(stop_length("1ms"), Ok(1));
        assert_eq!(stop_length("100ms"), Ok(100));
        for wrong in ["", "ms", "0ms", "101ms", "100", "1s", "-1ms", "1.5ms", "99999ms"] {
            let why = stop_length(wrong).unwrap_err();
            assert_eq!(why, "a vCPU is stopped for 1ms to 100ms at a time", "{wrong}");
        }
    }
}
