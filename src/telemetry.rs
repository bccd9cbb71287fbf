//! What the worker says while it runs: one subscriber, to standard error, for a person or as JSON.
//!
//! Field names are the same everywhere: `order_id`, `deadline`, `lateness_ms`, `closed_by`, `reason`, `session`. No
//! filter makes it show a secret.

use std::io::IsTerminal;

use tracing::{Level, Metadata};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

use crate::config::{LogFormat, LogSettings};

/// Installs the subscriber for this process. Call once, from `main`.
///
/// # Panics
/// If the filter does not parse, which `Settings::validate` refuses.
pub fn install(settings: &LogSettings) {
    let wanted = EnvFilter::try_new(&settings.filter).expect("validated settings have a filter that parses");
    // Colours are for a terminal; in a file they are noise.
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    let lines = match settings.format {
        LogFormat::Human => lines.with_target(false).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    // Filters of the whole subscriber, not of this layer: with the latter an event is lost on a thread where somebody has
    // just asked whether another would be heard, as sqlx does before it logs a statement.
    tracing_subscriber::registry().with(wanted).with(filter_fn(shows_no_secret)).with(lines).init();
}

/// At TRACE the AMQP client prints addresses and frames, and with them its password; what others print there, or will
/// in their next version, nobody promises. So only our own code is heard at that level.
fn shows_no_secret(metadata: &Metadata<'_>) -> bool {
    *metadata.level() != Level::TRACE || metadata.target().starts_with("order_timeout")
}
