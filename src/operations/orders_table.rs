//! What operators ask about the orders table: the only module of the operations that reads it.
//!
//! A table is read as its mapping says. A table behind statements of the shop's own is known
//! only through `orders.overdue_sql`: what that statement does not tell is said to be unknown, and is never guessed. Reads
//! only.

pub mod due;

use std::time::Duration;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::{OrderId, SweepPage, SweepReach, Timestamp};
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use uuid::Uuid;

use super::orders_statements;
use crate::config::Settings;
use crate::config::kinds::OrdersOf;
use crate::effects::sweep::Sweeper;
use crate::mapping::Questions;
use crate::postgres::lock_holders::{LockHolder, lock_holders};
use crate::postgres::{self, Database, DatabaseError, one_line};

/// Rows per page of the overdue statement.
const PAGE_SIZE: usize = 1_000;
/// Overdue orders that are counted, or searched for one order, by statements of the shop's own.
const MOST_OVERDUE: usize = 10_000;
/// Overdue orders that are counted in the database: the page asks every two seconds.
const MOST_COUNTED_OVERDUE: u64 = 100_000;

/// The status of a text that is no id of a mapped table.
const MALFORMED: &str = "malformed";

/// Why something is not known, in one sentence.
pub type Unknown = String;

/// An order's row, and the time by the database's clock when it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrderRow {
    /// The word in the row; `None` behind statements of the shop's own, where the order is known to be overdue.
    pub status: Option<String>,
    /// `None` if the row has none: such an order is never due.
    pub deadline: Option<Timestamp>,
}

/// When what happened to an order, as its row has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowDates {
    /// Of the row.
    pub created_at: Timestamp,
    /// `None` if it is not paid.
    pub paid_at: Option<Timestamp>,
    /// `None` if it is not closed.
    pub closed_at: Option<Timestamp>,
    /// The path that closed it.
    pub closed_by: Option<String>,
}

/// Unpaid orders whose deadline has passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverdueOrders {
    /// How many.
    pub orders: u64,
    /// Whether there may be more: only so many are counted.
    pub is_at_least: bool,
    /// The deadline of the oldest.
    pub oldest: Option<Timestamp>,
    /// The id of the oldest.
    pub example: Option<OrderId>,
}

/// An operator's choice of unpaid orders.
#[derive(Debug, Clone)]
pub struct Choice {
    /// A condition on the columns of the orders table.
    pub condition: String,
    /// Leaves out orders that this run has changed already.
    pub not_changed_by: Option<Uuid>,
}

/// The chosen orders, as they were in one snapshot.
#[derive(Debug, Clone)]
pub struct ChosenOrders {
    /// By deadline.
    pub orders: Vec<ChosenOrder>,
    /// The database's time of the snapshot.
    pub now: Timestamp,
    /// The items of the first `give_back`, and their quantities added up: what the orders reserve of the stock. `None` if
    /// nothing says.
    pub reserved: Option<(u64, i64)>,
}

/// One of the chosen orders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenOrder {
    /// As the row has it.
    pub id: OrderId,
    /// `None`: never due.
    pub deadline: Option<Timestamp>,
}

impl ChosenOrder {
    /// Whether its deadline has passed.
    #[must_use]
    pub fn is_overdue(&self, now: Timestamp) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }
}

/// What knows the orders.
#[derive(Debug, Clone)]
enum Source {
    /// A mapping.
    Mapped(Box<Questions>),
    /// The overdue statement of the shop's own.
    Statement(Sweeper),
}

/// The orders table of a kind.
#[derive(Debug, Clone)]
pub struct OrdersTable {
    database: Database,
    kind: Kind,
    source: Source,
    /// Whether it is the default table.
    is_built_in: bool,
    /// The tables that a close changes, as far as they are known.
    changed: Vec<String>,
}

impl OrdersTable {
    /// Prepares the shop's own statement, if there is one.
    ///
    /// # Errors
    /// [`DatabaseError`] names the file and the column.
    pub async fn open(database: Database, settings: &Settings, kind: &Kind) -> Result<Self, DatabaseError> {
        let statements = orders_statements::statements(&database, settings, kind).await?;
        let source = match statements.questions {
            Some(questions) => Source::Mapped(Box::new(questions)),
            None => Source::Statement(Sweeper::prepare(database.clone(), statements.overdue).await?),
        };
        let changed = match settings.orders_of(kind) {
            Some(OrdersOf::Table(table)) => table.changed_by_close(),
            _ => Vec::new(),
        };
        Ok(Self { database, kind: kind.clone(), source, is_built_in: settings.has_built_in_table(kind), changed })
    }

    /// Whose orders they are.
    #[must_use]
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// What can be asked about the table; otherwise the overdue statement, which tells ids and deadlines alone.
    fn questions(&self) -> Result<&Questions, &Sweeper> {
        match &self.source {
            Source::Mapped(questions) => Ok(questions),
            Source::Statement(sweeper) => Err(sweeper),
        }
    }

    /// Counts overdue orders.
    ///
    /// # Errors
    /// [`Unknown`] if the query fails.
    pub async fn overdue(&self) -> Result<OverdueOrders, Unknown> {
        let questions = match self.questions() {
            Ok(questions) => questions,
            Err(sweeper) => {
                let (found, is_at_least) = first_overdue(sweeper).await?;
                let (example, oldest) = found.first().cloned().unzip();
                return Ok(OverdueOrders { orders: found.len() as u64, is_at_least, oldest, example });
            }
        };
        let count = sqlx::query(AssertSqlSafe(questions.overdue.clone())).bind(MOST_COUNTED_OVERDUE.cast_signed() + 1);
        let row = self.read(async |connection| count.fetch_one(connection).await).await?;
        let (orders, oldest): (i64, Option<Timestamptz>) = (get(&row, "orders")?, get(&row, "oldest")?);
        let oldest = oldest.map(|Timestamptz(oldest)| oldest);
        let example = get::<Option<String>>(&row, "example")?.and_then(|id| OrderId::new(id).ok());
        let (orders, is_at_least) = (orders.unsigned_abs(), orders.unsigned_abs() > MOST_COUNTED_OVERDUE);
        Ok(OverdueOrders { orders: orders.min(MOST_COUNTED_OVERDUE), is_at_least, oldest, example })
    }

    /// The order's row; `None` if there is no such order.
    ///
    /// # Errors
    /// [`Unknown`] if the query fails, or if only statements of the shop's own know the order and it is not overdue.
    pub async fn row(&self, id: &OrderId) -> Result<Option<OrderRow>, Unknown> {
        match &self.source {
            Source::Mapped(mapped) => {
                let found = self.mapped_row(&mapped.row, id).await?;
                Ok(found.filter(|row| row.status.as_deref() != Some(MALFORMED)))
            }
            Source::Statement(sweeper) => overdue_row(sweeper, id).await,
        }
    }

    /// Whether the text has a form that no id of the table has. Not known of statements of the shop's own.
    ///
    /// # Errors
    /// [`Unknown`] if the query fails.
    pub async fn is_malformed(&self, id: &OrderId) -> Result<bool, Unknown> {
        match &self.source {
            Source::Mapped(mapped) => {
                let found = self.mapped_row(&mapped.row, id).await?;
                Ok(found.is_some_and(|row| row.status.as_deref() == Some(MALFORMED)))
            }
            Source::Statement(_) => Ok(false),
        }
    }

    async fn mapped_row(&self, sql: &str, id: &OrderId) -> Result<Option<OrderRow>, Unknown> {
        // Rendered from the operator's configuration.
        let select = sqlx::query(AssertSqlSafe(sql.to_owned())).bind(id.as_str());
        let row = self.read(async |connection| select.fetch_optional(connection).await).await?;
        let Some(row) = row else { return Ok(None) };
        let deadline: Option<Timestamptz> = get(&row, "deadline")?;
        Ok(Some(OrderRow { status: get(&row, "status")?, deadline: deadline.map(|Timestamptz(deadline)| deadline) }))
    }

    /// When what happened to the order; `None` if there is no such order.
    ///
    /// # Errors
    /// [`Unknown`] for a table of the shop's own, or if the query fails.
    pub async fn dates(&self, id: &OrderId) -> Result<Option<RowDates>, Unknown> {
        self.require_built_in("when an order was created, paid or closed")?;
        if !is_uuid(id.as_str()) {
            return Ok(None);
        }
        let select =
            sqlx::query("SELECT created_at, paid_at, closed_at, closed_by FROM orders WHERE id = $1::text::uuid")
                .bind(id.as_str());
        let row = self.read(async |connection| select.fetch_optional(connection).await).await?;
        let Some(row) = row else { return Ok(None) };
        let time = |column: &str| Ok::<_, Unknown>(get::<Option<Timestamptz>>(&row, column)?.map(|Timestamptz(at)| at));
        let Timestamptz(created_at) = get(&row, "created_at")?;
        let (paid_at, closed_at, closed_by) = (time("paid_at")?, time("closed_at")?, get(&row, "closed_by")?);
        Ok(Some(RowDates { created_at, paid_at, closed_at, closed_by }))
    }

    /// Whether another session holds a lock on the order's row that the close would find taken. Takes the same lock, and
    /// gives it back at once.
    ///
    /// # Errors
    /// [`Unknown`] for statements of the shop's own, or if the query fails.
    pub async fn is_locked(&self, id: &OrderId) -> Result<bool, Unknown> {
        match &self.source {
            Source::Mapped(mapped) => Ok(self.mapped_row(&mapped.free_row, id).await?.is_none()),
            Source::Statement(_) => Err(own("whether the row is locked")),
        }
    }

    /// The transactions that may keep the order from being closed, the one with its row first.
    ///
    /// # Errors
    /// [`Unknown`] if the query fails.
    pub async fn lock_holders(&self, id: &OrderId) -> Result<Vec<LockHolder>, Unknown> {
        let mut row: Option<String> = None;
        if let Source::Mapped(mapped) = &self.source {
            let select = sqlx::query_scalar(AssertSqlSafe(mapped.last_transaction.clone())).bind(id.as_str());
            row = self.read(async |connection| select.fetch_optional(connection).await).await?;
        }
        lock_holders(&self.database, &self.changed, row.as_deref()).await.map_err(|error| one_line(&error))
    }

    /// The unpaid orders that a condition of the operator chooses, read in a transaction that can change nothing.
    ///
    /// # Errors
    /// One sentence that says what is wrong with the condition.
    pub async fn choose(&self, choice: &Choice) -> Result<ChosenOrders, DatabaseError> {
        let questions =
            self.questions().map_err(|_: &Sweeper| DatabaseError(own("which orders a condition chooses")))?;
        let chosen = self.database.run(async |connection| {
            let mut transaction = connection.begin().await?;
            // Unlike a worker's statements, the operator's have no index of ours.
            sqlx::raw_sql(
                "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;
                 SET LOCAL enable_seqscan = on; SET LOCAL plan_cache_mode = auto",
            )
            .execute(&mut *transaction)
            .await?;
            let orders = choose_orders(&mut transaction, questions, choice).await?;
            let mut reserved = None;
            if let Some(items) = &questions.items {
                let ids: Vec<&str> = orders.iter().map(|order| order.id.as_str()).collect();
                // Rendered from the operator's configuration.
                let count = sqlx::query_as(AssertSqlSafe(items.clone())).bind(ids);
                let (items, units): (i64, i64) = count.fetch_one(&mut *transaction).await?;
                reserved = Some((items.unsigned_abs(), units));
            }
            let now = postgres::now(&mut transaction).await?;
            transaction.rollback().await?;
            Ok(ChosenOrders { orders, now, reserved })
        });
        chosen.await.map_err(|error| why_not_chosen(&error))
    }

    fn require_built_in(&self, what: &str) -> Result<(), Unknown> {
        if self.is_built_in { Ok(()) } else { Err(own(what)) }
    }

    async fn read<T>(&self, work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>) -> Result<T, Unknown> {
        self.database.run(work).await.map_err(|error| one_line(&error))
    }
}

fn own(what: &str) -> Unknown {
    format!("the orders table is your own, and neither a mapping nor statements tell {what}")
}

/// Whether the text is a UUID as the close statement of the default tables accepts it: hexadecimal digits, and hyphens in their places.
#[must_use]
pub fn is_uuid(text: &str) -> bool {
    let hyphens = [8, 13, 18, 23];
    let is_in_place =
        |(at, byte): (usize, u8)| if hyphens.contains(&at) { byte == b'-' } else { byte.is_ascii_hexdigit() };
    text.len() == 36 && text.bytes().enumerate().all(is_in_place)
}

fn get<'r, T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>>(
    row: &'r sqlx::postgres::PgRow,
    column: &str,
) -> Result<T, Unknown> {
    row.try_get(column).map_err(|error| one_line(&error))
}

/// The row of an order that is overdue by the shop's own statement.
async fn overdue_row(sweeper: &Sweeper, id: &OrderId) -> Result<Option<OrderRow>, Unknown> {
    let (found, is_at_least) = first_overdue(sweeper).await?;
    let deadline = found.into_iter().find_map(|(order_id, deadline)| (order_id == *id).then_some(deadline));
    let among = if is_at_least { format!("the first {MOST_OVERDUE}") } else { "the".to_owned() };
    match deadline {
        Some(deadline) => Ok(Some(OrderRow { status: None, deadline: Some(deadline) })),
        None => Err(format!(
            "the orders table is known by statements of your own, and the order is not among {among} overdue orders; its status and deadline are in your table"
        )),
    }
}

/// The first [`MOST_OVERDUE`] overdue orders by the shop's own statement, and whether there may be more.
async fn first_overdue(sweeper: &Sweeper) -> Result<(Vec<(OrderId, Timestamp)>, bool), Unknown> {
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let page = SweepPage { reach: SweepReach::Overdue(Duration::ZERO), after, limit: PAGE_SIZE };
        let swept = sweeper.overdue(&page).await.map_err(|error| one_line(&error))?;
        found.extend(swept.orders.into_iter().map(|order| (order.order_id, order.deadline)));
        match swept.next {
            Some(next) if found.len() < MOST_OVERDUE => after = Some(next),
            next => return Ok((found, next.is_some())),
        }
    }
}

async fn choose_orders(
    connection: &mut PgConnection,
    questions: &Questions,
    choice: &Choice,
) -> Result<Vec<ChosenOrder>, sqlx::Error> {
    // The condition is the operator's own SQL; a line of its own ends a comment in it.
    let [before, behind] = &questions.choose;
    let select = format!("{before}\n{}\n{behind}", choice.condition);
    let rows = sqlx::query(AssertSqlSafe(select)).bind(choice.not_changed_by).fetch_all(connection).await?;
    let read = |row: &sqlx::postgres::PgRow| {
        let (id, deadline): (String, Option<Timestamptz>) = (row.try_get("order_id")?, row.try_get("deadline")?);
        let id = OrderId::new(id).map_err(|fault| sqlx::Error::Decode(Box::new(fault)))?;
        Ok(ChosenOrder { id, deadline: deadline.map(|Timestamptz(deadline)| deadline) })
    };
    rows.iter().map(read).collect()
}

fn why_not_chosen(error: &sqlx::Error) -> DatabaseError {
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
    let fix = match code.as_deref() {
        // query_canceled
        Some("57014") => {
            "the selection takes longer than database.statement_timeout; choose by columns that an index has, or allow this command more, as with --set database.statement_timeout=1m"
        }
        // read_only_sql_transaction
        Some("25006") => "the selection may only read",
        Some(code) if ["22", "42"].contains(&&code[..2]) => {
            "write a condition on the columns of the orders table, such as --where \"channel = 'app'\""
        }
        _ => "nothing was changed; fix the database and try again",
    };
    DatabaseError(format!("--where cannot be used: {}; {fix}", one_line(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_same_uuids_as_close_statement() {
        assert!(is_uuid("01939f6e-7a3c-7C11-9d1a-6b1f0e2d3c4b"));
        for other in [
            "",
            "17",
            "01939f6e7a3c7c119d1a6b1f0e2d3c4b",
            "{01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4}",
            "01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4g",
        ] {
            assert!(!is_uuid(other), "{other}");
        }
    }
}
