//! Risk: VMs of one network are not together, VMs of different ones are, or the end of the gateway's process
//! costs more than connections.
//!
//! Guests halt at once: the tests look at the gateway from outside. Frames are in `gateway`'s own tests.

mod default_card;

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

use guest_tests::command::{Call, Output};
use guest_tests::halting::{end_cells, halting_guest};
use guest_tests::{Scratch, host, mirrorball, wait};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(60);

/// A runtime directory with a gateway of its own.
struct Host {
    scratch: Scratch,
    guest: PathBuf,
}

impl Host {
    fn new(test: &str) -> Self {
        let scratch = Scratch::new(test);
        let guest = scratch.write("guest", halting_guest());
        Self { scratch, guest }
    }

    fn call<I: AsRef<std::ffi::OsStr>>(&self, arguments: impl IntoIterator<Item = I>) -> Call {
        mirrorball(arguments)
            .limit(SOON)
            .env("MIRRORBALL_IN_LAB", "1")
            .env("MIRRORBALL_RUNTIME", self.scratch.join("runtime"))
            .env("MIRRORBALL_DATA", self.scratch.join("data"))
    }

    /// A VM file with one card of a subnet.
    fn file(&self, name: &str, keys: &str, card: &str) -> String {
        let text = format!(
            "name = \"{name}\"\nkernel = {{ path = {:?} }}\nmemory = \"64M\"\n{keys}\n[[nets]]\n\
             kind = \"subnet\"\n{card}\n",
            self.guest
        );
        let path = self.scratch.write(&format!("{name}.toml"), text);
        path.into_os_string().into_string().expect("UTF-8")
    }

    #[track_caller]
    fn run(&self, files: &[&str]) {
        self.call([&["run", "-d"][..], files].concat()).ok();
    }

    #[track_caller]
    fn refused(&self, file: &str) -> Output {
        let refused = self.call(["run", "-d", file]).run();
        assert_eq!(refused.status, 1, "{refused}");
        refused
    }

    #[track_caller]
    fn listed(&self) -> Value {
        self.call(["net", "ls", "--json"]).ok().json()
    }

    /// Names of networks, each with the names of its VMs.
    #[track_caller]
    fn networks(&self) -> Vec<(String, Vec<String>)> {
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let listed = self.listed();
        let networks = listed["networks"].as_array().expect("an array").iter();
        let networks = networks.map(|network| {
            let cards = network["cards"].as_array().expect("an array").iter();
            (
                text(&network["name"]),
                cards.map(|card| text(&card["vm"])).collect(),
            )
        });
        networks.collect()
    }

    #[track_caller]
    fn gateway(&self) -> u32 {
        let pid = self.listed()["gateway"]["pid"].as_u64().expect("a gateway");
        u32::try_from(pid).expect("a process id")
    }

    fn log(&self, vm: &str) -> String {
        let path = self
            .scratch
            .join("runtime")
            .join("vms")
            .join(vm)
            .join("shard.log");
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }
}

/// A cluster of two cells, which ends before its host.
struct TwoCells<'a>(&'a Host);

impl<'a> TwoCells<'a> {
    /// Starts the cells, with further tables in the cluster's file.
    #[track_caller]
    fn up(host: &'a Host, tables: &str) -> Self {
        let file = Self::file(host, tables);
        let cells = Self(host);
        host.call(["cluster", "up", &file]).ok();
        cells
    }

    fn file(host: &Host, tables: &str) -> String {
        // Guests halt at once, so the cells may have the same CPU.
        let cpu = guest_tests::cluster::allowed_cpus().next().expect("a CPU");
        let cell = format!("[[cells]]\ncpus = \"{cpu}\"\nmemory = \"256M\"\n");
        let text = format!("shared_cpus = true\n{cell}{cell}{tables}");
        let path = host.scratch.write("cluster.toml", text);
        path.into_os_string().into_string().expect("UTF-8")
    }
}

impl Drop for TwoCells<'_> {
    fn drop(&mut self) {
        end_cells(&self.0.scratch.join("runtime"), |arguments| {
            drop(self.0.call(arguments).run());
        });
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A second error would hide the first.
        let Ok(listed) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            self.call(["ps", "--json"]).run().json()
        })) else {
            return;
        };
        for vm in listed.as_array().into_iter().flatten() {
            if let Some(name) = vm["name"].as_str() {
                let _ = self.call(["kill", name]).run();
            }
        }
    }
}

#[test]
fn network_is_that_of_the_command_the_share_group_or_the_card() {
    let host = Host::new("scopes");
    host.run(&[&host.file("a", "", ""), &host.file("b", "", "")]);
    host.run(&[&host.file("c", "", "network = \"named\"")]);
    host.run(&[&host.file("d", "", "network = \"named\"")]);
    host.run(&[&host.file("e", "share_group = \"g\"", "")]);
    host.run(&[&host.file("f", "share_group = \"g\"", "")]);
    host.run(&[&host.file("g", "", "")]);
    let networks = host.networks();
    let of = |vm: &str| {
        let has = |(_, vms): &&(String, Vec<String>)| vms.iter().any(|other| other == vm);
        networks
            .iter()
            .find(has)
            .unwrap_or_else(|| panic!("{vm}: {networks:?}"))
    };
    assert_eq!(of("a").1, ["a", "b"]);
    assert!(of("a").0.starts_with("run-"), "{networks:?}");
    assert_eq!(
        *of("c"),
        ("named".to_owned(), vec!["c".to_owned(), "d".to_owned()])
    );
    assert_eq!(
        *of("e"),
        ("group-g".to_owned(), vec!["e".to_owned(), "f".to_owned()])
    );
    assert_eq!(of("g").1, ["g"]);
    assert_eq!(networks.len(), 4, "{networks:?}");
    let shown = host.call(["net", "inspect", "c"]).ok().text();
    assert!(
        shown.contains("named: ") && shown.contains("c.vm.internal") && shown.contains("offloads: "),
        "{shown}"
    );
}

#[test]
fn killed_gateway_is_started_again_and_its_cards_join_again() {
    let host = Host::new("again");
    host.run(&[
        &host.file("a", "", "network = \"n\""),
        &host.file("b", "", "network = \"n\""),
    ]);
    let before = host.listed();
    let first = host.gateway();
    host::kill9(first);
    let next = wait::until("both cards on the network again", SOON, || {
        let listed = self::listed_now(&host)?;
        let is_next = listed["gateway"]["pid"] != first;
        let cards = listed["networks"][0]["cards"].as_array()?.len();
        (is_next && cards == 2).then_some(listed)
    });
    for card in [0_usize, 1] {
        let of = |listed: &Value, key: &str| listed["networks"][0]["cards"][card][key].clone();
        for key in ["addresses", "offloads"] {
            assert_eq!(of(&next, key), of(&before, key), "{key}");
        }
        assert_eq!(of(&next, "offloads"), true);
    }
    for vm in ["a", "b"] {
        wait::until("both lines of the log", SOON, || {
            let log = host.log(vm);
            let has = |line: &str| log.contains(line);
            (has("net0: the subnet's gateway has ended; connections through it are lost")
                && has("net0: the card is on its network again"))
            .then_some(())
        });
    }
}

fn listed_now(host: &Host) -> Option<Value> {
    let listed = host.call(["net", "ls", "--json"]).run();
    (listed.status == 0).then(|| listed.json())
}

#[test]
fn card_stays_on_its_network_while_its_monitor_is_killed() {
    let host = Host::new("adopted");
    host.run(&[&host.file("a", "", "network = \"n\"")]);
    let (gateway, addresses) = (
        host.gateway(),
        host.listed()["networks"][0]["cards"][0]["addresses"].clone(),
    );
    let monitor = || {
        let pid = host.call(["inspect", "a"]).run().json()["monitor_pid"].as_u64()?;
        u32::try_from(pid).ok()
    };
    let first = monitor().expect("a monitor");
    host::kill9(first);
    wait::until("the next monitor", SOON, || monitor().filter(|pid| *pid != first));
    let listed = host.listed();
    assert_eq!(listed["networks"][0]["cards"][0]["addresses"], addresses);
    assert_eq!(listed["gateway"]["pid"], gateway);
    assert!(!host.log("a").contains("net0:"), "{}", host.log("a"));
    // The next monitor serves the card, too.
    host::kill9(gateway);
    let on_network = || {
        let listed = listed_now(&host)?;
        let card = &listed["networks"][0]["cards"][0];
        // Each monitor knows the form of the frames that the shard sends.
        (card["vm"] == "a" && card["offloads"] == true).then_some(())
    };
    wait::until("the card on the network again", SOON, on_network);
    // The keeper has a connection that has ended, so the monitor after that joins the card again.
    let second = monitor().expect("a monitor");
    host::kill9(second);
    wait::until("the monitor after that", SOON, || {
        monitor().filter(|pid| *pid != second)
    });
    // The gateway may not have noticed the death yet.
    std::thread::sleep(Duration::from_secs(1));
    wait::until("the card on the network after that", SOON, on_network);
    let log = host.log("a");
    assert!(!log.contains("off its network"), "{log}");
}

#[test]
fn gateway_has_no_rights_and_ends_with_its_last_card() {
    let host = Host::new("sealed");
    host.run(&[&host.file("a", "", "")]);
    let gateway = host.gateway();
    let status = fs::read_to_string(format!("/proc/{gateway}/status")).expect("it runs");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("{name}: {status}"))
            .trim()
            .to_owned()
    };
    assert_eq!(field("CapEff:"), "0000000000000000");
    assert_eq!(field("CapBnd:"), "0000000000000000");
    assert_eq!(
        (field("NoNewPrivs:"), field("Seccomp:")),
        ("1".to_owned(), "2".to_owned())
    );
    assert!(
        !field("Uid:").split_whitespace().any(|uid| uid == "0"),
        "{status}"
    );
    host.call(["kill", "a"]).ok();
    host::wait_gone(&[gateway], SOON);
    assert_eq!(host.listed()["gateway"], Value::Null);
}

#[test]
fn taken_address_port_and_unknown_name_are_errors_of_one_line() {
    let host = Host::new("refusals");
    host.run(&[&host.file("a", "", "network = \"n\"\naddress = \"10.213.7.7\"")]);
    let shown = host.call(["net", "ls"]).ok().text();
    assert!(shown.contains("10.213.7.7"), "{shown}");
    let one_line = |output: &Output, part: &str| {
        let errors = output.errors();
        assert!(errors.contains(part), "{output}");
        assert_eq!(errors.trim().lines().count(), 1, "{output}");
    };
    let same = host.file("b", "", "network = \"n\"\naddress = \"10.213.7.7\"");
    one_line(
        &host.refused(&same),
        "the address 10.213.7.7 is taken on this network",
    );
    let outside = host.file("b", "", "network = \"n\"\naddress = \"192.168.1.1\"");
    one_line(&host.refused(&outside), "192.168.1.1");
    let taken = TcpListener::bind(("0.0.0.0", 0)).expect("a free port");
    let port = taken.local_addr().expect("bound").port();
    let forwards = host.file("b", "", &format!("forward = [\"{port}:80\"]"));
    one_line(&host.refused(&forwards), &port.to_string());
    for command in ["inspect", "capture"] {
        let refused = host.call(["net", command, "nobody"]).run();
        assert_eq!(refused.status, 1, "{refused}");
        one_line(&refused, "\"nobody\"");
    }
    drop(taken);
    host.run(&[&forwards]);
    assert!(
        TcpListener::bind(("0.0.0.0", port)).is_err(),
        "the gateway has the port"
    );
}

#[test]
fn networks_of_the_clusters_file_join_vms_of_all_cells_by_their_settings() {
    let host = Host::new("cells");
    let _cells = TwoCells::up(
        &host,
        "[[networks]]\nname = \"back\"\nrange = \"10.20.30.0/24\"\nisolated = true\n[[networks]]\nname = \
         \"front\"\noutside = [\"web*\"]\npeers = false\n",
    );
    let back = "network = \"back\"";
    host.run(&[
        &host.file("db", "cell = 0", back),
        &host.file("store", "cell = 1", back),
    ]);
    let front = "network = \"front\"";
    host.run(&[
        &host.file("web", "cell = 0", front),
        &host.file("log", "cell = 1", front),
    ]);
    let listed = host.listed();
    let [of_back, of_front] = &listed["networks"].as_array().expect("an array")[..] else {
        panic!("{listed}");
    };
    let cards = |network: &Value| network["cards"].as_array().expect("an array").clone();
    let vms = |network: &Value| {
        cards(network)
            .iter()
            .map(|card| card["vm"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (vms(of_back), vms(of_front)),
        (
            vec!["db".into(), "store".into()],
            vec!["log".into(), "web".into()]
        )
    );
    assert_eq!(of_back["gateway"][0], "10.20.30.1");
    for card in cards(of_back) {
        let address = card["addresses"][0].as_str().expect("an address");
        assert!(address.starts_with("10.20.30."), "{card}");
    }
    assert_eq!(
        (&of_back["isolated"], &of_back["peers"]),
        (&true.into(), &true.into())
    );
    assert_eq!(
        (&of_front["isolated"], &of_front["peers"]),
        (&false.into(), &false.into())
    );
    let outside: Vec<_> = [of_back, of_front]
        .into_iter()
        .flat_map(cards)
        .map(|card| card["outside"] == true)
        .collect();
    assert_eq!(outside, [false, false, false, true]);
    let shown = host.call(["net", "inspect", "back"]).ok().text();
    assert!(
        shown.contains(", isolated") && shown.contains("does not reach the outside"),
        "{shown}"
    );
    // A VM without a cell is under the file, too.
    let refused = host.refused(&host.file("own", "", "network = \"back\"\nhost = true"));
    let errors = refused.errors();
    assert!(errors.contains("`host = true`"), "{errors}");
    assert_eq!(errors.trim().lines().count(), 1, "{errors}");
    let far = host.refused(&host.file("far", "cell = 1", "network = \"back\"\naddress = \"10.213.7.7\""));
    assert!(far.errors().contains("10.20.30.0/24"), "{far}");
    // A gateway that is started again gets the settings from the cards, whatever the file says then.
    let first = host.gateway();
    let networks = host.scratch.join("runtime").join("cells").join("networks.json");
    fs::write(&networks, "[]").expect("the record of the cluster's networks");
    host::kill9(first);
    wait::until("all cards on their networks again", SOON, || {
        let next = listed_now(&host)?;
        (next["gateway"]["pid"] != first && next["networks"] == without_counters(&listed, &next))
            .then_some(())
    });
}

/// The networks of `listed`, with the counters of `next`.
fn without_counters(listed: &Value, next: &Value) -> Value {
    let mut networks = listed["networks"].clone();
    for (at, network) in networks.as_array_mut().into_iter().flatten().enumerate() {
        for (number, card) in network["cards"].as_array_mut().into_iter().flatten().enumerate() {
            for key in ["counters", "dropped"] {
                card[key] = next["networks"][at]["cards"][number][key].clone();
            }
        }
    }
    networks
}

#[test]
fn wrong_networks_of_a_clusters_file_are_errors_with_the_place_and_help() {
    let host = Host::new("wrong");
    for (table, parts) in [
        (
            "name = \"a\"\nrange = \"10.20.30.0/33\"",
            ["10.20.30.0/33", "10.20.0.0/24"],
        ),
        (
            "name = \"a b\"",
            ["\"a b\" can't name a network", "1 to 63 letters"],
        ),
        ("name = \"a\"\nisolatet = true", ["isolatet", "isolated"]),
    ] {
        let file = TwoCells::file(&host, &format!("[[networks]]\n{table}\n"));
        let refused = host.call(["cluster", "up", &file]).run();
        assert_eq!(refused.status, 1, "{refused}");
        let errors = refused.errors();
        assert!(errors.contains("cluster.toml"), "{errors}");
        for part in parts {
            assert!(errors.contains(part), "{errors}");
        }
    }
}

/// Where a VM's card is: its network's name, its hardware address and its IPv4 address.
#[track_caller]
fn card_of(host: &Host, vm: &str) -> [String; 3] {
    let listed = host.listed();
    let networks = listed["networks"].as_array().expect("an array").iter();
    let cards = networks.flat_map(|network| {
        let cards = network["cards"].as_array().expect("an array").iter();
        cards.map(move |card| (network, card))
    });
    let found = cards.filter(|(_, card)| card["vm"] == vm).collect::<Vec<_>>();
    let [(network, card)] = found[..] else {
        panic!("{vm}: {listed}");
    };
    [&network["name"], &card["mac"], &card["addresses"][0]]
        .map(|value| value.as_str().expect("a text").to_owned())
}

#[test]
fn clone_and_restored_vm_have_addresses_of_their_own_on_a_network() {
    let host = Host::new("copies");
    let more = "network = \"n\"\naddress = \"10.213.7.7\"\npackets = 5000";
    host.run(&[&host.file("web", "", more)]);
    let parent = card_of(&host, "web");
    let [network, mac, address] = &parent;
    assert_eq!((network.as_str(), address.as_str()), ("n", "10.213.7.7"));

    let cloned = host.call(["clone", "--as-is", "web"]).ok();
    assert_eq!(cloned.text().trim(), "web-1");
    // The guest keeps its hardware address, by which the network knows the parent.
    let errors = cloned.errors();
    assert!(errors.contains("web-1: card net0 passes no frames"), "{errors}");
    let clone = card_of(&host, "web-1");
    assert_eq!(clone[0], "n");
    assert!(clone[1] != *mac && clone[2] != *address, "{clone:?}");
    assert_eq!(card_of(&host, "web"), parent);

    let snapshot = host.scratch.join("snap");
    let snapshot = snapshot.to_str().expect("UTF-8");
    host.call(["snapshot", "web", snapshot]).ok();
    let restore = |more: &[&str]| {
        let kernel = host.guest.to_str().expect("UTF-8");
        let words = [&["restore", snapshot, "--lab", "never", "--kernel", kernel], more].concat();
        host.call(words).run()
    };
    // The parent has the addresses that the guest would keep.
    let taken = restore(&["--as-is", "--name", "other"]);
    assert_eq!(taken.status, 1, "{taken}");
    assert!(taken.errors().contains("is taken on this network"), "{taken}");
    assert_eq!(host.networks()[0].1, ["web", "web-1"]);
    host.call(["kill", "web"]).ok();

    let same = restore(&["--as-is", "--name", "other"]);
    assert_eq!(same.status, 0, "{same}");
    assert!(!same.errors().contains("passes no frames"), "{same}");
    assert_eq!(card_of(&host, "other"), parent);
    host.call(["kill", "other"]).ok();

    // It has no agent, for which the command waits.
    let again = restore(&["--network", "n"]);
    assert_eq!(again.status, 0, "{again}");
    let restored = card_of(&host, "web");
    assert_eq!([&restored[0], &restored[1]], [network, mac]);
    assert!(restored[2] != *address && restored[2] != clone[2], "{restored:?}");
    let alone = restore(&["--name", "alone", "--as-is", "--network", "elsewhere"]);
    assert_eq!(alone.status, 0, "{alone}");
    assert_eq!(card_of(&host, "alone")[0], "elsewhere");
}

/// The process of a cell; none while it has none.
fn cell(host: &Host, number: usize) -> Option<u32> {
    let status = host.call(["cluster", "status", "--json"]).run();
    let pid = (status.status == 0).then(|| status.json()[number]["pid"].as_u64())??;
    u32::try_from(pid).ok().filter(|pid| host::is_running(*pid))
}

/// Waits until the VM has another monitor than the process `former`.
#[track_caller]
fn wait_adopted(host: &Host, vm: &str, former: u32) {
    wait::until("the next process of the VM's cell", SOON, || {
        let shown = host.call(["inspect", vm]).run();
        let monitor = (shown.status == 0).then(|| shown.json()["monitor_pid"].as_u64())??;
        (monitor != u64::from(former)).then_some(())
    });
}

/// Waits until the networks are as in `listed`, served by another gateway than the process `former`.
#[track_caller]
fn wait_served_again(host: &Host, listed: &Value, former: u32) {
    wait::until("all cards on their networks again", SOON, || {
        let next = listed_now(host)?;
        (next["gateway"]["pid"] != former && next["networks"] == without_counters(listed, &next))
            .then_some(())
    });
}

#[test]
fn named_network_outlives_the_cell_that_started_its_gateway() {
    let host = Host::new("outlives");
    let table = "[[networks]]\nname = \"back\"\nrange = \"10.20.30.0/24\"\nisolated = true\n";
    let _cells = TwoCells::up(&host, table);
    for (vm, keys) in [("db", "cell = 0"), ("store", "cell = 1")] {
        host.run(&[&host.file(vm, keys, "network = \"back\"")]);
    }
    let (listed, first) = (host.listed(), host.gateway());
    let cards = &listed["networks"][0]["cards"];
    assert_eq!(cards[0]["names"][1], "db.vm.internal", "{listed}");
    assert_eq!(cards[1]["names"][1], "store.vm.internal", "{listed}");

    // A command has started the first one; the cells start the next. In its first second with a card, a
    // process takes an end for one before its time.
    std::thread::sleep(Duration::from_millis(1200));
    host::kill9(first);
    wait_served_again(&host, &listed, first);
    let gateway = host.gateway();
    let cells = [0, 1].map(|number| cell(&host, number).expect("a cell"));
    let starter = cells.iter().position(|cell| *cell == host::parent(gateway));
    let starter = starter.expect("a cell has started the gateway");
    let vm = ["db", "store"][starter];
    let lines = |vm: &str| {
        let line = "net0: the subnet's gateway has ended; connections through it are lost";
        host.log(vm).matches(line).count()
    };
    wait::until("a line of each log", SOON, || {
        (lines("db") == 1 && lines("store") == 1).then_some(())
    });

    host::kill9(cells[starter]);
    wait_adopted(&host, vm, cells[starter]);
    let next = host.listed();
    assert_eq!(next["networks"], without_counters(&listed, &next));
    assert_eq!(
        next["gateway"]["pid"], gateway,
        "a cell's end is none of its gateway"
    );
    assert_eq!((lines("db"), lines("store")), (1, 1));

    // The gateway ends after that: the adopted card joins again, too.
    std::thread::sleep(Duration::from_millis(1200));
    host::kill9(gateway);
    wait_served_again(&host, &listed, gateway);
    wait::until("a line of each log", SOON, || {
        (lines("db") == 2 && lines("store") == 2).then_some(())
    });

    // Both at once, then the cell alone by an upgrade.
    let (second, gateway) = (cell(&host, starter).expect("a cell"), host.gateway());
    host::kill9(second);
    host::kill9(gateway);
    wait_adopted(&host, vm, second);
    wait_served_again(&host, &listed, gateway);
    let (third, gateway) = (cell(&host, starter).expect("a cell"), host.gateway());
    host.call(["cluster", "upgrade"]).ok();
    wait_adopted(&host, vm, third);
    let next = host.listed();
    assert_eq!(next["networks"], without_counters(&listed, &next));
    assert_eq!(next["gateway"]["pid"], gateway);
}
