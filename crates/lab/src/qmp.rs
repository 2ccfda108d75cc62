//! QEMU's monitor protocol (QMP): the two queries that a lab needs.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::LabError;

/// Returns the port of 127.0.0.1 that QEMU forwards to `port` of its guest.
pub fn forwarded_port(stream: &UnixStream, port: u16) -> Result<u16, LabError> {
    let failed = |error: std::io::Error| LabError::Monitor(error.to_string());
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .map_err(failed)?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).map_err(failed)?;
    ask(stream, &mut reader, r#"{"execute":"qmp_capabilities"}"#)?;
    let text = human(stream, &mut reader, "info usernet")?;
    parse_usernet(&text, port).ok_or_else(|| LabError::Monitor(format!("no forwarded port in {text:?}")))
}

/// Returns the registers and the interrupt controller of each of the first `cpus` CPUs, as text. Must follow
/// [`forwarded_port`].
pub fn registers(stream: &UnixStream, cpus: u16) -> Result<String, LabError> {
    // QEMU itself may hang, so reads have a timeout.
    let limited = stream.set_read_timeout(Some(Duration::from_secs(3)));
    limited.map_err(|error| LabError::Monitor(error.to_string()))?;
    let mut reader = BufReader::new(stream);
    let mut text = human(stream, &mut reader, "info registers -a")?;
    for cpu in 0..cpus {
        text.push_str(&human(stream, &mut reader, &format!("info lapic {cpu}"))?);
    }
    Ok(text)
}

/// Returns the output of a command of QEMU's human monitor.
fn human(
    stream: &UnixStream,
    reader: &mut BufReader<&UnixStream>,
    command: &str,
) -> Result<String, LabError> {
    let question = serde_json::json!({
        "execute": "human-monitor-command",
        "arguments": { "command-line": command },
    });
    let answer = ask(stream, reader, &question.to_string())?;
    Ok(answer["return"].as_str().unwrap_or_default().to_owned())
}

/// `  TCP[HOST_FORWARD]  12   127.0.0.1 35677  10.0.2.15  1024  0  0`
fn parse_usernet(text: &str, port: u16) -> Option<u16> {
    text.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let at = fields.iter().position(|field| field.contains("HOST_FORWARD"))?;
        (fields.get(at + 5)?.parse() == Ok(port)).then(|| fields.get(at + 3)?.parse().ok())?
    })
}

fn ask(
    mut stream: &UnixStream,
    reader: &mut BufReader<&UnixStream>,
    question: &str,
) -> Result<serde_json::Value, LabError> {
    let failed = |error: std::io::Error| LabError::Monitor(error.to_string());
    stream.write_all(question.as_bytes()).map_err(failed)?;
    stream.write_all(b"\n").map_err(failed)?;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).map_err(failed)? == 0 {
            return Err(LabError::Monitor("QEMU closed it".into()));
        }
        let value: serde_json::Value =
            serde_json::from_str(&line).map_err(|error| LabError::Monitor(error.to_string()))?;
        // Events may precede the response.
        if value.get("return").is_some() {
            return Ok(value);
        }
        if let Some(error) = value.get("error") {
            return Err(LabError::Monitor(error.to_string()));
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn forwarded_port_is_parsed() {
        let text = "Hub -1 (n0):\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port \
            RecvQ SendQ\n  \
                    TCP[HOST_FORWARD]  12       127.0.0.1 35677       10.0.2.15  1024     0     0\n";
        assert_eq!(super::parse_usernet(text, 1024), Some(35677));
        assert_eq!(super::parse_usernet("nonsense", 1024), None);
    }
}
