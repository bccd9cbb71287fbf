//! `order-timeout completions` and `order-timeout man`: prints what shells and `man` know of the command line.

use std::io::Write;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::cli::{Cli, CommandOutcome};

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell that will read the script
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

/// # Errors
/// None at present; the shape is that of every command.
pub fn completions(args: &CompletionsArgs) -> anyhow::Result<CommandOutcome> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "order-timeout", &mut script);
    let mut script = String::from_utf8(script)?;
    if args.shell == Shell::Bash {
        // clap_complete 4.6.11 writes a program's name with a hyphen in two ways, so that bash completes its first word only.
        script = script.replace("order__subcmd__timeout", "order__timeout");
    }
    Ok(CommandOutcome::verbatim(script))
}

/// One page with all subcommands, in the format of `man`.
///
/// # Errors
/// If the page cannot be rendered.
pub fn man() -> anyhow::Result<CommandOutcome> {
    let command = Cli::command();
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    for subcommand in command.get_subcommands() {
        writeln!(page, ".SH \"COMMAND {}\"", subcommand.get_name())?;
        let man = clap_mangen::Man::new(subcommand.clone().disable_help_flag(true));
        man.render_description_section(&mut page)?;
        man.render_options_section(&mut page)?;
    }
    Ok(CommandOutcome::verbatim(String::from_utf8(page)?))
}
