//! Time limits of cells and monitors that wait for one another; the simulator uses the same.

use std::time::Duration;

/// Time limit for the monitors of running VMs to connect to a cell's new process.
pub const ORPHANS_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for another cell's answer that a client waits for. A cell that takes longer hangs, and counts
/// as dead.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);
/// Time limit for the hello of a cell. It is shorter than [`ANSWER_TIMEOUT`]: a cell that waits for a hello
/// does not vote, and must not count as hanging itself.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between the end of a link and a check whether the other cell runs, and between that and a second
/// check.
pub const LINK_END_CHECK_DELAY: Duration = Duration::from_millis(100);
/// Interval of [`protocol::multicast`]'s ticks, while a message is unconfirmed. A cell below a relay that
/// hangs receives its messages directly after three ticks, soon enough that no waiting cell counts as hanging
/// too.
pub const TICK: Duration = Duration::from_millis(100);
/// Minimum time between two passes of a cell that borrows, returns or recalls memory (Cellular Disco, SOSP
/// '99, section 5.2).
pub const BORROWING_PERIOD: Duration = Duration::from_millis(policy::memory::borrowing::PERIOD_MS);
/// First interval between a monitor's attempts to reach a cell that is restarting.
pub const RETRY: Duration = Duration::from_millis(20);
/// Maximum number of cells that send a VM on to one another: each has the others' free memory a little late.
pub const HOPS_MAX: usize = 8;
