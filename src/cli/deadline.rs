//! `order-timeout deadline`: moves deadlines of orders by hand: of one order, or of those that a condition chooses.

use std::num::NonZeroU32;
use std::time::Duration;

use anyhow::{anyhow, bail};
use clap::Args;
use order_timeout_client::postgres::MoveDeadlineError;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::{OrderId, Timestamp};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::cli::bulk::{Bulk, LOCK_TIMEOUT};
use crate::cli::operator::OperatorArgs;
use crate::cli::{CommandOutcome, OfKind, UsageError, connect, parse_duration, parse_time};
use crate::config::Settings;
use crate::config::kinds::OrdersOf;
use crate::operations::move_deadlines::{
    Move, MoveOutcome, MovedOrder, NewDeadline, has_moved, move_deadlines, move_many,
};
use crate::operations::orders_statements::require_movable;
use crate::operations::orders_table::{Choice, OrdersTable, is_uuid};
use crate::operations::preview::Preview;
use crate::postgres::{self, Database, one_line};

/// Arguments of `deadline`.
#[derive(Debug, Args)]
#[command(after_help = "\
--in 30m counts from now, by the database's clock: all chosen orders get the same deadline. With a sign it counts from
each order's present deadline: --in +30m is half an hour later, --in -10m ten minutes earlier.

--where takes a condition on the columns of the orders table:

  order-timeout deadline --where \"channel = 'app'\" --in +30m --why 'payment provider was down' --yes

It shows what it chooses and asks before it begins, at --rate orders a second. Ctrl-C ends it after the current batch.
It then prints the run's id; with --resume and this id the same command leaves out what the run has moved.")]
pub struct DeadlineArgs {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    to: To,
    #[command(flatten)]
    pub(super) of: OfKind,
    #[command(flatten)]
    operator: OperatorArgs,
    /// With --where: at most this many orders a second
    #[arg(long, value_name = "ORDERS", default_value = "200", requires = "condition")]
    rate: NonZeroU32,
    /// With --where: do not ask before the change
    #[arg(long, requires = "condition")]
    yes: bool,
    /// With --where: go on with an interrupted run
    #[arg(long, value_name = "RUN", requires = "condition")]
    resume: Option<Uuid>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// The order's id, as the orders table has it
    #[arg(value_name = "ID")]
    id: Option<String>,
    /// All unpaid orders for which this condition holds
    #[arg(long = "where", value_name = "SQL", requires = "why")]
    condition: Option<String>,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct To {
    /// The deadline: from now (30m), or later (+30m) or earlier (-10m) than each order's present deadline
    #[arg(long, value_name = "DURATION", value_parser = parse_offset, allow_hyphen_values = true)]
    r#in: Option<Offset>,
    /// The deadline as a time: 2026-11-20T10:30:00Z
    #[arg(long, value_name = "TIME", value_parser = parse_time, allow_hyphen_values = true)]
    deadline: Option<Timestamp>,
}

/// A duration, and what it is counted from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Offset {
    FromNow(Duration),
    Later(Duration),
    Earlier(Duration),
}

fn parse_offset(text: &str) -> Result<Offset, String> {
    let offset = match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(later), _) => Offset::Later(parse_duration(later)?),
        (_, Some(earlier)) => Offset::Earlier(parse_duration(earlier)?),
        _ => Offset::FromNow(parse_duration(text)?),
    };
    match offset {
        Offset::Later(Duration::ZERO) | Offset::Earlier(Duration::ZERO) => {
            Err("it moves no deadline; write how much later or earlier, such as +30m".to_owned())
        }
        _ => Ok(offset),
    }
}

impl To {
    /// `now` is the database's time, which closes the order, not this machine's.
    fn new_deadline(&self, now: Timestamp) -> NewDeadline {
        match (self.r#in, self.deadline) {
            (Some(Offset::FromNow(delay)), _) => NewDeadline::At(now + delay),
            (Some(Offset::Later(duration)), _) => NewDeadline::Later(duration),
            (Some(Offset::Earlier(duration)), _) => NewDeadline::Earlier(duration),
            (None, Some(deadline)) => NewDeadline::At(deadline),
            (None, None) => unreachable!("clap requires one of the two"),
        }
    }
}

/// # Errors
/// If the database cannot be used, or the orders table is not ours. Exit code 1 also if a deadline is unchanged.
pub async fn run(args: DeadlineArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let has_sign = matches!(args.to.r#in, Some(Offset::Later(_) | Offset::Earlier(_)));
    if matches!(settings.orders_of(&args.of.kind), Some(OrdersOf::Statements { .. }))
        && (has_sign || args.which.condition.is_some())
    {
        return Err(UsageError::of(
            "--where and --in with a sign need the default orders table or a mapping, and the settings have statements of your own: update its row yourself",
        ));
    }
    if let Some(Offset::FromNow(duration) | Offset::Later(duration) | Offset::Earlier(duration)) = args.to.r#in
        && duration > settings.delay.max_delay
    {
        return Err(UsageError::of(TOO_FAR));
    }
    match &args.which.condition {
        Some(condition) => move_chosen(condition, &args, &settings).await,
        None => move_one(&args, &settings).await,
    }
}

/// The request. An absolute deadline is checked before any order is asked for.
///
/// # Errors
/// If the deadline can be given to no order.
///
/// `began` is when the run began, which `--in 30m` counts from.
fn request_at(
    args: &DeadlineArgs,
    settings: &Settings,
    (began, now): (Timestamp, Timestamp),
    run: Uuid,
) -> anyhow::Result<Move> {
    let (to, furthest) = (args.to.new_deadline(began), settings.delay.max_delay);
    match to {
        NewDeadline::At(deadline) if deadline <= now => bail!(passed(&write_rfc3339(deadline))),
        // The alarm of a deadline beyond it would be parked, which raises an alert.
        NewDeadline::At(deadline) if deadline > now + furthest => bail!(TOO_FAR),
        _ => Ok(Move { kind: args.of.kind.clone(), to, furthest, operator: args.operator.operator(run) }),
    }
}

const TOO_FAR: &str = "the deadline is unchanged: the new one is further ahead than delay.max_delay allows; choose a nearer one, or raise that setting for workers and publishers";

fn passed(deadline: &str) -> String {
    format!(
        "the deadline is unchanged: the order would be closed at once, because {deadline} has passed; choose a later one, such as --in 1s if you mean at once, or run `order-timeout close ID` if the order is already overdue"
    )
}

async fn move_one(args: &DeadlineArgs, settings: &Settings) -> anyhow::Result<CommandOutcome> {
    let order_id = OrderId::new(args.which.id.as_deref().unwrap_or_default()).map_err(MoveDeadlineError::from)?;
    let (database, kind) = (connect(settings, 1).await?, &args.of.kind);
    require_movable(&database, settings, kind).await?;
    if settings.has_built_in_table(kind) && !is_uuid(order_id.as_str()) {
        bail!("the deadline is unchanged: {order_id} is no id of an order; give it as the orders table has it, a UUID");
    }
    let now = database.run(postgres::now).await.map_err(|error| with_one_line(error.into()))?;
    let request = request_at(args, settings, (now, now), Uuid::now_v7())?;
    let moved = move_deadlines(&database, std::slice::from_ref(&order_id), &request).await;
    let moved = moved.map_err(|error| with_one_line(error.into()))?.pop();
    describe(kind, &order_id, moved.as_ref(), args.json)
}

/// The result for one order.
///
/// # Errors
/// If the requested deadline cannot be given to any order.
fn describe(
    kind: &Kind,
    order_id: &OrderId,
    moved: Option<&MovedOrder>,
    as_json: bool,
) -> anyhow::Result<CommandOutcome> {
    let time = |time: Option<Timestamp>| time.map(write_rfc3339);
    let wanted = moved.and_then(|moved| time(moved.moved_to.or(moved.wanted))).unwrap_or_default();
    let status = moved.map(|moved| moved.status.clone()).unwrap_or_default();
    let outcome = moved.map_or(MoveOutcome::Unknown, |moved| moved.outcome);
    let (code, word, sentence) = match outcome {
        MoveOutcome::Later => (
            0,
            "later",
            format!("order {order_id} has time until {wanted}; an alarm that was already scheduled adapts to it"),
        ),
        MoveOutcome::Earlier => {
            (0, "earlier", format!("order {order_id} has time until {wanted}; an alarm for it is written"))
        }
        MoveOutcome::Same => (0, "same", format!("order {order_id} has time until {wanted}, as before")),
        MoveOutcome::Passed => bail!(passed(&wanted)),
        MoveOutcome::TooFar => match moved.and_then(|moved| moved.latest.filter(|latest| moved.wanted > Some(*latest)))
        {
            Some(latest) => bail!(
                "the deadline is unchanged: kinds.{kind}.extend_max allows order {order_id} no later one than {}; choose a nearer one, or raise that setting and restart a worker",
                write_rfc3339(latest)
            ),
            None => bail!(TOO_FAR),
        },
        MoveOutcome::NoDeadline => bail!(
            "the deadline is unchanged: order {order_id} has none, so nothing can be added to it; give one that counts from now, such as --in 30m"
        ),
        MoveOutcome::Kept => (
            1,
            "unchanged",
            format!("order {order_id} is unpaid, but a trigger in the database keeps its deadline unchanged"),
        ),
        MoveOutcome::NotUnpaid => (1, "unchanged", format!("order {order_id} is {status}; its deadline is unchanged")),
        MoveOutcome::Unknown => (1, "unknown", format!("there is no order {order_id}")),
    };
    let mut output = CommandOutcome { code, ..CommandOutcome::default() };
    if as_json {
        let (status, deadline) =
            (moved.map(|moved| &moved.status), moved.and_then(|moved| time(moved.moved_to.or(moved.before))));
        output.line(json!({ "order_id": order_id.as_str(), "status": status, "deadline": deadline, "outcome": word }));
    } else {
        output.line(sentence);
    }
    Ok(output)
}

async fn move_chosen(condition: &str, args: &DeadlineArgs, settings: &Settings) -> anyhow::Result<CommandOutcome> {
    let mut bounded = settings.clone();
    bounded.database.lock_timeout = bounded.database.lock_timeout.min(LOCK_TIMEOUT);
    let database = connect(&bounded, 1).await?;
    require_movable(&database, settings, &args.of.kind).await?;
    let table = OrdersTable::open(database.clone(), settings, &args.of.kind).await?;
    let choice = Choice { condition: condition.to_owned(), not_changed_by: args.resume };
    if let Some(run) = args.resume {
        require_same(run, condition, args, &database).await?;
    }
    let chosen = table.choose(&choice).await?;
    let run = args.resume.unwrap_or_else(|| new_run(chosen.now, condition, args));
    let request = request_at(args, settings, (began(run), chosen.now), run)?;
    let ids: Vec<OrderId> = chosen.orders.iter().map(|order| order.id.clone()).collect();
    let bulk = Bulk {
        yes: args.yes,
        run,
        what: format!("move the deadlines of {} unpaid orders", ids.len()),
        preview: Preview::of(&chosen, |present| request.to.of(present)),
        json: args.json,
    };
    if ids.is_empty() {
        return Ok(bulk.nothing());
    }
    bulk.ask()?;
    let stop = CancellationToken::new();
    let work = move_many(&database, &ids, &request, args.rate, &stop, bulk.shows_progress());
    let progress = Bulk::until_stopped(&stop, work).await?;
    let has_moved = [MoveOutcome::Later, MoveOutcome::Earlier].iter().any(|moved| progress.count(moved.as_str()) > 0);
    let again = match has_moved || args.resume.is_some() {
        true => format!("run the same command again with --resume {run} to move the rest"),
        false => "run the same command again: nothing was moved".to_owned(),
    };
    Ok(bulk.report(&progress, &again))
}

/// The id of a run, which says what it was started with: when (a UUID of version 7), and a digest of what it moves and where to.
fn new_run(now: Timestamp, condition: &str, args: &DeadlineArgs) -> Uuid {
    let millis = u64::try_from(now.unix_micros() / 1_000).unwrap_or_default();
    let version_and_random = 0x7000 | u64::from(fastrand::u16(..0x1000));
    Uuid::from_u64_pair((millis << 16) | version_and_random, digest(condition, args))
}

/// When the run began, by the database's clock.
fn began(run: Uuid) -> Timestamp {
    let millis = i64::try_from(run.as_u64_pair().0 >> 16).unwrap_or_default();
    Timestamp::from_unix_micros(millis * 1_000)
}

/// The last 64 bits of a run's id, with the variant in the first two.
fn digest(condition: &str, args: &DeadlineArgs) -> u64 {
    let started_with = format!("{}\n{:?}\n{condition}", args.of.kind, args.to);
    // FNV-1a: the same in each version of the program.
    let hash = started_with
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    (hash >> 2) | (1 << 63)
}

/// Refuses to go on with a run that is none, or was started with something else: its orders would be moved twice.
async fn require_same(run: Uuid, condition: &str, args: &DeadlineArgs, database: &Database) -> anyhow::Result<()> {
    let has_moved = has_moved(database, run).await.map_err(|error| anyhow!(one_line(&error)))?;
    let why = match (has_moved, run.as_u64_pair().1 == digest(condition, args)) {
        (true, true) => return Ok(()),
        (false, _) => "no order was moved by such a run; correct its id, or leave --resume out to begin a new run",
        (true, false) => {
            "that run was started with another --where, --in, --deadline or --kind; give those with which it began, or leave --resume out to begin a new run"
        }
    };
    Err(UsageError::of(format!("--resume {run}: {why}")))
}

/// The sentence with the database's own words, on one line and with their SQLSTATE.
fn with_one_line(fault: MoveDeadlineError) -> anyhow::Error {
    match &fault {
        MoveDeadlineError::Database(error) => anyhow!("{fault}: {}", one_line(error)),
        _ => fault.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: DeadlineArgs,
    }

    #[test]
    fn run_is_what_it_was_started_with() {
        let args = |to: &str| {
            Command::parse_from(["deadline", "--where", "true", "--in", to, "--why", "a test", "--rate", "9"]).args
        };
        let now = Timestamp::from_unix_micros(1_795_170_600_123_456);
        let run = new_run(now, "true", &args("30m"));
        assert_eq!((run.get_version_num(), run.get_variant()), (7, uuid::Variant::RFC4122));
        assert_eq!(began(run).unix_micros(), 1_795_170_600_123_000);
        let is_same = |condition: &str, to: &str| run.as_u64_pair().1 == digest(condition, &args(to));
        assert!(is_same("true", "1800s"));
        assert!(!is_same("true ", "30m") && !is_same("true", "+30m") && !is_same("true", "31m"));
    }

    #[test]
    fn sign_counts_from_present_deadline() {
        let minutes = |minutes: u64| Duration::from_secs(minutes * 60);
        assert_eq!(parse_offset("30m"), Ok(Offset::FromNow(minutes(30))));
        assert_eq!(parse_offset("+30m"), Ok(Offset::Later(minutes(30))));
        assert_eq!(parse_offset("-10m"), Ok(Offset::Earlier(minutes(10))));
        for wrong in ["", "+", "-", "5", "--5m", "+-5m", "+0s", "-0s"] {
            assert!(parse_offset(wrong).is_err(), "{wrong}");
        }
    }
}
