//! Guest memory by NUMA node, from `/proc/PID/numa_maps` (proc(5)).
//!
//! Only mappings of the guest's own memory count. Pages of image files that a VM maps are page cache of the
//! host's.

use std::fs;
use std::io;

use registry::update::MemoryPages;

use super::classify::GUEST_MEMORY;

/// The pages of a shard's guest memory.
///
/// # Errors
/// If this user may not read them, the process has ended, or the host's kernel does not count by node.
pub fn guest_pages(pid: i32) -> io::Result<MemoryPages> {
    Ok(parse(&fs::read_to_string(format!("/proc/{pid}/numa_maps"))?))
}

/// Adds up lines like `7f00 bind:0 file=/memfd:guest-memory\040(deleted) mapped=9 N0=8 N1=1
/// kernelpagesize_kB=4`. All mappings of a guest's memory have pages of one size.
fn parse(text: &str) -> MemoryPages {
    let mut all = MemoryPages {
        page_kib: 4,
        ..MemoryPages::default()
    };
    let file = |line: &str| -> Option<String> {
        let mut words = line.split_ascii_whitespace();
        words
            .find_map(|word| word.strip_prefix("file="))
            .map(str::to_owned)
    };
    // The kernel writes a space of a name as `\040`. A layer of a clone has a longer name.
    let is_memory = |name: String| {
        name.strip_prefix(GUEST_MEMORY)
            .is_some_and(|rest| !rest.starts_with('-'))
    };
    let is_in_a_file = text.lines().filter_map(file).any(is_memory);
    let of_guest = |line: &&str| match file(line) {
        Some(name) => name.starts_with(GUEST_MEMORY),
        // Memory that the host scans is in no file. Stacks of threads look like it; they are small.
        None => {
            !is_in_a_file
                && !line
                    .split_ascii_whitespace()
                    .any(|word| word == "heap" || word == "stack")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_memory_in_no_file_are_counted_where_a_shard_has_no_memory_file() {
        let text = "\
7f1000000000 default anon=30 dirty=30 N0=10 N1=20 kernelpagesize_kB=4
7f1100000000 default file=/memfd:guest-memory-layer\\040(deleted) anon=2 dirty=2 N1=2 kernelpagesize_kB=4
7f1200000000 default file=/images/root.raw mapped=9 N0=9 kernelpagesize_kB=4
01a00000 default heap anon=5 dirty=5 N0=5 kernelpagesize_kB=4
7ffe0000 default stack anon=3 dirty=3 N0=3 kernelpagesize_kB=4
";
        let counted = |text: &str| parse(text).nodes.into_iter().collect::<Vec<_>>();
        assert_eq!(counted(text), [(0, 10), (1, 22)]);
        let file = "7f1300000000 default file=/memfd:guest-memory\\040(deleted) mapped=7 N0=7";
        assert_eq!(counted(&format!("{text}{file}\n")), [(0, 7), (1, 2)]);
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
        let pages = parse(text);
        assert_eq!(pages.page_kib, 4);
        assert_eq!(pages.nodes, [(0, 10), (1, 22)].into());
        let huge =
            "7f10 bind:1 file=/memfd:guest-memory\\040(deleted) huge dirty=3 N1=3 kernelpagesize_kB=2048\n";
        let pages = parse(huge);
        assert_eq!((pages.page_kib, pages.nodes), (2048, [(1, 3)].into()));
        assert_eq!(parse("").nodes, [].into());
        assert_eq!(
            parse("x file=/memfd:guest-memory N0=y N=1 N4294967296=1\n").nodes,
            [].into()
        );
    }

    #[test]
    fn process_without_guest_memory_reports_none() {
        let own = i32::try_from(std::process::id()).unwrap();
        match guest_pages(own) {
            Ok(pages) => assert!(pages.nodes.is_empty(), "{pages:?}"),
            // A kernel without NUMA.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::NotFound),
        }
        guest_pages(i32::MAX).unwrap_err();
    }
}
