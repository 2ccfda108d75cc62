use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::{Mutex, mpsc};
use std::time::Instant;

use child_process::service_process::wait;

use super::*;
use crate::samples::{SYN, TCP, address, frame, message, tcp};

/// The test that is a filter's process when this program is started as one.
const AS_PROCESS: &str = "process::tests::filter_process_ends_with_either_side_and_names_passt";
const CLUSTER: &str = "198.51.100.3";
const OTHER: &str = "203.0.113.1";
const LIMIT: Duration = Duration::from_secs(20);

/// Returns a card's policy whose filter is this test program, not sealed. The receiver gets lines about its
/// end.
pub(crate) fn egress(
    cluster: impl Fn() -> HashSet<IpAddr> + Send + Sync + 'static,
) -> (Egress, mpsc::Receiver<String>) {
    let (sender, lines) = mpsc::channel();
    let words = ["subnet", AS_PROCESS, "--exact", "--nocapture", "--", FLAG];
    let egress = Egress {
        cluster: Arc::new(cluster),
        count: Arc::new(Count::new().unwrap()),
        program: SealedProgram {
            file: Arc::new(File::open("/proc/self/exe").unwrap()),
            words: words.map(OsString::from).into(),
        },
        seal: Seal::Off,
        cut_off: Arc::new(move |line| {
            // Its test may be over.
            let _ = sender.send(line.to_owned());
        }),
    };
    (egress, lines)
}

/// Runs as a filter's process, and ends as one, if this program was started so.
fn run_if_started_as_filter() {
    let mut words = std::env::args().skip_while(|word| word != FLAG);
    if words.next().is_none() {
        return;
    }
    let arguments = Arguments::read(words).unwrap();
    let lists = io::stdin().as_fd().try_clone_to_owned().unwrap();
    let end = receive(lists, &arguments).unwrap().run().unwrap();
    eprintln!("{}", end.words());
    std::process::exit(end.status().into());
}

/// Starts a process and returns it with the other ends of its sockets.
fn start(egress: &Egress) -> (FilterProcess, UnixStream, UnixStream) {
    let (card, near_card) = UnixStream::pair().unwrap();
    let (passt, near_passt) = UnixStream::pair().unwrap();
    let arguments = Arguments::default();
    let process = FilterProcess::start(egress, &arguments, near_card.into(), near_passt.into()).unwrap();
    for side in [&card, &passt] {
        side.set_read_timeout(Some(LIMIT)).unwrap();
    }
    (process, card, passt)
}

fn cluster() -> HashSet<IpAddr> {
    [address(CLUSTER)].into()
}

fn syn(to: &str) -> Vec<u8> {
    message(&frame(address("10.0.2.15"), address(to), TCP, &tcp(1, 2379, SYN)))
}

/// Sends a frame to the cluster and one to another address, and expects the second.
fn expect_filtered(card: &UnixStream, passt: &UnixStream) {
    let mut sent = card;
    sent.write_all(&syn(CLUSTER)).unwrap();
    expect_passed(card, passt);
}

/// Sends a frame to an address outside of the cluster, and expects it.
fn expect_passed(card: &UnixStream, passt: &UnixStream) {
    let (mut card, mut passt) = (card, passt);
    card.write_all(&syn(OTHER)).unwrap();
    let mut arrived = vec![0; syn(OTHER).len()];
    passt.read_exact(&mut arrived).unwrap();
    assert_eq!(arrived, syn(OTHER));
}

fn expect_end(mut side: &UnixStream) {
    assert_eq!(side.read(&mut [0]).unwrap(), 0);
}

#[track_caller]
fn expect_count(egress: &Egress, expected: u64) {
    let deadline = Instant::now() + LIMIT;
    while egress.count.get() != expected {
        assert!(
            Instant::now() < deadline,
            "{} frames were dropped",
            egress.count.get()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn filter_process_ends_with_either_side_and_names_passt() {
    run_if_started_as_filter();
    let (egress, lines) = egress(cluster);
    let (process, card, passt) = start(&egress);
    expect_filtered(&card, &passt);
    drop(passt);
    expect_end(&card);
    assert_eq!(lines.recv_timeout(LIMIT).unwrap(), "passt has ended");
    drop(process);
    let (process, card, passt) = start(&egress);
    expect_filtered(&card, &passt);
    drop(card);
    expect_end(&passt);
    // The end of a VM is not reported.
    drop(process);
    assert_eq!(lines.try_recv(), Err(mpsc::TryRecvError::Empty));
    // The count continues over the boots of a VM.
    expect_count(&egress, 2);
}

#[test]
fn killed_filter_process_is_named_and_closes_both_sides() {
    let (egress, lines) = egress(cluster);
    let (process, card, passt) = start(&egress);
    expect_filtered(&card, &passt);
    let pid = nix::unistd::Pid::from_raw(process.id().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    expect_end(&card);
    expect_end(&passt);
    assert_eq!(
        lines.recv_timeout(LIMIT).unwrap(),
        "the frame filter was ended by SIGKILL"
    );
}

#[test]
fn dropped_filter_process_closes_both_sides_and_reports_nothing() {
    let (egress, lines) = egress(cluster);
    let (process, card, passt) = start(&egress);
    drop(process);
    expect_end(&card);
    expect_end(&passt);
    assert_eq!(lines.try_recv(), Err(mpsc::TryRecvError::Empty));
}

#[test]
fn changed_list_reaches_the_process_while_the_guest_sends() {
    let (sender, changes) = mpsc::channel();
    let changes = Mutex::new((changes, HashSet::new()));
    let (egress, _lines) = egress(move || {
        let mut last = changes.lock().unwrap();
        if let Ok(list) = last.0.try_recv() {
            last.1 = list;
        }
        last.1.clone()
    });
    let (_process, card, passt) = start(&egress);
    passt.set_nonblocking(true).unwrap();
    sender.send(cluster()).unwrap();
    let deadline = Instant::now() + LIMIT;
    let mut unread = [0; 4096];
    while egress.count.get() == 0 {
        assert!(Instant::now() < deadline, "the list never arrived");
        (&card).write_all(&syn(CLUSTER)).unwrap();
        // Frames that were sent before the list was too old.
        while (&passt).read(&mut unread).is_ok_and(|count| count > 0) {}
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn process_that_fails_at_its_start_reports_the_reason() {
    let (mut egress, _lines) = egress(cluster);
    egress.program.file = Arc::new(File::open("/bin/sh").unwrap());
    egress.program.words = ["sh", "-c", "echo one >&2; echo 'no seal' >&2; exit 1"]
        .map(OsString::from)
        .into();
    let (process, card, _passt) = start(&egress);
    expect_end(&card);
    assert_eq!(
        process.failure().unwrap(),
        "the frame filter left with status 1; it said: no seal"
    );
    let (egress, _lines) = super::tests::egress(cluster);
    let (process, ..) = start(&egress);
    assert_eq!(process.failure(), None, "the process did not fail");
}

#[test]
fn each_end_has_its_text() {
    let exited = |code: i32| ExitStatus::from_raw(code << 8);
    let described = |status: ExitStatus| describe(Some(status), "");
    assert_eq!(described(exited(End::Card.status().into())), None);
    for (status, words) in [
        (exited(End::Passt.status().into()), "passt has ended"),
        (
            exited(End::CardBroken.status().into()),
            "the shard sent a length that no frame has",
        ),
        (
            exited(End::PasstBroken.status().into()),
            "passt sent a length that no frame has",
        ),
        (exited(1), "the frame filter left with status 1"),
        (
            ExitStatus::from_raw(libc::SIGSYS),
            "the frame filter made a system call that its seal forbids",
        ),
        (
            ExitStatus::from_raw(libc::SIGSEGV),
            "the frame filter was ended by SIGSEGV",
        ),
    ] {
        assert_eq!(described(status).as_deref(), Some(words));
    }
    assert_eq!(describe(None, "").unwrap(), "the frame filter has ended");
    for end in [End::Passt, End::CardBroken, End::PasstBroken] {
        assert_eq!(
            describe(None, &format!("{}\n", end.words())).as_deref(),
            Some(end.words())
        );
    }
    assert_eq!(describe(None, "the card has ended\n"), None);
    assert_eq!(
        describe(None, "no seal\n").unwrap(),
        "the frame filter has ended; it said: no seal"
    );
}

/// Duplicates the handle of a filter's process, as a successor of its monitor has it.
pub(crate) fn left_filter(filter: &FilterProcess) -> LeftFilter {
    left_of(&filter.shared)
}

fn left_of(shared: &Shared) -> LeftFilter {
    LeftFilter {
        process: shared.process.handle().unwrap(),
        lists: shared.lists.try_clone().unwrap(),
        log: shared.log.writer().unwrap().into(),
    }
}

/// Starts a process whose monitor is gone, and returns it with the other ends of its sockets.
fn start_unserved(egress: &Egress) -> (Shared, UnixStream, UnixStream) {
    let (card, near_card) = UnixStream::pair().unwrap();
    let (passt, near_passt) = UnixStream::pair().unwrap();
    let sockets = [near_card.into(), near_passt.into()];
    let barred = Barred {
        own: host::addresses().unwrap(),
        ..Barred::default()
    };
    let left = Shared::start(egress, &Arguments::default(), sockets, &barred).unwrap();
    for side in [&card, &passt] {
        side.set_read_timeout(Some(LIMIT)).unwrap();
    }
    (left, card, passt)
}

fn receive_message(lists: &OwnedFd) -> Option<Message> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let count = recv(lists.as_raw_fd(), &mut bytes, MsgFlags::empty()).unwrap();
    Message::read(&bytes[..count])
}

#[test]
fn adopted_filter_receives_a_whole_list_and_then_replies() {
    let (lists, near) = packet_sockets().unwrap();
    let child = ServiceProcess::of_child(Command::new("sleep").arg("1000").spawn().unwrap()).unwrap();
    let (egress, lines) = egress(cluster);
    let filter = LeftFilter {
        process: child.handle().unwrap(),
        lists: near,
        log: BoundedLog::new().unwrap().writer().unwrap().into(),
    };
    let filter = FilterProcess::adopt(filter, &egress).unwrap();
    assert_eq!(filter.id(), child.id());
    let list = egress.barred().unwrap();
    assert_eq!(receive_message(&lists), Some(Message::List(list)));
    for _ in 0..2 {
        send(lists.as_raw_fd(), &[message::ASK], MsgFlags::empty()).unwrap();
        assert_eq!(receive_message(&lists), Some(Message::Same));
    }
    drop(filter);
    wait(child.pidfd(), Duration::ZERO).expect("the process has ended");
    assert_eq!(lines.try_recv(), Err(mpsc::TryRecvError::Empty));
}

#[test]
fn adopted_filter_receives_its_list_although_its_predecessor_received_the_request() {
    let (egress, _lines) = egress(cluster);
    let (predecessor, card, _passt) = start_unserved(&egress);
    let deadline = Instant::now() + LIMIT;
    let mut question = [0; 8];
    while recv(
        predecessor.lists.as_raw_fd(),
        &mut question,
        MsgFlags::MSG_DONTWAIT,
    ) != Ok(1)
    {
        assert!(Instant::now() < deadline, "no request arrived");
        (&card).write_all(&syn(OTHER)).unwrap();
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(egress.count.get(), 0);
    let _successor = FilterProcess::adopt(left_of(&predecessor), &egress).unwrap();
    while egress.count.get() == 0 {
        assert!(Instant::now() < deadline, "the list never arrived");
        (&card).write_all(&syn(CLUSTER)).unwrap();
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn end_of_an_adopted_filter_is_reported_without_a_status() {
    let (egress, lines) = egress(cluster);
    let (predecessor, card, passt) = start_unserved(&egress);
    let _successor = FilterProcess::adopt(left_of(&predecessor), &egress).unwrap();
    predecessor.process.end().unwrap();
    expect_end(&card);
    expect_end(&passt);
    assert_eq!(lines.recv_timeout(LIMIT).unwrap(), "the frame filter has ended");
}

#[test]
fn adopted_filter_names_passt_and_reports_nothing_when_its_card_ends() {
    let (egress, lines) = egress(cluster);
    let (predecessor, card, passt) = start_unserved(&egress);
    let _successor = FilterProcess::adopt(left_of(&predecessor), &egress).unwrap();
    expect_passed(&card, &passt);
    drop(passt);
    expect_end(&card);
    assert_eq!(lines.recv_timeout(LIMIT).unwrap(), "passt has ended");
    let (predecessor, card, passt) = start_unserved(&egress);
    let successor = FilterProcess::adopt(left_of(&predecessor), &egress).unwrap();
    expect_passed(&card, &passt);
    drop(card);
    expect_end(&passt);
    let server = successor.server.as_ref().unwrap();
    let deadline = Instant::now() + LIMIT;
    while !server.is_finished() {
        assert!(Instant::now() < deadline, "the server ends with its process");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(lines.try_recv(), Err(mpsc::TryRecvError::Empty));
}

#[test]
fn dropped_adopted_filter_closes_both_sides_and_reports_nothing() {
    let (egress, lines) = egress(cluster);
    let (predecessor, card, passt) = start_unserved(&egress);
    drop(FilterProcess::adopt(left_of(&predecessor), &egress).unwrap());
    expect_end(&card);
    expect_end(&passt);
    assert_eq!(lines.try_recv(), Err(mpsc::TryRecvError::Empty));
}
