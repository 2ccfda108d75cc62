//! Rights of the group's members, and the resources that one user has of the API.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};
use support::vm::FakeVm;
use support::{Api, LIMIT, MEMBER, connect_as, is_root, until};

/// Requests of a member to the guest's routes, and whether the VM's starter may make them.
fn members_requests(api: &Api, vm: &str) -> Vec<(String, bool)> {
    let request = |method: &str, path: &str, body: &Value| {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let of_vm =
        |method: &str, what: &str, body: Value| request(method, &format!("/v1/vms/{vm}/{what}"), &body);
    let loan = json!({"borrower": 1, "bytes": 1});
    vec![
        (of_vm("GET", "logs", Value::Null), true),
        (of_vm("POST", "exec", json!({"argv": ["true"]})), true),
        (
            of_vm(
                "PUT",
                &format!("files?path={}/copied", api.place.path().display()),
                Value::Null,
            ),
            true,
        ),
        (of_vm("GET", "files?path=/proc/version", Value::Null), true),
        (of_vm("POST", "clone", json!({})), false),
        (of_vm("POST", "snapshot", json!({"directory": "/srv/s"})), false),
        (of_vm("POST", "move", json!({"vcpu": 0, "cell": 0})), false),
        (
            request("POST", "/v1/snapshots/restore", &json!({"directory": "/srv/s"})),
            false,
        ),
        (request("POST", "/v1/cells/0/lend", &loan), false),
        (request("POST", "/v1/cells/0/reclaim", &loan), false),
        (request("POST", "/v1/cells/0/fail", &Value::Null), false),
    ]
}

#[test]
fn members_use_the_guests_of_the_vms_that_they_started_and_copy_or_place_none() {
    if !is_root() {
        return;
    }
    let policy = "[members]\nmemory = \"256M\"\ncpus = 2\n";
    let limited = Api::start_with(&["--group", "root"], policy);
    let look = Api::start_with(&["--group", "root"], "");
    for api in [&limited, &look] {
        let _own = FakeVm::start(api.place.path(), "own", Some(MEMBER));
        let _others = FakeVm::start(api.place.path(), "others", Some(MEMBER + 1));
        let _owners = FakeVm::start(api.place.path(), "owners", None);
        for vm in ["own", "others", "owners"] {
            for (request, is_starters) in members_requests(api, vm) {
                let may = is_starters && vm == "own" && std::ptr::eq(api, &raw const limited);
                let (status, detail) = api.send_as(MEMBER, &request);
                assert_eq!(status, if may { 200 } else { 403 }, "{request}: {detail}");
            }
            // Waiting and reading change nothing.
            let wait = "{\"for\": \"running\"}";
            let wait = format!(
                "POST /v1/vms/{vm}/wait HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
                 content-length: {}\r\n\r\n{wait}",
                wait.len()
            );
            assert_eq!(api.send_as(MEMBER, &wait).0, 200);
        }
        let memory = "GET /v1/memory HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        assert_eq!(api.send_as(MEMBER, memory).0, 200);
    }
}

#[test]
fn members_request_never_reaches_a_later_vm_of_the_name() {
    if !is_root() {
        return;
    }
    let policy = "[members]\nmemory = \"256M\"\ncpus = 2\n";
    let api = Api::start_with(&["--group", "root"], policy);
    let own = FakeVm::booting(api.place.path(), "a", Some(MEMBER));
    let (exec, _) = members_requests(&api, "a").remove(1);
    let (status, detail) = std::thread::scope(|scope| {
        let asked = scope.spawn(|| api.send_as(MEMBER, &exec));
        std::thread::sleep(Duration::from_millis(300));
        drop(own);
        let _owners = FakeVm::start(api.place.path(), "a", None);
        asked.join().unwrap()
    });
    assert_eq!(status, 409, "{detail}");
    assert!(detail.contains("has ended"), "{detail}");
}

#[test]
fn one_members_long_requests_are_bounded_and_end_with_their_clients() {
    if !is_root() {
        return;
    }
    let api = Api::start_with(&["--group", "root"], "");
    let _vm = FakeVm::start(api.place.path(), "a", None);
    let request = |body: &str| {
        format!(
            "POST /v1/vms/a/wait HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let clients: Vec<UnixStream> = (0..16)
        .map(|_| {
            let mut client = connect_as(MEMBER, &api.socket());
            let long = request("{\"for\": \"end\", \"limit_s\": 60}");
            client.write_all(long.as_bytes()).unwrap();
            client
        })
        .collect();
    let short = request("{\"for\": \"running\"}");
    until("a 17th long request is taken", || {
        api.send_as(MEMBER, &short).0 == 429
    });
    let look = "GET /v1/vms HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    assert_eq!(api.send_as(MEMBER, look).0, 200, "short ones are answered");
    assert_eq!(api.send_as(0, &short).0, 200, "another user");
    drop(clients);
    until("slots of clients that have gone stay taken", || {
        api.send_as(MEMBER, &short).0 == 200
    });
}

#[test]
fn one_users_connections_are_bounded_and_leave_room_for_others() {
    if !is_root() {
        return;
    }
    let api = Api::start_with(&["--group", "root"], "");
    let held: Vec<UnixStream> = (0..64).map(|_| connect_as(MEMBER, &api.socket())).collect();
    until("a 65th connection is served", || {
        let mut one_more = connect_as(MEMBER, &api.socket());
        one_more.set_read_timeout(Some(LIMIT)).unwrap();
        let _ = one_more.write_all(b"GET /v1/vms HTTP/1.0\r\n\r\n");
        let mut answer = Vec::new();
        // Closing a connection with unread bytes resets it.
        let _ = one_more.read_to_end(&mut answer);
        answer.is_empty()
    });
    assert_eq!(api.ask("GET", "/v1/vms", "", "").0, 200, "another user");
    drop(held);
    let look = "GET /v1/vms HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    until("connections that have ended still count", || {
        let mut stream = connect_as(MEMBER, &api.socket());
        let _ = stream.write_all(look.as_bytes());
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer.starts_with("HTTP/1.1 200")
    });
}
