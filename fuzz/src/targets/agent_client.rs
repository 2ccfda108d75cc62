//! The client, against an agent that sends any bytes and then hangs up.

use std::io::Write;
use std::os::unix::net::UnixStream;

use crate::file::file_of;
use agent::client;
use agent::protocol::ExecRequest;

pub fn fuzz((choice, said): (u8, &[u8])) {
    let (ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
    theirs.set_nonblocking(true).expect("a socket that does not wait");
    let _ = theirs.write(said);
    theirs
        .shutdown(std::net::Shutdown::Write)
        .expect("a connected socket");
    match choice % 4 {
        0 => drop(client::ping(ours)),
        1 => drop(client::get(ours, "/file", &file_of(&[]), &mut |_| {})),
        2 => drop(client::put(
            ours,
            &mut file_of(&[7; 50_000]),
            "name",
            "/file",
            &mut |_| {},
        )),
        _ => {
            let request = ExecRequest {
                argv: vec!["true".into()],
                env: Vec::new(),
                cwd: None,
                tty: None,
            };
            drop(client::output(ours, &request, b"input"));
        }
    }
}
