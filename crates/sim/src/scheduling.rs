//! CPUs, time slices, run queues and vCPUs in virtual time.
//!
//! The drivers are those of the product (`policy::cpu::driver`). The machine around them is simulated: their
//! published state and its staleness, messages, switches, moves, and the programs of the guests. A run is
//! a function of its seed.
//!
//! - [`costs`]: times of the simulated machine;
//! - [`published`]: the drivers' published state, now and at the last ticks;
//! - [`program`]: programs of guests;
//! - [`report`]: tables of both;
//! - [`round_robin`]: a plain scheduler to compare with;
//! - [`world`]: the events, and the rules that hold at each tick;
//! - [`experiment`]: gangs beside other schedulers;
//! - [`sleepers`]: threads that sleep beside threads that spin;
//! - [`spanning`]: windows of VMs that span cells, beside other schedulers;
//! - [`spanning_pair`]: two of them on two CPUs, beside other schedulers and with orders that are lost;
//! - [`balancing`]: the real time that balancing takes.

pub mod balancing;
pub mod costs;
pub mod experiment;
pub mod program;
pub mod published;
pub mod report;
pub mod round_robin;
pub mod sleepers;
pub mod spanning;
pub mod spanning_pair;
pub mod world;

#[cfg(test)]
mod cells;
#[cfg(test)]
mod sleepers_tests;
#[cfg(test)]
mod spanning_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod window_stories;
