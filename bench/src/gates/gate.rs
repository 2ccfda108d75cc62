//! Ways to choose which of two threads of a CPU runs.

use std::fmt;
use std::io;

use super::spinner::Spinner;

/// Priority of the chosen thread among the real-time ones: the lowest.
const FIFO_PRIORITY: i32 = 1;
/// Nice value of a thread that waits. Its weight is the lowest: 15 beside 1,024 (Linux,
/// `kernel/sched/core.c`, `sched_prio_to_weight`).
const WAITING_NICE: i32 = 19;

/// Way to have one of two threads on a CPU run, and the other wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// The kernel schedules both. The other ways are compared with this.
    None,
    /// The thread that waits has the lowest nice value.
    Nice,
    /// The thread that waits is in `SCHED_IDLE`, which has a weight of 3.
    IdleClass,
    /// The chosen thread is in `SCHED_FIFO`.
    RealTime,
    /// A signal stops the thread that waits, until the word that it sleeps on changes.
    Stop,
    /// As `IdleClass`, and the thread that was chosen is stopped until the next one has started.
    IdleClassAndStop,
}

impl Gate {
    /// All ways, in the order of the table.
    pub const ALL: [Self; 6] = [
        Self::None,
        Self::Nice,
        Self::IdleClass,
        Self::RealTime,
        Self::Stop,
        Self::IdleClassAndStop,
    ];

    /// Has `chosen` run from now on in place of `waiting`.
    ///
    /// # Errors
    /// If the process may not do this.
    pub fn choose(self, chosen: &Spinner, waiting: &Spinner) -> io::Result<()> {
        match self {
            Self::None => Ok(()),
            Self::Nice => {
                nice(chosen, 0)?;
                nice(waiting, WAITING_NICE)
            }
            Self::IdleClass => {
                class(chosen, libc::SCHED_OTHER, 0)?;
                class(waiting, libc::SCHED_IDLE, 0)
            }
            Self::RealTime => {
                class(chosen, libc::SCHED_FIFO, FIFO_PRIORITY)?;
                class(waiting, libc::SCHED_OTHER, 0)
            }
            Self::Stop => {
                chosen.open_gate();
                waiting.close_gate();
                Ok(())
            }
            Self::IdleClassAndStop => {
                class(chosen, libc::SCHED_OTHER, 0)?;
                class(waiting, libc::SCHED_IDLE, 0)?;
                waiting.close_gate();
                waiting.open_gate();
                Ok(())
            }
        }
    }
}

impl fmt::Display for Gate {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        text.write_str(match self {
            Self::None => "none",
            Self::Nice => "nice 19 for the waiting",
            Self::IdleClass => "SCHED_IDLE for the waiting",
            Self::RealTime => "SCHED_FIFO for the chosen",
            Self::Stop => "the waiting stopped by a signal",
            Self::IdleClassAndStop => "SCHED_IDLE, and a kick",
        })
    }
}

fn class(thread: &Spinner, policy: i32, priority: i32) -> io::Result<()> {
    let parameter = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: the parameter is ours and has the right type.
    nix::Error::result(unsafe { libc::sched_setscheduler(thread.tid(), policy, &raw const parameter) })?;
    Ok(())
}

fn nice(thread: &Spinner, value: i32) -> io::Result<()> {
    let id = thread.tid().cast_unsigned();
    // SAFETY: takes numbers only.
    nix::Error::result(unsafe { libc::setpriority(libc::PRIO_PROCESS, id, value) })?;
    Ok(())
}
