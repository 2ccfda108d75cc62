//! One vCPU, a few shards, channels that keep order, moves and refusals: every order of a small world (`every_order`).

mod every_order;
mod history;
mod world;
