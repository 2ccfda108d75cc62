//! A part on another host, as the home's monitor has it: its place, and its shard while one runs.

use std::collections::VecDeque;
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
use registry::cluster::interface::Vcpu;
use shard_api::launch::{Answer, Order, OrderId, Report};
use shard_api::platform::HostProcessor;
use urpc::version::Versions;

use super::connections::{connect, receive};
use super::host_requests::HostRequests;
use super::launch;
use super::protocol::{
    Endpoint, FromPart, HostAnswer, HostRequest, OF_HOME, PartAnswer, PartLimits, PartRequest, PartStart,
    Role, ToPart, Token, acts_on_host,
};
use crate::cluster::hosts::{Hosts, PROGRAM};
use crate::cluster::link::stream::{beating, write_to};
use crate::cluster::reservation::ReservationError;
use crate::text::printable;

/// Maximum number of reports that are not read yet: each shard answers one order at a time.
const HEARD_MAX: usize = 64;
/// Time limit for the other host to start the part's monitor and pass on its answer: longer than the
/// monitor's own limit.
const ASK_LIMIT: Duration = launch::ANSWER_LIMIT.saturating_add(Duration::from_secs(10));
/// Time limit for a part's monitor to answer a request about its host: it may wait for its shard for 2 s.
const HOST_LIMIT: Duration = Duration::from_secs(4);
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
    /// The versions of its monitor.
    versions: Versions,
    awaited: Mutex<AwaitedOrders>,
    requests: Arc<HostRequests>,
}

/// The orders of [`is_awaited`] that a shard has not answered yet. It answers them in their order.
#[derive(Debug, Default)]
struct AwaitedOrders {
    last: u64,
    orders: VecDeque<OrderId>,
}

impl AwaitedOrders {
    /// The number of the next order.
    fn begin(&mut self) -> OrderId {
        self.last += 1;
        let id = OrderId {
            incarnation: 0,
            request: self.last,
        };
        self.orders.push_back(id);
        id
    }

    /// The number of the order that is answered now.
    fn end(&mut self) -> Option<OrderId> {
        self.orders.pop_front()
    }
}

/// Whether the monitor of a part passes on the answer to this order, whatever it is.
pub fn is_awaited(order: &Order) -> bool {
    matches!(order, Order::Pause | Order::Resume) || is_of_one_vcpu(order)
}

/// Whether monitors of the release before do not know that this order is awaited.
fn is_of_one_vcpu(order: &Order) -> bool {
    matches!(order, Order::StopVcpu { .. } | Order::ContinueVcpu { .. })
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
    ) -> Result<Self, ReservationError> {
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
        let refused = |why: String| ReservationError::Refused(format!("host {}: {why}", host.name));
        let (port, (processor, versions)) = match ask(hosts, &request) {
            Ok(PartAnswer::Holds {
                port,
                processor,
                versions,
            }) => (port, (processor, versions)),
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
            (processor, versions),
            socket,
            Duration::from_millis(hosts.site().silence_ms),
        )?)
    }

    fn over(
        endpoint: Endpoint,
        (processor, versions): (HostProcessor, Versions),
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
        let requests = Arc::<HostRequests>::default();
        let answering = requests.clone();
        std::thread::Builder::new().name("remote".into()).spawn(move || {
            let mut incoming = BufReader::new(incoming);
            let why = loop {
                match receive(&mut incoming) {
                    Ok(FromPart::Lost(why)) => break why,
                    Ok(FromPart::OfHost { number, answer }) => answering.answered(number, answer),
                    Ok(other) => {
                        // The receiver is gone: the part has ended.
                        if said.send(other).is_err() {
                            answering.lost();
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
            answering.lost();
        })?;
        Ok(Self {
            endpoint,
            sending,
            heard: Mutex::new(heard),
            lost,
            processor,
            versions,
            awaited: Mutex::default(),
            requests,
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

    /// The reason why it is lost permanently, if it is.
    pub fn lost(&self) -> Option<String> {
        lock(&self.lost).clone()
    }

    /// Starts its shard.
    pub fn start(&self, start: PartStart) -> io::Result<()> {
        // The shard of the boot before has answered what it could.
        lock(&self.awaited).orders.clear();
        self.tell(&ToPart::Start(Box::new(start)))
    }

    /// Sends an order to its shard. Returns the number of an order of [`is_awaited`], which its answer will
    /// have.
    ///
    /// # Errors
    /// If the connection has ended, or the part's monitor is of the release before and the order stops one
    /// vCPU.
    pub fn order(&self, order: &Order) -> io::Result<OrderId> {
        if is_of_one_vcpu(order) {
            self.check_versions()?;
        }
        // Numbers are in the order in which the orders are sent.
        let mut awaited = lock(&self.awaited);
        self.tell(&ToPart::Order(order.clone()))?;
        Ok(match is_awaited(order) {
            true => awaited.begin(),
            false => OrderId::default(),
        })
    }

    /// Lists the vCPUs' threads of its shard, with KVM's statistics. A part's shard has a thread for each
    /// vCPU of the VM.
    ///
    /// # Errors
    /// If its monitor is lost, is of the release before, refuses, or does not answer in time.
    pub fn vcpus(&self) -> io::Result<Vec<Vcpu>> {
        match self.ask_host(HostRequest::Vcpus)? {
            HostAnswer::Vcpus(vcpus) => Ok(vcpus),
            _ => Err(not_an_answer()),
        }
    }

    /// Restricts a vCPU's thread of its shard to these CPUs, or to all of its cell when `cpus` is empty.
    ///
    /// # Errors
    /// As [`RemotePart::vcpus`].
    pub fn pin(&self, vcpu: u8, cpus: &[usize]) -> io::Result<()> {
        let cpus = cpus.to_vec();
        self.confirm(HostRequest::Pin { vcpu, cpus })
    }

    /// Sets the weight and the limits of its control group.
    ///
    /// # Errors
    /// As [`RemotePart::vcpus`].
    pub fn limit(&self, limits: PartLimits) -> io::Result<()> {
        self.confirm(HostRequest::Limit(limits))
    }

    fn confirm(&self, request: HostRequest) -> io::Result<()> {
        match self.ask_host(request)? {
            HostAnswer::Done => Ok(()),
            _ => Err(not_an_answer()),
        }
    }

    /// Sends a request about its host, and waits for the answer; a refusal is an error.
    fn ask_host(&self, request: HostRequest) -> io::Result<HostAnswer> {
        self.check_versions()?;
        let send = |number| self.tell(&ToPart::OfHost { number, request });
        let answer = self.requests.ask(HOST_LIMIT, send).map_err(|error| {
            let why = format!("{}: {error}", self.endpoint);
            io::Error::new(error.kind(), why)
        })?;
        match answer {
            HostAnswer::Refused { why } => Err(io::Error::other(format!(
                "{}: {}",
                self.endpoint,
                printable(&why)
            ))),
            answer => Ok(answer),
        }
    }

    fn check_versions(&self) -> io::Result<()> {
        if acts_on_host(self.versions) {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "host {} had the release before when the VM started, which acts on whole VMs only; help: upgrade \
             it, then stop the VM and start it again",
            self.endpoint.host
        )))
    }

    /// The answer to the first order without one, as a report of its shard.
    pub fn answered(&self, answer: Answer) -> Option<Report> {
        let to = lock(&self.awaited).end()?;
        Some(Report::Answer { to, answer })
    }

    /// A report of its shard. A refusal by the release before, which passes it on as any report, is the
    /// answer to an order of [`is_awaited`] if there is one without.
    pub fn numbered(&self, report: Report) -> Report {
        match report {
            Report::Answer {
                to,
                answer: answer @ Answer::Refused { .. },
            } => Report::Answer {
                to: lock(&self.awaited).end().unwrap_or(to),
                answer,
            },
            other => other,
        }
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

fn not_an_answer() -> io::Error {
    io::Error::other("the other host gave an answer to another request")
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
mod tests;
