//! One run of the program under one monitor, with the pages that were moved meanwhile.

use std::process::Stdio;
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::guest_process::GuestProcess;
use serde_json::Value;

use crate::Environment;
use crate::kinds::Kind;
use crate::mirrorball::Mirrorball;
use crate::qemu::Qemu;

/// Time limit of a guest.
pub const LIMIT: Duration = Duration::from_secs(900);
/// Loops of the program: one writes, one checks, as in the paper.
const LOOPS: u64 = 2;
/// Words of the kernel's command line in every run.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=t tsc=reliable no_timer_check rdinit=/bench";

/// Pages that a monitor, or the host for it, has moved between memory and its paging file or swap.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostPages {
    /// Pages that were read.
    pub read: u64,
    /// Pages that were written.
    pub written: u64,
    /// Pages that the guest swapped without I/O. None without a virtual paging disk.
    pub without_io: Option<u64>,
    /// Faults of the guest. None where the host's kernel answers them.
    pub faults: Option<Faults>,
}

/// Faults that a monitor has answered, by kind, and pages that left memory without a write.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// First accesses to pages of zeroes.
    pub zero: u64,
    /// Accesses to pages that waited in memory for a second chance.
    pub second_chance: u64,
    /// First accesses to pages that were read ahead.
    pub read_ahead: u64,
    /// Accesses to pages that had to be read.
    pub with_io: u64,
    /// Pages that left memory without a write, as they were unchanged since they were read.
    pub unchanged_pages: u64,
}

impl Faults {
    fn since(self, before: Self) -> Self {
        Self {
            zero: self.zero.saturating_sub(before.zero),
            second_chance: self.second_chance.saturating_sub(before.second_chance),
            read_ahead: self.read_ahead.saturating_sub(before.read_ahead),
            with_io: self.with_io.saturating_sub(before.with_io),
            unchanged_pages: self.unchanged_pages.saturating_sub(before.unchanged_pages),
        }
    }
}

impl HostPages {
    /// Pages that were moved since `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            read: self.read.saturating_sub(before.read),
            written: self.written.saturating_sub(before.written),
            without_io: self
                .without_io
                .map(|pages| pages.saturating_sub(before.without_io.unwrap_or(0))),
            faults: self
                .faults
                .map(|faults| faults.since(before.faults.unwrap_or_default())),
        }
    }
}

/// Figures of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Time of all loops, seconds by the host's clock.
    pub run_s: f64,
    /// Pages that the host moved.
    pub host: HostPages,
    /// Pages that the guest read from its swap.
    pub guest_read: u64,
    /// Pages that the guest wrote to its swap.
    pub guest_written: u64,
}

impl Sample {
    /// Pages of I/O: those that the host moved, and those that the guest moved to an ordinary disk.
    pub fn io_pages(&self, kind: Kind) -> u64 {
        let guest = match kind.has_ordinary_disk() {
            true => self.guest_read + self.guest_written,
            false => 0,
        };
        self.host.read + self.host.written + guest
    }
}

/// Figures of a run, or the reason why the host does not allow it.
#[derive(Clone, Debug)]
pub enum Run {
    /// The program ran.
    Done(Sample),
    /// The host lacks something.
    Refused(String),
}

/// A guest under some monitor.
pub trait Host {
    /// The guest, whose console is attached.
    fn guest(&mut self) -> &mut GuestProcess;

    /// Limits the guest's memory in the host's, and waits until the rest has left.
    fn limit(&mut self) -> Outcome<()>;

    /// Pages moved so far.
    fn pages(&self) -> Outcome<HostPages>;

    /// Waits for the guest's end.
    fn end(&mut self) -> Outcome<()> {
        self.guest().end()
    }
}

/// Words of the kernel's command line for a guest of this kind.
pub fn cmdline(environment: &Environment, kind: Kind) -> String {
    let swap = match kind.guest_swaps() {
        true => " bench.swap",
        false => "",
    };
    let mib = environment.sizes.array_mib;
    format!("{CMDLINE} bench=paging bench.mib={mib} bench.loops={LOOPS}{swap}")
}

/// Starts a guest by `command`, whose console is this process's.
pub fn start(command: &mut std::process::Command) -> Outcome<GuestProcess> {
    GuestProcess::start(command.stdin(Stdio::piped()), LIMIT)
}

/// Runs the program once.
pub fn take(environment: &Environment, kind: Kind) -> Outcome<Run> {
    let sample = match kind.is_qemu() {
        true => match Qemu::start(environment, kind)? {
            Ok(qemu) => measure(qemu, kind)?,
            Err(reason) => return Ok(Run::Refused(reason)),
        },
        false => match Mirrorball::start(environment, kind)? {
            Ok(mirrorball) => measure(mirrorball, kind)?,
            Err(reason) => return Ok(Run::Refused(reason)),
        },
    };
    Ok(Run::Done(sample))
}

fn measure(mut host: impl Host, kind: Kind) -> Outcome<Sample> {
    let (ready, booted) = host.guest().wait_for("BENCH ready")?;
    let ready: Value = serde_json::from_str(&ready)?;
    if kind == Kind::PagingDisk && ready["disk"] != "paging" {
        return Err(format!("the guest's disk is not the paging disk: {ready}").into());
    }
    host.limit()?;
    eprintln!(
        "bench-paging: ready after {:.1} s, limited after {:.1} s: {ready}",
        booted.as_secs_f64(),
        host.guest().age().as_secs_f64()
    );
    let before = host.pages()?;
    let start = Instant::now();
    host.guest().send_line()?;
    let (answer, _) = host.guest().wait_for("BENCH ")?;
    let run_s = start.elapsed().as_secs_f64();
    let moved = host.pages()?.since(before);
    host.guest().send_line()?;
    host.end()?;
    let answer: Value = serde_json::from_str(&answer).map_err(|error| format!("{error}: {answer}"))?;
    eprintln!("bench-paging: {answer}");
    let number = |name: &str| {
        let number = answer[name].as_u64();
        number.ok_or_else(|| format!("the guest does not report {name}: {answer}"))
    };
    Ok(Sample {
        run_s,
        host: moved,
        guest_read: number("swapped_in_pages")?,
        guest_written: number("swapped_out_pages")?,
    })
}
