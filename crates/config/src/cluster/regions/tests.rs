use proptest::prelude::*;

use super::*;

const CELLS: &str = "[[cells]]\ncpus = \"0\"\nmemory = \"128M\"\n[[cells]]\ncpus = \"1\"\n";

fn region(keys: &str) -> String {
    format!("[[shared]]\n{keys}\n")
}

fn parsed(regions: &str) -> Result<Vec<RegionSpec>, crate::ConfigError> {
    let text = format!("{CELLS}{regions}");
    ClusterSpec::parse("cluster.toml", &text).map(|spec| spec.shared)
}

#[test]
fn region_has_its_size_cell_and_members() {
    let text = region("name = \"table\"\nsize = \"64M\"\ncell = 1\nreaders = [\"a*\"]\nwriters = [\"web\"]");
    let expected = RegionSpec {
        name: "table".to_owned(),
        size: Size(64 << 20),
        cell: 1,
        readers: vec!["a*".to_owned()],
        writers: vec!["web".to_owned()],
    };
    assert_eq!(parsed(&text).unwrap(), [expected]);
    assert_eq!(parsed("").unwrap(), []);
}

#[test]
fn wrong_regions_are_refused_with_the_place_and_help() {
    let rest = "size = \"2M\"\ncell = 0\nwriters = [\"web\"]";
    let of_size = |size: &str| {
        region(&format!(
            "name = \"a\"\nsize = {size}\ncell = 0\nwriters = [\"web\"]"
        ))
    };
    let twice = region(&format!("name = \"a\"\n{rest}")).repeat(2);
    let both = of_size("\"66M\"") + &of_size("\"64M\"").replace("\"a\"", "\"b\"");
    let many: String = (0..65)
        .map(|n| region(&format!("name = \"r{n}\"\n{rest}")))
        .collect();
    let patterns = format!("[{}]", "\"a\",".repeat(65));
    for (text, why, marked) in [
        (
            region(&format!("name = \"a/b\"\n{rest}")),
            "can't name",
            "\"a/b\"",
        ),
        (region(&format!("name = \"\"\n{rest}")), "can't name", "\"\""),
        (of_size("\"0M\""), "a region of 0", "\"0M\""),
        (of_size("\"3M\""), "a region of 3M", "\"3M\""),
        (of_size("\"4097K\""), "a region of", "\"4097K\""),
        (of_size("\"2T\""), "a region of 2T", "\"2T\""),
        (of_size("2"), "size", "2"),
        (
            region("name = \"a\"\nsize = \"2M\"\ncell = 2\nwriters = [\"web\"]"),
            "no cell 2",
            "2",
        ),
        (
            region("name = \"a\"\nsize = \"2M\"\ncell = 0\nwriters = []"),
            "no VM may write",
            "[]",
        ),
        (
            region("name = \"a\"\nsize = \"2M\"\ncell = 0"),
            "writers",
            "[[shared]]",
        ),
        (
            region("name = \"a\"\nsize = \"2M\"\ncell = 0\nwriters = [\"web\", \"a b\"]"),
            "no VM has a name like",
            "\"a b\"",
        ),
        (
            region("name = \"a\"\nsize = \"2M\"\ncell = 0\nwriters = [\"web\"]\nreaders = [\"\"]"),
            "no VM has a name like",
            "\"\"",
        ),
        (
            region(&format!(
                "name = \"a\"\nsize = \"2M\"\ncell = 0\nwriters = {patterns}"
            )),
            "65 names",
            &patterns,
        ),
        (region(&format!("name = \"a\"\n{rest}\nhome = 1")), "home", "home"),
        (twice, "in the file already", "\"a\""),
        (both, "larger than its 128M", "\"64M\""),
        (many, "65 shared regions", "[[shared]]"),
    ] {
        let error = parsed(&text).unwrap_err();
        let all = format!("{CELLS}{text}");
        assert!(error.message.contains(why), "{text}: {}", error.message);
        assert!(error.help.is_some(), "{text}");
        let span = error.span.unwrap();
        let found = &all[span.offset()..][..span.len()];
        assert!(found.starts_with(marked), "{text}: the error marks {found:?}");
    }
}

#[test]
fn writers_may_read_and_readers_may_not_write() {
    let spec = RegionSpec {
        name: "table".to_owned(),
        size: Size(2 << 20),
        cell: 0,
        readers: vec!["a*".to_owned(), "*-r".to_owned()],
        writers: vec!["web".to_owned(), "db-*-x".to_owned()],
    };
    use RegionAccess::{Read, Write};
    for (vm, read, write) in [
        ("web", true, true),
        ("web2", false, false),
        ("a", true, false),
        ("abc", true, false),
        ("ba", false, false),
        ("b-r", true, false),
        ("db-1-x", true, true),
        ("db-x", false, false),
        ("db--x", true, true),
        ("", false, false),
    ] {
        assert_eq!(
            [spec.allows(vm, Read), spec.allows(vm, Write)],
            [read, write],
            "{vm}"
        );
    }
}

/// Returns whether `name` matches, by trying each length for each `*`.
fn matches_slowly(pattern: &[u8], name: &[u8]) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some((b'*', rest)) => (0..=name.len()).any(|skipped| matches_slowly(rest, &name[skipped..])),
        Some((first, rest)) => name.first() == Some(first) && matches_slowly(rest, &name[1..]),
    }
}

proptest! {
    #[test]
    fn pattern_matches_as_each_choice_of_characters_does(pattern in "[ab*]{0,8}", name in "[ab]{0,8}") {
        prop_assert_eq!(
            matches(&pattern, &name),
            matches_slowly(pattern.as_bytes(), name.as_bytes())
        );
    }
}
