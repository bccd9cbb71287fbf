//! Command line → settings → run → exit code. Errors are one sentence on standard error: 2 for usage and settings,
//! 1 for every other failure.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::ErrorKind;
use order_timeout::cli::{Cli, CommandOutcome, is_wrong_usage};
use order_timeout::observe::logging;
use order_timeout::sanitize;

const WRONG_SETTINGS: u8 = 2;
const FAILED: u8 = 1;

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let cli = match Cli::read(&arguments) {
        Ok(cli) => cli,
        Err(fault) => return wrong_usage(&fault),
    };
    let settings = match cli.load_settings() {
        Ok(settings) => settings,
        Err(fault) => return fail(&fault, WRONG_SETTINGS),
    };
    // One thread for all tasks, besides the AMQP client's own: the work is mostly waiting, and every alarm that passes
    // from one thread to another wakes a sleeping thread (docs/decisions/0013-one-thread.md).
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("the runtime cannot start: {error}"), FAILED),
    };
    let outcome = runtime.block_on(cli.command.run(&cli.settings, settings));
    // Dropping it would wait for running blocking tasks, such as the resolution of a host name.
    runtime.shutdown_background();
    match outcome {
        Ok(outcome) => print(&outcome),
        Err(error) => fail(&format!("{error:#}"), if is_wrong_usage(&error) { WRONG_SETTINGS } else { FAILED }),
    }
}

/// Shows clap's text, which also carries help and version.
fn wrong_usage(fault: &clap::Error) -> ExitCode {
    match shown_instead(fault) {
        Some(text) => drop(write!(std::io::stderr(), "{text}")),
        // Unchanged, in colour if the terminal supports it.
        None => fault.exit(),
    }
    ExitCode::from(WRONG_SETTINGS)
}

/// What to show instead of clap's text: without addresses, hidden characters escaped, and with a hint on how to give a
/// setting after an unknown option. `None` if that is the same text.
fn shown_instead(fault: &clap::Error) -> Option<String> {
    let text = fault.render().to_string();
    let without = without_addresses(text.clone(), std::env::args_os()).unwrap_or_else(|| text.clone());
    let mut shown = sanitize::visible(&without).into_owned();
    if fault.kind() == ErrorKind::UnknownArgument {
        shown.push_str(SETTING_HINT);
    }
    (shown != text).then_some(shown)
}

const SETTING_HINT: &str =
    "\nA setting is given by its name: --set http.listen=127.0.0.1:9395 (config/default.toml names them all).\n";

/// The text without the arguments that are addresses and may contain a password; `None` if it has none.
fn without_addresses(mut text: String, arguments: impl Iterator<Item = OsString>) -> Option<String> {
    let mut found = false;
    for argument in arguments {
        let argument = argument.to_string_lossy();
        // clap may show an option and its value separately.
        for part in [Some(&*argument), argument.split_once('=').map(|(_, value)| value)].into_iter().flatten() {
            let part = part.trim_start_matches('-');
            if part.contains("://") && text.contains(part) {
                text = text.replace(part, "…");
                found = true;
            }
        }
    }
    found.then_some(text)
}

fn print(outcome: &CommandOutcome) -> ExitCode {
    for remark in outcome.remarks() {
        // Standard error may be closed; the command has run all the same.
        let _ = writeln!(std::io::stderr(), "order-timeout: {remark}");
    }
    match std::io::stdout().lock().write_all(outcome.text().as_bytes()) {
        // A reader that stops early, such as `head`, is not a failure.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            fail(&format!("the command has run, but its output cannot be written to standard output: {error}"), FAILED)
        }
        _ => ExitCode::from(outcome.code),
    }
}

fn fail(why: &dyn std::fmt::Display, code: u8) -> ExitCode {
    logging::exit_even_if_unread(code);
    // Standard error may be closed; the exit code is returned all the same.
    let _ = writeln!(std::io::stderr(), "order-timeout: {}", sanitize::one_line(&why.to_string()));
    ExitCode::from(code)
}
