//! Input of a cell from others: calls, messages over a link, a client's requests, and replies of etcd.

use cell::cluster::hosts::read_again;
use cell::cluster::link::MESSAGE_BYTES_MAX;
use cell::cluster::link::encoding::{decode, encode};
use cell::cluster::membership;
use cell::cluster::state::{Action, CellMessage, State};
use config::cluster::CellPlan;
use protocol::CellId;
use registry::cluster::interface::{CellRequest, CellResponse};

const MEMORY_BYTES: u64 = 1 << 30;

fn cell(number: u16) -> CellId {
    CellId { number, life: 1 }
}

/// Cell 0 receives the messages of cells 1 and 2: each follows the number of its sender and its length.
fn table(mut bytes: &[u8]) {
    let plan = CellPlan {
        number: 0,
        host: None,
        cpus: vec![0, 1],
        nodes: vec![0],
        memory_bytes: MEMORY_BYTES,
    };
    let mut state = State::new(cell(0), 1, plan, None, []);
    state.linked(cell(1), true);
    state.linked(cell(2), true);
    state.handle_all_linked();
    while let [from, length, rest @ ..] = bytes {
        let (message, after) = rest.split_at(usize::from(*length).min(rest.len()));
        bytes = after;
        let Ok(message) = decode::<CellMessage>(message) else {
            return;
        };
        let written = encode(&message).expect("a message");
        assert_eq!(decode::<CellMessage>(&written).expect("the same"), message);
        for act in state.handle_message(cell(1 + u16::from(from % 2)), message) {
            if let Action::Send(to, message) = act {
                assert_ne!(to.number, 0, "{message:?} to itself");
                let written = encode(&message).expect("a message");
                assert!(written.len() < MESSAGE_BYTES_MAX);
            }
        }
    }
}

pub fn fuzz((kind, bytes): (u8, &[u8])) {
    match kind % 4 {
        0 => {
            for (index, written) in read_again(bytes).into_iter().enumerate() {
                let again = written
                    .as_deref()
                    .map(|written| read_again(written)[index].clone());
                assert_eq!(again.flatten(), written);
            }
        }
        1 => {
            let _ = serde_json::from_slice::<CellRequest>(bytes);
            if let Ok(answer) = serde_json::from_slice::<CellResponse>(bytes) {
                let written = serde_json::to_vec(&answer).expect("JSON");
                assert_eq!(
                    serde_json::from_slice::<CellResponse>(&written).expect("the same"),
                    answer
                );
            }
        }
        2 => {
            if let Ok(answer) = serde_json::from_slice(bytes) {
                let _ = membership::listed(&answer);
            }
        }
        _ => table(bytes),
    }
}
