//! What operators ask about the orders of a mapped table: one order, how many are overdue, and what falls due when, with
//! money and stock as far as the mapping says.
//!
//! Pure. No statement changes a row. What is asked of many orders follows the index of `overdue`.

use super::{
    AFTER_LAST_DEADLINE, ColumnType, FIRST_DEADLINE, MappingError, Parts, among, as_numbered, ended, ids, name,
    numbered, require_all,
};

use crate::config::kinds::key_of;

/// Statements that tell operators about the orders of a mapped table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Questions {
    /// One order: its status and deadline. `$1` text: its id.
    pub row: String,
    /// The same, of an order whose row no other session holds.
    pub free_row: String,
    /// The transaction that has last locked or changed one order's row, as text. `$1` text: its id.
    pub last_transaction: String,
    /// How many of the open orders that are not paid have a deadline that no order can have, one of these deadlines as
    /// Postgres prints it, and how many have an id that no message can carry.
    pub unusable: String,
    /// How many orders are overdue, at most `$1` bigint: `orders` bigint, `oldest` timestamptz, and the id of that one,
    /// `example` text. As in all that follow, without those whose id no message can carry: they are never closed.
    pub overdue: String,
    /// A page of what falls due, by (deadline, id). `$1`, `$2` timestamptz: from, and before; `$3` timestamptz, `$4` text:
    /// the row behind which it begins, with an empty id if it is the first page; `$5` text: a part of the order's id or of
    /// the key of one of its items, or NULL; `$6`, `$7` bigint: rows to search, and to return.
    ///
    /// `order_id` text, `deadline` timestamptz, `amount_minor` bigint, `currency` text, `units` bigint; `number` bigint:
    /// which row of the search it is; `matches` boolean: false only for the last one of a full search.
    pub due: String,
    /// What falls due in each minute since `$3` timestamptz, `$1` and `$2` as above: `minute` bigint, `currency` text,
    /// `orders` bigint, `amount_minor` bigint, `without_amount` bigint.
    pub due_minutes: String,
    /// The stock that those orders reserve, with the same parameters: `minute` bigint, `units` bigint. `None` if no
    /// stock is named.
    pub units_by_minute: Option<String>,
    /// The open orders that a condition of the operator chooses, which stands between these two: `order_id` text, `deadline`
    /// timestamptz or NULL, by (deadline, id). `$1` uuid: a run; those that it has moved are left out.
    pub choose: [String; 2],
    /// What these orders reserve, as above: the number of items bigint, and of units bigint. `$1` `text[]`: their ids.
    pub items: Option<String>,
    /// Why it is not known what an order costs, in one sentence; `None` if it is.
    pub why_no_money: Option<String>,
}

/// The first entry of `stock`, of which operators are told.
struct Reserved {
    /// `table AS alias`
    items: String,
    /// Its columns with the order's id.
    order: Vec<String>,
    /// Its columns with the stock's key.
    key: Vec<String>,
    quantity: String,
}

impl<'a> Parts<'a> {
    pub(super) fn questions(&self) -> Result<Questions, MappingError> {
        let reserved = self.reserved()?;
        Ok(Questions {
            row: self.row(""),
            free_row: self.row("\n    FOR NO KEY UPDATE SKIP LOCKED"),
            last_transaction: self.last_transaction(),
            unusable: self.unusable(),
            overdue: self.count_overdue(),
            due: self.due(reserved.as_ref()),
            due_minutes: self.due_minutes(),
            units_by_minute: reserved.as_ref().map(|reserved| self.units_by_minute(reserved)),
            choose: self.choose(),
            items: reserved.as_ref().map(|reserved| self.items(reserved)),
            why_no_money: self.why_no_money(),
        })
    }

    fn reserved(&self) -> Result<Option<Reserved>, MappingError> {
        let (Some(settings), Some((items, _))) = (self.table.stock.first(), self.facts.stock.first()) else {
            return Ok(None);
        };
        let alias = name(&items.name);
        Ok(Some(Reserved {
            items: format!("{} AS {alias}", items.qualified()),
            order: require_all(items, &alias, &settings.order.0, "stock[0].order")?,
            key: require_all(items, &alias, &settings.key.0, "stock[0].key")?,
            quantity: ended(&settings.quantity),
        }))
    }

    /// A text that is no id of this table has the status `malformed`.
    fn row(&self, lock: &str) -> String {
        let (orders, alias) = (self.orders(), self.alias());
        format!(
            "WITH {asked},\not_row AS MATERIALIZED (\n    SELECT {status} AS status,\n           {deadline} AS deadline\n    FROM {orders} AS {alias}\n    WHERE {is_asked}{lock}\n)\nSELECT CASE WHEN {malformed} THEN 'malformed' ELSE r.status END AS status, r.deadline AS deadline\nFROM ot_asked a LEFT JOIN ot_row r ON true\nWHERE {malformed} OR r.status IS NOT NULL",
            asked = self.asked("SELECT $1::text AS text_id"),
            status = self.status(),
            deadline = self.deadline,
            is_asked = among(&self.id_columns(&alias), "ot_asked", "k"),
            malformed = self.is_malformed(),
        )
    }

    fn last_transaction(&self) -> String {
        format!(
            "WITH {}\nSELECT o.xmax::text FROM {} AS o WHERE {}",
            self.asked("SELECT $1::text AS text_id"),
            self.orders(),
            among(&self.id_columns("o"), "ot_asked", "k"),
        )
    }

    fn unusable(&self) -> String {
        let (orders, alias, deadline, is_unpaid) = (self.orders(), self.alias(), &self.deadline, self.is_unpaid(" "));
        let (id, is_unusable) = (ids::print(&self.id_columns(&alias)), is_unusable("f.id"));
        format!(
            "SELECT count(*) FILTER (WHERE f.is_never), min(f.deadline::text) FILTER (WHERE f.is_never),\n       count(*) FILTER (WHERE {is_unusable})\nFROM (\n    SELECT {id} AS id, {deadline} AS deadline, {deadline} < {FIRST_DEADLINE} OR {deadline} >= {AFTER_LAST_DEADLINE} AS is_never\n    FROM {orders} AS {alias} WHERE {is_unpaid}\n) f"
        )
    }

    pub(super) fn why_no_money(&self) -> Option<String> {
        let kind = &self.words.kind;
        match (&self.facts.money_fault, &self.table.amount) {
            (Some(MappingError { key, why }), _) => Some(format!("{} {why}", key_of(kind, key))),
            (None, None) => {
                Some(format!("{} is not given; write what an order costs (docs/ADOPTING.md)", key_of(kind, "amount")))
            }
            (None, Some(_)) => None,
        }
    }

    /// Orders that can be closed: open, not paid, and with an id that a message can carry, which a number or a UUID is.
    fn is_told(&self) -> String {
        let is_text = |kind: &ColumnType| !["int2", "int4", "int8", "uuid"].contains(&kind.base.as_str());
        let is_unpaid = self.is_unpaid(" ");
        let is_unclaimed = self.is_unclaimed().map_or_else(String::new, |unclaimed| format!("\n      AND {unclaimed}"));
        if !self.id.iter().any(|(_, kind)| is_text(kind)) {
            return is_unpaid + &is_unclaimed;
        }
        let id = ids::print(&self.id_columns(&self.alias()));
        format!("{is_unpaid}{is_unclaimed}\n      AND NOT {}", is_unusable(&id))
    }

    /// Orders that fall due in the window of `$1` and `$2`.
    fn is_due_in_window(&self) -> String {
        let (deadline, is_told) = (&self.deadline, self.is_told());
        format!("{is_told}\n      AND {deadline} >= $1::timestamptz AND {deadline} < $2::timestamptz")
    }

    /// The columns `amount_minor` and `currency`: NULL where the mapping does not say.
    pub(super) fn money(&self) -> String {
        let known = |expression: &'a Option<String>| expression.as_deref().filter(|_| self.facts.money_fault.is_none());
        let amount = known(&self.table.amount).map(|amount| self.in_minor_units(amount));
        let currency = known(&self.table.currency).map(|currency| format!("upper(({})::text)", ended(currency)));
        format!(
            "{} AS amount_minor, {} AS currency",
            amount.as_deref().unwrap_or("NULL::bigint"),
            currency.as_deref().unwrap_or("NULL::text")
        )
    }

    /// An amount in the currency's smallest unit.
    pub(super) fn in_minor_units(&self, amount: &str) -> String {
        let amount = ended(amount);
        match self.table.minor_units {
            None | Some(0) => format!("({amount})::bigint"),
            Some(digits) => format!("round(({amount})::numeric * {})::bigint", 10_u32.pow(digits.into())),
        }
    }

    fn count_overdue(&self) -> String {
        let (orders, alias, deadline) = (self.orders(), self.alias(), &self.deadline);
        let ids = self.id_columns(&alias);
        let overdue = format!(
            "FROM {orders} AS {alias}\n    WHERE {}\n      AND {deadline} >= {FIRST_DEADLINE} AND {deadline} <= statement_timestamp()\n    ORDER BY {deadline}, {}",
            self.is_told(),
            ids.join(", "),
        );
        format!(
            "SELECT count(*) AS orders, min(f.deadline) AS oldest, (\n    SELECT {printed} {overdue} LIMIT 1) AS example\nFROM (\n    SELECT {deadline} AS deadline {overdue} LIMIT $1::bigint) f",
            printed = ids::print(&ids),
        )
    }

    fn due(&self, reserved: Option<&Reserved>) -> String {
        let (alias, count) = (self.alias(), self.id.len());
        let of_order = |reserved: &Reserved, step: &str| -> String {
            let keys = numbered(&format!("{step}.k"), count);
            let pairs = reserved.order.iter().zip(keys).map(|(column, key)| format!("{column} = {key}"));
            pairs.collect::<Vec<_>>().join(" AND ")
        };
        let has_item = reserved.map_or_else(String::new, |reserved| {
            format!(
                "\n                OR EXISTS (SELECT FROM {} WHERE {} AND position(lower($5::text) IN lower({})) > 0)",
                reserved.items,
                of_order(reserved, "ot_s"),
                ids::print(&reserved.key)
            )
        });
        let units = reserved.map_or_else(
            || "NULL::bigint".to_owned(),
            |reserved| {
                format!(
                    "(SELECT coalesce(sum({}), 0)::bigint FROM {} WHERE {})",
                    reserved.quantity,
                    reserved.items,
                    of_order(reserved, "ot_j")
                )
            },
        );
        format!(
            "WITH {after},\not_searched AS MATERIALIZED (\n    SELECT {printed} AS order_id, {keys}, {deadline} AS deadline, {money}\n    FROM {orders} AS {alias}\n    WHERE {is_due}\n      AND {is_after}\n    ORDER BY {deadline}, {ids} LIMIT $6::bigint\n),\not_judged AS (\n    SELECT ot_s.*, row_number() OVER (ORDER BY ot_s.deadline, {searched_keys}) AS number,\n           $5::text IS NULL OR position(lower($5::text) IN lower(ot_s.order_id)) > 0{has_item} AS matches\n    FROM ot_searched ot_s\n)\nSELECT ot_j.order_id, ot_j.deadline, ot_j.amount_minor, ot_j.currency, ot_j.number, ot_j.matches,\n       {units} AS units\nFROM ot_judged ot_j\n-- The last row that was searched tells where the next page begins, even if it does not match.\nWHERE ot_j.matches OR ot_j.number = $6::bigint\nORDER BY ot_j.number LIMIT $7::bigint",
            after = self.after("$4"),
            printed = ids::print(&self.id_columns(&alias)),
            keys = self.id_as_keys(&alias),
            deadline = self.deadline,
            money = self.money(),
            orders = self.orders(),
            is_due = self.is_due_in_window(),
            is_after = self.is_after("$3", "$4", "      "),
            ids = self.id_columns(&alias).join(", "),
            searched_keys = self.keys("ot_s.k"),
        )
    }

    /// The minute of an order's deadline, since `$3`.
    fn minute(&self) -> String {
        format!("floor(date_part('epoch', {} - $3::timestamptz) / 60)::bigint AS minute", self.deadline)
    }

    fn due_minutes(&self) -> String {
        format!(
            "WITH ot_due AS (\n    SELECT {minute}, {money}\n    FROM {orders} AS {alias}\n    WHERE {is_due}\n)\nSELECT d.minute, d.currency, count(*) AS orders, sum(d.amount_minor)::bigint AS amount_minor,\n       count(*) FILTER (WHERE d.amount_minor IS NULL OR d.currency IS NULL) AS without_amount\nFROM ot_due d\nGROUP BY 1, 2",
            minute = self.minute(),
            money = self.money(),
            orders = self.orders(),
            alias = self.alias(),
            is_due = self.is_due_in_window(),
        )
    }

    /// Two derived tables, so that no name in the operator's expressions is one of the other table's, and the planner may
    /// still hash one of them.
    fn units_by_minute(&self, reserved: &Reserved) -> String {
        let same: Vec<String> = (1..=self.id.len()).map(|number| format!("i.k{number} = d.k{number}")).collect();
        format!(
            "SELECT d.minute, sum(i.quantity)::bigint AS units\nFROM (\n    SELECT {keys}, {minute}\n    FROM {orders} AS {alias}\n    WHERE {is_due}\n) d\nJOIN (SELECT {of_order}, ({quantity}) AS quantity FROM {items}) i ON {same}\nGROUP BY 1",
            keys = self.id_as_keys(&self.alias()),
            minute = self.minute(),
            orders = self.orders(),
            alias = self.alias(),
            is_due = self.is_due_in_window(),
            of_order = as_numbered(&reserved.order, "k"),
            quantity = reserved.quantity,
            items = reserved.items,
            same = same.join(" AND "),
        )
    }

    /// The condition is evaluated on the table alone, so that it can name the columns as it likes.
    fn choose(&self) -> [String; 2] {
        let (orders, alias, deadline) = (self.orders(), self.alias(), &self.deadline);
        let ids = self.id_columns(&alias);
        [
            format!(
                "SELECT {} AS order_id, {} AS deadline\nFROM (SELECT * FROM {orders} AS {alias} WHERE (",
                ids::print(&ids),
                self.usable_deadline()
            ),
            format!(
                ")) AS {alias}\nWHERE {}\n  AND {} NOT IN (\n    SELECT e.order_id::text FROM order_events e WHERE e.run = $1::uuid\n    UNION ALL\n    SELECT m.moved ->> 'order_id' FROM operator_actions a, jsonb_array_elements(a.alarms) m (moved)\n    WHERE a.run = $1::uuid)\nORDER BY {deadline}, {}",
                self.is_told(),
                ids::print(&ids),
                ids.join(", "),
            ),
        ]
    }

    fn items(&self, reserved: &Reserved) -> String {
        format!(
            "WITH {asked}\nSELECT count(*), coalesce(sum({quantity}), 0)::bigint FROM {items} WHERE {is_asked}",
            asked = self.asked("SELECT unnest($1::text[]) AS text_id"),
            quantity = reserved.quantity,
            items = reserved.items,
            is_asked = among(&reserved.order, "ot_asked", "k"),
        )
    }
}

/// Whether no message can carry this id.
fn is_unusable(id: &str) -> String {
    format!("(octet_length({id}) NOT BETWEEN 1 AND 200 OR {id} ~ '[\\x01-\\x1f\\x7f-\\u009f]')")
}
