//! The programs with which a bench starts VMs.

use std::fs;
use std::io;
use std::path::Path;

/// Programs that `mirrorball` starts and finds beside its own file.
const BESIDE: [&str; 2] = ["mirrorball-shard", "mirrorball-keeper"];

/// Copies `mirrorball` to `copy`, and the programs that lie beside it.
///
/// # Errors
/// If one of them is missing, or there is no room.
pub fn copy(mirrorball: &Path, copy: &Path) -> io::Result<()> {
    fs::copy(mirrorball, copy)?;
    for name in BESIDE {
        fs::copy(mirrorball.with_file_name(name), copy.with_file_name(name))?;
    }
    Ok(())
}
