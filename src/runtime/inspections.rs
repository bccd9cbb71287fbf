//! Checks every few seconds that the database still has what the worker needs, registers the worker there, and reports
//! what is wrong. From the registered workers follows the share of orders that each reads ahead.
//!
//! Decides when; `inspect/` checks and explains. In tasks of their own, so that no order waits for them: one for the
//! worker, and one for the statements of each kind.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use order_timeout_core::engine::Share;
use order_timeout_core::kind::Kind;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::active_kinds::ActiveKinds;
use super::kind_worker::Shared;
use crate::give_way::GiveWay;
use crate::observe::degraded::Cause;
use crate::observe::inspect::plan::Plans;
use crate::observe::inspect::registration::{Registered, Registration, not_served};
use crate::observe::inspect::schema::Schema;
use crate::observe::recorder::{KindRecorder, Recorder};
use crate::operations::unresolved;
use crate::postgres::{Database, one_line};

/// How often the database is checked.
const EVERY: Duration = Duration::from_secs(3);
/// How often the plans are checked: less often, because EXPLAIN costs as much as planning.
const PLANS_EVERY: Duration = Duration::from_secs(6);
/// How long a kind may be without a worker before that is reported: as long as a worker that has ended counts as live.
const UNSERVED_NAMED_AFTER: Duration = Duration::from_secs(10);
/// How long a stopping worker waits for its row to be deleted.
const DELETE_ROW_TIMEOUT: Duration = Duration::from_secs(1);

struct Registering {
    registration: Registration,
    active_kinds: ActiveKinds,
    /// The share that each engine was last told.
    shares: BTreeMap<Kind, Share>,
    unserved: UnservedKinds,
    give_way: GiveWay,
    recorder: Recorder,
}

/// Kinds that the settings name and no live worker serves.
#[derive(Debug, Default)]
struct UnservedKinds(BTreeMap<Kind, Instant>);

impl UnservedKinds {
    /// Returns each kind that was ever without a worker, and whether that has lasted long enough to be reported.
    fn note(&mut self, unserved: BTreeSet<Kind>, now: Instant) -> Vec<(Kind, bool)> {
        for kind in unserved.iter().filter(|kind| !self.0.contains_key(kind)).cloned().collect::<Vec<_>>() {
            self.0.insert(kind, now);
        }
        let lasts = |kind: &Kind, since: Instant| unserved.contains(kind) && now - since >= UNSERVED_NAMED_AFTER;
        let found = self.0.iter().map(|(kind, since)| (kind.clone(), lasts(kind, *since))).collect();
        self.0.retain(|kind, _| unserved.contains(kind));
        found
    }
}

/// Checks what concerns the whole worker, until `ends`; then its row is deleted. From `stop` on the row names no kinds, so
/// that other workers read ahead what this one does not begin any more.
///
/// Two checks side by side: a table that is locked may keep the catalog's answer, and must not let the registration expire.
pub(super) async fn inspect(shared: Arc<Shared>, recorder: Recorder) {
    let registering = Registering {
        registration: Registration::new(shared.database.clone(), &shared.settings),
        active_kinds: shared.active_kinds.clone(),
        shares: BTreeMap::new(),
        unserved: UnservedKinds::default(),
        give_way: GiveWay::to(&shared.busy_kinds),
        recorder: recorder.clone(),
    };
    let ends = &shared.outboxes_end;
    tokio::join!(ends.run_until_cancelled(inspect_catalog(&shared, &recorder)), registering.go_on(&shared.stop, ends));
}

/// A check that fails changes nothing: an unavailable database is reported elsewhere.
async fn inspect_catalog(shared: &Shared, recorder: &Recorder) {
    let (database, settings) = (&shared.database, &shared.settings);
    let schema = Schema::new(settings);
    let claims_orders = settings.served_kinds().iter().any(|kind| settings.claims_orders(kind));
    let mut give_way = GiveWay::to(&shared.busy_kinds);
    loop {
        match schema.look(database).await {
            Ok(found) => found.into_iter().for_each(|(cause, problems)| recorder.problems(cause, None, problems)),
            Err(error) => debug!(error = one_line(&error), "the schema could not be checked"),
        }
        if claims_orders {
            match unresolved::without_provider(database).await {
                Ok(why) => recorder.degraded(Cause::ProviderAway, why.as_deref()),
                Err(error) => debug!(error = one_line(&error), "the providers of claimed orders could not be checked"),
            }
        }
        // Also where no provider is asked any more: the orders that were asked about before still wait.
        let unresolved = unresolved::count(database).await;
        recorder.metrics.orders_unresolved.show(&[], unresolved.ok().map(|count| count as f64));
        // The catalog takes a core of the server for milliseconds, which a burst would wait for.
        give_way.due(Instant::now() + EVERY).await;
    }
}

impl Registering {
    async fn go_on(mut self, stop: &CancellationToken, ends: &CancellationToken) {
        let mut draining = false;
        loop {
            if !self.finish_turn(draining, ends).await {
                break;
            }
            tokio::select! {
                () = self.give_way.due(Instant::now() + EVERY) => {}
                () = stop.cancelled(), if !draining => draining = true,
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

    /// Returns false if the end has come. A registration that is on its way would arrive after the row is deleted, so it is
    /// waited for.
    async fn finish_turn(&mut self, draining: bool, ends: &CancellationToken) -> bool {
        let mut turn = std::pin::pin!(self.turn(draining));
        tokio::select! {
            () = &mut turn => return true,
            () = ends.cancelled() => {}
        }
        let _ = tokio::time::timeout(DELETE_ROW_TIMEOUT, turn).await;
        false
    }

    async fn turn(&mut self, draining: bool) {
        let active = if draining { BTreeSet::new() } else { self.active_kinds.names() };
        match self.registration.register(&active, self.recorder.health.is_ready().problems).await {
            Ok(registered) => {
                let disagreement = registered.disagreement().into_iter().collect();
                self.recorder.problems(Cause::WorkersDisagree, None, disagreement);
                self.tell_shares(&registered, &active);
                if !draining {
                    self.report_unserved(&registered);
                }
            }
            Err(error) => debug!(error = one_line(&error), "this worker could not be registered"),
        }
    }

    fn tell_shares(&mut self, registered: &Registered, active: &BTreeSet<Kind>) {
        for kind in active {
            let share = registered.share_of(kind);
            // An engine begins with all orders.
            if self.shares.insert(kind.clone(), share).unwrap_or(Share::ALL) != share {
                self.active_kinds.tell_share(kind, share);
            }
        }
    }

    fn report_unserved(&mut self, registered: &Registered) {
        for (kind, lasts) in self.unserved.note(registered.unserved(), Instant::now()) {
            let found = lasts.then(|| not_served(&kind)).into_iter().collect();
            self.recorder.problems(Cause::KindNotServed, Some(&kind), found);
        }
    }
}

/// Checks the plans of one kind's statements, until `ends`. A check that fails changes nothing, as above.
pub(super) async fn inspect_plans(
    plans: Plans,
    database: Database,
    mut give_way: GiveWay,
    recorder: KindRecorder,
    ends: CancellationToken,
) {
    let inspecting = async {
        loop {
            match plans.look(&database).await {
                Ok(found) => found.into_iter().for_each(|(cause, problems)| recorder.problems(cause, problems)),
                Err(error) => debug!(error = one_line(&error), "the statements could not be explained"),
            }
            give_way.due(Instant::now() + PLANS_EVERY).await;
        }
    };
    let _ends = ends.run_until_cancelled(inspecting).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kind_is_unserved_after_a_while() {
        let (mut unserved, began) = (UnservedKinds::default(), Instant::now());
        let kind = Kind::new("acceptance").unwrap();
        let only = || BTreeSet::from([kind.clone()]);
        assert_eq!(unserved.note(BTreeSet::new(), began), []);
        assert_eq!(unserved.note(only(), began), [(kind.clone(), false)]);
        assert_eq!(unserved.note(only(), began + UNSERVED_NAMED_AFTER), [(kind.clone(), true)]);
        assert_eq!(unserved.note(BTreeSet::new(), began + UNSERVED_NAMED_AFTER), [(kind.clone(), false)], "cleared");
        assert_eq!(unserved.note(BTreeSet::new(), began + UNSERVED_NAMED_AFTER), []);
    }
}
