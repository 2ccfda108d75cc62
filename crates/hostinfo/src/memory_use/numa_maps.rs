//! Guest memory by NUMA node, from `/proc/PID/numa_maps` (proc(5)).
//!
//! Only mappings of the guest's own memory count. Pages of image files that a VM maps are page cache of the
//! host's.

use std::fs;
use std::io;

use registry::update::MemoryPages;

use super::classify::GUEST_MEMORY;

/// The pages of a shard's guest memory. `is_scanned` means that the host scans it for equal pages, so that it
/// is in no file.
///
/// # Errors
/// If this user may not read them, the process has ended, or the host's kernel does not count by node.
pub fn guest_pages(pid: i32, is_scanned: bool) -> io::Result<MemoryPages> {
    Ok(parse(
        &fs::read_to_string(format!("/proc/{pid}/numa_maps"))?,
        is_scanned,
    ))
}

/// Adds up lines like `7f00 bind:0 file=/memfd:guest-memory\040(deleted) mapped=9 N0=8 N1=1
/// kernelpagesize_kB=4`. All mappings of a guest's memory have pages of one size.
fn parse(text: &str, is_scanned: bool) -> MemoryPages {
    let mut all = MemoryPages {
        page_kib: 4,
        ..MemoryPages::default()
    };
    let of_guest = |line: &&str| {
        let mut words = line.split_ascii_whitespace();
        match words.find_map(|word| word.strip_prefix("file=")) {
            Some(name) => name.starts_with(GUEST_MEMORY),
            // The kernel does not tell such memory from the stacks of threads, which are small.
            None => is_scanned && !has_name(line),
        }
    };
    for word in text
        .lines()
        .filter(of_guest)
        .flat_map(str::split_ascii_whitespace)
    {
        let Some((key, number)) = word.split_once('=') else {
            continue;
        };
        let Ok(number) = number.parse::<u64>() else {
            continue;
        };
        if key == "kernelpagesize_kB" {
            all.page_kib = number;
        } else if let Some(node) = key.strip_prefix('N').and_then(|node| node.parse().ok()) {
            let pages = all.nodes.entry(node).or_default();
            *pages = pages.saturating_add(number);
        }
    }
    all
}

/// Whether a line is that of memory with a name of the kernel's.
fn has_name(line: &str) -> bool {
    let mut words = line.split_ascii_whitespace();
    words.any(|word| word == "heap" || word == "stack")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_scanned_memory_are_counted_though_it_is_in_no_file() {
        let text = "\
7f1000000000 default anon=30 dirty=30 N0=10 N1=20 kernelpagesize_kB=4
7f1100000000 default file=/memfd:guest-memory-layer\\040(deleted) anon=2 dirty=2 N1=2 kernelpagesize_kB=4
7f1200000000 default file=/images/root.raw mapped=9 N0=9 kernelpagesize_kB=4
01a00000 default heap anon=5 dirty=5 N0=5 kernelpagesize_kB=4
7ffe0000 default stack anon=3 dirty=3 N0=3 kernelpagesize_kB=4
";
        assert_eq!(parse(text, true).nodes, [(0, 10), (1, 22)].into());
        assert_eq!(parse(text, false).nodes, [(1, 2)].into());
    }

    #[test]
    fn guest_pages_are_counted_per_node_and_others_ignored() {
        let text = "\
7f1000000000 bind:0-1 file=/memfd:guest-memory\\040(deleted) mapped=30 active=0 N0=10 N1=20 \
kernelpagesize_kB=4
7f1100000000 default file=/srv/N9=5/image.raw mapped=7 N0=7 kernelpagesize_kB=4
7f1200000000 default anon=3 dirty=3 N0=3 kernelpagesize_kB=4
7f1300000000 default file=/memfd:guest-memory-layer\\040(deleted) anon=2 dirty=2 N1=2 kernelpagesize_kB=4
7f1400000000 default stack anon=3 N0=3
";
        let pages = parse(text, false);
        assert_eq!(pages.page_kib, 4);
        assert_eq!(pages.nodes, [(0, 10), (1, 22)].into());
        let huge =
            "7f10 bind:1 file=/memfd:guest-memory\\040(deleted) huge dirty=3 N1=3 kernelpagesize_kB=2048\n";
        let pages = parse(huge, false);
        assert_eq!((pages.page_kib, pages.nodes), (2048, [(1, 3)].into()));
        assert_eq!(parse("", false).nodes, [].into());
        assert_eq!(
            parse("x file=/memfd:guest-memory N0=y N=1 N4294967296=1\n", false).nodes,
            [].into()
        );
    }

    #[test]
    fn process_without_guest_memory_reports_none() {
        let own = i32::try_from(std::process::id()).unwrap();
        match guest_pages(own, false) {
            Ok(pages) => assert!(pages.nodes.is_empty(), "{pages:?}"),
            // A kernel without NUMA.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound),
        }
        guest_pages(i32::MAX, false).unwrap_err();
    }
}
