//! A monitor hands its VMs over to their cells, whose processes serve them from then on.

use std::io;
use std::thread::JoinHandle;
use std::time::Duration;

use registry::cluster::client::Connection;
use registry::cluster::files::Files;
use registry::cluster::interface::{Answer, Ask};

use crate::handle::Handle;

/// Time between two tries, while a cell's process does not run or does not want the VM.
const INTERVAL: Duration = Duration::from_millis(500);

/// Has a thread hand the VMs over once all of them run that have not ended, and `before` has ended. This process ends then, as if
/// it were killed: what another needs to go on is the keepers'.
pub(super) fn begin(vms: Vec<Handle>, before: Option<JoinHandle<()>>) -> io::Result<()> {
    let hand_over = move || {
        for vm in &vms {
            vm.wait_until_left();
        }
        if let Some(before) = before {
            // One that panicked has ended too.
            let _ = before.join();
        }
        loop {
            let running: Vec<&Handle> = vms.iter().filter(|vm| !vm.is_over()).collect();
            let has_cell = |vm: &&Handle| vm.recorder().read(|record| record.cell.is_some()) == Some(true);
            // This process ends with the last VM, and serves one that is in no cell.
            if running.is_empty() || !running.iter().all(has_cell) {
                return;
            }
            if running.into_iter().all(|vm| hand_over(vm).is_some()) {
                // SAFETY: ends the process; no destructor runs, so that nothing of a VM ends.
                unsafe { libc::_exit(0) }
            }
            std::thread::sleep(INTERVAL);
        }
    };
    std::thread::Builder::new()
        .name("hand-over".into())
        .spawn(hand_over)
        .map(drop)
}

/// Has the VM's cell wait for this process's end. None if there is no such cell, or it does not want the VM.
fn hand_over(vm: &Handle) -> Option<()> {
    let (name, cell) = vm.recorder().read(|record| (record.name.clone(), record.cell))?;
    let cell = Files::open().ok()?.cell(cell?);
    let ask = Ask::Adopt { name, again: false };
    let answer = Connection::open(&cell).ok()?.ask(&ask).ok()?;
    (answer == Answer::Done).then_some(())
}
