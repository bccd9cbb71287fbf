//! A shop with its own orders table: the example's two statements are all that it needs.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use order_timeout::effects::close::Closer;
use order_timeout::effects::sweep::Sweeper;
use order_timeout::operations::doctor::{Options, examine};
use order_timeout::postgres::Database;
use order_timeout::postgres::warm_connections::WarmConnections;
use order_timeout::{Settings, Worker};
use order_timeout_core::order::{ClosedBy, OrderId, Outcome, Overdue, SweepPage, SweepReach, Timestamp};
use order_timeout_testkit::process::{call_with, order_timeout, run};
use order_timeout_testkit::{TestEnv, wait_for};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use sqlx::AssertSqlSafe;

const SCHEMA: &str = include_str!("../../examples/own_orders/schema.sql");

fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/own_orders").join(name);
    path.to_str().expect("a path in plain letters").to_owned()
}

async fn states(env: &TestEnv) -> Vec<(i64, String)> {
    sqlx::query_as("SELECT id, state FROM public.purchases ORDER BY id").fetch_all(&env.pool).await.unwrap()
}

/// Only the default close statement leaves orders that a provider must be asked about to a worker that can ask.
#[test]
fn statement_that_ignores_attempts_is_refused() {
    let adjust = |settings: &mut Settings| {
        settings.orders.close_sql = example("close.sql");
        settings.orders.overdue_sql = example("overdue.sql");
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        sqlx::raw_sql(SCHEMA).execute(&env.pool).await.unwrap();
        let attempt = "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency) VALUES ('card', 'r', '1', 1, 'EUR')";
        sqlx::raw_sql(attempt).execute(&env.pool).await.unwrap();
        let says = "own_orders/close.sql) would close orders without asking their payment providers: payment_attempts has 1 rows";
        let fault = Worker::start(env.settings.clone()).await.map(drop).unwrap_err().to_string();
        assert!(fault.contains(says), "{fault}");
        let report = examine(&env.settings, &Options::default()).await;
        assert!(report.problems().any(|problem| problem.what.contains(says)), "{report:?}");
        let (code, _, stderr) = call_with(&env.settings, &["close", "1"]).await;
        assert!(code == 1 && stderr.contains(says), "{stderr}");

        let mut settings = env.settings.clone();
        settings.orders.close_sql = format!("{}/tests/fixtures/mapping/default_close.sql", env!("CARGO_MANIFEST_DIR"));
        settings.orders.overdue_sql = format!("{}/tests/fixtures/mapping/default_overdue.sql", env!("CARGO_MANIFEST_DIR"));
        Worker::start(settings).await.map(drop).expect("this one leaves them out");
        sqlx::raw_sql("UPDATE payment_attempts SET state = 'closed'").execute(&env.pool).await.unwrap();
        Worker::start(env.settings.clone()).await.map(drop).expect("no attempt may bring money");
    });
}

/// A worker would fail at the word; the check sees it before, though the order is not overdue behind that close.
#[test]
fn close_that_says_another_word_is_named() {
    let right = include_str!("../../examples/own_orders/close.sql");
    let wrong = right.replace("THEN 'closed'", "THEN 'already_closed'");
    assert_ne!(right, wrong);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), wrong).unwrap();
    let close_sql = file.path().to_str().unwrap().to_owned();
    let adjust = |settings: &mut Settings| {
        settings.orders.close_sql = close_sql;
        settings.orders.overdue_sql = example("overdue.sql");
    };
    TestEnv::builder().settings(adjust).run(async move |env| {
        sqlx::raw_sql(SCHEMA).execute(&env.pool).await.unwrap();
        let overdue = "INSERT INTO public.purchases (id, pay_until) VALUES (1, now() - interval '2 s')";
        sqlx::raw_sql(overdue).execute(&env.pool).await.unwrap();
        let (code, said, error) = call_with(&env.settings, &["adopt", "--check"]).await;
        assert!(code == 1 && said.contains("its close says already_closed"), "{said}{error}");
        drop(file);
    });
}

#[test]
fn own_table_is_closed_and_announced() {
    TestEnv::builder()
        .settings(|settings| {
            settings.orders.close_sql = example("close.sql");
            settings.orders.overdue_sql = example("overdue.sql");
            // Long enough for an alarm to arrive on a busy machine.
            settings.sweep.grace = Duration::from_secs(4);
        })
        .run(async |env| {
            sqlx::raw_sql(SCHEMA).execute(&env.pool).await.unwrap();
            // The worker starts first; otherwise the sweep would reach the orders before their alarms.
            let worker = env.worker().await;
            let publisher = env.publisher().await;
            sqlx::raw_sql(
                "INSERT INTO public.purchases (id, pay_until, state) VALUES
                     (1, now() + interval '2 s', 'open'), (2, now() + interval '2 s', 'paid'),
                     (3, now() + interval '1 s', 'open'), (4, now() + interval '1 h', 'open')",
            )
            .execute(&env.pool)
            .await
            .unwrap();
            let deadline = Timestamp::now_by_local_clock() + Duration::from_secs(2);
            // The third order gets no alarm; the last id does not exist, or does not have the table's format.
            for id in ["1", "2", "none", "99"] {
                publisher.schedule(id, deadline).await.unwrap();
            }
            let wanted = ["expired", "paid", "expired", "open"];
            let as_wanted = |states: Vec<(i64, String)>| states.iter().map(|(_, state)| state).eq(wanted);
            wait_for("the closes", async || as_wanted(states(&env).await)).await;
            let sent = "SELECT count(*) FROM event_outbox WHERE sent_at IS NOT NULL";
            wait_for("the events", async || env.count(sent).await == 2).await;
            assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE payload ->> 'closed_by' = 'sweep'").await, 1);
            wait_for("the alarms of no order", async || env.parked().await.len() == 2).await;
            worker.stop().await;
            assert!(as_wanted(states(&env).await));
        });
}

#[test]
fn single_statement_is_refused() {
    TestEnv::builder().run(async |env| {
        for (given, missing) in [("close_sql", "overdue_sql"), ("overdue_sql", "close_sql")] {
            let one = format!("orders.{given}=own.sql");
            let (code, _, error) = run(order_timeout(&env.settings).args(["worker", "--set", &one]));
            assert!(code == 2 && error.contains(&format!("without orders.{missing}")), "{error}");
        }
    });
}

/// A test environment with the example's tables and statements.
fn on_example<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(std::sync::Arc<TestEnv>) -> F + Send + 'static,
) {
    TestEnv::builder()
        .settings(|settings| {
            settings.orders.close_sql = example("close.sql");
            settings.orders.overdue_sql = example("overdue.sql");
        })
        .run(async move |env| {
            execute(&env, SCHEMA).await;
            test(env).await;
        });
}

async fn execute(env: &TestEnv, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&env.pool).await.unwrap();
}

async fn closer(env: &TestEnv) -> Closer {
    let database = Database::connect(&env.settings.database, 1).await.unwrap();
    Closer::prepare(WarmConnections::new(database), &env.settings.orders.close_sql).await.unwrap()
}

/// The outcomes of one statement for all these ids.
async fn close(closer: &Closer, ids: &[String]) -> Vec<Outcome> {
    let ids: Vec<OrderId> = ids.iter().map(|id| OrderId::new(id).unwrap()).collect();
    let findings = closer.close(&ids, ClosedBy::Manual, true).await.unwrap();
    ids.iter().map(|id| findings.get(id).map_or(Outcome::Unknown, |found| found.as_ref().unwrap().outcome)).collect()
}

/// Every overdue order, page by page.
async fn swept(env: &TestEnv, limit: usize) -> Vec<Overdue> {
    let database = Database::connect(&env.settings.database, 1).await.unwrap();
    let sweeper = Sweeper::prepare(database, &env.settings.orders.overdue_sql).await.unwrap();
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let page =
            sweeper.overdue(&SweepPage { reach: SweepReach::Overdue(Duration::ZERO), after, limit }).await.unwrap();
        all.extend(page.orders);
        after = page.next;
        if after.is_none() {
            return all;
        }
    }
}

/// Numbers of every length and sign, and the limits.
fn bigints() -> Vec<i64> {
    let mut runner = TestRunner::deterministic();
    let of_any_length = (proptest::num::i64::ANY, 0_u32..63).prop_map(|(number, shift)| number >> shift);
    let drawn = (0..600).map(|_| of_any_length.new_tree(&mut runner).unwrap().current());
    let powers = (0..19).flat_map(|digits| {
        let power = 10_i64.pow(digits);
        [power, power - 1, -power, 1 - power]
    });
    let ends = [i64::MIN, i64::MIN + 1, i64::MAX, i64::MAX - 1, 1_795_590_212_073_421_700, 0, -1];
    drawn.chain(powers).chain(ends).collect::<BTreeSet<i64>>().into_iter().collect()
}

#[test]
fn example_closes_every_bigint() {
    on_example(async |env| {
        let ids = bigints();
        let insert = "INSERT INTO public.purchases (id, pay_until)
                      SELECT id, CASE WHEN id % 3 = 0 OR id < -9223372036854775807 THEN '0001-01-01 00:00:00+00' ELSE now() - interval '1 min' END
                      FROM unnest($1::bigint[]) AS id";
        sqlx::query(insert).bind(&ids).execute(&env.pool).await.unwrap();
        for limit in [1, 7, 1_000] {
            let mut found: Vec<i64> =
                swept(&env, limit).await.iter().map(|order| order.order_id.as_str().parse().unwrap()).collect();
            found.sort_unstable();
            assert_eq!(found, ids, "the sweep finds each once, in pages of {limit}");
        }
        let closer = closer(&env).await;
        let texts: Vec<String> = ids.iter().map(i64::to_string).collect();
        let outcomes = close(&closer, &texts).await;
        let left: Vec<_> = texts.iter().zip(&outcomes).filter(|(_, outcome)| **outcome != Outcome::Closed).collect();
        assert!(left.is_empty(), "{left:?}");
        assert_eq!(env.count("SELECT count(*) FROM public.purchases WHERE state <> 'expired'").await, 0);
        assert!(swept(&env, 1_000).await.is_empty());
    });
}

#[test]
fn example_calls_other_texts_malformed() {
    on_example(async |env| {
        let closer = closer(&env).await;
        let of_another_form = [
            "9223372036854775808",
            "-9223372036854775809",
            "99999999999999999999",
            "-0",
            "00",
            "01",
            "-01",
            "+1",
            " 1",
            "1 ",
            "1.0",
            "1e3",
            "0x1",
            "1_000",
            "none",
            "-",
            "\u{0661}",
            "'; DROP TABLE purchases",
            "018f2d3e-0000-7000-8000-000000000000",
        ];
        let texts: Vec<String> = of_another_form.iter().map(|text| (*text).to_owned()).collect();
        assert_eq!(close(&closer, &texts).await, vec![Outcome::Malformed; texts.len()]);
        assert_eq!(close(&closer, &["7".into(), "-7".into()]).await, [Outcome::Unknown; 2]);
    });
}

#[test]
fn example_gives_back_sums_per_article() {
    on_example(async |env| {
        execute(
            &env,
            "INSERT INTO public.inventory VALUES ('mug', 0, 100), ('hat', 5, 50);
             INSERT INTO public.purchases (id, pay_until) SELECT n, now() - interval '1 s' FROM generate_series(1, 50) n;
             INSERT INTO public.purchase_lines
                 SELECT n, article, quantity FROM generate_series(1, 50) n, (VALUES ('mug', 2), ('hat', 1)) AS l (article, quantity)",
        )
        .await;
        let ids: Vec<String> = (1..=50).map(|id: i64| id.to_string()).collect();
        assert_eq!(close(&closer(&env).await, &ids).await, vec![Outcome::Closed; 50]);
        let stock: Vec<(String, i64, i64)> =
            sqlx::query_as("SELECT * FROM public.inventory ORDER BY article").fetch_all(&env.pool).await.unwrap();
        assert_eq!(stock, [("hat".to_owned(), 55, 0), ("mug".to_owned(), 100, 0)]);
    });
}

/// Pays as schema.sql says, but leaves the state to another service. Returns whether the order was still open.
async fn pay(env: &TestEnv, id: i64, before_commit: Duration) -> bool {
    let mut payment = env.pool.begin().await.unwrap();
    let state: String = sqlx::query_scalar("SELECT state FROM public.purchases WHERE id = $1 FOR NO KEY UPDATE")
        .bind(id)
        .fetch_one(&mut *payment)
        .await
        .unwrap();
    if state != "open" {
        return false;
    }
    sqlx::query("INSERT INTO public.payments (purchase_id) VALUES ($1)").bind(id).execute(&mut *payment).await.unwrap();
    tokio::time::sleep(before_commit).await;
    payment.commit().await.unwrap();
    true
}

#[test]
fn example_never_closes_what_is_paid() {
    const ORDERS: i64 = 60;
    on_example(async |env| {
        let insert = "INSERT INTO public.purchases (id, pay_until)
                      SELECT n, now() + make_interval(secs => 1.5 + n * 0.005) FROM generate_series(1, $1) n";
        sqlx::query(insert).bind(ORDERS).execute(&env.pool).await.unwrap();
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        let due: Vec<(i64, i64)> =
            sqlx::query_as("SELECT id, (extract(epoch FROM pay_until) * 1000000)::bigint FROM public.purchases")
                .fetch_all(&env.pool)
                .await
                .unwrap();
        let mut payments = tokio::task::JoinSet::new();
        for (id, micros) in due {
            let deadline = Timestamp::from_unix_micros(micros);
            publisher.schedule(id.to_string(), deadline).await.unwrap();
            // From well before the deadline to well after it.
            let around = deadline - Duration::from_millis(150) + Duration::from_millis(5) * u32::try_from(id).unwrap();
            let env = env.clone();
            payments.spawn(async move {
                tokio::time::sleep(around.since(Timestamp::now_by_local_clock())).await;
                pay(&env, id, Duration::from_millis(50)).await
            });
        }
        let paid = payments.join_all().await.into_iter().filter(|paid| *paid).count();
        let settled = "SELECT count(*) FROM public.purchases p
                       WHERE state = 'expired' OR EXISTS (SELECT FROM public.payments y WHERE y.purchase_id = p.id)";
        wait_for("every order", async || env.count(settled).await == ORDERS).await;
        worker.stop().await;
        let both = "SELECT count(*) FROM public.purchases p JOIN public.payments y ON y.purchase_id = p.id WHERE state = 'expired'";
        assert_eq!(env.count(both).await, 0, "paid and closed");
        let payments = env.count("SELECT count(*) FROM public.payments").await;
        assert_eq!(payments, i64::try_from(paid).unwrap(), "each payment that was accepted is there");
        assert!(payments > 0 && payments < ORDERS, "{payments} of {ORDERS} were paid: there was no race");
        assert!(swept(&env, 100).await.is_empty(), "what is paid is not found again and again");
    });
}

#[test]
fn payment_after_statement_start_counts() {
    on_example(async |env| {
        execute(
            &env,
            // Between the snapshot of the close statement and its lock: the sleep is evaluated when the row is locked.
            "CREATE FUNCTION public.slowly(id bigint) RETURNS bigint LANGUAGE plpgsql VOLATILE AS $$
             BEGIN PERFORM pg_sleep(1); RETURN id; END $$;
             INSERT INTO public.purchases (id, pay_until) VALUES (7, now() - interval '1 s')",
        )
        .await;
        let slow = include_str!("../../examples/own_orders/close.sql")
            .replace("SELECT t.id FROM there t))", "SELECT public.slowly(t.id) FROM there t))");
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-slow.sql", env.settings.namespace));
        std::fs::write(&file, slow).unwrap();
        let mut settings = env.settings.clone();
        settings.orders.close_sql = file.to_str().unwrap().to_owned();
        let closing = tokio::spawn(async move { call_with(&settings, &["close", "7"]).await });
        let begun =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'";
        wait_for("the statement", async || env.count(begun).await == 1).await;
        assert!(pay(&env, 7, Duration::ZERO).await);
        let (_, said, error) = closing.await.unwrap();
        assert_eq!(said, "7: paid\n", "{error}");
    });
}

#[test]
fn orders_without_finite_deadline_stay() {
    on_example(async |env| {
        execute(
            &env,
            "ALTER TABLE public.purchases ALTER COLUMN pay_until DROP NOT NULL;
             INSERT INTO public.purchases (id, pay_until) VALUES (1, 'infinity'), (2, NULL), (3, '-infinity')",
        )
        .await;
        let found: Vec<String> = swept(&env, 1).await.iter().map(|order| order.order_id.to_string()).collect();
        assert_eq!(found, Vec::<String>::new());
        let ids = ["1", "2", "3"].map(str::to_owned);
        assert_eq!(close(&closer(&env).await, &ids).await, [Outcome::NotDue; 3]);
    });
}

#[test]
fn overdue_rows_without_deadline_are_named() {
    on_example(async |env| {
        execute(&env, "INSERT INTO public.purchases (id, pay_until) VALUES (-5, now() - interval '1 h')").await;
        let sql = include_str!("../../examples/own_orders/overdue.sql")
            .replace("p.pay_until AS deadline", "nullif(p.pay_until, p.pay_until) AS deadline");
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-null.sql", env.settings.namespace));
        std::fs::write(&file, sql).unwrap();
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        let sweeper = Sweeper::prepare(database, file.to_str().unwrap()).await.unwrap();
        let page = SweepPage { reach: SweepReach::Overdue(Duration::ZERO), after: None, limit: 10 };
        let why = sweeper.overdue(&page).await.unwrap_err().to_string();
        assert!(why.contains("returns order \"-5\" without a deadline"), "{why}");
    });
}

#[test]
fn plpgsql_function_serves_as_statement() {
    on_example(async |env| {
        execute(
            &env,
            "CREATE FUNCTION public.close_purchases(ids text[]) RETURNS TABLE (order_id text, outcome text, deadline timestamptz)
             LANGUAGE plpgsql VOLATILE AS $$
             DECLARE found record;
             BEGIN
                 FOR found IN SELECT p.id, p.state, p.pay_until FROM public.purchases p
                              WHERE p.id = ANY (ids::bigint[]) ORDER BY p.id FOR NO KEY UPDATE SKIP LOCKED
                 LOOP
                     order_id := found.id; deadline := found.pay_until; outcome := 'already_closed';
                     IF found.state = 'open' AND found.pay_until > clock_timestamp() THEN outcome := 'not_due';
                     ELSIF found.state = 'open' THEN
                         UPDATE public.purchases SET state = 'expired', expired_at = clock_timestamp() WHERE id = found.id;
                         outcome := 'closed';
                     END IF;
                     RETURN NEXT;
                 END LOOP;
             END $$;
             INSERT INTO public.purchases (id, pay_until) VALUES (1, now() - interval '1 s'), (2, now() + interval '1 h')",
        )
        .await;
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-function.sql", env.settings.namespace));
        // With the byte order mark that some editors write.
        std::fs::write(&file, "\u{feff}SELECT order_id, outcome, deadline FROM public.close_purchases($1::text[])\n")
            .unwrap();
        let mut settings = env.settings.clone();
        settings.orders.close_sql = file.to_str().unwrap().to_owned();
        let (code, said, error) = call_with(&settings, &["close", "1", "2", "3"]).await;
        assert_eq!((code, said.as_str()), (1, "1: closed\n2: not_due\n3: unknown\n"), "{error}");
        let (_, said, error) = call_with(&settings, &["close", "1"]).await;
        assert_eq!(said, "1: already_closed\n", "{error}");
    });
}

#[test]
fn faulty_statements_name_their_cause() {
    on_example(async |env| {
        let role = format!("r{}", env.settings.namespace);
        execute(
            &env,
            &format!(
                "CREATE SCHEMA closed_off; CREATE TABLE closed_off.orders (id text);
                 CREATE ROLE {role} LOGIN PASSWORD 'secret'; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}"
            ),
        )
        .await;
        let mut settings = env.settings.clone();
        settings.database.url =
            order_timeout_testkit::with_parts(&settings.database.url, Some(&format!("{role}:secret")), None, None);
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-faulty.sql", env.settings.namespace));
        let cases: [(&[u8], &[&str]); 8] = [
            (b" \n\t", &["is empty", "orders.close_sql"]),
            (b"-- nothing but a comment", &["holds no statement that returns rows"]),
            (b"\xff\xfeS\0E\0", &["is not UTF-8"]),
            (b"S\0E\0L\0", &["saved as UTF-16"]),
            (b"-- two lines\nSELECT 1 AS order_id\n  FORM orders", &["line 3, column 3", "correct the statement"]),
            (b"SELECT x FROM closed_off.orders", &["GRANT the user", "USAGE on the schema"]),
            (b"SELECT x FROM no_such_table", &["line 1, column 15", "restore what the statement refers to"]),
            (b"SELECT x FROM no_such_schema.orders", &["no_such_schema", "correct the name"]),
        ];
        for (text, parts) in cases {
            std::fs::write(&file, text).unwrap();
            settings.orders.close_sql = file.to_str().unwrap().to_owned();
            let (code, _, error) = call_with(&settings, &["close", "1"]).await;
            assert_eq!(code, 1, "{error}");
            for part in parts {
                assert!(error.contains(part), "{error:?} lacks {part:?}");
            }
        }
        execute(&env, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
    });
}

/// Orders of both tables, one of each paid.
const TWO_TABLES: &str = "
    INSERT INTO public.web_orders (id, state, pay_until) VALUES
        (1, 'open', now() - interval '2 s'), (2, 'paid', now() - interval '2 s'), (3, 'open', now() + interval '1 h'),
        (4, 'open', '-infinity');
    INSERT INTO public.phone_orders SELECT * FROM public.web_orders";

#[test]
fn two_tables_are_closed_with_history() {
    TestEnv::builder()
        .without_broker()
        .settings(|settings| {
            let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/two_tables");
            let file = |name: &str| root.join(name).to_str().unwrap().to_owned();
            (settings.orders.close_sql, settings.orders.overdue_sql) = (file("close.sql"), file("overdue.sql"));
        })
        .run(async |env| {
            execute(&env, include_str!("../../examples/two_tables/schema.sql")).await;
            execute(&env, TWO_TABLES).await;
            for limit in [1, 2, 9] {
                let found: Vec<String> = swept(&env, limit).await.iter().map(|one| one.order_id.to_string()).collect();
                assert_eq!(found, ["phone-1", "web-1"], "{limit}");
            }
            let ids = ["web-1", "web-2", "phone-3", "phone-4", "phone-1", "web-9", "x-1", "web-01"].map(str::to_owned);
            use Outcome::{Closed, Malformed, NotDue, Paid, Unknown};
            let expected = [Closed, Paid, NotDue, NotDue, Closed, Unknown, Malformed, Malformed];
            assert_eq!(close(&closer(&env).await, &ids).await, expected);
            let history: Vec<(String, String)> =
                sqlx::query_as("SELECT order_ref, new_state FROM public.order_history ORDER BY 1")
                    .fetch_all(&env.pool)
                    .await
                    .unwrap();
            let closed = |id: &str| (id.to_owned(), "expired".to_owned());
            assert_eq!(history, [closed("phone-1"), closed("web-1")]);
            assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE type = 'order.closed.v1'").await, 2);
            assert!(swept(&env, 9).await.is_empty());
        });
}

const DERIVED_SCHEMA: &str = include_str!("../../examples/derived_deadline/schema.sql");

/// A test environment with the tables and statements of the example without a column for the deadline.
fn on_derived_deadline<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(std::sync::Arc<TestEnv>) -> F + Send + 'static,
) {
    TestEnv::builder()
        .settings(|settings| {
            let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/derived_deadline");
            let path = |name: &str| root.join(name).to_str().expect("a path in plain letters").to_owned();
            settings.orders.close_sql = path("close.sql");
            settings.orders.overdue_sql = path("overdue.sql");
        })
        .run(async move |env| {
            execute(&env, DERIVED_SCHEMA).await;
            test(env).await;
        });
}

#[test]
fn derived_deadline_is_closed_and_announced() {
    on_derived_deadline(async |env| {
        // Due in two seconds, paid, due in an hour, and due in a second without an alarm.
        execute(
            &env,
            "INSERT INTO public.bookings (id, created_at, minutes_to_pay, state) VALUES
                 (1, now() - interval '58 s', 1, 'open'), (2, now() - interval '58 s', 1, 'paid'),
                 (3, now(), 60, 'open');
             INSERT INTO alarm_outbox (order_id, deadline)
                 SELECT id::text, created_at + make_interval(mins => minutes_to_pay) FROM public.bookings",
        )
        .await;
        let worker = env.worker().await;
        let expired = "SELECT count(*) FROM public.bookings WHERE state = 'expired' AND id = 1";
        wait_for("the close", async || env.count(expired).await == 1).await;
        let sent = "SELECT count(*) FROM event_outbox WHERE sent_at IS NOT NULL";
        wait_for("the event", async || env.count(sent).await == 1).await;
        worker.stop().await;
        let early = "SELECT count(*) FROM public.bookings
                     WHERE expired_at < created_at + make_interval(mins => minutes_to_pay)";
        assert_eq!(env.count(early).await, 0);
        assert_eq!(env.count("SELECT count(*) FROM public.bookings WHERE state <> 'expired'").await, 2);
    });
}

#[test]
fn derived_deadline_is_swept_in_pages() {
    on_derived_deadline(async |env| {
        execute(
            &env,
            "INSERT INTO public.bookings (id, created_at, minutes_to_pay, state)
             SELECT n, date_trunc('minute', now()) - make_interval(mins => 90), 1 + abs(n)::int % 120,
                    CASE WHEN n % 5 = 0 THEN 'paid' ELSE 'open' END
             FROM generate_series(-6000, 6000) AS n",
        )
        .await;
        let overdue = "SELECT count(*) FROM public.bookings
                       WHERE state = 'open' AND created_at + make_interval(mins => minutes_to_pay) <= now()";
        let (expected, all) = (env.count(overdue).await, swept(&env, 700).await);
        let distinct: BTreeSet<&str> = all.iter().map(|order| order.order_id.as_str()).collect();
        assert_eq!((distinct.len() as i64, all.len() as i64), (expected, expected));
        assert!(all.is_sorted_by_key(|order| order.deadline));
        execute(&env, "ANALYZE public.bookings").await;
        let plan: Vec<String> = {
            let overdue = include_str!("../../examples/derived_deadline/overdue.sql");
            let prepare = format!("PREPARE overdue (float8, timestamptz, text, bigint) AS {overdue}");
            let mut connection = env.pool.acquire().await.unwrap();
            sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut *connection).await.unwrap();
            sqlx::raw_sql("SET enable_seqscan = off").execute(&mut *connection).await.unwrap();
            let explain = "EXPLAIN EXECUTE overdue (0.5, '-infinity', '', 100)";
            let plan = sqlx::query_scalar(explain).fetch_all(&mut *connection).await.unwrap();
            connection.close().await.unwrap();
            plan
        };
        let plan = plan.join("\n");
        assert!(plan.contains("bookings_open_by_deadline") && !plan.contains("Sort"), "{plan}");
    });
}

#[test]
fn derived_deadline_closes_every_bigint() {
    on_derived_deadline(async |env| {
        let ids = bigints();
        let insert = "INSERT INTO public.bookings (id, created_at, minutes_to_pay)
                      SELECT id, now() - interval '1 h', 30 FROM unnest($1::bigint[]) AS id";
        sqlx::query(insert).bind(&ids).execute(&env.pool).await.unwrap();
        let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
        for batch in ids.chunks(800) {
            assert!(close(&closer(&env).await, batch).await.iter().all(|outcome| *outcome == Outcome::Closed));
        }
    });
}
