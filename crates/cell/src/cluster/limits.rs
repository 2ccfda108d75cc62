//! How long cells and monitors wait for one another; the simulator goes by the same.

use std::time::Duration;

/// How long the monitors of running VMs may take to come to a cell's new process.
pub const ORPHANS_LIMIT: Duration = Duration::from_secs(5);
/// How long another cell may take to say what a client waits for. One that takes longer hangs, and is dead to
/// this one.
pub const WORD_LIMIT: Duration = Duration::from_secs(4);
/// How long a cell may take to say hello. Less than the other limit: who waits for a hello does not vote, and
/// must not be taken for one that hangs itself.
pub const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// Between the end of a link and a look whether the other cell lives, and between that and a second one.
pub const LOOK_AFTER: Duration = Duration::from_millis(100);
/// Between two ticks of [`protocol::multicast`], while there is something to confirm. A cell that is told
/// things by one that hangs is told directly after three, so that nobody waits long enough for it to be taken
/// for hanging too.
pub const TICK: Duration = Duration::from_millis(100);
/// Between two tries of a monitor to reach a cell that is starting anew, at first.
pub const RETRY: Duration = Duration::from_millis(20);
/// Cells that send a VM on to one another, at most: each knows the others' memory a little late.
pub const HOPS_MAX: usize = 8;
