//! Gives a clone's guest another identity than its parent's: name, hardware and IP addresses, random numbers,
//! time.
//!
//! A kernel with a driver for the virtual machine generation id draws new random numbers by itself. Debian's
//! cloud kernel has none, so the agent does it for every kernel.

mod connections;
mod interface;
mod routes;

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};

use self::interface::Interface;
use self::routes::Route;
use crate::protocol::{CardAddress, Identity, Ipv4Settings};

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

/// Gives the interfaces with a card's old address its new addresses. A card without an interface (no driver)
/// keeps its address.
fn readdress(card: &CardAddress) -> io::Result<()> {
    for interface in Interface::with_hardware_address(card.from)? {
        match card.ipv4 {
            Some(settings) if interface.is_up()? && interface.ipv4()?.is_some() => {
                move_to_network(&interface, card.to, settings)?;
            }
            // An interface without an address gets one by the guest's own means.
            _ => interface.set_hardware_address(card.to)?,
        }
    }
    Ok(())
}

/// Gives an interface its addresses on its network, ends the connections of the addresses that it had, and
/// restores its routes.
///
/// The interface goes down meanwhile. The kernel then forgets its neighbors and IPv6 addresses, and makes new
/// ones when it is up. A DHCP client that follows the link requests its lease again.
fn move_to_network(interface: &Interface, to: [u8; 6], settings: Ipv4Settings) -> io::Result<()> {
    let mut former = interface.addresses()?;
    let routes = routes::of_interface(interface.name())?;
    interface.set_up(false)?;
    let moved: io::Result<()> = (|| {
        interface.set_hardware_address(to)?;
        interface.set_ipv4(settings.address, settings.prefix_bits)?;
        // The peers take them for the parent's, so nothing may be sent: without the link nothing is.
        former.retain(|address| *address != settings.address);
        connections::reset(&former);
        Ok(())
    })();
    // A failed step must not leave the guest without a link.
    interface.set_up(true)?;
    moved?;
    routes
        .iter()
        .filter_map(|route| route.moved(&settings))
        .try_for_each(|route: Route| interface.add_route(&route))
}
