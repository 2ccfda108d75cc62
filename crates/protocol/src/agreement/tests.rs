//! Every order of what a few cells do, by model checking, and long stories by chance.

mod every_order;
mod stories;
mod world;
