//! The network cards of a lab host: found by their hardware address, given their addresses.

use std::fs;
use std::mem;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::Failure;
use crate::boot::NetworkCard;

/// Brings up the loop-back device and every card.
pub fn configure(cards: &[NetworkCard]) -> Result<(), Failure> {
    let control = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    up(&control, "lo")?;
    for card in cards {
        let name = find(&card.mac)?;
        set_address(&control, &name, libc::SIOCSIFADDR, card.address)?;
        set_address(
            &control,
            &name,
            libc::SIOCSIFNETMASK,
            Ipv4Addr::new(255, 255, 255, 0),
        )?;
        up(&control, &name)?;
        if let Some(gateway) = card.gateway {
            default_route(&control, gateway)?;
        }
    }
    Ok(())
}

fn find(mac: &str) -> Result<String, Failure> {
    for entry in fs::read_dir("/sys/class/net")? {
        let entry = entry?;
        if fs::read_to_string(entry.path().join("address")).is_ok_and(|address| address.trim() == mac) {
            return Ok(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Err(format!("no network card with address {mac}").into())
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: all zeroes is a valid ifreq.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    // One byte is left for the terminating zero.
    for (slot, byte) in request
        .ifr_name
        .iter_mut()
        .take(libc::IFNAMSIZ - 1)
        .zip(name.bytes())
    {
        *slot = byte as libc::c_char;
    }
    request
}

fn address(ip: Ipv4Addr) -> libc::sockaddr {
    // SAFETY: all zeroes is a valid sockaddr.
    let mut address: libc::sockaddr = unsafe { mem::zeroed() };
    address.sa_family = libc::AF_INET as libc::sa_family_t;
    for (slot, byte) in address.sa_data[2..6].iter_mut().zip(ip.octets()) {
        *slot = byte as libc::c_char;
    }
    address
}

fn set_address(control: &OwnedFd, name: &str, code: libc::Ioctl, ip: Ipv4Addr) -> Result<(), Failure> {
    let mut request = request(name);
    request.ifr_ifru.ifru_addr = address(ip);
    // SAFETY: these requests read an ifreq, which lives for the whole call.
    let result = unsafe { libc::ioctl(control.as_raw_fd(), code, &request) };
    nix::errno::Errno::result(result).map_err(|error| format!("address {ip} on {name}: {error}"))?;
    Ok(())
}

fn up(control: &OwnedFd, name: &str) -> Result<(), Failure> {
    let mut request = request(name);
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the request reads an ifreq, which lives for the whole call.
    let result = unsafe { libc::ioctl(control.as_raw_fd(), libc::SIOCSIFFLAGS, &request) };
    nix::errno::Errno::result(result).map_err(|error| format!("bringing up {name}: {error}"))?;
    Ok(())
}

fn default_route(control: &OwnedFd, gateway: Ipv4Addr) -> Result<(), Failure> {
    // SAFETY: all zeroes is a valid rtentry.
    let mut route: libc::rtentry = unsafe { mem::zeroed() };
    route.rt_dst = address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: the request reads an rtentry, which lives for the whole call.
    let result = unsafe { libc::ioctl(control.as_raw_fd(), libc::SIOCADDRT, &route) };
    nix::errno::Errno::result(result).map_err(|error| format!("route by {gateway}: {error}"))?;
    Ok(())
}
