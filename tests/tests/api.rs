//! Risk: programs that use the API see other VMs than the commands, or start VMs that can't be ended.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_tests::cluster::Cluster;
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

    /// Kills it, and starts the next one.
    fn killed_and_started_again(mut self, scratch: &Scratch) -> Self {
        let running = self.running.take().expect("it runs");
        running.signal(nix::sys::signal::Signal::SIGKILL);
        running.wait();
        Self::start(scratch)
    }

    fn connect(&self, method: &str, path: &str, body: &str) -> UnixStream {
        self.connect_with("", method, path, body)
    }

    /// Sends a request with more lines of the head, each with its end.
    fn connect_with(&self, more: &str, method: &str, path: &str, body: &str) -> UnixStream {
        let mut stream = UnixStream::connect(&self.socket).expect("it serves");
        stream.set_read_timeout(Some(BOOT_LIMIT)).expect("a socket");
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             {more}content-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).expect("it reads");
        stream
    }

    /// The status and the body of the answer.
    #[track_caller]
    fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        self.ask_with("", method, path, body)
    }

    #[track_caller]
    fn ask_with(&self, more: &str, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let mut answer = String::new();
        let mut stream = self.connect_with(more, method, path, &body);
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

impl Api {
    /// The standard output of a program in a guest, which ends with status 0.
    #[track_caller]
    fn exec(&self, vm: &str, script: &str) -> String {
        let order = json!({"argv": ["sh", "-c", script], "limit_s": 300});
        let (status, answer) = self.ask("POST", &format!("/v1/vms/{vm}/exec"), &order);
        assert_eq!(
            (status, &answer["status"]),
            (200, &json!(0)),
            "{script}: {answer}"
        );
        let output = answer["stdout"].as_str().expect("base64");
        let decode = Call::new("base64").args(["-d"]).input(output.as_bytes());
        decode.ok().text()
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
    // The stream has reported all of it.
    let mut told = String::new();
    wait::until("the event of the end", Duration::from_secs(10), || {
        let mut bytes = [0; 4096];
        let count = events.read(&mut bytes).expect("in time");
        told += &String::from_utf8_lossy(&bytes[..count]);
        told.contains("\"event\":\"vm-ended\"").then_some(())
    });
    assert!(told.contains("\"state\":\"running\""), "{told}");
    // A VM that a command starts is seen, too, and an error of a start is reported.
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
    // No VM needs the API to run.
    assert!(other.listed().is_some());
    mirrorball(["kill", other.name()]).ok();
}

#[test]
fn programs_use_a_guest_copy_it_and_see_what_it_takes() {
    let scratch = Scratch::new("api-guest");
    let api = Api::start(&scratch);
    let name = format!("t-api-guest-{}", std::process::id());
    let spec = json!({"name": name, "image": VmFile::TINY, "memory": "128M", "nets": []});
    let (status, made) = api.ask("POST", "/v1/vms", &spec);
    assert_eq!(status, 201, "{made}");
    let vm = Vm::named(&name);
    let of = |vm: &str, what: &str| format!("/v1/vms/{vm}/{what}");
    // The guest still boots.
    assert_eq!(api.exec(&name, "echo up"), "up\n");
    let wait = |body: Value| api.ask("POST", &of(&name, "wait"), &body);
    assert_eq!(wait(json!({"for": "agent"})), (200, json!({"reached": true})));
    assert_eq!(
        wait(json!({"for": "end", "limit_s": 1})),
        (200, json!({"reached": false}))
    );
    // A file goes in and comes out.
    let path = of(&name, "files?path=/tmp/text&mode=600");
    let mut answer = String::new();
    let mut stream = api.connect("PUT", &path, "text of the host\n");
    stream.read_to_string(&mut answer).expect("in time");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(
        vm.sh("cat /tmp/text; stat -c %a /tmp/text"),
        "text of the host\n600\n"
    );
    let (status, text) = api.ask("GET", &of(&name, "files?path=/tmp/text"), &Value::Null);
    assert_eq!(status, 200, "{text}");
    assert!(
        text.as_str()
            .is_some_and(|text| text.contains("text of the host\n")),
        "{text}"
    );
    let (_, console) = api.ask("GET", &of(&name, "logs"), &Value::Null);
    assert!(
        console
            .as_str()
            .is_some_and(|console| console.contains("built-in shell")),
        "{console}"
    );
    // Copies go on with the parent's state, under their own identity.
    let clone = format!("{name}-copy");
    let (status, made) = api.ask("POST", &of(&name, "clone"), &json!({"name": clone}));
    assert_eq!((status, &made["vms"][0]["name"]), (201, &json!(clone)), "{made}");
    let _clone = Vm::named(&clone);
    let who = "cat /tmp/text /proc/sys/kernel/hostname";
    assert_eq!(api.exec(&clone, who), format!("text of the host\n{clone}\n"));
    let directory = scratch.join("snap");
    let (status, written) = api.ask("POST", &of(&name, "snapshot"), &json!({"directory": directory}));
    assert_eq!(status, 201, "{written}");
    let restored = format!("{name}-restored");
    let order = json!({"directory": directory, "name": restored});
    let (status, made) = api.ask("POST", "/v1/snapshots/restore", &order);
    assert_eq!(
        (status, &made["vms"][0]["name"]),
        (201, &json!(restored)),
        "{made}"
    );
    let _restored = Vm::named(&restored);
    assert_eq!(
        api.exec(&restored, who),
        format!("text of the host\n{restored}\n")
    );
    let (_, memory) = api.ask("GET", "/v1/memory", &Value::Null);
    let rows = memory["vms"].as_array().expect("a list");
    for name in [&name, &clone, &restored] {
        let row = rows.iter().find(|row| row["name"] == **name);
        assert!(
            row.is_some_and(|row| row["host_bytes"].as_u64() > Some(0)),
            "{memory}"
        );
    }
    // An error is reported in the command's words.
    let (status, problem) = api.ask("POST", &of(&name, "snapshot"), &json!({"directory": directory}));
    assert_eq!(status, 422, "{problem}");
    assert!(
        problem["detail"]
            .as_str()
            .is_some_and(|why| why.contains("exists")),
        "{problem}"
    );
}

/// Promise CELL-36.
#[test]
fn repeated_request_has_one_effect_through_the_deaths_of_processes() {
    let scratch = Scratch::new("api-again");
    let api = Api::start(&scratch);
    let name = format!("t-api-again-{}", std::process::id());
    let spec = json!({"name": name, "image": VmFile::TINY, "memory": "128M", "nets": []});
    let start = |api: &Api| api.ask_with("idempotency-key: start\r\n", "POST", "/v1/vms", &spec);
    let (status, made) = start(&api);
    assert_eq!(status, 201, "{made}");
    let vm = Vm::named(&name);
    let api = api.killed_and_started_again(&scratch);
    assert_eq!(start(&api), (201, made.clone()));
    vm.wait_up();
    vm.kill_monitor(Duration::from_secs(20));
    assert_eq!(start(&api), (201, made.clone()));
    assert_eq!(
        vm.shard(),
        made["pid"]
            .as_u64()
            .and_then(|pid| u32::try_from(pid).ok())
            .expect("a process")
    );
    // The command's clones are made once.
    let id = format!("clone-{}", std::process::id());
    let clone = || {
        mirrorball(["clone", &name, "--request", &id])
            .limit(BOOT_LIMIT)
            .ok()
            .text()
    };
    let first = clone();
    let copy = Vm::named(first.trim());
    assert_eq!(clone(), first);
    let (_, listed) = api.ask("GET", "/v1/vms", &Value::Null);
    let own = listed.as_array().expect("a list").iter();
    let own = own.filter(|vm| vm["name"].as_str().is_some_and(|other| other.starts_with(&name)));
    assert_eq!(own.count(), 2, "{listed}");
    let other = mirrorball(["clone", &name, "--count", "2", "--request", &id])
        .run()
        .expect(1);
    assert!(
        other.errors().contains("id is that of another command"),
        "{other}"
    );
    // The first kill ends it, and the second has the same result.
    let id = format!("kill-{}", std::process::id());
    for _ in 0..2 {
        mirrorball(["kill", copy.name(), "--request", &id]).ok();
    }
    assert!(copy.listed().is_none());
}

#[test]
fn programs_lend_memory_between_cells_see_vcpus_and_have_a_cell_fail() {
    let scratch = Scratch::new("api-cells");
    let _cluster = Cluster::up(&scratch);
    let api = Api::start(&scratch);
    let name = format!("t-api-cells-{}", std::process::id());
    let spec = json!({"name": name, "image": VmFile::TINY, "memory": "128M", "nets": [], "cell": 1});
    let (status, made) = api.ask("POST", "/v1/vms", &spec);
    assert_eq!((status, &made["cell"]), (201, &json!(1)), "{made}");
    let vm = Vm::named(&name);
    let (status, known) = api.ask("GET", "/v1/cells/vcpus", &Value::Null);
    let vcpu = &known["vcpus"][0];
    assert_eq!(
        (status, &vcpu["vm"], &vcpu["cell"]),
        (200, &json!(name), &json!(1)),
        "{known}"
    );
    let loan = json!({"borrower": 1, "bytes": 64 << 20});
    let lent = || api.ask("GET", "/v1/cells", &Value::Null).1[0]["lent_bytes"].clone();
    assert_eq!(api.ask("POST", "/v1/cells/0/lend", &loan).0, 204);
    assert_eq!(lent(), 64 << 20);
    assert_eq!(api.ask("POST", "/v1/cells/0/reclaim", &loan).0, 204);
    assert_eq!(lent(), 0);
    let (status, problem) = api.ask("POST", "/v1/cells/0/reclaim", &loan);
    assert_eq!(status, 409, "{problem}");
    let (status, lost) = api.ask("POST", "/v1/cells/1/fail", &Value::Null);
    assert_eq!(status, 200, "{lost}");
    assert!(
        lost["notes"][0].as_str().is_some_and(|note| note.contains(&name)),
        "{lost}"
    );
    assert!(vm.listed().is_none());
    let (status, problem) = api.ask("POST", "/v1/cells/1/fail", &Value::Null);
    assert_eq!(status, 422, "{problem}");
}
