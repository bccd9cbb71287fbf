//! A fault of the database is named within seconds while orders are closed, with its cause and its cure, and is no longer
//! named within seconds of the cure.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use order_timeout::Settings;
use order_timeout::http::READYZ;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::away::{meanwhile, on_private_broker_with, on_private_database};
use order_timeout_testkit::degraded::{NAMED_WITHIN, wait_until_cured, wait_until_named, why_degraded};
use order_timeout_testkit::figures::{Figures, get, serve_http};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::process::{order_timeout, run};
use order_timeout_testkit::{RunningWorker, TestEnv, wait_for, wait_promised};
use secrecy::ExposeSecret;
use sqlx::{AssertSqlSafe, PgPool};

/// How soon a cause must be named, and no longer named after its cure.
const SECOND: Duration = Duration::from_secs(1);

/// One row of a table of faults: the SQL that breaks, a part of the sentence that names it, and the SQL that cures.
struct Fault {
    cause: &'static str,
    breaks: String,
    says: &'static str,
    cures: String,
}

fn fault(cause: &'static str, breaks: &str, says: &'static str, cures: &str) -> Fault {
    Fault { cause, breaks: breaks.to_owned(), says, cures: cures.to_owned() }
}

async fn execute(pool: &PgPool, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
}

async fn wait_until_ready(worker: &RunningWorker) {
    wait_for("a worker that is ready", async || get(worker, READYZ).await == (200, "ready\n".into())).await;
}

/// Breaks, waits until the cause is named, cures, and waits until it is gone; one fault after the other.
async fn assert_named_until_cured(worker: &RunningWorker, pool: &PgPool, faults: Vec<Fault>) {
    wait_until_ready(worker).await;
    for Fault { cause, breaks, says, cures } in faults {
        execute(pool, &breaks).await;
        wait_until_named(worker, cause, says).await;
        execute(pool, &cures).await;
        wait_until_cured(worker, cause).await;
    }
    wait_until_ready(worker).await;
}

#[test]
fn missing_objects_are_named() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let worker = env.worker().await;
        let faults = vec![
            fault(
                "schema",
                "DROP INDEX orders_unpaid_by_deadline",
                "CREATE INDEX CONCURRENTLY orders_unpaid_by_deadline",
                "CREATE INDEX renamed ON orders (expires_at, id) WHERE status = 'unpaid'",
            ),
            fault(
                "schema",
                "DROP INDEX an_order_is_closed_once",
                "CREATE UNIQUE INDEX CONCURRENTLY an_order_is_closed_once",
                "CREATE UNIQUE INDEX an_order_is_closed_once ON order_events (order_id) WHERE event = 'closed'",
            ),
            fault(
                "schema",
                "ALTER TABLE orders DROP CONSTRAINT no_order_is_closed_early",
                "ADD CONSTRAINT no_order_is_closed_early",
                "ALTER TABLE orders ADD CONSTRAINT no_order_is_closed_early CHECK (closed_at >= expires_at OR closed_by = 'released') NOT VALID",
            ),
            fault(
                "schema",
                "ALTER TABLE parked_alarms RENAME TO elsewhere",
                "the table parked_alarms (created by migrations/20261129100100_outboxes_and_parked_alarms.sql)",
                "ALTER TABLE elsewhere RENAME TO parked_alarms",
            ),
            fault(
                "schema",
                "ALTER TABLE parked_alarms RENAME COLUMN detail TO details",
                "the column parked_alarms.detail",
                "ALTER TABLE parked_alarms RENAME COLUMN details TO detail",
            ),
            fault(
                "schema",
                "ALTER TABLE alarm_outbox RENAME TO elsewhere",
                "the table alarm_outbox",
                "ALTER TABLE elsewhere RENAME TO alarm_outbox",
            ),
        ];
        assert_named_until_cured(&worker, &env.pool, faults).await;
        worker.stop().await;
    });
}

/// Runs a test with a worker in a role that has only a worker's rights.
async fn with_worker_role<F: Future<Output = ()>>(
    env: Arc<TestEnv>,
    adjust: impl FnOnce(&mut Settings),
    test: impl FnOnce(Arc<TestEnv>, RunningWorker, String) -> F,
) {
    let role = format!("worker_{}", env.settings.namespace);
    execute(
        &env.pool,
        &format!(
            "CREATE ROLE {role}; GRANT USAGE ON SCHEMA public TO {role};
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}"
        ),
    )
    .await;
    let mut settings = env.settings.clone();
    adjust(&mut settings);
    settings.database.url = format!("{}?options=-crole%3D{role}", settings.database.url.expose_secret()).into();
    let worker = RunningWorker::start(settings).await;
    let outcome = AssertUnwindSafe(test(env.clone(), worker, role.clone())).catch_unwind().await;
    // Roles belong to the whole server: this one must not outlive its database.
    execute(&env.pool, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// Like [`with_worker_role`], on an environment of its own.
fn with_env_and_worker_role<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(Arc<TestEnv>, RunningWorker, String) -> F + Send + 'static,
) {
    TestEnv::builder().settings(serve_http).run(async move |env| with_worker_role(env, |_| {}, test).await);
}

#[test]
fn missing_rights_are_named() {
    with_env_and_worker_role(async |env, worker, role| {
        let faults = vec![
            fault(
                "database_rights",
                &format!("REVOKE UPDATE ON alarm_outbox FROM {role}"),
                "lacks UPDATE ON alarm_outbox: GRANT UPDATE ON alarm_outbox TO",
                &format!("GRANT UPDATE ON alarm_outbox TO {role}"),
            ),
            fault(
                "database_rights",
                &format!("REVOKE INSERT ON order_events FROM {role}"),
                "lacks INSERT ON order_events",
                &format!("GRANT INSERT ON order_events TO {role}"),
            ),
            fault(
                "database_rights",
                "ALTER TABLE orders ENABLE ROW LEVEL SECURITY",
                "row security may hide rows of orders",
                &format!("CREATE POLICY all_rows ON orders TO {role} USING (true)"),
            ),
            fault(
                "outbox_unreadable",
                &format!("REVOKE ALL ON alarm_outbox FROM {role}"),
                "alarm_outbox cannot be read",
                &format!("GRANT SELECT, UPDATE, DELETE ON alarm_outbox TO {role}"),
            ),
        ];
        assert_named_until_cured(&worker, &env.pool, faults).await;
        worker.stop().await;
    });
}

#[test]
fn unreadable_outbox_has_no_age() {
    with_env_and_worker_role(async |env, worker, role| {
        let age =
            async |outbox: &str| Figures::of(&worker).await.find(&format!("outbox_age_seconds{{outbox=\"{outbox}\"}}"));
        wait_for("both ages", async || age("alarm").await.is_some() && age("event").await.is_some()).await;
        execute(&env.pool, &format!("REVOKE SELECT ON alarm_outbox FROM {role}")).await;
        wait_for("no age", async || age("alarm").await.is_none()).await;
        assert!(age("event").await.is_some(), "the other one can be read");
        execute(&env.pool, &format!("GRANT SELECT ON alarm_outbox TO {role}")).await;
        wait_for("its age", async || age("alarm").await.is_some()).await;
        worker.stop().await;
    });
}

#[test]
fn read_only_database_is_named() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let worker = env.worker().await;
        wait_until_ready(&worker).await;
        wait_for("the relay", async || Figures::of(&worker).await.get("relaying") == 1.0).await;
        let database: String = sqlx::query_scalar("SELECT current_database()").fetch_one(&env.pool).await.unwrap();
        // Committed first, otherwise a new connection might still get the old value.
        let read_only = |to: &str| {
            format!(
                "BEGIN READ WRITE; ALTER DATABASE {database} SET default_transaction_read_only = {to}; COMMIT;
                 SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                 WHERE datname = '{database}' AND pid <> pg_backend_pid()"
            )
        };
        execute(&env.pool, &read_only("on")).await;
        let page = async || get(&worker, READYZ).await.1;
        wait_promised(NAMED_WITHIN, "read_only", async || {
            page().await.contains("degraded: read_only: the database accepts no writes")
        })
        .await;
        wait_until_named(&worker, "read_only", "default_transaction_read_only").await;
        wait_for("no relay", async || Figures::of(&worker).await.get("relaying") == 0.0).await;
        // The pool may return a connection that was terminated.
        let cured = async || sqlx::raw_sql(AssertSqlSafe(read_only("off"))).execute(&env.pool).await.is_ok();
        wait_for("the cure", cured).await;
        wait_promised(NAMED_WITHIN, "no read_only", async || !page().await.contains("read_only")).await;
        wait_until_ready(&worker).await;
        worker.stop().await;
    });
}

#[test]
fn standby_is_named_and_never_relays() {
    if !Private::can_have_standby("degraded_database::standby_is_named_and_never_relays") {
        return;
    }
    on_private_database(&[], async |env, primary| {
        let relay = env.worker().await;
        let standby = Arc::new(meanwhile(|| primary.standby()));
        let mut settings = env.settings.clone();
        serve_http(&mut settings);
        let name = settings.database.url.expose_secret().rsplit('/').next().unwrap().to_owned();
        settings.database.url = standby.url.clone().into();
        settings.database.url = settings.database.url_of(&name);
        let worker = RunningWorker::start(settings).await;
        wait_for("a session", async || get(&worker, READYZ).await.0 == 200).await;
        wait_until_named(&worker, "read_only", "the database is a standby").await;
        let began = Instant::now();
        while began.elapsed() < 3 * SECOND {
            assert_eq!(Figures::of(&worker).await.get("relaying"), 0.0);
            tokio::time::sleep(SECOND / 5).await;
        }
        relay.stop().await;
        meanwhile(|| standby.promote());
        wait_promised(NAMED_WITHIN, "no read_only", async || !get(&worker, READYZ).await.1.contains("read_only")).await;
        wait_for("the relay", async || Figures::of(&worker).await.get("relaying") == 1.0).await;
        worker.stop().await;
    });
}

#[test]
fn disagreeing_workers_are_named() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let worker = env.worker().await;
        let equal = env.worker().await;
        wait_until_ready(&worker).await;
        let mut settings = env.settings.clone();
        settings.delay.lead += Duration::from_millis(100);
        let other = RunningWorker::start(settings).await;
        for one in [&worker, &equal, &other] {
            wait_until_named(one, "workers_disagree", "delay.lead").await;
        }
        let pid = format!("(pid {})", std::process::id());
        assert!(why_degraded(&worker, "workers_disagree").await.1.unwrap().contains(&pid));
        other.stop().await;
        wait_until_cured(&worker, "workers_disagree").await;

        // A killed worker leaves its row behind.
        let killed = "INSERT INTO order_timeout_workers (id, host, pid, version, namespace, kinds, delays)
                      VALUES (gen_random_uuid(), 'shop-9', 4711, '0', 'another', '{order}', '{}')";
        execute(&env.pool, killed).await;
        wait_until_named(&worker, "workers_disagree", "host shop-9 (pid 4711) has namespace \"another\"").await;
        wait_until_cured(&worker, "workers_disagree").await;
        worker.stop().await;
        equal.stop().await;
        let left = "SELECT count(*) FROM order_timeout_workers WHERE host <> 'shop-9'";
        assert_eq!(env.count(left).await, 0, "rows of workers that have stopped");
    });
}

#[test]
fn unreadable_orders_have_no_age() {
    with_env_and_worker_role(async |env, worker, role| {
        let age = async || Figures::of(&worker).await.find("oldest_overdue_seconds");
        wait_for("the age", async || age().await.is_some()).await;
        execute(&env.pool, &format!("REVOKE SELECT ON orders FROM {role}")).await;
        wait_for("no age", async || age().await.is_none()).await;
        execute(&env.pool, &format!("GRANT SELECT ON orders TO {role}")).await;
        wait_for("its age", async || age().await.is_some()).await;
        worker.stop().await;
    });
}

/// A shop's statements as functions in its database, so that a test can replace them while a worker runs.
const FUNCTIONS: [(&str, &str); 2] = [
    ("close_sql", "SELECT order_id, outcome, deadline FROM public.close_purchases($1)"),
    ("overdue_sql", "SELECT order_id, deadline FROM public.overdue_purchases($1, $2, $3, $4)"),
];

fn close_by(body: &str) -> String {
    format!(
        "CREATE OR REPLACE FUNCTION public.close_purchases(ids text[])
         RETURNS TABLE (order_id text, outcome text, deadline timestamptz) LANGUAGE sql AS $$ {body} $$;"
    )
}

fn overdue_by(condition: &str, order: &str) -> String {
    format!(
        "CREATE OR REPLACE FUNCTION public.overdue_purchases(grace float8, after timestamptz, after_id text, most bigint)
         RETURNS TABLE (order_id text, deadline timestamptz) LANGUAGE sql AS $$
             SELECT p.id::text, p.pay_until FROM public.purchases p
             WHERE {condition} AND p.pay_until <= statement_timestamp() - make_interval(secs => grace)
               AND (p.pay_until, p.id) > (after, coalesce(nullif(after_id, '')::bigint, -1))
             ORDER BY {order} LIMIT most $$;"
    )
}

const CLOSES: &str = "
    WITH closed AS (
        UPDATE public.purchases p SET state = 'expired'
        WHERE p.id = ANY (ids::bigint[]) AND p.state = 'open' AND p.pay_until <= clock_timestamp()
        RETURNING p.id, p.pay_until)
    SELECT c.id::text, 'closed', c.pay_until FROM closed c
    UNION ALL
    SELECT p.id::text, CASE p.state WHEN 'open' THEN 'not_due' WHEN 'paid' THEN 'paid' WHEN 'closing' THEN 'closing'
                                    WHEN 'held' THEN 'busy' ELSE 'already_closed' END, p.pay_until
    FROM public.purchases p
    WHERE p.id = ANY (ids::bigint[]) AND p.id NOT IN (SELECT c.id FROM closed c)";

fn good() -> String {
    close_by(CLOSES) + &overdue_by("p.state IN ('open', 'held')", "p.pay_until, p.id")
}

/// Inserts a purchase that is overdue by a minute.
fn purchase(id: u32, state: &str) -> String {
    format!(
        "INSERT INTO public.purchases VALUES ({id}, '{state}', now() - interval '1 minute' + {id} * interval '1 ms');"
    )
}

/// Runs a test on an environment with the shop's own table.
fn with_purchases<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(Arc<TestEnv>, RunningWorker) -> F + Send + 'static,
) {
    let files = tempfile::tempdir().unwrap();
    let path = |name: &str| files.path().join(name).to_str().unwrap().to_owned();
    for (name, sql) in FUNCTIONS {
        std::fs::write(path(name), sql).unwrap();
    }
    let (close_sql, overdue_sql) = (path("close_sql"), path("overdue_sql"));
    let adjust = |settings: &mut Settings| {
        serve_http(settings);
        settings.sweep.grace = Settings::defaults().sweep.grace;
        (settings.orders.close_sql, settings.orders.overdue_sql) = (close_sql, overdue_sql);
    };
    TestEnv::builder().settings(adjust).run(async move |env| {
        let table = "CREATE TABLE public.purchases (id bigint PRIMARY KEY, state text NOT NULL, pay_until timestamptz NOT NULL);";
        execute(&env.pool, &format!("{table} {}", good())).await;
        let worker = env.worker().await;
        test(env, worker).await;
        drop(files);
    });
}

#[test]
fn contradicting_statements_are_named() {
    with_purchases(async |env, worker| {
        let answers = |row: &str| close_by(&format!("SELECT i, {row} FROM unnest(ids) AS i"));
        let paid_ones_too = overdue_by("p.state IN ('open', 'paid', 'closing')", "p.pay_until, p.id");
        let faults = vec![
            (answers("'closed', now()") + &purchase(1, "open"), "finds it overdue again: the order is still open"),
            (paid_ones_too.clone() + &purchase(2, "paid"), "but orders.close_sql"),
            (paid_ones_too + &purchase(3, "closing"), "returns closing"),
            (answers("'not_due', now()") + &purchase(4, "open"), "finds order 4 overdue, but orders.close_sql"),
            (answers("'malformed', NULL::timestamptz") + &purchase(5, "open"), "returns malformed for order 5"),
            (close_by("SELECT '', '', now() WHERE false") + &purchase(6, "open"), "returns no row for it"),
            (
                overdue_by("p.state IN ('open', 'held')", "p.pay_until DESC")
                    + &purchase(7, "held")
                    + &purchase(8, "held"),
                "returns order 8 before order 7",
            ),
            // Without the two purchases of the previous fault.
            (
                format!(
                    "DELETE FROM public.purchases WHERE state = 'held'; {}{}",
                    answers("'expired', now()"),
                    purchase(9, "open")
                ),
                "answers Some(\"expired\") as the outcome of order 9",
            ),
            (answers("NULL::text, now()") + &purchase(10, "open"), "answers None as the outcome of order 10"),
            (
                close_by(&format!("{CLOSES} UNION ALL SELECT '12', 'closed', now()")) + &purchase(11, "open"),
                "returns a row for \"12\"",
            ),
            (
                close_by(&format!("{CLOSES} UNION ALL SELECT i, 'closed', now() FROM unnest(ids) AS i"))
                    + &purchase(13, "open"),
                "returns two rows for order 13",
            ),
        ];
        // Each cure adds a purchase that the statements answer correctly.
        let faults = (100..).zip(faults).map(|(id, (breaks, says))| {
            let cures = good() + &purchase(id, "open");
            Fault { cause: "orders_contract", breaks, says, cures }
        });
        assert_named_until_cured(&worker, &env.pool, faults.collect()).await;
        let open = "SELECT count(*) FROM public.purchases WHERE state = 'open'";
        wait_for("every close", async || env.count(open).await == 0).await;
        worker.stop().await;
    });
}

#[test]
fn close_before_deadline_is_named() {
    with_purchases(async |env, worker| {
        wait_until_ready(&worker).await;
        let publisher = env.publisher().await;
        // Extended by an hour after its alarm was scheduled.
        let extended = async |id: u32| {
            let insert = format!("INSERT INTO public.purchases VALUES ({id}, 'open', now() + interval '1 hour')");
            execute(&env.pool, &insert).await;
            publisher.schedule(id.to_string(), Timestamp::now_by_local_clock() + SECOND).await.unwrap();
        };
        let ignores_deadline = CLOSES.replace(" AND p.pay_until <= clock_timestamp()", "");
        assert_ne!(ignores_deadline, CLOSES);
        execute(&env.pool, &close_by(&ignores_deadline)).await;
        extended(1).await;
        wait_until_named(&worker, "orders_contract", "closed order 1 35").await;
        execute(&env.pool, &good()).await;
        extended(2).await;
        wait_until_cured(&worker, "orders_contract").await;
        assert_eq!(env.count("SELECT count(*) FROM public.purchases WHERE id = 2 AND state = 'open'").await, 1);
        worker.stop().await;
    });
}

/// Uses the example's statements, because a plan shows the tables that a statement reads, but not those in a function.
fn with_example_statements(settings: &mut Settings) {
    let example = |name: &str| format!("{}/examples/own_orders/{name}.sql", env!("CARGO_MANIFEST_DIR"));
    (settings.orders.close_sql, settings.orders.overdue_sql) = (example("close"), example("overdue"));
}

const EXAMPLE_SCHEMA: &str = include_str!("../../examples/own_orders/schema.sql");

#[test]
fn missing_rights_to_own_tables_are_named() {
    TestEnv::builder().settings(serve_http).run(async move |env| {
        execute(&env.pool, EXAMPLE_SCHEMA).await;
        with_worker_role(env, with_example_statements, async |env, worker, role| {
            let faults = vec![
                fault(
                    "database_rights",
                    "ALTER TABLE public.purchases ENABLE ROW LEVEL SECURITY",
                    "row security may hide rows of purchases",
                    "ALTER TABLE public.purchases DISABLE ROW LEVEL SECURITY",
                ),
                fault(
                    "database_rights",
                    &format!("REVOKE UPDATE ON public.purchases FROM {role}"),
                    "permission denied for table purchases",
                    &format!("GRANT UPDATE ON public.purchases TO {role}"),
                ),
            ];
            assert_named_until_cured(&worker, &env.pool, faults).await;
            worker.stop().await;
        })
        .await;
    });
}

#[test]
fn slow_overdue_query_is_named() {
    let adjust = |settings: &mut Settings| {
        serve_http(settings);
        with_example_statements(settings);
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        let fill = "INSERT INTO public.purchases (id, pay_until, state)
                    SELECT n, now() + interval '1 hour', 'open' FROM generate_series(1, 100000) n";
        execute(&env.pool, EXAMPLE_SCHEMA).await;
        execute(&env.pool, fill).await;
        let worker = env.worker().await;
        let index = "CREATE INDEX CONCURRENTLY ON public.purchases (pay_until, id) WHERE state = 'open'";
        let drop = "DROP INDEX public.purchases_open_by_deadline";
        // The statement in the sentence is the cure.
        assert_named_until_cured(&worker, &env.pool, vec![fault("slow_overdue_query", drop, index, index)]).await;
        worker.stop().await;
    });
}

/// Sixty thousand paid orders, and an overdue statement that does not check their state.
#[test]
fn paid_orders_found_overdue_are_left_alone() {
    with_purchases(async |env, worker| {
        execute(
            &env.pool,
            "INSERT INTO public.purchases SELECT n, 'paid', now() - interval '1 hour' FROM generate_series(1, 60000) n;
             CREATE INDEX ON public.purchases (pay_until, id); ANALYZE public.purchases;
             CREATE SEQUENCE public.closes; CREATE SEQUENCE public.looks;",
        )
        .await;
        let counting = close_by(&format!("SELECT nextval('public.closes'); {}", CLOSES))
            + &overdue_by("p.state <> 'expired'", "p.pay_until, p.id")
                .replace("AS $$", "AS $$ SELECT nextval('public.looks');");
        execute(&env.pool, &counting).await;
        // A pass through this many orders takes long.
        wait_for("the contradiction", async || why_degraded(&worker, "orders_contract").await.1.is_some()).await;
        let closes = "SELECT last_value FROM public.closes";
        let looks = "SELECT last_value FROM public.looks";
        // They back off for longer each time.
        // Over a time that contains a whole round of them, until the rounds are far apart.
        wait_promised(240 * SECOND, "fewer closes", async || {
            let before = env.count(closes).await;
            tokio::time::sleep(8 * SECOND).await;
            env.count(closes).await - before < 40
        })
        .await;
        let (closes_before, looks_before, began) = (env.count(closes).await, env.count(looks).await, Instant::now());
        let open = env.count("SELECT count(*) FROM public.purchases WHERE state = 'open'").await;
        assert_eq!(open, 0);
        // Orders that can be closed are closed as soon as before.
        for id in 70_001..70_006 {
            let due = format!("INSERT INTO public.purchases VALUES ({id}, 'open', clock_timestamp())");
            execute(&env.pool, &due).await;
            let due_at = Instant::now();
            wait_promised(10 * SECOND, "its close", async || {
                env.count("SELECT count(*) FROM public.purchases WHERE state = 'open'").await == 0
            })
            .await;
            println!("closed after {:?}", due_at.elapsed());
            tokio::time::sleep(SECOND).await;
        }
        let seconds = began.elapsed().as_secs_f64();
        let rate = |before: i64, now: i64| (now - before) as f64 / seconds;
        let (closes, looks) =
            (rate(closes_before, env.count(closes).await), rate(looks_before, env.count(looks).await));
        println!("{closes:.1} closes and {looks:.1} pages a second");
        assert!(closes < 20.0 && looks < 60.0, "{closes:.1} closes and {looks:.1} pages a second");
        worker.stop().await;
    });
}

#[test]
fn stalled_relay_is_named() {
    let adjust = |settings: &mut Settings| serve_http(settings);
    on_private_broker_with(&[], adjust, async |env, broker| {
        let (one, other) = (env.worker().await, env.worker().await);
        wait_until_ready(&one).await;
        wait_until_ready(&other).await;
        meanwhile(|| broker.ctl(&["set_vm_memory_high_watermark", "0.00001"]));
        let order = env.order(600 * SECOND).await;
        env.write_alarm(&order).await;
        let relays = async |worker: &RunningWorker| Figures::of(worker).await.get("relaying") == 1.0;
        for worker in [&one, &other] {
            wait_until_named(worker, "relay_stalled", "rows of alarm_outbox have waited").await;
            let says = if relays(worker).await { "the broker" } else { "another worker is the relay" };
            wait_until_named(worker, "relay_stalled", says).await;
        }
        meanwhile(|| broker.ctl(&["set_vm_memory_high_watermark", "0.6"]));
        for worker in [one, other] {
            wait_until_cured(&worker, "relay_stalled").await;
            worker.stop().await;
        }
    });
}

#[test]
fn setup_names_what_is_missing() {
    TestEnv::builder().run(async |env| {
        let setup = || meanwhile(|| run(order_timeout(&env.settings).arg("setup")));
        assert_eq!(setup().0, 0);
        execute(&env.pool, "DROP TABLE orders CASCADE; DROP INDEX an_order_is_closed_once").await;
        let (code, stdout, stderr) = setup();
        assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
        for missing in
            ["the table orders (created by migrations/", "CREATE UNIQUE INDEX CONCURRENTLY an_order_is_closed_once"]
        {
            assert!(stderr.contains(missing), "{stderr}");
        }
        // A shop with its own table does not need ours.
        let root = env!("CARGO_MANIFEST_DIR");
        let own = ["close", "overdue"].map(|name| format!("orders.{name}_sql={root}/examples/own_orders/{name}.sql"));
        let (code, _, stderr) =
            meanwhile(|| run(order_timeout(&env.settings).args(["setup", "--set", &own[0], "--set", &own[1]])));
        assert_eq!(code, 0, "{stderr}");
    });
}

#[test]
fn setup_restores_functions_and_keeps_grants() {
    TestEnv::builder().run(async |env| {
        // A role of every server, which has none of our rights.
        execute(
            &env.pool,
            "GRANT EXECUTE ON FUNCTION payment_received(text, text, text, bigint, text, text) TO pg_monitor",
        )
        .await;
        execute(
            &env.pool,
            "DROP FUNCTION late_payment_received; ALTER FUNCTION release_excess(text, text, bigint) RESET search_path",
        )
        .await;
        let (code, _, stderr) = meanwhile(|| run(order_timeout(&env.settings).arg("setup")));
        assert_eq!(code, 0, "{stderr}");
        let granted = "SELECT count(*) FROM pg_proc WHERE proname = 'payment_received'
                       AND has_function_privilege('pg_monitor', oid, 'EXECUTE')
                       AND NOT has_function_privilege('pg_read_all_stats', oid, 'EXECUTE')";
        assert_eq!(env.count(granted).await, 1);
        let restored = "SELECT count(*) FROM pg_proc WHERE proname IN ('late_payment_received', 'release_excess')
                        AND proconfig = ARRAY['search_path=public, pg_temp']";
        assert_eq!(env.count(restored).await, 2);
    });
}
