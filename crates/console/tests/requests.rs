//! Valid and invalid requests to the program, on a host without VMs.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use support::{Api, MEMBER, is_root, write_host_file};

#[test]
fn bad_requests_are_problems_with_help() {
    let api = Api::start();
    let json = "content-type: application/json\r\n";
    let text = "content-type: text/plain\r\n";
    let (stop, balloon) = ("/v1/vms/none/stop", "/v1/vms/none/balloon");
    let too_long = format!("\"{}\"", "x".repeat(2 << 20));
    let start = |body, detail| ("POST", "/v1/vms", json, body, 400, detail);
    for (method, path, more, body, status, detail) in [
        ("GET", "/nothing", "", "", 404, "/openapi.json lists them"),
        ("DELETE", "/v1/vms", "", "", 405, "which methods it has"),
        ("GET", "/v1/vms/none", "", "", 404, "no VM named none is running"),
        ("GET", "/v1/vms/..%2f..%2fetc", "", "", 404, "no VM named"),
        ("POST", stop, json, "{}", 404, "no VM named none"),
        ("POST", stop, json, r#"{"limit_s": 100000}"#, 400, "3600 at most"),
        (
            "POST",
            stop,
            json,
            r#"{"limit": 1}"#,
            400,
            "unknown field `limit`",
        ),
        ("PUT", balloon, json, "{}", 400, "missing field `bytes`"),
        ("POST", "/v1/vms", text, "{}", 415, "application/json"),
        ("POST", "/v1/vms", json, &too_long, 413, "longer than"),
        start("{", "the body: EOF"),
        start("{}", "needs a `name`"),
        start(
            r#"{"name": "a", "cpus": 0}"#,
            "0 CPUs: write a number from 1 to 254",
        ),
        start(r#"{"name": "a", "memory": 5}"#, "expected a size with a unit"),
        start(r#"{"name": "a", "cpu": 1}"#, "unknown field `cpu`"),
        start(r#"{"name": "a"}"#, "neither an image nor a kernel"),
        start(r#"{"name": "a", "kernel": {"path": "vmlinuz"}}"#, "absolute path"),
        start(r#"{"name": "a", "kernel": {"path": "/none"}}"#, "no such file"),
    ] {
        let (said, head, problem) = api.ask(method, path, more, body);
        let what = format!("{method} {path} {}: {problem}", &body[..body.len().min(60)]);
        assert_eq!(said, status, "{what}");
        assert!(head.contains("application/problem+json"), "{what}\n{head}");
        let problem: serde_json::Value = serde_json::from_str(&problem).expect("JSON");
        assert_eq!(problem["status"], status, "{what}");
        assert!(
            problem["detail"].as_str().expect("a text").contains(detail),
            "{what}"
        );
    }
}

#[test]
fn vm_without_a_list_of_cards_is_started_with_the_default_card() {
    let folder = tempfile::tempdir().unwrap();
    let (program, batch) = (folder.path().join("program"), folder.path().join("batch"));
    let script = format!("#!/bin/sh\nread -r line\necho \"$line\" >{}\n", batch.display());
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let api = Api::start_by(program.to_str().unwrap(), &[], "");
    for (nets, kinds) in [("", &["subnet"][..]), (", \"nets\": []", &[])] {
        let body = format!("{{\"name\": \"a\", \"image\": \"tiny\"{nets}}}");
        // The program starts nothing.
        let (status, _, problem) = api.ask("POST", "/v1/vms", "", &body);
        assert_eq!(status, 422, "{problem}");
        let started: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&batch).unwrap()).unwrap();
        let cards = started["vms"][0][1]["nets"].as_array().unwrap().iter();
        let found: Vec<_> = cards.map(|card| card["kind"].clone()).collect();
        assert_eq!(found, *kinds, "{started}");
    }
}

#[test]
fn an_empty_host_is_shown_and_described() {
    let api = Api::start();
    assert_eq!(api.ask("GET", "/v1/vms", "", "").2, "[]");
    assert_eq!(api.ask("GET", "/v1/cells", "", "").2, "[]");
    let (status, _, text) = api.ask("GET", "/metrics", "", "");
    assert_eq!(status, 200);
    assert!(text.ends_with("# EOF\n"), "{text}");
    let document: serde_json::Value =
        serde_json::from_str(&api.ask("GET", "/openapi.json", "", "").2).unwrap();
    for path in [
        "/v1/vms",
        "/v1/vms/{name}",
        "/v1/vms/{name}/stop",
        "/v1/vms/{name}/logs",
        "/v1/vms/{name}/wait",
        "/v1/vms/{name}/exec",
        "/v1/vms/{name}/files",
        "/v1/vms/{name}/clone",
        "/v1/vms/{name}/snapshot",
        "/v1/vms/{name}/move",
        "/v1/snapshots/restore",
        "/v1/memory",
        "/v1/cells",
        "/v1/cells/vcpus",
        "/v1/cells/{number}/lend",
        "/v1/cells/{number}/reclaim",
        "/v1/cells/{number}/fail",
        "/v1/events",
        "/metrics",
    ] {
        assert!(document["paths"][path].is_object(), "{path} is not described");
    }
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let takes_key = operation["parameters"].as_array().is_some_and(|parameters| {
                parameters
                    .iter()
                    .any(|parameter| parameter["name"] == "Idempotency-Key" && parameter["in"] == "header")
            });
            let changes = method != "get" && !path.ends_with("/files");
            assert_eq!(takes_key, changes, "{method} {path}");
        }
    }
    assert!(document["components"]["schemas"]["VmSpec"]["properties"]["memory"].is_object());
}

#[test]
fn a_second_one_at_the_same_socket_is_refused() {
    let api = Api::start();
    let second = Command::new(env!("CARGO_BIN_EXE_mirrorball-api"))
        .args(["--program", "/bin/false", "--socket"])
        .arg(api.socket())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{text}");
    assert!(
        text.contains("is served already; name another with --socket"),
        "{text}"
    );
    assert_eq!(api.ask("GET", "/v1/vms", "", "").0, 200);
}

/// Random numbers by Marsaglia's xorshift64*, the same for the same seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }
}

/// Nearly valid requests, with bytes changed, left out, doubled and added.
#[test]
fn ten_thousand_malformed_requests_do_not_disturb_the_api() {
    let api = Api::start();
    let seeds = [
        "GET /v1/vms HTTP/1.1\r\nhost: x\r\n\r\n",
        "POST /v1/vms HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: 30\r\n\r\n{\"name\": \"a\", \"memory\": \"64M\"}",
        "POST /v1/vms/a/stop HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "PUT /v1/vms/%00/balloon HTTP/1.1\r\nhost: x\r\ncontent-length: 11\r\n\r\n{\"bytes\":1}",
        "GET /metrics HTTP/1.0\r\n\r\n",
        "GET /openapi.json HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n",
    ];
    let before = api.open_files();
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    let mut answered = 0;
    for _ in 0..10_000 {
        let mut bytes = seeds[chance.below(seeds.len())].as_bytes().to_vec();
        for _ in 0..=chance.below(4) {
            let at = chance.below(bytes.len());
            match chance.below(5) {
                0 => bytes[at] = chance.below(256) as u8,
                1 => _ = bytes.remove(at),
                2 => bytes.insert(at, chance.below(256) as u8),
                3 => bytes.truncate(at + 1),
                _ => {
                    let copy = bytes[at..].to_vec();
                    bytes.extend(copy);
                }
            }
            if bytes.is_empty() {
                bytes.push(b'G');
            }
        }
        let answer = api.send(&bytes, Duration::from_millis(500), true);
        let answer = String::from_utf8_lossy(&answer);
        if !answer.is_empty() {
            answered += 1;
            assert!(!answer.contains(" 500 "), "{bytes:?}: {answer}");
        }
    }
    assert!(answered > 5_000, "{answered} answers");
    assert_eq!(api.ask("GET", "/v1/vms", "", "").2, "[]");
    assert!(api.open_files() <= before + 8, "files are left open");
}

/// A VM of an image. The API's program ends at once here, so an admitted request gets this far: 422.
const IMAGE: &str = "{\"name\": \"a\", \"image\": \"tiny\", \"memory\": \"128M\", \"sandbox\": \"require\"}";
const STARTED: u16 = 422;

#[test]
fn members_of_the_group_may_only_look_without_a_policy() {
    if !is_root() {
        return;
    }
    let api = Api::start_with(&["--group", "root"], "");
    let look = "GET /v1/vms HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    assert_eq!(api.send_as(MEMBER, look).0, 200);
    let (status, detail) = api.start_vm_as(MEMBER, IMAGE);
    assert_eq!(status, 403, "{detail}");
    assert!(detail.contains("may only look"), "{detail}");
    assert_eq!(api.start_vm_as(0, IMAGE).0, STARTED, "the owner");
}

#[test]
fn members_of_the_group_start_what_the_policy_admits() {
    if !is_root() {
        return;
    }
    let policy = "[members]\nmemory = \"256M\"\ncpus = 2\npaths = [\"/srv/none\"]\n";
    let api = Api::start_with(&["--group", "root"], policy);
    assert_eq!(api.start_vm_as(MEMBER, IMAGE).0, STARTED);
    for (more, detail) in [
        ("\"sandbox\": \"off\"", "sandbox"),
        ("\"memory\": \"1G\"", "1G of memory"),
        ("\"cpus\": 3", "3 CPUs"),
        (
            "\"disks\": [{\"path\": \"/etc/shadow\", \"mode\": \"exclusive\", \"persistent\": true}]",
            "/etc/shadow",
        ),
        (
            "\"nets\": [{\"kind\": \"user\", \"forward\": [\"22:22\"]}]",
            "ports of the host",
        ),
    ] {
        let mut spec: serde_json::Value = serde_json::from_str(IMAGE).unwrap();
        let more: serde_json::Value = serde_json::from_str(&format!("{{{more}}}")).unwrap();
        for (key, value) in more.as_object().unwrap() {
            spec[key] = value.clone();
        }
        let (status, said) = api.start_vm_as(MEMBER, &spec.to_string());
        assert_eq!(status, 403, "{spec}: {said}");
        assert!(said.contains(detail), "{spec}: {said}");
        let (status, said) = api.start_vm_as(0, &spec.to_string());
        assert_ne!(status, 403, "the owner may: {spec}: {said}");
    }
}

#[test]
fn members_of_the_group_may_do_all_by_a_flag_that_excludes_a_policy() {
    if !is_root() {
        return;
    }
    let everything = ["--group", "root", "--group-may-all"];
    let api = Api::start_with(&everything, "");
    assert_eq!(api.start_vm_as(MEMBER, IMAGE).0, STARTED);
    let place = tempfile::tempdir().unwrap();
    let both = Command::new(env!("CARGO_BIN_EXE_mirrorball-api"))
        .args(["--program", "/bin/false", "--socket"])
        .arg(place.path().join("api.sock"))
        .args(everything)
        .env(
            "MIRRORBALL_HOST_FILE",
            write_host_file(&place, "[members]\nmemory = \"1G\"\ncpus = 1\n"),
        )
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&both.stderr);
    assert_eq!(both.status.code(), Some(1), "{text}");
    assert!(text.contains("limits members; drop the flag"), "{text}");
}

#[test]
fn a_wrong_host_file_is_an_error_that_names_its_line() {
    let place = tempfile::tempdir().unwrap();
    let wrong = Command::new(env!("CARGO_BIN_EXE_mirrorball-api"))
        .args(["--program", "/bin/false", "--socket"])
        .arg(place.path().join("api.sock"))
        .env(
            "MIRRORBALL_HOST_FILE",
            write_host_file(&place, "# the host\nshare_between = \"some\"\n"),
        )
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&wrong.stderr);
    assert_eq!(wrong.status.code(), Some(1), "{text}");
    assert!(text.contains("host.toml line 2: "), "{text}");
}
