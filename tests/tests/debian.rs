//! Risk: a whole Debian with systemd does not boot, work or end as a person expects.

use std::time::Duration;

use guest_tests::{Scratch, VmFile, wait};

const PROGRAM: &str = r#"
#include <stdio.h>
#include <unistd.h>
int main(void) { printf("%ld CPUs, %d\n", sysconf(_SC_NPROCESSORS_ONLN), 6 * 7); return 3; }
"#;

/// Promise CMD-17.
#[test]
fn debian_boots_compiles_keeps_its_files_and_obeys_the_power_button() {
    let scratch = Scratch::new("debian");
    let vm = VmFile::of("debian", "debian-12")
        .cpus(2)
        .memory("512M")
        .start(&scratch);
    assert_eq!(vm.sh("cat /proc/1/comm").trim(), "systemd");
    wait::until("systemd's word that all is up", Duration::from_secs(90), || {
        let state = vm.exec(["systemctl", "is-system-running"]).run().text();
        ["running", "degraded"].contains(&state.trim()).then_some(())
    });
    assert_eq!(
        vm.sh("systemctl --failed --plain --no-legend"),
        "",
        "units that failed"
    );
    let source = scratch.write("program.c", PROGRAM);
    vm.put(&source, "/root/program.c");
    vm.exec(["sh", "-c", "cd /root && gcc -O2 -Wall -o program program.c"])
        .limit(Duration::from_secs(90))
        .ok();
    let ran = vm.exec(["/root/program"]).run().expect(3);
    assert_eq!(ran.text(), "2 CPUs, 42\n");
    let stopped = vm.stop();
    assert!(
        stopped.took < Duration::from_secs(40),
        "the power button was not obeyed:\n{stopped}"
    );
    vm.wait_ended(Duration::from_secs(10));
}
