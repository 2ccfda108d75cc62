//! Test program inside lab hosts: either end of a connection, and access to the hosts' shared memory.
//!
//! ```text
//! lab-tool serve PORT          says `up`, takes one connection, sends back all that comes
//! lab-tool ask ADDRESS PORT    sends some megabytes there, and prints what it received
//! lab-tool reflect PORT        says `up`, and sends back each datagram, until it is killed
//! lab-tool probe ADDRESS PORT COUNT   sends COUNT messages, 20 ms apart; prints the number of replies and
//!                                     the shortest round trip
//! lab-tool write TEXT          into the shared memory
//! lab-tool read LENGTH         from there
//! ```

use std::error::Error;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Time after which a silent peer is dead.
const SILENCE_LIMIT: Duration = Duration::from_secs(20);

/// Between two datagrams.
const PROBE_EVERY: Duration = Duration::from_millis(20);

/// Time after which a datagram counts as lost; emulated hosts pause for a while occasionally.
const PROBE_LIMIT: Duration = Duration::from_secs(2);

/// More than the link's queue of frames holds.
const SENT_BYTES: usize = 4 << 20;

/// QEMU's ivshmem device: vendor and device.
const SHARED_DEVICE: (&str, &str) = ("0x1af4", "0x1110");

/// Where text is put: a place in the last quarter of 16 MiB.
const SHARED_OFFSET_BYTES: usize = 12 << 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["serve", port] => serve(port.parse()?),
        ["ask", address, port] => ask(SocketAddr::new(address.parse()?, port.parse()?)),
        ["reflect", port] => reflect(port.parse()?),
        ["probe", address, port, count] => {
            probe(SocketAddr::new(address.parse()?, port.parse()?), count.parse()?)
        }
        ["write", text] => {
            Shared::open()?.write(text.as_bytes());
            Ok(())
        }
        ["read", length] => {
            println!("{}", String::from_utf8(Shared::open()?.read(length.parse()?))?);
            Ok(())
        }
        _ => Err(
            "serve PORT | ask ADDRESS PORT | reflect PORT | probe ADDRESS PORT COUNT | write TEXT | \
            read LENGTH"
                .into(),
        ),
    }
}

fn serve(port: u16) -> Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    println!("up");
    let (mut stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(SILENCE_LIMIT))?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    stream.write_all(&bytes)?;
    Ok(())
}

fn ask(peer: SocketAddr) -> Result<()> {
    // No byte pattern repeats with the size of a segment or of a page.
    let sent: Vec<u8> = (0..SENT_BYTES).map(|at| (at % 251) as u8).collect();
    let mut stream = TcpStream::connect_timeout(&peer, SILENCE_LIMIT)?;
    stream.set_read_timeout(Some(SILENCE_LIMIT))?;
    stream.write_all(&sent)?;
    stream.shutdown(Shutdown::Write)?;
    let mut got = Vec::new();
    stream.read_to_end(&mut got)?;
    let same = if got == sent { "the same" } else { "different" };
    let IpAddr::V4(from) = stream.local_addr()?.ip() else {
        return Err("not by version 4".into());
    };
    println!("{same} {} bytes from {from}", got.len());
    Ok(())
}

fn reflect(port: u16) -> Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", port))?;
    println!("up");
    let mut datagram = [0; 2048];
    loop {
        let (length, from) = socket.recv_from(&mut datagram)?;
        socket.send_to(&datagram[..length], from)?;
    }
}

/// Each datagram has its number and is waited for from when it was sent, so that a slow receiver makes
/// nothing seem fast.
fn probe(peer: SocketAddr, count: u32) -> Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.connect(peer)?;
    let receiver = socket.try_clone()?;
    receiver.set_read_timeout(Some(PROBE_LIMIT))?;
    let receiving = std::thread::spawn(move || {
        let mut came = vec![None; count as usize];
        let mut number = [0; 4];
        while came.contains(&None) && receiver.recv(&mut number).is_ok() {
            if let Some(slot) = came.get_mut(u32::from_be_bytes(number) as usize) {
                slot.get_or_insert(Instant::now());
            }
        }
        came
    });
    let mut sent = Vec::new();
    for number in 0..count {
        sent.push(Instant::now());
        socket.send(&number.to_be_bytes())?;
        std::thread::sleep(PROBE_EVERY);
    }
    let came = receiving.join().map_err(|_| "the receiver failed")?;
    let times: Vec<Duration> = sent
        .iter()
        .zip(came)
        .filter_map(|(sent, came)| Some(came? - *sent))
        .collect();
    let best_us = times.iter().min().map_or(0, Duration::as_micros);
    println!(
        "{} of {count} came back, the first after {best_us} us",
        times.len()
    );
    Ok(())
}

/// The memory that lab hosts share, mapped for as long as this process lives.
struct Shared {
    memory: *mut u8,
    length: usize,
}

impl Shared {
    fn open() -> Result<Self> {
        let is = |path: &std::path::Path, name: &str, value: &str| {
            fs::read_to_string(path.join(name)).is_ok_and(|text| text.trim() == value)
        };
        let mut devices = fs::read_dir("/sys/bus/pci/devices")?
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| is(path, "vendor", SHARED_DEVICE.0) && is(path, "device", SHARED_DEVICE.1));
        let device = devices.next().ok_or("no shared memory in this host")?;
        let region = device.join("resource2");
        let length = usize::try_from(fs::metadata(&region)?.len())?;
        let file = File::options().read(true).write(true).open(region)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice, of an open file.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(Self {
            memory: memory.cast(),
            length,
        })
    }

    fn place(&self, bytes: usize) -> *mut u8 {
        assert!(SHARED_OFFSET_BYTES + bytes <= self.length);
        // SAFETY: inside the mapping, by the line above.
        unsafe { self.memory.add(SHARED_OFFSET_BYTES) }
    }

    fn write(&self, text: &[u8]) {
        let place = self.place(text.len());
        for (at, byte) in text.iter().enumerate() {
            // SAFETY: `place` has room for all of `text`; volatile, because another host looks.
            unsafe { place.add(at).write_volatile(*byte) };
        }
    }

    fn read(&self, length: usize) -> Vec<u8> {
        let place = self.place(length);
        // SAFETY: `place` has so many bytes; volatile, because another host writes them.
        (0..length)
            .map(|at| unsafe { place.add(at).read_volatile() })
            .collect()
    }
}
