//! Against the real passt.

use std::os::fd::AsRawFd;

use super::*;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// A DHCP discover, and the address that the offer carries.
fn dhcp(passt: &Passt) -> Option<[u8; 4]> {
    let mut socket = UnixStream::from(passt.socket.try_clone().unwrap());
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(START_LIMIT)).unwrap();
    let mut bootp = vec![1, 1, 6, 0, 0, 0, 0x12, 0x34];
    bootp.resize(28, 0);
    bootp.extend(MAC);
    bootp.resize(236, 0);
    bootp.extend([0x63, 0x82, 0x53, 0x63, 53, 1, 1, 255]);
    bootp.resize(300, 0);
    let udp_length = (8 + bootp.len()) as u16;
    let mut ip = vec![0x45, 0];
    ip.extend((20 + udp_length).to_be_bytes());
    ip.extend([0, 0, 0, 0, 64, 17, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255]);
    let sum: u32 = ip
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let check = !(((sum & 0xffff) + (sum >> 16)) as u16);
    ip[10..12].copy_from_slice(&check.to_be_bytes());
    let mut frame = vec![0xff; 6];
    frame.extend(MAC);
    frame.extend([8, 0]);
    frame.extend(ip);
    frame.extend([0, 68, 0, 67]);
    frame.extend(udp_length.to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(bootp);
    // In one write: passt drops a length that it reads before any byte of its frame.
    let message = [&(frame.len() as u32).to_be_bytes()[..], &frame].concat();
    socket.write_all(&message).unwrap();
    loop {
        let mut length = [0; 4];
        socket.read_exact(&mut length).ok()?;
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        socket.read_exact(&mut frame).ok()?;
        if frame[12..14] == [8, 0] && frame[23] == 17 {
            return frame[14 + 20 + 8 + 16..][..4].try_into().ok();
        }
    }
}

#[test]
fn a_guest_gets_its_address_by_dhcp() {
    let passt = start(&PasstSpec {
        mac: MAC,
        forward: vec![],
    })
    .unwrap();
    assert_eq!(dhcp(&passt), Some(GUEST_ADDRESS.octets()));
}

#[test]
fn passt_ends_when_the_guests_socket_closes() {
    let Passt { socket, mut child } = start(&PasstSpec {
        mac: MAC,
        forward: vec![],
    })
    .unwrap();
    assert!(socket.as_raw_fd() >= 0);
    drop(socket);
    for _ in 0..100 {
        if child.0.try_wait().unwrap().is_some() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("passt still runs 2 s after its socket closed");
}

#[test]
fn a_host_with_nothing_but_loopback_still_gets_a_network() {
    // The namespace is this thread's; passt is started from it.
    let alone = std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
            .expect("this test needs root (CAP_SYS_ADMIN) to make a network namespace");
        let up = Command::new("ip")
            .args(["link", "set", "lo", "up"])
            .status()
            .expect("this test needs iproute2");
        assert!(up.success());
        dhcp(
            &start(&PasstSpec {
                mac: MAC,
                forward: vec![],
            })
            .unwrap(),
        )
    });
    assert_eq!(alone.join().unwrap(), Some(GUEST_ADDRESS.octets()));
}

#[test]
fn a_taken_port_is_named() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let host = taken.local_addr().unwrap().port();
    let forward = vec![PortForward {
        protocol: Protocol::Tcp,
        host,
        guest: 80,
    }];
    let error = start(&PasstSpec { mac: MAC, forward }).unwrap_err();
    assert!(
        matches!(error, SubnetError::PortInUse { port, .. } if port == host),
        "{error}"
    );
    assert!(error.to_string().contains(&host.to_string()));
}

#[test]
fn forwarded_ports_listen_on_the_host() {
    let free = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let host = free.local_addr().unwrap().port();
    drop(free);
    let forward = vec![PortForward {
        protocol: Protocol::Tcp,
        host,
        guest: 80,
    }];
    let _passt = start(&PasstSpec { mac: MAC, forward }).unwrap();
    std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, host)).expect("passt listens");
}

#[test]
fn what_passt_says_becomes_an_error_with_its_port() {
    let error = explain("Don't run as root.\nFailed to bind any port for '-u 5353:53', exiting\n");
    assert!(
        matches!(
            error,
            SubnetError::PortInUse {
                port: 5353,
                protocol: "udp"
            }
        ),
        "{error}"
    );
    let error =
        explain("Failed to send 3 bytes to syslog\nFailed to bind any port for '-t 81:80', exiting\n");
    assert!(
        matches!(
            error,
            SubnetError::PortPermission {
                port: 81,
                protocol: "tcp"
            }
        ),
        "{error}"
    );
    assert!(matches!(explain("nonsense"), SubnetError::PasstFailed(_)));
}
