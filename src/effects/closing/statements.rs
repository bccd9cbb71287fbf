//! The statements that end a claimed order, with the parts that they share with `sql/close.sql`: what an order has
//! reserved is looked up, locked and given back in one way, with and without a provider.
//!
//! Renders texts; runs nothing.

use std::sync::LazyLock;

const CLOSE_SQL: &str = include_str!("../../../sql/close.sql");

static CLOSE_CLAIMED: LazyLock<String> =
    LazyLock::new(|| with_parts_of_close(include_str!("../../../sql/close_claimed.sql")));
static SETTLE_PAID: LazyLock<String> =
    LazyLock::new(|| with_parts_of_close(include_str!("../../../sql/settle_paid.sql")));

/// The statement that closes claimed orders.
#[must_use]
pub fn close_claimed_sql() -> &'static str {
    &CLOSE_CLAIMED
}

/// The statement that settles claimed orders as paid.
#[must_use]
pub fn settle_paid_sql() -> &'static str {
    &SETTLE_PAID
}

/// From the CTE that reads the items of the CTE `due` to the one with the orders of which another session holds a row;
/// both take the parameter `$3`.
fn reservations() -> &'static str {
    part("items AS MATERIALIZED (", "closed AS (")
}

/// What the CTE `closed` releases; after the CTEs `history` and `event`.
fn returns() -> &'static str {
    part("part_payments AS MATERIALIZED (", "SELECT a.text_id AS order_id,")
}

fn part(from: &str, to: &str) -> &'static str {
    let begin = CLOSE_SQL.find(&format!("\n{from}")).expect("sql/close.sql has this CTE") + 1;
    let length = CLOSE_SQL[begin..].find(&format!("\n{to}")).expect("sql/close.sql goes on with this");
    &CLOSE_SQL[begin..begin + length]
}

fn with_parts_of_close(template: &str) -> String {
    template.replace("{reservations of sql/close.sql}", reservations()).replace("{returns of sql/close.sql}", returns())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_statements_have_their_parts() {
        for sql in [close_claimed_sql(), settle_paid_sql()] {
            assert!(sql.contains("\nheld_elsewhere AS MATERIALIZED (") && !sql.contains("of sql/close.sql}"), "{sql}");
        }
        let given_back = "\nresources_given_back AS (";
        assert!(close_claimed_sql().contains(given_back) && !settle_paid_sql().contains(given_back));
    }
}
