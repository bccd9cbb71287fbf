//! How payments pay the orders of a mapped table: what the close claims instead, because a provider must be asked, and the
//! functions of the kind that `sql/functions/order_keys.sql` calls.
//!
//! Pure. Nothing here is rendered for a mapping without `pay`.

use std::collections::BTreeMap;

use super::{
    MappingError, Parts, StockColumns, among, as_numbered, ended, ids, literal, name, numbered, step, stock_update,
};

/// A function of a kind, as `adopt --install` creates it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PaymentFunction {
    /// Its name, without a schema: that of our own tables.
    pub name: String,
    /// Its parameters, and what it returns.
    pub signature: String,
    /// In which language it is written.
    pub language: &'static str,
    /// Its body, as `pg_proc.prosrc` has it.
    pub body: String,
}

impl PaymentFunction {
    /// The statement that creates it. Its `search_path` is that of the session, so that the operator's expressions mean what
    /// they mean to a worker.
    #[must_use]
    pub fn create(&self) -> String {
        let Self { name, signature, language, body } = self;
        format!(
            "CREATE OR REPLACE FUNCTION {name}{signature} LANGUAGE {language} SET search_path FROM CURRENT AS $order_timeout${body}$order_timeout$"
        )
    }
}

impl Parts<'_> {
    /// Whether the close claims orders that a provider must be asked about.
    pub(super) fn claims(&self) -> bool {
        self.table.pay.is_some()
    }

    fn kind_literal(&self) -> String {
        literal(self.words.kind.as_str())
    }

    /// Further columns of `ot_decided`.
    pub(super) fn claimable_columns(&self) -> String {
        if !self.claims() {
            return String::new();
        }
        let alias = self.alias();
        format!(
            ",\n           coalesce({}, false) AS is_closing,\n           {} AS order_id",
            self.is_closing(),
            ids::print(&self.id_columns(&alias))
        )
    }

    /// Whether the row says that its provider is asked.
    fn is_closing(&self) -> String {
        self.table.closing.as_ref().map_or_else(|| "false".to_owned(), |closing| self.has_values(closing))
    }

    /// Whether the row has what a setting such as `close` writes.
    fn has_values(&self, columns: &BTreeMap<String, String>) -> String {
        let alias = self.alias();
        let has = columns.iter().map(|(column, value)| match value.as_str() {
            "now" => format!("{alias}.{} IS NOT NULL", name(column)),
            value => format!("{alias}.{} = {}", name(column), literal(value)),
        });
        format!("({})", has.collect::<Vec<_>>().join(" AND "))
    }

    /// The steps to `ot_due`: orders that are closed now.
    pub(super) fn due_steps(&self) -> Result<Vec<String>, MappingError> {
        let keys = self.keys("d.k");
        if !self.claims() {
            return Ok(vec![step(
                "ot_due AS MATERIALIZED",
                &format!(
                    "SELECT {keys} FROM ot_decided d\n    WHERE d.is_open AND NOT d.is_paid AND d.deadline <= (SELECT m.now FROM ot_moment m)"
                ),
            )]);
        }
        let kind = self.kind_literal();
        Ok(vec![
            step(
                "ot_overdue AS MATERIALIZED",
                &format!(
                    "SELECT {keys}, d.order_id FROM ot_decided d\n    WHERE (d.is_open OR $4::boolean AND d.is_closing) AND NOT d.is_paid\n      AND d.deadline <= (SELECT m.now FROM ot_moment m)"
                ),
            ),
            step(
                "ot_to_ask AS MATERIALIZED",
                &format!(
                    "SELECT q.order_id, q.provider FROM orders_to_ask_about(ARRAY(SELECT o.order_id FROM ot_overdue o), {kind}) q"
                ),
            ),
            // Another worker has them, even if its provider has said meanwhile that no attempt is open.
            step(
                "ot_claimed AS MATERIALIZED",
                &format!(
                    "SELECT c.order_id FROM close_attempts c\n    WHERE NOT $4::boolean AND c.kind || '' = {kind} AND c.order_id = ANY (ARRAY(SELECT o.order_id FROM ot_overdue o))"
                ),
            ),
            step(
                "ot_due AS MATERIALIZED",
                &format!(
                    "SELECT {keys} FROM ot_overdue d\n    WHERE d.order_id NOT IN (SELECT q.order_id FROM ot_to_ask q)\n      AND d.order_id NOT IN (SELECT c.order_id FROM ot_claimed c)"
                ),
            ),
        ])
    }

    /// The steps that claim orders and make part payments of closed ones late money, and the outcomes of claimed orders.
    pub(super) fn claim_steps(&self, is_closed: &str) -> Result<(Vec<String>, String), MappingError> {
        if !self.claims() {
            return Ok((Vec::new(), String::new()));
        }
        let kind = self.kind_literal();
        let setting = |setting: &str| format!("(SELECT nullif(current_setting('order_timeout.{setting}', true), ''))");
        let mut steps = vec![step(
            "ot_claim",
            &format!(
                "INSERT INTO close_attempts (kind, order_id, claimed_by, who, why, queue, next_attempt_at)\n    SELECT {kind}, q.order_id, $2::text, {}, {}, q.provider, (SELECT m.now FROM ot_moment m)\n    FROM ot_to_ask q\n    WHERE NOT $4::boolean AND q.order_id NOT IN (SELECT c.order_id FROM ot_claimed c)\n    ORDER BY q.order_id\n    ON CONFLICT (order_id, kind) DO NOTHING\n    RETURNING order_id",
                setting("who"),
                setting("why"),
            ),
        )];
        if let Some(closing) = &self.table.closing {
            let alias = self.alias();
            steps.push(step(
                "ot_claiming AS MATERIALIZED",
                &format!(
                    "SELECT {} FROM ot_overdue d WHERE d.order_id IN (SELECT c.order_id FROM ot_claim c)",
                    self.keys("d.k")
                ),
            ));
            steps.push(step(
                "ot_closing",
                &format!(
                    // The cast fails with this text, as in the close.
                    "UPDATE {} AS {alias}\n    SET {}\n    WHERE {}\n    RETURNING CASE WHEN ({}) IS TRUE THEN ('kinds.{}.table.closing makes the order paid; set there what paid does not test. Order ' || {})::integer END AS ot_paid",
                    self.orders(),
                    self.assignments("closing", closing)?,
                    among(&self.id_columns(&alias), "ot_claiming", "k"),
                    ended(&self.table.paid),
                    self.words.kind,
                    ids::print(&self.id_columns(&alias)),
                ),
            ));
        }
        // The function reads with a snapshot of its own, so that a part that was reported under the lock of the row is seen.
        steps.push(step(
            "ot_parts AS MATERIALIZED",
            &format!(
                "SELECT release_parts_of(ARRAY(SELECT d.order_id FROM ot_decided d WHERE ({is_closed}) IS TRUE), {kind})"
            ),
        ));
        let outcomes = "\n           WHEN d.order_id IN (SELECT c.order_id FROM ot_claim c) THEN 'claimed'\n           WHEN d.is_closing AND NOT $4::boolean OR d.order_id IN (SELECT c.order_id FROM ot_claimed c)\n               OR d.order_id IN (SELECT q.order_id FROM ot_to_ask q) THEN 'closing'";
        Ok((steps, outcomes.to_owned()))
    }

    /// A condition that leaves out claimed orders: the closing protocol has them. Looked up in a hash table.
    pub(super) fn is_unclaimed(&self) -> Option<String> {
        let (id, kind) = (ids::print(&self.id_columns(&self.alias())), self.kind_literal());
        let claimed = format!("SELECT c.order_id FROM close_attempts c WHERE c.kind = {kind}");
        self.claims().then(|| format!("(({id}) IN ({claimed})) IS NOT TRUE"))
    }

    /// The functions of the kind; none without `pay`.
    pub(super) fn functions(&self) -> Result<Vec<PaymentFunction>, MappingError> {
        let Some(pay) = &self.table.pay else { return Ok(Vec::new()) };
        if self.table.amount.is_some()
            && let Some(fault) = &self.facts.money_fault
        {
            return Err(fault.clone());
        }
        if self.id.iter().any(|(_, kind)| kind.base == "citext") {
            let why = "cannot be used with an id of type citext, of which payments would have several spellings; name a unique column of another type as id";
            return Err(MappingError::new("pay", why));
        }
        let function = |what: &str, signature: &str, language, body| PaymentFunction {
            name: format!("kind_{}_{what}", self.words.kind),
            signature: signature.to_owned(),
            language,
            body,
        };
        Ok(vec![
            function("id", "(order_id text) RETURNS text", "sql", self.id_function()),
            function(
                "order",
                "(order_id text, waits boolean, OUT state text, OUT deadline timestamptz, OUT amount_minor bigint, OUT currency text)",
                "plpgsql",
                self.order_function(),
            ),
            function(
                "count",
                "(order_id text, counted bigint, pays boolean, by text, why text, answers text) RETURNS boolean",
                "plpgsql",
                self.count_function(pay)?,
            ),
            function("consume", "(order_ids text[]) RETURNS void", "plpgsql", self.consume_function()?),
        ])
    }

    /// The ids of `$1` as the step `ot_asked`.
    fn asked(&self, texts: &str) -> String {
        let parts = self.with_parts(texts);
        step(
            "ot_asked AS MATERIALIZED",
            &format!("SELECT {} FROM {parts}", as_numbered(&self.parsed(self.part_text()), "k")),
        )
    }

    fn id_function(&self) -> String {
        format!(
            "\nWITH {}\nSELECT {} FROM ot_asked a WHERE NOT ({})\n",
            self.asked("SELECT $1::text AS text_id"),
            ids::print(&numbered("a.k", self.id.len())),
            self.is_malformed()
        )
    }

    fn order_function(&self) -> String {
        let (orders, alias, asked) = (self.orders(), self.alias(), self.asked("SELECT $1::text AS text_id"));
        let is_asked = among(&self.id_columns("o"), "ot_asked", "k");
        let read = |skip: &str| {
            format!(
                "WITH {asked},\not_locked AS MATERIALIZED (\n    SELECT o.* FROM {orders} AS o WHERE {is_asked} FOR NO KEY UPDATE OF o{skip}\n),\not_found AS (\n    SELECT CASE WHEN ({paid}) THEN 'paid' WHEN {is_closing} THEN 'closing' WHEN ({open}) THEN 'open'\n                WHEN {is_closed} THEN 'closed' ELSE 'not_open' END AS ot_state,\n           {deadline} AS ot_deadline, {money}\n    FROM ot_locked AS {alias}\n)\nSELECT f.ot_state, f.ot_deadline, f.amount_minor, f.currency INTO state, deadline, amount_minor, currency FROM ot_found f;",
                paid = ended(&self.table.paid),
                is_closing = self.is_closing(),
                open = ended(&self.table.open),
                is_closed = self.has_values(&self.table.close),
                deadline = self.usable_deadline(),
                money = self.money(),
            )
        };
        format!(
            "\n#variable_conflict use_column\nBEGIN\nIF $2 THEN\n{}\nELSE\n{}\nIF state IS NULL AND EXISTS (WITH {asked} SELECT FROM {orders} AS o WHERE {is_asked}) THEN\n    state := 'busy';\nEND IF;\nEND IF;\nEND",
            read(""),
            read(" SKIP LOCKED"),
        )
    }

    fn count_function(&self, pay: &BTreeMap<String, String>) -> Result<String, MappingError> {
        let alias = self.alias();
        Ok(format!(
            "\n#variable_conflict use_column\nDECLARE\n    ot_is_paid boolean;\nBEGIN\n-- A part payment is counted in received_payments alone.\nIF NOT $3 THEN\n    RETURN true;\nEND IF;\nWITH {},\not_moment AS MATERIALIZED (SELECT clock_timestamp() AS now)\nUPDATE {} AS {alias}\nSET {}\nWHERE {}\nRETURNING coalesce(({}), false) INTO ot_is_paid;\nIF NOT ot_is_paid THEN\n    RAISE 'kinds.{}.table.pay leaves order % unpaid; set there what paid tests', $1;\nEND IF;\nRETURN coalesce(ot_is_paid, false);\nEND",
            self.asked("SELECT $1::text AS text_id"),
            self.orders(),
            self.assignments("pay", pay)?,
            among(&self.id_columns(&alias), "ot_asked", "k"),
            ended(&self.table.paid),
            self.words.kind,
        ))
    }

    /// Each stock in the order of its keys, locked before it is changed, as the close does.
    fn consume_function(&self) -> Result<String, MappingError> {
        let mut body = "\n#variable_conflict use_column\nBEGIN\n".to_owned();
        for (index, (settings, relations)) in self.table.consume.iter().zip(&self.facts.consume).enumerate() {
            let (setting, (items, stock)) = (format!("consume[{index}]"), relations);
            let StockColumns { alias, order, item_key, stock_key } = StockColumns::of(&setting, settings, relations)?;
            let steps = [
                self.asked("SELECT DISTINCT unnest($1::text[]) AS text_id"),
                step(
                    "ot_items AS MATERIALIZED",
                    &format!(
                        "SELECT {}, ({}) AS quantity FROM {} AS {alias} WHERE {}",
                        as_numbered(&item_key, "s"),
                        ended(&settings.quantity),
                        items.qualified(),
                        among(&order, "ot_asked", "k")
                    ),
                ),
                step(
                    "ot_stock AS MATERIALIZED",
                    &format!(
                        "SELECT {} FROM {} AS s WHERE {} ORDER BY {} FOR NO KEY UPDATE OF s",
                        as_numbered(&stock_key, "s"),
                        stock.qualified(),
                        among(&stock_key, "ot_items", "s"),
                        stock_key.join(", ")
                    ),
                ),
            ];
            let items = "ot_items i WHERE (SELECT count(*) FROM ot_stock) >= 0";
            let update = stock_update(&setting, settings, stock, items)?;
            body += &format!("WITH {}\n{update};\n", steps.join(",\n"));
        }
        Ok(body + "END")
    }
}
