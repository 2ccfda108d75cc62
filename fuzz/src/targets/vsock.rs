//! The socket device's queues, with clients and servers of the host.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::LazyLock;

use crate::guest::Guest;
use crate::script::{Subject, run};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use shard::fuzzing::Bare;
use shard::ports::{self, Ports};
use tempfile::TempDir;

const CID: u64 = 3;
/// The host's port with a listener.
const SERVED: u32 = 5;

/// Sockets that outlive a run; each run leaves their backlogs empty.
struct Sockets {
    directory: TempDir,
    clients: UnixListener,
    server: UnixListener,
}

static SOCKETS: LazyLock<Sockets> = LazyLock::new(|| {
    let directory = tempfile::tempdir().expect("a directory");
    let listen = |name: &str| {
        let listener = UnixListener::bind(directory.path().join(name)).expect("a socket");
        listener
            .set_nonblocking(true)
            .expect("a socket that does not wait");
        listener
    };
    Sockets {
        clients: listen("clients"),
        server: listen(&SERVED.to_string()),
        directory,
    }
});

struct Host {
    streams: Vec<UnixStream>,
    /// The monitor's end of the socket for connected ports.
    monitor: OwnedFd,
    directory: File,
}

impl Subject for Host {
    /// A packet's header and payload.
    fn request(&mut self, u: &mut Unstructured) -> Result<Vec<u8>> {
        let odd = u.arbitrary::<u8>()?;
        let payload = if odd & 0x80 == 0 {
            0
        } else {
            u32::from(u.arbitrary::<u16>()?) % 5000
        };
        let port = u.arbitrary::<u8>()?;
        let host_port = match port & 3 {
            0 => u32::from(port >> 2),
            1 => (1 << 30) + u32::from(port >> 2) % 4,
            _ => SERVED,
        };
        let mut packet = Vec::with_capacity(44 + payload as usize);
        packet.extend((if odd & 0x7F == 1 { u.arbitrary()? } else { CID }).to_le_bytes());
        packet.extend((if odd & 0x7F == 2 { u.arbitrary()? } else { 2_u64 }).to_le_bytes());
        packet.extend((u32::from(u.arbitrary::<u8>()? & 3)).to_le_bytes());
        packet.extend(host_port.to_le_bytes());
        let said = if odd & 0x7F == 3 { u.arbitrary()? } else { payload };
        packet.extend(said.to_le_bytes());
        packet.extend((if odd & 0x7F == 4 { u.arbitrary()? } else { 1_u16 }).to_le_bytes());
        packet.extend(u16::from(u.arbitrary::<u8>()? % 9).to_le_bytes());
        packet.extend(u32::from(u.arbitrary::<u8>()? & 3).to_le_bytes());
        packet.extend(
            (if odd & 0x40 == 0 {
                1 << 16
            } else {
                u.arbitrary::<u32>()?
            })
            .to_le_bytes(),
        );
        packet.extend((if odd & 0x20 == 0 { 0 } else { u.arbitrary::<u32>()? }).to_le_bytes());
        packet.resize(44 + payload as usize, b'p');
        Ok(packet)
    }

    fn host(&mut self, u: &mut Unstructured) -> Result<()> {
        let choice = u.arbitrary::<u8>()?;
        if choice < 0x40 {
            self.connect(u)?;
        } else if choice < 0x60 {
            self.accept();
        } else if !self.streams.is_empty() {
            let place = usize::from(u.arbitrary::<u8>()?) % self.streams.len();
            match choice {
                0x60..0x80 => drop(self.streams.swap_remove(place)),
                0x80..0xA0 => drop(self.streams[place].shutdown(std::net::Shutdown::Write)),
                0xA0..0xD0 => drop(self.streams[place].read(&mut [0; 4096])),
                _ => drop(self.streams[place].write(&vec![b'h'; usize::from(u.arbitrary::<u16>()?)])),
            }
        }
        Ok(())
    }
}

impl Host {
    fn connect(&mut self, u: &mut Unstructured) -> Result<()> {
        let path: &Path = SOCKETS.directory.path();
        let Ok(mut client) = UnixStream::connect(path.join("clients")) else {
            return Ok(());
        };
        client.set_nonblocking(true).expect("a socket that does not wait");
        let _ = if u.ratio(3, 4)? {
            client.write(format!("CONNECT {}\n", u.arbitrary::<u8>()? & 3).as_bytes())
        } else {
            let length = usize::from(u.arbitrary::<u8>()?).min(u.len());
            client.write(u.bytes(length)?)
        };
        self.streams.push(client);
        Ok(())
    }

    /// Replies as the monitor does, then accepts.
    fn accept(&mut self) {
        while ports::serve_one(self.monitor.as_fd(), self.directory.as_fd()).is_ok() {}
        while let Ok((stream, _)) = SOCKETS.server.accept() {
            stream.set_nonblocking(true).expect("a socket that does not wait");
            self.streams.push(stream);
        }
    }
}

pub fn fuzz(data: &[u8]) {
    let listener = SOCKETS.clients.try_clone().expect("a copy of a socket");
    let (monitor, shard) = ports::pair().expect("sockets");
    let monitor = UnixStream::from(monitor);
    monitor
        .set_nonblocking(true)
        .expect("a socket that does not wait");
    let mut device = Bare::vsock(CID, listener, Ports::new(shard)).expect("a socket device");
    let mut host = Host {
        streams: Vec::new(),
        monitor: monitor.into(),
        directory: File::open(SOCKETS.directory.path()).expect("the directory"),
    };
    run(
        &mut device,
        &mut Guest::new(3),
        &mut host,
        &mut Unstructured::new(data),
    );
    drop(device);
    for listener in [&SOCKETS.clients, &SOCKETS.server] {
        while listener.accept().is_ok() {}
    }
}
