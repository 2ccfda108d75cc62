//! The card of a VM that lists none, and copies of such a VM.

use serde_json::Value;

use super::{Host, card_of};

impl Host {
    /// A VM file that lists no cards.
    fn file_without_cards(&self, name: &str, keys: &str) -> String {
        let text = format!(
            "name = \"{name}\"\nkernel = {{ path = {:?} }}\nmemory = \"64M\"\n{keys}\n",
            self.guest
        );
        let path = self.scratch.write(&format!("{name}.toml"), text);
        path.into_os_string().into_string().expect("UTF-8")
    }
}

/// The cards that a VM's record lists.
#[track_caller]
fn cards_in_record(host: &Host, vm: &str) -> Value {
    host.call(["inspect", vm]).ok().json()["spec"]["nets"].clone()
}

#[test]
fn vm_without_a_list_of_cards_has_one_of_a_subnet_in_its_record() {
    let host = Host::new("default");
    let (a, b) = (
        host.file_without_cards("a", ""),
        host.file_without_cards("b", "share_group = \"g\""),
    );
    let c = host.file_without_cards("c", "");
    // The default card needs no passt.
    let run = host.call(["run", "-d", &a, &b, &c]).env("PATH", "/nowhere");
    run.ok();
    let network = card_of(&host, "a")[0].clone();
    assert!(network.starts_with("run-"), "{network}");
    assert_eq!(card_of(&host, "c")[0], network);
    assert_eq!(card_of(&host, "b")[0], "group-g");
    let cards = cards_in_record(&host, "a");
    assert_eq!(
        (&cards[0]["kind"], &cards[0]["network"]),
        (&"subnet".into(), &network.clone().into()),
        "{cards}"
    );

    // A defined VM, and those of flags.
    host.call(["vm", "define", &host.file_without_cards("d", "")])
        .ok();
    host.call(["vm", "start", "d"]).ok();
    assert_eq!(card_of(&host, "d")[0], "vm-d");
    let kernel = host.guest.to_str().expect("UTF-8");
    for (name, net, kinds) in [
        ("e", &[][..], &["subnet"][..]),
        ("f", &["--net", "none"], &[]),
        (
            "g",
            &["--net", "subnet,network=n", "--net", "subnet"],
            &["subnet", "subnet"],
        ),
    ] {
        let words = ["run", "-d", "--memory", "64M", "--kernel", kernel, "--name", name];
        host.call([&words[..], net].concat()).ok();
        let cards = cards_in_record(&host, name);
        let cards = cards.as_array().expect("a list").iter();
        let found: Vec<_> = cards.map(|card| card["kind"].clone()).collect();
        assert_eq!(found, *kinds, "{name}");
    }
}

/// Without an identity of its own, a guest keeps its addresses: its card is then on another network than the
/// parent's.
#[test]
fn copies_with_their_parents_identity_have_networks_of_their_own_by_default() {
    let host = Host::new("default-copies");
    host.run(&[&host.file_without_cards("web", "")]);
    let parent = card_of(&host, "web");
    let expect_alone = |name: &str| {
        let card = card_of(&host, name);
        assert_eq!(card[0], format!("vm-{name}"));
        assert_eq!(card[1..], parent[1..]);
    };
    let cloned = host.call(["clone", "--as-is", "web"]).ok();
    assert!(!cloned.errors().contains("passes no frames"), "{cloned}");
    expect_alone("web-1");
    let snapshot = host.scratch.join("snap");
    let snapshot = snapshot.to_str().expect("UTF-8");
    host.call(["snapshot", "web", snapshot]).ok();
    let kernel = host.guest.to_str().expect("UTF-8");
    let words = ["restore", snapshot, "--lab", "never", "--kernel", kernel];
    let as_is = ["--as-is", "--count", "2", "--name", "copy-{}"];
    let restored = host.call([&words[..], &as_is].concat()).ok();
    assert!(!restored.errors().contains("the network run-"), "{restored}");
    expect_alone("copy-1");
    expect_alone("copy-2");
    // A snapshot of such a copy is like the first one.
    let again = host.scratch.join("again");
    let again = again.to_str().expect("UTF-8");
    host.call(["snapshot", "web-1", again]).ok();
    let words = ["restore", again, "--lab", "never", "--kernel", kernel, "--as-is"];
    host.call([&words[..], &["--name", "later"]].concat()).ok();
    expect_alone("later");
    // So are a snapshot and a clone of one that was restored.
    let third = host.scratch.join("third");
    let third = third.to_str().expect("UTF-8");
    host.call(["snapshot", "copy-1", third]).ok();
    let words = ["restore", third, "--lab", "never", "--kernel", kernel, "--as-is"];
    host.call([&words[..], &["--name", "last"]].concat()).ok();
    expect_alone("last");
    host.call(["clone", "--as-is", "copy-2"]).ok();
    expect_alone("copy-2-1");
    assert_eq!(card_of(&host, "web"), parent);
}
