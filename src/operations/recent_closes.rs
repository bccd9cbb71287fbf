//! The orders that were closed last, by whichever worker, and how late each was.
//!
//! Reads `event_outbox`, which keeps sent events for `announce.keep`. By its indexes, and a fixed number of rows, however
//! many there are.

use order_timeout_core::message::read_rfc3339;
use order_timeout_core::order::ClosedBy;
use serde::Serialize;

use crate::postgres::Database;

/// An order that was closed.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct RecentClose {
    /// Its kind's name.
    pub kind: String,
    /// As the orders table has it.
    pub order_id: String,
    /// When it was closed, RFC 3339.
    pub closed_at: String,
    /// How long after its deadline, in milliseconds; `None` if it was released before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub late_ms: Option<f64>,
    /// What closed it: `alarm`, `look_ahead`, `sweep`, `manual` or `released`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub closed_by: Option<String>,
}

type Row = (String, String, String, Option<String>, Option<String>);

/// The newest ten at most. Other events may hide some.
///
/// # Errors
/// sqlx's.
pub async fn recent_closes(database: &Database) -> Result<Vec<RecentClose>, sqlx::Error> {
    let query = sqlx::query_as::<_, Row>(
        "SELECT kind, payload ->> 'order_id', payload ->> 'closed_at', payload ->> 'deadline', payload ->> 'closed_by'
         FROM ((SELECT kind, type, payload FROM event_outbox WHERE sent_at IS NOT NULL ORDER BY sent_at DESC LIMIT 100)
               UNION ALL
               (SELECT kind, type, payload FROM event_outbox WHERE sent_at IS NULL
                ORDER BY next_attempt_at DESC, created_at DESC, id DESC LIMIT 100)) AS newest
         WHERE type = 'order.closed.v1' AND payload ->> 'order_id' IS NOT NULL AND payload ->> 'closed_at' IS NOT NULL
         ORDER BY 3 DESC, 2 LIMIT 10",
    );
    let rows = database.run(async |connection| query.fetch_all(connection).await).await?;
    Ok(rows.into_iter().map(read).collect())
}

fn read((kind, order_id, closed_at, deadline, closed_by): Row) -> RecentClose {
    let is_released = closed_by.as_deref() == Some(ClosedBy::Released.as_str());
    let deadline = deadline.as_deref().filter(|_| !is_released).and_then(read_rfc3339);
    let late_ms = read_rfc3339(&closed_at).zip(deadline).map(|(at, deadline)| at.since(deadline).as_secs_f64() * 1e3);
    RecentClose { kind, order_id, closed_at, late_ms, closed_by }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lateness_is_known_where_both_times_are() {
        let close = |deadline: Option<&str>, by: &str| {
            let at = "2026-11-20T10:30:00.004000Z".to_owned();
            read(("order".into(), "17".into(), at, deadline.map(str::to_owned), Some(by.into()))).late_ms
        };
        assert_eq!(close(Some("2026-11-20T10:30:00.000000Z"), "alarm"), Some(4.0));
        assert_eq!((close(None, "alarm"), close(Some("no time"), "alarm")), (None, None));
        assert_eq!(close(Some("2026-11-20T10:45:00.000000Z"), "released"), None);
    }
}
