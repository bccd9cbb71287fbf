//! `order-timeout parked list | retry | drop`: lists, retries or deletes the alarms that could not be processed.

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use order_timeout_amqp::publisher::ConfirmedPublisher;
use order_timeout_core::alarm::ParkReason;
use serde_json::json;
use uuid::Uuid;

use crate::cli::operator::OperatorArgs;
use crate::cli::{CommandOutcome, ListOptions, connect, short_duration};
use crate::config::Settings;
use crate::operations::parked::{self, Kept, ParkedError, retry_parked};
use crate::postgres::parked_alarms::{self, Parked};
use crate::postgres::selection::Selection;
use crate::postgres::{Database, Operator};
use crate::sanitize;

/// The most rows shown of a selection.
const PREVIEWED: i64 = 100;
/// How much of a body the table shows, in characters.
const BODY_WIDTH: usize = 48;

/// What to do with parked alarms.
#[derive(Debug, Subcommand)]
pub enum ParkedCommand {
    /// Show parked alarms, oldest first
    List(ListArgs),
    /// Send parked alarms back to the worker; without --yes only shows what would be sent
    Retry(ActArgs),
    /// Delete parked alarms; without --yes only shows what would be deleted
    Drop(ActArgs),
}

/// Arguments of `parked list`.
#[derive(Debug, Args)]
#[command(after_help = "--json has the whole body of each: body, or body_hex if it is not UTF-8.")]
pub struct ListArgs {
    /// Only those parked for this reason
    #[arg(long, value_parser = PossibleValuesParser::new(ParkReason::WORDS))]
    reason: Option<String>,
    /// Only those after this one: the last id of the previous page
    #[arg(long, value_name = "ID", value_parser = parse_id)]
    after: Option<Uuid>,
    #[command(flatten)]
    options: ListOptions,
}

/// Arguments of `parked retry` and `parked drop`.
#[derive(Debug, Args)]
pub struct ActArgs {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    operator: OperatorArgs,
    /// Do it, instead of showing what would be done
    #[arg(long)]
    yes: bool,
    /// Print counts as JSON, and the given ids that are not parked
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// The ids that `parked list` shows
    #[arg(value_name = "ID", value_parser = parse_id)]
    ids: Vec<Uuid>,
    /// All that were parked for this reason
    #[arg(long, value_parser = PossibleValuesParser::new(ParkReason::WORDS))]
    reason: Option<String>,
    /// All of them
    #[arg(long)]
    all: bool,
}

fn parse_id(text: &str) -> Result<Uuid, &'static str> {
    text.parse().map_err(|_| "give an id as `parked list` shows it")
}

impl ActArgs {
    /// The operator of this run of the command.
    fn operator(&self) -> Operator {
        self.operator.operator(Uuid::now_v7())
    }

    fn selection(&self) -> Selection {
        match &self.which.reason {
            Some(reason) => Selection::Reason(reason.clone()),
            None if self.which.all => Selection::All,
            None => Selection::Ids(self.which.ids.clone()),
        }
    }

    /// The given ids that are not parked, most likely mistyped; and the output, which begins with them.
    fn missing(&self, selected: &[Uuid]) -> (Vec<Uuid>, CommandOutcome) {
        let missing: Vec<Uuid> = self.which.ids.iter().filter(|id| !selected.contains(id)).copied().collect();
        let mut output = CommandOutcome { code: u8::from(!missing.is_empty()), ..CommandOutcome::default() };
        if !self.json {
            let hint = "give the id of an alarm, the first column of `parked list`, not that of its order";
            missing.iter().for_each(|id| output.line(format!("no alarm {id} is parked; {hint}")));
        }
        (missing, output)
    }
}

impl ParkedCommand {
    /// Whether it sends alarms to the broker.
    pub fn publishes(&self) -> bool {
        matches!(self, Self::Retry(args) if args.yes)
    }
}

/// # Errors
/// If the database or, for a retry, the broker cannot be used.
pub async fn run(command: ParkedCommand, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let database = connect(&settings, 1).await?;
    match command {
        ParkedCommand::List(args) => list(&database, &args).await,
        ParkedCommand::Retry(args) if args.yes => retry(&database, &settings, &args).await,
        ParkedCommand::Drop(args) if args.yes => drop_parked(&database, &args).await,
        ParkedCommand::Retry(args) | ParkedCommand::Drop(args) => preview(&database, &args).await,
    }
}

async fn list(database: &Database, args: &ListArgs) -> anyhow::Result<CommandOutcome> {
    let selection = args.reason.clone().map_or(Selection::All, Selection::Reason);
    let page = parked::list(database, &selection, args.after, args.options.limit).await?;
    let none = if args.after.is_some() { "nothing more is parked" } else { "nothing is parked" };
    args.options.show(&page, none, write_table)
}

fn write_table(rows: &[Parked], output: &mut CommandOutcome) {
    output.line(format!(
        "{:<36}  {:<14}  {:<10}  {:>8}  {:>8}  {:<36}  {:<BODY_WIDTH$}  DETAIL",
        "ID", "REASON", "KIND", "AGE", "ATTEMPTS", "ORDER", "BODY"
    ));
    for row in rows {
        let age = short_duration(std::time::Duration::from_secs(row.age_s.unsigned_abs()));
        let order = sanitize::one_line(row.order_id.as_deref().unwrap_or("-"));
        let (body, detail) = (start_of(&row.body), &row.detail);
        let (id, reason, kind, attempts) = (row.id, &row.reason, &row.kind, row.attempts);
        output.line(format!(
            "{id}  {reason:<14}  {kind:<10}  {age:>8}  {attempts:>8}  {order:<36}  {body:<BODY_WIDTH$}  {detail}"
        ));
    }
}

/// The beginning of a body, with every byte that is not text as an escape.
fn start_of(body: &[u8]) -> String {
    let mut shown = String::new();
    for chunk in body.utf8_chunks() {
        let text = chunk.valid().chars().map(|c| match c {
            '\n' => "\\n".to_owned(),
            c => sanitize::visible(c.encode_utf8(&mut [0; 4])).into_owned(),
        });
        let bytes = chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}"));
        for next in text.chain(bytes) {
            if shown.chars().count() + next.chars().count() >= BODY_WIDTH {
                return shown + "…";
            }
            shown += &next;
        }
    }
    shown
}

async fn preview(database: &Database, args: &ActArgs) -> anyhow::Result<CommandOutcome> {
    let selected = parked_alarms::ids(database, &args.selection()).await.map_err(ParkedError::from)?;
    let (missing, mut output) = args.missing(&selected);
    if args.json {
        output.line(json!({ "selected": selected.len(), "done": 0, "missing": missing }));
    } else if selected.is_empty() {
        output.line("no alarm is selected");
    } else {
        write_table(
            &parked_alarms::list(database, &args.selection(), PREVIEWED).await.map_err(ParkedError::from)?,
            &mut output,
        );
        output.line(format!("{} alarm(s) selected, nothing done; add --yes to do it", selected.len()));
    }
    Ok(output)
}

async fn retry(database: &Database, settings: &Settings, args: &ActArgs) -> anyhow::Result<CommandOutcome> {
    let confirmed = ConfirmedPublisher::connect(&settings.amqp, "parked retry").await?;
    let retried = retry_parked(database, &confirmed, &settings.names(), &args.selection(), &args.operator()).await?;
    let (missing, mut output) = args.missing(&retried.selected);
    output.code = output.code.max(u8::from(!retried.kept.is_empty()));
    if args.json {
        let mut line = json!(retried);
        line["missing"] = json!(missing);
        output.line(line);
    } else {
        output.line(format!(
            "{} alarm(s) sent back to the worker; what still cannot be handled is parked again",
            retried.sent
        ));
        for Kept { id, why } in &retried.kept {
            output.line(format!("kept {id}: {why}"));
        }
    }
    Ok(output)
}

async fn drop_parked(database: &Database, args: &ActArgs) -> anyhow::Result<CommandOutcome> {
    let dropped = parked::drop_parked(database, &args.selection(), &args.operator()).await?;
    let (missing, mut output) = args.missing(&dropped.selected);
    if args.json {
        let mut line = json!(dropped);
        line["missing"] = json!(missing);
        output.line(line);
    } else {
        output.line(format!("{} alarm(s) dropped", dropped.dropped));
    }
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_shown_escaped_and_cut() {
        assert_eq!(start_of(br#"{"order_id": "1"}"#), r#"{"order_id": "1"}"#);
        assert_eq!(start_of(b"\x1b[2J\xff\xfe\n"), r"\u001b[2J\xff\xfe\n");
        assert_eq!(start_of("a\u{202e}b".as_bytes()), r"a\u202eb");
        let long = start_of(&[b'x'; 16_384]);
        assert_eq!((long.chars().count(), long.chars().last()), (BODY_WIDTH, Some('…')));
    }

    #[test]
    fn json_keeps_its_meaning_without_control_characters() {
        let text = "a\u{9b}b\u{202e}c\u{7f}\u{e0001}\n\"ü";
        let json = sanitize::visible(&serde_json::to_string(text).unwrap()).into_owned();
        assert!(!json.chars().any(sanitize::is_hidden), "{json}");
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
    }
}
