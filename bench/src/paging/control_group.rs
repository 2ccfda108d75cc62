//! A control group whose memory is limited.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the host's control groups of version 2 are.
const ROOT: &str = "/sys/fs/cgroup";

/// A control group of the bench's own. Removed when dropped, once its processes have ended.
pub struct ControlGroup {
    folder: PathBuf,
    /// Whether groups below the root had no limits of memory before.
    enabled: bool,
}

impl ControlGroup {
    /// A new group. The error is the reason why the host gives none.
    pub fn create() -> Result<Self, String> {
        let folder = Path::new(ROOT).join(format!("bench-paging-{}", std::process::id()));
        let fails = |error| format!("no control group: {}: {error}", folder.display());
        let controllers = fs::read_to_string(subtree()).map_err(fails)?;
        let enabled = !controllers.split_whitespace().any(|word| word == "memory");
        if enabled {
            fs::write(subtree(), "+memory").map_err(fails)?;
        }
        fs::create_dir(&folder).map_err(fails)?;
        Ok(Self { folder, enabled })
    }

    /// A command that starts `command` in this group.
    pub fn command(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        inside
            .args(["-c", "echo $$ >\"$0\" && exec \"$@\""])
            .arg(self.folder.join("cgroup.procs"))
            .arg(command.get_program())
            .args(command.get_args());
        inside
    }

    /// Limits the group's memory. Returns once the rest has left, or the host gives up.
    pub fn limit(&self, bytes: u64) -> Result<(), String> {
        let file = self.folder.join("memory.max");
        fs::write(&file, bytes.to_string()).map_err(|error| format!("{}: {error}", file.display()))
    }
}

fn subtree() -> PathBuf {
    Path::new(ROOT).join("cgroup.subtree_control")
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder);
        if self.enabled {
            let _ = fs::write(subtree(), "-memory");
        }
    }
}
