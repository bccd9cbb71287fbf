//! Checks every few seconds that the database still has what the worker needs, registers the worker there, and reports
//! what is wrong. From the registered workers follows the share of orders that each reads ahead.
//!
//! Decides when; `inspect/` checks and explains. In tasks of their own, so that no order waits for them: one for the
//! worker, and one for the statements of each kind.

use std::time::Duration;

use order_timeout_core::engine::{Input, Share};
use order_timeout_core::kind::Kind;
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
use crate::observe::inspect::schema::Schema;
use crate::observe::recorder::{KindRecorder, Recorder};
use crate::operations::{orders_statements, unresolved};
use crate::postgres::{Database, one_line};

/// How often the database is checked.
const EVERY: Duration = Duration::from_secs(3);
/// How often the plans are checked: less often, because EXPLAIN costs as much as planning.
const PLANS_EVERY: Duration = Duration::from_secs(6);
/// How long a stopping worker waits for its row to be deleted.
const DELETE_ROW_TIMEOUT: Duration = Duration::from_secs(1);

/// What is checked once for the worker.
pub(super) struct Inspections {
    database: Database,
    schema: Schema,
    asks_providers: bool,
    registration: Registration,
    kinds: Vec<KindShare>,
    give_way: GiveWay,
    recorder: Recorder,
}

/// The share of a kind's orders that this worker reads ahead, as the kind's engine was last told.
struct KindShare {
    kind: Kind,
    share: Share,
    inputs: mpsc::UnboundedSender<Input>,
}

impl Inspections {
    /// `kinds`: those that the worker serves, and where each is told its share.
    pub fn new(
        settings: &Settings,
        database: Database,
        kinds: Vec<(Kind, mpsc::UnboundedSender<Input>)>,
        give_way: GiveWay,
        recorder: Recorder,
    ) -> Self {
        let kinds = kinds.into_iter().map(|(kind, inputs)| KindShare { kind, share: Share::ALL, inputs });
        Self {
            schema: if settings.asks_providers() {
                Schema::new(settings).with_provider()
            } else {
                Schema::new(settings)
            },
            asks_providers: settings.asks_providers(),
            registration: Registration::new(database.clone(), settings),
            database,
            kinds: kinds.collect(),
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
                // The catalog takes a core of the server for milliseconds, which a burst would wait for.
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
            Ok(found) => found.into_iter().for_each(|(cause, why)| self.recorder.degraded(cause, why.as_deref())),
            Err(error) => debug!(error = one_line(&error), "the schema could not be checked"),
        }
        if self.asks_providers {
            let unresolved = unresolved::count(&self.database).await;
            self.recorder.metrics.orders_unresolved.show(unresolved.ok().map(|count| count as f64));
        }
        match self.registration.register().await {
            Ok(registered) => {
                self.recorder.degraded(Cause::WorkersDisagree, registered.disagreement.as_deref());
                self.tell_shares(&registered);
            }
            Err(error) => debug!(error = one_line(&error), "this worker could not be registered"),
        }
    }

    fn tell_shares(&mut self, registered: &Registered) {
        for known in &mut self.kinds {
            let share = registered.share_of(&known.kind);
            if std::mem::replace(&mut known.share, share) != share {
                // Without the event loop the input is not needed.
                let _ = known.inputs.send(Input::ShareChanged(share));
            }
        }
    }
}

/// What is checked of the statements of one kind.
pub(super) struct PlanInspections {
    database: Database,
    plans: Plans,
    give_way: GiveWay,
    recorder: KindRecorder,
}

impl PlanInspections {
    pub fn new(
        settings: &Settings,
        kind: &Kind,
        database: Database,
        (closer, sweeper): (&Closer, &Sweeper),
        give_way: GiveWay,
        recorder: KindRecorder,
    ) -> Self {
        let (close_name, overdue_name) = orders_statements::names(settings, kind);
        let is_own = !settings.has_default_orders(kind);
        let own_close = is_own.then(|| {
            let (sql, parameters) = closer.statement();
            (sql, parameters, close_name)
        });
        let plans = Plans::new((sweeper.statement(), overdue_name), own_close).with_index(sweeper.index());
        Self { database, plans, give_way, recorder }
    }

    /// Runs until `ends`. A check that fails changes nothing, as above.
    pub async fn go_on(mut self, ends: CancellationToken) {
        loop {
            tokio::select! {
                looked = self.plans.look(&self.database) => match looked {
                    Ok(found) => {
                        found.into_iter().for_each(|(cause, why)| self.recorder.degraded(cause, why.as_deref()));
                    }
                    Err(error) => debug!(error = one_line(&error), "the statements could not be explained"),
                },
                () = ends.cancelled() => return,
            }
            tokio::select! {
                () = self.give_way.due(Instant::now() + PLANS_EVERY) => {}
                () = ends.cancelled() => return,
            }
        }
    }
}
