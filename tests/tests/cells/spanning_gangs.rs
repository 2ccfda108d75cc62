//! Two VMs of two vCPUs each, which spin, over two cells of a CPU each. Each VM has its home in another cell.

use std::path::PathBuf;
use std::time::Instant;

use guest_tests::cluster::allowed_cpus;
use guest_tests::halting::spinning_guest;
use guest_tests::{Scratch, host, wait};

use super::gangs::{LEASES, MEASURED, SAMPLE_INTERVAL, SAMPLES, is_ready, ran_ms, sample, threads};
use super::{Cells, SOON};

/// VMs with the cells that they span, the home first.
const VMS: [(&str, &str); 2] = [("one", "[0, 1]"), ("two", "[1, 0]")];

/// Divisor of the samples: fewer than that part may find a single vCPU of a VM ready. On 28 November 2026,
/// with ten other processes on the host's two CPUs, 17 to 118 of 500 samples did, in two runs. vCPUs that run
/// for half of the time, each by itself, would be found so in 250.
const SINGLE_PART: u32 = 3;

/// Waits until the vCPUs of a VM stand still at times, which takes an order.
#[track_caller]
fn wait_for_windows(cells: &Cells, name: &str) -> [PathBuf; 2] {
    wait::until("a VM with windows", SOON, || {
        let threads = threads(cells, name)?;
        let stands = |_| {
            std::thread::sleep(SAMPLE_INTERVAL);
            !threads.iter().any(|thread| is_ready(thread))
        };
        (0..100).any(stands).then_some(threads)
    })
}

/// Whether a process serves the VM that is not `former`.
fn has_next(cells: &Cells, name: &str, former: u32) -> Option<()> {
    let vm = cells.inspect(name)?;
    let serves = super::as_pid(&vm["monitor_pid"]).is_some_and(|pid| pid != former);
    serves.then_some(())
}

#[test]
fn spanning_vms_that_spin_run_in_all_their_cells_at_once_and_freely_when_their_home_dies() {
    let scratch = Scratch::new("spanning-gangs");
    let cell = |cpu: usize| format!("[[cells]]\ncpus = \"{cpu}\"\nmemory = \"256M\"\n");
    let text: Vec<String> = allowed_cpus().take(2).map(cell).collect();
    assert_eq!(text.len(), 2, "two cells need two CPUs");
    let text = format!("{}[scheduling]\ncpus = \"gangs\"\n", text.concat());
    let cells = Cells::up_of(scratch, &text, &spinning_guest());
    for (name, span) in VMS {
        let keys = format!("memory = \"128M\"\ncpus = 2\nspan = {{ cells = {span} }}\n");
        let file = cells.vm_file(name, &keys, None);
        cells.call(["run", "-d", &file]).ok();
    }
    let all = VMS.map(|(name, _)| wait_for_windows(&cells, name));

    // Both have the same part of the CPUs.
    let ran = || {
        let of_vm = |vm: &[PathBuf; 2]| vm.iter().map(|thread| ran_ms(thread)).sum::<u64>();
        all.each_ref().map(of_vm)
    };
    let (before, begun) = (ran(), Instant::now());
    std::thread::sleep(MEASURED);
    let (after, ms) = (ran(), begun.elapsed().as_millis());
    let [one, two] = [after[0] - before[0], after[1] - before[1]];
    // Other programs may use the CPUs, too.
    assert!(one.min(two) > 100, "{one} and {two} ms of {ms}");
    assert!(one.max(two) < 2 * one.min(two), "{one} and {two} ms of {ms}");

    // The vCPUs of a VM run and stand still together, though each is in another cell.
    for vm in &all {
        let [both, single, none] = sample(vm);
        assert!(
            single * SINGLE_PART < SAMPLES,
            "{both} both, {single} one, {none} none"
        );
        assert!(
            both * 8 > SAMPLES && none * 8 > SAMPLES,
            "{both} both, {single} one, {none} none"
        );
    }

    // A pin leaves the VM to Linux, and its end gives it windows again.
    let cpu = allowed_cpus().next().expect("a CPU").to_string();
    cells.call(["update", "one", "--pin", &format!("0={cpu}")]).ok();
    wait::until("a VM without windows", SOON, || {
        let [both, ..] = sample(&all[0]);
        (both == SAMPLES).then_some(())
    });
    cells.call(["update", "one", "--pin", "0=all"]).ok();
    wait_for_windows(&cells, "one");

    // Cell 0 is the arbiter, too. The home's orders run out with it, and Linux runs both vCPUs.
    for (number, (name, _)) in VMS.iter().enumerate().rev() {
        let [guard, process] = cells.processes(number);
        host::stop(guard);
        host::kill9(process);
        std::thread::sleep(LEASES);
        for _ in 0..50 {
            let ready = all[number].iter().all(|thread| is_ready(thread));
            assert!(ready, "a vCPU of {name} stands still without its home");
            std::thread::sleep(SAMPLE_INTERVAL);
        }
        host::go_on(guard);
        wait::until("the next process of the cell", SOON, || {
            has_next(&cells, name, process)
        });
        for (name, _) in VMS {
            wait_for_windows(&cells, name);
        }
        let [_, single, _] = sample(&all[0]);
        assert!(
            single * SINGLE_PART < SAMPLES,
            "{single} after the death of cell {number}"
        );
    }
}
