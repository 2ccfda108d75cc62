//! Gives a clone's guest another identity than its parent's: name, hardware addresses, random numbers, time.
//!
//! A kernel with a driver for the virtual machine generation id draws new random numbers by itself. Debian's
//! cloud kernel has none, so the agent does it for every kernel.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};

use crate::protocol::{CardAddress, Identity};

/// Greatest size of a seed, bytes.
const SEED_BYTES_MAX: usize = 256;
/// Requests `RNDADDENTROPY` and `RNDRESEEDCRNG` of `linux/random.h`.
const ADD_ENTROPY: libc::Ioctl = 0x4008_5203;
const RESEED: libc::Ioctl = 0x5207;

/// Applies the identity. Random numbers are first: they then differ from the parent's even if a later step
/// fails.
pub fn assume(identity: &Identity) -> io::Result<()> {
    seed(&identity.seed)?;
    clock_settime(
        ClockId::CLOCK_REALTIME,
        TimeSpec::from_duration(Duration::from_nanos(identity.unix_ns)),
    )?;
    rename(&identity.hostname)?;
    identity.cards.iter().try_for_each(readdress)
}

/// Mixes bytes into the kernel's generator, and makes it use them at once.
fn seed(bytes: &[u8]) -> io::Result<()> {
    let bytes = &bytes[..bytes.len().min(SEED_BYTES_MAX)];
    let random = File::options().write(true).open("/dev/random")?;
    // struct rand_pool_info: number of bits, number of bytes, then the bytes.
    let length = bytes.len() as i32;
    let mut pool = Vec::with_capacity(8 + bytes.len());
    pool.extend((length * 8).to_ne_bytes());
    pool.extend(length.to_ne_bytes());
    pool.extend(bytes);
    // SAFETY: the kernel reads two integers and as many bytes as the second says, all inside `pool`.
    let added = unsafe { libc::ioctl(random.as_raw_fd(), ADD_ENTROPY, pool.as_ptr()) };
    // SAFETY: takes no argument.
    if added < 0 || unsafe { libc::ioctl(random.as_raw_fd(), RESEED) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Sets the guest's name, and the file of the name for the next boot, if it exists.
fn rename(name: &str) -> io::Result<()> {
    nix::unistd::sethostname(name)?;
    if fs::exists("/etc/hostname")? {
        fs::write("/etc/hostname", format!("{name}\n"))?;
    }
    Ok(())
}

/// Sets the new address of the interface with the old one. A card without an interface (no driver) keeps its
/// address.
fn readdress(card: &CardAddress) -> io::Result<()> {
    // SAFETY: makes a new descriptor.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, ours alone.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    for interface in fs::read_dir("/sys/class/net")? {
        let name = interface?.file_name();
        let name = name.as_encoded_bytes();
        // SAFETY: all zeroes is a value of this plain structure.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if name.len() >= request.ifr_name.len() {
            continue;
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name) {
            *to = *from as libc::c_char;
        }
        // SAFETY: the structure is ours and outlives the call; its name ends with a zero.
        if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFHWADDR, &mut request) } < 0 {
            continue;
        }
        // SAFETY: the call above filled this member.
        let address = unsafe { &mut request.ifr_ifru.ifru_hwaddr };
        if address.sa_family != libc::ARPHRD_ETHER || !same(&address.sa_data, &card.from) {
            continue;
        }
        for (to, from) in address.sa_data.iter_mut().zip(card.to) {
            *to = from as libc::c_char;
        }
        // SAFETY: as above.
        if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFHWADDR, &request) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn same(data: &[libc::c_char], address: &[u8; 6]) -> bool {
    data.iter()
        .zip(address)
        .all(|(data, address)| *data as u8 == *address)
}
