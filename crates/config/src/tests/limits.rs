//! Limits of a VM file: the last accepted value, and the first refused one.

use std::fmt::Write;

use crate::parse;
use crate::validate::mac;

/// Whether a VM file is accepted; a refusal must be for the key `at`.
fn taken(at: &str, text: &str) -> bool {
    match parse("vm.toml", text) {
        Ok(_) => true,
        Err(error) => {
            let span = error.span.expect("a place in the text");
            let place = &text[span.offset()..][..span.len()];
            let line_start = text[..span.offset()].rfind('\n').map_or(0, |end| end + 1);
            let line = text[line_start..].lines().next().unwrap_or_default();
            assert!(
                line.contains(at) || place.contains(at),
                "{at}: {}: {line}",
                error.message
            );
            false
        }
    }
}

#[track_caller]
fn ends(key: &str, within: &[&str], beyond: &[&str]) {
    let text = |value: &str| format!("image = \"debian-12\"\n{key} = {value}\n");
    let last = key.rsplit('.').next().unwrap();
    for value in within {
        assert!(taken(last, &text(value)), "{key} = {value}");
    }
    for value in beyond {
        assert!(!taken(last, &text(value)), "{key} = {value}");
    }
}

#[test]
fn numbers_have_the_documented_limits() {
    ends("cpus", &["1", "254"], &["0", "255"]);
    ends("cpu_weight", &["1", "10000"], &["0", "10001"]);
    ends("cpu_limit", &["0.01", "1024"], &["0.009", "1024.1"]);
    ends("cpu_reservation", &["0.01", "1024"], &["0.009", "1024.1", "nan"]);
    ends("scratch_limit", &["\"1M\""], &["\"1023K\""]);
    ends("memory_min", &["\"0M\"", "\"512M\""], &["\"513M\""]);
    ends("resident", &["\"16M\"", "\"4T\""], &["\"16383K\""]);
    ends(
        "memory",
        &["\"64M\"", "\"4T\""],
        &["\"62M\"", "\"65M\"", "\"4194306M\""],
    );
}

#[test]
fn gang_is_left_out_where_it_is_the_default() {
    let spec = |keys: &str| parse("vm.toml", &format!("image = \"debian-12\"\n{keys}")).unwrap();
    let written = |keys: &str| crate::text_of(&spec(keys)).unwrap();
    assert!(spec("").gang && !written("").contains("gang"));
    assert!(!spec("gang = false\n").gang && written("gang = false\n").contains("gang = false\n"));
}

#[test]
fn reservation_of_cpu_time_is_at_most_the_limit_and_of_one_cell() {
    let text = |keys: &str| format!("image = \"debian-12\"\ncpu_reservation = 0.5\n{keys}\n");
    assert!(taken("cpu_reservation", &text("cpu_limit = 0.5")));
    assert!(!taken("cpu_reservation", &text("cpu_limit = 0.4")));
    assert!(!taken("cpu_reservation", &text("cpus = 2\nspan = \"auto\"")));
    let spec = parse("vm.toml", &text("")).unwrap();
    assert_eq!(spec.cpu_reservation_permille(), 500);
}

#[test]
fn limit_of_memory_has_room_for_the_shards_own_memory() {
    let text = |limit| format!("image = \"debian-12\"\nmemory = \"128M\"\nmemory_limit = \"{limit}\"\n");
    assert!(taken("memory_limit", &text("192M")));
    assert!(!taken("memory_limit", &text("191M")));
}

#[test]
fn limit_of_memory_needs_no_room_for_what_is_paged_out() {
    let text = |limit| {
        format!("image = \"debian-12\"\nmemory = \"512M\"\nresident = \"64M\"\nmemory_limit = \"{limit}\"\n")
    };
    // The state of each page of the guest takes 40 bytes: 5 MiB.
    assert!(taken("memory_limit", &text("133M")));
    assert!(!taken("memory_limit", &text("132M")));
}

#[test]
fn promise_is_a_part_of_what_the_vm_may_have_and_a_weight_is_for_vms_that_can_be_trimmed() {
    let text = |resident, least, weight| {
        let key = |name, value: &str| match value {
            "" => String::new(),
            value => format!("{name} = {value}\n"),
        };
        let keys = [
            key("resident", resident),
            key("memory_min", least),
            key("memory_weight", weight),
        ];
        format!("image = \"debian-12\"\nmemory = \"512M\"\n{}", keys.concat())
    };
    assert!(taken("memory_min", &text("\"128M\"", "\"128M\"", "10000")));
    assert!(!taken("memory_min", &text("\"128M\"", "\"129M\"", "")));
    assert!(taken("memory_min", &text("\"1G\"", "\"512M\"", "1")));
    assert!(!taken("memory_min", &text("\"1G\"", "\"513M\"", "")));
    for weight in ["0", "10001"] {
        assert!(!taken("memory_weight", &text("\"128M\"", "\"64M\"", weight)));
    }
    assert!(!taken("memory_weight", &text("\"128M\"", "", "100")));
    assert!(!taken("memory_weight", &text("", "\"64M\"", "100")));
}

#[test]
fn limit_of_memory_has_room_for_the_state_of_a_paging_disk() {
    let text = |limit| {
        format!(
            "image = \"debian-12\"\nmemory = \"512M\"\nresident = \"64M\"\npaging_disk = \"2G\"\n\
             memory_limit = \"{limit}\"\n"
        )
    };
    // 31 bytes for each of 524,288 pages, and 40 for each of the guest's 131,072: 20.5 MiB.
    assert!(taken("memory_limit", &text("149M")));
    assert!(!taken("memory_limit", &text("148M")));
}

#[test]
fn paging_disk_has_the_documented_limits() {
    let text = |memory, disk| {
        format!(
            "image = \"debian-12\"\nmemory = \"{memory}\"\nresident = \"64M\"\npaging_disk = \"{disk}\"\n"
        )
    };
    for (memory, disk, is_taken) in [
        ("64M", "1M", true),
        ("64M", "1020K", false),
        ("64M", "1026K", false),
        ("64M", "1028K", true),
        ("64M", "256M", true),
        ("64M", "257M", false),
        ("2T", "8T", true),
        ("4T", "8T", true),
        ("4T", "9T", false),
    ] {
        assert_eq!(
            taken("paging_disk", &text(memory, disk)),
            is_taken,
            "{memory} {disk}"
        );
    }
}

#[test]
fn paging_disk_counts_among_the_disks() {
    let text = |disks: usize, more: &str| {
        let disk = "[[disks]]\npath = \"d\"\n";
        format!(
            "image = \"debian-12\"\nresident = \"64M\"\n{more}{}",
            disk.repeat(disks)
        )
    };
    let paging_disk = "paging_disk = \"64M\"\n";
    assert!(taken("disks", &text(24, "")));
    assert!(taken("disks", &text(23, paging_disk)));
    assert!(!taken("disks", &text(24, paging_disk)));
}

#[test]
fn restart_and_a_command_are_refused_together() {
    let text = |restart, more| format!("image = \"debian-12\"\nrestart = \"{restart}\"\n{more}");
    let command = "command = [\"true\"]\n";
    for restart in ["no", "on-failure", "always"] {
        assert!(taken("restart", &text(restart, "")), "{restart}");
        assert_eq!(
            taken("restart", &text(restart, command)),
            restart == "no",
            "{restart}"
        );
    }
    assert!(!taken("restart", &text("sometimes", "")));
}

#[test]
fn names_and_command_lines_have_the_documented_limits() {
    let quoted = |length: usize| format!("\"{}\"", "x".repeat(length));
    ends("name", &[&quoted(1), &quoted(63)], &[&quoted(0), &quoted(64)]);
    ends(
        "name",
        &["\"a.b-c_0\""],
        &["\".a\"", "\"-a\"", "\"a/b\"", "\"a b\""],
    );
    ends("kernel.cmdline", &[&quoted(2000)], &[&quoted(2001), "\"a\\nb\""]);
}

#[test]
fn queue_pairs_of_a_card_have_the_documented_limit() {
    let text = |kind: &str, queues| format!("image = \"debian-12\"\n[[nets]]\n{kind}\nqueues = {queues}\n");
    let tap = "kind = \"tap\"\ntap = \"tap0\"";
    for (queues, is_taken) in [(0, false), (1, true), (8, true), (9, false)] {
        assert_eq!(taken("queues", &text(tap, queues)), is_taken, "{queues}");
    }
    for (queues, is_taken) in [(0, false), (1, true), (2, false)] {
        assert_eq!(
            taken("queues", &text("kind = \"user\"", queues)),
            is_taken,
            "{queues}"
        );
    }
}

#[test]
fn names_of_tap_devices_are_those_that_linux_takes() {
    let text = |tap: &str| format!("image = \"debian-12\"\n[[nets]]\nkind = \"tap\"\ntap = {tap:?}\n");
    for name in ["t", "tap-0.1_x", "fifteen-letters", "..."] {
        assert!(taken("tap", &text(name)), "{name}");
    }
    for name in [
        "",
        "sixteen-letters-",
        ".",
        "..",
        "a/b",
        "a:b",
        "a%d",
        "a b",
        "\u{e9}",
    ] {
        assert!(!taken("tap", &text(name)), "{name}");
    }
}

#[test]
fn addresses_of_cards_are_six_bytes_of_one_card() {
    assert_eq!(mac("02:00:0A:bc:00:01"), Some([2, 0, 0x0A, 0xBC, 0, 1]));
    for text in [
        "",
        "02:00:00:00:00",
        "02:00:00:00:00:01:02",
        "00:00:00:00:00:00",
        "03:00:00:00:00:01",
        "2:0:0:0:0:1",
        "02:00:00:00:00:+1",
        "02:00:00:00:00:0g",
    ] {
        assert_eq!(mac(text), None, "{text}");
    }
}

#[test]
fn nodes_and_cells_of_a_vm_end_at_64() {
    let nodes = |count: usize| {
        let mut text = format!("image = \"debian-12\"\ncpus = 70\nmemory = \"{}M\"\n", count * 2);
        for node in 0..count {
            // The last node has the remaining CPUs.
            let last = if node + 1 == count { 69 } else { node };
            write!(text, "[[nodes]]\ncpus = \"{node}-{last}\"\nmemory = \"2M\"\n").unwrap();
        }
        taken("[[nodes]]", &text)
    };
    assert!(nodes(64));
    assert!(!nodes(65));
    let cells = |count: usize, cpus: usize, memory: usize| {
        let listed: Vec<usize> = (0..count).collect();
        let text = format!(
            "image = \"debian-12\"\ncpus = {cpus}\nmemory = \"{memory}M\"\nspan = {{ cells = {listed:?} }}\n"
        );
        taken("cells", &text)
    };
    assert!(cells(64, 64, 64 * 64));
    assert!(!cells(65, 65, 65 * 64));
    assert!(!cells(64, 63, 64 * 64), "a vCPU for each");
    assert!(!cells(64, 64, 64 * 64 - 2), "64M for each");
    assert!(!cells(0, 1, 64));
}
