//! The subcommands.

pub mod image;
pub mod lab;
pub mod run;
