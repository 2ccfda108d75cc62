//! A network card's queues, on a stream whose other end sends any bytes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use crate::guest::Guest;
use crate::script::{Subject, run};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use shard::fuzzing::Bare;

struct Wire {
    peer: Option<UnixStream>,
}

impl Subject for Wire {
    /// A virtio-net header and a frame.
    fn request(&mut self, u: &mut Unstructured) -> Result<Vec<u8>> {
        let length = match u.arbitrary::<u8>()? {
            length @ 0..=15 => usize::from(length),
            255 => 65_535 + 12,
            length => usize::from(length) * 8,
        };
        Ok(vec![0x45; length])
    }

    fn host(&mut self, u: &mut Unstructured) -> Result<()> {
        let Some(peer) = &mut self.peer else { return Ok(()) };
        match u.arbitrary::<u8>()? {
            0 => self.peer = None,
            1..=3 => {
                let _ = peer.read(&mut [0; 4096]);
            }
            choice => {
                // A length and as many bytes, or others.
                let length = if choice < 16 {
                    u.arbitrary::<u32>()?
                } else {
                    u32::from(choice) * 8
                };
                let bytes = if choice < 32 {
                    usize::from(choice)
                } else {
                    length.min(4096) as usize
                };
                let _ = peer.write(&[&length.to_be_bytes()[..], &vec![0x46; bytes]].concat());
            }
        }
        Ok(())
    }
}

pub fn fuzz(data: &[u8]) {
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    for end in [&ours, &theirs] {
        end.set_nonblocking(true).expect("a socket that does not wait");
    }
    let mut device = Bare::net(ours.into()).expect("a network card");
    let mut wire = Wire { peer: Some(theirs) };
    run(
        &mut device,
        &mut Guest::new(2),
        &mut wire,
        &mut Unstructured::new(data),
    );
}
