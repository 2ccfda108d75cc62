//! Port forwarding from the host to a guest, as a person writes it.

use std::fmt;
use std::str::FromStr;

use crate::SubnetError;

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// Transmission Control Protocol.
    Tcp,
    /// User Datagram Protocol.
    Udp,
}

impl Protocol {
    /// Returns `tcp` or `udp`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// A port of the host that is forwarded to a port of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortForward {
    /// Protocol of both ports.
    pub protocol: Protocol,
    /// Port on the host, not 0.
    pub host: u16,
    /// Port in the guest, not 0.
    pub guest: u16,
}

impl FromStr for PortForward {
    type Err = SubnetError;

    /// Parses `[tcp:|udp:]HOST:GUEST`; `HOST` alone stands for `HOST:HOST`.
    fn from_str(text: &str) -> Result<Self, SubnetError> {
        let wrong = |what| SubnetError::Forward {
            text: text.to_owned(),
            what,
        };
        let port = |part: &str| match part.parse::<u16>() {
            _ if part.starts_with('+') => Err(wrong("a port is a number")),
            Ok(0) => Err(wrong("port 0 is none")),
            Ok(port) => Ok(port),
            Err(_) if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) => {
                Err(wrong("ports end at 65535"))
            }
            Err(_) => Err(wrong("a port is a number")),
        };
        let (protocol, ports) = match text.split_once(':') {
            Some(("tcp", rest)) => (Protocol::Tcp, rest),
            Some(("udp", rest)) => (Protocol::Udp, rest),
            _ => (Protocol::Tcp, text),
        };
        let (host, guest) = ports.split_once(':').unwrap_or((ports, ports));
        Ok(Self {
            protocol,
            host: port(host)?,
            guest: port(guest)?,
        })
    }
}

impl fmt::Display for PortForward {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}:{}", self.protocol.name(), self.host, self.guest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwards_are_read_as_written() {
        let read = |text: &str| text.parse::<PortForward>().unwrap();
        let tcp = Protocol::Tcp;
        assert_eq!(
            read("8080:80"),
            PortForward {
                protocol: tcp,
                host: 8080,
                guest: 80
            }
        );
        assert_eq!(read("tcp:8080:80"), read("8080:80"));
        assert_eq!(
            read("22"),
            PortForward {
                protocol: tcp,
                host: 22,
                guest: 22
            }
        );
        assert_eq!(
            read("udp:53:5353"),
            PortForward {
                protocol: Protocol::Udp,
                host: 53,
                guest: 5353
            }
        );
        assert_eq!(read(&read("udp:53:5353").to_string()), read("udp:53:5353"));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "", ":", "80:", ":80", "0:80", "80:0", "65536:1", "a:b", "sctp:1:2", "1:2:3", "+1:2", "-1",
            "1 :2",
        ] {
            assert!(text.parse::<PortForward>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn error_names_what_is_wrong_with_a_port() {
        for (text, what) in [
            ("65536:1", "ports end at 65535"),
            ("1:99999999999", "ports end at 65535"),
            (":1", "a port is a number"),
            ("6553x:1", "a port is a number"),
            ("0:1", "port 0 is none"),
        ] {
            let error = text.parse::<PortForward>().unwrap_err().to_string();
            assert!(error.contains(what), "{text:?}: {error}");
        }
    }
}
