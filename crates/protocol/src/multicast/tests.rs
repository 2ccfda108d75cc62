//! What links promise, by whichever way messages go: every order of small worlds by model checking, and long stories by
//! chance.

mod every_order;
mod plain;
mod stories;
mod world;
