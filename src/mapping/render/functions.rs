//! How a shop's transactions pay and release the orders of a mapped table: what the close claims instead, because a provider
//! must be asked, and the functions of the kind that those of `sql/functions/` call.
//!
//! Pure. A mapping without `pay` has only what moves deadlines and releases orders.

use std::collections::BTreeMap;

use order_timeout_core::kind::Kind;

use super::{
    IS_DUE, LEAVES_OPEN, MappingError, NOW, NULL, PATH, Parts, Relation, StockColumns, among, among_those, as_numbered,
    ended, ids, literal, name, numbered, require_all, setting, step,
};
use crate::config::kinds::{AttemptsSettings, key_of};

/// A release claims nothing.
const MAY_CLAIM: &str = "NOT $4::boolean AND $2::text <> 'released'";

/// Orders that are claimed now. Looked up in a hash table, and no join: the planner expects a few rows.
const IS_TO_ASK: &str = "(t.order_id IN (SELECT q.order_id FROM ot_to_ask q)) IS TRUE";

/// A row that is open again was claimed before, and a person has opened it: this is a new claim.
const NEW_CLAIM: &str = "DO UPDATE\n        SET claimed_by = excluded.claimed_by, who = excluded.who, why = excluded.why,\n            claimed_at = excluded.claimed_at, queue = excluded.queue,\n            step = excluded.step, rounds = excluded.rounds, has_waited = excluded.has_waited,\n            next_attempt_at = excluded.next_attempt_at, lease = NULL, last_answers = NULL,\n            unresolved_reason = NULL, unresolved_at = NULL";

/// A function of a kind, as `adopt --install` creates it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KindFunction {
    /// Its name, without a schema: that of our own tables.
    pub name: String,
    /// Its parameters, and what it returns.
    pub signature: String,
    /// In which language it is written.
    pub language: &'static str,
    /// Its body, as `pg_proc.prosrc` has it.
    pub body: String,
}

impl KindFunction {
    /// The statement that creates it. Its `search_path` is that of the session, so that the operator's expressions mean what
    /// they mean to a worker.
    #[must_use]
    pub fn create(&self) -> String {
        let Self { name, signature, language, body } = self;
        format!(
            "CREATE OR REPLACE FUNCTION {name}{signature} LANGUAGE {language} SET search_path FROM CURRENT AS $order_timeout${body}$order_timeout$"
        )
    }

    /// The name of the function of this kind that does this.
    #[must_use]
    pub fn name_of(kind: &Kind, what: &str) -> String {
        format!("kind_{kind}_{what}")
    }
}

impl Parts<'_> {
    /// Whether the close claims orders that a provider must be asked about.
    pub(super) fn claims(&self) -> bool {
        self.table.pay.is_some()
    }

    pub(super) fn kind_literal(&self) -> String {
        literal(self.words.kind.as_str())
    }

    /// Further columns of `ot_decided`.
    pub(super) fn claimable_columns(&self) -> String {
        if !self.claims() {
            return String::new();
        }
        let is_closing = match self.table.closing {
            Some(_) => format!(",\n           coalesce({}, false) AS is_closing", self.is_closing()),
            None => String::new(),
        };
        let alias = self.alias();
        format!("{is_closing},\n           {} AS order_id", ids::print(&self.id_columns(&alias)))
    }

    /// Whether the row of `ot_decided` is open, or claimed.
    pub(super) fn is_open_or_claimed(&self) -> &'static str {
        if self.table.closing.is_some() { "(d.is_open OR d.is_closing)" } else { "d.is_open" }
    }

    /// Whether the row says that its provider is asked.
    pub(super) fn is_closing(&self) -> String {
        self.table.closing.as_ref().map_or_else(|| "false".to_owned(), |closing| self.has_values(closing))
    }

    /// Whether the row has what a setting such as `close` writes.
    pub(super) fn has_values(&self, columns: &BTreeMap<String, String>) -> String {
        let alias = self.alias();
        let has = columns.iter().map(|(column, value)| match value.as_str() {
            NOW | PATH => format!("{alias}.{} IS NOT NULL", name(column)),
            NULL => format!("{alias}.{} IS NULL", name(column)),
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
                &format!("SELECT {keys} FROM ot_decided d\n    WHERE d.is_open AND NOT d.is_paid\n      AND {IS_DUE}"),
            )]);
        }
        let kind = self.kind_literal();
        let (is_due, claimed) = match self.table.closing {
            Some(_) => ("CASE WHEN d.is_closing THEN $4::boolean ELSE d.is_open END", None),
            // Without a status of its own: another worker has them, even if its provider has said meanwhile that no attempt
            // is open.
            None => (
                "d.is_open",
                Some(format!(
                    "SELECT c.order_id FROM close_attempts c\n    WHERE NOT $4::boolean AND c.kind || '' = {kind} AND c.order_id = ANY (ARRAY(SELECT o.order_id FROM ot_overdue o))"
                )),
            ),
        };
        let not_claimed = match claimed {
            Some(_) => "\n      AND d.order_id NOT IN (SELECT c.order_id FROM ot_claimed c)",
            None => "",
        };
        let mut steps = vec![
            step(
                "ot_overdue AS MATERIALIZED",
                &format!(
                    "SELECT {keys}, d.order_id FROM ot_decided d\n    WHERE {is_due} AND NOT d.is_paid\n      AND {IS_DUE}"
                ),
            ),
            // Whatever this worker's settings are: one that cannot ask leaves the order to one that can.
            step(
                "ot_to_ask AS MATERIALIZED",
                &format!(
                    "SELECT q.order_id, q.provider FROM orders_to_ask_about(ARRAY(SELECT o.order_id FROM ot_overdue o), {kind}) q"
                ),
            ),
        ];
        steps.extend(claimed.map(|claimed| step("ot_claimed AS MATERIALIZED", &claimed)));
        steps.push(step(
            "ot_due AS MATERIALIZED",
            &format!(
                "SELECT {keys} FROM ot_overdue d\n    WHERE d.order_id NOT IN (SELECT q.order_id FROM ot_to_ask q){not_claimed}"
            ),
        ));
        Ok(steps)
    }

    /// The steps that claim orders, and the outcomes of claimed orders.
    pub(super) fn claim_steps(&self) -> Result<(Vec<String>, &'static str), MappingError> {
        if !self.claims() {
            return Ok((Vec::new(), ""));
        }
        let Some(closing) = &self.table.closing else {
            let unclaimed = format!("{MAY_CLAIM} AND q.order_id NOT IN (SELECT c.order_id FROM ot_claimed c)");
            let claim = self.claim(&unclaimed, "DO NOTHING");
            let outcomes = "\n           WHEN d.order_id IN (SELECT c.order_id FROM ot_claim c) THEN 'claimed'\n           WHEN d.order_id IN (SELECT c.order_id FROM ot_claimed c)\n               OR d.order_id IN (SELECT q.order_id FROM ot_to_ask q) THEN 'closing'";
            return Ok((vec![claim], outcomes));
        };
        let steps = vec![
            step("ot_closing", &self.closing_update(closing)?),
            self.claim("q.order_id IN (SELECT c.order_id FROM ot_closing c)", NEW_CLAIM),
        ];
        let outcomes = "\n           WHEN d.order_id IN (SELECT c.order_id FROM ot_claim c) THEN 'claimed'\n           WHEN d.is_closing AND (NOT $4::boolean OR d.order_id IN (SELECT q.order_id FROM ot_to_ask q)) THEN 'closing'";
        Ok((steps, outcomes))
    }

    /// No worker has the order yet: those with its provider take it over (`sql/resume_closing.sql`). In one order, because a
    /// row of an earlier claim may be locked.
    fn claim(&self, which: &str, if_there_is_one: &str) -> String {
        step(
            "ot_claim",
            &format!(
                "INSERT INTO close_attempts (kind, order_id, claimed_by, who, why, queue, next_attempt_at)\n    SELECT {}, q.order_id, $2::text, {}, {}, q.provider, (SELECT m.now FROM ot_moment m)\n    FROM ot_to_ask q\n    WHERE {which}\n    ORDER BY q.order_id\n    ON CONFLICT (kind, order_id) {if_there_is_one}\n    RETURNING order_id",
                self.kind_literal(),
                setting("who"),
                setting("why"),
            ),
        )
    }

    /// So that a payment that locks the row sees the claim and can refuse. The order keeps its stock. The casts fail with these
    /// texts, as in the close.
    fn closing_update(&self, closing: &BTreeMap<String, String>) -> Result<String, MappingError> {
        let (alias, kind) = (self.alias(), &self.words.kind);
        let id = ids::print(&self.id_columns(&alias));
        Ok(format!(
            "UPDATE {} AS {alias}\n    SET {}\n    WHERE {}\n    RETURNING {id} AS order_id,\n        CASE WHEN ({}) IS TRUE THEN ('kinds.{kind}.table.closing makes the order paid; set there what paid does not test. Order ' || {id})::integer\n             WHEN ({}) IS TRUE THEN ('kinds.{kind}.table.closing {LEAVES_OPEN}; set there what open tests. Order ' || {id})::integer END AS ot_wrong",
            self.orders(),
            self.assignments("closing", closing)?,
            among_those(&self.id_columns(&alias), "ot_overdue", "k", &format!(" WHERE {MAY_CLAIM} AND {IS_TO_ASK}")),
            ended(&self.table.paid),
            ended(&self.table.open),
        ))
    }

    /// The step that makes part payments of closed orders late money. The function reads with a snapshot of its own, so that a
    /// part that was reported under the lock of the row is seen.
    pub(super) fn parts_step(&self, is_closed: &str) -> Option<String> {
        let kind = self.kind_literal();
        let released = format!(
            "SELECT release_parts_of(ARRAY(SELECT d.order_id FROM ot_decided d WHERE ({is_closed}) IS TRUE), {kind})"
        );
        self.claims().then(|| step("ot_parts AS MATERIALIZED", &released))
    }

    /// A condition that leaves out claimed orders: the closing protocol has them. Looked up in a hash table. With a status of
    /// their own they are not open.
    pub(super) fn is_unclaimed(&self) -> Option<String> {
        let (id, kind) = (ids::print(&self.id_columns(&self.alias())), self.kind_literal());
        let claimed = format!("SELECT c.order_id FROM close_attempts c WHERE c.kind = {kind}");
        let is_needed = self.claims() && self.table.closing.is_none();
        is_needed.then(|| format!("(({id}) IN ({claimed})) IS NOT TRUE"))
    }

    /// A function of the kind, under its name or that of the default tables.
    pub(super) fn function(&self, what: &str, signature: &str, language: &'static str, body: String) -> KindFunction {
        KindFunction { name: self.function_name(what), signature: signature.to_owned(), language, body }
    }

    /// The functions of the kind. `setup` creates those of the built-in mapping.
    pub(super) fn functions(&self, close: &str) -> Result<Vec<KindFunction>, MappingError> {
        let mut functions = vec![
            self.function("id", "(order_id text) RETURNS text", "sql", self.id_function()),
            self.function(
                "order",
                "(order_id text, waits boolean, OUT state text, OUT deadline timestamptz, OUT amount_minor bigint, OUT currency text)",
                "plpgsql",
                self.order_function(),
            ),
            self.function(
                "close",
                "(ids text[], path text, waits boolean, were_claimed boolean) RETURNS TABLE (order_id text, outcome text, deadline timestamptz)",
                "plpgsql",
                format!("\n#variable_conflict use_column\nBEGIN\nRETURN QUERY\n{close};\nEND"),
            ),
            self.move_function(),
        ];
        if let Some(pay) = &self.table.pay {
            self.require_payable()?;
            functions.push(self.function("pay", "(order_id text) RETURNS boolean", "plpgsql", self.pay_function(pay)?));
            if let (Some(settings), Some(attempts)) = (&self.table.attempts, &self.facts.attempts) {
                let body = self.attempts_function(settings, attempts)?;
                functions.push(self.function("attempts", "(order_ids text[]) RETURNS void", "sql", body));
            }
            functions.push(self.function(
                "consume",
                "(order_ids text[]) RETURNS void",
                "plpgsql",
                self.consume_function()?,
            ));
            if let Some(reopen) = &self.table.reopen {
                let signature =
                    "(order_id text) RETURNS TABLE (ot_stock text, ot_key text, ot_wanted text, ot_left text)";
                functions.push(self.function("reopen", signature, "plpgsql", self.reopen_function(reopen, pay)?));
            }
        }
        Ok(functions)
    }

    fn require_payable(&self) -> Result<(), MappingError> {
        if self.table.amount.is_some()
            && let Some(fault) = &self.facts.money_fault
        {
            return Err(fault.clone());
        }
        if self.id.iter().any(|(_, kind)| kind.base == "citext") {
            let why = "cannot be used with an id of type citext, of which payments would have several spellings; name a unique column of another type as id";
            return Err(MappingError::new("pay", why));
        }
        Ok(())
    }

    fn function_name(&self, what: &str) -> String {
        match self.table.is_built_in {
            true => format!("default_{what}"),
            false => KindFunction::name_of(&self.words.kind, what),
        }
    }

    /// The ids of `$1` as the step `ot_asked`.
    pub(super) fn asked(&self, texts: &str) -> String {
        let parts = self.with_parts(texts);
        step(
            "ot_asked AS MATERIALIZED",
            &format!("SELECT {}\n    FROM {parts}", as_numbered(&self.parsed(self.part_text()), "k")),
        )
    }

    /// A UUID in any spelling: a callback may have the shop's own.
    fn id_function(&self) -> String {
        if matches!(&self.id[..], [(_, column)] if column.base == "uuid") {
            return "\nSELECT uuid_of($1)::text\n".to_owned();
        }
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
        let ends = match (self.facts.status, self.table.close.columns()) {
            (Some(column), _) => {
                let status = format!("{alias}.{}::text", name(column));
                format!("WHEN {status} IN ('closed', 'cancelled') THEN {status}")
            }
            (None, Some(close)) => format!("WHEN {} THEN 'closed'", self.has_values(close)),
            (None, None) => String::new(),
        };
        let read = |skip: &str| {
            format!(
                "WITH {asked},\not_locked AS MATERIALIZED (\n    SELECT o.* FROM {orders} AS o WHERE {is_asked} FOR NO KEY UPDATE OF o{skip}\n),\not_found AS (\n    SELECT CASE WHEN ({paid}) THEN 'paid' WHEN {is_closing} THEN 'closing' WHEN ({open}) THEN 'open'\n                {ends} ELSE 'not_open' END AS ot_state,\n           {deadline} AS ot_deadline, {money}\n    FROM ot_locked AS {alias}\n)\nSELECT f.ot_state, f.ot_deadline, f.amount_minor, f.currency INTO state, deadline, amount_minor, currency FROM ot_found f;",
                paid = ended(&self.table.paid),
                is_closing = self.is_closing(),
                open = ended(&self.table.open),
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

    fn pay_function(&self, pay: &BTreeMap<String, String>) -> Result<String, MappingError> {
        Ok(format!(
            "\n#variable_conflict use_column\nDECLARE\n    ot_is_paid boolean;\nBEGIN\n{}\nRETURN coalesce(ot_is_paid, false);\nEND",
            self.pay_statements("pay", &self.assignments("pay", pay)?),
        ))
    }

    /// Changes the row of the order `$1`, which is paid then, and says in `ot_is_paid` whether it is; NULL if no row was changed.
    fn pay_statements(&self, setting: &str, set: &str) -> String {
        let alias = self.alias();
        format!(
            "WITH {},\not_moment AS MATERIALIZED (SELECT clock_timestamp() AS now)\nUPDATE {} AS {alias}\nSET {set}\nWHERE {}\nRETURNING coalesce(({}), false) INTO ot_is_paid;\nIF NOT ot_is_paid THEN\n    RAISE 'kinds.{}.table.{setting} leaves order % unpaid; set there what paid tests', $1;\nEND IF;",
            self.asked("SELECT $1::text AS text_id"),
            self.orders(),
            among(&self.id_columns(&alias), "ot_asked", "k"),
            ended(&self.table.paid),
            self.words.kind,
        )
    }

    /// Makes our attempts of these orders those of the shop's table, as they are now. What a provider has decided and what was
    /// reported stays.
    ///
    /// One that the shop no longer has as open goes, and can come back: a customer may try again under the same reference. Not
    /// from an order that is claimed, about which a provider is being asked. An attempt that is known for another order fails
    /// the statement: its money counts for that one alone, and this order must not be closed as if there were none.
    fn attempts_function(&self, settings: &AttemptsSettings, attempts: &Relation) -> Result<String, MappingError> {
        let (alias, kind) = (name(&attempts.name), self.kind_literal());
        let order = require_all(attempts, &alias, &settings.order.0, "attempts.order")?;
        // Without a time of the shop's, the moment of the first look is kept.
        let keeps_created_at = settings.created_at.as_ref().map_or("", |_| "created_at = excluded.created_at, ");
        let time = |time: &Option<String>, without: &str| time.as_deref().map_or_else(|| without.to_owned(), ended);
        let setting = key_of(&self.words.kind, "attempts");
        let known_for = |row: &str, order: &str, known: &str| {
            format!(
                "refuse('{setting} has ' || {row}.reference || ' of ' || {row}.provider || ' for order ' || {order} || ', and it is known for order ' || {known} || '; an attempt pays one order')"
            )
        };
        Ok(format!(
            "
WITH {asked},
ot_shop AS MATERIALIZED (
    SELECT {order_id} AS order_id, canonical_provider(({provider})::text) AS provider, ({reference})::text AS reference,
           {amount} AS amount_minor, ({currency})::text AS currency, ({created_at}) AS created_at, ({payable_until})::timestamptz AS payable_until
    FROM {table} AS {alias} WHERE {is_asked} AND ({open})
),
ot_known AS MATERIALIZED (
    SELECT s.*, CASE WHEN r.kind = {kind} THEN r.order_id ELSE r.kind || ' ' || r.order_id END AS reported,
           min(s.order_id) OVER (PARTITION BY s.provider, s.reference) AS first
    FROM ot_shop s LEFT JOIN received_payments r ON r.provider = s.provider AND r.reference = s.reference
),
ot_gone AS (
    DELETE FROM payment_attempts p
    WHERE p.order_id = ANY ($1) AND p.kind = {kind} AND p.state = 'open'
      AND ((p.provider, p.reference) IN (SELECT s.provider, s.reference FROM ot_shop s)) IS NOT TRUE
      AND NOT EXISTS (SELECT FROM close_attempts c WHERE c.kind || '' = {kind} AND c.order_id = p.order_id)
)
INSERT INTO payment_attempts AS p (provider, reference, order_id, kind, amount_minor, currency, created_at, payable_until)
-- In one order, so that two sessions cannot deadlock. Of several orders with one reference the last is kept, which is not the
-- first, and is refused; of several rows of one order, that which can be paid longest.
SELECT DISTINCT ON (s.provider, s.reference) s.provider, s.reference, s.order_id, {kind},
       CASE WHEN s.provider IS NULL OR s.reference IS NULL
            THEN refuse('{setting} has an attempt of order ' || s.order_id || ' without a provider or reference; leave it out of open if it cannot be paid yet')
            WHEN coalesce(s.reported, s.first) <> s.order_id
            THEN {of_another_order}
            ELSE s.amount_minor END,
       s.currency, s.created_at, s.payable_until
FROM ot_known s
WHERE s.reported IS DISTINCT FROM s.order_id
ORDER BY s.provider, s.reference, s.order_id DESC, s.payable_until DESC
-- As the row is now, which another session may have written meanwhile.
ON CONFLICT (provider, reference) DO UPDATE
SET amount_minor = CASE WHEN (p.kind, p.order_id) = (excluded.kind, excluded.order_id) THEN excluded.amount_minor
        ELSE {taken_meanwhile} END,
    currency = excluded.currency, {keeps_created_at}payable_until = excluded.payable_until, state = 'open'
WHERE p.state = 'open' OR (p.kind, p.order_id) <> (excluded.kind, excluded.order_id)
   -- A provider took no payment for it any more; the shop has begun it anew.
   OR (p.state = 'closed' AND excluded.payable_until > p.payable_until)
",
            asked = self.asked("SELECT DISTINCT unnest($1::text[]) AS text_id"),
            order_id = ids::print(&order),
            provider = ended(&settings.provider),
            reference = ended(&settings.reference),
            amount = self.in_minor_units(&settings.amount),
            currency = ended(&settings.currency),
            created_at = time(&settings.created_at, "clock_timestamp()"),
            payable_until = time(&settings.payable_until, "NULL"),
            table = attempts.qualified(),
            is_asked = among(&order, "ot_asked", "k"),
            open = ended(&settings.open),
            of_another_order = known_for("s", "s.order_id", "coalesce(s.reported, s.first)"),
            taken_meanwhile = known_for("p", "excluded.order_id", "p.order_id"),
        ))
    }

    /// Each stock in the order of its keys, locked before it is changed, as the close does.
    fn consume_function(&self) -> Result<String, MappingError> {
        let mut body = "\n#variable_conflict use_column\nBEGIN\n".to_owned();
        for (index, settings) in self.table.stock.iter().enumerate().filter(|(_, stock)| !stock.consume.is_empty()) {
            let steps = self.locked_stock(index, "SELECT DISTINCT unnest($1::text[]) AS text_id", "")?;
            let items = "ot_items i WHERE (SELECT count(*) FROM ot_stock) >= 0";
            let update = self.stock_update(index, "consume", &settings.consume, items)?;
            body += &format!("WITH {steps}\n{update};\n");
        }
        Ok(body + "END")
    }

    /// Pays a closed order that is locked, after it has taken again what its close gave back; or returns what lacks, and has
    /// changed nothing. All its stock is locked first, in the order of the list, as the close and a payment do.
    fn reopen_function(
        &self,
        reopen: &BTreeMap<String, String>,
        pay: &BTreeMap<String, String>,
    ) -> Result<String, MappingError> {
        let asked = "SELECT $1::text AS text_id";
        let (mut locks, mut takes) = (String::new(), String::new());
        for (index, settings) in self.table.stock.iter().enumerate() {
            let Some(left) = &settings.left else {
                locks += &format!(
                    "PERFORM FROM (WITH {}\nSELECT FROM ot_stock) AS s;\n",
                    self.locked_stock(index, asked, "")?
                );
                continue;
            };
            let keys = numbered("l.s", settings.stock_key.0.len());
            let of_item = numbered("i.s", keys.len());
            locks += &format!(
                "RETURN QUERY WITH {}\nSELECT {}, {}, sum(i.quantity)::text, l.ot_left::text\nFROM ot_items i JOIN ot_stock l ON ({}) = ({})\nGROUP BY {keys}, l.ot_left HAVING sum(i.quantity) > l.ot_left\nORDER BY {keys};\not_lacks := ot_lacks OR FOUND;\n",
                self.locked_stock(index, asked, &format!(", ({}) AS ot_left", ended(left)))?,
                literal(&settings.table),
                ids::print(&keys),
                of_item.join(", "),
                keys.join(", "),
                keys = keys.join(", "),
            );
            let update = self.stock_update(index, "take", &settings.take, "ot_items i")?;
            takes += &format!("WITH {}\n{update};\n", self.items_of(index, asked)?);
        }
        let further = reopen.iter().filter(|(column, _)| !pay.contains_key(*column));
        let further = further.map(|(column, value)| (column.clone(), value.clone())).collect();
        let set = [self.assignments("reopen", &further)?, self.assignments("pay", pay)?];
        let set: Vec<String> = set.into_iter().filter(|set| !set.is_empty()).collect();
        Ok(format!(
            "\n#variable_conflict use_column\nDECLARE\n    ot_is_paid boolean;\n    ot_lacks boolean := false;\nBEGIN\n{locks}IF ot_lacks THEN\n    RETURN;\nEND IF;\n{takes}{}\nIF ot_is_paid IS NULL THEN\n    RAISE 'a trigger keeps order % closed; let it return NEW', $1;\nEND IF;\nPERFORM {}(ARRAY[$1]);\nEND",
            self.pay_statements("reopen", &set.join(", ")),
            self.function_name("consume"),
        ))
    }

    /// The steps `ot_asked` and `ot_items`: items of these orders, with the columns `s1, s2` and `quantity`.
    fn items_of(&self, index: usize, texts: &str) -> Result<String, MappingError> {
        let (settings, (items, _)) = (&self.table.stock[index], &self.facts.stock[index]);
        let StockColumns { alias, order, item_key, .. } = self.stock_columns(index)?;
        let items = step(
            "ot_items AS MATERIALIZED",
            &format!(
                "SELECT {}, ({}) AS quantity FROM {} AS {alias} WHERE {}",
                as_numbered(&item_key, "s"),
                ended(&settings.quantity),
                items.qualified(),
                among(&order, "ot_asked", "k")
            ),
        );
        Ok([self.asked(texts), items].join(",\n"))
    }

    /// The same and `ot_stock`: the stock rows of these items, locked in the order of their keys, `s1, s2`. `further` columns
    /// are read behind the lock.
    fn locked_stock(&self, index: usize, texts: &str, further: &str) -> Result<String, MappingError> {
        let (_, stock) = &self.facts.stock[index];
        let StockColumns { stock_key, .. } = self.stock_columns(index)?;
        let columns: Vec<String> =
            self.table.stock[index].stock_key.0.iter().map(|column| format!("stock.{}", name(column))).collect();
        let locked = step(
            "ot_stock AS MATERIALIZED",
            &format!(
                "SELECT {}{further} FROM (\n        SELECT s.* FROM {} AS s WHERE {} ORDER BY {} FOR NO KEY UPDATE OF s\n    ) AS stock",
                as_numbered(&columns, "s"),
                stock.qualified(),
                among(&stock_key, "ot_items", "s"),
                stock_key.join(", ")
            ),
        );
        Ok([self.items_of(index, texts)?, locked].join(",\n"))
    }
}
