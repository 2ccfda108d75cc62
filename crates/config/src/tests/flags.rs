//! Errors in a spec made from `run`'s flags: the message names the flag, and the help is for flags.

use super::shown;
use crate::{ConfigError, VmSpec, check, parse};

fn spec() -> VmSpec {
    parse(
        "flags",
        "image = \"debian-12\"\n[[disks]]\npath = \"a.img\"\n[[disks]]\npath = \"b.img\"\n",
    )
    .unwrap()
}

fn refused(spec: &VmSpec) -> String {
    shown(&ConfigError::from_flags(&check(spec).unwrap_err()))
}

#[test]
fn too_little_memory_names_its_flag() {
    let mut spec = spec();
    spec.memory = "12M".parse().unwrap();
    assert_eq!(
        refused(&spec),
        "\n  × --memory: 12M of memory is too little\n  help: give it 64M or more\n"
    );
}

#[test]
fn no_cpu_names_its_flag() {
    let mut spec = spec();
    spec.cpus = 0;
    assert_eq!(
        refused(&spec),
        "\n  × --cpus: 0 CPUs\n  help: write a number from 1 to 254\n"
    );
}

#[test]
fn second_disk_is_distinguished_from_the_first() {
    let mut spec = spec();
    spec.disks[1].persistent = true;
    assert_eq!(
        refused(&spec),
        "\n  × --disk (number 2): a private disk that keeps its writes, of a VM without a name\n  \
         help: add `--name NAME`: the writes are kept by it\n"
    );
}

#[test]
fn missing_boot_source_gets_help_for_flags() {
    let mut spec = spec();
    spec.image = None;
    assert_eq!(
        refused(&spec),
        "\n  × neither an image nor a kernel to boot\n  help: add `--image debian-12`, or `--kernel FILE`\n"
    );
}

#[test]
fn a_bad_forward_names_its_flag() {
    let mut spec = parse("flags", "image = \"debian-12\"\nnets = [{ kind = \"user\" }]\n").unwrap();
    spec.nets.as_mut().unwrap()[0].forward.push("80".to_owned());
    assert!(refused(&spec).starts_with("\n  × --net: \"80\" is not a port forward\n"));
}
