//! A guest, played by a second stack, speaks through a translator with sockets of this process.

mod datagrams;
mod dns;
mod forwards;
mod hostile;
mod many;
mod streams;
mod world;
