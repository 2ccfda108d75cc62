//! The table over multicast trees whose relays gather votes and receipts: every order of small worlds, and
//! long random runs.

mod every_order;
mod stories;
mod world;
