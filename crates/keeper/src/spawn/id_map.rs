//! The map of users between a child's user namespace and the host.

use std::fs::File;
use std::io::{self, Read, Write};
use std::process::{Child as Helper, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::Identity;

/// Time limit of a helper that maps a user. Both helpers together stay below the limit of a request.
const HELPER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for a killed helper to end. It may have another user, which this one cannot kill.
const HELPER_KILL_TIMEOUT: Duration = Duration::from_millis(100);
const HELPER_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Maps the child's root to `outside`, or to the user itself.
pub(super) fn write_maps(pid: i32, outside: Option<Identity>) -> io::Result<()> {
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let put = |file: &str, text: String| -> io::Result<()> {
        File::options()
            .write(true)
            .open(format!("/proc/{pid}/{file}"))?
            .write_all(text.as_bytes())
    };
    if let Some(outside) = outside {
        if uid == 0 {
            put("uid_map", format!("0 {} 1\n", outside.uid))?;
            return put("gid_map", format!("0 {} 1\n", outside.gid));
        }
        map_by("newuidmap", pid, outside.uid)?;
        return map_by("newgidmap", pid, outside.gid);
    }
    put("setgroups", "deny".to_owned())?;
    put("uid_map", format!("0 {uid} 1\n"))?;
    put("gid_map", format!("0 {gid} 1\n"))
}

/// Makes one of the host's privileged helpers map the child's root to `id`, which must be in the user's
/// range.
fn map_by(helper: &str, pid: i32, id: u32) -> io::Result<()> {
    let failed = |why: String| io::Error::other(format!("{helper}: {why}"));
    let mut process = Command::new(helper)
        .args([pid.to_string(), "0".to_owned(), id.to_string(), "1".to_owned()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(error.to_string()))?;
    let Some(status) = wait_within(&mut process, HELPER_TIMEOUT)? else {
        end_helper(&mut process);
        return Err(failed("still runs after 5 s".to_owned()));
    };
    if status.success() {
        return Ok(());
    }
    // The pipe has the helper's text already.
    let mut text = [0; 512];
    let read = process
        .stderr
        .take()
        .map_or(Ok(0), |mut stderr| stderr.read(&mut text));
    let text = String::from_utf8_lossy(text.get(..read.unwrap_or(0)).unwrap_or_default()).into_owned();
    Err(failed(text.lines().next().unwrap_or("refused").to_owned()))
}

/// Waits for a helper. Returns its status, or none if it still runs after the timeout.
pub(super) fn wait_within(helper: &mut Helper, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(status) = helper.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        std::thread::sleep(HELPER_POLL_INTERVAL);
    }
}

/// Kills a helper, and reaps it. One that cannot be killed stays until this process ends.
pub(super) fn end_helper(helper: &mut Helper) {
    let _ = helper.kill();
    let _ = wait_within(helper, HELPER_KILL_TIMEOUT);
}
