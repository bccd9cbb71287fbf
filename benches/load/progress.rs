//! Says on standard error what a scenario is doing, because most of them run for minutes before they print.
//!
//! Standard output stays the scenario's own: a table, or one line of JSON.

use std::sync::LazyLock;
use std::time::Instant;

static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Prints one line with the time since the first one.
pub fn say(what: impl std::fmt::Display) {
    eprintln!("load: {:>4} s: {what}", BEGAN.elapsed().as_secs());
}
