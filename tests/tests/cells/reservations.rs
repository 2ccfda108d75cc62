//! CPU time that a cell reserves for a VM: two VMs that spin on one CPU.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use guest_tests::cluster::allowed_cpus;
use guest_tests::halting::spinning_guest;
use guest_tests::{Scratch, host, wait};

use super::{Cells, SOON, as_pid};

/// Time over which CPU times are compared: thirty periods of reservations.
const MEASURED: Duration = Duration::from_secs(3);
/// Time in which VMs come to even terms after a reservation has ended: a VM that waits does so for a second.
const EVEN: Duration = Duration::from_secs(3);

const VMS: [&str; 2] = ["one", "two"];

impl Cells {
    /// The directory of the thread of a VM's only vCPU in `/proc`.
    #[track_caller]
    fn vcpu_thread(&self, name: &str) -> PathBuf {
        wait::until("a vCPU", SOON, || {
            let vm = self.inspect(name)?;
            let vcpu = vm["status"]["vcpus"].get(0)?;
            let (pid, thread) = (vcpu["shard_pid"].as_u64()?, vcpu["thread_id"].as_u64()?);
            Some(PathBuf::from(format!("/proc/{pid}/task/{thread}")))
        })
    }

    /// CPU time that each VM has in a while, milliseconds.
    #[track_caller]
    fn shares(&self) -> [u64; 2] {
        let threads = VMS.map(|name| self.vcpu_thread(name));
        let ran = || {
            threads.each_ref().map(|thread| {
                let times = fs::read_to_string(thread.join("schedstat")).expect("the VM runs");
                let ran_ns = times.split(' ').next().expect("a time");
                ran_ns.parse::<u64>().expect("a number") / 1_000_000
            })
        };
        let before = ran();
        std::thread::sleep(MEASURED);
        let after = ran();
        let shares = [after[0] - before[0], after[1] - before[1]];
        assert!(shares.iter().sum::<u64>() > 100, "{shares:?} ms");
        shares
    }

    /// Waits until a VM has more than 1.5 times the CPU time of the other, or not.
    #[track_caller]
    fn wait_for_preference(&self, expected: bool) {
        wait::until(&format!("CPU times, uneven: {expected}"), SOON, || {
            let [one, two] = self.shares();
            (expected == (one * 2 > two * 3)).then_some(())
        });
    }
}

/// Promise SCHED-15.
#[test]
fn vm_has_its_reserved_cpu_time_before_others_and_no_cell_reserves_more_than_it_has() {
    let cpu = allowed_cpus().next().expect("a CPU");
    let cell = format!("[[cells]]\ncpus = \"{cpu}\"\nmemory = \"256M\"\n");
    let gangs = format!("{cell}[scheduling]\ncpus = \"gangs\"\n");
    let cells = Cells::up_of(Scratch::new("reservations"), &gangs, &spinning_guest());
    let small = "memory = \"64M\"\n";
    let one = cells.vm_file("one", &format!("{small}cpu_reservation = 0.7\n"), None);
    let two = cells.vm_file("two", small, None);
    for file in [&one, &two] {
        cells.call(["run", "-d", file]).ok();
    }
    // 70 ms of each 100 ms, and 30 ms.
    cells.wait_for_preference(true);
    assert_eq!(
        cells.inspect("one").expect("it runs")["spec"]["cpu_reservation"],
        0.7
    );

    let third = cells.vm_file("three", &format!("{small}cpu_reservation = 0.3\n"), None);
    let refused = cells.call(["run", "-d", &third]).run().expect(1);
    let why =
        "VM three reserves 0.300 CPUs, and cell 0: 0.700 CPUs are reserved for other VMs, and 0.200 are left";
    assert!(refused.errors().contains(why), "{refused}");
    let update = |vm: &'static str, cpus: &'static str| cells.call(["update", vm, "--cpu-reservation", cpus]);
    let refused = update("two", "0.3").run().expect(1);
    assert!(refused.errors().contains("0.200 are left"), "{refused}");
    update("two", "0.2").ok();
    let top = cells
        .call(["top", "--json", "--count", "1", "--interval", "0.1"])
        .ok()
        .json();
    assert_eq!(top["vms"][1]["cpu_reservation"], 0.2, "{top}");

    // The next process of the cell counts both.
    let [_, process] = cells.processes(0);
    host::kill9(process);
    wait::until("the cell's next process", SOON, || {
        // Between the processes there is no cluster to ask.
        let status = cells.call(["cluster", "status", "--json"]).run();
        let next = (status.status == 0).then(|| as_pid(&status.json()[0]["pid"]))??;
        (next != process && host::is_running(next)).then_some(())
    });
    let refused = wait::until("a refusal", SOON, || {
        let output = update("two", "0.3").run();
        output.errors().contains("are left").then_some(output)
    });
    assert!(refused.errors().contains("0.700 CPUs are reserved"), "{refused}");

    // Without reservations both have the same.
    update("one", "none").ok();
    update("two", "none").ok();
    std::thread::sleep(EVEN);
    cells.wait_for_preference(false);
}

#[test]
fn reservation_is_refused_where_linux_divides_the_cpus() {
    let cells = Cells::up("no-reservations");
    let file = cells.vm_file("one", "memory = \"64M\"\ncpu_reservation = 0.5\n", None);
    let refused = cells.call(["run", "-d", &file]).run().expect(1);
    let why = "Linux divides the CPUs of this cluster; write `cpus = \"gangs\"`";
    assert!(refused.errors().contains(why), "{refused}");
    cells.call(["cluster", "down"]).ok();
    let refused = cells.call(["run", "-d", &file]).run().expect(1);
    assert!(
        refused.errors().contains("no cluster of yours is up here"),
        "{refused}"
    );
}
