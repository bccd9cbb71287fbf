//! Command line → settings → run → exit code. Errors are one sentence on standard error: 2 for usage and settings,
//! 1 for everything that failed.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::ErrorKind;
use order_timeout::cli::{Cli, CommandOutcome};
use order_timeout::{logging, sanitize};

const WRONG_SETTINGS: u8 = 2;
const FAILED: u8 = 1;

/// What std sizes the stack of each further thread by.
const STACK_SETTING: &str = "RUST_MIN_STACK";
/// Address space, not memory, until it is used. The AMQP client reads tables in tables by recursion, on a thread of its
/// own; a frame of 128 KiB holds 18 000 of them, one within the other, which took less than this in a debug build.
const STACK_BYTES: &str = "268435456";

fn main() -> ExitCode {
    if std::env::var_os(STACK_SETTING).is_none() {
        // SAFETY: no other thread runs yet that could read the environment meanwhile.
        unsafe { std::env::set_var(STACK_SETTING, STACK_BYTES) };
    }
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let cli = match Cli::read(&arguments) {
        Ok(cli) => cli,
        Err(fault) => return wrong_usage(&fault),
    };
    let settings = match cli.load_settings() {
        Ok(settings) => settings,
        Err(fault) => return fail(&fault, WRONG_SETTINGS),
    };
    // One thread for all tasks, beside the AMQP client's own: there is far less to compute than to wait for, and every
    // alarm that passes from one thread to another wakes a sleeper (docs/DECISIONS.md).
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("the runtime cannot start: {error}"), FAILED),
    };
    let outcome = runtime.block_on(cli.command.run(&cli.settings, settings));
    // Dropped, it would wait for whatever still runs, such as the resolution of a host's name.
    runtime.shutdown_background();
    match outcome {
        Ok(answer) => say(&answer),
        Err(error) => fail(&error, FAILED),
    }
}

/// What clap has to say, which is also how help and version are asked for.
fn wrong_usage(fault: &clap::Error) -> ExitCode {
    match shown_instead(fault) {
        Some(text) => drop(write!(std::io::stderr(), "{text}")),
        // As it is, in colour where that is wanted.
        None => fault.exit(),
    }
    ExitCode::from(WRONG_SETTINGS)
}

/// What to show in place of clap's text: without addresses, every character visible, and where an option was tried that
/// is none, the way to give a setting. `None` if that is the same text.
fn shown_instead(fault: &clap::Error) -> Option<String> {
    let text = fault.render().to_string();
    let without = without_addresses(text.clone(), std::env::args_os()).unwrap_or_else(|| text.clone());
    let mut shown = sanitize::visible(&without).into_owned();
    if fault.kind() == ErrorKind::UnknownArgument {
        shown.push_str(A_SETTING);
    }
    (shown != text).then_some(shown)
}

const A_SETTING: &str =
    "\nA setting is given by its name: --set http.listen=127.0.0.1:9395 (config/default.toml names them all).\n";

/// The text without those of the arguments that are addresses and may hold a password; `None` if it has none.
fn without_addresses(mut text: String, arguments: impl Iterator<Item = OsString>) -> Option<String> {
    let mut found = false;
    for argument in arguments {
        let argument = argument.to_string_lossy();
        // clap may show an option and its value apart.
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

fn say(answer: &CommandOutcome) -> ExitCode {
    for remark in answer.remarks() {
        // Standard error may be gone; what was done is done.
        let _ = writeln!(std::io::stderr(), "order-timeout: {remark}");
    }
    match std::io::stdout().lock().write_all(answer.text().as_bytes()) {
        // A reader that has seen enough, such as `head`, is no failure.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            fail(&format!("the command has run, but its answer cannot be written to standard output: {error}"), FAILED)
        }
        _ => ExitCode::from(answer.code),
    }
}

fn fail(why: &dyn std::fmt::Display, code: u8) -> ExitCode {
    logging::end_even_if_nobody_reads(code);
    // Standard error may be gone; the exit code is not.
    let _ = writeln!(std::io::stderr(), "order-timeout: {}", sanitize::one_line(&why.to_string()));
    ExitCode::from(code)
}
