//! What is shown for each kind of error, to the letter.

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

/// What a person sees, without colours.
fn shown(error: &ConfigError) -> String {
    let handler = GraphicalReportHandler::new_themed(GraphicalTheme::unicode_nocolor()).with_width(110);
    let mut shown = String::from("\n");
    handler.render_report(&mut shown, error).unwrap();
    shown
}

/// What a person sees for a VM file that is refused.
fn refused(text: &str) -> String {
    shown(&parse("vm.toml", text).unwrap_err())
}

/// Of a VM file that is refused: what is wrong, what of the text is pointed at, and the help. How they are drawn is the same for all.
fn fault_of(text: &str) -> [String; 3] {
    let error = parse("vm.toml", text).unwrap_err();
    let span = error.span.expect("a place in the text");
    let place = &text[span.offset()..][..span.len()];
    [error.message, place.to_owned(), error.help.expect("help")]
}
