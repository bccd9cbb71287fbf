//! What a worker would close, without closing it: finds due orders by the overdue statement, and runs the close statement
//! (with a payment provider the claim) in a transaction that is rolled back at once.
//!
//! Needs no broker, and writes nothing that is committed. Logs nothing: the caller does.

mod brake;

use std::collections::HashMap;
use std::time::Duration;

use order_timeout_core::kind::Kind;
use order_timeout_core::order::{
    CloseError, CloseResult, ClosedBy, Deadline, OrderId, Outcome, Overdue, SweepPage, SweepReach,
};

use super::{first_backlog, orders_statements};
use crate::config::Settings;
use crate::effects::close::Closer;
use crate::effects::sweep::Sweeper;
use crate::postgres::adoption::Adoptable;
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{self, Database, DatabaseError, closing_pauses, one_line};
use brake::DryBrake;

/// Overdue orders per query.
const PAGE: usize = 1_000;
/// Orders whose rows are locked at a time.
const MOST_AT_ONCE: usize = 100;

/// A decision about an order, which is made once for each deadline of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The kind of the deadline.
    pub kind: Kind,
    /// The order.
    pub order_id: OrderId,
    /// Its deadline, which has passed.
    pub deadline: Deadline,
    /// What a worker would do.
    pub verdict: Verdict,
    /// Why it would not do so yet, in one sentence.
    pub held: Option<String>,
}

/// What a worker would do with a due order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Close it, or with a payment provider: claim it, ask the provider, and close it if it is not paid there.
    WouldClose {
        /// Why, in one sentence.
        reason: &'static str,
    },
    /// Leave it as it is.
    WouldNotClose {
        /// Why, in one sentence.
        why: String,
    },
}

/// What a look has found that no earlier one has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// About orders that fell due.
    pub decisions: Vec<Decision>,
    /// What holds back all orders of a kind now; `None`: nothing any more.
    pub holds: Vec<(Kind, Option<String>)>,
}

/// The kinds of a worker, and what was reported of each.
#[derive(Debug)]
pub struct DryRun {
    settings: Settings,
    database: Database,
    kinds: Vec<DryKind>,
}

#[derive(Debug)]
struct DryKind {
    kind: Kind,
    closer: Closer,
    sweeper: Sweeper,
    orders: Adoptable,
    may_close: bool,
    /// `None` if it is off.
    brake: Option<DryBrake>,
    reported: HashMap<OrderId, Deadline>,
    held: Option<String>,
}

impl DryRun {
    /// Prepares the statements of all kinds that a worker with these settings serves.
    ///
    /// # Errors
    /// [`DatabaseError`], as at a worker's start.
    pub async fn prepare(settings: Settings) -> Result<Self, DatabaseError> {
        let served = settings.served_kinds();
        // Each closer keeps one.
        let connections = u32::try_from(served.len()).unwrap_or(u32::MAX).saturating_add(1);
        let database = Database::connect(&settings.database, connections).await?;
        postgres::require_migrated(&database).await?;
        let mut kinds = Vec::new();
        for kind in served {
            kinds.push(DryKind::prepare(&settings, &database, kind).await?);
        }
        Ok(Self { settings, database, kinds })
    }

    /// Looks once at all overdue orders.
    ///
    /// # Errors
    /// [`DatabaseError`] if the database does not answer. What was found before that is reported by the next look.
    pub async fn look(&mut self) -> Result<Findings, DatabaseError> {
        let mut findings = Findings::default();
        for kind in &mut self.kinds {
            kind.look(&self.settings, &self.database, &mut findings).await?;
        }
        for kind in &mut self.kinds {
            kind.note_reported(&findings);
        }
        Ok(findings)
    }
}

impl DryKind {
    async fn prepare(settings: &Settings, database: &Database, kind: Kind) -> Result<Self, DatabaseError> {
        let statements = orders_statements::statements(database, settings, &kind).await?;
        let connections = WarmConnections::new(database.clone());
        let closer = Closer::prepare(connections, statements.close).await?;
        let sweeper = Sweeper::prepare(database.clone(), statements.overdue).await?;
        let orders = first_backlog::adoptable(&statements.orders, &statements.defined_by, &sweeper);
        let brake = settings.brake.bounds().map(|bounds| DryBrake::new(kind.clone(), bounds));
        let (may_close, reported) = (false, HashMap::new());
        Ok(Self { kind, closer, sweeper, orders, may_close, brake, reported, held: None })
    }

    async fn look(
        &mut self,
        settings: &Settings,
        database: &Database,
        findings: &mut Findings,
    ) -> Result<(), DatabaseError> {
        let refusal = self.refusal(settings, database).await?;
        if let Some(brake) = &mut self.brake {
            brake.look(self.closer.connections(), &self.sweeper).await?;
        }
        let held = match &refusal {
            Some(why) => Some(why.clone()),
            None => self.pause(database).await?.or_else(|| self.brake.as_ref()?.trip().cloned()),
        };
        if held != self.held {
            findings.holds.push((self.kind.clone(), held.clone()));
        }
        // There may be millions, and a worker would not even start.
        if refusal.is_some() {
            return Ok(());
        }
        let (mut after, mut found) = (None, HashMap::new());
        loop {
            let page = SweepPage { reach: SweepReach::Overdue(Duration::ZERO), after, limit: PAGE };
            let page = self.sweeper.overdue(&page).await;
            let page =
                page.map_err(|error| DatabaseError(format!("overdue orders cannot be read: {}", one_line(&error))))?;
            let (known, new): (Vec<Overdue>, Vec<Overdue>) =
                page.orders.into_iter().partition(|order| self.reported.get(&order.order_id) == Some(&order.deadline));
            found.extend(known.into_iter().map(|order| (order.order_id, order.deadline)));
            for batch in new.chunks(MOST_AT_ONCE.min(settings.worker.batch_size)) {
                self.decide(batch, held.as_ref(), findings).await?;
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        // Those that are not overdue any more are forgotten.
        self.reported = found;
        Ok(())
    }

    /// Why a worker would not start: the first backlog is too large.
    async fn refusal(&mut self, settings: &Settings, database: &Database) -> Result<Option<String>, DatabaseError> {
        if !self.may_close {
            let verdict = first_backlog::judge(database, &self.sweeper, &self.orders, settings, &self.kind).await?;
            if let first_backlog::Verdict::Refused(why) = verdict {
                return Ok(Some(why));
            }
            self.may_close = true;
        }
        Ok(None)
    }

    async fn pause(&self, database: &Database) -> Result<Option<String>, DatabaseError> {
        let pauses = database.run(async |connection| closing_pauses::current(connection, Some(&self.kind)).await).await;
        let pauses =
            pauses.map_err(|error| DatabaseError(format!("closing_pauses cannot be read: {}", one_line(&error))))?;
        Ok(pauses.first().map(closing_pauses::Pause::sentence))
    }

    async fn decide(
        &self,
        batch: &[Overdue],
        held: Option<&String>,
        findings: &mut Findings,
    ) -> Result<(), DatabaseError> {
        let ids: Vec<OrderId> = batch.iter().map(|order| order.order_id.clone()).collect();
        let mut answers = HashMap::new();
        match self.closer.would_close(&ids, ClosedBy::Sweep).await {
            Ok(found) => answers = found,
            // One by one, to name the order that it is about.
            Err(CloseError::Rejected(_)) => {
                for id in &ids {
                    match self.closer.would_close(std::slice::from_ref(id), ClosedBy::Sweep).await {
                        Ok(found) => answers.extend(found),
                        Err(fault) => drop(answers.insert(id.clone(), Err(fault))),
                    }
                }
            }
            // Another session holds what they need: the next look asks again.
            Err(CloseError::Locked(_) | CloseError::Transient(_)) => return Ok(()),
            Err(CloseError::Unavailable(why)) => {
                return Err(DatabaseError(format!("what would be closed cannot be found: {why}")));
            }
        }
        for Overdue { order_id, deadline } in batch {
            if let Some(verdict) = self.verdict(answers.get(order_id)) {
                let (kind, order_id, held) = (self.kind.clone(), order_id.clone(), held.cloned());
                findings.decisions.push(Decision { kind, order_id, deadline: *deadline, verdict, held });
            }
        }
        Ok(())
    }

    /// `None` if only a later look can tell.
    fn verdict(&self, answer: Option<&CloseResult>) -> Option<Verdict> {
        let would_not = |why: String| Some(Verdict::WouldNotClose { why });
        match answer {
            Some(Ok(found)) => match found.outcome {
                Outcome::Closed => Some(Verdict::WouldClose { reason: "it is unpaid, and its time is up" }),
                Outcome::Claimed => Some(Verdict::WouldClose {
                    reason: "it is unpaid, and its time is up; if the payment provider says that it is not paid there",
                }),
                // Busy, or paid since the page was read: the next one does not have it any more.
                Outcome::Busy | Outcome::NotDue | Outcome::Paid | Outcome::AlreadyClosed => None,
                other => would_not(format!("the statement answers {}", other.as_str())),
            },
            Some(Err(CloseError::Locked(_) | CloseError::Transient(_))) => None,
            Some(Err(fault)) => would_not(fault.to_string()),
            None => would_not("the statement does not find it".to_owned()),
        }
    }

    fn note_reported(&mut self, findings: &Findings) {
        let own = || findings.decisions.iter().filter(|one| one.kind == self.kind);
        self.reported.extend(own().map(|one| (one.order_id.clone(), one.deadline)));
        if let Some(brake) = &mut self.brake {
            // What is held is not closed.
            let closed = own().filter(|one| one.held.is_none() && matches!(one.verdict, Verdict::WouldClose { .. }));
            brake.note(closed.map(|one| one.deadline));
        }
        if let Some((_, held)) = findings.holds.iter().find(|(kind, _)| *kind == self.kind) {
            self.held.clone_from(held);
        }
    }
}
