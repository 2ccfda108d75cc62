//! The test programs, and the place where each runs.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::user;

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

/// The rights with which a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// The runner's own, which are root's.
    Own,
    /// An ordinary user's.
    User,
    /// An ordinary user's on a host that refuses user namespaces.
    UserWithoutNamespaces,
}

impl Rights {
    /// The argument by which the runner starts a program with these rights.
    pub fn argument(self) -> Option<&'static str> {
        match self {
            Self::Own => None,
            Self::User => Some(user::ARGUMENT),
            Self::UserWithoutNamespaces => Some(user::WITHOUT_NAMESPACES),
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
    /// The rights with which it runs.
    pub rights: Rights,
    /// Module of the tests that run; without one all do.
    pub module: Option<&'static str>,
}

impl Program {
    /// The command that runs it with its rights.
    pub fn words(&self) -> Result<Vec<String>, String> {
        let mut words = vec![self.path.display().to_string()];
        if let Some(argument) = self.rights.argument() {
            let own = std::env::current_exe().map_err(|error| error.to_string())?;
            words.splice(0..0, [own.display().to_string(), argument.to_owned()]);
        }
        words.extend(self.module.map(|module| format!("{module}::")));
        Ok(words)
    }
}

/// Guest programs that make clusters, or bind memory to a node.
const WITH_NODES: &[&str] = &[
    "admission",
    "cells",
    "cluster",
    "coherent",
    "composition",
    "deaths",
    "moves",
    "operations",
    "placement",
    "resources",
    "restarts",
    "service",
    "shards",
    "span",
    "underway",
];
/// Guest programs that run as an ordinary user. The others change the host, or look into the processes of
/// root.
const AS_USER: &[&str] = &[
    "clones",
    "control",
    "disks",
    "endings",
    "monitors",
    "overlays",
    "pci",
    "pmem",
    "sharing",
    "successors",
    "vcpus",
    "virtiofs",
];
/// Those that run a second time where user namespaces are refused.
const ALSO_WITHOUT_NAMESPACES: &[&str] = &["overlays", "pmem", "vcpus", "virtiofs"];
/// Guest programs whose guests are a few instructions, which a KVM that emulates runs, too, in a tenth of the
/// time of a lab host. A campaign runs them in a lab host, which has NUMA nodes and control groups.
const ON_ANY_KVM: &[&str] = &["admission", "cells", "networks", "paging", "placement", "service"];
/// Modules of these whose tests run in a lab host besides, for its control groups.
const ALSO_WITH_GROUPS: &[(&str, &str)] = &[("admission", "limits")];
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

/// Whether this machine has a KVM that runs guests of a few instructions, at least.
pub fn has_kvm() -> bool {
    let kvm = File::options().read(true).write(true).open("/dev/kvm");
    kvm.is_ok()
}

/// How guests run on this machine.
#[derive(Clone, Copy, Debug)]
pub struct Guests {
    /// Whether guests run in lab hosts, as this machine's KVM can't run them.
    pub emulated: bool,
    /// Whether guests of a few instructions run on this machine all the same.
    pub any_kvm: bool,
}

/// The test programs among cargo's messages, in their order.
pub fn find(messages: &str, guests: Guests) -> Result<Vec<Program>, String> {
    let emulated = guests.emulated;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    // Commands in a lab host are root's.
    let is_root = emulated || nix::unistd::geteuid().is_root();
    let mut programs = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value =
            serde_json::from_str(line).map_err(|error| format!("cargo's message: {error}"))?;
        if message["profile"]["test"] == true
            && let Some(path) = message["executable"].as_str()
        {
            let mut program = program(&message, path, guests, cpus)?;
            let with_groups = ALSO_WITH_GROUPS.iter().find(|(name, _)| *name == program.name);
            if let Some((_, module)) = with_groups.filter(|_| emulated && program.place == Place::Here) {
                programs.push(Program {
                    name: format!("{} with control groups", program.name),
                    place: Place::Lab(Shape::TwoNodes),
                    module: Some(module),
                    ..program.clone()
                });
            }
            if is_root && program.place != Place::Unit && AS_USER.contains(&program.name.as_str()) {
                program.rights = Rights::User;
                if ALSO_WITHOUT_NAMESPACES.contains(&program.name.as_str()) {
                    programs.push(Program {
                        name: format!("{} without namespaces", program.name),
                        rights: Rights::UserWithoutNamespaces,
                        ..program.clone()
                    });
                }
            }
            programs.push(program);
        }
    }
    if programs.is_empty() {
        return Err("cargo has built no test program".into());
    }
    Ok(programs)
}

fn program(message: &Value, path: &str, guests: Guests, cpus: usize) -> Result<Program, String> {
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
            place_of_guests(target, guests, cpus),
        )
    } else if folder == "lab" && is_integration {
        ("lab".to_owned(), "lab ".to_owned(), Place::OwnLabs)
    } else if path.contains("/loom/") {
        // The same target again, compiled for the model checker.
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
        rights: Rights::Own,
        module: None,
    })
}

fn place_of_guests(target: &str, guests: Guests, cpus: usize) -> Place {
    let emulated = guests.emulated;
    match target {
        "auto" | "hosts" | "joins" => Place::OwnLabs,
        // They start no guest.
        "fuzz" | "invitations" | "relays" | "users" => Place::Unit,
        "wide" if emulated || cpus < CPUS_OF_FOUR_CELLS => Place::Lab(Shape::FourNodes),
        _ if guests.any_kvm && ON_ANY_KVM.contains(&target) => Place::Here,
        _ if emulated && WITH_NODES.contains(&target) => Place::Lab(Shape::TwoNodes),
        _ if emulated => Place::Lab(Shape::OneHost),
        _ => Place::Here,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guests of Linux run in lab hosts, those of a few instructions here.
    const EMULATED: Guests = Guests {
        emulated: true,
        any_kvm: true,
    };

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
            message("tests", "test", "cells"),
            message("tests", "test", "hosts"),
            message("tests", "test", "users"),
            message("tests", "test", "fuzz"),
            message("crates/cell", "lib", "cell"),
            message("crates/cell", "test", "hosts"),
            message("crates/urpc", "lib", "urpc").replace("/deps/", "/loom/deps/"),
            message("crates/lab", "lib", "lab"),
            message("crates/lab", "test", "lab"),
            "Compiling something".to_owned(),
        ]
        .join("\n");
        let found = find(&messages, EMULATED).expect("programs");
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
                ("cells", "cells::", Place::Here),
                ("hosts", "hosts::", Place::OwnLabs),
                ("users", "users::", Place::Unit),
                ("fuzz", "fuzz::", Place::Unit),
                ("cell", "cell ", Place::Unit),
                ("cell hosts", "cell hosts::", Place::Unit),
                ("urpc loom", "urpc ", Place::Unit),
                ("lab units", "lab ", Place::Unit),
                ("lab", "lab ", Place::OwnLabs),
            ]
        );
        let in_labs = Guests {
            any_kvm: false,
            ..EMULATED
        };
        let found = find(&messages, in_labs).expect("programs");
        assert_eq!(found[3].place, Place::Lab(Shape::TwoNodes));
        let on_kvm = Guests {
            emulated: false,
            any_kvm: true,
        };
        assert_eq!(find(&messages, on_kvm).expect("programs")[0].place, Place::Here);
    }

    #[test]
    fn guest_programs_that_do_not_test_root_run_as_a_user() {
        let messages = [
            message("tests", "test", "pmem"),
            message("tests", "test", "moves"),
            message("crates/cell", "lib", "cell"),
        ]
        .join("\n");
        let found = find(&messages, EMULATED).expect("programs");
        let rights: Vec<_> = found
            .iter()
            .map(|program| (program.name.as_str(), program.rights))
            .collect();
        assert_eq!(
            rights,
            [
                ("pmem without namespaces", Rights::UserWithoutNamespaces),
                ("pmem", Rights::User),
                ("moves", Rights::Own),
                ("cell", Rights::Own),
            ]
        );
        let words = found[1].words().expect("the runner has a path");
        assert_eq!(words[1..], [user::ARGUMENT, "/deps/pmem-0"]);
        assert_eq!(found[2].words().expect("a path"), ["/deps/moves-0"]);
    }

    #[test]
    fn limits_of_users_are_tested_with_control_groups_too() {
        let found = find(&message("tests", "test", "admission"), EMULATED).expect("programs");
        let told: Vec<_> = found
            .iter()
            .map(|program| (program.name.as_str(), program.place, program.module))
            .collect();
        assert_eq!(
            told,
            [
                (
                    "admission with control groups",
                    Place::Lab(Shape::TwoNodes),
                    Some("limits")
                ),
                ("admission", Place::Here, None),
            ]
        );
        let words = found[0].words().expect("words");
        assert_eq!(words, ["/deps/admission-0", "limits::"]);
        for guests in [(false, true), (true, false)] {
            let (emulated, any_kvm) = guests;
            let found = find(
                &message("tests", "test", "admission"),
                Guests { emulated, any_kvm },
            );
            assert_eq!(found.expect("programs").len(), 1, "{guests:?}");
        }
    }

    #[test]
    fn no_test_program_is_an_error() {
        assert!(find("{\"reason\":\"build-finished\",\"success\":true}", EMULATED).is_err());
    }
}
