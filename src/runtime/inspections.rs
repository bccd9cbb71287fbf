//! Checks every few seconds that the database still has what the worker needs, registers the worker there, and reports
//! what is wrong. From the registered workers follows the share of orders that each reads ahead.
//!
//! Decides when; `inspect/` checks and explains. In a task of its own, so that no order waits for it.

use std::collections::BTreeMap;
use std::time::Duration;

use order_timeout_core::engine::{Input, Share};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::give_way::GiveWay;
use crate::config::Settings;
use crate::effects::close::Closer;
use crate::effects::sweep::Sweeper;
use crate::observe::degraded::Cause;
use crate::observe::inspect::plan::Plans;
use crate::observe::inspect::registration::{Registered, Registration};
use crate::observe::inspect::schema::{Found, Schema};
use crate::observe::recorder::Recorder;
use crate::operations::orders_statements;
use crate::postgres::{Database, one_line};

/// How often the database is checked.
const EVERY: Duration = Duration::from_secs(3);
/// The plans are checked in every second round, because EXPLAIN costs as much as planning.
const TURNS_BETWEEN_PLANS: u32 = 2;
/// How long a stopping worker waits for its row to be deleted.
const DELETE_ROW_TIMEOUT: Duration = Duration::from_secs(1);

/// The checks that find causes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Finder {
    Schema,
    Plans,
}

pub(super) struct Inspections {
    database: Database,
    schema: Schema,
    plans: Plans,
    registration: Registration,
    /// What each check has found last.
    found: BTreeMap<(Cause, Finder), Option<String>>,
    share: Share,
    inputs: mpsc::UnboundedSender<Input>,
    turn: u32,
    give_way: GiveWay,
    recorder: Recorder,
}

impl Inspections {
    pub fn new(
        settings: &Settings,
        database: Database,
        closer: &Closer,
        sweeper: &Sweeper,
        inputs: mpsc::UnboundedSender<Input>,
        give_way: GiveWay,
        recorder: Recorder,
    ) -> Self {
        let (close_name, overdue_name) = orders_statements::names(settings);
        let is_own = !settings.has_default_orders();
        let own_close = is_own.then(|| {
            let (sql, parameters) = closer.statement();
            (sql, parameters, close_name)
        });
        Self {
            schema: Schema::new(settings),
            plans: Plans::new((sweeper.statement(), overdue_name), own_close).with_index(sweeper.index()),
            registration: Registration::new(database.clone(), settings),
            database,
            found: BTreeMap::new(),
            share: Share::ALL,
            inputs,
            turn: 0,
            give_way,
            recorder,
        }
    }

    /// Runs until `ends`, then deletes this worker's row.
    pub async fn go_on(mut self, ends: CancellationToken) {
        loop {
            tokio::select! {
                () = self.turn() => {}
                () = ends.cancelled() => break,
            }
            tokio::select! {
                // Planning and the catalog take a core of the server for milliseconds, which a burst would wait for.
                () = self.give_way.due(Instant::now() + EVERY) => {}
                () = ends.cancelled() => break,
            }
        }
        if let Ok(Err(error)) = tokio::time::timeout(DELETE_ROW_TIMEOUT, self.registration.leave()).await {
            debug!(
                error = one_line(&error),
                "this worker's row could not be deleted; it counts as gone in ten seconds"
            );
        }
    }

    /// A check that fails changes nothing: an unavailable database is reported elsewhere.
    async fn turn(&mut self) {
        match self.schema.look(&self.database).await {
            Ok(found) => self.note(Finder::Schema, found),
            Err(error) => debug!(error = one_line(&error), "the schema could not be checked"),
        }
        if self.turn.is_multiple_of(TURNS_BETWEEN_PLANS) {
            match self.plans.look(&self.database).await {
                Ok(found) => self.note(Finder::Plans, found),
                Err(error) => debug!(error = one_line(&error), "the statements could not be explained"),
            }
        }
        match self.registration.register().await {
            Ok(Registered { disagreement, share }) => {
                self.recorder.degraded(Cause::WorkersDisagree, disagreement.as_deref());
                if std::mem::replace(&mut self.share, share) != share {
                    // Without the event loop the input is not needed.
                    let _ = self.inputs.send(Input::ShareChanged(share));
                }
            }
            Err(error) => debug!(error = one_line(&error), "this worker could not be registered"),
        }
        self.turn = self.turn.wrapping_add(1);
    }

    fn note(&mut self, finder: Finder, found: Found) {
        for (cause, why) in found {
            self.found.insert((cause, finder), why);
            let all = self.found.range((cause, Finder::Schema)..=(cause, Finder::Plans));
            let all: Vec<&str> = all.filter_map(|(_, why)| why.as_deref()).collect();
            self.recorder.degraded(cause, (!all.is_empty()).then(|| all.join("; ")).as_deref());
        }
    }
}
