//! A VM in the registry without a guest: threads serve its sockets, and its agent runs programs of this host.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use registry::console::LOG;
use registry::control::{Answer, PlacedBy, Placement, Request};
use registry::vms::{Entry, Registry};
use serde_json::json;

/// Runs until it is dropped or ended.
pub struct FakeVm {
    entry: Option<Entry>,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    has_ended: AtomicBool,
    /// Connections that follow the console.
    followers: Mutex<Vec<UnixStream>>,
    /// Received orders.
    orders: Mutex<Vec<String>>,
}

/// Output of the console.
pub const CONSOLE: &str = "the first line\nthe last line\n";

impl FakeVm {
    /// Starts a VM with an agent from the start.
    pub fn start(runtime: &Path, name: &str, member: Option<u32>) -> Self {
        let vm = Self::booting(runtime, name, member);
        vm.start_agent();
        vm
    }

    /// Starts a VM whose agent does not reply yet.
    pub fn booting(runtime: &Path, name: &str, member: Option<u32>) -> Self {
        let registry = Registry::at(runtime).unwrap();
        let entry = registry.claim(name).unwrap();
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let record = json!({
            "name": name, "state": "running", "monitor_pid": std::process::id(), "shard_pid": 2,
            "started_unix_s": now, "boots": 1,
            "cid": registry.next_cid().unwrap(), "sandbox_missing": [], "member": member,
            "spec": { "name": name, "image": "tiny" },
        });
        let state = Arc::new(State::default());
        let served = state.clone();
        serve(&entry.folder().join("control.sock"), move |client| {
            served.control(client);
        });
        let served = state.clone();
        serve(&entry.folder().join("console.sock"), move |client| {
            served.console(client);
        });
        entry.write(&serde_json::from_value(record).unwrap()).unwrap();
        Self {
            entry: Some(entry),
            state,
        }
    }

    pub fn start_agent(&self) {
        let folder = self.entry.as_ref().unwrap().folder();
        serve(&folder.join("vsock.sock"), |mut client| {
            let mut line = String::new();
            BufReader::with_capacity(1, &client).read_line(&mut line).unwrap();
            assert_eq!(line, "CONNECT 1024\n");
            client.write_all(b"OK 1024\n").unwrap();
            let _ = agent::server::serve(client);
        });
    }

    /// Adds output to the console.
    pub fn say(&self, text: &str) {
        for follower in self.state.followers.lock().unwrap().iter_mut() {
            let _ = follower.write_all(text.as_bytes());
        }
    }

    /// Returns the received orders in the protocol's JSON.
    pub fn orders(&self) -> Vec<String> {
        self.state.orders.lock().unwrap().clone()
    }

    pub fn end(&mut self) {
        self.state.has_ended.store(true, Ordering::Release);
        drop(self.entry.take());
        self.state.followers.lock().unwrap().clear();
    }
}

impl Drop for FakeVm {
    fn drop(&mut self) {
        self.end();
    }
}

impl State {
    fn control(&self, mut client: UnixStream) {
        let mut line = String::new();
        BufReader::new(&client).read_line(&mut line).unwrap();
        let request: Request = serde_json::from_str(&line).unwrap();
        let word = serde_json::from_str::<serde_json::Value>(&line).unwrap()["ask"].clone();
        self.orders
            .lock()
            .unwrap()
            .push(word.as_str().unwrap().to_owned());
        let answer = match request {
            Request::AwaitEnd { limit_s } => {
                let deadline = Instant::now() + Duration::from_secs(limit_s);
                while !self.has_ended.load(Ordering::Acquire) && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(5));
                }
                match self.has_ended.load(Ordering::Acquire) {
                    true => Answer::Ended { killed: false },
                    false => Answer::TimedOut,
                }
            }
            Request::Kill | Request::Stop { .. } => Answer::Ended { killed: true },
            Request::Move { .. } => Answer::Moved {
                still_ns: 1001,
                dropped_pin: Some(vec![2, 3]),
            },
            Request::Place { .. } => Answer::Placed(Placement {
                by: PlacedBy::Loan,
                began: Some(1),
                ..Placement::default()
            }),
            Request::Nmi => Answer::Refused {
                why: "not now".to_owned(),
            },
            _ => Answer::Done,
        };
        let mut line = serde_json::to_vec(&answer).unwrap();
        line.push(b'\n');
        let _ = client.write_all(&line);
    }

    fn console(&self, mut client: UnixStream) {
        let mut mode = [0];
        if client.read_exact(&mut mode).is_err() {
            return;
        }
        let _ = client.write_all(CONSOLE.as_bytes());
        if mode[0] != LOG {
            self.followers.lock().unwrap().push(client);
        }
    }
}

/// Serves each connection in a thread.
fn serve(path: &Path, client: impl Fn(UnixStream) + Clone + Send + 'static) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let client = client.clone();
            std::thread::spawn(move || client(stream));
        }
    });
}
