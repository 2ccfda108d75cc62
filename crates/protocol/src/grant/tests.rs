//! Every order of what a few cells do, by model checking, long stories by chance, and what single steps must
//! be like.

mod every_order;
mod steps;
mod stories;
mod world;
