//! Model checking of one vCPU and a few shards, with ordered channels, moves and refusals: all
//! `interleavings` of small worlds.

mod history;
mod interleavings;
mod world;
