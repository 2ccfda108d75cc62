//! VMs that start warm: the keys that a template can serve, and the others.

use crate::{ConfigError, check, parse};

fn with_template(lines: &str) -> Result<crate::VmSpec, ConfigError> {
    parse("vm.toml", &format!("image = \"tiny\"\nwarm = true\n{lines}"))
}

#[test]
fn keys_that_need_another_machine_than_the_templates_are_refused_by_name() {
    for (key, lines) in [
        ("cmdline", "[kernel]\ncmdline = \"quiet\""),
        ("kernel", "[kernel]\npath = \"vmlinux\""),
        (
            "disks",
            "disks = [{ path = \"a.raw\" }, { path = \"b.raw\", as = \"pmem\" }]",
        ),
        ("persistent", "name = \"a\"\n[root]\npersistent = true"),
        ("folders", "folders = [{ path = \"/srv\", tag = \"srv\" }]"),
        ("shared", "shared = [{ name = \"r\" }]"),
        ("span", "span = \"auto\""),
        ("resident", "resident = \"64M\""),
        ("nodes", "cpus = 1\nnodes = [{ cpus = \"0\", memory = \"512M\" }]"),
        ("memory_nodes", "memory_nodes = [0]"),
        ("pages", "pages = \"thp\""),
        ("prefault", "prefault = true"),
        ("balloon", "balloon = false"),
        ("share", "share = \"never\""),
        ("share", "root = { share = \"never\" }"),
        (
            "nets",
            "nets = [{ kind = \"user\" }, { kind = \"tap\", tap = \"tap0\" }]",
        ),
    ] {
        let error = with_template(lines).unwrap_err();
        assert!(
            error.message.contains("starts from a template"),
            "{lines}: {error}"
        );
        let help = error.help.unwrap();
        assert_eq!(help, format!("leave out `{key}` or `warm`"), "{lines}");
        let cold = parse("vm.toml", &format!("image = \"tiny\"\n{lines}"));
        assert!(cold.is_ok(), "{lines}: {cold:?}");
    }
    let error = parse("vm.toml", "warm = true\n[kernel]\npath = \"vmlinux\"").unwrap_err();
    assert!(error.message.contains("without an image"), "{error}");
}

#[test]
fn keys_that_the_host_serves_are_accepted() {
    for lines in [
        "",
        "name = \"web\"\ncommand = [\"true\"]",
        "cpus = 4\nmemory = \"1G\"\ncpu_limit = 1.5\nmemory_limit = \"2G\"",
        "nets = []",
        "nets = [{ kind = \"user\", forward = [\"8080:80\"], host = true }]",
        "nets = [{ kind = \"subnet\", network = \"red\" }, { kind = \"user\" }]",
        "disks = [{ path = \"a.raw\" }, { path = \"b.raw\", mode = \"exclusive\", persistent = true }]",
        "disks = [{ path = \"a.qcow2\", read_only = true, queues = 2, bandwidth = \"1M\" }]",
        "share_group = \"red\"\nsandbox = \"require\"\nshare = \"at-read\"",
        "restart = \"on-failure\"\nscratch_limit = \"1G\"",
    ] {
        let spec = with_template(lines).unwrap();
        assert!(spec.warm, "{lines}");
    }
}

#[test]
fn refused_flag_is_named_and_older_programs_read_a_cold_vm() {
    let mut spec = with_template("").unwrap();
    spec.disks = parse(
        "vm.toml",
        "image = \"tiny\"\ndisks = [{ path = \"a.raw\", as = \"pmem\" }]",
    )
    .unwrap()
    .disks;
    let error = ConfigError::from_flags(&check(&spec).unwrap_err());
    assert!(error.message.starts_with("--disk: "), "{error}");
    assert_eq!(error.help.as_deref(), Some("leave out the flag or --warm"));
    let cold = parse("vm.toml", "image = \"tiny\"").unwrap();
    assert!(!toml::to_string(&cold).unwrap().contains("warm"));
}
