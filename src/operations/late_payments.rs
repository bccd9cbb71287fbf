//! Money that paid for nothing: lists it, and settles each piece once, as due to be given back or by reopening its
//! order. Gives no money back itself.
//!
//! What a closed order needs to be reopened, the function of its kind does.

use std::fmt;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{Connection, PgConnection, Row};

use super::orders_table::due::Money;
use super::{Page, orders_statements, unresolved};
use crate::config::Settings;
use crate::config::kinds::OrdersOf;
use crate::postgres::{Database, DatabaseError, Operator, unusable};

/// Pieces that one statement should settle at most: it locks their rows.
pub const MOST_AT_ONCE: usize = 400;

/// A piece of money that paid for nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct LatePayment {
    /// What an operator names it by.
    pub id: i64,
    /// As it was reported; there may be no such order.
    pub order_id: String,
    /// The order's kind.
    pub kind: String,
    /// The provider that has the money.
    pub provider: String,
    /// What the provider knows the payment by.
    pub reference: String,
    /// In the currency's smallest unit.
    pub amount_minor: i64,
    /// Three letters.
    pub currency: String,
    /// Why it paid for nothing, as in the table.
    pub reason: String,
    /// RFC 3339.
    pub recorded_at: String,
    /// `open`, `refund_due` or `reopened`.
    pub state: String,
    /// RFC 3339; `None` while it is open.
    pub settled_at: Option<String>,
    /// Who settled it.
    pub settled_by: Option<String>,
    /// Why it was settled.
    pub settled_why: Option<String>,
}

/// Late money that is not settled, in one currency.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct OpenLateMoney {
    /// How many payments.
    pub payments: u64,
    /// Their sum.
    #[serde(flatten)]
    pub sum: Money,
}

/// Adds up what is not settled, by currency.
///
/// # Errors
/// sqlx's.
pub async fn open_by_currency(database: &Database) -> Result<Vec<OpenLateMoney>, sqlx::Error> {
    let select = sqlx::query(
        "SELECT currency, count(*) AS payments, sum(amount_minor)::bigint AS amount_minor FROM late_payments
         WHERE state = 'open' GROUP BY currency ORDER BY currency",
    );
    let rows = database.run(async |connection: &mut PgConnection| select.fetch_all(connection).await).await?;
    let read = |row: &PgRow| {
        let sum = Money { currency: row.try_get("currency")?, amount_minor: row.try_get("amount_minor")? };
        Ok(OpenLateMoney { payments: row.try_get::<i64, _>("payments")?.unsigned_abs(), sum })
    };
    rows.iter().map(read).collect()
}

/// A page of late money behind the piece `after`, in the order in which it was recorded; with `all` also what is settled.
///
/// # Errors
/// [`DatabaseError`].
pub async fn list(database: &Database, all: bool, after: i64, limit: i64) -> Result<Page<LatePayment>, DatabaseError> {
    // Two statements, so that each has an index with its rows in order.
    let select = if all {
        "SELECT * FROM late_payments WHERE id > $1 ORDER BY id LIMIT $2"
    } else {
        "SELECT * FROM late_payments WHERE state = 'open' AND id > $1 ORDER BY id LIMIT $2"
    };
    let select = sqlx::query(select).bind(after).bind(limit);
    let rows = database.run(async |connection: &mut PgConnection| select.fetch_all(connection).await).await;
    let payments = rows.and_then(|rows| rows.iter().map(read_late).collect()).map_err(|error| unavailable(&error))?;
    Ok(Page::of(payments, limit, |last: &LatePayment| last.id.to_string()))
}

fn read_late(row: &PgRow) -> Result<LatePayment, sqlx::Error> {
    let time = |Timestamptz(time)| write_rfc3339(time);
    Ok(LatePayment {
        id: row.try_get("id")?,
        order_id: row.try_get("order_id")?,
        kind: row.try_get("kind")?,
        provider: row.try_get("provider")?,
        reference: row.try_get("reference")?,
        amount_minor: row.try_get("amount_minor")?,
        currency: row.try_get("currency")?,
        reason: row.try_get("reason")?,
        recorded_at: time(row.try_get("recorded_at")?),
        state: row.try_get("state")?,
        settled_at: row.try_get::<Option<_>, _>("settled_at")?.map(time),
        settled_by: row.try_get("settled_by")?,
        settled_why: row.try_get("settled_why")?,
    })
}

/// The precondition is in the update: of two sessions, one settles each piece. The history has rows of orders in the
/// default table alone.
const REFUND_DUE: &str = "
    WITH settled AS (
        UPDATE late_payments l
        SET state = 'refund_due', settled_at = clock_timestamp(), settled_by = $2, settled_why = $3
        WHERE l.id = ANY ($1::bigint[]) AND l.state = 'open'
        RETURNING l.id, l.kind, l.order_id, l.provider, l.reference, l.amount_minor, l.currency, l.settled_at,
                  late_payment_as_json(l) AS event
    ), history AS (
        INSERT INTO order_events (order_id, event, by, reason, who, why, run)
        SELECT o.id, 'refund_due', 'manual',
               s.amount_minor || ' ' || s.currency || ' of ' || s.provider || ' ' || s.reference, $2, $3, $4::uuid
        FROM settled s JOIN orders o ON s.kind = 'order' AND o.id = uuid_of(s.order_id)
    ), event AS (
        INSERT INTO event_outbox (kind, routing_key, type, payload)
        SELECT s.kind, 'order.refund_due', 'order.refund_due.v1', s.event || jsonb_build_object(
            'settled_at', to_char(s.settled_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'))
        FROM settled s
    )
    SELECT s.id FROM settled s ORDER BY s.id";

/// What became of the payments.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Refunded {
    /// They are to be given back; each is announced once.
    pub settled: Vec<i64>,
    /// They were settled before, or do not exist.
    pub not_open: Vec<i64>,
}

/// Settles these as due to be given back, and announces each: all or none.
///
/// # Errors
/// [`DatabaseError`]; none is settled then.
pub async fn refund_due(database: &Database, ids: &[i64], operator: &Operator) -> Result<Refunded, DatabaseError> {
    let settle = sqlx::query_scalar::<_, i64>(REFUND_DUE);
    let settle = settle.bind(ids).bind(&operator.who).bind(&operator.why).bind(operator.run);
    let settled = database.run(async |connection: &mut PgConnection| settle.fetch_all(connection).await).await;
    let settled = settled.map_err(|error| unavailable(&error))?;
    let not_open = ids.iter().filter(|id| !settled.contains(id)).copied().collect();
    Ok(Refunded { settled, not_open })
}

/// The pieces that are open.
///
/// # Errors
/// [`DatabaseError`].
pub async fn open(database: &Database) -> Result<Vec<i64>, DatabaseError> {
    let select = sqlx::query_scalar("SELECT id FROM late_payments WHERE state = 'open' ORDER BY id");
    let open = database.run(async |connection: &mut PgConnection| select.fetch_all(connection).await).await;
    open.map_err(|error| unavailable(&error))
}

fn unavailable(error: &sqlx::Error) -> DatabaseError {
    unusable("late payments", error)
}

/// An order that is paid by late money after its close.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct ReopenedOrder {
    /// The order, which is paid now.
    pub order_id: String,
    /// The late money that has paid it: the given piece, and others of the order if that one does not suffice.
    pub late_payments: Vec<i64>,
    /// What was too much, in the smallest unit. It is late money with the reason `surplus`.
    pub surplus_minor: i64,
}

/// Why an order cannot be reopened. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum ReopenError {
    /// No late money has this id.
    #[error("there is no late payment {0}; `order-timeout late list` shows those that are open")]
    Unknown(i64),
    /// It was settled before.
    #[error("late payment {id} is settled already, as {state}; `order-timeout late list --all` shows by whom")]
    Settled {
        /// The given id.
        id: i64,
        /// `refund_due` or `reopened`.
        state: String,
    },
    /// The settings do not say how.
    #[error(
        "late money reopens no order of kind {kind}, because kinds.{kind}.table.reopen is not given; settle the payment with --refund-due, or write what a reopened order's row gets (docs/ADOPTING.md)"
    )]
    NotMapped {
        /// The order's kind.
        kind: String,
    },
    /// The database has other functions than the settings say.
    #[error(transparent)]
    NotInstalled(DatabaseError),
    /// There is no such order.
    #[error("there is no order {0}, so it cannot be reopened; settle the payment with --refund-due")]
    NoOrder(String),
    /// Only a closed order can be reopened.
    #[error("order {order_id} is {status}, and only a closed order can be reopened; {}", what_instead(.status))]
    NotClosed {
        /// The order.
        order_id: String,
        /// Its status.
        status: String,
    },
    /// The money is in another currency.
    #[error("the late payment is in {paid}, and order {order_id} costs {costs}; settle it with --refund-due")]
    OtherCurrency {
        /// The order.
        order_id: String,
        /// The payment's currency.
        paid: String,
        /// The order's currency.
        costs: String,
    },
    /// The customer was sent to the provider to pay another order with it.
    #[error(
        "late payment {0} belongs to another order, as payment_attempts says, so it pays for none but that; settle it with --refund-due"
    )]
    OtherOrder(i64),
    /// All open late money of the order is less than it costs.
    #[error(
        "order {order_id} lacks {missing_minor} (smallest unit) with all its open late payments; settle them with --refund-due"
    )]
    TooLittle {
        /// The order.
        order_id: String,
        /// What is missing, in the smallest unit.
        missing_minor: i64,
    },
    /// Something that the order had reserved is no longer available.
    #[error("order {order_id} cannot be reopened, because {}; settle the payment with --refund-due, or restock", all(.lacks))]
    NotAvailable {
        /// The order.
        order_id: String,
        /// What lacks.
        lacks: Vec<Lack>,
    },
    /// The database failed.
    #[error("{}", unavailable(.0))]
    Database(#[from] sqlx::Error),
}

/// A row of stock of which too little is left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lack {
    /// The table, as the mapping has it.
    pub stock: String,
    /// Its key.
    pub key: String,
    /// What the order needs.
    pub wanted: String,
    /// What is left.
    pub available: String,
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stock, key, wanted, available } = self;
        write!(f, "{stock} {key} has {available} left and the order needs {wanted}")
    }
}

/// As one sentence.
pub(super) fn all(lacks: &[Lack]) -> String {
    lacks.iter().map(Lack::to_string).collect::<Vec<_>>().join(", ")
}

fn what_instead(status: &str) -> &'static str {
    match status {
        "open" | "closing" => "wait until a worker has closed it",
        _ => "settle the payment with --refund-due",
    }
}

/// The closed order of a late payment, whose row is locked.
struct LockedOrder {
    kind: String,
    order_id: String,
    amount_minor: Option<i64>,
}

/// Late money that pays a reopened order.
struct Piece {
    id: i64,
    provider: String,
    reference: String,
    amount_minor: i64,
}

/// Pays the closed order of this late payment with it, and with other open late money of the order if that one does not
/// suffice; takes everything that the order had reserved again. All in one transaction, or nothing.
///
/// # Errors
/// [`ReopenError`].
pub async fn reopen(
    database: &Database,
    settings: &Settings,
    id: i64,
    operator: &Operator,
) -> Result<ReopenedOrder, ReopenError> {
    let kind = sqlx::query_scalar("SELECT kind FROM late_payments WHERE id = $1").bind(id);
    let kind: Option<String> = database.run(async |connection| kind.fetch_optional(connection).await).await?;
    require_reopening(database, settings, kind.ok_or(ReopenError::Unknown(id))?).await?;
    let work = async |connection: &mut PgConnection| {
        let mut transaction = connection.begin().await?;
        match reopen_in(&mut transaction, id, operator).await {
            Ok(reopened) => transaction.commit().await.map(|()| Ok(reopened)),
            Err(ReopenError::Database(error)) => Err(error),
            Err(why) => transaction.rollback().await.map(|()| Err(why)),
        }
    };
    database.run(work).await?
}

/// The kind has a function that reopens its orders, as its mapping says.
async fn require_reopening(database: &Database, settings: &Settings, kind: String) -> Result<(), ReopenError> {
    let known = Kind::new(&kind)
        .ok()
        .filter(|known| matches!(settings.orders_of(known), Some(OrdersOf::Table(table)) if table.reopen.is_some()));
    let known = known.ok_or(ReopenError::NotMapped { kind })?;
    let statements = orders_statements::statements(database, settings, &known).await;
    let functions = statements.map_err(ReopenError::NotInstalled)?.functions;
    orders_statements::require_functions(database, &known, &functions).await.map_err(ReopenError::NotInstalled)
}

async fn reopen_in(connection: &mut PgConnection, id: i64, operator: &Operator) -> Result<ReopenedOrder, ReopenError> {
    let late: Option<(String, String, String)> =
        sqlx::query_as("SELECT order_id, currency, kind FROM late_payments WHERE id = $1")
            .bind(id)
            .fetch_optional(&mut *connection)
            .await?;
    let (order_id, currency, kind) = late.ok_or(ReopenError::Unknown(id))?;
    // The order first, then its money, then stock: in the order in which a payment locks them.
    let order = lock_order(connection, kind, order_id, &currency).await?;
    // What still counts, because the shop has closed it by itself, is late money too.
    sqlx::query("SELECT release_part_payments($1, $2)")
        .bind(&order.order_id)
        .bind(&order.kind)
        .execute(&mut *connection)
        .await?;
    let pieces = choose_pieces(connection, id, &order, &currency).await?;
    let paid: i64 = pieces.iter().map(|piece| piece.amount_minor).sum();
    let counted = order.amount_minor.unwrap_or(paid);
    let LockedOrder { kind, order_id, .. } = order;
    let lacks = take_and_pay(connection, &kind, &order_id).await?;
    if !lacks.is_empty() {
        return Err(ReopenError::NotAvailable { order_id, lacks });
    }
    use_pieces(connection, &pieces, operator).await?;
    unresolved::forget(connection, &kind, &order_id).await?;
    let surplus_minor = paid - counted;
    if let Some(last) = pieces.last().filter(|_| surplus_minor > 0) {
        record_surplus(connection, (&kind, &order_id), last, surplus_minor, &currency).await?;
    }
    let late_payments: Vec<i64> = pieces.iter().map(|piece| piece.id).collect();
    announce_reopened(connection, (&kind, &order_id), &late_payments, (counted, &currency), operator).await?;
    Ok(ReopenedOrder { order_id, late_payments, surplus_minor })
}

/// What lacks, or nothing: then the closed order, which is locked, is paid.
pub(super) async fn take_and_pay(
    connection: &mut PgConnection,
    kind: &str,
    order_id: &str,
) -> Result<Vec<Lack>, sqlx::Error> {
    let lacks = sqlx::query_as("SELECT * FROM reopen_order($1, $2)");
    let lacks: Vec<(String, String, String, String)> = lacks.bind(kind).bind(order_id).fetch_all(connection).await?;
    let read = |(stock, key, wanted, available)| Lack { stock, key, wanted, available };
    Ok(lacks.into_iter().map(read).collect())
}

async fn lock_order(
    connection: &mut PgConnection,
    kind: String,
    order_id: String,
    currency: &str,
) -> Result<LockedOrder, ReopenError> {
    let row = sqlx::query("SELECT state, amount_minor, currency FROM locked_order($1, $2, true)");
    let row = row.bind(&kind).bind(&order_id).fetch_one(connection).await?;
    let status: Option<String> = row.try_get("state")?;
    match status.as_deref() {
        Some("closed") => {}
        None => return Err(ReopenError::NoOrder(order_id)),
        Some(_) => return Err(ReopenError::NotClosed { order_id, status: status.unwrap_or_default() }),
    }
    let costs: Option<String> = row.try_get("currency")?;
    if let Some(costs) = costs.filter(|costs| costs != currency) {
        return Err(ReopenError::OtherCurrency { order_id, paid: currency.to_owned(), costs });
    }
    Ok(LockedOrder { kind, order_id, amount_minor: row.try_get("amount_minor")? })
}

/// The given piece first, and then the order's others until its price is covered.
async fn choose_pieces(
    connection: &mut PgConnection,
    id: i64,
    order: &LockedOrder,
    currency: &str,
) -> Result<Vec<Piece>, ReopenError> {
    let rows = sqlx::query(
        "SELECT id, provider, reference, amount_minor, state, reason FROM late_payments
         WHERE order_id = $1 AND kind = $4 AND currency = $2 AND (state = 'open' AND reason <> 'other_order' OR id = $3)
         ORDER BY id <> $3, id FOR NO KEY UPDATE",
    )
    .bind(&order.order_id)
    .bind(currency)
    .bind(id)
    .bind(&order.kind)
    .fetch_all(connection)
    .await?;
    let (mut pieces, mut paid) = (Vec::new(), 0);
    for row in &rows {
        let state: String = row.try_get("state")?;
        if state != "open" {
            return Err(ReopenError::Settled { id, state });
        }
        if row.try_get::<&str, _>("reason")? == "other_order" {
            return Err(ReopenError::OtherOrder(id));
        }
        let is_covered = order.amount_minor.is_none_or(|amount| paid >= amount);
        if !pieces.is_empty() && is_covered {
            break;
        }
        let piece = Piece {
            id: row.try_get("id")?,
            provider: row.try_get("provider")?,
            reference: row.try_get("reference")?,
            amount_minor: row.try_get("amount_minor")?,
        };
        paid += piece.amount_minor;
        pieces.push(piece);
    }
    match order.amount_minor {
        Some(amount) if amount > paid => {
            Err(ReopenError::TooLittle { order_id: order.order_id.clone(), missing_minor: amount - paid })
        }
        _ => Ok(pieces),
    }
}

async fn use_pieces(connection: &mut PgConnection, pieces: &[Piece], operator: &Operator) -> Result<(), sqlx::Error> {
    for piece in pieces {
        let settle = sqlx::query(
            "UPDATE late_payments SET state = 'reopened', settled_at = clock_timestamp(), settled_by = $2,
                                      settled_why = $3
             WHERE id = $1 AND state = 'open'",
        );
        let settle = settle.bind(piece.id).bind(&operator.who).bind(&operator.why);
        one_row(&settle.execute(&mut *connection).await?, "late_payments")?;
        count(connection, piece, piece.amount_minor).await?;
        sqlx::query("UPDATE payment_attempts SET state = 'paid' WHERE provider = $1 AND reference = $2")
            .bind(&piece.provider)
            .bind(&piece.reference)
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

/// Changes how much of the payment counts toward its order.
async fn count(connection: &mut PgConnection, piece: &Piece, more: i64) -> Result<(), sqlx::Error> {
    let update = sqlx::query(
        "UPDATE received_payments SET counted_minor = counted_minor + $3 WHERE provider = $1 AND reference = $2",
    );
    let update = update.bind(&piece.provider).bind(&piece.reference).bind(more);
    one_row(&update.execute(connection).await?, "received_payments")
}

async fn record_surplus(
    connection: &mut PgConnection,
    (kind, order_id): (&str, &str),
    piece: &Piece,
    surplus_minor: i64,
    currency: &str,
) -> Result<(), sqlx::Error> {
    count(connection, piece, -surplus_minor).await?;
    sqlx::query("SELECT record_late_payment($1, $2, $3, $4, $5, $6, 'surplus')")
        .bind(kind)
        .bind(order_id)
        .bind(&piece.provider)
        .bind(&piece.reference)
        .bind(surplus_minor)
        .bind(currency)
        .execute(connection)
        .await
        .map(drop)
}

/// As in an alarm, the default kind is not named; and it alone has a history.
async fn announce_reopened(
    connection: &mut PgConnection,
    (kind, order_id): (&str, &str),
    late_payments: &[i64],
    (amount_minor, currency): (i64, &str),
    operator: &Operator,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "WITH history AS (
             INSERT INTO order_events (order_id, event, by, reason, who, why, run)
             SELECT o.id, 'reopened', 'manual', 'paid by late money', $6, $7, $8
             FROM orders o WHERE $1 = 'order' AND o.id = uuid_of($2)
         )
         INSERT INTO event_outbox (kind, routing_key, type, payload)
         SELECT $1, 'order.reopened', 'order.reopened.v1', jsonb_build_object(
             'order_id', $2::text, 'late_payment_ids', to_jsonb($3::bigint[]), 'amount_minor', $4::bigint,
             'currency', $5::text,
             'reopened_at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"'))
             || CASE WHEN $1 = 'order' THEN '{}' ELSE jsonb_build_object('kind', $1::text) END",
    )
    .bind(kind)
    .bind(order_id)
    .bind(late_payments)
    .bind(amount_minor)
    .bind(currency)
    .bind(&operator.who)
    .bind(&operator.why)
    .bind(operator.run)
    .execute(connection)
    .await
    .map(drop)
}

/// The rows are locked, so another number means that a trigger has skipped the update.
fn one_row(result: &sqlx::postgres::PgQueryResult, table: &str) -> Result<(), sqlx::Error> {
    match result.rows_affected() {
        1 => Ok(()),
        _ => Err(sqlx::Error::Protocol(format!(
            "a trigger on {table} keeps the row unchanged, so the order cannot be reopened; let the trigger return NEW"
        ))),
    }
}
