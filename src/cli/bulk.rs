//! How a command changes many orders: the preview, the question before it begins, the signals that stop
//! it, and the report.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::bail;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::cli::CommandOutcome;
use crate::cli::signals::Signals;
use crate::operations::paced::{FailedOrder, Progress};
use crate::operations::preview::{Example, Preview};

/// How long a batch waits for locks: meanwhile it holds the rows that it has locked.
pub const LOCK_TIMEOUT: Duration = Duration::from_millis(250);
/// How often the progress is shown on a terminal.
const SHOW_EVERY: Duration = Duration::from_secs(2);

/// A run that changes many orders.
pub struct Bulk {
    /// Whether the question is answered already.
    pub yes: bool,
    pub run: Uuid,
    /// What is about to happen, with the number of orders: "move the deadlines of 12 unpaid orders".
    pub what: String,
    pub preview: Preview,
    pub json: bool,
}

impl Bulk {
    /// Shows the preview, and asks whether to go on.
    ///
    /// # Errors
    /// If there is neither `--yes` nor a terminal, or the answer is no.
    pub fn ask(&self) -> anyhow::Result<()> {
        let mut shown = CommandOutcome::default();
        self.show_preview(&mut shown);
        // Standard error may be closed; the question then has no answer.
        let _ = write!(std::io::stderr(), "{}", shown.text());
        if self.yes {
            return Ok(());
        }
        if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
            bail!("nothing was changed: there is no terminal to ask at; add --yes to {}", self.what);
        }
        let _ = write!(std::io::stderr(), "Type yes to {}: ", self.what);
        let mut answer = String::new();
        std::io::stdin().read_line(&mut answer)?;
        if answer.trim().eq_ignore_ascii_case("yes") { Ok(()) } else { bail!("nothing was changed") }
    }

    fn show_preview(&self, to: &mut CommandOutcome) {
        let Preview { orders, overdue, items, units, .. } = self.preview;
        let reserve = match (units, items) {
            (Some(units), Some(items)) => format!("; they reserve {units} units in {items} items"),
            _ => String::new(),
        };
        to.line(format!("{orders} unpaid orders match, {overdue} of them overdue{reserve}"));
        if let (Some(first), Some(last)) = (&self.preview.first_deadline, &self.preview.last_deadline) {
            to.line(format!("deadlines from {first} to {last}"));
        }
        for Example { order_id, deadline, becomes } in &self.preview.examples {
            let deadline = deadline.as_deref().unwrap_or("no deadline");
            match becomes {
                Some(becomes) => to.indented(format!("{order_id}  {deadline} -> {becomes}")),
                None => to.indented(format!("{order_id}  {deadline}")),
            }
        }
        let shown = self.preview.examples.len();
        if orders > shown {
            to.indented(format!("and {} more", orders - shown));
        }
        to.line(format!("run {}: to {}", self.run, self.what));
    }

    /// Waits for the work. The first signal ends it after the current batch.
    ///
    /// # Errors
    /// If a second signal arrives before that.
    pub async fn until_stopped(
        stop: &CancellationToken,
        work: impl Future<Output = Progress>,
    ) -> anyhow::Result<Progress> {
        let mut signals = Signals::listen()?;
        let mut work = std::pin::pin!(work);
        tokio::select! {
            progress = &mut work => return Ok(progress),
            () = signals.next() => stop.cancel(),
        }
        tokio::select! {
            progress = &mut work => Ok(progress),
            () = signals.next() => bail!("stopped at once by a second signal; a batch in flight may have been committed"),
        }
    }

    /// Shows the progress on a terminal, now and then.
    pub fn shows_progress(&self) -> impl FnMut(&Progress) + use<> {
        let (is_shown, mut shown_at) = (std::io::stderr().is_terminal(), Instant::now());
        move |progress| {
            if is_shown && shown_at.elapsed() >= SHOW_EVERY {
                shown_at = Instant::now();
                let _ = writeln!(std::io::stderr(), "{} done, {} left", progress.done(), progress.left);
            }
        }
    }

    /// The report. `go_on` says how the rest is done if something is left.
    pub fn report(&self, progress: &Progress, go_on: &str) -> CommandOutcome {
        let mut output = CommandOutcome { code: u8::from(!progress.is_complete()), ..CommandOutcome::default() };
        if self.json {
            output.line(json!({ "run": self.run, "preview": self.preview, "result": progress }));
            return output;
        }
        let counts: Vec<String> =
            progress.outcomes.iter().map(|(outcome, orders)| format!("{orders} {outcome}")).collect();
        output.line(if counts.is_empty() { "nothing done".to_owned() } else { counts.join(", ") });
        for FailedOrder { order_id, why } in &progress.failed {
            output.line(format!("{order_id}: failed: {why}"));
        }
        if let Some(stopped) = &progress.stopped {
            output.line(format!("stopped with {} orders left: {stopped}", progress.left));
        }
        if output.code != 0 {
            output.line(go_on);
        }
        output
    }

    /// The report of a run that finds no order to change.
    pub fn nothing(&self) -> CommandOutcome {
        let mut output = CommandOutcome::default();
        output.line(match self.json {
            true => json!({ "run": self.run, "preview": self.preview, "result": Progress::default() }).to_string(),
            false => "nothing to do: no unpaid order matches".to_owned(),
        });
        output
    }
}
