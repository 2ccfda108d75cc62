//! Event streams that break off and resume, on a host without VMs.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use registry::journal::{Change, Journal};

/// Time limit for a response.
const LIMIT: Duration = Duration::from_secs(10);

/// A running `mirrorball-api`, killed when dropped.
struct Api {
    child: Child,
    place: tempfile::TempDir,
}

impl Api {
    fn start() -> Self {
        let place = tempfile::tempdir().unwrap();
        let host_file = place.path().join("host.toml");
        std::fs::write(&host_file, "").unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_mirrorball-api"))
            .args(["--program", "/bin/false", "--socket"])
            .arg(place.path().join("api.sock"))
            .env("MIRRORBALL_RUNTIME", place.path())
            .env("MIRRORBALL_HOST_FILE", host_file)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, place }
    }

    fn socket(&self) -> PathBuf {
        self.place.path().join("api.sock")
    }

    fn journal(&self) -> Journal {
        Journal::at(self.place.path())
    }

    /// Opens a stream of a client that has `id`, if any.
    fn stream(&self, id: Option<&str>) -> BufReader<UnixStream> {
        let start = Instant::now();
        let mut stream = loop {
            match UnixStream::connect(self.socket()) {
                Ok(stream) => break stream,
                Err(error) => assert!(start.elapsed() < LIMIT, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let id = id.map_or_else(String::new, |id| format!("Last-Event-ID: {id}\r\n"));
        let request = format!("GET /v1/events HTTP/1.0\r\nhost: localhost\r\n{id}\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        BufReader::new(stream)
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the next event of the journal in a stream: its id and its data.
fn next(stream: &mut impl BufRead) -> (String, serde_json::Value) {
    let (mut kind, mut id, mut data) = (String::new(), String::new(), String::new());
    for line in stream.lines() {
        let line = line.expect("an event in time");
        match line.split_once(": ") {
            Some(("event", text)) => kind = text.to_owned(),
            Some(("id", text)) => id = text.to_owned(),
            Some(("data", text)) => data = text.to_owned(),
            _ if line.is_empty() && kind == "journal" => {
                return (id, serde_json::from_str(&data).expect("JSON"));
            }
            _ => {}
        }
    }
    panic!("the stream has ended");
}

fn cordoned(cell: u16) -> Change {
    Change::CellCordoned { cell }
}

#[test]
fn client_that_comes_back_with_its_last_id_misses_no_event_and_gets_none_twice() {
    let api = Api::start();
    api.journal().append(cordoned(0)).unwrap();
    let mut first = api.stream(None);
    // The response's head marks the start: earlier events are sent only to a client with an id.
    let mut head = [0; 15];
    first.read_exact(&mut head).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    api.journal().append(cordoned(1)).unwrap();
    let (id, event) = next(&mut first);
    assert_eq!(
        (&event["event"], &event["cell"]),
        (&"cell-cordoned".into(), &1.into())
    );
    drop(first);
    for cell in 2..5 {
        api.journal().append(cordoned(cell)).unwrap();
    }
    let mut second = api.stream(Some(&id));
    for cell in 2..5 {
        assert_eq!(next(&mut second).1["cell"], cell);
    }
    api.journal().append(cordoned(5)).unwrap();
    let (last, event) = next(&mut second);
    assert_eq!(event["cell"], 5);
    assert_ne!(last, id);
}

#[test]
fn id_that_is_gone_or_never_was_gives_a_gap() {
    let api = Api::start();
    api.journal().append(cordoned(0)).unwrap();
    for id in ["1-1-30", "7", "\u{e4}"] {
        let (_, event) = next(&mut api.stream(Some(id)));
        assert_eq!(event["event"], "gap", "{id}");
        assert!(event["why"].as_str().is_some_and(|why| !why.is_empty()));
    }
}

#[test]
fn event_streams_of_one_user_are_bounded_and_a_closed_stream_frees_its_slot() {
    let api = Api::start();
    let mut open = Vec::new();
    let refused = loop {
        let mut stream = api.stream(None);
        let mut status = String::new();
        stream.read_line(&mut status).unwrap();
        if !status.contains(" 200 ") {
            let mut rest = String::new();
            stream.read_to_string(&mut rest).unwrap();
            break status + &rest;
        }
        assert!(open.len() < 1000, "streams have no bound");
        open.push(stream);
    };
    assert!(refused.contains(" 429 "), "{refused}");
    let detail = format!("{} streams of events of this user", open.len());
    assert!(refused.contains(&detail), "{refused}");
    // The server still responds to other requests of the user.
    let mut other = UnixStream::connect(api.socket()).unwrap();
    other.set_read_timeout(Some(LIMIT)).unwrap();
    other
        .write_all(b"GET /v1/memory HTTP/1.0\r\nhost: localhost\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    other.read_to_string(&mut answer).unwrap();
    assert!(answer.contains(" 200 "), "{answer}");
    open.pop();
    let start = Instant::now();
    loop {
        let mut status = String::new();
        api.stream(None).read_line(&mut status).unwrap();
        if status.contains(" 200 ") {
            break;
        }
        assert!(start.elapsed() < LIMIT, "{status}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
