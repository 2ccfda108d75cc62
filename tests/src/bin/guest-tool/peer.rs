//! The guest's end of a transfer.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use guest_tests::peer;

use crate::Fault;

/// Connects and sends.
pub fn send(address: &str, seed: u64, bytes: u64) -> Result<String, Fault> {
    Ok(peer::send(TcpStream::connect(address)?, seed, bytes)?)
}

/// Connects and receives.
pub fn fetch(address: &str) -> Result<String, Fault> {
    Ok(peer::receive(TcpStream::connect(address)?)?)
}

/// Waits for one connection and receives from it.
pub fn receive(port: u16) -> Result<String, Fault> {
    Ok(peer::receive(accept(port)?)?)
}

/// Waits for one connection and sends to it.
pub fn serve(port: u16, seed: u64, bytes: u64) -> Result<String, Fault> {
    Ok(peer::send(accept(port)?, seed, bytes)?)
}

/// Sends `count` datagrams back to where they come from.
pub fn reflect(port: u16, count: usize) -> Result<String, Fault> {
    let socket = UdpSocket::bind(("0.0.0.0", port))?;
    socket.set_read_timeout(Some(Duration::from_secs(60)))?;
    println!("listening");
    let mut datagram = vec![0; 65_536];
    for _ in 0..count {
        let (bytes, from) = socket.recv_from(&mut datagram)?;
        socket.send_to(&datagram[..bytes], from)?;
    }
    Ok(format!("reflected {count}"))
}

fn accept(port: u16) -> Result<TcpStream, Fault> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    println!("listening");
    Ok(listener.accept()?.0)
}
