//! Requests for running VMs: registry entries with an agent that runs programs of this host.

mod support;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use data_encoding::BASE64;
use serde_json::{Value, json};
use support::vm::{CONSOLE, FakeVm};
use support::{Api, LIMIT, until};

impl Api {
    fn vm(&self, name: &str) -> FakeVm {
        FakeVm::start(self.place.path(), name, None)
    }

    /// Posts a JSON body; returns the status and the response's body.
    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, _, answer) = self.ask("POST", path, "", &body.to_string());
        (
            status,
            serde_json::from_str(&answer).unwrap_or(Value::String(answer)),
        )
    }

    #[track_caller]
    fn exec(&self, body: &Value) -> Value {
        let (status, answer) = self.post("/v1/vms/a/exec", body);
        assert_eq!(status, 200, "{answer}");
        answer
    }
}

fn shell(script: &str) -> Value {
    json!({"argv": ["sh", "-c", script]})
}

#[track_caller]
fn decoded(value: &Value) -> String {
    String::from_utf8(BASE64.decode(value.as_str().unwrap().as_bytes()).unwrap()).unwrap()
}

fn runs(pid: &str) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    state.is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn program_in_a_guest_gets_its_input_and_its_status_and_output_come_back() {
    let api = Api::start();
    let _vm = api.vm("a");
    let mut order = shell("cat; echo $WHO >&2; pwd; exit 3");
    order["stdin"] = BASE64.encode(b"input\n").into();
    order["env"] = json!({"WHO": "me"});
    order["cwd"] = "/tmp".into();
    let answer = api.exec(&order);
    assert_eq!(decoded(&answer["stdout"]), "input\n/tmp\n");
    assert_eq!(decoded(&answer["stderr"]), "me\n");
    assert_eq!(answer["status"], 3);
    assert_eq!(
        (&answer["timed_out"], &answer["truncated"]),
        (&json!(false), &json!(false))
    );
    let answer = api.exec(&shell("kill -9 $$"));
    assert_eq!((&answer["status"], &answer["signal"]), (&json!(137), &json!(9)));
    let answer = api.exec(&shell("head -c 3000000 /dev/zero"));
    assert_eq!(
        (&answer["status"], &answer["truncated"]),
        (&json!(0), &json!(true))
    );
    assert_eq!(decoded(&answer["stdout"]).len(), 1 << 20);
    for (body, status, detail) in [
        (json!({"argv": []}), 400, "name a program"),
        (json!({"argv": ["true"], "stdin": "*"}), 400, "base64"),
        (json!({"argv": ["true"], "limit_s": 4000}), 400, "3600 at most"),
        (json!({"argv": ["/no/such/program"]}), 409, "/no/such/program"),
    ] {
        let (said, problem) = api.post("/v1/vms/a/exec", &body);
        assert_eq!(said, status, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains(detail), "{problem}");
    }
}

#[test]
fn program_is_ended_at_its_limit_and_with_its_client() {
    let api = Api::start();
    let _vm = api.vm("a");
    let mut order = shell("echo $$; exec sleep 100");
    order["limit_s"] = 1.into();
    let answer = api.exec(&order);
    assert_eq!(
        (&answer["timed_out"], &answer["status"]),
        (&json!(true), &Value::Null)
    );
    let pid = decoded(&answer["stdout"]).trim().to_owned();
    until("the program runs on", || !runs(&pid));
    let file = api.place.path().join("pid");
    let body = shell(&format!("echo $$ >{}; exec sleep 100", file.display())).to_string();
    let mut client = UnixStream::connect(api.socket()).unwrap();
    let length = body.len();
    write!(
        client,
        "POST /v1/vms/a/exec HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut pid = String::new();
    until("the program does not start", || {
        pid = std::fs::read_to_string(&file)
            .unwrap_or_default()
            .trim()
            .to_owned();
        !pid.is_empty()
    });
    assert!(runs(&pid));
    drop(client);
    until("the program runs on without its client", || !runs(&pid));
}

#[test]
fn guest_that_still_boots_is_waited_for_and_one_that_ends_is_not() {
    let api = Api::start();
    let vm = FakeVm::booting(api.place.path(), "a", None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            vm.start_agent();
        });
        assert_eq!(decoded(&api.exec(&shell("echo up"))["stdout"]), "up\n");
    });
    drop(vm);
    let mut vm = FakeVm::booting(api.place.path(), "a", None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            vm.end();
        });
        let (status, problem) = api.post("/v1/vms/a/exec", &shell("true"));
        assert_eq!(status, 409, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains("ended"), "{problem}");
    });
    let _vm = FakeVm::booting(api.place.path(), "a", None);
    let mut order = shell("true");
    order["limit_s"] = 1.into();
    let (status, problem) = api.post("/v1/vms/a/exec", &order);
    assert_eq!(status, 504, "{problem}");
}

/// Decodes the body of a chunked response, and reports whether its end came.
fn unchunked(mut bytes: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    loop {
        let Some(line) = bytes.windows(2).position(|two| two == b"\r\n") else {
            return (body, false);
        };
        let length = usize::from_str_radix(std::str::from_utf8(&bytes[..line]).unwrap(), 16).unwrap();
        if length == 0 {
            return (body, true);
        }
        let rest = &bytes[line + 2..];
        if rest.len() < length + 2 {
            return (body, false);
        }
        body.extend_from_slice(&rest[..length]);
        bytes = &rest[length + 2..];
    }
}

/// Sends a request; returns the head, the body, and whether the body is whole.
fn fetch(api: &Api, request: &[u8]) -> (String, Vec<u8>, bool) {
    let answer = api.send(request, LIMIT, false);
    let at = answer
        .windows(4)
        .position(|four| four == b"\r\n\r\n")
        .expect("a head");
    let head = String::from_utf8(answer[..at].to_vec()).unwrap();
    let (body, is_whole) = match head.contains("transfer-encoding: chunked") {
        true => unchunked(&answer[at + 4..]),
        false => (answer[at + 4..].to_vec(), true),
    };
    (head, body, is_whole)
}

fn put(api: &Api, path: &str, bytes: &[u8]) -> (String, Vec<u8>) {
    let head = format!(
        "PUT /v1/vms/a/files?path={path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n",
        bytes.len()
    );
    let (head, body, _) = fetch(api, &[head.as_bytes(), bytes].concat());
    (head, body)
}

fn get(api: &Api, path: &str) -> (String, Vec<u8>, bool) {
    let request = format!("GET /v1/vms/a/files?path={path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    fetch(api, request.as_bytes())
}

#[test]
fn file_is_copied_into_a_guest_and_out_of_it_with_its_checksum() {
    let api = Api::start();
    let _vm = api.vm("a");
    let file = api.place.path().join("file");
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|number| (number % 251) as u8).collect();
    let (head, answer) = put(&api, &format!("{}&mode=640", file.display()), &bytes);
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let answer: Value = serde_json::from_slice(&answer).unwrap();
    assert_eq!(answer["bytes"], bytes.len());
    let sum = std::process::Command::new("sha256sum")
        .arg(&file)
        .output()
        .unwrap();
    let sum = String::from_utf8(sum.stdout).unwrap();
    assert!(
        sum.starts_with(answer["sha256"].as_str().unwrap()),
        "{sum} {answer}"
    );
    assert_eq!(
        std::fs::metadata(&file).unwrap().permissions().mode() & 0o7777,
        0o640
    );
    let (head, body, is_whole) = get(&api, &file.display().to_string());
    assert!(head.contains("mirrorball-mode: 640"), "{head}");
    assert!(is_whole && body == bytes);
    for (path, status, detail) in [
        ("relative", 400, "absolute path"),
        ("/tmp/", 400, "absolute path"),
        ("/no/such/file", 409, "/no/such/file"),
        ("/tmp", 409, "/tmp"),
        ("/tmp&mode=644", 400, "mode is for PUT"),
    ] {
        let (head, body, _) = get(&api, path);
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{path}: {head}");
        assert!(String::from_utf8(body).unwrap().contains(detail), "{path}");
    }
    let (head, body) = put(&api, "/tmp/x&mode=999", b"");
    assert!(head.starts_with("HTTP/1.1 400"), "{head}");
    assert!(String::from_utf8(body).unwrap().contains("octal"));
}

#[test]
fn upload_that_breaks_off_leaves_no_file_in_the_guest() {
    let api = Api::start();
    let _vm = api.vm("a");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    let mut client = UnixStream::connect(api.socket()).unwrap();
    write!(
        client,
        "PUT /v1/vms/a/files?path={} HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{}",
        file.display(),
        "x".repeat(50_000)
    )
    .unwrap();
    let entries = || std::fs::read_dir(folder.path()).unwrap().count();
    until("the copy does not begin", || entries() == 1);
    drop(client);
    until("a part of the file is left", || entries() == 0);
}

#[test]
fn console_of_a_vm_is_read_and_followed_until_its_end() {
    let api = Api::start();
    let mut vm = api.vm("a");
    assert_eq!(api.ask("GET", "/v1/vms/a/logs", "", "").2, CONSOLE);
    assert_eq!(api.ask("GET", "/v1/vms/a/logs?bytes=10", "", "").2, "last line\n");
    assert_eq!(api.ask("GET", "/v1/vms/a/logs?bytes=0", "", "").2, "");
    for query in ["bytes=x", "follow=1", "follow=true&bytes=1", "lines=1"] {
        let (status, _, problem) = api.ask("GET", &format!("/v1/vms/a/logs?{query}"), "", "");
        assert_eq!(status, 400, "{query}: {problem}");
    }
    let mut client = UnixStream::connect(api.socket()).unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    write!(
        client,
        "GET /v1/vms/a/logs?follow=true HTTP/1.0\r\nhost: x\r\n\r\n"
    )
    .unwrap();
    let mut seen = String::new();
    let mut read = |text: &str| {
        let mut buffer = [0; 1024];
        while !seen.contains(text) {
            let count = client.read(&mut buffer).expect("in time");
            assert_ne!(count, 0, "{seen}");
            seen += std::str::from_utf8(&buffer[..count]).unwrap();
        }
    };
    read("the last line\n");
    vm.say("a later line\n");
    read("a later line\n");
    vm.end();
    let mut rest = String::new();
    client.read_to_string(&mut rest).expect("its end in time");
}

#[test]
fn vm_is_waited_for_with_a_limit() {
    let api = Api::start();
    let mut vm = FakeVm::booting(api.place.path(), "a", None);
    let wait = |body: Value| api.post("/v1/vms/a/wait", &body);
    let reached = |is: bool| (200, json!({"reached": is}));
    assert_eq!(wait(json!({"for": "running"})), reached(true));
    assert_eq!(wait(json!({"for": "end", "limit_s": 0})), reached(false));
    let begun = Instant::now();
    assert_eq!(wait(json!({"for": "end", "limit_s": 1})), reached(false));
    assert_eq!(wait(json!({"for": "agent", "limit_s": 1})), reached(false));
    assert!(begun.elapsed() < Duration::from_secs(8));
    vm.start_agent();
    assert_eq!(wait(json!({"for": "agent"})), reached(true));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            vm.end();
        });
        assert_eq!(wait(json!({})), reached(true));
    });
    assert_eq!(wait(json!({})).0, 404);
    let _vm = api.vm("a");
    assert_eq!(wait(json!({"limit_s": 3601})).0, 400);
    assert_eq!(wait(json!({"for": "ever"})).0, 400);
}

/// Creates a program that replaces `mirrorball`: it writes its arguments to a file and runs this script.
fn program(folder: &tempfile::TempDir, script: &str) -> PathBuf {
    let path = folder.path().join("program");
    let words = folder.path().join("words");
    let text = format!(
        "#!/bin/sh\nprintf '%s\\n' \"$@\" >{}\n{script}\n",
        words.display()
    );
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn copies_are_made_by_the_command_and_its_failures_are_problems() {
    let folder = tempfile::tempdir().unwrap();
    let good = "echo b; echo 'mirrorball: a stood still for 1.0 ms' >&2";
    let path = program(&folder, good);
    let words = || std::fs::read_to_string(folder.path().join("words")).unwrap();
    let api = Api::start_by(path.to_str().unwrap(), &[], "");
    let (_a, _b) = (api.vm("a"), api.vm("b"));
    let (status, made) = api.post(
        "/v1/vms/a/clone",
        &json!({"count": 2, "name": "copy-{}", "as_is": true}),
    );
    assert_eq!((status, &made["vms"][0]["name"]), (201, &json!("b")), "{made}");
    assert_eq!(made["notes"], json!(["a stood still for 1.0 ms"]));
    assert_eq!(words(), "clone\n--count=2\n--name=copy-{}\n--as-is\n--\na\n");
    let (status, written) = api.post("/v1/vms/a/snapshot", &json!({"directory": "/srv/a.snap"}));
    assert_eq!(status, 201, "{written}");
    assert_eq!(words(), "snapshot\n--\na\n/srv/a.snap\n");
    let restore = json!({"directory": "/srv/a.snap", "disks": {"0": "/srv/d"}});
    let (status, made) = api.post("/v1/snapshots/restore", &restore);
    assert_eq!((status, &made["vms"][0]["name"]), (201, &json!("b")), "{made}");
    assert_eq!(
        words(),
        "restore\n--lab=never\n--count=1\n--disk=0=/srv/d\n--\n/srv/a.snap\n"
    );
    program(&folder, "echo 'mirrorball: a: no; do so' >&2; exit 1");
    let (status, problem) = api.post("/v1/vms/a/clone", &json!({}));
    assert_eq!((status, &problem["detail"]), (422, &json!("a: no; do so")));
    program(&folder, "echo 'error: wrong' >&2; exit 2");
    assert_eq!(api.post("/v1/vms/a/clone", &json!({})).0, 400);
    for (path, body, status) in [
        ("/v1/vms/none/clone", json!({}), 404),
        ("/v1/vms/none/snapshot", json!({"directory": "/x"}), 404),
        ("/v1/vms/a/snapshot", json!({"directory": "x"}), 400),
        ("/v1/snapshots/restore", json!({"directory": "x"}), 400),
    ] {
        assert_eq!(api.post(path, &body).0, status, "{path}");
    }
}

#[test]
fn memory_cells_and_vcpus_are_acted_on() {
    let api = Api::start();
    let vm = api.vm("a");
    let (status, moved) = api.post("/v1/vms/a/move", &json!({"vcpu": 0, "cell": 1}));
    assert_eq!((status, &moved["still_us"]), (200, &json!(2)), "{moved}");
    assert_eq!(moved["dropped_pin"], json!([2, 3]));
    assert!(vm.orders().contains(&"move".to_owned()));
    let placed = api.post("/v1/vms/a/move", &json!({"vcpu": 0, "cpu": 3}));
    assert_eq!(placed, (200, json!({"by": "loan", "began": 1})));
    assert!(vm.orders().contains(&"place".to_owned()));
    for wrong in [json!({"vcpu": 0}), json!({"vcpu": 0, "cpu": 3, "cell": 1})] {
        let (status, problem) = api.post("/v1/vms/a/move", &wrong);
        assert_eq!(status, 400, "{problem}");
        let detail = problem["detail"].as_str().expect("a detail");
        assert!(detail.contains("`cell` or the `cpu`"), "{detail}");
    }
    let (status, _, memory) = api.ask("GET", "/v1/memory", "", "");
    let memory: Value = serde_json::from_str(&memory).unwrap();
    assert_eq!(
        (status, &memory["vms"][0]["name"]),
        (200, &json!("a")),
        "{memory}"
    );
    let (status, _, problem) = api.ask("GET", "/v1/cells/vcpus", "", "");
    assert_eq!(status, 404, "{problem}");
    let loan = json!({"borrower": 1, "bytes": 1 << 20});
    for (path, body) in [
        ("/v1/cells/0/lend", &loan),
        ("/v1/cells/0/reclaim", &loan),
        ("/v1/cells/0/fail", &Value::Null),
        ("/v1/cells/x/fail", &Value::Null),
    ] {
        let (status, problem) = api.post(path, body);
        assert_eq!(status, 404, "{path}: {problem}");
    }
    let (_, problem) = api.post("/v1/cells/0/lend", &loan);
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .contains("mirrorball cluster up")
    );
    assert_eq!(api.post("/v1/cells/0/lend", &json!({"bytes": 1})).0, 400);
}
