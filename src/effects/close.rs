//! Step 5, CLOSE: one batch, one statement, one transaction.
//!
//! Runs the close statement of the orders contract and reports the outcome of each order. Never decides what happens to
//! an alarm, never talks to the broker, and never reports "closed" before the commit is answered.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::engine::{Batch, BatchResult};
use order_timeout_core::order::{
    CloseError, CloseOutcome, CloseResult, ClosedBy, Deadline, OddAnswer, OrderId, Outcome, Timestamp,
};
use sqlx::postgres::{PgArguments, PgConnection, PgRow};
use sqlx::query::Query;
use sqlx::{Postgres, Row, SqlStr};
use tracing::debug;

use crate::postgres::contract::{Contract, ContractStatement, StatementSource};
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{self, DatabaseError, ErrorClass, Operator, classify, one_line};

const CONTRACT: Contract = Contract {
    setting: "orders.close_sql",
    // A statement may omit the path and the lock mode if it does not use them.
    parameters: &[&["TEXT[]"], &["TEXT[]", "TEXT"], &["TEXT[]", "TEXT", "BOOL"], &["TEXT[]", "TEXT", "BOOL", "BOOL"]],
    columns: &[("order_id", &["TEXT", "VARCHAR"]), ("outcome", &["TEXT", "VARCHAR"]), ("deadline", &["TIMESTAMPTZ"])],
};

/// Orders closed by one statement over an encrypted connection: their ids, of 36 characters and four bytes each, fit
/// into one TLS record (RFC 8446, 5.1). sqlx 0.9.0 leaves Nagle's algorithm on (transact-rs/sqlx#4335): a second record
/// may wait for the first to be acknowledged, over loopback 40 ms.
const ENCRYPTED_BATCH_SIZE: usize = 400;

/// Closes batches. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Closer {
    connections: WarmConnections,
    statement: ContractStatement,
    /// Results outside the contract that were not taken yet.
    odd: Arc<Mutex<Vec<OddAnswer>>>,
}

impl Closer {
    /// Prepares the close statement (a text names its file) and checks it against the contract.
    ///
    /// # Errors
    /// [`DatabaseError`] names the file and the column.
    pub async fn prepare(
        connections: WarmConnections,
        source: impl Into<StatementSource>,
    ) -> Result<Self, DatabaseError> {
        let statement = ContractStatement::load(connections.database(), &CONTRACT, &source.into()).await?;
        Ok(Self { connections, statement, odd: Arc::default() })
    }

    /// The most orders that one statement can close without an extra network delay on the current connections.
    pub async fn most_at_once(&self) -> usize {
        if self.connections.database().is_encrypted().await { ENCRYPTED_BATCH_SIZE } else { usize::MAX }
    }

    /// The connections, whose clock is read between closes.
    #[must_use]
    pub fn connections(&self) -> &WarmConnections {
        &self.connections
    }

    /// Closes those of `ids` that are unpaid and due, and returns the outcome of each; an order without an entry is
    /// unknown. All or nothing: one order that cannot be closed fails the batch, which the caller then splits.
    /// `waits_for_locks`: whether it may wait for locks on stock.
    ///
    /// # Errors
    /// [`CloseError`] tells a single order's failure from one that affects all.
    pub async fn close(
        &self,
        ids: &[OrderId],
        by: ClosedBy,
        waits_for_locks: bool,
    ) -> Result<HashMap<OrderId, CloseResult>, CloseError> {
        let ids = sorted(ids);
        let answers = self.try_to_close(&ids, by, waits_for_locks).await;
        self.judge(&ids, answers).await
    }

    /// The same by hand, in a transaction that says who asked for it and why. Waits for locks.
    ///
    /// # Errors
    /// As of [`Self::close`].
    pub async fn close_for(
        &self,
        operator: &Operator,
        ids: &[OrderId],
    ) -> Result<HashMap<OrderId, CloseResult>, CloseError> {
        let ids = sorted(ids);
        let work = async |connection: &mut PgConnection| {
            let mut transaction = sqlx::Connection::begin(connection).await?;
            operator.name_in_transaction(&mut transaction).await?;
            let found = self.run(&mut transaction, &ids, ClosedBy::Manual, true).await?;
            transaction.commit().await?;
            Ok(found)
        };
        let answers = self.connections.run_on_latest(work).await;
        self.judge(&ids, answers).await
    }

    /// What [`Self::close`] would answer now: the same statement, in a transaction that is rolled back at once. Waits for no
    /// lock.
    ///
    /// # Errors
    /// As of [`Self::close`].
    pub async fn would_close(
        &self,
        ids: &[OrderId],
        by: ClosedBy,
    ) -> Result<HashMap<OrderId, CloseResult>, CloseError> {
        let ids = sorted(ids);
        let work = async |connection: &mut PgConnection| {
            let mut transaction = sqlx::Connection::begin(connection).await?;
            postgres::shorten_lock_timeout(&mut transaction).await?;
            let found = self.run(&mut transaction, &ids, by, false).await;
            // Awaited after an error, too: until then the next try finds the rows locked.
            let ended = transaction.rollback().await;
            found.and_then(|found| ended.map(|()| found))
        };
        let answers = self.connections.run_on_latest(work).await;
        self.judge(&ids, answers).await
    }

    async fn judge(
        &self,
        ids: &[OrderId],
        answers: Result<Vec<ResultRow>, sqlx::Error>,
    ) -> Result<HashMap<OrderId, CloseResult>, CloseError> {
        match answers {
            Ok(answers) => {
                let (findings, odd) = gather(ids, answers);
                self.odd.lock().expect("no holder panics").extend(odd);
                Ok(findings)
            }
            Err(error) => Err(self.fault(&error).await),
        }
    }

    /// Whether the lock timeout must say what the statement has no parameter for: not to wait.
    fn lacks_lock_parameter(&self, waits_for_locks: bool) -> bool {
        // A statement with $3 decides itself whether to wait.
        !waits_for_locks && self.statement.parameters <= 2
    }

    /// Results outside the contract since the previous call.
    #[must_use]
    pub fn take_odd_answers(&self) -> Vec<OddAnswer> {
        std::mem::take(&mut *self.odd.lock().expect("no holder panics"))
    }

    /// The statement, and how many parameters it takes.
    #[must_use]
    pub fn statement(&self) -> (SqlStr, usize) {
        (self.statement.sql.clone(), self.statement.parameters)
    }

    /// One statement outside a transaction block is a transaction. `fetch_all` returns when the server is ready for
    /// the next one, which is after the commit.
    async fn try_to_close(
        &self,
        ids: &[OrderId],
        by: ClosedBy,
        waits_for_locks: bool,
    ) -> Result<Vec<ResultRow>, sqlx::Error> {
        let work = async |connection: &mut PgConnection| {
            if !self.lacks_lock_parameter(waits_for_locks) {
                return self.run(connection, ids, by, waits_for_locks).await;
            }
            let mut transaction = sqlx::Connection::begin(connection).await?;
            postgres::shorten_lock_timeout(&mut transaction).await?;
            let found = self.run(&mut transaction, ids, by, waits_for_locks).await?;
            transaction.commit().await?;
            Ok(found)
        };
        // At a thousand orders a second the server needs some 5 % less CPU than with all sessions in turn.
        self.connections.run_on_latest(work).await
    }

    /// What an error affects: no order for long, this order, or all orders.
    async fn fault(&self, error: &sqlx::Error) -> CloseError {
        let why = one_line(error);
        match classify(error) {
            ErrorClass::Locked => CloseError::Locked(why),
            ErrorClass::Transient => CloseError::Transient(why),
            ErrorClass::Data => CloseError::Rejected(why),
            // Without an order to close, no row's trigger can be the cause.
            ErrorClass::Broken if self.try_to_close(&[], ClosedBy::Alarm, true).await.is_ok() => {
                CloseError::Rejected(why)
            }
            ErrorClass::Broken | ErrorClass::Away => CloseError::Unavailable(why),
        }
    }

    async fn run(
        &self,
        connection: &mut PgConnection,
        ids: &[OrderId],
        by: ClosedBy,
        waits_for_locks: bool,
    ) -> Result<Vec<ResultRow>, sqlx::Error> {
        let texts: Vec<&str> = ids.iter().map(OrderId::as_str).collect();
        let query = with_arguments(self.statement(), &texts, by.as_str(), waits_for_locks);
        query.fetch_all(connection).await?.iter().map(read_row).collect()
    }

    /// Opens the missing connections and has the close statement planned on each through an empty batch, so that a
    /// burst waits for neither. Then replaces one that is too old, if there is one; if the server has no free
    /// connection, the others are still open.
    ///
    /// # Errors
    /// sqlx's, if one cannot be opened or the statement fails.
    pub async fn warm_up(&self) -> Result<(), sqlx::Error> {
        self.fill().await?;
        if self.connections.discard_old() { self.fill().await } else { Ok(()) }
    }

    async fn fill(&self) -> Result<(), sqlx::Error> {
        let plan = async |connection: &mut PgConnection| self.run(connection, &[], ClosedBy::Alarm, true).await;
        while self.connections.has_unplanned() {
            self.connections.run_on_unplanned(plan).await?;
        }
        while self.connections.lacks_some() {
            self.connections.run_on_another(plan).await?;
        }
        Ok(())
    }
}

/// In the order in which the statement locks them, each once.
fn sorted(ids: &[OrderId]) -> Vec<OrderId> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// A close statement and how many parameters it takes, with as many arguments.
pub(crate) fn with_arguments<'q>(
    (sql, parameters): (SqlStr, usize),
    ids: &'q [&'q str],
    path: &'static str,
    waits_for_locks: bool,
) -> Query<'q, Postgres, PgArguments> {
    let mut query = sqlx::query(sql).bind(ids);
    if parameters > 1 {
        query = query.bind(path);
    }
    if parameters > 2 {
        query = query.bind(waits_for_locks);
    }
    if parameters > 3 {
        // Orders that were claimed end in `closing/close_claimed.rs`.
        query = query.bind(false);
    }
    query
}

/// Logs the outcome of each order of a batch.
pub(super) fn log_results(batch: &Batch, answer: &BatchResult, now: Timestamp) {
    let findings = match answer {
        Ok(findings) => findings,
        Err(fault) => {
            let (orders, first) =
                (batch.items.len(), batch.items.first().map_or("", |item| item.alarm.order_id().as_str()));
            return debug!(orders, first, ?fault, "a batch could not be closed; it is retried");
        }
    };
    let closed_by = batch.by.as_str();
    for unknown in batch.items.iter().map(|item| item.alarm.order_id()).filter(|id| !findings.contains_key(*id)) {
        let outcome = Outcome::Unknown.as_str();
        debug!(order_id = %unknown, outcome, asked_by = closed_by, "order {unknown} is unchanged: {outcome}");
    }
    for (order_id, finding) in findings {
        match finding {
            Ok(found) if found.outcome == Outcome::Closed => {
                let lateness_ms = found.deadline.map(|deadline| now.since(deadline).as_secs_f64() * 1e3);
                debug!(%order_id, lateness_ms, closed_by, "order {order_id} closed");
            }
            Ok(found) => {
                let outcome = found.outcome.as_str();
                debug!(%order_id, outcome, asked_by = closed_by, "order {order_id} is unchanged: {outcome}");
            }
            Err(fault) => debug!(%order_id, ?fault, "order {order_id} could not be closed; it is retried"),
        }
    }
}

/// A row of the result, unchecked.
#[derive(Debug)]
struct ResultRow {
    order_id: String,
    word: Option<String>,
    /// `None` also for one with which an order is never due, such as `-infinity`.
    deadline: Option<Deadline>,
}

fn read_row(row: &PgRow) -> Result<ResultRow, sqlx::Error> {
    let deadline: Option<Timestamptz> = row.try_get("deadline")?;
    Ok(ResultRow {
        order_id: row.try_get("order_id")?,
        word: row.try_get("outcome")?,
        deadline: deadline.map(|Timestamptz(moment)| moment).filter(|moment| moment.can_be_due()),
    })
}

/// The outcome of each requested order, and one result outside the contract, if there is one.
fn gather(ids: &[OrderId], answers: Vec<ResultRow>) -> (HashMap<OrderId, CloseResult>, Option<OddAnswer>) {
    let (mut findings, mut odd) = (HashMap::with_capacity(answers.len()), None);
    for ResultRow { order_id, word, deadline } in answers {
        let Ok(order_id) = OrderId::new(&order_id) else {
            odd = Some(OddAnswer::NotAsked { order_id });
            continue;
        };
        let finding = match word.as_deref().and_then(Outcome::from_contract) {
            Some(outcome) => Ok(CloseOutcome { outcome, deadline }),
            None => {
                let fault = OddAnswer::Word { order_id: order_id.clone(), word };
                let finding = Err(CloseError::Rejected(format!("the close statement {fault}")));
                odd = Some(fault);
                finding
            }
        };
        match findings.entry(order_id) {
            Entry::Vacant(entry) => drop(entry.insert(finding)),
            Entry::Occupied(mut entry) => {
                let fault = OddAnswer::Twice { order_id: entry.key().clone() };
                // Only a retry can tell which of the two is right.
                if *entry.get() != finding {
                    *entry.get_mut() = Err(CloseError::Rejected(format!("the close statement {fault}")));
                }
                odd.get_or_insert(fault);
            }
        }
    }
    // Counting is the cheapest check when all is as it should be.
    if ids.iter().filter(|id| findings.contains_key(*id)).count() < findings.len() {
        let not_asked = findings.keys().find(|id| ids.binary_search(id).is_err()).map(ToString::to_string);
        odd = not_asked.map(|order_id| OddAnswer::NotAsked { order_id });
        findings.retain(|id, _| ids.binary_search(id).is_ok());
    }
    (findings, odd)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> OrderId {
        OrderId::new(text).unwrap()
    }

    fn gathered(rows: &[(&str, Option<&str>)]) -> (HashMap<OrderId, CloseResult>, Option<OddAnswer>) {
        let answers = rows.iter().map(|(order_id, word)| ResultRow {
            order_id: (*order_id).to_owned(),
            word: word.map(str::to_owned),
            deadline: None,
        });
        gather(&[id("1"), id("2")], answers.collect())
    }

    #[test]
    fn valid_results_are_returned_unchanged() {
        let (findings, odd) = gathered(&[("1", Some("closed")), ("2", Some("paid"))]);
        assert_eq!(odd, None);
        assert_eq!(findings[&id("1")], Ok(CloseOutcome { outcome: Outcome::Closed, deadline: None }));
        assert_eq!(gathered(&[("2", Some("busy"))]).1, None, "unknown orders have no row");
    }

    #[test]
    fn unknown_outcomes_are_reported() {
        for word in [Some("expired"), None] {
            let (findings, odd) = gathered(&[("1", word), ("2", Some("closed"))]);
            assert_eq!(odd, Some(OddAnswer::Word { order_id: id("1"), word: word.map(str::to_owned) }));
            assert!(findings[&id("1")].is_err() && findings[&id("2")].is_ok());
        }
    }

    #[test]
    fn unrequested_orders_are_left_out() {
        for foreign in ["3", "not\tan id"] {
            let (findings, odd) = gathered(&[("1", Some("closed")), (foreign, Some("closed"))]);
            assert_eq!(odd, Some(OddAnswer::NotAsked { order_id: foreign.into() }));
            assert_eq!(findings.len(), 1);
        }
    }

    #[test]
    fn second_row_for_one_order_is_reported() {
        let twice = Some(OddAnswer::Twice { order_id: id("1") });
        let (findings, odd) = gathered(&[("1", Some("closed")), ("1", Some("closed"))]);
        assert_eq!((findings[&id("1")].is_ok(), odd), (true, twice.clone()));
        let (findings, odd) = gathered(&[("1", Some("closed")), ("1", Some("paid"))]);
        assert_eq!((findings[&id("1")].is_ok(), odd), (false, twice), "only a retry tells which");
        let (findings, _) =
            gathered(&[("1", Some("not_due")), ("1", Some("paid")), ("2", Some("not_due")), ("2", Some("paid"))]);
        assert!(findings.values().all(Result::is_err), "every one of them");
    }
}
