//! The guarantees of links, for all routes: model checking of small configurations, and long random runs.

mod every_order;
mod plain;
mod stories;
mod world;
