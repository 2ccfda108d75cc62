//! The guest's end of a transfer.

use std::net::{TcpListener, TcpStream};

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

fn accept(port: u16) -> Result<TcpStream, Fault> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    println!("listening");
    Ok(listener.accept()?.0)
}
