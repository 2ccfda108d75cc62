//! Fault points: named steps of this process at which a test stops a thread, delays it or kills its process.
//!
//! Each is a static probe in SystemTap's format: one no-op instruction, and a note in the program's file that gives its name and
//! address. So the program under test is the one that users run. A process with the right to trace this one can put a breakpoint there;
//! nothing else finds the points, and nothing reads a setting, a variable or a message for them. `gdb` lists them (`info probes`).

/// Marks the fault point of this name.
macro_rules! fault_point {
    ($name:ident) => {
        ::probe::probe!(mirrorball, $name)
    };
}
pub(crate) use fault_point;
