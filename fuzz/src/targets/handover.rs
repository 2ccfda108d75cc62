//! Messages between a monitor and its shard: those with files, and packets of the control socket. A client's
//! requests.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixStream};

use crate::file::file_of;
use cell::frozen::FreezeAnswer;
use cell::link::Reports;
use registry::control::{Answer, Request};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use shard::launch::{Fd, HandoverReply, HandoverRequest, LaunchSpec, NumberedOrder};
use shard::process::{receive, send};
use shard_api::control::{ControlSocket, MESSAGE_BYTES_MAX};

/// Reads a message that comes with one file; a valid one reads the same again.
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
    // Another message follows, without a file.
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

/// A control socket with each line of the input, and then its end. A line that begins with a brace is a
/// message, in two packets; any other is a packet.
fn control(bytes: &[u8]) -> ControlSocket {
    let (near, far) = ControlSocket::pair().expect("a pair of sockets");
    let far = UnixDatagram::from(far.as_fd().try_clone_to_owned().expect("a socket"));
    let mut room = 1 << 16;
    let mut put = |packet: &[u8]| {
        // A packet's overhead is less than that.
        room -= (packet.len() + 1024).min(room);
        if room > 0 {
            far.send(packet).expect("room in a socket");
        }
    };
    for line in bytes.split(|byte| *byte == b'\n') {
        if line.first() != Some(&b'{') {
            put(line);
            continue;
        }
        let total = (line.len() as u32).to_le_bytes();
        let (first, second) = line.split_at(line.len() / 2);
        put(&[&total, &[0; 4], first].concat());
        let offset = (first.len() as u32).to_le_bytes();
        put(&[&total, &offset, second].concat());
    }
    near
}

pub fn fuzz((kind, bytes): (u8, &[u8])) {
    match kind % 6 {
        0 => {
            if let Ok((message, mut files)) = control(bytes).receive_with_files() {
                assert!(message.len() <= MESSAGE_BYTES_MAX);
                assert!(files.take(Fd(0)).is_err(), "none came");
                let _ = serde_json::from_slice::<LaunchSpec>(&message).inspect(same);
                let _ = serde_json::from_slice::<NumberedOrder>(&message).inspect(same);
            }
        }
        1 => message::<HandoverRequest>(bytes),
        2 => message::<HandoverReply>(bytes),
        3 => message::<FreezeAnswer>(bytes),
        4 => {
            let _ = serde_json::from_slice::<Request>(bytes).inspect(same);
            let _ = serde_json::from_slice::<Answer>(bytes).inspect(same);
        }
        _ => {
            let mut reports = Reports::new(control(bytes));
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
