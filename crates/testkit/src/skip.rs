//! Reports visibly that a test was skipped, and why.

use std::io::Write;

/// Reports a skipped test: on standard error, and in the file that `scripts/test` prints at its end.
pub fn skipped(test: &str, why: &str) {
    let line = format!("SKIPPED {test}: {why}");
    eprintln!("{line}");
    if let Some(path) = std::env::var_os("ORDER_TIMEOUT_SKIPS") {
        let mut file =
            std::fs::OpenOptions::new().append(true).create(true).open(path).expect("the file that lists skips");
        writeln!(file, "{line}").expect("the file that lists skips");
    }
}
