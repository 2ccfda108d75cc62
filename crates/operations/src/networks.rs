//! Networks of this user's subnet on this host, as its gateway reports them.

use std::io;
use std::path::Path;
use std::time::Duration;

use registry::subnet::{Connection, NetworkReport, ProcessReport, Request, Response};

/// Time limit for the gateway's reply.
const REPLY_LIMIT: Duration = Duration::from_secs(20);

/// The networks, and the process of their gateway; without a gateway there are none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subnet {
    /// The networks, by name.
    pub networks: Vec<NetworkReport>,
    /// The gateway's process.
    pub gateway: Option<ProcessReport>,
}

/// Connects to the gateway of the user of this runtime directory; returns none if it does not run.
///
/// # Errors
/// If the gateway can't be reached.
pub fn connect(runtime: &Path) -> io::Result<Option<Connection>> {
    match Connection::open(runtime) {
        Ok(connection) => {
            connection.set_limit(Some(REPLY_LIMIT))?;
            Ok(Some(connection))
        }
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

/// Lists the networks of the user of this runtime directory. A gateway that ends meanwhile has none.
///
/// # Errors
/// If the gateway does not answer.
pub fn list(runtime: &Path) -> io::Result<Subnet> {
    let Some(mut connection) = connect(runtime)? else {
        return Ok(Subnet::default());
    };
    connection.send(&Request::List, &[])?;
    match connection.receive()? {
        Some(Response::Networks { networks, process }) => Ok(Subnet {
            networks,
            gateway: Some(process),
        }),
        Some(_) => Err(io::ErrorKind::InvalidData.into()),
        None => Ok(Subnet::default()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use registry::subnet::{OF_GATEWAY, socket_path};

    use super::*;

    /// Serves one connection with this answer, or ends it without one.
    fn answered(answer: Option<Response>) -> io::Result<Subnet> {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(socket_path(directory.path())).unwrap();
        let server = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            assert!(client.read(&mut [0; 1024]).unwrap() > 0);
            if let Some(answer) = answer {
                client.write_all(&OF_GATEWAY.write(&answer).unwrap()).unwrap();
            }
        });
        let listed = list(directory.path());
        server.join().unwrap();
        listed
    }

    #[test]
    fn without_a_gateway_there_are_no_networks_and_no_error() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(list(directory.path()).unwrap(), Subnet::default());
        // The socket of a gateway that has ended stays.
        drop(UnixListener::bind(socket_path(directory.path())).unwrap());
        assert_eq!(list(directory.path()).unwrap(), Subnet::default());
        assert_eq!(answered(None).unwrap(), Subnet::default());
    }

    #[test]
    fn gateways_answer_is_its_networks_and_another_answer_is_an_error() {
        let process = ProcessReport {
            pid: 7,
            outside: std::collections::BTreeMap::new(),
            captures: Vec::new(),
        };
        let listed = answered(Some(Response::Networks {
            networks: Vec::new(),
            process,
        }));
        assert_eq!(listed.unwrap().gateway.map(|process| process.pid), Some(7));
        let error = answered(Some(Response::Capturing)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
