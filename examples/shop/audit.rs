//! The check: how this run's orders ended according to the database. It uses nothing that the run remembers.

use std::collections::HashSet;

use anyhow::Context;
use sqlx::{PgPool, Row};
use uuid::Uuid;

use crate::plan::Plan;

/// The final state of the database.
#[derive(Debug)]
pub struct Findings {
    pub planned: usize,
    pub orders: usize,
    pub paid: usize,
    pub closed: usize,
    pub left_unpaid: usize,
    /// Orders with traces of both.
    pub paid_closed: usize,
    pub closed_twice: usize,
    pub early: usize,
    pub closed_by_alarm: usize,
    pub closed_by_look_ahead: usize,
    pub closed_by_sweep: usize,
    pub closed_by_manual: usize,
    /// One sentence for each article with numbers that do not add up.
    pub stock_faults: Vec<String>,
    pub closed_orders: HashSet<String>,
    pub lateness_us: Vec<u64>,
    /// What was taken as the end of a close.
    pub lateness_until: &'static str,
}

impl Findings {
    pub async fn from_database(pool: &PgPool, plan: &Plan) -> anyhow::Result<Self> {
        check(pool, plan).await.context("the result could not be checked")
    }
}

async fn check(pool: &PgPool, plan: &Plan) -> anyhow::Result<Findings> {
    let orders = plan.uuids();
    let counts = sqlx::query(COUNTS).bind(orders).fetch_one(pool).await?;
    let count = |column| -> anyhow::Result<usize> { Ok(counts.try_get::<i64, _>(column)?.try_into()?) };
    let (lateness_until, closes) = read_closes(pool, orders).await?;
    Ok(Findings {
        planned: orders.len(),
        orders: count("orders")?,
        paid: count("paid")?,
        closed: count("closed")?,
        left_unpaid: count("left_unpaid")?,
        paid_closed: count("paid_closed")?,
        closed_twice: count("closed_twice")?,
        early: count("early")?,
        closed_by_alarm: count("by_alarm")?,
        closed_by_look_ahead: count("by_look_ahead")?,
        closed_by_sweep: count("by_sweep")?,
        closed_by_manual: count("by_manual")?,
        stock_faults: check_stock(pool, plan).await?,
        closed_orders: closes.iter().map(|(order_id, _)| order_id.to_string()).collect(),
        // An early close is counted separately; here it would only improve the figures.
        lateness_us: closes.iter().filter_map(|(_, lateness_us)| u64::try_from(*lateness_us).ok()).collect(),
        lateness_until,
    })
}

/// A trace of a payment is the status, the time or the history; the same for a close.
const COUNTS: &str = "
    SELECT count(*) AS orders,
           count(*) FILTER (WHERE status = 'paid') AS paid,
           count(*) FILTER (WHERE status = 'closed') AS closed,
           count(*) FILTER (WHERE status IN ('unpaid', 'closing')) AS left_unpaid,
           count(*) FILTER (WHERE (status = 'paid' OR paid_at IS NOT NULL OR pays > 0)
                              AND (status = 'closed' OR closed_at IS NOT NULL OR closes > 0)) AS paid_closed,
           count(*) FILTER (WHERE closes > 1) AS closed_twice,
           count(*) FILTER (WHERE closed_at < expires_at) AS early,
           count(*) FILTER (WHERE closed_by = 'alarm') AS by_alarm,
           count(*) FILTER (WHERE closed_by = 'look_ahead') AS by_look_ahead,
           count(*) FILTER (WHERE closed_by = 'sweep') AS by_sweep,
           count(*) FILTER (WHERE closed_by = 'manual') AS by_manual
    FROM orders
    LEFT JOIN (SELECT order_id,
                      count(*) FILTER (WHERE event = 'paid') AS pays,
                      count(*) FILTER (WHERE event = 'closed') AS closes
               FROM order_events WHERE order_id = ANY ($1) GROUP BY order_id) AS history ON order_id = id
    WHERE id = ANY ($1)";

/// Each closed order and its lateness until the commit, if the server keeps commit times.
async fn read_closes(pool: &PgPool, orders: &[Uuid]) -> anyhow::Result<(&'static str, Vec<(Uuid, i64)>)> {
    let keeps_commit_times =
        sqlx::query_scalar("SELECT current_setting('track_commit_timestamp')::boolean").fetch_one(pool).await?;
    let (until, sql) = if keeps_commit_times { ("commit", BY_COMMIT) } else { ("closed_at", BY_CLOSED_AT) };
    Ok((until, sqlx::query_as(sql).bind(orders).fetch_all(pool).await?))
}

/// `xmin` is the transaction that wrote the row last; a closed order is not written again.
const BY_COMMIT: &str = "
    SELECT id, (extract(epoch FROM coalesce(pg_xact_commit_timestamp(xmin), closed_at) - expires_at) * 1000000)::bigint
    FROM orders WHERE id = ANY ($1) AND status = 'closed'";

const BY_CLOSED_AT: &str = "
    SELECT id, (extract(epoch FROM closed_at - expires_at) * 1000000)::bigint
    FROM orders WHERE id = ANY ($1) AND status = 'closed'";

/// Available, reserved and sold stock add up to the initial stock; the reserved stock is what open orders hold.
async fn check_stock(pool: &PgPool, plan: &Plan) -> anyhow::Result<Vec<String>> {
    let mut faults = Vec::new();
    for article in &plan.articles {
        let row = sqlx::query(
            "SELECT available, reserved,
                    coalesce(sum(quantity) FILTER (WHERE status = 'paid'), 0)::bigint AS sold,
                    coalesce(sum(quantity) FILTER (WHERE status IN ('unpaid', 'closing')), 0)::bigint AS promised
             FROM stock
             LEFT JOIN order_items USING (article_id)
             LEFT JOIN orders ON id = order_id
             WHERE article_id = $1
             GROUP BY available, reserved",
        )
        .bind(&article.id)
        .fetch_one(pool)
        .await?;
        let number = |column| row.try_get::<i64, _>(column);
        let (available, reserved, sold) = (number("available")?, number("reserved")?, number("sold")?);
        let promised = number("promised")?;
        if available + reserved + sold != article.initial || reserved != promised {
            faults.push(format!(
                "stock of {}: {available} available + {reserved} reserved + {sold} sold should be {}, and {promised} should be reserved",
                article.id, article.initial
            ));
        }
    }
    Ok(faults)
}
