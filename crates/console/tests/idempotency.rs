//! Repeated requests with an `Idempotency-Key`, also to another process of the API.

mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use support::vm::FakeVm;
use support::{Api, MEMBER, is_root, until};

impl Api {
    /// Posts a request with a key; returns the status, the head and the body of the response.
    fn post(&self, key: &str, path: &str, body: &Value) -> (u16, String, Value) {
        let key = format!("idempotency-key: {key}\r\n");
        let (status, head, answer) = self.ask("POST", path, &key, &body.to_string());
        let answer = serde_json::from_str(&answer).unwrap_or(Value::String(answer));
        (status, head, answer)
    }
}

fn exec(script: &str) -> Value {
    json!({"argv": ["sh", "-c", script]})
}

fn is_repeated(head: &str) -> bool {
    head.contains("idempotency-replayed: true")
}

/// Counts the runs of a program that adds a line to the file.
fn runs(file: &Path) -> usize {
    std::fs::read_to_string(file).unwrap_or_default().lines().count()
}

#[test]
fn repeated_request_is_answered_as_the_first_also_by_the_next_process() {
    let mut api = Api::start();
    let _vm = FakeVm::start(api.place.path(), "a", None);
    let file = api.place.path().join("runs");
    let order = exec(&format!("echo run >>{}; echo done; exit 3", file.display()));
    let (status, head, first) = api.post("k1", "/v1/vms/a/exec", &order);
    assert_eq!(
        (status, &first["status"], is_repeated(&head)),
        (200, &json!(3), false)
    );
    for _ in 0..2 {
        let (status, head, again) = api.post("k1", "/v1/vms/a/exec", &order);
        assert_eq!((status, is_repeated(&head)), (200, true), "{again}");
        assert_eq!(again, first);
        assert!(head.contains("application/json"), "{head}");
        api.kill_and_start_again();
    }
    assert_eq!(runs(&file), 1);
    // A refusal is a result too.
    let (status, _, refused) = api.post("k2", "/v1/vms/a/nmi", &Value::Null);
    assert_eq!(status, 409, "{refused}");
    let (status, head, again) = api.post("k2", "/v1/vms/a/nmi", &Value::Null);
    assert_eq!((status, is_repeated(&head), again), (409, true, refused));
    assert!(head.contains("application/problem+json"), "{head}");
    let (status, _, problem) = api.post("k1", "/v1/vms/a/exec", &exec("echo other"));
    assert_eq!(status, 422, "{problem}");
    let (status, _, problem) = api.post("k1", "/v1/vms/a/kill", &order);
    assert_eq!(status, 422, "{problem}");
    assert_eq!(api.post("k3", "/v1/vms/a/exec", &order).2, first);
    assert_eq!(runs(&file), 2);
}

#[test]
fn request_in_progress_is_not_started_twice_and_continues_without_its_client() {
    let api = Api::start();
    let _vm = FakeVm::start(api.place.path(), "a", None);
    let file = api.place.path().join("runs");
    let go = api.place.path().join("go");
    let order = exec(&format!(
        "echo run >>{}; while ! [ -e {} ]; do sleep 0.05; done",
        file.display(),
        go.display()
    ));
    let body = order.to_string();
    let request = format!(
        "POST /v1/vms/a/exec HTTP/1.1\r\nhost: x\r\nidempotency-key: k\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    // The client disconnects.
    api.send(request.as_bytes(), Duration::from_millis(200), false);
    until("it does not begin", || runs(&file) == 1);
    let (status, _, problem) = api.post("k", "/v1/vms/a/exec", &order);
    assert_eq!(status, 409, "{problem}");
    assert!(problem["detail"].as_str().unwrap().contains("under way"));
    std::fs::write(&go, "").unwrap();
    until("the result is not kept", || {
        let (status, head, _) = api.post("k", "/v1/vms/a/exec", &order);
        status == 200 && is_repeated(&head)
    });
    assert_eq!(runs(&file), 1);
}

#[test]
fn request_whose_process_was_killed_is_reported_as_lost_and_not_repeated() {
    let mut api = Api::start();
    let _vm = FakeVm::start(api.place.path(), "a", None);
    let file = api.place.path().join("runs");
    let order = exec(&format!("echo run >>{}; sleep 100", file.display()));
    let body = order.to_string();
    let request = format!(
        "POST /v1/vms/a/exec HTTP/1.1\r\nhost: x\r\nidempotency-key: k\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    api.send(request.as_bytes(), Duration::from_millis(200), false);
    until("it does not begin", || runs(&file) == 1);
    api.kill_and_start_again();
    let (status, _, problem) = api.post("k", "/v1/vms/a/exec", &order);
    assert_eq!(status, 409, "{problem}");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("see whether it took effect"), "{detail}");
    assert_eq!(runs(&file), 1);
}

/// Creates a program that replaces `mirrorball`, starts nothing, and ends with its lease.
fn program(folder: &tempfile::TempDir) -> PathBuf {
    let path = folder.path().join("program");
    std::fs::write(&path, "#!/bin/sh\nread line\nread rest\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn start_whose_process_was_killed_is_answered_by_the_vm_if_that_runs() {
    let folder = tempfile::tempdir().unwrap();
    let mut api = Api::start_by(program(&folder).to_str().unwrap(), &[], "");
    for (name, runs) in [("a", true), ("b", false)] {
        let body = json!({"name": name, "image": "tiny", "memory": "128M"}).to_string();
        let request = format!(
            "POST /v1/vms HTTP/1.1\r\nhost: x\r\nidempotency-key: {name}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        api.send(request.as_bytes(), Duration::from_millis(300), false);
        // As a VM that its starter has detached just before its end.
        let _vm = runs.then(|| FakeVm::start(api.place.path(), name, None));
        api.kill_and_start_again();
        let (status, head, answer) = api.post(name, "/v1/vms", &serde_json::from_str(&body).unwrap());
        if runs {
            assert_eq!((status, &answer["name"]), (201, &json!(name)), "{answer}");
            assert!(is_repeated(&head), "{head}");
        } else {
            assert_eq!(status, 409, "{answer}");
        }
    }
}

#[test]
fn keys_are_a_users_own_and_bounded() {
    if !is_root() {
        return;
    }
    let policy = "[members]\nmemory = \"256M\"\ncpus = 2\n";
    let api = Api::start_with(&["--group", "root"], policy);
    let _vm = FakeVm::start(api.place.path(), "a", Some(MEMBER));
    let request = |key: &str, body: &str| {
        format!(
            "POST /v1/vms/a/wait HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             idempotency-key: {key}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let running = "{\"for\": \"running\"}";
    assert_eq!(api.send_as(MEMBER, &request("k", running)).0, 200);
    // The owner's key of the same name is another key.
    assert_eq!(
        api.post("k", "/v1/vms/a/exec", &exec("true")).0,
        200,
        "the owner's"
    );
    for number in 0..127 {
        assert_eq!(api.send_as(MEMBER, &request(&number.to_string(), running)).0, 200);
    }
    assert_eq!(api.send_as(MEMBER, &request("more", running)).0, 429);
    assert_eq!(api.send_as(MEMBER, &request("k", running)).0, 200, "a known one");
    assert_eq!(api.post("more", "/v1/vms/a/exec", &exec("true")).0, 200);
}

#[test]
fn wrong_keys_and_long_answers_are_problems() {
    let api = Api::start();
    let _vm = FakeVm::start(api.place.path(), "a", None);
    let long = "x".repeat(256);
    for (key, detail) in [(&long[..], "1 to 255"), ("", "1 to 255")] {
        let (status, _, problem) = api.post(key, "/v1/vms/a/exec", &exec("true"));
        assert_eq!(status, 400, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains(detail), "{problem}");
    }
    let key = "idempotency-key: k\r\n";
    let (status, _, problem) = api.ask("PUT", "/v1/vms/a/files?path=/tmp/x", key, "");
    assert_eq!(status, 400, "{problem}");
    assert_eq!(api.ask("GET", "/v1/vms", key, "").0, 200, "looking needs no key");
    let order = exec("head -c 100000 /dev/zero");
    assert_eq!(api.post("k", "/v1/vms/a/exec", &order).0, 200);
    let (status, _, problem) = api.post("k", "/v1/vms/a/exec", &order);
    assert_eq!(status, 409, "{problem}");
    assert!(problem["detail"].as_str().unwrap().contains("too long"));
}
