//! The kernel of `guest/`, which counts interrupts, in a VM on a terminal.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::command::{BOOT_LIMIT, mirrorball};
use crate::terminal::Terminal;
use crate::{Scratch, Vm, host};

/// The kernel, as `build.rs` has compiled it.
static KERNEL: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/storm"));

/// A VM that runs the kernel. Killed when dropped.
pub struct Storm {
    terminal: Terminal,
    /// The VM, which boots the storm's kernel.
    pub vm: Vm,
}

/// The size of a storm.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Number of vCPUs.
    pub cpus: usize,
    /// Epochs; 0 for any number until [`Storm::stop`].
    pub epochs: u32,
    /// Interrupts that each CPU sends in an epoch.
    pub sweeps: u32,
}

impl Storm {
    /// Starts it with these flags of `run`, and waits until all CPUs have started.
    #[track_caller]
    pub fn start(scratch: &Scratch, name: &str, extent: Extent, flags: &[&str]) -> Self {
        Self::run(scratch, name, extent.cpus, &extent.words(), flags)
    }

    /// Starts it with accesses that no kernel makes, which counts nothing. It ends in any way, or is killed.
    #[track_caller]
    pub fn hostile(scratch: &Scratch, name: &str, cpus: usize, flags: &[&str]) -> Self {
        let words = format!("storm.cpus={cpus} storm.hostile=1");
        Self::run(scratch, name, cpus, &words, flags)
    }

    /// Starts it to count the `cpus` CPUs of a machine, and returns its counts.
    #[track_caller]
    pub fn enumerate(scratch: &Scratch, name: &str, cpus: usize, limit: Duration) -> Counts {
        let words = format!("storm.enumerate={cpus}");
        let (mut terminal, vm) = Self::launch(scratch, name, cpus, &words, &[]);
        let status = terminal.wait(limit);
        drop(vm);
        Counts::of_ended(status, &terminal.seen(), "enumeration ends")
    }

    #[track_caller]
    fn run(scratch: &Scratch, name: &str, cpus: usize, words: &str, flags: &[&str]) -> Self {
        let (mut terminal, vm) = Self::launch(scratch, name, cpus, words, flags);
        terminal.expect("storm begins", BOOT_LIMIT);
        for cpu in 1..cpus {
            assert!(
                terminal.seen().contains(&format!("CPU number={cpu}\r")),
                "CPU {cpu} did not say that it has started:\n{}",
                terminal.seen()
            );
        }
        Self { terminal, vm }
    }

    fn launch(scratch: &Scratch, name: &str, cpus: usize, words: &str, flags: &[&str]) -> (Terminal, Vm) {
        let kernel = scratch.write("storm", KERNEL);
        let name = format!("t-{name}-{}", std::process::id());
        let count = cpus.to_string();
        let kernel = kernel.to_str().expect("UTF-8");
        let run = ["run", "--lab", "never", "--name", &name, "--net", "none"];
        let machine = [
            "--memory",
            "256M",
            "--cpus",
            &count,
            "--kernel",
            kernel,
            "--cmdline",
            words,
        ];
        let vm = Vm::named(&name);
        (Terminal::mirrorball(&[&run[..], &machine, flags].concat()), vm)
    }

    /// Makes the present epoch the last one.
    #[track_caller]
    pub fn stop(&mut self) {
        self.terminal.send(b"q");
    }

    /// Waits for its end, whatever the cause; returns the exit status of its `run`, and the output.
    #[track_caller]
    pub fn ended(mut self, limit: Duration) -> (i32, String) {
        (self.terminal.wait(limit), self.terminal.seen())
    }

    /// Kills it if it has not ended; returns the exit status of its `run`, and the output.
    #[track_caller]
    pub fn end(mut self, limit: Duration) -> (i32, String) {
        let _ = mirrorball(["kill", self.vm.name()]).run();
        (self.terminal.wait(limit), self.terminal.seen())
    }

    /// Its counts, when it has ended.
    #[track_caller]
    pub fn counts(mut self, limit: Duration) -> Counts {
        let status = self.terminal.wait(limit);
        Counts::of_ended(status, &self.terminal.seen(), "storm ends")
    }
}

impl Extent {
    fn words(self) -> String {
        let Self { cpus, epochs, sweeps } = self;
        format!("storm.cpus={cpus} storm.epochs={epochs} storm.sweeps={sweeps}")
    }
}

/// Counts of a storm.
#[derive(Debug)]
pub struct Counts {
    line: String,
    numbers: BTreeMap<String, u64>,
}

impl Counts {
    /// The counts on the line that begins with `start`, from the terminal of a kernel that turned its machine
    /// off.
    #[track_caller]
    fn of_ended(status: i32, seen: &str, start: &str) -> Self {
        assert_eq!(status, 0, "exit status; the terminal:\n{seen}");
        let line = seen.lines().find_map(|line| line.trim().strip_prefix(start));
        Self::parse(line.unwrap_or_else(|| panic!("no counts at the end:\n{seen}")))
    }

    fn parse(line: &str) -> Self {
        let numbers = line.split_whitespace().filter_map(|word| word.split_once('='));
        let numbers = numbers.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)));
        Self {
            line: line.trim().to_owned(),
            numbers: numbers.collect(),
        }
    }

    /// One of the counts.
    #[track_caller]
    pub fn of(&self, name: &str) -> u64 {
        let value = self.numbers.get(name);
        *value.unwrap_or_else(|| panic!("no {name} in {:?}", self.line))
    }

    /// The kernel's line.
    pub fn line(&self) -> &str {
        &self.line
    }

    /// Checks that every interrupt came once, in order and in time, and that every CPU kept its registers.
    ///
    /// Interrupts that no controller has delivered are counted apart: the emulation of lab hosts delivers one
    /// twice occasionally (docs/guide/lab.md, "Limits"). On KVM there are none.
    #[track_caller]
    pub fn expect_exact(&self) {
        let Self { line, .. } = self;
        assert!(self.of("sent") > 1000, "a small storm: {line}");
        self.expect_nothing_wrong();
        assert!(
            self.of("timers_set") > 0 && self.of("nmis_sent") > 0,
            "nothing sent: {line}"
        );
        assert!(self.of("held") > 0, "no register was looked at: {line}");
    }

    /// As [`Counts::expect_exact`], of a storm so small that not all kinds of interrupts may have been sent.
    #[track_caller]
    pub fn expect_nothing_wrong(&self) {
        let Self { line, .. } = self;
        assert!(line.ends_with("all well"), "{line}");
        assert!(
            self.of("exchanged") > 0,
            "nothing was passed on in memory: {line}"
        );
        for [came, sent] in [
            ["received", "sent"],
            ["nmis", "nmis_sent"],
            ["timers", "timers_set"],
        ] {
            assert_eq!(self.of(came), self.of(sent), "{line}");
        }
        for fault in [
            "lost",
            "doubled",
            "disorder",
            "backwards",
            "timers_wrong",
            "changed",
            "wrong",
        ] {
            assert_eq!(self.of(fault), 0, "{fault}: {line}");
        }
        let phantoms = self.of("phantoms");
        assert!(phantoms == 0 || host::in_lab(), "{line}");
        if phantoms > 0 {
            eprintln!("THE LAB HOST delivered {phantoms} interrupts twice");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = " cpus=2 epochs=2 sweeps=400 sent=9859 received=9859 lost=0 doubled=0 disorder=0 \
        backwards=0 nested=1710 phantoms=0 spurious=0 nmis_sent=19 nmis=19 timers_set=21 timers=21 early=0 \
        timers_wrong=0 held=15 changed=0 exchanged=600 wrong=0 restarts=2 all well";

    #[test]
    fn counts_are_taken_from_the_line_as_the_kernel_writes_it() {
        let counts = Counts::parse(LINE);
        assert_eq!((counts.of("sent"), counts.of("restarts")), (9859, 2));
        counts.expect_exact();
    }

    #[test]
    fn one_that_is_missing_is_noticed() {
        for (right, wrong) in [
            ("received=9859", "received=9858"),
            ("nmis=19", "nmis=20"),
            ("backwards=0", "backwards=1"),
            ("held=15", "held=0"),
            ("wrong=0 restarts", "wrong=1 restarts"),
            ("all well", "NOT WELL"),
        ] {
            let line = LINE.replace(right, wrong);
            let noticed = std::panic::catch_unwind(|| Counts::parse(&line).expect_exact());
            assert!(noticed.is_err(), "{wrong}");
        }
    }
}
