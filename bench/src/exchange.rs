//! Bytes exchanged by TCP: a caller measures, the other end answers.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

/// Bytes moved in each direction.
const BULK_BYTES: usize = 48 << 20;
const BUFFER_BYTES: usize = 256 << 10;
/// Round trips of one byte.
const ROUNDS: u32 = 400;

/// Sends the bytes, then receives as many. Returns the rates, Mbit/s.
///
/// # Errors
/// If the connection ends before.
pub fn call(stream: &mut TcpStream) -> io::Result<(f64, f64)> {
    let rate = |start: Instant| BULK_BYTES as f64 * 8.0 / start.elapsed().as_secs_f64() / 1e6;
    let start = Instant::now();
    send(stream)?;
    // The other end confirms the last byte.
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    let sent = rate(start);
    let start = Instant::now();
    stream.write_all(&byte)?;
    receive(stream)?;
    Ok((sent, rate(start)))
}

/// Answers a call.
///
/// # Errors
/// If the connection ends before.
pub fn answer(stream: &mut TcpStream) -> io::Result<()> {
    receive(stream)?;
    stream.write_all(&[1])?;
    stream.read_exact(&mut [0])?;
    send(stream)
}

/// Sends single bytes, each after the echo of the last one. Returns the mean time of a round trip,
/// microseconds.
///
/// # Errors
/// If the connection ends before.
pub fn round_trips(stream: &mut TcpStream) -> io::Result<f64> {
    stream.set_nodelay(true)?;
    let start = Instant::now();
    for _ in 0..ROUNDS {
        stream.write_all(&[7])?;
        stream.read_exact(&mut [0])?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS))
}

/// Echoes single bytes until the connection ends.
///
/// # Errors
/// If it ends by a failure.
pub fn echo(stream: &mut TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 {
        stream.write_all(&byte)?;
    }
    Ok(())
}

fn send(stream: &mut TcpStream) -> io::Result<()> {
    let buffer = vec![0x33_u8; BUFFER_BYTES];
    for _ in 0..BULK_BYTES / buffer.len() {
        stream.write_all(&buffer)?;
    }
    Ok(())
}

fn receive(stream: &mut TcpStream) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut left = BULK_BYTES;
    while left > 0 {
        let room = left.min(buffer.len());
        match stream.read(&mut buffer[..room])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => left -= count,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn caller_and_answerer_agree_on_the_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let answerer = std::thread::spawn(move || -> io::Result<()> {
            let (mut stream, _) = listener.accept()?;
            answer(&mut stream)?;
            echo(&mut stream)
        });
        let mut stream = TcpStream::connect(address).unwrap();
        let (sent, received) = call(&mut stream).unwrap();
        assert!(sent > 0.0 && received > 0.0 && round_trips(&mut stream).unwrap() > 0.0);
        drop(stream);
        answerer.join().unwrap().unwrap();
    }
}
