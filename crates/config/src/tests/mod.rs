//! Exact output for each kind of error.

mod cards;
mod devices;
mod examples;
mod flags;
mod host;
mod hostile;
mod kernel;
mod limits;
mod machine;
mod memory_nodes;
mod span;
mod text;

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

/// Message, marked text and help of a refused VM file. All errors are rendered alike.
fn fault_of(text: &str) -> [String; 3] {
    let error = parse("vm.toml", text).unwrap_err();
    let span = error.span.expect("a place in the text");
    let place = &text[span.offset()..][..span.len()];
    [error.message, place.to_owned(), error.help.expect("help")]
}
