//! The queues of a shared folder, and the packets of its server.

use std::os::unix::net::UnixDatagram;

use crate::guest::Guest;
use crate::script::{Subject, run};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use shard::fuzzing::Bare;

/// Length of a request's header, bytes.
const HEADER_BYTES: usize = 40;

struct Server {
    peer: Option<UnixDatagram>,
    /// Ids of requests without a reply.
    ids: Vec<[u8; 8]>,
}

impl Subject for Server {
    /// A request's header, and a body of any length.
    fn request(&mut self, u: &mut Unstructured) -> Result<Vec<u8>> {
        let body = match u.arbitrary::<u8>()? {
            255 => 140_000,
            length => usize::from(length),
        };
        let mut request = vec![0; HEADER_BYTES + body];
        let length = request.len() as u32;
        request[..4].copy_from_slice(&length.to_le_bytes());
        request[4] = u.arbitrary::<u8>()? % 52;
        request[8] = u.arbitrary()?;
        Ok(request)
    }

    fn host(&mut self, u: &mut Unstructured) -> Result<()> {
        let Some(peer) = &mut self.peer else { return Ok(()) };
        match u.arbitrary::<u8>()? {
            0 => self.peer = None,
            1..=100 => {
                let mut packet = [0; HEADER_BYTES];
                if peer.recv(&mut packet).is_ok() {
                    self.ids.push(packet[8..16].try_into().expect("eight bytes"));
                }
            }
            choice => {
                let id = self.ids.pop().unwrap_or([choice; 8]);
                let data = usize::from(u.arbitrary::<u8>()?);
                let length = if choice < 120 {
                    u.arbitrary()?
                } else {
                    16 + data as u32
                };
                let error = if choice < 140 { u.arbitrary()? } else { 0_i32 };
                let packet = [
                    &length.to_le_bytes()[..],
                    &error.to_le_bytes(),
                    &id,
                    &vec![7; data],
                ]
                .concat();
                let _ = peer.send(&packet);
            }
        }
        Ok(())
    }
}

pub fn fuzz(data: &[u8]) {
    let (ours, theirs) = UnixDatagram::pair().expect("a pair of sockets");
    theirs.set_nonblocking(true).expect("a socket that does not wait");
    let mut device = Bare::fs(ours.into()).expect("a shared folder");
    let mut server = Server {
        peer: Some(theirs),
        ids: Vec::new(),
    };
    run(
        &mut device,
        &mut Guest::new(2),
        &mut server,
        &mut Unstructured::new(data),
    );
}
