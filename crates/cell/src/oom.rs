//! The order in which the host's OOM killer takes shards: those with least promised memory first.

use std::fs;
use std::io;

/// Difference between the scores of a shard to which nothing is promised and of one that is promised all that
/// it may have; ours. The kernel adds a process's memory, in thousandths of the host's, to its score.
const UNPROMISED_SCORE: u32 = 400;
const SCORE_MAX: i32 = 1000;

/// Has the OOM killer take a shard that has just started the sooner, the less of its memory is promised.
/// `unpromised_permille` is the part that is not.
///
/// # Errors
/// If this user may not change the score: a shard with a user id of its own is root's to change.
pub(crate) fn prefer(pid: i32, unpromised_permille: u32) -> io::Result<()> {
    let above = UNPROMISED_SCORE * unpromised_permille.min(1000) / 1000;
    if above == 0 {
        return Ok(());
    }
    let score = score(pid)?.saturating_add(above.cast_signed()).min(SCORE_MAX);
    fs::write(path(pid), score.to_string())
}

/// The adjustment of a process's score, as the kernel has it.
pub(crate) fn score(pid: i32) -> io::Result<i32> {
    let text = fs::read_to_string(path(pid))?;
    text.trim().parse().map_err(io::Error::other)
}

fn path(pid: i32) -> String {
    format!("/proc/{pid}/oom_score_adj")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn shard_with_less_promised_memory_is_killed_first() {
        let scores = [0, 250, 1000, 5000].map(|unpromised_permille| {
            let mut child = Command::new("sleep").arg("100").spawn().unwrap();
            let pid = child.id().cast_signed();
            let before = score(pid).unwrap();
            prefer(pid, unpromised_permille).unwrap();
            let after = score(pid).unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
            (before, after)
        });
        let own = scores[0].0;
        let expected = [0, 100, 400, 400].map(|above| (own, (own + above).min(SCORE_MAX)));
        assert_eq!(scores, expected);
        assert!(prefer(i32::MAX, 1000).is_err());
    }
}
