//! Several jobs in one process, one after the other, each on its own choice of CPU. Where a CPU fetches its
//! pages from another host, each program that starts there takes seconds.

use std::thread;

use crate::Fault;
use crate::pinned::pin;

/// Does `CPU:WORK` after `CPU:WORK`; ends at the first that fails. Returns the line of each.
pub fn run(works: &[&str]) -> Result<String, Fault> {
    let mut lines = Vec::with_capacity(works.len());
    for work in works {
        let (cpu, words) = work.split_once(':').ok_or_else(|| format!("{work}: no CPU"))?;
        let cpu: usize = cpu.parse()?;
        let words: Vec<&str> = words.split(' ').collect();
        let line = thread::scope(|scope| {
            let thread = scope.spawn(|| {
                pin(cpu)?;
                crate::run(&words).map_err(|fault| fault.to_string())
            });
            thread.join().map_err(|_| "its thread panicked".to_owned())?
        });
        lines.push(line.map_err(|fault| format!("{work}: {fault}"))?);
    }
    Ok(lines.join("\n"))
}
