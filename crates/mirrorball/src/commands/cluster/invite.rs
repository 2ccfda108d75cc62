//! `mirrorball cluster invite`: creates a token for a further host, and waits until that host joins with it.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender, TrySendError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cell::cluster::callers::{Callers, HANDSHAKE_LIMIT, Unproven};
use cell::cluster::hosts::Hosts;
use cell::cluster::invitation::{Invitation, JoinAnswer, JoinRequest, Token, VALID};
use config::cluster::{CELLS_MAX, CellSpec, ClusterSpec};
use miette::{IntoDiagnostic, Result, miette};
use urpc::tls::{Deadline, Exchange, Inviter, authority_digest, has_issued, revocation_list, secret, sign};

use super::change::{Change, members, push, reach, write_file};
use super::plan::{folder, read};

/// Time limit for sending the response.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Maximum queued requests with the token's secret. One host has the token.
const REQUESTS_MAX: usize = 4;

/// Invites `host` at `address`.
pub(super) fn invite(file: &Path, host: &str, address: &str, listen: Option<SocketAddr>) -> Result<ExitCode> {
    let (spec, ..) = read(file)?;
    let keys = spec.keys(&folder(file)?).ok_or_else(super::cells::one_host)?;
    let inviter = Inviter::open(&keys).map_err(|error| {
        miette!(
            help = "give the command where authority.key is, in the folder of keys",
            "{error}"
        )
    })?;
    let address = address_of(&spec, address)?;
    let hosts = reach(&spec, file, None)?.ok_or_else(|| {
        miette!(
            help = "give the command on a host of the cluster",
            "{}: there is no key of any host of the cluster",
            keys.display()
        )
    })?;
    let site = hosts.site();
    let plan = Plan {
        file: file.to_owned(),
        keys,
        host: host.to_owned(),
        address,
    };
    // Refuses now any host that would be refused later.
    plan.text(&[any_cell()])?;
    members(&site)?;
    let own = site.hosts.iter().find(|own| own.name == site.here);
    let own = own.ok_or_else(super::cells::one_host)?.address;
    let listen = listen.unwrap_or_else(|| SocketAddr::new(own.ip(), own.port() + CELLS_MAX as u16));
    let listener = TcpListener::bind(listen).map_err(|error| {
        miette!(
            help = format!(
                "name an address of this machine that {host} can reach, with `--listen ADDRESS:PORT`"
            ),
            "no host can call {listen}: {error}"
        )
    })?;
    let listen = listener.local_addr().into_diagnostic()?;
    let token = Token::new(
        inviter.authority,
        secret().into_diagnostic()?,
        listen,
        host.to_owned(),
    );
    println!(
        "give this command on {host}, within {} minutes:",
        VALID.as_secs() / 60
    );
    println!("mirrorball cluster join {token}");
    println!("or, where other users of {host} must not see it: mirrorball cluster join - , and type it");
    serve(&plan, &hosts, inviter, listener, &token)
}

/// Plan for the joining host.
struct Plan {
    file: PathBuf,
    keys: PathBuf,
    host: String,
    address: SocketAddr,
}

impl Plan {
    /// Returns the cluster file with the host and these cells; also if an earlier invitation has added them
    /// without making a key.
    fn text(&self, cells: &[CellSpec]) -> Result<(String, ClusterSpec)> {
        let (spec, name, text) = read(&self.file)?;
        let is_known = spec.hosts.iter().find(|known| known.name == self.host);
        let issued = has_issued(&self.keys, &self.host).map_err(|error| miette!("{error}"))?;
        if let Some(known) = is_known.filter(|known| !issued && known.address == self.address) {
            let of_host = spec
                .cells
                .iter()
                .filter(|cell| cell.host.as_ref() == Some(&known.name));
            let count = of_host.count();
            if count == cells.len() || cells[..] == [any_cell()] {
                return Ok((text, spec));
            }
            return Err(miette!(
                help = format!("join with `--cells {count}`"),
                "host {} is in {name} already, with {count} cells",
                self.host
            ));
        }
        Ok(ClusterSpec::with_host(
            &name,
            &text,
            &self.host,
            self.address,
            cells,
        )?)
    }
}

/// A placeholder cell.
fn any_cell() -> CellSpec {
    CellSpec {
        host: None,
        cpus: None,
        nodes: None,
        memory: None,
        left: false,
    }
}

/// Parses an address of a host; the default port is that of the first host.
fn address_of(spec: &ClusterSpec, text: &str) -> Result<SocketAddr> {
    let port = spec.hosts.first().map_or(0, |first| first.address.port());
    let with_port = text
        .parse::<IpAddr>()
        .map(|address| SocketAddr::new(address, port));
    text.parse().or(with_port).map_err(|_| {
        miette!(
            help = "write it as 10.77.0.3 or 10.77.0.3:7400",
            "{text:?} is no address of a host"
        )
    })
}

/// Serves callers until the host has joined or the token has expired.
fn serve(
    plan: &Plan,
    hosts: &Hosts,
    inviter: Inviter,
    listener: TcpListener,
    token: &Token,
) -> Result<ExitCode> {
    let (send, requests) = mpsc::sync_channel(REQUESTS_MAX);
    let mut invitation = Invitation::new(token);
    let doorkeeper = InvitationListener {
        inviter,
        invitation: invitation.clone(),
        requests: send,
    };
    std::thread::Builder::new()
        .name("callers".into())
        .spawn(move || doorkeeper.take(&listener))
        .into_diagnostic()?;
    let begun = Instant::now();
    loop {
        let left = VALID.saturating_sub(begun.elapsed());
        let (exchange, request) = match requests.recv_timeout(left) {
            Ok(came) => came,
            Err(RecvTimeoutError::Timeout) => {
                return Err(miette!(
                    help = "invite it again",
                    "host {} has not joined within {} minutes",
                    plan.host,
                    VALID.as_secs() / 60
                ));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(miette!(
                    help = "see whether the host is out of files or threads, and invite it again",
                    "the invitation of host {} accepts no calls any more",
                    plan.host
                ));
            }
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();

        let admitted = invitation
            .admit(&request, begun.elapsed(), now.as_secs())
            .map_err(|why| (why.to_string(), miette!("{why}")));
        let answer = admitted.and_then(|()| {
            welcome(plan, hosts, &request, token).map_err(|error| (format!("{error}"), error))
        });
        let (answer, cells) = match answer {
            Ok(welcomed) => welcomed,
            Err((why, error)) => {
                eprintln!("a host was refused: {error}");
                (JoinAnswer::Refused(why), Vec::new())
            }
        };
        let answer = serde_json::to_vec(&answer).into_diagnostic()?;
        let sent = exchange.until(Deadline::after(ANSWER_LIMIT)).send(&answer);
        if cells.is_empty() {
            continue;
        }
        invitation.used();
        sent.map_err(|error| {
            miette!(
                help = format!(
                    "take it out with `mirrorball cluster remove FILE {}`, and invite it again",
                    plan.host
                ),
                "host {} has not received its certificate: {error}",
                plan.host
            )
        })?;
        println!("{} is host of {}", plan.host, cells.join(", "));
        return Ok(ExitCode::SUCCESS);
    }
}

/// Adds the host to the cluster: first all other hosts learn it, then it gets a certificate.
fn welcome(
    plan: &Plan,
    hosts: &Hosts,
    request: &JoinRequest,
    token: &Token,
) -> Result<(JoinAnswer, Vec<String>)> {
    let (text, spec) = plan.text(&request.cells)?;
    let change = Change {
        file: Some(text.clone()),
        revoked: None,
    };
    // A running host without the new host in its file would refuse its links, and one of the two would have
    // to end.
    let failed = push(hosts, &members(&hosts.site())?, &change)?;
    if let Some((name, why)) = failed.first() {
        return Err(miette!(
            help = "repair that host, or end its cells, and give the same command on the new host again",
            "host {name} does not take the new cluster file: {why}"
        ));
    }
    write_file(&plan.file, &text)?;
    let certificate = sign(&plan.keys, &plan.host, &request.key(), &token.secret);
    let certificate = certificate.map_err(|error| miette!("{error}"))?;
    let (_, authority) = authority_digest(&plan.keys).map_err(|error| miette!("{error}"))?;
    let revoked = std::fs::read_to_string(revocation_list(&plan.keys)).into_diagnostic()?;
    let site = spec
        .site(&plan.host, &folder(&plan.file)?)?
        .ok_or_else(super::cells::one_host)?;
    let own = site.hosts.iter().find(|host| host.name == plan.host);
    let cells = own.iter().flat_map(|host| &host.cells);
    let cells = cells.map(|cell| format!("cell {cell}")).collect();
    let welcome = JoinAnswer::Welcome {
        certificate,
        authority,
        revoked,
        file: text,
    };
    Ok((welcome, cells))
}

/// Accepts callers until the queue's receiver is gone. Any process may call: a caller without the token's
/// secret has one of the bounded places of [`Callers`] until it is refused, and its request is never queued.
#[derive(Clone)]
struct InvitationListener {
    inviter: Inviter,
    invitation: Invitation,
    requests: SyncSender<(Exchange, JoinRequest)>,
}

impl InvitationListener {
    /// Accepts callers, each on its own thread. Silent callers block no other.
    fn take(&self, listener: &TcpListener) {
        let callers = Callers::default();
        for tcp in listener.incoming() {
            let tcp = match tcp {
                Ok(tcp) => tcp,
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                // This process has no free descriptors at the moment.
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                }
            };
            let Ok(place) = callers.admit(&tcp) else { continue };
            let doorkeeper = self.clone();
            let _ = std::thread::Builder::new()
                .name("caller".into())
                .spawn(move || doorkeeper.receive(tcp, place));
        }
    }

    /// Receives a caller's request, and queues or refuses it.
    fn receive(&self, tcp: TcpStream, place: Unproven) -> std::io::Result<()> {
        let mut exchange = self.inviter.accept(tcp, Deadline::after(HANDSHAKE_LIMIT))?;
        let request: JoinRequest = serde_json::from_slice(&exchange.receive()?)?;
        if let Err(why) = self.invitation.recognize(&request) {
            eprintln!("a host was refused: {why}");
            // The caller keeps its place until here.
            return refuse(&mut exchange, why.to_string());
        }
        drop(place);
        match self.requests.try_send((exchange, request)) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full((mut exchange, _))) => {
                let why = "other hosts join by this token at the moment; try again";
                refuse(&mut exchange, why.to_owned())
            }
            Err(TrySendError::Disconnected(_)) => Err(ErrorKind::BrokenPipe.into()),
        }
    }
}

fn refuse(exchange: &mut Exchange, why: String) -> std::io::Result<()> {
    exchange.send(&serde_json::to_vec(&JoinAnswer::Refused(why))?)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use urpc::tls::make;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn requests_are_queued_within_a_bound_and_none_without_the_secret() {
        let keys = tempfile::tempdir().unwrap();
        make(keys.path(), ["alpha"]).unwrap();
        let inviter = Inviter::open(keys.path()).unwrap();
        let authority = inviter.authority;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let token = Token::new(authority, [9; 16], address, "gamma".to_owned());
        // No thread receives from the queue.
        let (send, requests) = mpsc::sync_channel(REQUESTS_MAX);
        let doorkeeper = InvitationListener {
            inviter,
            invitation: Invitation::new(&token),
            requests: send,
        };
        std::thread::spawn(move || doorkeeper.take(&listener));
        let call = |secret| {
            let mut exchange = Exchange::call(address, authority, LIMIT).unwrap();
            let request = JoinRequest {
                secret,
                host: "gamma".to_owned(),
                public_key: Vec::new(),
                proof: Vec::new(),
                unix_s: 0,
                cells: Vec::new(),
            };
            exchange.send(&serde_json::to_vec(&request).unwrap()).unwrap();
            exchange
        };
        let refused = |mut exchange: Exchange| {
            let answer = exchange.receive().unwrap();
            match serde_json::from_slice(&answer).unwrap() {
                JoinAnswer::Refused(why) => why,
                other => panic!("{other:?}"),
            }
        };
        for _ in 0..3 * REQUESTS_MAX {
            let why = refused(call([8; 16]));
            assert!(why.contains("not the one that was made here last"), "{why}");
        }
        assert!(requests.try_recv().is_err());
        // One more than the queue's capacity. All stay connected.
        let (send, answers) = mpsc::channel();
        for _ in 0..=REQUESTS_MAX {
            let (send, exchange) = (send.clone(), call([9; 16]));
            std::thread::spawn(move || send.send(refused(exchange)));
        }
        let why = answers.recv_timeout(LIMIT).unwrap();
        assert!(why.contains("other hosts join by this token"), "{why}");
        assert_eq!(requests.try_iter().count(), REQUESTS_MAX);
    }
}
