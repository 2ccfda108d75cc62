//! Risk: programs that use the API see other VMs than people do, or start what can't be ended.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_tests::command::{BOOT_LIMIT, Call, Running, built};
use guest_tests::{Scratch, Vm, VmFile, mirrorball, wait};
use serde_json::{Value, json};

/// A running `mirrorball-api`.
struct Api {
    socket: PathBuf,
    running: Option<Running>,
}

impl Api {
    #[track_caller]
    fn start(scratch: &Scratch) -> Self {
        let socket = scratch.path().join("api.sock");
        let program = guest_tests::command::binary();
        let call = Call::new(built("mirrorball-api")).limit(Duration::from_secs(300));
        let running = call
            .args([Path::new("--socket"), &socket, Path::new("--program"), &program])
            .spawn();
        wait::until("the API serves", Duration::from_secs(10), || {
            UnixStream::connect(&socket).ok().map(drop)
        });
        Self {
            socket,
            running: Some(running),
        }
    }

    fn connect(&self, method: &str, path: &str, body: &str) -> UnixStream {
        let mut stream = UnixStream::connect(&self.socket).expect("it serves");
        stream.set_read_timeout(Some(BOOT_LIMIT)).expect("a socket");
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).expect("it reads");
        stream
    }

    /// The status and the body of the answer.
    #[track_caller]
    fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let mut answer = String::new();
        let mut stream = self.connect(method, path, &body);
        stream.read_to_string(&mut answer).expect("an answer in time");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok())
            .expect("a status");
        (
            status,
            serde_json::from_str(body).unwrap_or(Value::String(body.to_owned())),
        )
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            running.signal(nix::sys::signal::Signal::SIGTERM);
            let ended = running.wait();
            if !std::thread::panicking() {
                ended.expect(0);
                assert!(!self.socket.exists(), "the socket is left");
            }
        }
    }
}

#[test]
fn a_vm_is_started_seen_and_stopped_by_programs() {
    let scratch = Scratch::new("api");
    let api = Api::start(&scratch);
    let name = format!("t-api-{}", std::process::id());
    let spec = json!({"name": name, "image": VmFile::TINY, "memory": "128M", "nets": []});
    let mut events = api.connect("GET", "/v1/events", "");
    let (status, made) = api.ask("POST", "/v1/vms", &spec);
    assert_eq!((status, &made["state"]), (201, &json!("running")), "{made}");
    let vm = Vm::named(&name);
    let (status, again) = api.ask("POST", "/v1/vms", &spec);
    assert_eq!(status, 409, "{again}");
    vm.wait_up();
    let (_, listed) = api.ask("GET", "/v1/vms", &Value::Null);
    assert_eq!(listed[0]["name"], name.as_str());
    assert_eq!(listed[0]["pid"], vm.shard());
    let (_, known) = api.ask("GET", &format!("/v1/vms/{name}"), &Value::Null);
    assert_eq!(known["spec"]["memory"], "128M");
    assert!(known["status"]["devices"].is_array(), "{known}");
    let (_, metrics) = api.ask("GET", "/metrics", &Value::Null);
    let metrics = metrics.as_str().expect("text");
    let line = format!("mirrorball_vm_memory_bytes{{vm=\"{name}\"}} {}", 128 << 20);
    assert!(metrics.contains(&line), "{metrics}");
    let host = metrics
        .lines()
        .find(|line| line.starts_with("mirrorball_vm_host_bytes"));
    assert!(host.is_some_and(|line| !line.ends_with(" 0")), "{metrics}");
    let balloon = format!("/v1/vms/{name}/balloon");
    assert_eq!(api.ask("PUT", &balloon, &json!({"bytes": 16 << 20})).0, 204);
    assert_eq!(api.ask("PUT", &balloon, &json!({"bytes": 1_u64 << 40})).0, 409);
    let post = |what: &str| api.ask("POST", &format!("/v1/vms/{name}/{what}"), &Value::Null).0;
    let state = || api.ask("GET", &format!("/v1/vms/{name}"), &Value::Null).1["state"].clone();
    assert_eq!((post("pause"), state()), (204, json!("paused")));
    assert_eq!((post("resume"), state()), (204, json!("running")));
    assert_eq!(post("nmi"), 204);
    let boot_id = vm.boot_id();
    assert_eq!(post("reset"), 204);
    vm.wait_up();
    assert_ne!(vm.boot_id(), boot_id);
    let (status, stopped) = api.ask("POST", &format!("/v1/vms/{name}/stop"), &json!({"limit_s": 30}));
    assert_eq!((status, &stopped["killed"]), (200, &json!(false)), "{stopped}");
    assert!(vm.listed().is_none());
    // The stream has told of all of it.
    let mut told = String::new();
    wait::until("the end is told", Duration::from_secs(10), || {
        let mut bytes = [0; 4096];
        let count = events.read(&mut bytes).expect("in time");
        told += &String::from_utf8_lossy(&bytes[..count]);
        told.contains("\"event\":\"vm-ended\"").then_some(())
    });
    assert!(told.contains("\"state\":\"running\""), "{told}");
    // A VM that people start is seen, too, and one that can't start is told.
    let other = VmFile::new("api-other").start_only(&scratch);
    let (_, listed) = api.ask("GET", "/v1/vms", &Value::Null);
    assert_eq!(listed[0]["name"], other.name());
    let bad = json!({"name": "t-api-bad", "image": "no-such-image"});
    let (status, problem) = api.ask("POST", "/v1/vms", &bad);
    assert_eq!(status, 422, "{problem}");
    assert!(
        problem["detail"]
            .as_str()
            .is_some_and(|why| why.contains("no-such-image")),
        "{problem}"
    );
    drop(api);
    // Nothing that runs needs it.
    assert!(other.listed().is_some());
    mirrorball(["kill", other.name()]).ok();
}
