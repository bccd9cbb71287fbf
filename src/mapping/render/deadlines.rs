//! The function of a kind that moves deadlines, one or many: row, alarm and history are one statement.
//!
//! Pure. `sql/functions/move_deadline.sql` calls it, for services and for operators, and says what it takes and returns.

use super::functions::KindFunction;
use super::{Parts, among, deadline_column, ended, ids, name, step};

const SIGNATURE: &str = "(order_ids text[], deadline timestamptz, shift float8, furthest float8, who text, why text, run uuid) RETURNS TABLE (order_id text, outcome text, status text, before timestamptz, wanted timestamptz, moved_to timestamptz, latest timestamptz)";

/// A condition on `ot_moved`: a trigger may have kept the old deadline. Nothing is recorded without an operator.
const IS_CHANGED_BY_OPERATOR: &str = "m.deadline IS DISTINCT FROM m.before AND $5::text IS NOT NULL";

impl Parts<'_> {
    /// `None` if there is a column to move.
    pub(super) fn why_not_moved(&self) -> Option<String> {
        let kind = &self.words.kind;
        deadline_column(self.table, &self.facts.orders).is_none().then(|| {
            format!(
                "kinds.{kind}.table.deadline is an expression, so there is no column to move: update the columns that it is made of yourself, and for an earlier deadline run `order-timeout schedule`"
            )
        })
    }

    pub(super) fn move_function(&self) -> KindFunction {
        let (language, body) = match deadline_column(self.table, &self.facts.orders) {
            Some(column) => ("sql", self.moving(column)),
            None => ("plpgsql", self.refusing()),
        };
        self.function("move", SIGNATURE, language, body)
    }

    fn refusing(&self) -> String {
        let why = self.why_not_moved().unwrap_or_default();
        format!("\nBEGIN\nRAISE USING MESSAGE = 'final: {why}', ERRCODE = 'invalid_parameter_value';\nEND")
    }

    fn moving(&self, column: &str) -> String {
        let (orders, alias, kind) = (self.orders(), self.alias(), self.kind_literal());
        let (kind_column, kind_value) = self.kind_column();
        let stored = match (self.facts.deadline_type.as_str(), self.zone()) {
            ("TIMESTAMP", Some(zone)) => format!("(ot_a.deadline AT TIME ZONE {zone})"),
            _ => "ot_a.deadline".to_owned(),
        };
        let of_order: Vec<String> =
            (1..).zip(self.id_columns(&alias)).map(|(number, column)| format!("{column} = ot_a.k{number}")).collect();
        let steps = [
            self.asked("SELECT DISTINCT unnest($1::text[]) AS text_id"),
            // In id order, so that two sessions cannot deadlock. What decides is outside, as in the close.
            step(
                "ot_locked AS MATERIALIZED",
                &format!(
                    "SELECT o.* FROM {orders} AS o\n    WHERE {}\n    ORDER BY {}\n    FOR NO KEY UPDATE OF o",
                    among(&self.id_columns("o"), "ot_asked", "k"),
                    self.id_columns("o").join(", ")
                ),
            ),
            step(
                "ot_decided AS MATERIALIZED",
                &format!(
                    "SELECT {},\n           {} AS order_id,\n           {} AS deadline,\n           {} AS status,\n           coalesce(({}), false) AND ({}) IS NOT TRUE AS is_open\n    FROM ot_locked AS {alias}",
                    self.id_as_keys(&alias),
                    ids::print(&self.id_columns(&alias)),
                    self.usable_deadline(),
                    self.status(),
                    ended(&self.table.open),
                    ended(&self.table.paid),
                ),
            ),
            step(
                "ot_moment AS MATERIALIZED",
                "SELECT clock_timestamp() AS now WHERE (SELECT count(*) FROM ot_decided) >= 0",
            ),
            // The function has a snapshot of its own, so that it sees what a session has committed that held the row.
            step(
                "ot_wanted AS MATERIALIZED",
                &format!(
                    "SELECT {}, d.order_id, d.deadline AS before, b.first, b.latest,\n           coalesce($2::timestamptz, d.deadline + make_interval(secs => $3::float8)) AS deadline\n    FROM ot_decided d, deadline_bounds({kind}, d.order_id, d.deadline) b\n    WHERE d.is_open",
                    self.keys("d.k")
                ),
            ),
            step(
                "ot_allowed AS MATERIALIZED",
                "SELECT w.* FROM ot_wanted w, ot_moment m\n    WHERE w.deadline IS DISTINCT FROM w.before AND (w.deadline <= w.latest) IS NOT FALSE\n      AND ($4::float8 IS NULL OR w.deadline > m.now AND w.deadline <= m.now + make_interval(secs => $4::float8))",
            ),
            step(
                "ot_moved",
                &format!(
                    "UPDATE {orders} AS {alias}\n    SET {} = {stored}\n    FROM ot_allowed ot_a\n    WHERE {} AND {}\n    RETURNING ot_a.order_id, ot_a.before, ot_a.first, {} AS deadline",
                    name(column),
                    among(&self.id_columns(&alias), "ot_allowed", "k"),
                    of_order.join(" AND "),
                    self.deadline
                ),
            ),
            step(
                "ot_alarm",
                &format!(
                    "INSERT INTO alarm_outbox (order_id, deadline{kind_column})\n    SELECT m.order_id, m.deadline{kind_value} FROM ot_moved m\n    WHERE m.deadline < coalesce(m.before, 'infinity')"
                ),
            ),
            step(
                "ot_first",
                &format!(
                    "INSERT INTO first_deadlines AS f (kind, order_id, deadline)\n    SELECT {kind}, m.order_id, m.first FROM ot_moved m WHERE m.first IS NOT NULL\n    ORDER BY m.order_id\n    ON CONFLICT (kind, order_id) DO UPDATE SET deadline = excluded.deadline WHERE f.deadline <> excluded.deadline"
                ),
            ),
            step("ot_history", &self.history()),
        ];
        format!(
            "\nWITH {}\nSELECT d.order_id,\n       CASE\n           WHEN NOT d.is_open THEN 'not_unpaid'\n           WHEN m.deadline < coalesce(d.deadline, 'infinity') THEN 'earlier'\n           WHEN m.deadline > d.deadline THEN 'later'\n           WHEN w.deadline IS NULL THEN 'no_deadline'\n           WHEN w.deadline > w.latest THEN 'too_far'\n           WHEN $4::float8 IS NOT NULL AND w.deadline <= t.now THEN 'passed'\n           WHEN w.deadline > t.now + make_interval(secs => $4::float8) THEN 'too_far'\n           WHEN w.deadline = d.deadline THEN 'same'\n           ELSE 'kept'\n       END AS outcome,\n       d.status, d.deadline AS before, w.deadline AS wanted, m.deadline AS moved_to, w.latest\nFROM ot_decided d\nCROSS JOIN ot_moment t\nLEFT JOIN ot_wanted w ON w.order_id = d.order_id\nLEFT JOIN ot_moved m ON m.order_id = d.order_id\n",
            steps.join(",\n")
        )
    }

    /// The default tables have a history of their own.
    fn history(&self) -> String {
        if !self.table.is_built_in {
            return format!(
                "INSERT INTO operator_actions (who, why, run, action, alarms)\n    SELECT $5::text, $6::text, $7::uuid, 'deadline_moved',\n           jsonb_agg(jsonb_build_object('kind', {}, 'order_id', m.order_id, 'before', m.before, 'deadline', m.deadline))\n    FROM ot_moved m\n    WHERE {IS_CHANGED_BY_OPERATOR}\n    HAVING count(*) > 0",
                self.kind_literal()
            );
        }
        let utc = |time: &str| format!("to_char({time} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')");
        format!(
            "INSERT INTO order_events (order_id, event, by, reason, who, why, run)\n    SELECT m.order_id::uuid, 'extended', 'manual',\n           'deadline moved from ' || coalesce({}, 'none') || ' to ' || {},\n           $5::text, $6::text, $7::uuid\n    FROM ot_moved m\n    WHERE {IS_CHANGED_BY_OPERATOR}",
            utc("m.before"),
            utc("m.deadline")
        )
    }
}
