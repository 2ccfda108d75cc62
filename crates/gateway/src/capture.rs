//! Captures: frames in the format of pcap, for clients that read them.

use std::collections::HashMap;
use std::time::SystemTime;

use registry::subnet::Captured;
use subnet::network::CardId;
use subnet::pcap;

use crate::client::{Client, Role};
use crate::joining::Member;

/// Frames of one turn that captures may read.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    /// Whether a client captures.
    pub(crate) is_on: bool,
    frames: Vec<(CardId, Box<[u8]>)>,
}

impl Frames {
    /// Records a frame from or to a card.
    pub(crate) fn record(&mut self, card: CardId, frame: &[u8]) {
        if self.is_on {
            self.frames.push((card, frame.into()));
        }
    }

    /// Sends the frames to the clients that capture. A frame from one card to another is there twice, as each
    /// card sees it.
    pub(crate) fn send(&mut self, clients: &mut HashMap<u64, Client>, members: &HashMap<CardId, Member>) {
        if self.frames.is_empty() {
            return;
        }
        let time = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        for (card, frame) in self.frames.drain(..) {
            let Some(member) = members.get(&card) else {
                continue;
            };
            let (header, kept) = pcap::frame_header(time, frame.len());
            for client in clients.values_mut() {
                let is_read = match &client.role {
                    Role::Capturing { of, .. } => is_of(of, member),
                    _ => false,
                };
                if is_read {
                    client.capture([&header, &frame[..kept]]);
                }
            }
        }
    }
}

/// Whether a card is one of those that are captured.
pub(crate) fn is_of(captured: &Captured, member: &Member) -> bool {
    match captured {
        Captured::Network(network) => *network == member.network,
        Captured::Vm(vm) => *vm == member.vm,
    }
}
