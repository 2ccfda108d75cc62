//! One vCPU, a few shards, channels that keep order, moves and refusals: every order of a small world (`interleavings`).

mod history;
mod interleavings;
mod world;
