//! Every order of what a few processors do, by model checking; long stories by chance; the messages of each kind of fault; and
//! messages that make no sense.

mod every_order;
mod hostile;
mod promises;
mod steps;
mod stories;
mod world;
