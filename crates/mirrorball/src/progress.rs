//! Progress display during long operations.

use std::time::Duration;

use indicatif::ProgressBar;

/// A spinner on standard error, where that is a terminal, until it is finished.
pub fn spinner(what: &'static str) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(what);
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}
