//! Command line → settings → run → exit code. Errors are one sentence on standard error: 2 for usage and settings,
//! 1 for everything that failed.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use clap::Parser;
use order_timeout::cli::{Answer, Cli};

const WRONG_SETTINGS: u8 = 2;
const FAILED: u8 = 1;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let settings = match cli.settings.load() {
        Ok(settings) => settings,
        Err(fault) => return fail(&fault, WRONG_SETTINGS),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("the runtime cannot start: {error}"), FAILED),
    };
    match runtime.block_on(cli.command.run(settings)) {
        Ok(answer) => say(&answer),
        Err(error) => fail(&error, FAILED),
    }
}

fn say(answer: &Answer) -> ExitCode {
    match std::io::stdout().lock().write_all(answer.text.as_bytes()) {
        // A reader that has seen enough, such as `head`, is no failure.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => fail(&format!("standard output: {error}"), FAILED),
        _ => ExitCode::from(answer.code),
    }
}

fn fail(why: &dyn std::fmt::Display, code: u8) -> ExitCode {
    eprintln!("order-timeout: {why}");
    ExitCode::from(code)
}
