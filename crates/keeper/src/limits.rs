//! Limits of a shard's files: a shard that a guest has compromised can create files in memory and on disk.

use std::io;

use nix::sys::resource::Resource;

/// Guest memory lies in its file at guest-physical addresses, which leave out up to this much below 4 GiB.
/// Small files fit, too.
const MEMORY_SLACK_BYTES: u64 = 4 << 30;
/// Difference between the OOM killer's scores of a shard and of its keeper. The keeper's end would end its
/// VM.
const OOM_SCORE_ABOVE: i32 = 100;
const OOM_SCORE_MAX: i32 = 1000;

/// The limits of the shards of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the largest file that a shard may write.
    pub file_bytes: u64,
}

impl Limits {
    /// Limits for a VM with `memory_bytes` of memory, whose disks' files have at most `disk_file_bytes` each.
    pub fn new(memory_bytes: u64, disk_file_bytes: u64) -> Self {
        Self {
            file_bytes: memory_bytes
                .saturating_add(MEMORY_SLACK_BYTES)
                .max(disk_file_bytes),
        }
    }

    /// Sets the limits of a process of this user that has just been cloned.
    ///
    /// # Errors
    /// If the kernel refuses the limit of files or of core dumps.
    pub fn apply(self, pid: i32) -> io::Result<()> {
        limit(pid, Resource::RLIMIT_FSIZE, self.file_bytes)?;
        // A dump would have the guest's memory in it.
        limit(pid, Resource::RLIMIT_CORE, 0)?;
        // The OOM killer of a host that does not allow this chooses by size.
        let _ = prefer_to_keeper(pid);
        Ok(())
    }
}

fn limit(pid: i32, resource: Resource, most: u64) -> io::Result<()> {
    let limit = libc::rlimit64 {
        rlim_cur: most,
        rlim_max: most,
    };
    // SAFETY: reads one structure of ours.
    match unsafe { libc::prlimit64(pid, resource as _, &limit, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the OOM killer take this process before its keeper.
fn prefer_to_keeper(pid: i32) -> io::Result<()> {
    let own = std::fs::read_to_string("/proc/self/oom_score_adj")?;
    let own: i32 = own.trim().parse().map_err(io::Error::other)?;
    let score = (own + OOM_SCORE_ABOVE).min(OOM_SCORE_MAX);
    std::fs::write(format!("/proc/{pid}/oom_score_adj"), score.to_string())
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that waits for a byte, then runs a shell's command line.
    fn shell(script: &str) -> Child {
        let script = format!("read go; {script}");
        let mut command = Command::new("sh");
        command
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        command.spawn().unwrap()
    }

    fn output(mut child: Child) -> String {
        drop(child.stdin.take());
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        child.wait().unwrap();
        text
    }

    #[test]
    fn shard_writes_no_file_beyond_the_largest_that_it_needs() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        let disk = MEMORY_SLACK_BYTES + (65 << 20);
        let limits = Limits::new(64 << 20, disk);
        // A shard ignores the signal as well, which would end it.
        let write = |at: u64| {
            let name = file.display();
            let at = at / 4096;
            format!(
                "trap '' XFSZ; head -c 4096 /dev/zero \
                 | dd of={name} bs=4096 seek={at} conv=notrunc 2>/dev/null && echo done"
            )
        };
        for (at, expected) in [(disk - 4096, "done\n"), (disk, "")] {
            let child = shell(&write(at));
            limits.apply(child.id() as i32).unwrap();
            assert_eq!(output(child), expected, "at {at}");
        }
        assert_eq!(std::fs::metadata(&file).unwrap().len(), disk);
    }

    #[test]
    fn shard_leaves_no_core_and_is_killed_before_its_keeper_when_memory_is_short() {
        let child = shell("ulimit -Hc; cat /proc/self/oom_score_adj");
        Limits::new(64 << 20, 0).apply(child.id() as i32).unwrap();
        let own = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
        let expected = (own.trim().parse::<i32>().unwrap() + OOM_SCORE_ABOVE).min(OOM_SCORE_MAX);
        assert_eq!(output(child), format!("0\n{expected}\n"));
    }
}
