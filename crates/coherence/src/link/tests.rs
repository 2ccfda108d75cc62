//! Every order of a few items over a way that loses, doubles and reorders; long stories by chance; windows; packets that make
//! no sense.

mod every_order;
mod plain;
mod stories;
