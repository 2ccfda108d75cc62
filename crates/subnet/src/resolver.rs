//! Forwards DNS queries of guests to the host's name servers.
//!
//! A query goes to a server by UDP from a socket of its own, so that the kernel drops replies of others. A
//! reply counts only with the query's number and question. After a truncated reply, the query is sent again
//! by TCP. A server that does not reply in time, or that reports its failure, is followed by the next one.
//!
//! An event loop watches the resolver's descriptor ([`AsFd`]), waits at most until [`Resolver::deadline`],
//! and then calls [`Resolver::turn`], which reports finished queries. The caller reads `/etc/resolv.conf`,
//! and passes its text to [`Resolver::set_servers`] when it has changed.

mod message;

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use self::message::{Relation, is_query, relation, servers};
use crate::host_socket::{self, Moved};

/// Unanswered queries, of all sources and of one. Each has a descriptor.
const QUERIES_MAX: usize = 256;
const QUERIES_PER_SOURCE_MAX: usize = 64;
/// Longest message.
const MESSAGE_BYTES_MAX: usize = 65_535;
/// Bytes before a message on a stream: its length.
const LENGTH_BYTES: usize = 2;
/// Time after which the query goes to the next server.
const REPLY_LIMIT: Duration = Duration::from_secs(2);
/// Number of requests to each server.
const ROUNDS: usize = 2;
/// Events in one turn.
const EVENTS_MAX: usize = 64;
/// Foreign messages that are read from a socket in one turn.
const MESSAGES_MAX: usize = 16;

/// Number of a query, chosen by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueryId(pub u64);

/// Reason why a query is not forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryRefusal {
    /// It is no query with one question.
    Malformed,
    /// Too many queries have no reply yet.
    Busy,
    /// The host has no name servers that this process reaches.
    NoServer,
}

/// Way to a server.
#[derive(Debug)]
enum Path {
    Datagrams(UdpSocket),
    Stream {
        stream: OwnedFd,
        /// The query with its length, and how many bytes of it were sent.
        request: Vec<u8>,
        sent: usize,
        /// The received bytes.
        reply: Vec<u8>,
    },
}

/// A query without a reply yet.
#[derive(Debug)]
struct Query {
    id: QueryId,
    source: u64,
    message: Vec<u8>,
    /// Servers to ask, the current one first.
    servers: Vec<SocketAddr>,
    path: Path,
    /// A reply that is passed on if no better one arrives.
    fallback: Option<Vec<u8>>,
    deadline: Instant,
}

/// Progress of a query.
enum Progress {
    /// It waits.
    Waiting,
    /// The server is followed by the next one.
    Next,
    /// The reply has more bytes than a datagram.
    Longer,
    /// This is the reply.
    Reply(Vec<u8>),
}

/// A resolver.
#[derive(Debug)]
pub struct Resolver {
    epoll: Epoll,
    servers: Vec<SocketAddr>,
    queries: HashMap<u64, Query>,
    next: u64,
    buffer: Vec<u8>,
}

impl Resolver {
    /// Creates a resolver with the name servers of a `resolv.conf`.
    ///
    /// # Errors
    /// Fails if the kernel creates no epoll descriptor.
    pub fn new(resolv_conf: &str) -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            servers: servers(resolv_conf),
            queries: HashMap::new(),
            next: 0,
            buffer: vec![0; MESSAGE_BYTES_MAX],
        })
    }

    /// Changes the name servers to those of a `resolv.conf`. Queries without a reply stay with the former
    /// ones.
    pub fn set_servers(&mut self, resolv_conf: &str) {
        self.servers = servers(resolv_conf);
    }

    /// Forwards a query, a DNS message. `source` is the card or network that asks: its queries without a
    /// reply are bounded.
    ///
    /// # Errors
    /// Fails if it cannot be forwarded; [`Resolver::turn`] does not report it then.
    pub fn ask(&mut self, id: QueryId, source: u64, query: &[u8], now: Instant) -> Result<(), QueryRefusal> {
        if query.len() > MESSAGE_BYTES_MAX || !is_query(query) {
            return Err(QueryRefusal::Malformed);
        }
        let of_source = self.queries.values().filter(|query| query.source == source);
        if self.queries.len() >= QUERIES_MAX || of_source.count() >= QUERIES_PER_SOURCE_MAX {
            return Err(QueryRefusal::Busy);
        }
        self.next += 1;
        let token = self.next;
        let rounds = std::iter::repeat_n(&self.servers, ROUNDS);
        let mut servers: Vec<_> = rounds.flatten().copied().collect();
        let path = self.ask_first(token, &mut servers, query);
        let query = Query {
            id,
            source,
            message: query.to_vec(),
            servers,
            path: path.ok_or(QueryRefusal::NoServer)?,
            fallback: None,
            deadline: now + REPLY_LIMIT,
        };
        self.queries.insert(token, query);
        Ok(())
    }

    /// Sends a query to the first server that is reached, and removes the others before it.
    fn ask_first(&self, token: u64, servers: &mut Vec<SocketAddr>, query: &[u8]) -> Option<Path> {
        while let Some(server) = servers.first() {
            let opened = host_socket::connect_udp(*server);
            let watched = opened.and_then(|socket| {
                let event = EpollEvent::new(EpollFlags::EPOLLIN, token);
                self.epoll.add(&socket, event).map(|()| socket)
            });
            if let Ok(socket) = watched
                && socket.send(query).is_ok()
            {
                return Some(Path::Datagrams(socket));
            }
            servers.remove(0);
        }
        None
    }

    /// Begins to ask a server by TCP.
    fn ask_by_stream(&self, token: u64, server: SocketAddr, query: &[u8]) -> nix::Result<Path> {
        let stream = host_socket::connect_tcp(server)?;
        let events = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
        self.epoll.add(&stream, EpollEvent::new(events, token))?;
        let length = u16::try_from(query.len()).unwrap_or(u16::MAX);
        Ok(Path::Stream {
            stream,
            request: [&length.to_be_bytes(), query].concat(),
            sent: 0,
            reply: Vec::new(),
        })
    }

    /// Handles events, and passes each finished query to `done`: with its reply, or with none if no server
    /// has replied. The caller replies with the code SERVFAIL then. A reply may exceed 512 bytes.
    pub fn turn(&mut self, now: Instant, done: &mut dyn FnMut(QueryId, Option<&[u8]>)) {
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        // The wait does not block. A failure to wait is one to wait again.
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            let token = event.data();
            if let Some(query) = self.queries.get_mut(&token) {
                let progress = query.receive(&mut self.buffer);
                self.advance(token, progress, now, done);
            }
        }
        let late = self.queries.iter().filter(|(_, query)| query.deadline <= now);
        let late: Vec<_> = late.map(|(token, _)| *token).collect();
        for token in late {
            self.advance(token, Progress::Next, now, done);
        }
    }

    fn advance(
        &mut self,
        token: u64,
        progress: Progress,
        now: Instant,
        done: &mut dyn FnMut(QueryId, Option<&[u8]>),
    ) {
        let Some(mut query) = self.queries.remove(&token) else {
            return;
        };
        let path = match progress {
            Progress::Waiting => {
                self.queries.insert(token, query);
                return;
            }
            Progress::Reply(reply) => {
                done(query.id, Some(&reply));
                return;
            }
            Progress::Longer => {
                let path = self.ask_by_stream(token, query.servers[0], &query.message);
                path.ok().or_else(|| self.ask_next(token, &mut query))
            }
            Progress::Next => self.ask_next(token, &mut query),
        };
        match path {
            Some(path) => {
                query.path = path;
                query.deadline = now + REPLY_LIMIT;
                self.queries.insert(token, query);
            }
            None => done(query.id, query.fallback.as_deref()),
        }
    }

    fn ask_next(&self, token: u64, query: &mut Query) -> Option<Path> {
        query.servers.remove(0);
        self.ask_first(token, &mut query.servers, &query.message)
    }

    /// Returns the time at which [`Resolver::turn`] must be called, without events.
    pub fn deadline(&self) -> Option<Instant> {
        self.queries.values().map(|query| query.deadline).min()
    }
}

impl Query {
    /// Receives what has arrived.
    fn receive(&mut self, buffer: &mut [u8]) -> Progress {
        match &mut self.path {
            Path::Datagrams(socket) => {
                for _ in 0..MESSAGES_MAX {
                    match socket.recv(buffer) {
                        Ok(bytes) => match relation(&self.message, &buffer[..bytes]) {
                            Relation::Foreign => {}
                            Relation::Reply => return Progress::Reply(buffer[..bytes].to_vec()),
                            Relation::Truncated => {
                                self.fallback = Some(buffer[..bytes].to_vec());
                                return Progress::Longer;
                            }
                            Relation::Failure => {
                                self.fallback.get_or_insert_with(|| buffer[..bytes].to_vec());
                                return Progress::Next;
                            }
                        },
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                        // The server has no program at the port, or is not reached.
                        Err(_) => return Progress::Next,
                    }
                }
                Progress::Waiting
            }
            Path::Stream {
                stream,
                request,
                sent,
                reply,
            } => {
                while *sent < request.len() {
                    match host_socket::write(stream, &request[*sent..]) {
                        Moved::Bytes(bytes) => *sent += bytes,
                        Moved::NotReady => break,
                        Moved::End | Moved::Failed => return Progress::Next,
                    }
                }
                receive_stream(&self.message, stream, reply, buffer)
            }
        }
    }
}

/// Receives a reply from a stream.
fn receive_stream(query: &[u8], stream: &OwnedFd, reply: &mut Vec<u8>, buffer: &mut [u8]) -> Progress {
    loop {
        match host_socket::read(stream, buffer) {
            Moved::Bytes(bytes) => reply.extend(&buffer[..bytes]),
            // A stream that connects is not ready either.
            Moved::NotReady => return Progress::Waiting,
            Moved::End | Moved::Failed => return Progress::Next,
        }
        let Some((length, message)) = reply.split_first_chunk::<LENGTH_BYTES>() else {
            continue;
        };
        if let Some(message) = message.get(..usize::from(u16::from_be_bytes(*length))) {
            return match relation(query, message) {
                Relation::Reply | Relation::Failure => Progress::Reply(message.to_vec()),
                Relation::Foreign | Relation::Truncated => Progress::Next,
            };
        }
    }
}

impl AsFd for Resolver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

#[cfg(test)]
mod tests;
