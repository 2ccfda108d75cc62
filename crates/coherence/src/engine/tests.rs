//! Tests of the engine: model checking of a few processors, random long runs, the messages of each kind of
//! fault, and hostile messages.

mod every_order;
mod hostile;
mod promises;
mod steps;
mod stories;
mod world;
