//! The command line: one file per subcommand. Reads arguments, calls the library and prints; decides nothing.

pub mod adopt;
pub mod audit;
mod bulk;
pub mod close;
pub mod closing;
pub mod config;
pub mod deadline;
pub mod doctor;
pub mod explain;
pub mod forecast;
pub mod generate;
pub mod health;
pub mod late;
mod operator;
pub mod parked;
pub mod pause;
mod provider;
pub mod schedule;
mod schedule_check;
pub mod setup;
mod signals;
pub mod sql;
pub mod status;
pub mod testing;
pub mod topology;
pub mod worker;

use std::borrow::Cow;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use order_timeout_client::ScheduleError;
use order_timeout_core::duration;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::read_rfc3339;
use order_timeout_core::order::{OrderIdError, Timestamp};
use order_timeout_core::problem::Problem;
use serde::Serialize;

use crate::config::{DatabaseUse, Settings, SettingsError};
use crate::operations::forecast::ForecastError;
use crate::operations::open_cause::rounded;
use crate::operations::orders_statements;
use crate::operations::pause_closing::PauseError;
use crate::operations::{NotKnown, Page};
use crate::postgres::{self, Database, DatabaseError};
use crate::sanitize;

/// Closes unpaid orders in Postgres exactly when their time is up, woken by RabbitMQ delayed messages.
#[derive(Debug, Parser)]
#[command(name = "order-timeout", version = env!("ORDER_TIMEOUT_VERSION"), about, after_help = SETTINGS_HELP)]
pub struct Cli {
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsArgs,
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

const SETTINGS_HELP: &str = "\
Settings come from config/default.toml and expert.toml (built in), then --config FILE, then the environment
(ORDER_TIMEOUT__AMQP__URL, ORDER_TIMEOUT__DATABASE__URL or DATABASE_URL, ORDER_TIMEOUT__DELAY__LEAD, …),
then --set. A first run:

  export ORDER_TIMEOUT__AMQP__URL=amqp://user:password@localhost:5672/%2f
  export ORDER_TIMEOUT__DATABASE__URL=postgres://user:password@localhost:5432/shop
  order-timeout setup
  order-timeout worker

Exit codes: 0 done, 1 failed, 2 wrong usage or settings.";

/// What the command line and the settings alone show to be wrong: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(String);

impl UsageError {
    fn of(why: impl Into<String>) -> anyhow::Error {
        Self(why.into()).into()
    }
}

/// Whether a command was used wrongly, whichever part of the program has found that.
#[must_use]
pub fn is_wrong_usage(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let forecast = cause.downcast_ref::<ForecastError>();
        cause.is::<UsageError>()
            || cause.is::<SettingsError>()
            || cause.is::<OrderIdError>()
            || forecast.is_some_and(|fault| !matches!(fault, ForecastError::Unknown(_)))
            || matches!(cause.downcast_ref(), Some(PauseError::UnknownKind(..)))
            || matches!(cause.downcast_ref(), Some(ScheduleError::TooFar))
    })
}

/// The sources of settings besides the environment.
#[derive(Debug, Args)]
pub struct SettingsArgs {
    /// A TOML file with settings that differ from the defaults
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// One setting, such as --set delay.lead=3s; may be repeated and overrides all other sources
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
}

impl Cli {
    /// Reads the command line.
    ///
    /// # Errors
    /// clap's.
    pub fn read(arguments: &[OsString]) -> Result<Self, clap::Error> {
        let mut cli = Self::try_parse_from(arguments)?;
        cli.settings.overrides = overrides_in(arguments);
        Ok(cli)
    }

    /// Loads the settings that the command needs.
    ///
    /// # Errors
    /// [`SettingsError`], one sentence with key and origin.
    pub fn load_settings(&self) -> Result<Settings, SettingsError> {
        let (file, overrides) = (self.settings.config.as_deref(), &self.settings.overrides);
        let used = match self.command {
            Command::Topology(_) | Command::Config(_) | Command::Provider(_) | Command::Health(_) => {
                DatabaseUse::Ignored
            }
            Command::Completions(_) | Command::Man => return Ok(Settings::defaults()),
            Command::Schedule(_) => DatabaseUse::IfGiven,
            Command::Setup(_) => DatabaseUse::Named,
            // All others read or change what is in it.
            _ => DatabaseUse::Needed,
        };
        Settings::load_for(used, file, overrides)
    }
}

/// A deadline on the command line.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct When {
    /// The deadline, counted from now, with its unit: 90s, 30m, 2h
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, allow_hyphen_values = true)]
    r#in: Option<Duration>,
    /// The deadline as a time: 2026-11-20T10:30:00Z
    #[arg(long, value_name = "TIME", value_parser = parse_time, allow_hyphen_values = true)]
    deadline: Option<Timestamp>,
}

impl When {
    /// Whether it is relative to now, so that it matters which clock is used.
    const fn is_counted_from_now(&self) -> bool {
        self.r#in.is_some()
    }

    fn deadline(&self, now: Timestamp) -> Timestamp {
        match (self.r#in, self.deadline) {
            (Some(delay), _) => now + delay,
            (None, Some(deadline)) => deadline,
            (None, None) => unreachable!("clap requires one of the two"),
        }
    }
}

/// The kind of a command's orders.
#[derive(Debug, Args)]
pub struct OfKind {
    /// The kind of the deadline, as the settings name it
    #[arg(long, value_name = "KIND", default_value_t = Kind::ORDER)]
    kind: Kind,
}

/// How much of a list is shown, and how.
#[derive(Debug, Args)]
pub struct ListOptions {
    /// At most this many
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    limit: i64,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

impl ListOptions {
    /// The rows, and how to go on. `none` is said where there are none.
    fn show<Row: Serialize>(
        &self,
        page: &Page<Row>,
        none: &str,
        table: impl FnOnce(&[Row], &mut CommandOutcome),
    ) -> anyhow::Result<CommandOutcome> {
        let mut output = CommandOutcome::default();
        if self.json {
            for row in &page.rows {
                output.line(serde_json::to_string(row)?);
            }
            return Ok(output);
        }
        if page.rows.is_empty() {
            output.line(none);
            return Ok(output);
        }
        table(&page.rows, &mut output);
        if let Some(next) = &page.next {
            output.line(format!("there may be more; the next: add --after {next}"));
        }
        Ok(output)
    }
}

/// The database of a command, with the schema of this version.
async fn connect(settings: &Settings, connections: u32) -> Result<Database, DatabaseError> {
    let database = Database::connect(&settings.database, connections).await?;
    postgres::require_migrated(&database).await?;
    Ok(database)
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    if text.starts_with('-') {
        return Err("a deadline must be in the future; write a number and its unit, such as 90s, 30m or 2h".into());
    }
    duration::parse(text).map_err(|fault| format!("{fault}; write a number and its unit, such as 90s, 30m or 2h"))
}

fn parse_time(text: &str) -> Result<Timestamp, String> {
    read_rfc3339(text).ok_or_else(|| "write an RFC 3339 time with its offset, such as 2026-11-20T10:30:00Z".into())
}

/// A duration in at most two terms: `3h 5m`.
fn short_duration(duration: Duration) -> String {
    rounded(duration).to_string().split(' ').take(2).collect::<Vec<_>>().join(" ")
}

/// A command's standard output and exit code.
#[derive(Debug, Default)]
pub struct CommandOutcome {
    text: String,
    /// For standard error, a line each: warnings of a command that has done its work.
    remarks: Vec<String>,
    /// The exit code.
    pub code: u8,
}

impl CommandOutcome {
    /// The text for standard output. It contains no terminal control characters, whatever its source.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The lines for standard error.
    #[must_use]
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// An answer as one JSON object, or as text.
    fn of<Answer: Serialize>(answer: &Answer, as_json: bool, write: impl FnOnce(&Answer, &mut Self)) -> Self {
        let mut output = Self::default();
        if as_json {
            output.line(serde_json::json!(answer));
        } else {
            write(answer, &mut output);
        }
        output
    }

    /// What an answer leaves out.
    fn not_known(&mut self, entries: &[NotKnown]) {
        for NotKnown { what, why } in entries {
            self.line(format!("not known: {what}: {why}"));
        }
    }

    /// Text of our own that holds nothing from outside.
    fn verbatim(text: String) -> Self {
        Self { text, ..Self::default() }
    }

    fn line(&mut self, line: impl std::fmt::Display) {
        self.text.push_str(&sanitize::one_line(&line.to_string()));
        self.text.push('\n');
    }

    /// A line of a list.
    fn indented(&mut self, line: impl std::fmt::Display) {
        self.text.push_str("  ");
        self.line(line);
    }

    /// Several lines that are already formatted.
    fn lines(&mut self, lines: impl std::fmt::Display) {
        self.text.push_str(&sanitize::visible(lines.to_string().trim_end()));
        self.text.push('\n');
    }

    /// Why nothing was done, and how that is fixed.
    fn problem(&mut self, Problem { cause, what, why, fix, .. }: &Problem) {
        self.remark(format!("{}: {what}", cause.as_str()));
        self.remark(format!("  why: {why}"));
        self.remark(format!("  fix: {fix}"));
    }

    fn remark(&mut self, remark: impl std::fmt::Display) {
        self.remarks.push(sanitize::one_line(&remark.to_string()).into_owned());
    }
}

/// Every `--set`, in their order. If a global option is given both before and after the subcommand, clap keeps only the
/// latter, and a command with half of its settings may connect to the wrong server. clap has checked their form.
fn overrides_in(arguments: &[OsString]) -> Vec<String> {
    let mut overrides = Vec::new();
    let mut options =
        arguments.iter().map(|argument| argument.to_string_lossy()).take_while(|argument| argument != "--");
    while let Some(option) = options.next() {
        if option == "--set" {
            overrides.extend(options.next().map(Cow::into_owned));
        } else if let Some(value) = option.strip_prefix("--set=") {
            overrides.push(value.to_owned());
        }
    }
    overrides
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Bring the database schema and the broker's queues up to date; may be run again at any time
    Setup(setup::SetupArgs),
    /// Run the worker until SIGTERM or Ctrl-C; with --dry-run it only logs what it would close
    Worker(worker::WorkerArgs),
    /// Ask the worker on this machine whether it is ready: for container health checks
    Health(health::HealthArgs),
    /// Schedule the alarm of one order by hand
    Schedule(schedule::ScheduleArgs),
    /// Show what is overdue, who paused closing and why, what waits, what is parked, and which workers run
    Status(status::StatusArgs),
    /// Find what keeps orders from being closed on time, say why it matters and how to fix it; exit code 1 for warnings, 2
    /// for errors
    Doctor(doctor::DoctorArgs),
    /// Tell one order's story in time: what happened when, why it is still open, and what to do
    Explain(explain::ExplainArgs),
    /// Show how many orders and how much money fall due in the next hours, beside what can be closed in a minute; or list
    /// these orders
    Forecast(forecast::ForecastArgs),
    /// Give an unpaid order, or all that a condition chooses, more time, or less
    Deadline(deadline::DeadlineArgs),
    /// Close overdue unpaid orders by hand, through the same statement as the worker
    Close(close::CloseArgs),
    /// Close no order until `resume`, in any worker: alarms wait in the broker
    Pause(pause::PauseArgs),
    /// End a pause, also one that the brake began; everything that is due is closed then
    Resume(pause::ResumeArgs),
    /// Print the broker's objects as a definitions file
    Topology(topology::TopologyArgs),
    /// List alarms that could not be processed, retry them, or drop them
    #[command(subcommand)]
    Parked(parked::ParkedCommand),
    /// List payments that paid for nothing, and settle each: to be given back, or by reopening its order
    #[command(subcommand)]
    Late(late::LateCommand),
    /// List orders that a payment provider's answers could not decide, and have them asked about again
    #[command(subcommand)]
    Closing(closing::ClosingCommand),
    /// Ask a payment provider about one payment, as the worker does, and change nothing
    #[command(subcommand)]
    Provider(provider::ProviderCommand),
    /// Propose a mapping for an orders table of your own, or prove the configured one
    Adopt(adopt::AdoptArgs),
    /// Find what went wrong with the orders of the last days: closed although paid, late, early, stock not given back. Reads
    /// only, and needs no tables of ours; exit code 1 if something is found
    Audit(audit::AuditArgs),
    /// Print the statements that close orders and find overdue ones
    Sql(sql::SqlArgs),
    /// Move the clock of a database that `setup --for-tests` has made
    #[command(subcommand)]
    Testing(testing::TestingCommand),
    /// Print every setting that is in effect, with its origin and without secrets
    Config(config::ConfigArgs),
    /// Print a completion script for a shell
    Completions(generate::CompletionsArgs),
    /// Print the manual page
    Man,
}

impl Command {
    fn is_about_broker(&self) -> bool {
        match self {
            Self::Schedule(_) | Self::Topology(_) => true,
            Self::Parked(command) => command.publishes(),
            _ => false,
        }
    }

    /// The kind whose orders it reads or changes.
    fn kind(&self) -> Option<&Kind> {
        let of = match self {
            Self::Explain(args) => &args.of,
            Self::Forecast(args) => &args.of,
            Self::Deadline(args) => &args.of,
            Self::Close(args) => &args.of,
            Self::Sql(args) => &args.of,
            Self::Audit(args) => &args.of,
            // A kind whose table is only to be proposed need not be in the settings.
            Self::Adopt(args) if !args.is_proposal() => &args.of,
            _ => return None,
        };
        Some(&of.kind)
    }

    /// Runs the command.
    ///
    /// # Errors
    /// Any error, which becomes one sentence on standard error, and exit code 2 if [`is_wrong_usage`] says so, else 1.
    pub async fn run(self, given: &SettingsArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
        if self.is_about_broker() && !settings.delay.strategy.needs_broker() {
            return Err(UsageError::of(
                "delay.strategy is \"database\", so this deployment has no alarms and no broker; leave this command out, or choose a strategy with a broker",
            ));
        }
        if let Some(kind) = self.kind().filter(|kind| settings.orders_of(kind).is_none()) {
            return Err(UsageError::of(orders_statements::why_no_orders(kind)));
        }
        match self {
            Self::Setup(args) => setup::run(args, settings).await,
            Self::Worker(args) => worker::run(&args, settings).await,
            Self::Health(args) => health::run(&args, &settings).await,
            Self::Schedule(args) => schedule::run(args, settings).await,
            Self::Status(args) => status::run(&args, settings).await,
            Self::Doctor(args) => doctor::run(args, settings).await,
            Self::Explain(args) => explain::run(&args, settings).await,
            Self::Forecast(args) => forecast::run(args, settings).await,
            Self::Deadline(args) => deadline::run(args, settings).await,
            Self::Close(args) => close::run(args, settings).await,
            Self::Pause(args) => pause::pause(&args, &settings).await,
            Self::Resume(args) => pause::resume(&args, &settings).await,
            Self::Topology(args) => Ok(topology::run(&args, &settings)),
            Self::Parked(command) => parked::run(command, settings).await,
            Self::Late(command) => late::run(command, settings).await,
            Self::Closing(command) => closing::run(command, settings).await,
            Self::Provider(command) => provider::run(command, settings).await,
            Self::Adopt(args) => adopt::run(args, settings).await,
            Self::Audit(args) => audit::run(args, settings).await,
            Self::Sql(args) => sql::run(args, settings).await,
            Self::Testing(command) => testing::run(command, settings).await,
            Self::Config(args) => config::run(&args, given),
            Self::Completions(args) => generate::completions(&args),
            Self::Man => generate::man(),
        }
    }
}
