//! Tests of server and client with each other, and of each with a faulty peer, over socket pairs.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};

use super::serve;
use crate::client::{self, ClientError};
use crate::protocol::{End, ExecRequest, ExitStatus, FRAME_BYTES_MAX, Kind, Request, WindowSize, frame};

fn connect() -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || serve(theirs));
    ours
}

/// Returns a client's connection to a server that sends `bytes` and then closes its side, or stays silent.
fn liar(bytes: Vec<u8>, stay: bool) -> UnixStream {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        let _ = theirs.write_all(&bytes);
        if stay {
            let _ = theirs.read_to_end(&mut Vec::new());
        }
    });
    ours
}

fn shell(script: &str) -> ExecRequest {
    ExecRequest {
        argv: ["sh", "-c", script].map(String::from).to_vec(),
        env: Vec::new(),
        cwd: None,
        tty: None,
    }
}

fn run(script: &str, input: &[u8]) -> (ExitStatus, Vec<u8>, Vec<u8>) {
    client::output(connect(), &shell(script), input).unwrap()
}

fn ready() -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::encode(Kind::Ready, br#"{"version":"0"}"#, &mut bytes);
    bytes
}

fn gone_within(limit: Duration, pid: i32) -> bool {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        if nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), None).is_err() {
            return true;
        }
        thread::sleep(Duration::from_millis(10));
    }
    false
}

#[test]
fn ping_returns_the_version() {
    assert_eq!(client::ping(connect()).unwrap(), crate::VERSION);
}

#[test]
fn guest_without_systemd_is_up_when_its_agent_replies() {
    if !std::path::Path::new("/run/systemd/system").exists() {
        assert!(client::is_up(connect()).unwrap());
    }
    // An agent without warm starts, or a faulty one, sends no state.
    let error = client::is_up(liar(ready(), true)).unwrap_err();
    assert!(matches!(error, ClientError::Protocol(_)), "{error}");
}

#[test]
fn exit_codes_and_signals_pass_through() {
    assert_eq!(run("exit 0", b"").0, ExitStatus::Code(0));
    assert_eq!(run("exit 77", b"").0, ExitStatus::Code(77));
    assert_eq!(run("kill -9 $$", b"").0, ExitStatus::Signal(9));
    assert_eq!(run("kill -9 $$", b"").0.code(), 137);
}

#[test]
fn binary_input_returns_whole_and_output_precedes_the_status() {
    let input: Vec<u8> = (0..3_000_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let (status, stdout, stderr) = run("cat; echo end >&2; exit 3", &input);
    assert_eq!(status, ExitStatus::Code(3));
    assert!(stdout == input, "{} of {} bytes", stdout.len(), input.len());
    assert_eq!(stderr, b"end\n");
}

#[test]
fn a_program_that_ignores_its_input_does_not_hang() {
    let (status, stdout, _) = run("exec <&-; echo done", &vec![b'x'; 2_000_000]);
    assert_eq!((status, stdout), (ExitStatus::Code(0), b"done\n".to_vec()));
}

#[test]
fn a_background_process_that_holds_the_output_does_not_hang_the_client() {
    let started = Instant::now();
    let (status, stdout, _) = run("sleep 20 & echo $!", b"");
    assert_eq!(status, ExitStatus::Code(0));
    assert!(started.elapsed() < Duration::from_secs(10));
    let pid: i32 = String::from_utf8(stdout).unwrap().trim().parse().unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGKILL).unwrap();
}

#[test]
fn environment_and_directory_are_those_requested() {
    let mut request = shell("echo $MARK; pwd; command -v ls >/dev/null && echo path");
    request.env.push(("MARK".into(), "set".into()));
    request.cwd = Some("/usr".into());
    let (_, stdout, _) = client::output(connect(), &request, b"").unwrap();
    assert_eq!(stdout, b"set\n/usr\npath\n");
}

#[test]
fn program_that_cannot_run_is_refused_with_a_reason() {
    let mut request = shell("");
    request.argv = vec!["no-such-program".into()];
    let error = client::output(connect(), &request, b"").unwrap_err();
    assert!(
        matches!(&error, ClientError::Refused(why) if why.contains("command not found")),
        "{error}"
    );
    request.argv.clear();
    assert!(matches!(
        client::output(connect(), &request, b""),
        Err(ClientError::Refused(_))
    ));
    let mut request = shell("true");
    request.cwd = Some("/no/such".into());
    assert!(matches!(
        client::output(connect(), &request, b""),
        Err(ClientError::Refused(_))
    ));
}

#[test]
fn a_program_with_a_terminal_sees_its_size_and_end_of_input() {
    let mut request = shell("tty >/dev/null && stty size && cat && echo over; exit 4");
    request.tty = Some(WindowSize { rows: 33, cols: 99 });
    let (status, stdout, _) = client::output(connect(), &request, b"line\n").unwrap();
    let text = String::from_utf8_lossy(&stdout);
    assert_eq!(status, ExitStatus::Code(4), "{text}");
    assert!(
        text.contains("33 99") && text.contains("line") && text.contains("over"),
        "{text}"
    );
}

#[test]
fn a_resized_terminal_and_a_signal_reach_the_program() {
    let mut stream = connect();
    let mut request = shell("trap 'stty size; exit 5' WINCH; echo go; while :; do sleep 0.05; done");
    request.tty = Some(WindowSize { rows: 10, cols: 20 });
    let mut bytes = Vec::new();
    frame::encode_json(Kind::Request, &Request::Exec(request), &mut bytes);
    stream.write_all(&bytes).unwrap();
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    let mut resized = false;
    loop {
        let length = stream.read(&mut buffer).unwrap();
        if length == 0 {
            break;
        }
        seen.extend_from_slice(&buffer[..length]);
        if !resized && seen.windows(2).any(|two| two == b"go") {
            let mut bytes = Vec::new();
            frame::encode_json(Kind::WindowSize, &WindowSize { rows: 44, cols: 55 }, &mut bytes);
            stream.write_all(&bytes).unwrap();
            resized = true;
        }
    }
    let text = String::from_utf8_lossy(&seen);
    assert!(
        text.contains("44 55") && text.contains(r#"{"code":5}"#),
        "{text:?}"
    );
}

#[test]
fn program_ends_when_its_client_disconnects() {
    for script in [
        "echo $$; exec sleep 30",
        "trap '' HUP; echo $$; while :; do sleep 1; done",
    ] {
        let mut stream = connect();
        let mut bytes = Vec::new();
        frame::encode_json(Kind::Request, &Request::Exec(shell(script)), &mut bytes);
        stream.write_all(&bytes).unwrap();
        let mut seen = Vec::new();
        while !seen.ends_with(b"\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            seen.push(byte[0]);
        }
        let digits: Vec<u8> = seen
            .iter()
            .rev()
            .skip(1)
            .take_while(|b| b.is_ascii_digit())
            .copied()
            .collect();
        let pid: i32 = String::from_utf8(digits.into_iter().rev().collect())
            .unwrap()
            .parse()
            .unwrap();
        drop(stream);
        assert!(gone_within(Duration::from_secs(8), pid), "{script} goes on");
    }
}

#[test]
fn a_file_goes_there_and_back_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let content: Vec<u8> = (0..5_000_001u32).map(|n| (n % 251) as u8).collect();
    let source = directory.path().join("source");
    fs::write(&source, &content).unwrap();
    fs::set_permissions(&source, fs::Permissions::from_mode(0o751)).unwrap();
    fs::create_dir(directory.path().join("guest")).unwrap();
    let guest = directory.path().join("guest");

    let mut seen = 0;
    let mut file = File::open(&source).unwrap();
    let put = client::put(connect(), &mut file, "named", guest.to_str().unwrap(), &mut |n| {
        seen = n
    })
    .unwrap();

    let arrived = guest.join("named");
    assert_eq!((put, seen), (content.len() as u64, content.len() as u64));
    assert!(fs::read(&arrived).unwrap() == content);
    assert_eq!(
        fs::metadata(&arrived).unwrap().permissions().mode() & 0o777,
        0o751
    );
    assert_eq!(
        fs::read_dir(&guest).unwrap().count(),
        1,
        "no temporary file is left"
    );
    let back = directory.path().join("back");
    let target = File::create(&back).unwrap();
    let copied = client::get(connect(), arrived.to_str().unwrap(), &target, &mut |_| {}).unwrap();
    assert!(fs::read(&back).unwrap() == content);
    assert_eq!((copied.bytes, copied.mode), (content.len() as u64, 0o751));
}

#[test]
fn copied_file_is_never_set_user_id_and_private_when_the_agent_sends_no_mode() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("program");
    fs::write(&path, "x").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
    let target = tempfile::tempfile().unwrap();
    let copied = client::get(connect(), path.to_str().unwrap(), &target, &mut |_| {}).unwrap();
    assert_eq!(copied.mode, 0o755);
    let mut bytes = ready();
    frame::encode_json(
        Kind::End,
        &End {
            bytes: 0,
            sha256: HEXLOWER.encode(&Sha256::digest(b"")),
        },
        &mut bytes,
    );
    let copied = client::get(liar(bytes, true), "/x", &target, &mut |_| {}).unwrap();
    assert_eq!(copied.mode, 0o600);
}

#[test]
fn files_without_a_size_are_read_to_their_end() {
    let target = tempfile::tempfile().unwrap();
    let copied = client::get(connect(), "/proc/self/status", &target, &mut |_| {}).unwrap();
    assert!(copied.bytes > 100);
}

#[test]
fn copying_to_or_from_a_path_that_is_no_regular_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().to_str().unwrap();
    let target = tempfile::tempfile().unwrap();
    for path in [place, "/dev/zero", "relative", "/no/such/file"] {
        let got = client::get(connect(), path, &target, &mut |_| {});
        assert!(matches!(got, Err(ClientError::Refused(_))), "{path}: {got:?}");
    }
    for (path, name) in [
        (place, ".."),
        (place, "a/b"),
        (place, ""),
        ("/dev/null", "x"),
        ("/no/such/file", "x"),
    ] {
        let mut source = File::open("/proc/self/status").unwrap();
        let put = client::put(connect(), &mut source, name, path, &mut |_| {});
        assert!(
            matches!(put, Err(ClientError::Refused(_))),
            "{path} {name}: {put:?}"
        );
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn an_interrupted_copy_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || serve(theirs));
    let path = directory.path().join("file").to_str().unwrap().to_owned();
    let mut bytes = Vec::new();
    frame::encode_json(
        Kind::Request,
        &Request::Put {
            path,
            name: "n".into(),
            mode: 0o644,
        },
        &mut bytes,
    );
    frame::encode(Kind::Data, b"half", &mut bytes);
    ours.write_all(&bytes).unwrap();
    drop(ours);
    let _ = server.join().unwrap();
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_wrong_checksum_is_refused_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file").to_str().unwrap().to_owned();
    let mut stream = connect();
    let mut bytes = Vec::new();
    frame::encode_json(
        Kind::Request,
        &Request::Put {
            path,
            name: "n".into(),
            mode: 0o644,
        },
        &mut bytes,
    );
    frame::encode(Kind::Data, b"data", &mut bytes);
    frame::encode(Kind::End, br#"{"bytes":4,"sha256":"00"}"#, &mut bytes);
    stream.write_all(&bytes).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert!(String::from_utf8_lossy(&answer).contains("differ from those that were sent"));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn malicious_agent_causes_an_error_and_never_a_hang() {
    let mut cases = vec![
        Vec::new(),
        b"HTTP/1.1 200 OK\r\n\r\n".to_vec(),
        vec![Kind::Stdout as u8, 255, 255, 255, 255],
        vec![0, 0, 0, 0, 0],
    ];
    for (kind, payload) in [
        (Kind::Exit, &b"{\"code\":9999}"[..]),
        (Kind::Done, b""),
        (Kind::Request, b"{}"),
    ] {
        let mut bytes = ready();
        frame::encode(kind, payload, &mut bytes);
        cases.push(bytes);
    }
    for bytes in cases {
        let result = client::output(liar(bytes.clone(), false), &shell("true"), b"input");
        assert!(result.is_err(), "{bytes:?} gave {result:?}");
    }
}

#[test]
fn endless_output_is_cut() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        let mut bytes = ready();
        frame::encode(Kind::Stdout, &vec![0; FRAME_BYTES_MAX], &mut bytes);
        while theirs
            .write_all(&bytes[ready().len() * usize::from(bytes.is_empty())..])
            .is_ok()
        {
            bytes.drain(
                ..if bytes.len() > FRAME_BYTES_MAX + 5 {
                    ready().len()
                } else {
                    0
                },
            );
        }
    });
    let result = client::output(ours, &shell("true"), b"");
    assert!(
        matches!(result, Err(ClientError::Protocol(_))),
        "{:?}",
        result.map(|r| r.0)
    );
}

#[test]
fn a_file_larger_than_announced_or_with_a_wrong_checksum_is_an_error() {
    for (size, sum) in [(3u64, "00"), (4, "00")] {
        let mut bytes = Vec::new();
        let announced = format!(r#"{{"version":"0","size":{size}}}"#);
        frame::encode(Kind::Ready, announced.as_bytes(), &mut bytes);
        frame::encode(Kind::Data, b"data", &mut bytes);
        frame::encode(
            Kind::End,
            format!(r#"{{"bytes":4,"sha256":"{sum}"}}"#).as_bytes(),
            &mut bytes,
        );
        let target = tempfile::tempfile().unwrap();
        let result = client::get(liar(bytes, true), "/x", &target, &mut |_| {});
        assert!(matches!(result, Err(ClientError::Protocol(_))), "{result:?}");
    }
}

#[test]
fn copy_of_a_file_larger_than_the_disk_is_not_begun() {
    let mut bytes = Vec::new();
    frame::encode(
        Kind::Ready,
        br#"{"version":"0","size":18446744073709551615}"#,
        &mut bytes,
    );
    let target = tempfile::tempfile().unwrap();
    let result = client::get(liar(bytes, true), "/x", &target, &mut |_| {});
    assert!(matches!(result, Err(ClientError::Local { .. })), "{result:?}");
}

#[test]
fn client_that_violates_the_protocol_is_dropped() {
    for bytes in [
        &b"GET / HTTP/1.0\r\n\r\n"[..],
        &[1, 2, 0, 0, 0, b'{', b'}'],
        &[2, 0, 0, 0, 0],
    ] {
        let mut stream = connect();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        stream.read_to_end(&mut Vec::new()).unwrap();
    }
}

fn bounds(output_bytes: usize, limit: Duration) -> client::Bounds<'static> {
    client::Bounds {
        output_bytes,
        deadline: Instant::now() + limit,
        goes_on: &|| true,
    }
}

#[test]
fn collected_output_keeps_the_first_bytes_of_each_stream_and_reports_the_cut() {
    let collect = |script: &str, bytes| {
        client::collect(
            connect(),
            &shell(script),
            b"input",
            &bounds(bytes, Duration::from_secs(20)),
        )
        .unwrap()
    };
    let all = collect("cat; echo problem >&2; exit 3", 100);
    assert_eq!(all.status, Some(ExitStatus::Code(3)));
    assert_eq!(
        (&all.stdout[..], &all.stderr[..]),
        (&b"input"[..], &b"problem\n"[..])
    );
    assert!(!all.is_truncated);
    // The program writes all its output, and its status arrives.
    let cut = collect("head -c 300000 /dev/zero; exit 4", 1000);
    assert_eq!(cut.status, Some(ExitStatus::Code(4)));
    assert_eq!((cut.stdout.len(), cut.is_truncated), (1000, true));
}

#[test]
fn program_is_ended_at_its_deadline_and_when_its_caller_has_left() {
    let sleep = |bounds: &client::Bounds<'_>| {
        let begun = Instant::now();
        let collected = client::collect(connect(), &shell("echo $$; exec sleep 100"), &[], bounds).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(10));
        assert_eq!(collected.status, None);
        let pid = String::from_utf8(collected.stdout)
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        assert!(gone_within(Duration::from_secs(10), pid), "{pid} runs on");
    };
    sleep(&bounds(100, Duration::from_millis(500)));
    let begun = Instant::now();
    sleep(&client::Bounds {
        goes_on: &|| begun.elapsed() < Duration::from_millis(500),
        ..bounds(100, Duration::from_secs(60))
    });
}

#[test]
fn source_that_fails_leaves_no_file_in_the_guest() {
    struct Breaks(usize);
    impl Read for Breaks {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.0 += 1;
            match self.0 {
                1 => {
                    buffer[..5].copy_from_slice(b"begun");
                    Ok(5)
                }
                _ => Err(std::io::ErrorKind::ConnectionReset.into()),
            }
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let place = client::Place {
        path: path.to_str().unwrap(),
        name: "",
        mode: 0o640,
    };
    let failed = client::put_all(connect(), &mut Breaks(0), place, &mut |_| {});
    assert!(matches!(failed, Err(ClientError::Local { .. })), "{failed:?}");
    let deadline = Instant::now() + Duration::from_secs(10);
    while fs::read_dir(folder.path()).unwrap().count() > 0 {
        assert!(Instant::now() < deadline, "a part of the file is left");
        thread::sleep(Duration::from_millis(10));
    }
    let sent = client::put_all(connect(), &mut &b"whole"[..], place, &mut |_| {}).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"whole");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o640);
    assert_eq!(sent.sha256, HEXLOWER.encode(&Sha256::digest(b"whole")));
}
