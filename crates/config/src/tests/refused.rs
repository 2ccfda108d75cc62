//! Refused VM files. Each file of `refused/` is a table of a name, a VM file, and its one error in one line:
//! line and column, the first line of the marked text, cause, and help.

use std::fmt::Write;

use serde::Deserialize;

use super::refused;
use crate::{ConfigError, parse};

#[derive(Deserialize)]
struct Table {
    case: Vec<Case>,
}

/// A VM file that is refused.
#[derive(Deserialize)]
struct Case {
    name: String,
    file: String,
    error: String,
}

/// Returns an error with its place in one line, as the tables have it.
pub(super) fn one_line(text: &str, error: &ConfigError) -> String {
    let span = error.span.expect("a place in the text");
    let before = &text[..span.offset()];
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    let marked = text[span.offset()..][..span.len()]
        .lines()
        .next()
        .unwrap_or_default();
    let help = error.help.as_deref().expect("help");
    format!("{line}:{column} {marked}: {}; help: {help}", error.message)
}

/// Checks all cases of a table, and reports those with another error.
#[track_caller]
fn check(table: &str) {
    let table: Table = toml::from_str(table).unwrap();
    let mut wrong = String::new();
    for Case { name, file, error } in &table.case {
        let found = match parse("vm.toml", file) {
            Ok(_) => "accepted".to_owned(),
            Err(found) => one_line(file, &found),
        };
        if found != *error {
            writeln!(wrong, "{name}\n  expected: {error}\n  found: {found}").unwrap();
        }
    }
    assert!(wrong.is_empty() && !table.case.is_empty(), "\n{wrong}");
}

#[test]
fn machine_faults_have_their_place_cause_and_help() {
    check(include_str!("refused/machine.toml"));
}

#[test]
fn kernel_faults_have_their_place_cause_and_help() {
    check(include_str!("refused/kernel.toml"));
}

#[test]
fn disk_faults_have_their_place_cause_and_help() {
    check(include_str!("refused/disk.toml"));
}

#[test]
fn card_faults_have_their_place_cause_and_help() {
    check(include_str!("refused/card.toml"));
}

#[test]
fn sharing_faults_have_their_place_cause_and_help() {
    check(include_str!("refused/sharing.toml"));
}

#[test]
fn shared_region_faults_have_their_place_cause_and_help() {
    check(include_str!("refused/shared.toml"));
}

#[test]
fn folder_faults_have_their_place_cause_and_help() {
    check(include_str!("refused/folders.toml"));
}

#[test]
fn span_faults_have_their_place_cause_and_help() {
    check(include_str!("refused/span.toml"));
}

#[test]
fn syntax_faults_have_their_place_cause_and_help() {
    check(include_str!("refused/syntax.toml"));
}

#[test]
fn error_is_drawn_with_its_file_line_caret_and_help() {
    let shown = r#"
  × CPU 2 of a VM with 2 CPUs
    ╭─[vm.toml:9:8]
  8 │ [[nodes]]
  9 │ cpus = "1-2"
    ·        ──┬──
    ·          ╰── here
 10 │ memory = "256M"
    ╰────
  help: CPUs are 0 to 1
"#;
    let text = r#"image = "debian-12"
cpus = 2

[[nodes]]
cpus = "0"
memory = "256M"

[[nodes]]
cpus = "1-2"
memory = "256M"
"#;
    assert_eq!(refused(text), shown);
}

/// A long cause is wrapped, and an empty mark is an arrow.
#[test]
fn long_cause_and_empty_mark_are_drawn() {
    let text = r#"name = "a"
image = "debian-12"
share_group = "red"
root.persistent = true
"#;
    let shown = r#"
  × a share group, and a private disk that keeps its writes: they would stand on the group's copy of the
  │ image
   ╭─[vm.toml:3:15]
 2 │ image = "debian-12"
 3 │ share_group = "red"
   ·               ──┬──
   ·                 ╰── here
 4 │ root.persistent = true
   ╰────
  help: leave out `persistent`, or give the VM an exclusive disk
"#;
    assert_eq!(refused(text), shown);
    let shown = r#"
  × neither an image nor a kernel to boot
   ╭─[vm.toml:1:1]
 1 │ cpus = 2
   · ▲
   · ╰── here
   ╰────
  help: add `image = "debian-12"`, or a [kernel] with its path
"#;
    assert_eq!(refused("cpus = 2\n"), shown);
    let shown = r#"
  × neither an image nor a kernel to boot
   ╭─[vm.toml:1:1]
   ╰────
  help: add `image = "debian-12"`, or a [kernel] with its path
"#;
    assert_eq!(refused(""), shown);
}
