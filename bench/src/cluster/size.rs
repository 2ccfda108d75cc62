//! The amount of work of the guest's programs.

use bench::Outcome;
use bench::tiny_vm::TinyVm;
use serde::Serialize;

/// The work of one CPU of a guest in a second.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rates {
    /// Operations on the table.
    pub operations: u64,
    /// Lines of the image.
    pub lines: u64,
}

impl Rates {
    /// Measures them in a VM that runs alone. An operation reads its page `passes` times.
    pub fn measure(vm: &TinyVm<'_>, passes: usize) -> Outcome<Self> {
        let known = vm.call(&["--program", "calibrate", "--passes", &passes.to_string()])?;
        let number = |name: &str| known[name].as_u64().ok_or_else(|| format!("no {name}: {known}"));
        Ok(Self {
            operations: number("operations_each_second")?,
            lines: number("lines_each_second")?,
        })
    }

    /// The amounts of so many seconds.
    pub fn times(self, seconds: usize) -> Self {
        let times = |rate: u64| rate.saturating_mul(seconds as u64).max(1);
        Self {
            operations: times(self.operations),
            lines: times(self.lines),
        }
    }
}
