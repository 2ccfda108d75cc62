//! Meaning of cluster files, and errors of invalid ones.

use std::path::Path;

use super::*;

fn host() -> HostNodes {
    let node = |cpus: &[usize]| HostNode {
        cpus: cpus.to_vec(),
        memory_bytes: 1 << 30,
    };
    HostNodes([(0, node(&[1, 2])), (1, node(&[3])), (2, node(&[]))].into())
}

/// Returns the message, and the text under its caret.
fn refused(text: &str) -> (String, String) {
    let planned = ClusterSpec::parse("cluster.toml", text)
        .and_then(|spec| spec.cells(&host(), None, "cluster.toml", text));
    let error = planned.unwrap_err();
    let span = error.span.unwrap();
    (
        error.message,
        text[span.offset()..span.offset() + span.len()].to_owned(),
    )
}

fn planned(text: &str) -> Vec<CellPlan> {
    let spec = ClusterSpec::parse("cluster.toml", text).unwrap();
    spec.cells(&host(), None, "cluster.toml", text).unwrap()
}

#[test]
fn without_a_file_each_node_with_cpus_is_a_cell() {
    let cells = ClusterSpec::of_nodes(&host())
        .cells(&host(), None, "", "")
        .unwrap();
    assert_eq!(cells.len(), 2);
    assert_eq!((&cells[0].cpus[..], &cells[0].nodes[..]), (&[1, 2][..], &[0][..]));
    assert_eq!((&cells[1].cpus[..], cells[1].memory_bytes), (&[3][..], 1 << 30));
}

#[test]
fn a_number_of_cells_divides_nodes_or_cpus() {
    let cells = |count| {
        ClusterSpec::of_count(&host(), count)
            .unwrap()
            .cells(&host(), None, "", "")
            .unwrap()
    };
    assert_eq!(cells(2)[0].nodes, [0]);
    let cpus: Vec<Vec<usize>> = cells(3).into_iter().map(|cell| cell.cpus).collect();
    assert_eq!(cpus, [[1], [2], [3]]);
    assert_eq!(
        (&cells(1)[0].cpus[..], &cells(1)[0].nodes[..]),
        (&[1, 2, 3][..], &[0, 1][..])
    );
    for count in [0, 4] {
        let error = ClusterSpec::of_count(&host(), count).unwrap_err();
        assert_eq!(error.message, format!("--cells: {count} cells"));
    }
}

#[test]
fn cells_on_one_node_share_its_memory() {
    let cells = planned("[[cells]]\ncpus = \"1\"\n[[cells]]\ncpus = \"2\"\n");
    assert!(
        cells
            .iter()
            .all(|cell| cell.memory_bytes == 512 << 20 && cell.nodes == [0])
    );
}

#[test]
fn memory_of_a_node_without_cpus_can_be_a_cells() {
    let cells = planned("[[cells]]\ncpus = \"3\"\nnodes = [1, 2]\n");
    assert_eq!(cells[0].memory_bytes, 2 << 30);
}

#[test]
fn errors_in_cells_have_their_place() {
    for (text, message, place) in [
        ("cells = []", "0 cells", "[]"),
        ("[[cells]]\n", "a cell of nothing", "[[cells]]"),
        ("[[cells]]\ncpus = \"x\"\n", "no list", "\"x\""),
        ("[[cells]]\ncpus = \"0\"\n", "no CPU 0", "\"0\""),
        ("[[cells]]\ncpu = \"1\"\n", "unknown key `cpu`", "cpu"),
        ("[[cells]]\nnodes = [7]\n", "no NUMA node 7", "[7]"),
        ("[[cells]]\nnodes = [2]\n", "have no CPU", "[2]"),
        (
            "[[cells]]\ncpus = \"1\"\n[[cells]]\ncpus = \"1-2\"\n",
            "in cell 0",
            "\"1-2\"",
        ),
        (
            "[[cells]]\nnodes = [0]\n[[cells]]\ncpus = \"2\"\n",
            "in cell 0",
            "[[cells]]",
        ),
        (
            "[[cells]]\ncpus = \"1\"\nmemory = \"1M\"\n",
            "too little",
            "\"1M\"",
        ),
        (
            "[[cells]]\ncpus = \"1\"\nmemory = \"2G\"\n",
            "want 2G together, which have 1G",
            "\"2G\"",
        ),
    ] {
        let (said, at) = refused(text);
        assert!(said.contains(message), "{text:?}: {said}");
        assert_eq!(at, place, "{text:?}");
    }
}

#[test]
fn errors_in_tables_of_settings_have_their_place() {
    for (table, keys, message, place) in [
        ("borrowing", "automatic = 1", "where true or false belongs", "1"),
        ("borrowing", "chunks = \"4M\"", "unknown key `chunks`", "chunks"),
        ("borrowing", "chunk = \"1K\"", "1K is too little", "\"1K\""),
        (
            "borrowing",
            "automatic = false\nfloor = \"4M\"",
            "cells borrow nothing by themselves",
            "\"4M\"",
        ),
        (
            "borrowing",
            "low_water = \"8M\"\nfloor = \"4M\"",
            "a floor of 4M below the low water of 8M",
            "\"4M\"",
        ),
        (
            "pressure",
            "low_water = \"1023K\"",
            "a low water of 1023K is never reached",
            "\"1023K\"",
        ),
        (
            "pressure",
            "high_water = \"1G\"",
            "unknown key `high_water`",
            "high_water",
        ),
        (
            "scheduling",
            "cpus = \"gang\"",
            "unknown value `gang`",
            "\"gang\"",
        ),
        ("scheduling", "slice = 1", "unknown key `slice`", "slice"),
        (
            "scheduling",
            "cpus = \"gangs\"\ntunables = { slice = 1 }",
            "unknown key `slice`",
            "slice",
        ),
        (
            "scheduling",
            "cpus = \"gangs\"\ntunables = { slice_ns = 1 }",
            "slice_ns = 1 is not within 10000000 to",
            "1",
        ),
        (
            "scheduling",
            "tunables = { slice_ns = 20000000 }",
            "which `cpus = \"linux\"` does not start",
            "{ slice_ns = 20000000 }",
        ),
    ] {
        let text = format!("[[cells]]\ncpus = \"1\"\n[{table}]\n{keys}\n");
        let (said, at) = refused(&text);
        assert!(said.contains(message), "{text:?}: {said}");
        assert_eq!(at, place, "{text:?}");
    }
}

#[test]
fn borrowing_begins_by_itself_unless_the_file_turns_it_off() {
    let spec = |keys: &str| {
        let text = format!("[[cells]]\ncpus = \"1\"\n{keys}");
        ClusterSpec::parse("cluster.toml", &text).unwrap().borrowing
    };
    assert!(spec("").is_none() && BorrowingSpec::default().automatic);
    let chunk = spec("[borrowing]\nchunk = \"8M\"\n").unwrap();
    assert!(chunk.automatic && chunk.chunk == Some(Size(8 << 20)));
    assert!(!spec("[borrowing]\nautomatic = false\n").unwrap().automatic);
}

#[test]
fn gangs_are_refused_on_cpus_that_cells_share() {
    let shared = "shared_cpus = true\n[[cells]]\ncpus = \"1\"\n[scheduling]\ncpus = \"gangs\"\n";
    let (said, at) = refused(shared);
    assert!(said.contains("two drivers"), "{said}");
    assert_eq!(at, "\"gangs\"");
}

#[test]
fn cells_lend_cpus_by_themselves_only_where_the_file_says_so_and_linux_divides_them() {
    let text = |keys: &str| format!("[[cells]]\ncpus = \"1\"\n[scheduling]\n{keys}");
    let spec = |keys: &str| {
        ClusterSpec::parse("cluster.toml", &text(keys))
            .unwrap()
            .scheduling
            .unwrap()
    };
    assert!(!spec("").lend_cpus && spec("lend_cpus = true\n").lend_cpus);
    let (said, at) = refused(&text("cpus = \"gangs\"\nlend_cpus = true\n"));
    assert!(said.contains("would leave the drivers"), "{said}");
    assert_eq!(at, "true");
    let (said, _) = refused(&format!("shared_cpus = true\n{}", text("lend_cpus = true\n")));
    assert!(said.contains("have none to lend"), "{said}");
}

#[test]
fn linux_divides_the_cpus_unless_the_file_asks_for_gangs() {
    let spec = |keys: &str| {
        let text = format!("[[cells]]\ncpus = \"1\"\n{keys}");
        ClusterSpec::parse("cluster.toml", &text).unwrap().scheduling
    };
    assert!(spec("").is_none());
    assert_eq!(SchedulingSpec::default().cpus, CpuScheduler::Linux);
    assert_eq!(spec("[scheduling]\n").unwrap(), SchedulingSpec::default());
    let gangs = spec("[scheduling]\ncpus = \"gangs\"\n").unwrap();
    assert_eq!((gangs.cpus, gangs.tunables), (CpuScheduler::Gangs, None));
    let tuned = spec("[scheduling]\ncpus = \"gangs\"\ntunables = { slice_ns = 20000000 }\n").unwrap();
    let tunables = tuned.tunables.unwrap();
    assert_eq!((tunables.slice_ns, tunables.tick_ns), (20_000_000, 10_000_000));
}

const TWO_HOSTS: &str = "[[hosts]]\nname = \"a\"\naddress = \"10.0.0.1:7400\"\n\
    [[hosts]]\nname = \"b\"\naddress = \"10.0.0.2:7400\"\n";

#[test]
fn cells_share_cpus_only_if_the_file_allows_it() {
    let cells = "[[cells]]\ncpus = \"1-2\"\n[[cells]]\ncpus = \"2\"\n[[cells]]\nnodes = [0]\n";
    let (why, place) = refused(cells);
    assert_eq!((&why[..], &place[..]), ("CPU 2 is in cell 0 already", "\"2\""));
    let plans = planned(&format!("shared_cpus = true\n{cells}"));
    let cpus: Vec<&[usize]> = plans.iter().map(|plan| &plan.cpus[..]).collect();
    assert_eq!(cpus, [&[1, 2][..], &[2], &[1, 2]]);
}

#[test]
fn each_host_plans_its_own_cells_and_lists_the_others() {
    let text = format!(
        "{TWO_HOSTS}[[cells]]\nhost = \"a\"\n[[cells]]\nhost = \"b\"\ncpus = \"1\"\n[[cells]]\nhost = \
         \"b\"\ncpus = \"2\"\n"
    );
    let spec = ClusterSpec::parse("cluster.toml", &text).unwrap();
    let cells = |here| spec.cells(&host(), Some(here), "cluster.toml", &text).unwrap();
    assert_eq!((cells("a").len(), cells("b").len()), (1, 2));
    assert_eq!(
        (&cells("a")[0].nodes[..], cells("b")[1].number),
        (&[0, 1, 2][..], 2)
    );
    let site = spec.site("b", Path::new("/etc/cluster")).unwrap().unwrap();
    assert_eq!(site.etcd, ["https://10.0.0.1:2379"]);
    assert_eq!(spec.etcd_names(), ["10.0.0.1"]);
    assert_eq!(
        (site.keys.to_str().unwrap(), site.silence_ms),
        ("/etc/cluster/keys", 200)
    );
    assert_eq!(site.spans, SpanTransport::Tls);
    let plain = format!("{text}[membership]\nspans = \"plain\"\n");
    let plain = ClusterSpec::parse("cluster.toml", &plain).unwrap();
    let plain = plain.site("b", Path::new("")).unwrap().unwrap();
    assert_eq!(plain.spans, SpanTransport::Plain);
    assert!(!site.runs_etcd && site.is_elsewhere(0) && !site.is_elsewhere(2) && !site.is_elsewhere(3));
    let other = site.host_of(2).unwrap();
    assert_eq!(other.address_of(2).to_string(), "10.0.0.2:7402");
    assert!(spec.site("a", Path::new("")).unwrap().unwrap().runs_etcd);
    let error = spec.site("c", Path::new("")).unwrap_err();
    assert_eq!(error.message, "--host: the cluster has no host \"c\"");
    let one = ClusterSpec::parse("cluster.toml", "[[cells]]\ncpus = \"1\"\n").unwrap();
    assert_eq!(one.site("a", Path::new("")).unwrap(), None);
}

#[test]
fn cells_of_different_hosts_that_share_memory_are_paired_alike_everywhere() {
    let host = |name: &str, number: u8, shares: bool| {
        let shares = if shares {
            "shared_memory = \"/dev/dax0.0\"\n"
        } else {
            ""
        };
        format!("[[hosts]]\nname = \"{name}\"\naddress = \"10.0.0.{number}:7400\"\n{shares}")
    };
    let hosts = [host("a", 1, true), host("b", 2, false), host("c", 3, true)].concat();
    let cells = [("c", 1), ("a", 1), ("b", 1), ("a", 2)]
        .map(|(host, cpu)| format!("[[cells]]\nhost = \"{host}\"\ncpus = \"{cpu}\"\n"));
    let spec = ClusterSpec::parse("cluster.toml", &format!("{hosts}{}", cells.concat())).unwrap();
    for here in ["a", "b", "c"] {
        let site = spec.site(here, Path::new("")).unwrap().unwrap();
        assert_eq!(site.sharing_pairs(), [[0, 1], [0, 3]]);
    }
}

#[test]
fn errors_in_hosts_have_their_place() {
    let cell = "[[cells]]\nhost = \"a\"\n[[cells]]\nhost = \"b\"\n";
    for (text, message) in [
        (
            format!("{TWO_HOSTS}[[cells]]\nhost = \"a\"\n"),
            "host b has no cell",
        ),
        (
            format!("{TWO_HOSTS}{cell}[[cells]]\nhost = \"c\"\n"),
            "no host \"c\"",
        ),
        (
            format!("{TWO_HOSTS}{cell}[[cells]]\ncpus = \"1\"\n"),
            "a cell of no host",
        ),
        (
            format!("{TWO_HOSTS}{cell}").replace("\"b\"", "\"a\""),
            "has this name already",
        ),
        (
            format!("{TWO_HOSTS}{cell}").replace("\"b\"", "\"b.c\""),
            "no name of a host",
        ),
        (
            format!("{TWO_HOSTS}{cell}").replace("0.2:", "0.1:"),
            "has this address already",
        ),
        (
            format!("{TWO_HOSTS}{cell}").replace(":7400", ":65500"),
            "no ports",
        ),
        (
            format!("{TWO_HOSTS}{cell}").replace(":7400", ""),
            "socket address",
        ),
        (
            format!("{TWO_HOSTS}{cell}").replace(
                "[[hosts]]\nname = \"a\"",
                "[[hosts]]\nname = \"a\"\nshared_memory = \"/dev/dax0.0\"",
            ),
            "no other host shares it",
        ),
        (
            format!("{TWO_HOSTS}{cell}").replace("[[hosts]]\n", "[[hosts]]\nshared_memory = \"dax0.0\"\n"),
            "not a whole path",
        ),
        (
            format!("{TWO_HOSTS}{cell}[membership]\netcd = [\"ftp://10.0.0.1:2379\"]\n"),
            "no URL of an etcd",
        ),
        (
            format!("{TWO_HOSTS}{cell}").replace("\"a\"", "\"authority\""),
            "can't be called \"authority\"",
        ),
        (
            format!("{TWO_HOSTS}{cell}").replace("\"b\"", "\"etcd\""),
            "can't be called \"etcd\"",
        ),
        (
            format!("{TWO_HOSTS}{cell}[membership]\nsilence_ms = 1\n"),
            "too short",
        ),
        (
            format!("{TWO_HOSTS}{cell}[membership]\nspans = \"none\"\n"),
            "unknown value `none`",
        ),
        (
            "[membership]\n[[cells]]\ncpus = \"1\"\n".to_owned(),
            "membership of one host",
        ),
        (
            "[[cells]]\ncpus = \"1\"\nhost = \"a\"\n".to_owned(),
            "no host \"a\"",
        ),
    ] {
        let error = ClusterSpec::parse("cluster.toml", &text).unwrap_err();
        assert!(error.message.contains(message), "{text}: {}", error.message);
        assert!(error.span.is_some(), "{text}: {}", error.message);
    }
}

#[test]
fn plain_http_is_refused_but_on_the_loopback() {
    let parsed = |urls: &str| {
        let text = format!(
            "{TWO_HOSTS}[[cells]]\nhost = \"a\"\n[[cells]]\nhost = \"b\"\n[membership]\netcd = [{urls}]\n"
        );
        ClusterSpec::parse("cluster.toml", &text)
    };
    for local in ["127.0.0.1", "127.9.9.9", "[::1]", "localhost"] {
        let spec = parsed(&format!("\"http://{local}:2379\"")).unwrap();
        assert!(spec.etcd_names().is_empty(), "{local}");
    }
    for other in [
        "10.0.0.1",
        "[fd00::1]",
        "etcd.example",
        "127.0.0.1.example",
        "0.0.0.0",
    ] {
        let error = parsed(&format!("\"http://{other}:2379\"")).unwrap_err();
        assert!(error.message.contains("has no TLS"), "{other}: {}", error.message);
        assert!(error.span.is_some());
    }
    for wrong in [
        "https://",
        "https://:2379",
        "https://10.0.0.1",
        "https://a@b:1",
        "https://[x]:1",
        "https://a:0",
    ] {
        let error = parsed(&format!("{wrong:?}")).unwrap_err();
        assert!(error.message.contains("no URL"), "{wrong}: {}", error.message);
    }
    let spec =
        parsed("\"https://10.0.0.9:2379\", \"https://etcd.example:2379/\", \"https://[fd00::9]:2379\"");
    assert_eq!(
        spec.unwrap().etcd_names(),
        ["10.0.0.9", "etcd.example", "fd00::9"]
    );
}

#[test]
fn cpu_lists_survive_a_round_trip() {
    for list in ["0", "0-3,8", "1,3,5-6"] {
        assert_eq!(cpulist::write(&cpulist::parse_below(list, 10).unwrap()), list);
    }
}

#[test]
fn host_lists_the_directories_that_commands_of_other_hosts_may_name() {
    let cells = "[[cells]]\nhost = \"a\"\n[[cells]]\nhost = \"b\"\n";
    let text = |paths: &str| {
        let line = format!("10.0.0.2:7400\"\nremote_paths = {paths}\n");
        format!("{TWO_HOSTS}{cells}").replace("10.0.0.2:7400\"\n", &line)
    };
    let spec = ClusterSpec::parse("cluster.toml", &text("[\"/srv/vms\", \"/data\"]")).unwrap();
    let paths = |here: &str| {
        let site = spec.site(here, Path::new("/")).unwrap().unwrap();
        site.remote_paths().to_vec()
    };
    assert_eq!(paths("b"), [Path::new("/srv/vms"), Path::new("/data")]);
    assert!(paths("a").is_empty(), "those of b are b's alone");
    for wrong in ["[\"srv\"]", "[\"/srv/../etc\"]", "[\"\"]"] {
        let (why, place) = refused(&text(wrong));
        assert!(
            why.contains("not an absolute path without `..`"),
            "{wrong}: {why}"
        );
        assert!(wrong.contains(&place), "{wrong}: {place}");
    }
}
