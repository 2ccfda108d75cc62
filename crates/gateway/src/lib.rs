//! The process of a user's subnet on one host, the *gateway*: one thread, one epoll.
//!
//! | module | holds |
//! | --- | --- |
//! | [`server`](self) | the event loop: sockets of cards, networks, the way out |
//! | `card` | the socket of a card, with frames that wait for room |
//! | `client` | a connection of a monitor, a cell or a command |
//! | `dns_stream` | connections of guests for DNS over TCP |
//! | `joining` | admission of cards to networks |
//! | `path` | the outputs of networks and of the translator, for each frame |
//! | `capture` | frames in the format of pcap, for commands |
//! | `report` | networks, cards and counters, for commands |
//!
//! The decisions are in [`subnet`]: a frame of a guest goes to a [`subnet::network::Network`], and packets to
//! the outside to the one [`subnet::nat::Nat`]. The protocol of clients is [`registry::subnet`]. The gateway
//! opens no files: clients send it sockets, and the facts of the host.
//!
//! It ends some seconds after the last card has left. Its starter has bound its socket, so a client that
//! connects while it ends sees the connection end, and starts another.

mod capture;
mod card;
mod client;
mod dns_stream;
mod joining;
mod path;
mod report;
mod server;

#[cfg(fuzzing)]
pub use self::dns_stream::fuzzing;
pub use self::server::{Gateway, IDLE_LIMIT};
