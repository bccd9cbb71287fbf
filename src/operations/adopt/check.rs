//! `adopt --check`: proves the configured statements on the live database.
//!
//! Prepares, explains, and closes up to ten real orders in a transaction that is rolled back. Changes nothing.

use std::time::Duration;

use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::{SweepPage, SweepPlace, SweepReach};
use serde::Serialize;

use super::dry_close::{self, DryClose, FAR, StockChange};
use super::dry_payment::{self, DryPayment, DryReopening};
use super::{Finding, Level};
use crate::config::Settings;
use crate::config::kinds::{OrdersOf, TableSettings, key_of};
use crate::effects::close::Closer;
use crate::effects::sweep::Sweeper;
use crate::mapping::render::LEAVES_OPEN;
use crate::mapping::{self, Facts, Questions, RelationKind, quote};
use crate::observe::degraded::Cause;
use crate::observe::inspect::sentence;
use crate::operations::first_backlog::{self, Backlog, Verdict};
use crate::operations::orders_statements::{self, OrdersStatements};
use crate::postgres::adoption::Adoptable;
use crate::postgres::survey::{self, Index, Survey};
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{Database, DatabaseError, ErrorClass, catalog, classify, one_line};

/// The result of a check.
#[derive(Debug, Serialize)]
pub struct CheckReport {
    /// The orders table.
    pub orders: String,
    /// In the order of the checks.
    pub findings: Vec<Finding>,
}

impl CheckReport {
    /// Whether the mapping may be used.
    #[must_use]
    pub fn is_right(&self) -> bool {
        self.findings.iter().all(|finding| finding.level != Level::Wrong)
    }
}

/// Checks the statements in effect for this kind.
///
/// # Errors
/// [`DatabaseError`] if the database does not answer. What is wrong with the mapping is a finding.
pub async fn check(database: &Database, settings: &Settings, kind: &Kind) -> Result<CheckReport, DatabaseError> {
    let mut check = Check { settings, kind, findings: Vec::new() };
    // All at once, and alone: every other check meets the same missing rights.
    if let Some(sentence) = orders_statements::lacking_rights(database, settings, kind).await? {
        check.wrong("table", sentence);
        return Ok(check.report(String::new()));
    }
    let found = orders_statements::statements(database, settings, kind).await;
    let statements = match found {
        Ok(statements) => statements,
        Err(fault) => {
            check.wrong("", fault.to_string());
            return Ok(check.report(String::new()));
        }
    };
    let orders = statements.orders.clone();
    check.all(database, statements).await?;
    Ok(check.report(orders))
}

struct Check<'a> {
    settings: &'a Settings,
    kind: &'a Kind,
    findings: Vec<Finding>,
}

impl Check<'_> {
    fn report(mut self, orders: String) -> CheckReport {
        self.findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
        CheckReport { orders, findings: self.findings }
    }

    fn add(&mut self, level: Level, name: &str, sentence: String) {
        let (kind, orders) = (self.kind, self.settings.orders_of(self.kind));
        let key = match (name, orders) {
            (name, _) if name.starts_with("sweep.") => name.to_owned(),
            (_, Some(OrdersOf::Table(table))) if table.is_built_in => "the default tables".to_owned(),
            ("", Some(OrdersOf::Table(_))) => format!("kinds.{kind}.table"),
            (name, Some(OrdersOf::Table(_))) => key_of(kind, name),
            ("deadline" | "open", Some(OrdersOf::Statements { .. })) => {
                orders_statements::statement_setting(kind, "overdue_sql")
            }
            (_, Some(OrdersOf::Statements { .. })) => orders_statements::statement_setting(kind, "close_sql"),
            (_, Some(OrdersOf::Handler) | None) => format!("kinds.{kind}"),
        };
        let file = self.settings.kinds.get(kind).and_then(|kind| kind.origin.clone());
        let file = file.filter(|_| matches!(orders, Some(OrdersOf::Table(_))));
        self.findings.push(Finding { level, key, file, sentence });
    }

    fn wrong(&mut self, name: &str, sentence: impl Into<String>) {
        self.add(Level::Wrong, name, sentence.into());
    }

    fn proven(&mut self, name: &str, sentence: impl Into<String>) {
        self.add(Level::Proven, name, sentence.into());
    }

    fn note(&mut self, name: &str, sentence: impl Into<String>) {
        self.add(Level::Note, name, sentence.into());
    }

    async fn all(&mut self, database: &Database, statements: OrdersStatements) -> Result<(), DatabaseError> {
        let closer = Closer::prepare(WarmConnections::new(database.clone()), statements.close).await;
        let sweeper = Sweeper::prepare(database.clone(), statements.overdue).await;
        let (closer, sweeper) = match (closer, sweeper) {
            (Ok(closer), Ok(sweeper)) => (closer, sweeper),
            (closer, sweeper) => {
                for fault in [closer.err(), sweeper.err()].into_iter().flatten() {
                    self.wrong("", fault.to_string());
                }
                return Ok(());
            }
        };
        self.proven("", "the statements can be prepared, with the parameters and columns of the contract");
        if let Some(why) = statements.why_not_moved {
            self.note("deadline", why);
        }
        let functions = orders_statements::require_functions(database, self.kind, &statements.functions).await;
        if let Err(why) = &functions {
            self.wrong("pay", why.to_string());
        }
        let facts = self.tables(database).await?;
        self.questions(database, facts.as_ref(), statements.questions.as_ref()).await?;
        let unusable = statements.questions.map(|questions| questions.unusable);
        let may_run = self.plans(database, &closer, &sweeper).await?;
        if may_run {
            self.conditions(database, facts.as_ref()).await?;
            self.unusable(database, unusable).await?;
            self.next_due(database, &sweeper).await?;
            self.dry_close(database, &closer, &sweeper, facts.as_ref()).await?;
            if functions.is_ok() && !statements.functions.is_empty() && self.settings.claims_orders(self.kind) {
                self.dry_payment(database, &closer, &sweeper, facts.as_ref()).await;
                self.dry_reopening(database, &closer, &sweeper, facts.as_ref()).await;
            }
            let orders = first_backlog::adoptable(&statements.orders, &statements.defined_by, &sweeper);
            self.backlog(database, &sweeper, &orders).await?;
        }
        Ok(())
    }

    /// What operators ask can be asked: an amount may be an aggregate, which only the whole statement shows.
    async fn questions(
        &mut self,
        database: &Database,
        facts: Option<&Facts>,
        questions: Option<&Questions>,
    ) -> Result<(), DatabaseError> {
        if let Some(fault) = facts.and_then(|facts| facts.money_fault.as_ref()) {
            self.wrong(&fault.key, fault.why.clone());
        }
        let Some(questions) = questions else { return Ok(()) };
        let sql = &questions.due_minutes;
        let why = database.run(async |connection| catalog::why_not_prepared(connection, sql).await).await;
        if let Some(why) = why.map_err(|error| DatabaseError(one_line(&error)))? {
            self.wrong("amount", format!("cannot be used in the forecast: {why}; correct it"));
        }
        Ok(())
    }

    /// Keys, indexes and triggers of a mapping's tables.
    async fn tables(&mut self, database: &Database) -> Result<Option<Facts>, DatabaseError> {
        let Some(table) = self.settings.table_of(self.kind) else { return Ok(None) };
        let looked = database.run(async |connection| {
            let found = async {
                let facts = catalog::facts(connection, table).await?;
                let orders = survey::survey(connection, "table", &table.table).await?;
                let attempts = match &facts.attempts {
                    Some(table) => Some(survey::survey(connection, "attempts.table", &table.qualified()).await?),
                    None => None,
                };
                let mut others = Vec::new();
                for (settings, (items, stock)) in table.stock.iter().zip(&facts.stock) {
                    let items = survey::survey(connection, "items", &items.qualified()).await?;
                    others.push((settings, items, survey::survey(connection, "table", &stock.qualified()).await?));
                }
                Ok::<_, catalog::CatalogError>((facts, orders, attempts, others))
            };
            Ok(found.await)
        });
        let looked = looked.await.map_err(|error| DatabaseError(one_line(&error)))?;
        let (facts, orders, attempts, others) = looked.map_err(|fault| match fault {
            catalog::CatalogError::Mapping(fault) => orders_statements::unfit(self.settings, self.kind, &fault),
            catalog::CatalogError::Database(_) => DatabaseError(fault.to_string()),
        })?;
        self.orders_table(table, &orders);
        if let Some((settings, attempts)) = table.attempts.as_ref().zip(attempts) {
            self.require_index("attempts.order", &attempts, &settings.order.0, false);
        }
        for (index, (settings, items, stock)) in others.iter().enumerate() {
            let key = |name: &str| format!("stock[{index}].{name}");
            if [RelationKind::View, RelationKind::ForeignTable].contains(&items.relation.kind) {
                let view = items.relation.qualified();
                let why = format!(
                    "{view} is no table of this database; an index of what is behind it must find the rows of an order, as EXPLAIN of a SELECT from it shows"
                );
                self.note(&key("items"), why);
            } else {
                self.require_index(&key("order"), items, &settings.order.0, false);
            }
            let is_partitioned = stock.relation.kind == RelationKind::PartitionedTable;
            self.require_index(&key("stock_key"), stock, &settings.stock_key.0, !is_partitioned);
            self.triggers(&key("table"), stock);
        }
        Ok(Some(facts))
    }

    fn orders_table(&mut self, table: &TableSettings, orders: &Survey) {
        let is_partitioned = orders.relation.kind == RelationKind::PartitionedTable;
        // No unique index of a partitioned table can leave out the column that it is partitioned by.
        self.require_index("id", orders, &table.id.0, !is_partitioned);
        if let Some(column) = mapping::deadline_column(table, &orders.relation) {
            let kind = &orders.relation.columns[column].sql;
            self.proven("deadline", format!("is the column {column}, of type {kind}; NULL is never due"));
        }
        self.triggers("table", orders);
    }

    fn triggers(&mut self, key: &str, table: &Survey) {
        for trigger in &table.triggers {
            let name = table.relation.qualified();
            self.note(
                key,
                format!("the trigger {trigger} of {name} runs at every close, and an order that it refuses stays open"),
            );
        }
    }

    fn require_index(&mut self, key: &str, table: &Survey, columns: &[String], must_be_unique: bool) {
        let begins_with = |index: &&Index| {
            !index.is_partial && columns.len() <= index.columns.len() && {
                let first = &index.columns[..columns.len()];
                columns.iter().all(|column| first.contains(column))
            }
        };
        let found: Vec<&Index> = table.indexes.iter().filter(begins_with).collect();
        let name = table.relation.qualified();
        let list = columns.iter().map(|column| quote::name(column)).collect::<Vec<_>>().join(", ");
        let is_unique = found.iter().any(|index| index.is_unique && index.columns.len() == columns.len());
        if must_be_unique && !is_unique {
            let primary = if table.primary_key.is_empty() {
                String::new()
            } else {
                format!(" (its primary key is {})", table.primary_key.join(", "))
            };
            self.wrong(key, format!("{list} is not unique in {name}{primary}, so two rows would be taken for one; name the columns of its primary key, or {}", table.relation.create_index(true, &list, None)));
        } else if found.is_empty() {
            self.wrong(
                key,
                format!(
                    "no index of {name} begins with {list}, so every close would read the whole table; {}",
                    table.relation.create_index(false, &list, None)
                ),
            );
        } else {
            self.proven(key, format!("{list} of {name} is found through the index {}", found[0].name));
        }
    }

    /// Whether the statements may be run by this role and use an index. Returns whether they may be run.
    async fn plans(&mut self, database: &Database, closer: &Closer, sweeper: &Sweeper) -> Result<bool, DatabaseError> {
        let plans = orders_statements::plans(self.settings, self.kind, closer, sweeper).of_any_size();
        let found = match plans.look(database).await {
            Ok(found) => found,
            Err(error) if classify(&error) == ErrorClass::Away => return Err(DatabaseError(one_line(&error))),
            Err(error) => {
                let why = one_line(&error);
                self.wrong(
                    "close",
                    format!(
                        "the statements cannot be planned: {why}; correct the value or expression that it is about"
                    ),
                );
                return Ok(false);
            }
        };
        let mut may_run = true;
        for (cause, faults) in found {
            let is_slow = cause == Cause::SlowOverdueQuery;
            match sentence(&faults) {
                Some(why) => {
                    may_run &= is_slow;
                    self.wrong(if is_slow { "deadline" } else { "table" }, why);
                }
                None if is_slow => self.proven("deadline", "the sweep reads an index"),
                None => self.proven("table", "the role may run the statements, and no row security hides rows from it"),
            }
        }
        Ok(may_run)
    }

    /// How often the conditions hold among some of the rows.
    async fn conditions(&mut self, database: &Database, facts: Option<&Facts>) -> Result<(), DatabaseError> {
        let Some((table, facts)) = self.settings.table_of(self.kind).zip(facts) else { return Ok(()) };
        let counted = database.run(async |connection| survey::count_conditions(connection, table, facts).await);
        let counted = counted.await.map_err(|error| DatabaseError(one_line(&error)))?;
        let (rows, of) = (counted.rows, if counted.is_all { "" } else { "the first " });
        let held = format!("of {of}{rows} rows {} are open and {} are paid", counted.open, counted.paid);
        self.note("open", held);
        if counted.open_is_null > 0 {
            let why =
                "NULL, so they are never closed; where a column may be NULL, write IS DISTINCT FROM instead of <>";
            self.note("open", format!("for {} of {of}{rows} rows it is {why}", counted.open_is_null));
        }
        Ok(())
    }

    /// Deadlines and ids with which an order is never closed, such as `-infinity` for a time that is not set.
    async fn unusable(&mut self, database: &Database, question: Option<String>) -> Result<(), DatabaseError> {
        let Some(question) = question else { return Ok(()) };
        let counted = database.run(async |connection| survey::count_unusable(connection, question).await).await;
        let (deadlines, example, ids) = counted.map_err(|error| DatabaseError(one_line(&error)))?;
        if let Some(example) = example {
            let why = format!(
                "{deadlines} open orders have a deadline such as {example}, outside the years 1 to 9999: they are never due and stay open; where that means that none is set, it is right"
            );
            self.note("deadline", why);
        }
        if ids > 0 {
            let why = format!(
                "{ids} open orders have an id that no message can carry, and are never closed: an id has 1 to 200 bytes, none of them a control character; correct their rows, or name another unique column"
            );
            self.note("id", why);
        }
        Ok(())
    }

    /// The next order to be closed: a wrong time zone shows here.
    async fn next_due(&mut self, database: &Database, sweeper: &Sweeper) -> Result<(), DatabaseError> {
        let now = database.run(crate::postgres::now).await.map_err(|error| DatabaseError(one_line(&error)))?;
        let after = Some(SweepPlace { deadline: now, id: String::new() });
        let page = SweepPage { reach: SweepReach::Ahead(FAR), after, limit: 1 };
        let page = sweeper.overdue(&page).await.map_err(|error| DatabaseError(one_line(&error)))?;
        let sentence = match page.orders.first() {
            Some(next) => format!(
                "the next order to be closed is {}, at {}, in {}",
                next.order_id,
                write_rfc3339(next.deadline),
                humantime::format_duration(Duration::from_secs(next.deadline.since(now).as_secs()))
            ),
            None => "no open order has a deadline in the future".to_owned(),
        };
        self.note("deadline", sentence);
        Ok(())
    }

    async fn dry_close(
        &mut self,
        database: &Database,
        closer: &Closer,
        sweeper: &Sweeper,
        facts: Option<&Facts>,
    ) -> Result<(), DatabaseError> {
        let (close, parameters) = closer.statement();
        let overdue = sweeper.statement();
        let mapping = self.settings.table_of(self.kind).zip(facts);
        let run =
            database.run(async |connection| dry_close::run(connection, (&close, parameters), &overdue, mapping).await);
        let DryClose { tried, outcomes, found_again, stock, also } = match run.await {
            Ok(dry) => dry,
            Err(error) => {
                self.wrong(
                    "",
                    format!("orders cannot be tried: {}; correct the statement or its tables", one_line(&error)),
                );
                return Ok(());
            }
        };
        if outcomes.is_empty() {
            self.note("open", "no order is overdue now, so no close could be tried; repeat the check when one is");
            return Ok(());
        }
        let said = |word: &str| outcomes.iter().filter(|(_, outcome)| outcome.as_deref() == Ok(word)).count();
        let closed = said("closed");
        self.refused(&outcomes);
        for id in found_again {
            self.wrong("close", format!("order {id} is found overdue again after its close; set a column that makes the condition open false"));
        }
        if closed > 0 {
            let claimed = match said("claimed") {
                0 => String::new(),
                claimed => format!("; {claimed} have an attempt to pay, about which a provider is asked first"),
            };
            let all = outcomes.len();
            self.proven("close", format!("{closed} of {all} overdue orders were closed and rolled back{claimed}"));
        }
        for (index, rows) in also.into_iter().enumerate().filter(|_| closed > 0) {
            let (level, rows) = match rows {
                Some(0) => (Level::Note, "changed no row".to_owned()),
                Some(rows) => (Level::Proven, format!("changed {rows} rows")),
                None => (Level::Proven, "could be run".to_owned()),
            };
            let sentence =
                format!("the statement {rows} for the {closed} orders that were closed, and was rolled back");
            self.add(level, &format!("also[{index}].sql"), sentence);
        }
        for (index, change) in stock.into_iter().filter(|_| closed > 0) {
            self.stock(&format!("stock[{index}].give_back"), &change, "given back", closed == tried);
        }
        Ok(())
    }

    /// `has_all`: every order that needs one of the rows was closed, paid or reopened.
    fn stock(&mut self, key: &str, change: &StockChange, verb: &str, has_all: bool) {
        let (stock, needed, changed) = (&change.stock, change.needed, change.changed);
        let example = change
            .examples
            .first()
            .map_or_else(String::new, |(before, after)| format!(", such as {before} to {after}"));
        let shared = if change.is_shared { "; two of the orders have the same one" } else { "" };
        if changed < needed && has_all {
            self.wrong(key, format!("{changed} of the {needed} rows of {stock} that the orders reserve were {verb}; check it, key and stock_key, and that the items are still there"));
        } else {
            self.proven(
                key,
                format!("{changed} of {needed} rows of {stock} were {verb} and rolled back{shared}{example}"),
            );
        }
    }

    /// How overdue orders are claimed and paid.
    async fn dry_payment(&mut self, database: &Database, closer: &Closer, sweeper: &Sweeper, facts: Option<&Facts>) {
        let Some((table, facts)) = self.settings.table_of(self.kind).zip(facts) else { return };
        let ((close, parameters), overdue) = (closer.statement(), sweeper.statement());
        if table.attempts.is_some() {
            let read =
                database.run(async |connection| dry_payment::read_attempts(connection, &overdue, self.kind).await);
            if let Err(error) = read.await {
                let why = one_line(&error);
                return self.wrong(
                    "attempts",
                    format!("cannot be taken over: {why}; correct the setting or the rows that it is about, or let the owner of the function kind_{}_attempts SELECT from each table that it names", self.kind),
                );
            }
            self.proven("attempts", "those of the next orders were taken over and rolled back");
        }
        let mapping = (self.kind, table, facts);
        let run = database
            .run(async |connection| dry_payment::run(connection, (&close, parameters), &overdue, mapping).await);
        let DryPayment { tried, claimed, unclaimed, found_again, paid, unpaid, stock } = match run.await {
            Ok(dry) => dry,
            Err(error) => {
                let why = one_line(&error);
                return self.note(
                    "pay",
                    format!("no payment could be tried: {why}; repeat the check as the owner of the schema"),
                );
            }
        };
        let mut faults = Vec::new();
        for (id, outcome) in unclaimed {
            match outcome {
                Ok(word) if ["busy", "closing", "paid", "already_closed"].contains(&word.as_str()) => {}
                Ok(word) => faults.push(("pay", id, format!("has an attempt that may bring money, but its close says {word} instead of claimed; check that no trigger changes payment_attempts or close_attempts"))),
                Err(why) => faults.push(("closing", id, format!("cannot be claimed: {why}; correct what closing writes, or the trigger or constraint that refuses it"))),
            }
        }
        for id in found_again {
            faults.push((
                "closing",
                id,
                "is found overdue again after it was claimed; check that no trigger changes close_attempts".to_owned(),
            ));
        }
        for (id, answer) in unpaid {
            faults.push(("pay", id, match answer {
                Ok(word) => format!("was not paid by what it costs: the answer is {word}; check amount, currency, open and pay"),
                Err(why) => format!("cannot be paid: {why}; correct what pay and consume write, or the trigger or constraint that refuses it"),
            }));
        }
        self.each_fault_once(faults);
        if paid > 0 {
            self.proven("pay", format!("{claimed} of {tried} overdue orders with an attempt to pay were claimed, {paid} of them paid by payment_received, and all rolled back"));
        }
        for (index, change) in stock.iter().filter(|_| paid > 0) {
            self.stock(&format!("stock[{index}].consume"), change, "consumed", paid == tried);
        }
    }

    /// How closed orders are reopened.
    async fn dry_reopening(&mut self, database: &Database, closer: &Closer, sweeper: &Sweeper, facts: Option<&Facts>) {
        let mapped = self.settings.table_of(self.kind).zip(facts);
        let Some((table, facts)) = mapped.filter(|(table, _)| table.reopen.is_some()) else { return };
        let ((close, parameters), overdue) = (closer.statement(), sweeper.statement());
        let mapping = (self.kind, table, facts);
        let run = database
            .run(async |connection| dry_payment::reopen(connection, (&close, parameters), &overdue, mapping).await);
        let DryReopening { tried, closed, reopened, refused, stock } = match run.await {
            Ok(dry) => dry,
            Err(error) => {
                let why = format!("no order could be reopened: {}; repeat the check", one_line(&error));
                return self.note("reopen", why);
            }
        };
        let fault = |(id, why)| {
            let fix =
                "correct what reopen and take write and what left says, or the trigger or constraint that refuses it";
            ("reopen", id, format!("cannot be reopened right after its close: {why}; {fix}"))
        };
        self.each_fault_once(refused.into_iter().map(fault).collect());
        if reopened > 0 {
            self.proven("reopen", format!("{reopened} of {closed} closed orders were reopened, paid and rolled back"));
        }
        for (index, change) in stock.iter().filter(|_| reopened > 0) {
            self.stock(&format!("stock[{index}].take"), change, "taken again", reopened == tried);
        }
        if !table.also.is_empty() {
            self.note(
                "reopen",
                "undoes nothing that a statement of also has written; let a trigger of the table do that",
            );
        }
    }

    /// Orders that the close does not close, each fault once.
    fn refused(&mut self, outcomes: &[(String, Result<String, String>)]) {
        let mut faults = Vec::new();
        for (id, outcome) in outcomes {
            let (key, why) = match outcome {
                // Claimed: its provider is asked before it is closed.
                Ok(word) if ["closed", "busy", "claimed", "closing"].contains(&word.as_str()) => continue,
                Ok(word) => (
                    "open",
                    format!(
                        "is found overdue, but its close says {word}; let open, paid and deadline agree, and check that no trigger suppresses the UPDATE"
                    ),
                ),
                Err(why) => ("close", why_refused(why)),
            };
            faults.push((key, id.clone(), why));
        }
        self.each_fault_once(faults);
    }

    /// Faults of orders: the setting, the order and the end of the sentence. The same fault of several is one finding.
    fn each_fault_once(&mut self, faults: Vec<(&str, String, String)>) {
        let mut seen: Vec<(&str, String, String, String, usize)> = Vec::new();
        for (key, id, why) in faults {
            // An error may name the order.
            let fault = why.replace(&id, "");
            match seen.iter_mut().find(|(_, other, ..)| *other == fault) {
                Some((.., others)) => *others += 1,
                None => seen.push((key, fault, id, why, 0_usize)),
            }
        }
        for (key, _, id, why, others) in seen {
            let others = if others > 0 { format!(" ({others} further orders: the same)") } else { String::new() };
            self.wrong(key, format!("order {id} {why}{others}"));
        }
    }

    async fn backlog(
        &mut self,
        database: &Database,
        sweeper: &Sweeper,
        orders: &Adoptable,
    ) -> Result<(), DatabaseError> {
        let verdict = first_backlog::judge(database, sweeper, orders, self.settings, self.kind).await?;
        if let Verdict::Refused(refusal) = verdict {
            self.wrong("sweep.first_backlog", refusal);
        } else {
            // Also those that fell due within the last minute.
            let Backlog { overdue, may_be_more, oldest } =
                first_backlog::count_overdue_for(sweeper, Duration::ZERO).await?;
            let least = if may_be_more { "at least " } else { "" };
            let oldest = oldest.map_or_else(String::new, |oldest| format!(", the oldest since {oldest}"));
            let sentence =
                format!("{least}{overdue} orders are overdue now{oldest}; a worker closes them when it starts");
            self.note("sweep.first_backlog", sentence);
        }
        Ok(())
    }
}

/// What to do about an error of the close. The statement reports an order that stays open as a cast that fails.
fn why_refused(error: &str) -> String {
    if let Some(at) = error.find("kinds.").filter(|_| error.contains(LEAVES_OPEN)) {
        let sentence = error[at..].split('"').next().unwrap_or_default();
        return format!("stays open: {sentence}");
    }
    // undefined_table
    let path = if error.contains("(42P01)") {
        "; a trigger's function finds tables without a schema only with ALTER FUNCTION … SET search_path = public"
    } else {
        ""
    };
    format!(
        "cannot be closed: {error}; correct the trigger or constraint that refuses it, or what close and give_back write{path}"
    )
}
