//! What is known of the machine (Multikernel, SOSP '09, section 4.9): facts, and rules over them. Others find the facts out
//! (`cell`), and ask.
//!
//! - [`fact`]: facts, as text and back;
//! - [`base`]: those that are known, from what was discovered, measured and asserted;
//! - [`rules`]: questions and rules in Datalog;
//! - [`machine`]: the machine that the facts describe; [`draw`] draws it;
//! - [`pairs`]: which CPUs to measure between;
//! - [`route_costs`]: what messages between cells cost, by the best that is known;
//! - [`route`]: multicast trees by those costs.
//!
//! The page `docs/guide/knowledge.md` lists the facts that there are.

pub mod base;
pub mod draw;
pub mod fact;
pub mod machine;
pub mod pairs;
pub mod route;
pub mod route_costs;
pub mod rules;
mod shape;

pub use base::Base;
pub use fact::{Fact, Term};
pub use machine::Machine;
pub use route_costs::RouteCosts;
