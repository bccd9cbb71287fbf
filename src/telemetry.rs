//! What the worker says while it runs: one subscriber, to standard error, for a person or as JSON.
//!
//! Field names are the same everywhere: `order_id`, `deadline`, `lateness_ms`, `closed_by`, `reason`, `session`.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, LogSettings};

/// Installs the subscriber for this process. Call once, from `main`.
///
/// # Panics
/// If the filter does not parse, which `Settings::validate` refuses.
pub fn install(settings: &LogSettings) {
    let filter = EnvFilter::try_new(&settings.filter).expect("validated settings have a filter that parses");
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Colours are for a terminal; in a file they are noise.
    let builder = builder.with_ansi(std::io::stderr().is_terminal());
    match settings.format {
        LogFormat::Human => builder.with_target(false).init(),
        LogFormat::Json => builder.json().init(),
    }
}
