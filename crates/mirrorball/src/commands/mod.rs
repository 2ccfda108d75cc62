//! Subcommands, one file each.

pub mod check;
pub mod clients;
pub mod clone;
pub mod cluster;
pub mod copy;
pub mod disk;
pub mod dsm;
pub mod events;
pub mod execution_site;
pub mod flags;
pub mod generate;
pub mod heat;
mod host_file;
pub mod hosts;
pub mod image;
pub mod knowledge;
pub mod lab;
pub mod list;
pub mod mem;
pub mod net;
pub mod run;
pub mod select;
mod service_manager;
pub mod top;
pub mod topology;
pub mod update;
pub mod vm;
