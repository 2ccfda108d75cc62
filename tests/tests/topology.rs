//! Risk: decisions are made for a machine that is not this one.

use std::fs;

use guest_tests::{Scratch, mirrorball};
use serde_json::Value;

/// CPUs that the kernel has online, as `/proc/cpuinfo` numbers them.
fn online() -> Vec<i64> {
    let text = fs::read_to_string("/proc/cpuinfo").expect("/proc is mounted");
    let numbers = text
        .lines()
        .filter_map(|line| line.strip_prefix("processor")?.split_once(": "));
    numbers
        .map(|(_, number)| number.trim().parse().expect("a number"))
        .collect()
}

#[test]
fn the_host_is_drawn_with_every_cpu_and_all_its_memory() {
    let machine = mirrorball(["topology", "--json"]).ok().json();
    let nodes = machine["hosts"][0]["nodes"].as_array().expect("nodes").clone();
    let mut cpus: Vec<i64> = nodes
        .iter()
        .flat_map(|node| node["cpus"].as_array().expect("CPUs").clone())
        .map(|cpu| cpu["number"].as_i64().expect("a number"))
        .collect();
    cpus.sort_unstable();
    assert_eq!(cpus, online());
    let bytes: i64 = nodes
        .iter()
        .filter_map(|node| node["memory_bytes"].as_i64())
        .sum();
    let total = fs::read_to_string("/proc/meminfo").expect("/proc is mounted");
    let total = total
        .lines()
        .next()
        .and_then(|line| line.split_whitespace().nth(1)?.parse::<i64>().ok());
    let total = total.expect("MemTotal") * 1024;
    assert!(
        (bytes - total).abs() < total / 50,
        "{bytes} bytes in nodes, {total} in all"
    );
    for form in ["--dot", "--svg"] {
        let drawn = mirrorball(["topology", form]).ok().text();
        assert!(drawn.contains("node 0"), "{form}: {drawn}");
    }
}

#[test]
fn asserted_facts_replace_found_ones_and_rules_use_them() {
    let scratch = Scratch::new("asserted");
    let found = mirrorball(["topology", "--facts"]).ok().text();
    let host = found
        .lines()
        .find_map(|line| line.strip_prefix("host("))
        .and_then(|rest| rest.strip_suffix(')'))
        .expect("the host is a fact")
        .to_owned();
    let asserted = format!(
        "node({host}, 77)\ndistance({host}, 0, 77, 15)\ndistance({host}, 0, 77, 20)  # corrects itself\n"
    );
    let file = scratch.write("asserted.facts", asserted);
    let ask = |question: &str| {
        let call = mirrorball(["knowledge", "query", question, "--json", "--assert"]).args([&file]);
        call.ok().json()
    };
    assert_eq!(
        ask("q(N, D) <- near(_, 0, N), distance(_, 0, N, D), N = 77"),
        serde_json::json!([[77, 20]])
    );
    assert_eq!(ask("q(N) <- far(_, 0, N), N = 77"), serde_json::json!([]));
    // The recorded facts describe the machine again.
    let recorded = scratch.write("recorded.facts", found.clone());
    let again = mirrorball(["topology", "--facts", "--from"])
        .args([&recorded])
        .ok();
    assert_eq!(again.text(), found);
    let json = mirrorball(["knowledge", "query", "host(H)", "--json", "--from"]).args([&recorded]);
    assert_eq!(
        json.ok().json(),
        serde_json::from_str::<Value>(&format!("[[{host}]]")).expect("JSON")
    );
}

#[test]
fn wrong_facts_and_queries_are_reported_with_their_place() {
    let scratch = Scratch::new("wrong");
    let file = scratch.write("wrong.facts", "host(\"a\")\nnode(a, 0)\n");
    let wrong = mirrorball(["topology", "--from"]).args([&file]).run().expect(1);
    assert!(wrong.errors().contains("wrong.facts: line 2:"), "{wrong}");
    let missing = mirrorball(["topology", "--from", "/nowhere"]).run().expect(1);
    assert!(missing.errors().contains("/nowhere"), "{missing}");
    let wrong = mirrorball(["knowledge", "query", "q(X) <- node(Y, _)"])
        .run()
        .expect(1);
    assert!(wrong.errors().contains("line 1, column 1: `X`"), "{wrong}");
    let endless = "q(A) <- cpu(_, A, _), cpu(_, B, _), B > A";
    mirrorball(["knowledge", "query", endless]).ok();
}

/// CPUs that a process of these tests may use, as the kernel writes them.
fn usable() -> Vec<i64> {
    let text = fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let list = text
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .expect("every process has it");
    let parts = list.trim().split(',').flat_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let [first, last] = [first, last].map(|cpu| cpu.parse::<i64>().expect("a number"));
        first..=last
    });
    parts.collect()
}

#[test]
fn measurements_are_kept_and_asserted_facts_replace_them() {
    let scratch = Scratch::new("measured");
    let own = |call: guest_tests::command::Call| {
        call.env("MIRRORBALL_RUNTIME", scratch.path())
            .env("MIRRORBALL_DATA", scratch.path())
    };
    let ask = |question: &str| {
        own(mirrorball(["knowledge", "query", question, "--json"]))
            .ok()
            .json()
    };
    let latencies = "q(A, B, N) <- latency_ns(_, A, B, \"ring\", N)";
    assert_eq!(ask(latencies), serde_json::json!([]));
    own(mirrorball(["topology", "--measure"])).ok();
    let measured = ask(latencies);
    let measured = measured.as_array().expect("answers");
    let cpus = usable();
    // With many CPUs some stand for all.
    if cpus.len() <= 8 {
        assert_eq!(measured.len(), cpus.len() * (cpus.len() - 1));
    }
    assert!(
        measured.iter().all(|answer| answer[2].as_i64() > Some(0)),
        "{measured:?}"
    );
    let Some(first) = measured.first() else {
        println!("left out: one CPU alone has no messages to measure");
        return;
    };
    let host = own(mirrorball(["knowledge", "query", "host(H)", "--json"]))
        .ok()
        .json()[0][0]
        .clone();
    let asserted = format!(
        "latency_ns({host}, {}, {}, \"ring\", 123456789)\n",
        first[0], first[1]
    );
    scratch.write("asserted.facts", asserted);
    let asked = ask(latencies);
    assert_eq!(asked.as_array().map(Vec::len), Some(measured.len()));
    assert_eq!(asked[0], serde_json::json!([first[0], first[1], 123_456_789]));
    scratch.write("asserted.facts", format!("# mine\nlatency_ns({host}, 0, 1, 5)\n"));
    let wrong = own(mirrorball(["topology"])).run().expect(1);
    let said = "asserted.facts: line 2: latency_ns has 4 terms instead of 5; \
                write `latency_ns(Host, From, To, Transport, Value)`";
    assert!(wrong.errors().contains(said), "{wrong}");
}

#[test]
fn the_route_from_a_cell_reaches_every_other_one() {
    let machine = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../crates/knowledge/machines/eight-nodes.facts"
    );
    let call = mirrorball([
        "knowledge",
        "route",
        "3",
        "--cells",
        "32",
        "--json",
        "--from",
        machine,
    ]);
    let route = call.ok().json();
    let mut cells: Vec<u64> = route
        .as_array()
        .expect("arrivals")
        .iter()
        .filter_map(|arrival| arrival["cell"].as_u64())
        .collect();
    cells.sort_unstable();
    assert_eq!(cells, (0..32).collect::<Vec<_>>());
    let last = |way: &str| {
        route
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|arrival| arrival[way].as_u64())
            .max()
    };
    assert!(last("tree_ns") < last("one_by_one_ns"), "{route}");
    let wrong = mirrorball(["knowledge", "route", "32", "--cells", "32", "--from", machine])
        .run()
        .expect(1);
    assert!(
        wrong.errors().contains("there is no cell 32; the cells are 0-31"),
        "{wrong}"
    );
}
