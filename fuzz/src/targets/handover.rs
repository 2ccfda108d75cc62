//! What a monitor and its shard send each other with files, a shard's reports, and a client's requests.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use crate::file::file_of;
use cell::frozen::FreezeAnswer;
use cell::link::Reports;
use registry::control::{Answer, Request};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use shard::launch::{Fd, HandoverReply, HandoverRequest, LaunchSpec};
use shard::process::{receive, send};

/// Reads a message that comes with one file; one that is understood reads the same again.
fn message<M: DeserializeOwned + Serialize>(bytes: &[u8]) {
    let (mut near, mut far) = UnixStream::pair().expect("a pair of sockets");
    let file = file_of(b"x");
    let text: Value = serde_json::from_slice(bytes).unwrap_or_default();
    send(&mut far, &text, &[file.as_fd()]).expect("room in a socket");
    far.write_all(bytes).expect("room in a socket");
    drop(far);
    if let Ok((message, mut files)) = receive::<M>(&mut near) {
        assert!(files.take(Fd(0)).is_ok());
        assert!([0, 1, usize::MAX].iter().all(|fd| files.take(Fd(*fd)).is_err()));
        same(&message);
    }
    // What follows is another message, without a file.
    if let Ok((message, mut files)) = receive::<M>(&mut near) {
        assert!(files.take(Fd(0)).is_err());
        same(&message);
    }
}

fn same<M: DeserializeOwned + Serialize>(message: &M) {
    let written = serde_json::to_value(message).expect("JSON");
    let again: M = serde_json::from_value(written.clone()).expect("the same message");
    assert_eq!(serde_json::to_value(&again).expect("JSON"), written);
}

pub fn fuzz((kind, bytes): (u8, &[u8])) {
    match kind % 6 {
        0 => message::<LaunchSpec>(bytes),
        1 => message::<HandoverRequest>(bytes),
        2 => message::<HandoverReply>(bytes),
        3 => message::<FreezeAnswer>(bytes),
        4 => {
            let _ = serde_json::from_slice::<Request>(bytes).inspect(same);
            let _ = serde_json::from_slice::<Answer>(bytes).inspect(same);
        }
        _ => {
            let (near, mut far) = UnixStream::pair().expect("a pair of sockets");
            far.write_all(bytes).expect("room in a socket");
            drop(far);
            let mut reports = Reports::new(near);
            while let Some(report) = reports.next_report() {
                same(&report);
                let text = format!("{report:?}");
                assert!(
                    !text.contains(char::is_control) && !text.contains("\\u{1b}"),
                    "{text}"
                );
            }
        }
    }
}
