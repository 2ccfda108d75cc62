use std::io::IoSlice;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg, setsockopt, sockopt};

use super::*;

/// Time for which the close of a socket of [`lingering`] blocks.
const LINGER: Duration = Duration::from_secs(4);
/// A time in which the close of such a socket does not end.
pub(super) const SOON: Duration = Duration::from_secs(2);

fn server(directory: &std::path::Path, users: Vec<UserPlan>) -> Arc<Server> {
    Arc::new(Server {
        files: Files::at(directory),
        plan: Vec::new(),
        groups: None,
        quotas: Mutex::new(Quotas::new(users)),
        callers: Mutex::default(),
        places: Mutex::default(),
        turns: BTreeMap::new(),
        status: Mutex::default(),
    })
}

/// A TCP socket whose last close blocks, since the peer receives nothing. The listener and the peer must be
/// kept until then.
fn lingering() -> (TcpStream, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: LINGER.as_secs() as i32,
    };
    setsockopt(&socket, sockopt::Linger, &linger).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    (socket, listener)
}

/// A connection whose client has gone. It has sent `text`, and then a lingering socket, whose only holder is
/// the connection.
pub(super) fn trapped(text: &[u8]) -> (UnixStream, TcpListener) {
    let (near, mut far) = UnixStream::pair().unwrap();
    far.write_all(text).unwrap();
    let (socket, listener) = lingering();
    let passed = [socket.as_raw_fd()];
    let passed = [ControlMessage::ScmRights(&passed)];
    let bytes = [IoSlice::new(b"x")];
    sendmsg::<()>(far.as_raw_fd(), &bytes, &passed, MsgFlags::empty(), None).unwrap();
    (near, listener)
}

#[test]
fn close_does_not_wait_for_a_lingering_socket_that_the_peer_has_passed() {
    let (connection, _listener) = trapped(b"");
    let begun = Instant::now();
    drop(connection);
    let of_drop = begun.elapsed();
    let (connection, _listener) = trapped(b"");
    let begun = Instant::now();
    closing::close(connection);
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    assert!(of_drop > SOON, "the socket does not linger: {of_drop:?}");
}

#[test]
fn refused_connection_does_not_block_the_thread_that_accepts() {
    let directory = tempfile::tempdir().unwrap();
    let server = server(directory.path(), Vec::new());
    let uid = geteuid().as_raw();
    while lock(&server.callers).begin(uid, None) {}
    let (connection, _listener) = trapped(b"");
    let begun = Instant::now();
    // The client has gone, so the answer fails.
    server.clone().take(connection, 1).unwrap_err();
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[test]
fn connection_counts_until_its_close_has_ended() {
    let directory = tempfile::tempdir().unwrap();
    let uid = geteuid().as_raw();
    let user = UserPlan {
        uid,
        name: "alice".to_owned(),
        vcpus: 1,
        memory_bytes: 1 << 30,
    };
    let server = server(directory.path(), vec![user]);
    // As much as the server reads at once. The reply to it fails, so the socket behind it is never read.
    let request = [b"x".repeat(511), b"\n".to_vec()].concat();
    // Several, as a program that another test starts may hold copies of one's socket for a moment: then the
    // server's close is not the last one, and does not block.
    let listeners = [(); 3].map(|()| {
        let (connection, listener) = trapped(&request);
        server.clone().take(connection, 1).unwrap();
        listener
    });
    std::thread::sleep(SOON / 2);
    assert!(lock(&server.callers).open_of(uid) > 0);
    let deadline = Instant::now() + 5 * LINGER;
    while lock(&server.callers).open_of(uid) != 0 {
        assert!(Instant::now() < deadline, "a connection counts forever");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(listeners);
}

#[test]
fn free_memory_of_a_cell_counts_what_it_has_lent_and_borrowed() {
    let cell = CellStatus {
        plan: CellPlan {
            number: 1,
            host: None,
            cpus: vec![2, 3],
            nodes: vec![1],
            memory_bytes: 1000,
        },
        pid: 1,
        life: Some(1),
        failed: false,
        cordoned: false,
        given_bytes: 300,
        lent: vec![LentMemory { cell: 0, bytes: 200 }],
        borrowed: vec![LentMemory { cell: 2, bytes: 50 }],
        vcpus: 1,
        vms: vec!["secret".to_owned()],
        regions: Vec::new(),
        lent_on_request: Vec::new(),
        lent_cpus: Vec::new(),
    };
    let room = room(&cell);
    assert_eq!((room.number, room.free_bytes), (1, 550));
    assert!(!serde_json::to_string(&room).unwrap().contains("secret"));
    let full = CellStatus {
        given_bytes: 5000,
        ..cell
    };
    assert_eq!(super::room(&full).free_bytes, 0);
}
