//! `order-timeout pause` and `order-timeout resume`: no order is closed in between, by any worker.

use clap::Args;
use order_timeout_core::kind::Kind;

use crate::cli::operator::system_user;
use crate::cli::{CommandOutcome, connect};
use crate::config::Settings;
use crate::operations::name_or_reason;
use crate::operations::pause_closing::{self, Paused, Resumed};
use crate::postgres::Database;

/// Arguments of `pause`.
#[derive(Debug, Args)]
#[command(after_help = "\
Every worker stops closing within about a second, also after a restart, until `order-timeout resume`. Alarms wait in the
broker. Orders stay unpaid and can still be paid; what they have reserved stays reserved. `order-timeout status` shows
who paused closing, since when and why.")]
pub struct PauseArgs {
    /// Why, for the workers' pages and logs, the event closing.paused and the table closing_pauses
    #[arg(long, value_name = "TEXT", value_parser = name_or_reason)]
    why: String,
    #[command(flatten)]
    of: OfPause,
}

/// Arguments of `resume`.
#[derive(Debug, Args)]
#[command(after_help = "\
Everything that is due is closed then: how much that is, and whether payments were found of late, is shown first. Without
--kind every pause ends. The brake does not trip again on what is due at this moment.")]
pub struct ResumeArgs {
    /// Why, for the event closing.resumed and the table closing_pauses
    #[arg(long, value_name = "TEXT", value_parser = name_or_reason)]
    why: Option<String>,
    /// Resume although more than 20 orders are due; without it that only shows them
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    of: OfPause,
}

#[derive(Debug, Args)]
struct OfPause {
    /// Only this kind of deadline, as the settings name it
    #[arg(long, value_name = "KIND")]
    kind: Option<Kind>,
    /// Who asks for it; the user of the operating system if it is not given
    #[arg(long, value_name = "NAME", value_parser = name_or_reason)]
    who: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl OfPause {
    fn who(&self) -> String {
        self.who.clone().unwrap_or_else(system_user)
    }

    async fn database(&self, settings: &Settings) -> anyhow::Result<Database> {
        pause_closing::require_known(settings, self.kind.as_ref())?;
        Ok(connect(settings, 1).await?)
    }
}

/// # Errors
/// If the kind is unknown, or the database cannot be used.
pub async fn pause(args: &PauseArgs, settings: &Settings) -> anyhow::Result<CommandOutcome> {
    let PauseArgs { why, of } = args;
    let database = of.database(settings).await?;
    let paused = pause_closing::pause(&database, of.kind.as_ref(), why, &of.who()).await?;
    Ok(CommandOutcome::of(&paused, of.json, |Paused { began, pauses }, to| {
        if !began {
            to.line("it was paused before; nothing changed");
        }
        pauses.iter().for_each(|pause| to.line(pause.sentence()));
    }))
}

/// # Errors
/// As of [`pause`]. Exit code 1 also if the kind is still paused.
pub async fn resume(args: &ResumeArgs, settings: &Settings) -> anyhow::Result<CommandOutcome> {
    let ResumeArgs { why, yes, of } = args;
    let database = of.database(settings).await?;
    let resumed = pause_closing::resume(&database, settings, of.kind.as_ref(), why.as_deref(), &of.who(), *yes).await?;
    let code = u8::from(!resumed.still_paused.is_empty());
    Ok(CommandOutcome { code, ..CommandOutcome::of(&resumed, of.json, write_resumed) })
}

fn write_resumed(Resumed { needs_yes, due, ended, still_paused }: &Resumed, to: &mut CommandOutcome) {
    if ended.is_empty() && still_paused.is_empty() {
        to.line("nothing is paused");
    }
    due.iter().filter(|of| of.orders != Some(0)).for_each(|of| to.line(of.sentence()));
    if *needs_yes {
        still_paused.iter().for_each(|pause| to.line(pause.sentence()));
        return to.line("nothing resumed; add --yes to close these orders");
    }
    ended.iter().for_each(|pause| to.line(format!("resumed; {}", pause.sentence_when_over())));
    for pause in still_paused {
        to.line(format!(
            "{}; it is a pause of all kinds, which `order-timeout resume` without --kind ends",
            pause.sentence()
        ));
    }
}
