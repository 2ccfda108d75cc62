//! A network interface of the guest: its addresses, its state, its routes.

use std::ffi::CString;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::net::if_::if_nameindex;

use super::routes::{Route, mask};

/// IPv6 addresses of the network namespace of this thread.
const IPV6_ADDRESSES: &str = "/proc/thread-self/net/if_inet6";

/// A network interface.
pub struct Interface {
    name: String,
    /// A socket for requests.
    socket: OwnedFd,
}

impl Interface {
    /// Returns the Ethernet interfaces with a hardware address.
    pub fn with_hardware_address(wanted: [u8; 6]) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for interface in &if_nameindex()? {
            let Ok(name) = interface.name().to_str() else {
                continue;
            };
            let interface = Self::open(name)?;
            if interface.hardware_address() == Some(wanted) {
                found.push(interface);
            }
        }
        Ok(found)
    }

    fn open(name: &str) -> io::Result<Self> {
        // SAFETY: makes a new descriptor.
        let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            name: name.to_owned(),
            // SAFETY: just made, ours alone.
            socket: unsafe { OwnedFd::from_raw_fd(socket) },
        })
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its hardware address; none if it has none of Ethernet.
    fn hardware_address(&self) -> Option<[u8; 6]> {
        let mut request = self.request().ok()?;
        self.ask(libc::SIOCGIFHWADDR, &mut request).ok()?;
        // SAFETY: the call above filled this member.
        let address = unsafe { request.ifr_ifru.ifru_hwaddr };
        let mut bytes = [0; 6];
        for (to, from) in bytes.iter_mut().zip(address.sa_data) {
            *to = from as u8;
        }
        (address.sa_family == libc::ARPHRD_ETHER).then_some(bytes)
    }

    /// Sets its hardware address.
    pub fn set_hardware_address(&self, address: [u8; 6]) -> io::Result<()> {
        let mut request = self.request()?;
        request.ifr_ifru.ifru_hwaddr = libc::sockaddr {
            sa_family: libc::ARPHRD_ETHER,
            sa_data: [0; 14],
        };
        // SAFETY: just written.
        let data = unsafe { &mut request.ifr_ifru.ifru_hwaddr.sa_data };
        for (to, from) in data.iter_mut().zip(address) {
            *to = from as libc::c_char;
        }
        self.ask(libc::SIOCSIFHWADDR, &mut request)
    }

    /// Returns whether it is up.
    pub fn is_up(&self) -> io::Result<bool> {
        Ok(self.flags()? & libc::IFF_UP as libc::c_short != 0)
    }

    /// Brings it up or down.
    pub fn set_up(&self, is_up: bool) -> io::Result<()> {
        let up = libc::IFF_UP as libc::c_short;
        let flags = self.flags()?;
        let mut request = self.request()?;
        request.ifr_ifru.ifru_flags = if is_up { flags | up } else { flags & !up };
        self.ask(libc::SIOCSIFFLAGS, &mut request)
    }

    fn flags(&self) -> io::Result<libc::c_short> {
        let mut request = self.request()?;
        self.ask(libc::SIOCGIFFLAGS, &mut request)?;
        // SAFETY: the call above filled this member.
        Ok(unsafe { request.ifr_ifru.ifru_flags })
    }

    /// Returns its first IPv4 address.
    pub fn ipv4(&self) -> io::Result<Option<Ipv4Addr>> {
        let mut request = self.request()?;
        match self.ask(libc::SIOCGIFADDR, &mut request) {
            // SAFETY: the call above filled this member.
            Ok(()) => Ok(Some(address_of(unsafe { &request.ifr_ifru.ifru_addr }))),
            Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns its addresses.
    pub fn addresses(&self) -> io::Result<Vec<IpAddr>> {
        let mut addresses: Vec<IpAddr> = self.ipv4()?.into_iter().map(IpAddr::from).collect();
        // A kernel without IPv6 has no such file.
        let table = fs::read_to_string(IPV6_ADDRESSES).unwrap_or_default();
        addresses.extend(parse_ipv6(&table, &self.name).into_iter().map(IpAddr::from));
        Ok(addresses)
    }

    /// Replaces its first IPv4 address.
    pub fn set_ipv4(&self, address: Ipv4Addr, prefix_bits: u8) -> io::Result<()> {
        let mask = mask(prefix_bits);
        let broadcast = Ipv4Addr::from(u32::from(address) | !u32::from(mask));
        for (number, value) in [
            (libc::SIOCSIFADDR, address),
            (libc::SIOCSIFNETMASK, mask),
            (libc::SIOCSIFBRDADDR, broadcast),
        ] {
            let mut request = self.request()?;
            request.ifr_ifru.ifru_addr = socket_address(value);
            self.ask(number, &mut request)?;
        }
        Ok(())
    }

    /// Adds a route through it. One that exists is no error: a DHCP client may have been faster.
    pub fn add_route(&self, route: &Route) -> io::Result<()> {
        let device = CString::new(self.name.as_str())?;
        // SAFETY: all zeroes is a value of this plain structure.
        let mut entry: libc::rtentry = unsafe { std::mem::zeroed() };
        entry.rt_dst = socket_address(route.destination);
        entry.rt_genmask = socket_address(route.mask);
        entry.rt_flags = libc::RTF_UP;
        if let Some(gateway) = route.gateway {
            entry.rt_gateway = socket_address(gateway);
            entry.rt_flags |= libc::RTF_GATEWAY;
        }
        // The kernel takes one off; zero means no metric.
        entry.rt_metric = libc::c_short::try_from(route.metric)
            .ok()
            .and_then(|metric| metric.checked_add(1))
            .unwrap_or(libc::c_short::MAX);
        entry.rt_dev = device.as_ptr().cast_mut();
        // SAFETY: the kernel reads the structure and the name, which outlive the call; the name ends with a
        // zero.
        let added = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCADDRT, &raw const entry) };
        if added < 0 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EEXIST) {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns a request about this interface.
    fn request(&self) -> io::Result<libc::ifreq> {
        // SAFETY: all zeroes is a value of this plain structure.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if self.name.len() >= request.ifr_name.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (to, from) in request.ifr_name.iter_mut().zip(self.name.bytes()) {
            *to = from as libc::c_char;
        }
        Ok(request)
    }

    fn ask(&self, number: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
        // SAFETY: each number used here takes this structure, which is ours and outlives the call; its name
        // ends with a zero.
        let done = unsafe { libc::ioctl(self.socket.as_raw_fd(), number, &raw mut *request) };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// Writes an IPv4 address as a socket's.
fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    // Behind the port's two bytes.
    for (to, from) in data[2..].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    libc::sockaddr {
        sa_family: libc::AF_INET as libc::sa_family_t,
        sa_data: data,
    }
}

/// Reads an IPv4 address from a socket's.
fn address_of(address: &libc::sockaddr) -> Ipv4Addr {
    let mut octets = [0; 4];
    for (to, from) in octets.iter_mut().zip(&address.sa_data[2..]) {
        *to = *from as u8;
    }
    octets.into()
}

/// Parses the addresses of an interface in the format of `/proc/net/if_inet6`.
fn parse_ipv6(table: &str, interface: &str) -> Vec<Ipv6Addr> {
    let lines = table.lines().filter_map(|line| {
        let mut fields = line.split_whitespace();
        let address = u128::from_str_radix(fields.next()?, 16).ok()?;
        (fields.next_back()? == interface).then(|| address.into())
    });
    lines.collect()
}

#[cfg(test)]
mod tests;
