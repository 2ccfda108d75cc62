//! The system knowledge base (Multikernel, SOSP '09, section 4.9): facts on the machine, and Datalog rules
//! over them. `hostinfo` and `cell` supply the facts and query the base.
//!
//! - [`fact`]: prints and parses facts;
//! - [`base`]: the fact base: discovered, measured and asserted facts;
//! - [`rules`]: queries and rules in Datalog;
//! - [`machine`]: the machine that the facts describe; [`draw`] draws it;
//! - [`pairs`]: the CPU pairs to measure;
//! - [`route_costs`]: message costs between cells, from the best available facts;
//! - [`route`]: multicast trees by those costs.
//!
//! `docs/guide/knowledge.md` lists the facts.

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
