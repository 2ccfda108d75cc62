//! Spans of files and flags, and the faults of flags.

use proptest::prelude::*;

use super::shown;
use crate::{ConfigError, SpanSpec, VmSpec, check, parse};

fn read(rest: &str) -> VmSpec {
    let text = format!("image = \"debian-12\"\ncpus = 4\n{rest}");
    parse("vm.toml", &text).unwrap_or_else(|error| panic!("{:?}", miette::Report::new(error)))
}

#[test]
fn absent_automatic_and_named_spans_are_read() {
    assert_eq!(read("").span, None);
    assert_eq!(read("span = \"auto\"").span, Some(SpanSpec::Auto));
    assert_eq!(SpanSpec::Auto.cells(), None);
    let named = SpanSpec::Cells(vec![2, 0]);
    assert_eq!(read("span = { cells = [2, 0] }").span, Some(named.clone()));
    assert_eq!(read("[span]\ncells = [2, 0]").span, Some(named));
}

#[test]
fn options_compatible_with_a_span_are_accepted() {
    let spec = read(concat!(
        "span.cells = [7]\nmemory = \"64M\"\ncpu_limit = 1.5\ncpu_weight = 200\npages = \"thp\"\n\
         share = \"never\"\n",
        "root.share = \"never\"\n[[disks]]\npath = \"a.img\"\nqueues = 2\n",
    ));
    assert_eq!(spec.span, Some(SpanSpec::Cells(vec![7])));
}

/// The flag names its own values.
#[test]
fn span_of_a_flag_is_parsed_or_refused() {
    assert_eq!("auto".parse(), Ok(SpanSpec::Auto));
    assert_eq!("1,0".parse(), Ok(SpanSpec::Cells(vec![1, 0])));
    for text in ["", "all", "0,", "0-1", "70000", "{ cells = [0] }"] {
        let why = text.parse::<SpanSpec>().unwrap_err();
        assert_eq!(
            why.to_string(),
            format!("{text:?} are not cells: write `auto`, or their numbers, as 0,1")
        );
    }
}

#[test]
fn faults_of_a_flag_get_help_for_flags() {
    let spec = VmSpec {
        cpus: 1,
        span: Some(SpanSpec::Cells(vec![0, 1])),
        ..read("")
    };
    assert_eq!(
        shown(&ConfigError::from_flags(&check(&spec).unwrap_err())),
        "\n  × --span: 2 cells need a vCPU each, and it has 1\n  \
         help: add `--cpus 2` or more, or name fewer cells\n"
    );
}

proptest! {
    /// The monitor gets a spec as JSON, and `inspect` prints it as JSON.
    #[test]
    fn span_survives_a_round_trip_through_toml_and_the_flag(
        cells in prop::collection::btree_set(any::<u16>(), 1..65)
    ) {
        let cells: Vec<u16> = cells.into_iter().collect();
        let span = SpanSpec::Cells(cells.clone());
        prop_assert_eq!(span.cells(), Some(&cells[..]));
        let spec = VmSpec { cpus: 64, memory: crate::Size(1 << 32), span: Some(span.clone()), ..read("") };
        let text = toml::to_string(&spec).expect("TOML");
        prop_assert_eq!(parse("again", &text).expect("as written").span, Some(span.clone()));
        let flag: Vec<String> = cells.iter().map(u16::to_string).collect();
        prop_assert_eq!(flag.join(",").parse::<SpanSpec>(), Ok(span));
    }
}

#[test]
fn memory_that_is_shared_or_a_copy_each() {
    assert_eq!(
        read("span = { cells = [0, 1], memory = \"shared\" }").span,
        Some(SpanSpec::Cells(vec![0, 1]))
    );
    let spec = read("span = { cells = [1, 0], memory = \"coherent\" }");
    assert_eq!(spec.span, Some(SpanSpec::Coherent(vec![1, 0])));
    assert!(spec.is_coherent() && spec.has_balloon());
    let text = toml::to_string(&spec).expect("TOML");
    assert_eq!(parse("again", &text).expect("as written").span, spec.span);
}

#[test]
fn memory_of_a_flag_is_parsed_or_refused() {
    use crate::SpanMemory;
    assert_eq!("coherent".parse(), Ok(SpanMemory::Coherent));
    assert_eq!(
        "magic".parse::<SpanMemory>().unwrap_err().to_string(),
        "\"magic\" is no kind of memory: write shared or coherent"
    );
    let named = SpanSpec::Cells(vec![0, 1]);
    assert_eq!(
        named.with_memory(SpanMemory::Coherent),
        Ok(SpanSpec::Coherent(vec![0, 1]))
    );
    assert_eq!(
        SpanSpec::Auto
            .with_memory(SpanMemory::Coherent)
            .unwrap_err()
            .to_string(),
        "each cell has a copy of coherent memory: name the cells, as 0,1"
    );
}
