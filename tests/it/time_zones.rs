//! Orders from a table with deadlines without a time zone are closed at the time that the shop means, whatever the zone
//! of the database, and never earlier.

use std::path::Path;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout::effects::sweep::Sweeper;
use order_timeout::http::READYZ;
use order_timeout::postgres::Database;
use order_timeout_core::order::{Overdue, SweepPage, SweepReach, Timestamp};
use order_timeout_testkit::figures::{get, serve_http};
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{RunningWorker, TIMEOUT, TestEnv, promised, wait_for, wait_promised};
use sqlx::AssertSqlSafe;
use time::OffsetDateTime;

/// The longest time until a cause is shown.
const SHOWN_WITHIN: Duration = Duration::from_secs(15);

/// The latest that a close may be.
const LATE: Duration = Duration::from_secs(1);

/// A shop's table: its deadline as a local time and as an absolute time, and how the statements read it.
const SCHEMA: &str = "CREATE TABLE public.tickets (
    id bigint PRIMARY KEY, state text NOT NULL DEFAULT 'open', reading text NOT NULL,
    local_until timestamp NOT NULL, until timestamptz NOT NULL, closed_at timestamptz)";

/// The deadline as the statements read it: by the zone's name, as the contract requires; by a cast; or as an absolute
/// time.
fn deadline(zone: &str) -> String {
    format!(
        "CASE t.reading WHEN 'named' THEN t.local_until AT TIME ZONE '{zone}' WHEN 'cast' THEN t.local_until::timestamptz
         ELSE t.until END"
    )
}

fn close_sql(deadline: &str) -> String {
    format!(
        "WITH locked AS MATERIALIZED (
             SELECT t.id, t.state, {deadline} AS deadline FROM public.tickets t
             WHERE t.id = ANY (ARRAY(SELECT unnest($1::text[])::bigint)) ORDER BY t.id FOR NO KEY UPDATE SKIP LOCKED
         ),
         closed AS (
             UPDATE public.tickets t SET state = 'closed', closed_at = clock_timestamp() FROM locked l
             WHERE t.id = l.id AND l.state = 'open' AND l.deadline <= clock_timestamp() RETURNING t.id
         )
         SELECT l.id::text AS order_id, l.deadline,
                CASE WHEN l.id IN (SELECT c.id FROM closed c) THEN 'closed' WHEN l.state = 'open' THEN 'not_due'
                     ELSE 'already_closed' END AS outcome
         FROM locked l"
    )
}

fn overdue_sql(deadline: &str) -> String {
    format!(
        "SELECT t.id::text AS order_id, {deadline} AS deadline FROM public.tickets t
         WHERE t.state = 'open' AND {deadline} <= statement_timestamp() - make_interval(secs => $1::float8)
           AND ({deadline}, t.id) > ($2::timestamptz, coalesce(nullif($3::text, ''), '-1')::bigint)
         ORDER BY {deadline}, t.id LIMIT $4::bigint"
    )
}

/// Writes both statements for this reading of the deadline, and sets them in the settings.
fn name_statements(settings: &mut Settings, deadline: &str) {
    let write = |name: &str, sql: String| {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}.sql", settings.namespace));
        std::fs::write(&path, sql).unwrap();
        path.to_str().expect("a path in plain letters").to_owned()
    };
    let (close, overdue) = (write("close", close_sql(deadline)), write("overdue", overdue_sql(deadline)));
    settings.orders.close_sql = close;
    settings.orders.overdue_sql = overdue;
}

async fn run(env: &TestEnv, sql: String) {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&env.pool).await.unwrap();
}

/// The test environment's database has this zone from now on.
async fn set_zone(env: &TestEnv, zone: &str) {
    run(env, format!("ALTER DATABASE order_timeout_{} SET timezone = '{zone}'", env.settings.namespace)).await;
}

/// Inserts an order for each way to read its deadline, which is this many seconds ahead by the clock of this zone.
/// Returns the deadline as an absolute time.
async fn insert(env: &TestEnv, first_id: i64, seconds: f64, zone: &str) -> Timestamp {
    let sql = "INSERT INTO public.tickets (id, reading, until, local_until)
               SELECT $1 + n, reading, until, until AT TIME ZONE $3
               FROM unnest(ARRAY['named', 'cast', 'moment']) WITH ORDINALITY AS r (reading, n),
                    (SELECT clock_timestamp() + make_interval(secs => $2) AS until) AS deadline
               RETURNING (extract(epoch FROM until) * 1000000)::bigint";
    let micros: Vec<i64> =
        sqlx::query_scalar(sql).bind(first_id - 1).bind(seconds).bind(zone).fetch_all(&env.pool).await.unwrap();
    Timestamp::from_unix_micros(micros[0])
}

async fn schedule(env: &TestEnv, ids: impl IntoIterator<Item = i64>, deadline: Timestamp) {
    let publisher = env.publisher().await;
    for id in ids {
        publisher.schedule(id.to_string(), deadline).await.unwrap();
    }
}

async fn closed(env: &TestEnv) -> i64 {
    env.count("SELECT count(*) FROM public.tickets WHERE state = 'closed'").await
}

/// Asserts that no close was early, and none this late.
async fn assert_lateness(env: &TestEnv, bound: Duration, zone: &str) {
    assert_eq!(env.count("SELECT count(*) FROM public.tickets WHERE closed_at < until").await, 0, "{zone}: early");
    let closed = sqlx::query_as("SELECT until, closed_at FROM public.tickets WHERE state = 'closed'");
    let closed: Vec<(OffsetDateTime, OffsetDateTime)> = closed.fetch_all(&env.pool).await.unwrap();
    let late = closed.into_iter().map(|(until, closed_at)| Timestamp::from(closed_at).since(Timestamp::from(until)));
    let latest = late.max().expect("a close");
    assert!(latest < promised(bound), "{zone}: {latest:?}");
}

/// Orders due in two seconds are closed then and those due in an hour are not, however the deadline is read, both by
/// alarm and by sweep.
fn assert_closes_on_time(zone: &'static str, grace: Duration) {
    TestEnv::builder()
        .settings(|settings| {
            name_statements(settings, &deadline(zone));
            settings.sweep.grace = grace;
        })
        .run(async move |env| {
            run(&env, SCHEMA.to_owned()).await;
            set_zone(&env, zone).await;
            let worker = env.worker().await;
            let soon = insert(&env, 1, 2.0, zone).await;
            let later = insert(&env, 11, 3_600.0, zone).await;
            let closes_by_alarm = grace > Duration::from_secs(10);
            if closes_by_alarm {
                schedule(&env, 1..=3, soon).await;
                schedule(&env, 11..=13, later).await;
            }
            wait_for("the closes", async || closed(&env).await >= 3).await;
            assert_lateness(&env, if closes_by_alarm { LATE } else { LATE + grace }, zone).await;
            worker.stop().await;
            assert_eq!(closed(&env).await, 3, "{zone}: an order that has an hour left is open");
        });
}

#[test]
fn new_york_closes_on_time() {
    assert_closes_on_time("America/New_York", 2 * TIMEOUT);
}

#[test]
fn shanghai_closes_on_time() {
    assert_closes_on_time("Asia/Shanghai", 2 * TIMEOUT);
}

#[test]
fn kathmandu_closes_on_time() {
    assert_closes_on_time("Asia/Kathmandu", 2 * TIMEOUT);
}

#[test]
fn utc_closes_on_time() {
    assert_closes_on_time("UTC", 2 * TIMEOUT);
}

#[test]
fn sweep_uses_zone_too() {
    assert_closes_on_time("America/New_York", Duration::from_millis(500));
}

/// The zone of a worker's sessions.
async fn session_zone(settings: &Settings) -> String {
    let database = Database::connect(&settings.database, 1).await.unwrap();
    let zone = sqlx::query_scalar("SELECT current_setting('TimeZone')");
    database.run(async |connection| zone.fetch_one(connection).await).await.unwrap()
}

#[test]
fn sessions_use_most_specific_zone() {
    TestEnv::builder().without_broker().run(async |env| {
        let plain = session_zone(&env.settings).await;
        let configured = "SELECT boot_val <> '' FROM pg_settings WHERE name = 'TimeZone'";
        assert!(sqlx::query_scalar::<_, bool>(configured).fetch_one(&env.pool).await.unwrap());
        let server = "SELECT coalesce((SELECT setting FROM pg_file_settings WHERE lower(name) = 'timezone' AND applied
                          ORDER BY seqno DESC LIMIT 1), 'GMT')";
        assert_eq!(plain, sqlx::query_scalar::<_, String>(server).fetch_one(&env.pool).await.unwrap());
        set_zone(&env, "Asia/Shanghai").await;
        assert_eq!(session_zone(&env.settings).await, "Asia/Shanghai", "the database's");

        // A separate role that may not read the server's configuration.
        let (role, database) = (format!("r{}", env.settings.namespace), env.settings.namespace.clone());
        run(&env, format!("CREATE ROLE {role} LOGIN PASSWORD 'secret'; GRANT ALL ON SCHEMA public TO {role}")).await;
        let mut settings = env.settings.clone();
        settings.database.url =
            order_timeout_testkit::with_parts(&settings.database.url, Some(&format!("{role}:secret")), None, None);
        assert_eq!(session_zone(&settings).await, "Asia/Shanghai", "the database's, for any role");
        run(&env, format!("ALTER ROLE {role} SET timezone = 'Asia/Kathmandu'")).await;
        assert_eq!(session_zone(&settings).await, "Asia/Kathmandu", "the role's");
        let both = format!("ALTER ROLE {role} IN DATABASE order_timeout_{database} SET timezone = 'Asia/Tokyo'");
        run(&env, both).await;
        assert_eq!(session_zone(&settings).await, "Asia/Tokyo", "the role's in this database");

        use secrecy::ExposeSecret;
        let with_options = format!("{}?options=-ctimezone%3DAmerica/New_York", settings.database.url.expose_secret());
        settings.database.url = with_options.into();
        assert_eq!(session_zone(&settings).await, "America/New_York", "the address'");
        settings.database.time_zone = "Europe/Berlin".into();
        assert_eq!(session_zone(&settings).await, "Europe/Berlin", "the setting's");
        settings.database.time_zone = "Europe/Atlantis".into();
        let fault = Database::connect(&settings.database, 1).await.unwrap_err().to_string();
        assert!(fault.contains("Europe/Atlantis") && fault.contains("database.time_zone"), "{fault}");

        run(&env, format!("DROP OWNED BY {role}; ALTER DATABASE order_timeout_{database} RESET timezone")).await;
        run(
            &env,
            format!("ALTER ROLE {role} RESET ALL; ALTER ROLE {role} IN DATABASE order_timeout_{database} RESET ALL"),
        )
        .await;
        settings = env.settings.clone();
        settings.database.url =
            order_timeout_testkit::with_parts(&settings.database.url, Some(&format!("{role}:secret")), None, None);
        let assumed: String =
            sqlx::query_scalar("SELECT current_setting('log_timezone')").fetch_one(&env.pool).await.unwrap();
        assert_eq!(session_zone(&settings).await, assumed, "the server's, as far as this role can know");
        run(&env, format!("DROP ROLE {role}")).await;
    });
}

/// A zone whose clock is set back by an hour this many seconds from now, from UTC-4 to UTC-5 (POSIX; PostgreSQL
/// documentation, appendix B.5).
async fn zone_set_back_in(env: &TestEnv, seconds: i32) -> String {
    let rule = "SELECT 'XST5XDT4,' || (day + 180) % 365 || '/0,' || day || '/' || to_char(at, 'HH24:MI:SS')
                FROM (SELECT clock_timestamp() AT TIME ZONE 'UTC' - interval '4 hours' + make_interval(secs => $1) AS at) AS t,
                     LATERAL (SELECT extract(doy FROM at)::int - 1 AS day) AS d";
    sqlx::query_scalar(rule).bind(f64::from(seconds)).fetch_one(&env.pool).await.unwrap()
}

/// The difference in seconds between the reading of a local time and the time that was meant.
async fn reads_later_by(env: &TestEnv, zone: &str) -> f64 {
    let differ = "SELECT extract(epoch FROM (now() AT TIME ZONE $1) AT TIME ZONE $1 - now())::float8";
    sqlx::query_scalar(differ).bind(zone).fetch_one(&env.pool).await.unwrap()
}

#[test]
fn repeated_hour_is_read_as_its_second() {
    TestEnv::builder()
        .settings(
            // The zone is known only after the test environment exists; the statements are set below.
            |settings| settings.sweep.grace = Duration::from_secs(60),
        )
        .run(async |env| {
            run(&env, SCHEMA.to_owned()).await;
            let zone = zone_set_back_in(&env, 1_800).await;
            assert!((reads_later_by(&env, &zone).await - 3_600.0).abs() < 0.1, "{zone}: the first of the two hours");
            set_zone(&env, &zone).await;
            let mut settings = env.settings.clone();
            name_statements(&mut settings, &deadline(&zone));
            // Five seconds ago by the absolute time; in an hour by the local time, because that occurs twice.
            insert(&env, 1, -5.0, &zone).await;
            let (_, said, error) = call_with(&settings, &["close", "1", "2", "3"]).await;
            assert_eq!(said, "1: not_due\n2: not_due\n3: closed\n", "never early: {error}");

            // The second of the two hours: the reading is what was meant.
            let zone = zone_set_back_in(&env, -600).await;
            assert!(reads_later_by(&env, &zone).await.abs() < 0.1, "{zone}: the second of the two hours");
            set_zone(&env, &zone).await;
            run(&env, "DELETE FROM public.tickets".to_owned()).await;
            name_statements(&mut settings, &deadline(&zone));
            let worker = RunningWorker::start(settings).await;
            let soon = insert(&env, 1, 2.0, &zone).await;
            schedule(&env, 1..=3, soon).await;
            wait_for("the closes", async || closed(&env).await == 3).await;
            worker.stop().await;
            assert_lateness(&env, LATE, &zone).await;
        });
}

/// Every overdue order, page by page.
async fn swept(sweeper: &Sweeper) -> Vec<Overdue> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let page =
            sweeper.overdue(&SweepPage { reach: SweepReach::Overdue(Duration::ZERO), after, limit: 3 }).await.unwrap();
        all.extend(page.orders);
        after = page.next;
        if after.is_none() {
            return all;
        }
    }
}

#[test]
fn sweep_pages_survive_clock_changes() {
    TestEnv::builder().without_broker().settings(|settings| name_statements(settings, &deadline("America/New_York"))).run(async |env| {
            run(&env, SCHEMA.to_owned()).await;
            set_zone(&env, "America/New_York").await;
            // Includes the hour that the clock skips, which arithmetic with local times can produce.
            run(
                &env,
                "INSERT INTO public.tickets (id, reading, local_until, until)
                 SELECT row_number() OVER (ORDER BY md5(at::text || reading)), reading, at, at AT TIME ZONE 'America/New_York'
                 FROM unnest(ARRAY['named', 'cast', 'moment']) AS reading,
                      (SELECT generate_series('2025-11-02 00:30'::timestamp, '2025-11-02 02:30', '5 min')
                       UNION ALL SELECT generate_series('2026-03-08 01:30'::timestamp, '2026-03-08 03:30', '5 min')) AS s (at)"
                    .to_owned(),
            )
            .await;
            let database = Database::connect(&env.settings.database, 1).await.unwrap();
            let sweeper = Sweeper::prepare(database, &env.settings.orders.overdue_sql).await.unwrap();
            let all = swept(&sweeper).await;
            let mut ids: Vec<i64> = all.iter().map(|order| order.order_id.as_str().parse().unwrap()).collect();
            assert!(all.is_sorted_by_key(|order| order.deadline), "by deadline");
            ids.sort_unstable();
            assert_eq!(ids, (1..=150).collect::<Vec<i64>>(), "each order once");
        });
}

async fn ready_page(worker: &RunningWorker) -> String {
    let (status, page) = get(worker, READYZ).await;
    assert_eq!(status, 200, "{page}");
    page
}

/// Orders of a shop in this zone with statements that read the zone as UTC: the page shows this until the orders agree.
fn assert_wrong_zone_is_shown(zone: &'static str, orders: i64, words: &'static str) {
    TestEnv::builder()
        .settings(|settings| {
            serve_http(settings);
            name_statements(settings, "t.local_until AT TIME ZONE 'UTC'");
        })
        .run(async move |env| {
            run(&env, SCHEMA.to_owned()).await;
            set_zone(&env, zone).await;
            let worker = env.worker().await;
            for first in (1..=orders).step_by(3) {
                let soon = insert(&env, first, 1.0, zone).await;
                schedule(&env, first..first + 3, soon).await;
            }
            wait_promised(SHOWN_WITHIN, "the cause", async || {
                let page = ready_page(&worker).await;
                page.contains("degraded: time_zone: ") && page.contains(words) && page.contains("AT TIME ZONE")
            })
            .await;
            let soon = insert(&env, 1_001, 1.0, "UTC").await;
            schedule(&env, 1_001..=1_003, soon).await;
            wait_promised(SHOWN_WITHIN, "its end", async || !ready_page(&worker).await.contains("time_zone")).await;
            worker.stop().await;
        });
}

#[test]
fn rows_hours_earlier_degrade_the_worker() {
    assert_wrong_zone_is_shown("America/New_York", 3, "earlier than in its alarm");
}

#[test]
fn rows_hours_later_degrade_the_worker() {
    assert_wrong_zone_is_shown("Asia/Kathmandu", 12, "5 h 45 min later than in its alarm");
}

#[test]
fn timestamp_columns_are_refused_with_remedy() {
    TestEnv::builder().settings(|settings| name_statements(settings, "t.local_until")).run(async |env| {
        run(&env, SCHEMA.to_owned()).await;
        let (code, _, error) = call_with(&env.settings, &["--set", "log.filter=off", "worker"]).await;
        assert_eq!(code, 1, "{error}");
        assert!(error.contains("column deadline as TIMESTAMP"), "{error}");
        assert!(error.contains("AT TIME ZONE 'the zone that the column is written in'"), "{error}");
        assert!(!error.contains("cast it"), "{error}");
    });
}
