//! Invalid spans. Each text is refused with exactly this error.

use proptest::prelude::*;

use super::{refused, shown};
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
        "span.cells = [7]\nmemory = \"64M\"\ncpu_limit = 1.5\ncpu_weight = 200\npages = \"thp\"\nshare = \
         \"never\"\n",
        "root.share = \"never\"\n[[disks]]\npath = \"a.img\"\nqueues = 2\n",
    ));
    assert_eq!(spec.span, Some(SpanSpec::Cells(vec![7])));
}

#[test]
fn duplicate_cell_is_refused() {
    let text = r#"image = "debian-12"
cpus = 4
span = { cells = [0, 1, 0] }
"#;
    let shown = r#"
  × cell 0 is named twice
   ╭─[vm.toml:3:25]
 2 │ cpus = 4
 3 │ span = { cells = [0, 1, 0] }
   ·                         ┬
   ·                         ╰── here
   ╰────
  help: name it once
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn span_of_no_cells_is_refused() {
    let text = r#"image = "debian-12"
span = { cells = [] }
"#;
    let shown = r#"
  × no cells to span
   ╭─[vm.toml:2:18]
 1 │ image = "debian-12"
 2 │ span = { cells = [] }
   ·                  ─┬
   ·                   ╰── here
   ╰────
  help: name one or more, as `cells = [0, 1]`, or write `span = "auto"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn more_cells_than_a_cluster_has_are_refused() {
    let text = r#"image = "debian-12"
cpus = 100
memory = "8G"
span.cells = [
0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64
]
"#;
    let shown = r#"
  × 65 cells
   ╭─[vm.toml:4:14]
 3 │ memory = "8G"
 4 │ span.cells = [
   ·              ┬
   ·              ╰── here
 5 │ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
   ╰────
  help: name 64 at most
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn fewer_vcpus_than_cells_are_refused() {
    let text = r#"image = "debian-12"
cpus = 2
span.cells = [0, 1, 2]
"#;
    let shown = r#"
  × 3 cells need a vCPU each, and it has 2
   ╭─[vm.toml:3:14]
 2 │ cpus = 2
 3 │ span.cells = [0, 1, 2]
   ·              ────┬────
   ·                  ╰── here
   ╰────
  help: write `cpus = 3` or more, or name fewer cells
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn too_little_memory_for_each_cell_is_refused() {
    let text = r#"image = "debian-12"
cpus = 2
memory = "126M"
span.cells = [0, 1]
"#;
    let shown = r#"
  × 2 cells for 126M of memory: each has 64M at least
   ╭─[vm.toml:4:14]
 3 │ memory = "126M"
 4 │ span.cells = [0, 1]
   ·              ───┬──
   ·                 ╰── here
   ╰────
  help: write `memory = "128M"` or more, or name fewer cells
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn cell_together_with_a_span_is_refused() {
    let text = r#"image = "debian-12"
cpus = 2
span = "auto"
cell = 1
"#;
    let shown = r#"
  × a cell, and a span: the VM runs in the span's cells
   ╭─[vm.toml:4:8]
 3 │ span = "auto"
 4 │ cell = 1
   ·        ┬
   ·        ╰── here
   ╰────
  help: leave out `cell`, or `span`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn nodes_together_with_a_span_are_refused() {
    let text = r#"image = "debian-12"
span = { cells = [0] }

[[nodes]]
cpus = "0"
memory = "512M"
"#;
    let shown = r#"
  × nodes, and a span: the guest has a node for each cell
   ╭─[vm.toml:4:1]
 3 │ 
 4 │ [[nodes]]
   · ────┬────
   ·     ╰── here
 5 │ cpus = "0"
   ╰────
  help: leave out `nodes`, or `span`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn persistent_memory_of_a_span_is_refused() {
    let text =
        "image = \"debian-12\"\nspan = \"auto\"\ncpus = 2\n[[disks]]\npath = \"a.img\"\nas = \"pmem\"\n";
    let said = refused(text);
    assert!(said.contains("a spanning VM has no persistent memory"), "{said}");
    assert!(said.contains("6 │ as = \"pmem\""), "{said}");
}

#[test]
fn pages_of_the_hosts_pool_are_refused() {
    let text = r#"image = "debian-12"
span = "auto"
pages = "1G"
"#;
    let shown = r#"
  × a spanning VM's memory can't be in the host's pool of huge pages
   ╭─[vm.toml:3:9]
 2 │ span = "auto"
 3 │ pages = "1G"
   ·         ──┬─
   ·           ╰── here
   ╰────
  help: use `pages = "thp"` or `"4K"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn sharing_of_a_span_is_refused() {
    let text = r#"image = "debian-12"
share = "deferred"
span = "auto"
"#;
    let shown = r#"
  × a spanning VM shares no memory with other VMs
   ╭─[vm.toml:2:9]
 1 │ image = "debian-12"
 2 │ share = "deferred"
   ·         ─────┬────
   ·              ╰── here
 3 │ span = "auto"
   ╰────
  help: leave out `share`, or use `share = "never"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn sharing_of_the_root_disk_of_a_span_is_refused() {
    let text = r#"image = "debian-12"
span = "auto"
root.share = "adaptive"
"#;
    let shown = r#"
  × a spanning VM shares no memory with other VMs
   ╭─[vm.toml:3:14]
 2 │ span = "auto"
 3 │ root.share = "adaptive"
   ·              ─────┬────
   ·                   ╰── here
   ╰────
  help: leave out `share`, or use `share = "never"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn sharing_of_a_disk_of_a_span_is_refused() {
    let text = r#"image = "debian-12"
span = "auto"
share = "never"

[[disks]]
path = "a.img"
share = "at-read"
"#;
    let shown = r#"
  × a spanning VM shares no memory with other VMs
   ╭─[vm.toml:7:9]
 6 │ path = "a.img"
 7 │ share = "at-read"
   ·         ────┬────
   ·             ╰── here
   ╰────
  help: leave out `share`, or use `share = "never"`
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn unknown_word_for_a_span_is_refused() {
    let text = r#"image = "debian-12"
span = "all"
"#;
    let shown = r#"
  × "all" is no span
   ╭─[vm.toml:2:8]
 1 │ image = "debian-12"
 2 │ span = "all"
   ·        ──┬──
   ·          ╰── here
   ╰────
  help: write "auto" or { cells = [0, 1] }
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn list_without_its_key_is_refused() {
    let text = r#"image = "debian-12"
span = [0, 1]
"#;
    let shown = r#"
  × sequence, where "auto" or { cells = [0, 1] } belongs
   ╭─[vm.toml:2:8]
 1 │ image = "debian-12"
 2 │ span = [0, 1]
   ·        ───┬──
   ·           ╰── here
   ╰────
  help: write "auto" or { cells = [0, 1] }
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn span_of_a_number_of_cells_is_refused() {
    let text = r#"image = "debian-12"
span = 2
"#;
    let shown = r#"
  × integer `2`, where "auto" or { cells = [0, 1] } belongs
   ╭─[vm.toml:2:8]
 1 │ image = "debian-12"
 2 │ span = 2
   ·        ┬
   ·        ╰── here
   ╰────
  help: write "auto" or { cells = [0, 1] }
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn unknown_key_of_a_span_is_refused() {
    let text = r#"image = "debian-12"
span = { cell = [0] }
"#;
    let shown = r#"
  × unknown key `cell`
   ╭─[vm.toml:2:10]
 1 │ image = "debian-12"
 2 │ span = { cell = [0] }
   ·          ──┬─
   ·            ╰── here
   ╰────
  help: did you mean `cells`?
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn span_without_its_cells_is_refused() {
    let text = r#"image = "debian-12"
span = {}
"#;
    let shown = r#"
  × `cells` is missing
   ╭─[vm.toml:2:8]
 1 │ image = "debian-12"
 2 │ span = {}
   ·        ─┬
   ·         ╰── here
   ╰────
  help: add `cells = ...` here
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn cell_that_is_no_number_is_refused() {
    let text = r#"image = "debian-12"
span = { cells = ["a"] }
"#;
    let shown = r#"
  × string "a", where a number belongs
   ╭─[vm.toml:2:19]
 1 │ image = "debian-12"
 2 │ span = { cells = ["a"] }
   ·                   ─┬─
   ·                    ╰── here
   ╰────
  help: write a whole number from 0 to 65535
"#;
    assert_eq!(refused(text), shown);
}

#[test]
fn cell_above_all_numbers_is_refused() {
    let text = r#"image = "debian-12"
span = { cells = [0, 70000] }
"#;
    let shown = r#"
  × integer `70000`, where a number belongs
   ╭─[vm.toml:2:22]
 1 │ image = "debian-12"
 2 │ span = { cells = [0, 70000] }
   ·                      ──┬──
   ·                        ╰── here
   ╰────
  help: write a whole number from 0 to 65535
"#;
    assert_eq!(refused(text), shown);
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
fn memory_of_another_kind_is_refused() {
    let text = r#"image = "debian-12"
cpus = 2
span = { cells = [0, 1], memory = "magic" }
"#;
    let told = refused(text);
    assert!(told.contains("vm.toml:3:"), "{told}");
    assert!(told.contains("magic") && told.contains("coherent"), "{told}");
}

#[test]
fn options_incompatible_with_coherent_memory_are_refused() {
    for (rest, told) in [
        ("pages = \"thp\"", "coherent memory is kept in pages of 4 KiB"),
        (
            "prefault = true",
            "pages of coherent memory come when they are used",
        ),
        ("memory = \"17G\"", "17G of coherent memory"),
    ] {
        let span = "span = { cells = [0, 1], memory = \"coherent\" }";
        let said = refused(&format!("image = \"debian-12\"\ncpus = 2\n{rest}\n{span}\n"));
        assert!(said.contains(told) && said.contains("leave out"), "{said}");
    }
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
