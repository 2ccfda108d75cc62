//! The test programs, and the place where each runs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// The place where a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On this machine; the tests need no KVM.
    Unit,
    /// On this machine, whose KVM runs guests.
    Here,
    /// On this machine, alone; the tests start labs themselves.
    OwnLabs,
    /// In a lab host of this shape.
    Lab(Shape),
}

/// The lab host that a program needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// The default: all of this machine's CPUs, most of its memory.
    OneHost,
    /// Two CPUs, each a NUMA node.
    TwoNodes,
    /// Four CPUs, each a NUMA node.
    FourNodes,
}

impl Shape {
    /// Its file in `tests/labs`, if it has one.
    pub fn file(self) -> Option<&'static str> {
        match self {
            Self::OneHost => None,
            Self::TwoNodes => Some("two-nodes.toml"),
            Self::FourNodes => Some("four-nodes.toml"),
        }
    }
}

/// One test program.
#[derive(Clone, Debug)]
pub struct Program {
    /// `boot` for guest tests, `shard` or `cell hosts` for those of a crate.
    pub name: String,
    /// Prefix of a test's full name in reports and in SPECIFICATION.md: `boot::`, or `shard `.
    pub prefix: String,
    /// The executable.
    pub path: PathBuf,
    /// The place where it runs.
    pub place: Place,
}

/// Guest programs that make clusters, or bind memory to a node.
const WITH_NODES: &[&str] = &[
    "cluster",
    "coherent",
    "composition",
    "deaths",
    "moves",
    "shards",
    "span",
    "underway",
];
/// CPUs that four cells need.
const CPUS_OF_FOUR_CELLS: usize = 4;

/// Whether this machine's KVM can run guests.
pub fn guests_run_here(mirrorball: &Path) -> bool {
    let probe = Command::new(mirrorball)
        .arg("probe")
        .stdout(Stdio::null())
        .status();
    probe.is_ok_and(|status| status.success())
}

/// The test programs among cargo's messages, in their order.
pub fn find(messages: &str, emulated: bool) -> Result<Vec<Program>, String> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut programs = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value =
            serde_json::from_str(line).map_err(|error| format!("cargo's message: {error}"))?;
        if message["profile"]["test"] == true
            && let Some(path) = message["executable"].as_str()
        {
            programs.push(program(&message, path, emulated, cpus)?);
        }
    }
    if programs.is_empty() {
        return Err("cargo has built no test program".into());
    }
    Ok(programs)
}

fn program(message: &Value, path: &str, emulated: bool, cpus: usize) -> Result<Program, String> {
    let manifest = message["manifest_path"].as_str().map(Path::new);
    let folder = manifest.and_then(Path::parent).and_then(Path::file_name);
    let folder = folder.and_then(|name| name.to_str());
    let target = message["target"]["name"].as_str();
    let (Some(folder), Some(target)) = (folder, target) else {
        return Err(format!("cargo's message names no package or target: {message}"));
    };
    let is_integration = message["target"]["kind"][0] == "test";
    let (name, prefix, place) = if folder == "tests" && is_integration {
        (
            target.to_owned(),
            format!("{target}::"),
            place_of_guests(target, emulated, cpus),
        )
    } else if folder == "lab" && is_integration {
        ("lab".to_owned(), "lab ".to_owned(), Place::OwnLabs)
    } else if path.contains("/loom/") {
        // The same target once more, compiled for the model checker.
        (format!("{folder} loom"), format!("{folder} "), Place::Unit)
    } else if is_integration {
        (
            format!("{folder} {target}"),
            format!("{folder} {target}::"),
            Place::Unit,
        )
    } else {
        let name = match target == folder.replace('-', "_") || target == folder {
            true => folder.to_owned(),
            false => format!("{folder} {target}"),
        };
        // The lab's unit tests beside its own guest program.
        let name = if name == "lab" {
            "lab units".to_owned()
        } else {
            name
        };
        (name, format!("{folder} "), Place::Unit)
    };
    Ok(Program {
        name,
        prefix,
        path: path.into(),
        place,
    })
}

fn place_of_guests(target: &str, emulated: bool, cpus: usize) -> Place {
    match target {
        "auto" | "hosts" => Place::OwnLabs,
        "wide" if emulated || cpus < CPUS_OF_FOUR_CELLS => Place::Lab(Shape::FourNodes),
        _ if emulated && WITH_NODES.contains(&target) => Place::Lab(Shape::TwoNodes),
        _ if emulated => Place::Lab(Shape::OneHost),
        _ => Place::Here,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(folder: &str, kind: &str, target: &str) -> String {
        serde_json::json!({
            "reason": "compiler-artifact",
            "manifest_path": format!("/src/{folder}/Cargo.toml"),
            "target": { "kind": [kind], "name": target },
            "profile": { "test": true },
            "executable": format!("/deps/{target}-0"),
        })
        .to_string()
    }

    #[test]
    fn programs_are_named_and_placed_by_package_and_target() {
        let messages = [
            message("tests", "test", "boot"),
            message("tests", "test", "moves"),
            message("tests", "test", "wide"),
            message("tests", "test", "hosts"),
            message("crates/cell", "lib", "cell"),
            message("crates/cell", "test", "hosts"),
            message("crates/urpc", "lib", "urpc").replace("/deps/", "/loom/deps/"),
            message("crates/lab", "lib", "lab"),
            message("crates/lab", "test", "lab"),
            "Compiling something".to_owned(),
        ]
        .join("\n");
        let found = find(&messages, true).expect("programs");
        let told: Vec<_> = found
            .iter()
            .map(|program| (program.name.as_str(), program.prefix.as_str(), program.place))
            .collect();
        assert_eq!(
            told,
            [
                ("boot", "boot::", Place::Lab(Shape::OneHost)),
                ("moves", "moves::", Place::Lab(Shape::TwoNodes)),
                ("wide", "wide::", Place::Lab(Shape::FourNodes)),
                ("hosts", "hosts::", Place::OwnLabs),
                ("cell", "cell ", Place::Unit),
                ("cell hosts", "cell hosts::", Place::Unit),
                ("urpc loom", "urpc ", Place::Unit),
                ("lab units", "lab ", Place::Unit),
                ("lab", "lab ", Place::OwnLabs),
            ]
        );
        assert_eq!(find(&messages, false).expect("programs")[0].place, Place::Here);
    }

    #[test]
    fn no_test_program_is_an_error() {
        assert!(find("{\"reason\":\"build-finished\",\"success\":true}", false).is_err());
    }
}
