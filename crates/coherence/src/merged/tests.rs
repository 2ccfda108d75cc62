//! Merged pages: entries, twins; and a small guest over nodes in every order.

mod entries;
mod every_order;
mod exchange;
mod guest;
mod machine;
mod plans;
mod stories;
mod twins;
mod wire;
