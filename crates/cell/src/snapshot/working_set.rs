//! The pages that restores of a snapshot have touched, which the host reads ahead for the next restore.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use page::PAGE_BYTES;

use super::directory::{Directory, caller};

/// The set's file in a snapshot's directory.
const WORKING_SET: &str = "working-set.json";
/// Maximum number of runs of a working set: a set that is more scattered is not worth its requests.
const RUNS_MAX: usize = 64 << 10;

/// Adds the pages that a restore has touched to the working set: runs of pages by their first and their
/// number, in order.
pub fn record(directory: &Path, runs: &[(u64, u64)]) -> io::Result<()> {
    let path = directory.join(WORKING_SET);
    let set = union(working_set(directory).unwrap_or_default(), runs);
    hostfiles::replace_file(&path, hostfiles::private::FILE_MODE, &serde_json::to_vec(&set)?)
}

/// The working set, if one was recorded and is whole.
fn working_set(directory: &Path) -> Option<Vec<(u64, u64)>> {
    let directory = Directory::open(directory, &[caller()]).ok()?;
    working_set_in(&directory)
}

fn working_set_in(directory: &Directory) -> Option<Vec<(u64, u64)>> {
    serde_json::from_slice(&directory.read(WORKING_SET).ok()?).ok()
}

/// All pages of two sets of runs, in order, none twice.
fn union(mut runs: Vec<(u64, u64)>, more: &[(u64, u64)]) -> Vec<(u64, u64)> {
    runs.extend_from_slice(more);
    runs.sort_unstable();
    let mut all: Vec<(u64, u64)> = Vec::with_capacity(runs.len());
    for (start, pages) in runs {
        match all.last_mut() {
            Some((first, count)) if start <= first.saturating_add(*count) => {
                let end = start.saturating_add(pages).max(first.saturating_add(*count));
                *count = end - *first;
            }
            _ => all.push((start, pages)),
        }
    }
    all
}

/// Requests that the host reads the working set of a snapshot's memory, without waiting for it.
pub(super) fn prefetch(directory: &Directory, memory: &File) {
    for (start, pages) in working_set_in(directory)
        .unwrap_or_default()
        .into_iter()
        .take(RUNS_MAX)
    {
        let range =
            |pages: u64| libc::off_t::try_from(pages.saturating_mul(PAGE_BYTES)).unwrap_or(libc::off_t::MAX);
        // SAFETY: takes no pointers. A host that does not follow the advice reads each page when it is
        // touched.
        unsafe {
            libc::posix_fadvise(
                memory.as_raw_fd(),
                range(start),
                range(pages),
                libc::POSIX_FADV_WILLNEED,
            )
        };
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_working_set_grows_by_what_restores_touch() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(working_set(directory.path()), None);
        record(directory.path(), &[(10, 5), (100, 1)]).unwrap();
        record(directory.path(), &[(0, 2), (12, 10), (101, 4)]).unwrap();
        let wanted = vec![(0, 2), (10, 12), (100, 5)];
        assert_eq!(working_set(directory.path()), Some(wanted));
        // A damaged set counts as none, and the next is whole again.
        fs::write(directory.path().join(WORKING_SET), "[[1,").unwrap();
        assert_eq!(working_set(directory.path()), None);
        record(directory.path(), &[(7, 1)]).unwrap();
        assert_eq!(working_set(directory.path()), Some(vec![(7, 1)]));
    }

    #[test]
    fn runs_that_touch_or_overlap_are_one() {
        assert_eq!(union(vec![(0, 4)], &[(4, 4)]), [(0, 8)]);
        assert_eq!(union(vec![(0, 100)], &[(4, 4), (200, 1)]), [(0, 100), (200, 1)]);
        assert_eq!(union(vec![(u64::MAX - 1, 5)], &[(u64::MAX - 1, 9)]).len(), 1);
    }
}
