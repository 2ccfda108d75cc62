//! Exact output for each kind of error.

mod cards;
mod disk_limits;
mod examples;
mod flags;
mod host;
mod hostile;
mod kernel;
mod limits;
mod memory_nodes;
mod refused;
mod span;
mod warm;

use miette::{GraphicalReportHandler, GraphicalTheme};

use crate::{ConfigError, parse};

/// Rendered error, without colours.
fn shown(error: &ConfigError) -> String {
    let handler = GraphicalReportHandler::new_themed(GraphicalTheme::unicode_nocolor()).with_width(110);
    let mut shown = String::from("\n");
    handler.render_report(&mut shown, error).unwrap();
    shown
}

/// Rendered error of a refused VM file.
fn refused(text: &str) -> String {
    shown(&parse("vm.toml", text).unwrap_err())
}
