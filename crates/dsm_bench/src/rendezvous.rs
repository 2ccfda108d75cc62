//! Rendezvous of the nodes: node 0 connects to the others and describes the memory, and each pair of nodes
//! makes its streams.
//!
//! Node 0 sends [`SessionOffer`] on a stream to each other node; that stream stays for commands. Then, of
//! each pair, the lower node connects to the higher one twice for each page server, and names the stream in
//! [`Hello`]. A node with all its streams replies [`Ready`]. Where nodes share memory, each link has pipes in
//! it beside its streams ([`memory`]).

mod memory;

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::time::Duration;

use dsm::{LANES_MAX, Link, PAGES_MAX, Shape};
use serde::{Deserialize, Serialize};

use self::memory::Memory;
use crate::stream::{self, Peer, RENDEZVOUS_TIMEOUT, Security, StreamError, StreamOptions};

/// Version of the messages between nodes.
const VERSION: u32 = 3;

/// First message of node 0 to another node.
#[derive(Debug, Serialize, Deserialize)]
struct SessionOffer {
    version: u32,
    /// Number that distinguishes the streams of two memories.
    session: u64,
    me: u16,
    shape: Shape,
    /// All nodes but node 0, in order.
    peers: Vec<Peer>,
    /// Whether the nodes share memory, which has the session's number.
    has_memory: bool,
}

/// First message on a stream between two other nodes, or from node 0.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    session: u64,
    from: u16,
    lane: u16,
    bulk: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct Ready;

#[derive(Debug, Serialize, Deserialize)]
enum FirstMessage {
    SessionOffer(SessionOffer),
    Hello(Hello),
}

/// Result of a rendezvous.
#[derive(Debug)]
pub struct Joined {
    /// This node's number.
    pub me: u16,
    /// Shape of the memory.
    pub shape: Shape,
    /// For each page server, the link to each node; none to itself.
    pub links: Vec<Vec<Option<Link>>>,
    /// At node 0: the stream to each other node. At another node: the stream from node 0.
    pub commands: Vec<OwnedFd>,
    /// Names of the nodes for users.
    pub names: Vec<String>,
}

/// Streams made so far, two for each page server and node.
type Streams = Vec<Vec<[Option<OwnedFd>; 2]>>;

/// Joins the session as node 0.
///
/// # Errors
/// If a node can't be reached, or is not what it should be.
pub fn coordinate(shape: Shape, peers: &[Peer], options: StreamOptions<'_>) -> Result<Joined, StreamError> {
    let session = fastrand::u64(..);
    let security = options.security;
    let memory = options.memory.map(|path| Memory::open(path, shape)).transpose()?;
    memory.as_ref().map_or(Ok(()), |memory| memory.begin(session))?;
    let mut commands = Vec::new();
    for (index, peer) in peers.iter().enumerate() {
        let stream = stream::connect(peer, security)?;
        let offer = SessionOffer {
            version: VERSION,
            session,
            me: index as u16 + 1,
            shape,
            peers: peers.to_vec(),
            has_memory: memory.is_some(),
        };
        let gone = |error| broken(&peer.address, "does not listen", &error);
        stream::send(&stream, &FirstMessage::SessionOffer(offer)).map_err(gone)?;
        commands.push(stream);
    }
    let mut streams = no_streams(shape);
    connect_to_higher(0, session, shape, peers, security, &mut streams)?;
    for (stream, peer) in commands.iter().zip(peers) {
        let Ready = stream::receive(stream, Some(RENDEZVOUS_TIMEOUT))
            .map_err(|error| broken(&peer.address, "did not find the other nodes", &error))?;
    }
    joined(0, shape, peers, streams, memory.as_ref(), commands)
}

/// Joins the session as another node, once node 0 connects.
///
/// # Errors
/// If a node can't be reached, or is not what it should be.
pub fn join(listener: &TcpListener, options: StreamOptions<'_>) -> Result<Joined, StreamError> {
    let security = options.security;
    // Streams of a session may arrive before its offer.
    let mut hellos = Vec::new();
    let (offer, order) = loop {
        match first(listener, security, None)? {
            Some((FirstMessage::SessionOffer(offer), stream)) => break (offer, stream),
            Some((FirstMessage::Hello(hello), stream)) => hellos.push((hello, stream)),
            None => {}
        }
    };
    let SessionOffer {
        version,
        session,
        me,
        shape,
        peers,
        has_memory,
    } = offer;
    check(version, me, shape, &peers)?;
    let memory = match (has_memory, options.memory) {
        (true, Some(path)) => Some(Memory::open(path, shape)?),
        (false, None) => None,
        _ => {
            let why = "names other shared memory than this node; name it on all nodes, or on none";
            return Err(StreamError::Broken("node 0".into(), why.into()));
        }
    };
    memory.as_ref().map_or(Ok(()), |memory| memory.check(session))?;
    let mut streams = no_streams(shape);
    connect_to_higher(me, session, shape, &peers, security, &mut streams)?;
    let expected = usize::from(me) * usize::from(shape.lanes) * 2;
    let mut taken = 0;
    while taken < expected {
        let (hello, stream) = match hellos.pop() {
            Some(one) => one,
            None => match first(listener, security, Some(RENDEZVOUS_TIMEOUT))? {
                Some((FirstMessage::Hello(hello), stream)) => (hello, stream),
                _ => continue,
            },
        };
        let lane = streams.get_mut(usize::from(hello.lane));
        let place = lane.and_then(|lane| lane.get_mut(usize::from(hello.from)));
        match place.map(|place| &mut place[usize::from(hello.bulk)]) {
            Some(place @ None) if hello.session == session && hello.from < me => {
                *place = Some(stream);
                taken += 1;
            }
            _ => {}
        }
    }
    stream::send(&order, &Ready).map_err(|error| broken("node 0", "is gone", &error))?;
    joined(me, shape, &peers, streams, memory.as_ref(), vec![order])
}

/// Accepts the next stream and receives its first message. `None` if the stream is not of a session; the next
/// one may be.
fn first(
    listener: &TcpListener,
    security: &Security,
    limit: Option<Duration>,
) -> Result<Option<(FirstMessage, OwnedFd)>, StreamError> {
    let stream = match stream::accept(listener, security, limit) {
        Err(StreamError::Tls(_)) => return Ok(None),
        stream => stream?,
    };
    let first = stream::receive(&stream, Some(RENDEZVOUS_TIMEOUT));
    Ok(first.ok().map(|first| (first, stream)))
}

/// Checks an offer.
fn check(version: u32, me: u16, shape: Shape, peers: &[Peer]) -> Result<(), StreamError> {
    let wrong = |why: String| Err(StreamError::Broken("node 0".into(), why));
    if version != VERSION {
        return wrong(format!(
            "speaks version {version} and this one {VERSION}; run the same program everywhere"
        ));
    }
    let nodes = usize::from(shape.nodes);
    if nodes != peers.len() + 1
        || me == 0
        || usize::from(me) >= nodes
        || shape.lanes == 0
        || shape.lanes > LANES_MAX
        || shape.pages > PAGES_MAX
    {
        return wrong(format!("sent an impossible offer: node {me} of {shape:?}"));
    }
    Ok(())
}

fn no_streams(shape: Shape) -> Streams {
    let lane = || (0..shape.nodes).map(|_| [None, None]).collect();
    (0..shape.lanes).map(|_| lane()).collect()
}

fn connect_to_higher(
    me: u16,
    session: u64,
    shape: Shape,
    peers: &[Peer],
    security: &Security,
    streams: &mut Streams,
) -> Result<(), StreamError> {
    for node in me + 1..shape.nodes {
        let peer = &peers[usize::from(node) - 1];
        for (lane, streams) in streams.iter_mut().enumerate() {
            for bulk in [false, true] {
                let stream = stream::connect(peer, security)?;
                let hello = Hello {
                    session,
                    from: me,
                    lane: lane as u16,
                    bulk,
                };
                stream::send(&stream, &FirstMessage::Hello(hello))
                    .map_err(|error| broken(&peer.address, "does not listen", &error))?;
                streams[usize::from(node)][usize::from(bulk)] = Some(stream);
            }
        }
    }
    Ok(())
}

fn joined(
    me: u16,
    shape: Shape,
    peers: &[Peer],
    streams: Streams,
    memory: Option<&Memory<'_>>,
    commands: Vec<OwnedFd>,
) -> Result<Joined, StreamError> {
    let mut names = vec!["node 0".to_owned()];
    for (index, peer) in peers.iter().enumerate() {
        names.push(format!("node {} ({})", index + 1, peer.address));
    }
    let mut links = Vec::new();
    for (number, lane) in streams.into_iter().enumerate() {
        let mut row = Vec::new();
        for (node, pair) in (0..).zip(lane) {
            row.push(match pair {
                [Some(control), Some(bulk)] => {
                    let pipes = memory.map(|memory| memory.of(me, node, number)).transpose()?;
                    Some(Link::new([control, bulk], pipes))
                }
                _ => None,
            });
        }
        links.push(row);
    }
    Ok(Joined {
        me,
        shape,
        links,
        commands,
        names,
    })
}

fn broken(who: &str, what: &str, error: &std::io::Error) -> StreamError {
    StreamError::Broken(who.to_owned(), format!("{what} ({error})"))
}
