//! `order-timeout quarantine`: shows the messages that the AMQP client cannot read, or moves them into `parked_alarms`.
//! The worker does the same by itself when such a message ends its session.

use clap::Args;
use serde_json::json;

use crate::cli::CommandOutcome;
use crate::config::Settings;
use crate::postgres::{self, Database};
use crate::quarantine::{self, Bounds, Found, QuarantineError, Report};

/// Arguments of `quarantine`.
#[derive(Debug, Args)]
pub struct QuarantineArgs {
    /// Move what is found into parked_alarms, instead of showing it
    #[arg(long = "move")]
    pub moves: bool,
    /// Print one JSON object for each queue
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the database cannot be used. A queue that cannot be searched is reported in the output, with exit code 1.
pub async fn run(args: QuarantineArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let database = if args.moves { Some(migrated(&settings).await?) } else { None };
    let (mut output, mut unreadable) = (CommandOutcome::default(), 0);
    for queue in quarantine::queues(&settings, &settings.all_kinds()) {
        match search(settings.clone(), queue.clone(), database.clone()).await {
            Ok(report) => {
                unreadable += report.unreadable;
                show(&report, args.json, &mut output);
            }
            Err(error) => {
                output.code = 1;
                let why = error.to_string();
                let line = if args.json { json!({ "queue": queue, "error": why }).to_string() } else { why };
                output.line(line);
            }
        }
    }
    if !args.json {
        output.line(match (unreadable, args.moves) {
            (0, _) => "no message was found that the AMQP client cannot read".to_owned(),
            (_, true) => format!("{unreadable} message(s) moved into parked_alarms; see order-timeout parked list"),
            (_, false) => {
                format!("{unreadable} message(s) found, nothing moved; add --move to move them into parked_alarms")
            }
        });
    }
    Ok(output)
}

async fn migrated(settings: &Settings) -> anyhow::Result<Database> {
    let database = Database::connect(&settings.database, 1).await?;
    postgres::require_migrated(&database).await?;
    Ok(database)
}

/// Runs as a task: the main thread has less stack than the client's parser may need. If the broker fails over a
/// message, a second search finds its position.
async fn search(settings: Settings, queue: String, store: Option<Database>) -> Result<Report, QuarantineError> {
    let name = queue.clone();
    let task = tokio::spawn(async move {
        match quarantine::search(&settings.amqp, &queue, Bounds::BY_HAND, store.as_ref()).await {
            Err(error) if error.is_internal_error() => {
                Err(quarantine::locate_undeliverable(&settings.amqp, &queue).await.err().unwrap_or(error))
            }
            searched => searched,
        }
    });
    task.await.unwrap_or_else(|failed| Err(QuarantineError::Broken { place: name, why: failed.to_string() }))
}

fn show(report: &Report, json: bool, output: &mut CommandOutcome) {
    if json {
        return output.line(json!(report));
    }
    let Report { queue, searched, unreadable, found, stopped } = report;
    output.line(format!("{queue}: {searched} message(s) read, {unreadable} of them unreadable for the AMQP client"));
    for Found { position, why, body_bytes, order_id, .. } in found {
        let order = order_id.as_ref().map_or_else(String::new, |id| format!(", order {id}"));
        output.line(format!("  position {position}, body of {body_bytes} bytes{order}: {why}"));
    }
    if *unreadable > found.len() as u64 {
        output.line(format!("  and {} more", unreadable - found.len() as u64));
    }
    if let Some(why) = stopped {
        output.line(format!("  {why}"));
    }
}
