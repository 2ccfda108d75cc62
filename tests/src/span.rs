//! A VM that spans cells: its shards, the cells of its vCPUs, and their moves.

use std::fmt;
use std::time::Duration;

use crate::cluster::Cluster;
use crate::command::{BOOT_LIMIT, Call, mirrorball};
use crate::pattern::Numbers;
use crate::scratch::Scratch;
use crate::terminal::Terminal;
use crate::{Vm, VmFile, wait};

/// A move that takes longer has failed.
const MOVE_LIMIT: Duration = Duration::from_secs(30);

/// Time limit of a script on each CPU.
const SCRIPT_LIMIT: Duration = Duration::from_secs(120);

/// Runs a script on each of the first `cpus` CPUs at the same time, and returns what each prints.
#[track_caller]
pub fn on_each_cpu(vm: &Vm, cpus: usize, script: impl Fn(usize) -> String) -> Vec<String> {
    let calls = (0..cpus).map(|cpu| {
        let command = ["taskset", "-c", &cpu.to_string(), "sh", "-ec", &script(cpu)].map(String::from);
        vm.exec(command).limit(SCRIPT_LIMIT).spawn()
    });
    // All start before the first is waited for.
    let calls: Vec<_> = calls.collect();
    let printed = calls.into_iter().map(|call| call.wait().expect(0).text());
    printed.map(|text| text.trim().to_owned()).collect()
}

impl VmFile {
    /// Makes it span these cells, its home first.
    pub fn span(self, cells: &[u16]) -> Self {
        self.key("span", &format!("{{ cells = {cells:?} }}"))
    }
}

impl Vm {
    /// The cell of each vCPU.
    #[track_caller]
    pub fn places(&self) -> Vec<u64> {
        let known = self.inspect();
        let places = known["status"]["span"]["vcpus"].as_array();
        let places = places.unwrap_or_else(|| panic!("no places of vCPUs in {known:#}"));
        places.iter().map(|cell| cell.as_u64().expect("a cell")).collect()
    }

    /// The processes of its shards, the home's first.
    #[track_caller]
    pub fn shards(&self) -> Vec<u32> {
        let whole = self.inspect();
        let mut shards = vec![self.shard()];
        let parts = whole["part_pids"].as_array().into_iter().flatten();
        shards.extend(
            parts.map(|pid| u32::try_from(pid.as_u64().expect("a number")).expect("a process number")),
        );
        shards
    }

    /// Checks that the guest's clock is still the time stamp counter, and that its kernel reports no problem.
    #[track_caller]
    pub fn expect_sound_clock(&self) {
        let source = self.sh("cat /sys/devices/system/clocksource/clocksource0/current_clocksource");
        assert_eq!(source.trim(), "tsc");
        // For any guest of an emulated processor the kernel reports an odd size of its XSAVE area.
        let complaints = "dmesg | grep -E 'unstable|stall|lockup|LOCKUP|No irq handler|BUG:|WARNING: CPU' \
                          | grep -v fpu__init_system_xstate || true";
        assert_eq!(self.sh(complaints), "");
    }

    /// A call of `mirrorball move`; not yet run.
    pub fn move_vcpu(&self, vcpu: usize, cell: u64) -> Call {
        mirrorball(["move", self.name()])
            .args(["--vcpu", &vcpu.to_string(), "--cell", &cell.to_string()])
            .limit(MOVE_LIMIT)
    }
}

/// Time limit until cells have processed an end.
const SOON: Duration = Duration::from_secs(20);

/// A VM of 4 vCPUs over the cells 0 and 1.
pub fn two_cells(name: &str) -> VmFile {
    VmFile::new(name).cpus(4).memory("256M").span(&[0, 1])
}

/// Checks that nothing of any VM is left in the two cells.
#[track_caller]
pub fn cells_are_empty(cluster: &Cluster) {
    wait::until("the cells have everything back", SOON, || {
        let empty = |cell| cluster.given_bytes(cell) == 0 && cluster.vms(cell).is_empty();
        (empty(0) && empty(1)).then_some(())
    });
}

/// `mirrorball run` in the foreground, with the guest's prompt on it.
#[track_caller]
pub fn foreground(file: &VmFile, scratch: &Scratch) -> (Terminal, Vm) {
    let path = file.write(scratch);
    let mut terminal = Terminal::mirrorball(&["run", "--lab", "never", path.to_str().expect("UTF-8")]);
    terminal.expect("# ", BOOT_LIMIT);
    (terminal, Vm::named(file.name()))
}

/// The pauses of vCPUs' moves.
#[derive(Debug)]
pub struct Moves {
    pauses_us: Vec<u64>,
}

impl Moves {
    /// Moves vCPUs at random, each to another cell of the first `cells`, `count` times; at the end each is
    /// where it was last moved.
    #[track_caller]
    pub fn by_chance(vm: &Vm, cells: u64, count: usize, seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        let mut places = vm.places();
        let mut pauses_us = Vec::with_capacity(count);
        while pauses_us.len() < count {
            let vcpu = numbers.below(places.len() as u64) as usize;
            let cell = (places[vcpu] + 1 + numbers.below(cells - 1)) % cells;
            let said = vm.move_vcpu(vcpu, cell).ok();
            pauses_us.push(pause_us(&said.text(), vm.name(), vcpu, cell));
            places[vcpu] = cell;
        }
        assert_eq!(vm.places(), places, "after {count} moves");
        Self { pauses_us }
    }
}

/// The pause of a move, microseconds, from the command's output.
#[track_caller]
fn pause_us(said: &str, vm: &str, vcpu: usize, cell: u64) -> u64 {
    let start = format!("vCPU {vcpu} of {} runs in cell {cell}; it stood still for ", vm);
    let pause = said.trim().strip_prefix(&start);
    let pause = pause.and_then(|rest| rest.strip_suffix(" us")?.parse().ok());
    pause.unwrap_or_else(|| panic!("{said:?} instead of {start:?} and microseconds"))
}

impl fmt::Display for Moves {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut sorted = self.pauses_us.clone();
        sorted.sort_unstable();
        let at = |percent: usize| sorted.get(sorted.len().saturating_sub(1) * percent / 100);
        let [median, most, longest] = [50, 99, 100].map(|percent| at(percent).copied().unwrap_or(0));
        write!(
            f,
            "{} moves; they stood still for {median} us (median), {most} us (99%), {longest} us (longest)",
            sorted.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_taken_from_the_line_of_its_own_move_only() {
        let line = "vCPU 3 of web runs in cell 1; it stood still for 812 us\n";
        assert_eq!(pause_us(line, "web", 3, 1), 812);
        for (vm, vcpu, cell) in [("we", 3, 1), ("web", 2, 1), ("web", 3, 0)] {
            assert!(std::panic::catch_unwind(|| pause_us(line, vm, vcpu, cell)).is_err());
        }
    }

    #[test]
    fn moves_are_shown_by_their_median_and_their_longest() {
        let moves = Moves {
            pauses_us: (1..=100).rev().collect(),
        };
        assert_eq!(
            moves.to_string(),
            "100 moves; they stood still for 50 us (median), 99 us (99%), 100 us (longest)"
        );
        assert!(Moves { pauses_us: vec![] }.to_string().starts_with("0 moves"));
    }
}
