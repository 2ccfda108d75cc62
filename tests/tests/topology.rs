//! Risk: decisions are made for a machine that is not the one at hand.

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
fn what_is_asserted_counts_more_than_what_is_found_and_rules_conclude_from_it() {
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
    // What was recorded is the machine again.
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
fn what_is_no_fact_and_no_question_is_named_with_its_place() {
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
