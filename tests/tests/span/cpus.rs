//! The guest's CPUs: at work, offline, interrupted by NMIs, and their clock.

use guest_tests::{Vm, mirrorball, wait};

use crate::{CPUS, LIMIT};

/// Checks that each CPU is online, can be chosen, and computes while the others do.
#[track_caller]
pub fn all_work(vm: &Vm) {
    assert_eq!(
        vm.sh("cat /sys/devices/system/cpu/online").trim(),
        format!("0-{}", CPUS - 1)
    );
    for cpu in 0..CPUS {
        let said = vm.sh(&format!("taskset -c {cpu} sh -c 'cat /proc/self/stat; nproc'"));
        let mut lines = said.lines();
        let stat = lines.next().and_then(|line| line.rsplit_once(") "));
        let on = stat.and_then(|(_, rest)| rest.split(' ').nth(36));
        assert_eq!(on, Some(cpu.to_string().as_str()), "taskset to CPU {cpu}: {said}");
        assert_eq!(lines.next(), Some("1"), "taskset to CPU {cpu}: {said}");
    }
    vm.add_tool();
    let worked = vm.tool(&["pinned", &CPUS.to_string()]).limit(LIMIT).ok().text();
    assert_eq!(worked.trim(), "0 1 2 3");
}

/// Takes all CPUs but the first offline and back, `times` times; `/proc/cpuinfo` is right each time.
#[track_caller]
pub fn go_and_come(vm: &Vm, times: usize) {
    let last = CPUS - 1;
    let script = format!(
        "set -e
         for round in $(seq {times}); do
             for state in 0 1; do
                 for cpu in $(seq {last}); do echo $state > /sys/devices/system/cpu/cpu$cpu/online; done
                 found=$(grep -c ^processor /proc/cpuinfo)
                 [ $found = $((1 + {last} * state)) ] || {{ echo $round: $found CPUs after $state; exit 1; }}
             done
         done
         echo rounds $round"
    );
    let said = vm.exec(["sh", "-c", &script]).limit(LIMIT).ok();
    assert_eq!(said.text().trim(), format!("rounds {times}"), "{said}");
    println!(
        "{times} times offline and online took {:.1} s",
        said.took.as_secs_f32()
    );
}

/// One CPU requests all CPUs' backtraces, by an NMI: each has one NMI more, and its lines are in the log.
#[track_caller]
pub fn get_nmis_from(vm: &Vm, sender: usize) {
    let before = nmis(vm);
    vm.sh(&format!(
        "dmesg -c > /dev/null; taskset -c {sender} sh -c 'echo l > /proc/sysrq-trigger'"
    ));
    let log = vm.sh("dmesg");
    for (cpu, (before, after)) in before.iter().zip(nmis(vm)).enumerate() {
        assert!(
            log.contains(&format!("NMI backtrace for cpu {cpu}")),
            "CPU {cpu} did not answer CPU {sender}:\n{log}"
        );
        let expected = u64::from(cpu != sender);
        assert_eq!(after - before, expected, "NMIs of CPU {cpu} from CPU {sender}");
    }
}

/// `mirrorball nmi` sends each CPU an NMI, in whichever cell it is.
#[track_caller]
pub fn get_nmis_of_the_host(vm: &Vm) {
    let before = nmis(vm);
    mirrorball(["nmi", vm.name()]).ok();
    // A CPU that is idle in the other cell is woken by a message.
    wait::until("each CPU has had an NMI", LIMIT, || {
        let after = nmis(vm);
        before
            .iter()
            .zip(&after)
            .all(|(before, after)| after > before)
            .then_some(())
    });
}

/// The NMIs of each CPU so far.
#[track_caller]
fn nmis(vm: &Vm) -> Vec<u64> {
    let table = vm.sh("cat /proc/interrupts");
    let row = table
        .lines()
        .find_map(|line| line.trim_start().strip_prefix("NMI:"));
    let row = row.unwrap_or_else(|| panic!("no NMI in:\n{table}"));
    let counts: Vec<u64> = row
        .split_whitespace()
        .map_while(|word| word.parse().ok())
        .collect();
    assert_eq!(counts.len(), CPUS, "{row}");
    counts
}
