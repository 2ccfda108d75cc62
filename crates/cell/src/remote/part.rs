//! A part on another host, as the home's monitor has it: its place, and its shard while one runs.

use std::io::{self, BufReader};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agent::client::{ClientError, output};
use agent::protocol::ExecRequest;
use config::VmSpec;
use locks::lock;
use policy::span::Part;
use protocol::CellId;
use shard_api::launch::Order;
use shard_api::platform::HostProcessor;

use super::connections::{connect, receive};
use super::launch;
use super::protocol::{Endpoint, FromPart, OF_HOME, PartAnswer, PartRequest, PartStart, Role, ToPart, Token};
use crate::cluster::hosts::{Hosts, PROGRAM};
use crate::cluster::link::stream::{beating, write_to};
use crate::cluster::tenure::TenureError;

/// Maximum number of reports that are not read yet: each shard answers one order at a time.
const HEARD_MAX: usize = 64;
/// Time limit for the other host to start the part's monitor and pass on its answer: longer than the
/// monitor's own limit.
const ASK_LIMIT: Duration = launch::ANSWER_LIMIT.saturating_add(Duration::from_secs(10));
/// Time limit for the other host to give the place back.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// Proxy for a part of a VM on another host. Dropping it ends the part, whatever its state is.
#[derive(Debug)]
pub struct RemotePart {
    endpoint: Endpoint,
    sending: Arc<Mutex<UnixStream>>,
    heard: Mutex<Receiver<FromPart>>,
    lost: Arc<Mutex<Option<String>>>,
    processor: HostProcessor,
}

impl RemotePart {
    /// Takes a part's place on the host of its cell, with room for a copy of all memory.
    ///
    /// # Errors
    /// If that host can't be reached, or refuses.
    pub fn begin(
        hosts: &Hosts,
        vm: &str,
        spec: &VmSpec,
        number: u8,
        part: &Part,
    ) -> Result<Self, TenureError> {
        let site = hosts.site();
        let host = site.host_of(part.cell).ok_or(io::ErrorKind::NotFound);
        let host = host.map_err(io::Error::from)?;
        let mut own = spec.clone();
        own.cpus = part.vcpus.len() as u8;
        let request = PartRequest {
            vm: vm.to_owned(),
            part: number,
            cell: part.cell,
            spec: own,
            home: hosts.site().here.clone(),
            token: Token::new()?,
        };
        let refused = |why: String| TenureError::Refused(format!("host {}: {why}", host.name));
        let (port, processor) = match ask(hosts, &request) {
            Ok(PartAnswer::Holds { port, processor }) => (port, processor),
            Ok(PartAnswer::Refused { why }) => return Err(refused(why)),
            Err(error) => return Err(refused(error.to_string())),
        };
        let endpoint = Endpoint {
            host: host.name.clone(),
            cell: part.cell,
            address: SocketAddr::new(host.address.ip(), port),
            token: request.token,
        };
        let socket = UnixStream::from(connect(hosts, &endpoint, Role::Control)?);
        Ok(Self::over(
            endpoint,
            processor,
            socket,
            Duration::from_millis(hosts.site().silence_ms),
        )?)
    }

    fn over(
        endpoint: Endpoint,
        processor: HostProcessor,
        socket: UnixStream,
        silence: Duration,
    ) -> io::Result<Self> {
        let peer = CellId {
            number: endpoint.cell,
            life: 0,
        };
        let (sending, incoming) = beating(peer, socket, silence)?;
        let (said, heard) = mpsc::sync_channel(HEARD_MAX);
        let lost = Arc::new(Mutex::new(None));
        let (losing, place) = (lost.clone(), endpoint.to_string());
        std::thread::Builder::new().name("remote".into()).spawn(move || {
            let mut incoming = BufReader::new(incoming);
            let why = loop {
                match receive(&mut incoming) {
                    Ok(FromPart::Lost(why)) => break why,
                    Ok(other) => {
                        // The receiver is gone: the part has ended.
                        if said.send(other).is_err() {
                            return;
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        break format!(
                            "{place}, which it spans, has said nothing for {} ms",
                            silence.as_millis()
                        );
                    }
                    Err(_) => break format!("{place}, which it spans, is gone: its monitor has ended"),
                }
            };
            lock(&losing).get_or_insert(why);
        })?;
        Ok(Self {
            endpoint,
            sending,
            heard: Mutex::new(heard),
            lost,
            processor,
        })
    }

    /// The processor of its host.
    pub fn processor(&self) -> &HostProcessor {
        &self.processor
    }

    /// Its place, and the endpoint at which others call it.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The reason why it is lost for good, if it is.
    pub fn lost(&self) -> Option<String> {
        lock(&self.lost).clone()
    }

    /// Starts its shard.
    pub fn start(&self, start: PartStart) -> io::Result<()> {
        self.tell(&ToPart::Start(Box::new(start)))
    }

    /// Sends an order to its shard.
    pub fn order(&self, order: &Order) -> io::Result<()> {
        self.tell(&ToPart::Order(order.clone()))
    }

    /// The next message of its shard, within the time; none when no further one can come. The last is
    /// [`FromPart::Gone`].
    pub fn next(&self, limit: Option<Duration>) -> Option<FromPart> {
        let heard = lock(&self.heard);
        match limit {
            None => heard.recv().ok(),
            Some(limit) => heard.recv_timeout(limit).ok(),
        }
    }

    /// Frees the place of a VM that has ended: returns when the place is free, or the other host is gone.
    pub fn leave(&self) {
        if self.tell(&ToPart::Leave).is_ok() {
            while self.lost().is_none() && self.next(Some(LEAVE_LIMIT)).is_some() {}
        }
    }

    fn tell(&self, told: &ToPart) -> io::Result<()> {
        write_to(&self.sending, &serde_json::to_vec(told)?)
    }
}

impl Drop for RemotePart {
    fn drop(&mut self) {
        let _ = lock(&self.sending).shutdown(Shutdown::Both);
    }
}

/// A reason why a part's monitor is not started.
#[derive(Debug, thiserror::Error)]
enum AskError {
    /// A connection or a thread.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A request that can't be written.
    #[error("{0}")]
    Request(serde_json::Error),
    /// A host that is cut off.
    #[error("it has not answered for {} s; see `mirrorball cluster status` there", .0.as_secs())]
    Silent(Duration),
    /// A command that is refused or cut short.
    #[error("{0}")]
    Command(ClientError),
    /// The last line of the command.
    #[error("no monitor for its part: {0}")]
    NoMonitor(String),
}

/// Requests the start of the part's monitor.
fn ask(hosts: &Hosts, request: &PartRequest) -> Result<PartAnswer, AskError> {
    let stream = hosts.command(request.cell)?;
    let command = ExecRequest {
        argv: vec![PROGRAM.to_owned(), launch::COMMAND.to_owned()],
        env: Vec::new(),
        cwd: None,
        tty: None,
    };
    let input = OF_HOME.write(request).map_err(AskError::Request)?;
    let (answer, said) = output_within(stream, command, input, ASK_LIMIT)?;
    serde_json::from_slice(&answer).map_err(|_| {
        let said = String::from_utf8_lossy(&said);
        let last = said.lines().last().unwrap_or("it says nothing");
        AskError::NoMonitor(last.to_owned())
    })
}

/// Standard output and error of a command over `stream`, which is closed if the command has not ended within
/// `limit`: a host that is cut off ends no stream.
fn output_within(
    stream: UnixStream,
    command: ExecRequest,
    input: Vec<u8>,
    limit: Duration,
) -> Result<(Vec<u8>, Vec<u8>), AskError> {
    let closed = stream.try_clone()?;
    let (tell, told) = mpsc::channel();
    let asking = move || drop(tell.send(output(stream, &command, &input)));
    let thread = std::thread::Builder::new().name("ask".into());
    thread.spawn(asking)?;
    let ended = told.recv_timeout(limit);
    let _ = closed.shutdown(Shutdown::Both);
    let ended = ended.map_err(|_| AskError::Silent(limit))?;
    let (_, output, said) = ended.map_err(AskError::Command)?;
    Ok((output, said))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn ended(script: &str, limit: Duration) -> Result<(Vec<u8>, Vec<u8>), AskError> {
        let (near, far) = UnixStream::pair().unwrap();
        let script = script.to_owned();
        std::thread::spawn(move || {
            agent::server::serve_programs(far, |request| {
                request.argv = ["sh", "-c", &script].map(str::to_owned).into();
                Ok::<_, io::Error>(())
            })
        });
        let command = ExecRequest {
            argv: vec![PROGRAM.to_owned()],
            env: Vec::new(),
            cwd: None,
            tty: None,
        };
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || tell.send(output_within(near, command, b"in".to_vec(), limit)));
        told.recv_timeout(Duration::from_secs(20)).expect("an answer")
    }

    #[test]
    fn answer_of_a_command_is_received() {
        let (output, said) = ended("cat; echo out >&2", Duration::from_secs(20)).unwrap();
        assert_eq!((&output[..], &said[..]), (&b"in"[..], &b"out\n"[..]));
    }

    #[test]
    fn command_that_does_not_answer_fails_at_the_limit() {
        let since = Instant::now();
        let why = ended("sleep 60", Duration::from_secs(1)).unwrap_err().to_string();
        assert!(why.starts_with("it has not answered for 1 s"), "{why}");
        assert!(since.elapsed() >= Duration::from_secs(1));
    }
}
