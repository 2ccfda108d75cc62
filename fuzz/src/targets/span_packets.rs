//! Packets of another shard of a VM, on a stream and on a ring. Messages between the monitors of one VM:
//! lines of JSON.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;

use cell::remote::connections::{receive, send};
use cell::remote::protocol::{FromPart, Hello, PartAnswer, PartRequest, ToPart};
use serde::{Serialize, de::DeserializeOwned};
use shard::span::device_proxy_server::IO_REQUESTS_MAX;
use shard::span::link::{Receiving, stream};
use shard::span::packet::Packet;
use shard::span::router::{HOME, Router};
use urpc::host::{Block, BlockingSender, SharedRing};
use urpc::message::{Message, PAYLOAD_BYTES};

const SHARDS: [u8; 4] = [0, 1, 1, 2];

/// All packets of shard 1, by a stream of another host.
fn stream_packets(bytes: &[u8]) {
    let (near, mut far) = UnixStream::pair().expect("a pair of sockets");
    far.write_all(bytes).expect("room in a socket");
    drop(far);
    let (_sending, _writer, receiving) = stream::open(File::from(OwnedFd::from(near))).expect("a channel");
    packets(Receiving::Stream(receiving));
}

/// All packets of shard 1, by a ring of this host: parts of packets, each with its kind and its bytes.
fn ring_packets(bytes: &[u8]) {
    const PART_BYTES: usize = size_of::<u32>() + PAYLOAD_BYTES;
    // As many as a ring has room for: no reader runs before all are sent.
    const PARTS_MAX: usize = 32;
    let file = File::from(shard_api::memory::channel().expect("memory for a channel"));
    let ring = SharedRing::attach(&file.try_clone().expect("a copy").into()).expect("a ring");
    let mut outbox = BlockingSender::new(ring, Block::Futex, 0);
    for part in bytes.chunks(PART_BYTES).take(PARTS_MAX) {
        let (kind, payload) = part.split_at(part.len().min(size_of::<u32>()));
        let kind = kind.try_into().map_or(0, u32::from_le_bytes);
        let part = Message::from_bytes(kind, payload).expect("no longer than a payload");
        if outbox.post(&part).is_err() {
            break;
        }
    }
    outbox.flush();
    drop(outbox);
    packets(Receiving::ring(file).expect("a channel"));
}

/// Passes the packets to the routers of the home and of another shard.
fn packets(receiving: Receiving) {
    let (submitter, io_requests) = mpsc::sync_channel(IO_REQUESTS_MAX);
    let home = Router::new(HOME, &SHARDS, vec![None, None, None], Some(submitter));
    let other = Router::new(2, &SHARDS, vec![None, None, None], None);
    let _ = receiving.run(|packet| {
        let written = postcard::to_stdvec(&packet).expect("a packet");
        let again: Packet = postcard::from_bytes(&written).expect("the same packet");
        assert_eq!(postcard::to_stdvec(&again).expect("a packet"), written);
        other.receive(1, again);
        home.receive(1, packet);
        assert!(
            io_requests.try_iter().count() <= 1,
            "more than a request from one packet"
        );
    });
    for router in [home, other] {
        assert_eq!(router.shards().len(), SHARDS.len());
        for vcpu in 0..=u8::MAX {
            let has_slot = router.event_slot(vcpu).map(|slot| drop(slot.take())).is_some();
            assert_eq!(has_slot, usize::from(vcpu) < SHARDS.len());
        }
    }
}

/// Reads a message; a valid one reads the same again.
fn message<M: DeserializeOwned + Serialize>(mut bytes: &[u8]) -> Option<M> {
    let message: M = receive(&mut bytes).ok()?;
    let mut written = Vec::new();
    send(&mut written, &message).expect("memory");
    let again: M = receive(&mut &written[..]).expect("the same message");
    let [first, second] = [&message, &again].map(|one| serde_json::to_value(one).expect("JSON"));
    assert_eq!(first, second);
    Some(message)
}

pub fn fuzz((kind, bytes): (u8, &[u8])) {
    match kind % 8 {
        0 => drop(message::<PartAnswer>(bytes)),
        1 => drop(message::<Hello>(bytes)),
        2 => drop(message::<ToPart>(bytes)),
        3 => drop(message::<FromPart>(bytes)),
        4 => assert!(message::<PartRequest>(bytes).is_none_or(|part| config::is_name(&part.vm))),
        5 => ring_packets(bytes),
        _ => stream_packets(bytes),
    }
}
