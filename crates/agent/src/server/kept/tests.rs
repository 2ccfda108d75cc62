//! Tests of kept programs over socket pairs.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Instant;

use nix::sys::signal::{SigHandler, Signal, signal};

use super::super::{exec, serve};
use super::*;
use crate::client::{self, ClientError};
use crate::protocol::{Attached, ExecRequest, ExitStatus, Kind, Ready, Request};

const LIMIT: Duration = Duration::from_secs(20);

fn shell(script: &str) -> ExecRequest {
    ExecRequest {
        argv: ["sh", "-c", script].map(String::from).to_vec(),
        env: Vec::new(),
        cwd: None,
        tty: None,
    }
}

/// The client's side of a connection.
struct Client(Wire);

impl Client {
    /// Sends a request to an agent.
    fn ask(request: &Request) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::spawn(move || serve(theirs));
        let wire = Wire::new(&ours).unwrap();
        wire.send_json(Kind::Request, request).unwrap();
        Self(wire)
    }

    fn keep(id: &str, script: &str) -> Self {
        let id = id.to_owned();
        let program = shell(script);
        let mut client = Self::ask(&Request::ExecKept { id, program });
        assert_eq!(client.ready().attached, None);
        client
    }

    fn attach(id: &str) -> (Self, Attached) {
        let mut client = Self::ask(&Request::Attach { id: id.to_owned() });
        let attached = client.ready().attached.expect("the state of the program");
        (client, attached)
    }

    /// The next frame; none at the end of the connection.
    fn next(&mut self) -> Option<(Kind, Vec<u8>)> {
        let frame = self.0.wait_frame(Some(Instant::now() + LIMIT)).unwrap()?;
        Some((frame.kind, frame.payload))
    }

    fn ready(&mut self) -> Ready {
        let (kind, payload) = self.next().unwrap();
        assert_eq!(kind, Kind::Ready, "{}", String::from_utf8_lossy(&payload));
        serde_json::from_slice(&payload).unwrap()
    }

    fn refusal(&mut self) -> String {
        let (kind, payload) = self.next().unwrap();
        assert_eq!(kind, Kind::Refused);
        String::from_utf8(payload).unwrap()
    }

    /// The output up to the status, and the status.
    fn rest(&mut self) -> (Vec<u8>, ExitStatus) {
        let mut output = Vec::new();
        loop {
            match self.next().unwrap() {
                (Kind::Stdout, bytes) => output.extend(bytes),
                (Kind::Exit, status) => return (output, serde_json::from_slice(&status).unwrap()),
                other => panic!("{other:?}"),
            }
        }
    }

    fn type_line(&self, line: &str) {
        let line = format!("{line}\n");
        self.0.send_frame(Kind::Stdin, line.as_bytes(), None).unwrap();
    }
}

fn wait_for(path: &Path) {
    let deadline = Instant::now() + LIMIT;
    while !path.exists() {
        assert!(Instant::now() < deadline, "no {}", path.display());
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn id_has_letters_digits_and_few_signs() {
    for id in ["a", "build-1.x_Y", &"x".repeat(64)] {
        assert!(is_id(id), "{id}");
    }
    for wrong in ["", "a b", "a/b", "\u{1b}c", "\u{e4}", &"x".repeat(65)] {
        assert!(!is_id(wrong), "{wrong:?}");
    }
}

#[test]
fn program_whose_client_is_lost_goes_on_and_another_client_attaches() {
    let mut client = Client::keep(
        "goes-on",
        "echo one; read x; echo two-$x; read y; echo $y; exit 5",
    );
    assert_eq!(client.next().unwrap(), (Kind::Stdout, b"one\n".to_vec()));
    drop(client);
    let (mut client, attached) = Client::attach("goes-on");
    let well = Attached {
        dropped_bytes: 0,
        has_terminal: false,
    };
    assert_eq!(attached, well);
    client.type_line("a");
    assert_eq!(client.next().unwrap(), (Kind::Stdout, b"two-a\n".to_vec()));
    drop(client);
    let (mut client, _) = Client::attach("goes-on");
    client.type_line("b");
    assert_eq!(client.rest(), (b"b\n".to_vec(), ExitStatus::Code(5)));
}

#[test]
fn output_without_a_client_is_kept_to_its_last_64_kib_and_the_rest_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let [go, done] = ["go", "done"].map(|name| folder.path().join(name));
    let script = format!(
        "until [ -e {} ]; do sleep 0.01; done; head -c 200000 /dev/zero | tr '\\0' x; touch {}; read x; \
         exit 3",
        go.display(),
        done.display()
    );
    drop(Client::keep("much", &script));
    std::fs::write(&go, "").unwrap();
    // The program does not block, though no client receives its output.
    wait_for(&done);
    // The last bytes may still be in its pipe.
    thread::sleep(Duration::from_millis(200));
    let (mut client, attached) = Client::attach("much");
    client.type_line("");
    let (output, status) = client.rest();
    assert_eq!(status, ExitStatus::Code(3));
    assert_eq!(output, vec![b'x'; 64 << 10]);
    assert_eq!(attached.dropped_bytes, 200_000 - (64 << 10));
}

#[test]
fn program_that_ends_without_a_client_leaves_its_output_and_its_status() {
    let folder = tempfile::tempdir().unwrap();
    let done = folder.path().join("done");
    let script = format!("sleep 0.1; echo end; touch {}; exit 7", done.display());
    drop(Client::keep("ended", &script));
    wait_for(&done);
    thread::sleep(Duration::from_millis(200));
    let (mut client, attached) = Client::attach("ended");
    assert_eq!(attached.dropped_bytes, 0);
    assert_eq!(client.rest(), (b"end\n".to_vec(), ExitStatus::Code(7)));
    drop(client);
    // It is kept no longer.
    let mut late = Client::ask(&Request::Attach { id: "ended".into() });
    assert!(late.refusal().starts_with("no kept program has the id"));
}

#[test]
fn client_that_attaches_takes_the_place_of_one_that_is_still_connected() {
    let mut first = Client::keep("taken-over", "echo on; read x; exit 4");
    assert_eq!(first.next().unwrap(), (Kind::Stdout, b"on\n".to_vec()));
    let (mut second, _) = Client::attach("taken-over");
    assert_eq!(first.refusal(), REPLACED);
    assert_eq!(first.next(), None);
    second.type_line("");
    assert_eq!(second.rest().1, ExitStatus::Code(4));
}

#[test]
fn program_without_a_client_for_too_long_is_ended_and_its_id_is_free() {
    let folder = tempfile::tempdir().unwrap();
    let hung_up = folder.path().join("hung-up");
    // Tests that run under `nohup` ignore the signal, and a shell can't catch a signal that was ignored at
    // its start.
    // SAFETY: sets the default action, which runs no code of this program.
    unsafe { signal(Signal::SIGHUP, SigHandler::SigDfl) }.unwrap();
    // A shell reports the end of its child, and would end itself where no process reads that.
    let script = format!(
        "exec 2>/dev/null; trap ': > {}; exit' HUP; echo on; while :; do sleep 0.01; done",
        hung_up.display()
    );
    let (ours, theirs) = UnixStream::pair().unwrap();
    let limit = Duration::from_millis(200);
    let serving = thread::spawn(move || {
        let wire = Wire::new(&theirs)?;
        drop(theirs);
        exec::serve_kept_for(limit, wire, "too-long", &shell(&script))
    });
    let mut client = Client(Wire::new(&ours).unwrap());
    drop(ours);
    client.ready();
    assert_eq!(client.next().unwrap(), (Kind::Stdout, b"on\n".to_vec()));
    let begun = Instant::now();
    drop(client);
    serving.join().unwrap().unwrap();
    assert!(begun.elapsed() >= limit);
    assert!(hung_up.exists());
    let mut late = Client::ask(&Request::Attach {
        id: "too-long".into(),
    });
    assert!(late.refusal().starts_with("no kept program has the id"));
}

#[test]
fn id_that_is_taken_or_invalid_is_refused_and_no_program_runs() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    let program = shell(&format!("touch {}", trace.display()));
    let _first = Client::keep("of-one", "read x");
    for (id, why) in [
        ("of-one", "a kept program has this id already"),
        ("a b", "an id has 1 to 64 letters"),
    ] {
        let id = id.to_owned();
        let program = program.clone();
        let refusal = Client::ask(&Request::ExecKept { id, program }).refusal();
        assert!(refusal.starts_with(why), "{refusal}");
    }
    // No terminal obeys an id.
    let refusal = Client::ask(&Request::Attach {
        id: "\u{1b}]0;x".into(),
    })
    .refusal();
    assert!(!refusal.contains('\u{1b}'), "{refusal}");
    assert!(!trace.exists());
}

#[test]
fn number_of_kept_programs_is_bounded() {
    let table = Table(Mutex::new(BTreeMap::new()));
    let begin = |id: usize| table.begin(&id.to_string());
    // Dropping an entry would remove it from the agent's own table.
    let entries: Vec<_> = (0..KEPT_MAX)
        .map(|id| std::mem::ManuallyDrop::new(begin(id).unwrap()))
        .collect();
    assert_eq!(entries.len(), KEPT_MAX);
    assert!(matches!(begin(KEPT_MAX), Err(KeepError::Full)));
}

#[test]
fn agent_that_does_not_describe_the_program_is_refused_by_the_client() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let answering = thread::spawn(move || {
        let mut wire = Wire::new(&theirs).unwrap();
        wire.wait_frame(Some(Instant::now() + LIMIT)).unwrap();
        wire.send_frame(Kind::Ready, br#"{"version":"0"}"#, None).unwrap();
    });
    let attached = client::attach(ours, "x", |attached| panic!("{attached:?}"));
    assert!(matches!(attached, Err(ClientError::Protocol(_))), "{attached:?}");
    answering.join().unwrap();
}
