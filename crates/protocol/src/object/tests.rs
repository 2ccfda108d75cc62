//! One object, a few cells, a network that loses, doubles and reorders, moves and a death: every order of a small world
//! (`every_order`), and long stories in larger ones (`stories`).

mod every_order;
mod stories;
mod world;
