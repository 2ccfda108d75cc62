//! Fault points: named steps of a process at which a test stops a thread, delays it or kills the process.
//!
//! Each is a static probe in SystemTap's format: one no-op instruction, and a note in the program's file with
//! its name and address. So the program under test is the one that users run. A process with the right to
//! trace this one can put a breakpoint there; nothing else finds the points, and nothing reads a setting, a
//! variable or a message for them. `gdb` lists them (`info probes`).

#[doc(hidden)]
pub use probe;

/// Marks the fault point of this name.
#[macro_export]
macro_rules! fault_point {
    ($name:ident) => {
        $crate::probe::probe!(mirrorball, $name)
    };
}
