//! The statements stay cheap on tables with and without statistics: they use primary keys and the deadline index, and
//! never compare each row of a batch with every other.

use std::collections::BTreeSet;

use order_timeout::effects::closing::{HOLD_CLAIMED_SQL, POSTPONE_SQL, RESUME_SQL, SETTLE_PAID_SQL};
use order_timeout::mapping::default_tables;
use order_timeout::outbox::trace_contexts::TRACE_CONTEXTS;
use order_timeout::postgres::Database;
use order_timeout_testkit::TestEnv;
use serde_json::Value;
use sqlx::{AssertSqlSafe, PgConnection};

const CLOSE_TYPES: &str = "text[], text, boolean, boolean";
const ORDERS: usize = 20_000;
const ARTICLES: usize = 20_000;
const BATCH: usize = 800;
/// Rows that any node of a batch's plan may read, including those it discards. Ten for each order is plenty; comparing
/// every order with every other would be 640 000.
const MOST_ROWS: f64 = 10.0 * BATCH as f64;

fn close_sql() -> &'static str {
    &default_tables::rendered().close
}

fn overdue_sql() -> &'static str {
    &default_tables::rendered().overdue
}

/// So that statistics change only when a test says so. It makes plans anew, so it comes before a plan that is to be kept.
async fn stop_autovacuum(env: &TestEnv) {
    let stop = "DO $$ DECLARE name text; BEGIN
                    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' LOOP
                        EXECUTE format('ALTER TABLE %I SET (autovacuum_enabled = false)', name);
                    END LOOP; END $$";
    sqlx::raw_sql(stop).execute(&env.pool).await.unwrap();
}

/// Overdue orders of one article each, among many paid ones.
async fn fill(env: &TestEnv) {
    let fill = format!(
        "INSERT INTO stock SELECT 'a' || n, 0, 1000 FROM generate_series(1, {ARTICLES}) n;
         INSERT INTO orders (id, expires_at, status, paid_at)
         SELECT gen_random_uuid(), now() - interval '1 minute', s.status::order_status, s.paid_at
         FROM generate_series(1, {ORDERS}) n,
              LATERAL (SELECT CASE WHEN n % 4 = 0 THEN 'unpaid' ELSE 'paid' END, CASE WHEN n % 4 <> 0 THEN now() END)
                  AS s (status, paid_at);
         INSERT INTO order_items
         SELECT id, 'a' || (1 + row_number() OVER () * 7 % {ARTICLES}), 1 FROM orders;
         INSERT INTO reserved_resources VALUES ('coupon', 'SUMMER', 0, 1000000);
         INSERT INTO order_resources SELECT id, 'coupon', 'SUMMER', 1 FROM orders"
    );
    sqlx::raw_sql(AssertSqlSafe(fill)).execute(&env.pool).await.unwrap();
}

/// One node of a plan, and what it did.
#[derive(Debug)]
struct Node {
    relation: String,
    /// The index it used, or the kind of scan.
    by: String,
    rows: f64,
}

fn nodes(plan: &Value, into: &mut Vec<Node>) {
    let number = |key: &str| plan[key].as_f64().unwrap_or(0.0);
    let removed = ["Rows Removed by Filter", "Rows Removed by Join Filter", "Rows Removed by Index Recheck"];
    let rows = (number("Actual Rows") + removed.map(number).iter().sum::<f64>()) * number("Actual Loops").max(1.0);
    let text = |key: &str| plan[key].as_str().unwrap_or_default().to_owned();
    let by = if plan["Index Name"].is_string() { text("Index Name") } else { text("Node Type") };
    into.push(Node { relation: text("Relation Name"), by, rows });
    for child in plan["Plans"].as_array().into_iter().flatten() {
        nodes(child, into);
    }
}

/// Runs a statement with these arguments as a prepared statement, like the worker, and rolls it back.
async fn plan_of(connection: &mut PgConnection, mode: &str, sql: &str, types: &str, arguments: &str) -> Vec<Node> {
    prepare(connection, mode, sql, types).await;
    let plan = explain(connection, arguments).await;
    sqlx::raw_sql("DEALLOCATE statement; RESET plan_cache_mode").execute(connection).await.unwrap();
    plan
}

async fn prepare(connection: &mut PgConnection, mode: &str, sql: &str, types: &str) {
    let prepare = format!("SET plan_cache_mode = {mode}; PREPARE statement ({types}) AS {sql}");
    sqlx::raw_sql(AssertSqlSafe(prepare)).execute(connection).await.unwrap();
}

/// The plan of the prepared statement with these arguments; its effects are rolled back.
async fn explain(connection: &mut PgConnection, arguments: &str) -> Vec<Node> {
    let mut transaction = sqlx::Connection::begin(connection).await.unwrap();
    let explain = format!("EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE statement ({arguments})");
    let explained: Value = sqlx::query_scalar(AssertSqlSafe(explain)).fetch_one(&mut *transaction).await.unwrap();
    transaction.rollback().await.unwrap();
    let mut found = Vec::new();
    nodes(&explained[0]["Plan"], &mut found);
    found
}

/// How a relation is read in a plan; nodes that write it do not say how.
fn access_paths(relation: &str, plan: &[Node]) -> BTreeSet<String> {
    let read = plan.iter().filter(|node| node.relation == relation && node.by != "ModifyTable");
    read.map(|node| node.by.clone()).collect()
}

fn assert_by_primary_key(plan: &[Node], what: &str) {
    for (relation, key) in [
        ("orders", "orders_pkey"),
        ("order_items", "order_items_pkey"),
        ("stock", "stock_pkey"),
        ("order_resources", "order_resources_pkey"),
        ("reserved_resources", "reserved_resources_pkey"),
    ] {
        let by = access_paths(relation, plan);
        assert!(
            by.iter().all(|path| path == key || path == "Bitmap Heap Scan"),
            "{relation} by {by:?}; {what}: {plan:#?}"
        );
    }
    let most = plan.iter().map(|node| node.rows).fold(0.0, f64::max);
    assert!(most >= BATCH as f64 && most <= MOST_ROWS, "{most} rows in one node; {what}: {plan:#?}");
}

/// As many unpaid orders as a batch holds, as an SQL array.
async fn batch_of_unpaid(env: &TestEnv) -> String {
    let ids: Vec<String> = sqlx::query_scalar("SELECT id::text FROM orders WHERE status = 'unpaid' LIMIT $1")
        .bind(BATCH as i64)
        .fetch_all(&env.pool)
        .await
        .unwrap();
    format!("ARRAY['{}']", ids.join("','"))
}

#[test]
fn batch_uses_primary_keys_analysed_or_not() {
    TestEnv::builder().without_broker().run(async |env| {
        stop_autovacuum(&env).await;
        fill(&env).await;
        let mut connection = env.pool.acquire().await.unwrap();
        // As in a worker's sessions.
        sqlx::raw_sql("SET enable_seqscan = off").execute(&mut *connection).await.unwrap();
        let ids = batch_of_unpaid(&env).await;
        for analysed in [false, true] {
            if analysed {
                sqlx::raw_sql("ANALYZE").execute(&env.pool).await.unwrap();
            }
            for mode in ["force_custom_plan", "force_generic_plan"] {
                for wait in [true, false] {
                    let arguments = format!("{ids}, 'alarm', {wait}, false");
                    let plan = plan_of(&mut connection, mode, close_sql(), CLOSE_TYPES, &arguments).await;
                    assert_by_primary_key(&plan, &format!("analysed {analysed}, {mode}, wait {wait}"));
                }
            }
        }
    });
}

/// The tables were empty when they were last analysed, and a flash sale has filled them since.
#[test]
fn statistics_of_empty_tables_leave_primary_keys() {
    TestEnv::builder().without_broker().run(async |env| {
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        stop_autovacuum(&env).await;
        sqlx::raw_sql("ANALYZE").execute(&env.pool).await.unwrap();
        fill(&env).await;
        let arguments = format!("{}, 'alarm', true, false", batch_of_unpaid(&env).await);
        let plan = async |connection: &mut PgConnection| {
            Ok(plan_of(connection, "force_generic_plan", close_sql(), CLOSE_TYPES, &arguments).await)
        };
        assert_by_primary_key(&database.run(plan).await.unwrap(), "statistics of empty tables");
    });
}

#[test]
fn sweep_reads_one_page_of_deadline_index() {
    TestEnv::builder().without_broker().run(async |env| {
        stop_autovacuum(&env).await;
        fill(&env).await;
        let mut connection = env.pool.acquire().await.unwrap();
        for analysed in [false, true] {
            if analysed {
                sqlx::raw_sql("ANALYZE").execute(&env.pool).await.unwrap();
            }
            for mode in ["force_custom_plan", "force_generic_plan"] {
                let types = "float8, timestamptz, text, bigint";
                let plan = plan_of(&mut connection, mode, overdue_sql(), types, "0.5, '-infinity', '', 100").await;
                let index = plan.iter().find(|node| node.by == "orders_unpaid_by_deadline");
                let read = index.unwrap_or_else(|| panic!("not by the deadline index: {plan:#?}")).rows;
                // Without statistics the planner expects few overdue orders, and sorts them all for one page.
                let most = if analysed { 100.0 } else { (ORDERS / 4) as f64 };
                assert!(read <= most, "{read} index entries, analysed {analysed}, {mode}: {plan:#?}");
            }
        }
    });
}

#[test]
fn trace_contexts_are_found_by_index() {
    TestEnv::builder().without_broker().run(async |env| {
            stop_autovacuum(&env).await;
            let fill = "INSERT INTO alarm_outbox (order_id, deadline, traceparent)
                        SELECT n::text, now(), CASE WHEN n % 10 = 0 THEN 'context' END FROM generate_series(1, 20000) n";
            sqlx::raw_sql(fill).execute(&env.pool).await.unwrap();
            let database = Database::connect(&env.settings.database, 1).await.unwrap();
            let ids: Vec<String> = (1..=500).map(|n| n.to_string()).collect();
            let arguments = format!("ARRAY['{}']", ids.join("','"));
            for analysed in [false, true] {
                if analysed {
                    sqlx::raw_sql("ANALYZE").execute(&env.pool).await.unwrap();
                }
                for mode in ["force_custom_plan", "force_generic_plan"] {
                    let plan = async |connection: &mut PgConnection| {
                        Ok(plan_of(connection, mode, TRACE_CONTEXTS, "text[]", &arguments).await)
                    };
                    let plan = database.run(plan).await.unwrap();
                    let by = access_paths("alarm_outbox", &plan);
                    assert!(
                        by.is_subset(&BTreeSet::from(["alarm_outbox_traced".into(), "Bitmap Heap Scan".into()])),
                        "{plan:#?}"
                    );
                    let most = plan.iter().map(|node| node.rows).fold(0.0, f64::max);
                    assert!((50.0..=500.0).contains(&most), "{most} rows, analysed {analysed}, {mode}: {plan:#?}");
                }
            }
        });
}

/// An attempt for each order, paid ones as well.
async fn begin_attempts(env: &TestEnv) {
    let begin = "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
                 SELECT 'stripe', 'pi_' || id, id::text, 1999, 'EUR' FROM orders";
    sqlx::raw_sql(begin).execute(&env.pool).await.unwrap();
}

/// Turns the unpaid orders into claimed ones with an attempt each.
async fn claim_all(env: &TestEnv) {
    begin_attempts(env).await;
    let claim = "INSERT INTO close_attempts (order_id, claimed_by, queue, lease)
                 SELECT id::text, 'alarm', 'stripe', 1 FROM orders WHERE status = 'unpaid';
                 UPDATE orders SET status = 'closing' WHERE status = 'unpaid'";
    sqlx::raw_sql(claim).execute(&env.pool).await.unwrap();
}

/// The statements of the closing protocol, with their types and with arguments for a batch of claimed orders.
async fn closing_statements(env: &TestEnv) -> [(&'static str, &'static str, String); 6] {
    let ids: Vec<String> =
        sqlx::query_scalar("SELECT id::text FROM orders WHERE status = 'closing' ORDER BY id LIMIT $1")
            .bind(BATCH as i64)
            .fetch_all(&env.pool)
            .await
            .unwrap();
    let each = |value: &str| format!("array_fill({value}, ARRAY[{BATCH}])");
    let (leases, texts, providers) = (each("1::bigint"), each("''::text"), each("'stripe'::text"));
    let references = format!("ARRAY['pi_{}']", ids.join("','pi_"));
    let ids = format!("ARRAY['{}']", ids.join("','"));
    let proved = format!("{ids}, {providers}, {references}");
    let (steps, none, now) = (each("'no_answer'::text"), each("NULL::text"), each("now()"));
    let no_amounts = each("NULL::bigint");
    let (rounds, waited) = (each("1"), each("false"));
    [
        (
            RESUME_SQL,
            "text, float8, text[], bigint[], text[], bigint[]",
            format!("'order', 60, '{{stripe}}', '{{{BATCH}}}', '{{none}}', '{{0}}'"),
        ),
        (
            // The first of the two takes them over; this renews what it has.
            RESUME_SQL,
            "text, float8, text[], bigint[], text[], bigint[]",
            format!("'order', 60, '{{stripe}}', '{{{BATCH}}}', {ids}, {leases}"),
        ),
        (
            HOLD_CLAIMED_SQL,
            "text, text[], bigint[], text[], text[], text[]",
            format!("'order', {ids}, {leases}, {proved}"),
        ),
        (close_sql(), CLOSE_TYPES, format!("{ids}, 'alarm', true, true")),
        (
            SETTLE_PAID_SQL,
            "text, text[], bigint[], jsonb, text[], text[], text[], text[], bigint[], text[]",
            format!("'order', {ids}, {leases}, '{{}}', {proved}, {}, {no_amounts}, {none}", each("'paid'::text")),
        ),
        (
            POSTPONE_SQL,
            "text, text[], bigint[], text[], text[], timestamptz[], text[], integer[], boolean[], text[], text[], text[], text[]",
            format!(
                "'order', {ids}, {leases}, {steps}, {none}, {now}, {providers}, {rounds}, {waited}, {texts}, {proved}"
            ),
        ),
    ]
}

fn assert_by_index(plan: &[Node], what: &str) {
    for (relation, indexes) in [
        ("orders", &["orders_pkey"][..]),
        ("order_items", &["order_items_pkey"]),
        ("stock", &["stock_pkey"]),
        ("payment_attempts", &["payment_attempts_pkey", "payment_attempts_by_order"]),
        ("close_attempts", &["close_attempts_pkey", "close_attempts_due"]),
    ] {
        let by = access_paths(relation, plan);
        let is_index = |path: &String| indexes.contains(&path.as_str()) || path == "Bitmap Heap Scan";
        assert!(by.iter().all(is_index), "{relation} by {by:?}; {what}: {plan:#?}");
    }
    let most = plan.iter().map(|node| node.rows).fold(0.0, f64::max);
    assert!(most >= BATCH as f64 && most <= MOST_ROWS, "{most} rows in one node; {what}: {plan:#?}");
}

#[test]
fn claim_uses_primary_keys() {
    TestEnv::builder().without_broker().run(async |env| {
        stop_autovacuum(&env).await;
        fill(&env).await;
        begin_attempts(&env).await;
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        let arguments = format!("{}, 'alarm', true, false", batch_of_unpaid(&env).await);
        for analysed in [false, true] {
            if analysed {
                sqlx::raw_sql("ANALYZE").execute(&env.pool).await.unwrap();
            }
            for mode in ["force_custom_plan", "force_generic_plan"] {
                let plan = async |connection: &mut PgConnection| {
                    Ok(plan_of(connection, mode, close_sql(), CLOSE_TYPES, &arguments).await)
                };
                assert_by_index(&database.run(plan).await.unwrap(), &format!("analysed {analysed}, {mode}"));
            }
        }
    });
}

#[test]
fn closing_protocol_uses_indexes() {
    TestEnv::builder().without_broker().run(async |env| {
        stop_autovacuum(&env).await;
        fill(&env).await;
        claim_all(&env).await;
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        let statements = closing_statements(&env).await;
        for analysed in [false, true] {
            if analysed {
                sqlx::raw_sql("ANALYZE").execute(&env.pool).await.unwrap();
            }
            for mode in ["force_custom_plan", "force_generic_plan"] {
                for (sql, types, arguments) in &statements {
                    let plan = async |connection: &mut PgConnection| {
                        Ok(plan_of(connection, mode, sql, types, arguments).await)
                    };
                    let plan = database.run(plan).await.unwrap();
                    assert_by_index(
                        &plan,
                        &format!("analysed {analysed}, {mode}, {}", sql.lines().next().unwrap_or_default()),
                    );
                }
            }
        }
    });
}

#[test]
fn statistics_of_empty_tables_leave_closing_indexes() {
    TestEnv::builder().without_broker().run(async |env| {
        stop_autovacuum(&env).await;
        sqlx::raw_sql("ANALYZE").execute(&env.pool).await.unwrap();
        fill(&env).await;
        claim_all(&env).await;
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        for (sql, types, arguments) in &closing_statements(&env).await {
            let plan = async |connection: &mut PgConnection| {
                Ok(plan_of(connection, "force_generic_plan", sql, types, arguments).await)
            };
            assert_by_index(&database.run(plan).await.unwrap(), sql.lines().next().unwrap_or_default());
        }
    });
}
