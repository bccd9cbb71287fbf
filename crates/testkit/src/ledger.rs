//! The invariants of closes and stock: they hold after every test, whatever it did to the servers.

use sqlx::PgPool;

/// The numbers of closes and stock in the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ledger {
    /// Orders with more than one close in their history.
    pub closed_twice: i64,
    /// Orders closed before the deadline in their row, without those that were released.
    pub early: i64,
    /// Orders that are paid and have a close in their history, without those that late money has reopened.
    pub paid_closed: i64,
    /// Reserved stock and resources.
    pub reserved: i64,
    /// Stock and resources that orders which are neither paid nor closed have reserved.
    pub promised: i64,
}

impl Ledger {
    /// Reads them.
    ///
    /// # Errors
    /// If the database does not answer.
    pub async fn read(pool: &PgPool) -> Result<Self, sqlx::Error> {
        let (closed_twice, early, paid_closed, reserved, promised) = sqlx::query_as(
            "SELECT (SELECT count(*) FROM (SELECT FROM order_events WHERE event = 'closed'
                                           GROUP BY order_id HAVING count(*) > 1) AS twice),
                    (SELECT count(*) FROM orders WHERE closed_at < expires_at AND closed_by <> 'released'),
                    (SELECT count(*) FROM orders o JOIN order_events e ON e.order_id = o.id
                     WHERE o.status = 'paid' AND e.event = 'closed'
                       AND NOT EXISTS (SELECT FROM order_events r WHERE r.order_id = o.id AND r.event = 'reopened')),
                    (SELECT coalesce(sum(reserved), 0)::bigint
                     FROM (SELECT reserved FROM stock UNION ALL SELECT reserved FROM reserved_resources) AS all_reserved),
                    (SELECT coalesce(sum(quantity), 0)::bigint
                     FROM (SELECT order_id, quantity FROM order_items
                           UNION ALL SELECT order_id, quantity FROM order_resources) AS i
                     JOIN orders o ON o.id = i.order_id
                     WHERE o.status IN ('unpaid', 'closing'))",
        )
        .fetch_one(pool)
        .await?;
        Ok(Self { closed_twice, early, paid_closed, reserved, promised })
    }

    /// No order is closed twice, early or after its payment; the stock adds up.
    pub fn assert_balanced(&self) {
        assert_eq!(self.closed_twice, 0, "closed twice");
        assert_eq!(self.early, 0, "closed early");
        assert_eq!(self.paid_closed, 0, "paid and closed");
        assert_eq!(self.reserved, self.promised, "reserved stock is what unpaid orders hold");
    }
}
