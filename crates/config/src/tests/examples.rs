//! The examples and the documented schema match the reader.

use crate::{VmSpec, parse};

const DEBIAN: &str = include_str!("../../../../examples/debian.toml");
const TINY: &str = include_str!("../../../../examples/tiny.toml");
const NUMA: &str = include_str!("../../../../examples/numa.toml");
const SPAN: &str = include_str!("../../../../examples/span.toml");
const WARM: &str = include_str!("../../../../examples/warm.toml");
const PAGING: &str = include_str!("../../../../examples/paging.toml");
const SCHEMA: &str = include_str!("../../../../docs/reference/vm-file.md");

/// An example including its commented-out lines.
fn whole(text: &str) -> String {
    let line = |line: &str| match line.strip_prefix('#') {
        Some(code) if !code.starts_with(' ') => format!("{code}\n"),
        _ => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

/// Returns the keys of a table, from the reader's own error for an unknown key.
fn keys(unknown: &str) -> Vec<String> {
    let help = parse("any", unknown).unwrap_err().help.unwrap();
    let list = help.strip_prefix("the keys here: ").unwrap();
    list.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn all_keys() -> Vec<String> {
    [
        "zzzzzzzzzz = 1",
        "[kernel]\nzzzzzzzzzz = 1",
        "[root]\nzzzzzzzzzz = 1",
        "[[disks]]\nzzzzzzzzzz = 1",
        "[[shared]]\nzzzzzzzzzz = 1",
        "[[folders]]\nzzzzzzzzzz = 1",
        "[[nets]]\nzzzzzzzzzz = 1",
        "[[nodes]]\nzzzzzzzzzz = 1",
        "[span]\nzzzzzzzzzz = 1",
        "[io_limit]\nzzzzzzzzzz = 1",
    ]
    .into_iter()
    .flat_map(keys)
    .collect()
}

fn read(text: &str) -> VmSpec {
    parse("example", text).unwrap_or_else(|error| panic!("{:?}", miette::Report::new(error)))
}

#[test]
fn every_example_is_accepted() {
    assert_eq!(read(TINY).cpus, 1);
    assert_eq!(read(NUMA).nodes.len(), 2);
    assert_eq!(read(DEBIAN).disks.len(), 0);
    assert!(read(WARM).warm);
    assert_eq!(read(PAGING).resident, Some(crate::Size(128 << 20)));
    assert_eq!(read(SPAN).span, Some(crate::SpanSpec::Cells(vec![0, 1])));
}

#[test]
fn commented_out_lines_of_the_full_example_are_accepted() {
    let spec = read(&whole(DEBIAN));
    assert_eq!((spec.disks.len(), spec.nodes.len()), (3, 2));
    assert!(spec.kernel.is_some() && spec.command.is_some());
}

#[test]
fn the_full_example_shows_every_key() {
    let text = whole(DEBIAN);
    // Comments have the keys that a VM with the other keys can't have.
    let elsewhere = [
        ("span = { cells = [0, 1] }", SPAN),
        ("warm = true", WARM),
        ("resident = \"128M\"", PAGING),
        ("paging_file = \"/var/tmp\"", PAGING),
        ("paging_disk = \"512M\"", PAGING),
        ("memory_min = \"64M\"", PAGING),
        ("memory_weight = 200", PAGING),
    ];
    for (line, example) in elsewhere {
        assert!(text.contains(line) && example.contains(line), "{line}");
    }
    let absent: Vec<String> = all_keys()
        .into_iter()
        .filter(|key| {
            !elsewhere
                .iter()
                .any(|(line, _)| line.contains(&format!("{key} = ")))
        })
        .filter(|key| !text.contains(&format!("\n{key} = ")) && !text.contains(&format!("[{key}]")))
        .collect();
    assert_eq!(absent, Vec::<String>::new());
}

/// Promise CMD-22.
#[test]
fn the_schema_has_a_row_for_every_key() {
    let absent: Vec<String> = all_keys()
        .into_iter()
        .filter(|key| !SCHEMA.contains(&format!("| `{key}` |")))
        .collect();
    assert_eq!(absent, Vec::<String>::new());
}
