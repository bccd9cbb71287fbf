//! A database that becomes unavailable, for any reason: no alarm is acknowledged, parked or blamed for it, nothing spins,
//! and every order is closed once when it is back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use order_timeout::effects::close::Closer;
use order_timeout::operations::orders_statements;
use order_timeout::postgres::Database;
use order_timeout::postgres::warm_connections::WarmConnections;
use order_timeout_core::kind::Kind;
use order_timeout_testkit::away::{
    held_by_the_worker, meanwhile, on_private_database, shorten_database_timeouts, worker_through,
};
use order_timeout_testkit::linux::{self, Signal};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::proxy::{Direction, Proxy, Then};
use order_timeout_testkit::skip::skipped;
use order_timeout_testkit::{TestEnv, wait_for};
use secrecy::ExposeSecret;
use sqlx::{Connection, PgConnection};

const SECOND: Duration = Duration::from_secs(1);

/// Messages ready in the processing queue.
async fn waiting(env: &TestEnv) -> usize {
    env.depth(&env.names().timeout()).await as usize
}

/// Limits the requests of a worker from a certain time on: it must not spin.
struct RequestLimit<'a> {
    network: &'a Proxy,
    requests_before: usize,
    began: Instant,
}

impl<'a> RequestLimit<'a> {
    fn from_now(network: &'a Proxy) -> Self {
        Self { network, requests_before: network.asked(), began: Instant::now() }
    }

    /// In each second, the relay polls two outboxes ten times, the sweep runs four times and the clock is read once.
    /// Each needs one or two requests, and as many to check the connection: eighty requests a second at rest. A
    /// spinning worker sends a thousand.
    fn assert_kept(&self) {
        let requests = self.network.asked() - self.requests_before;
        let allowed = 200.0 + 120.0 * self.began.elapsed().as_secs_f64();
        #[allow(clippy::cast_precision_loss)]
        let is_kept = (requests as f64) < allowed;
        assert!(is_kept, "{requests} requests within {:?}", self.began.elapsed());
    }
}

/// [`assert_each_closed_once`], and asserts that each order was closed by its alarm.
async fn assert_each_closed_by_its_alarm(env: &TestEnv, orders: usize) {
    assert_each_closed_once(env, orders).await;
    let orders = i64::try_from(orders).unwrap();
    assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, orders);
}

/// Asserts that each of this many orders was closed once, that its event was sent, and that no alarm was parked.
async fn assert_each_closed_once(env: &TestEnv, orders: usize) {
    let orders = i64::try_from(orders).unwrap();
    wait_for("every close", async || env.closed().await == orders).await;
    let sent = "SELECT count(*) FROM event_outbox WHERE sent_at IS NOT NULL";
    wait_for("every event sent", async || env.count(sent).await == orders).await;
    assert_eq!(env.count("SELECT count(*) FROM order_events WHERE event = 'closed'").await, orders);
    assert_eq!(env.count("SELECT count(DISTINCT payload ->> 'order_id') FROM event_outbox").await, orders);
    assert_eq!(env.parked().await, []);
    env.assert_ledger().await;
}

/// Makes the database unavailable while the worker holds alarms that become due: they return to the broker, and their
/// orders are closed when the database is back.
async fn survive(env: &TestEnv, take_down: impl AsyncFnOnce(&Proxy), bring_back: impl AsyncFnOnce(&Proxy)) {
    let network = Proxy::before(&env.settings.database.url).await;
    let publisher = env.publisher().await;
    let worker = worker_through(env, &network).await;
    held_by_the_worker(env, 30, 3 * SECOND).await;
    let by_lane = env.orders(10, 4 * SECOND).await;
    let by_wheel = env.orders(10, 12 * SECOND).await;

    take_down(&network).await;
    let limit = RequestLimit::from_now(&network);
    // Scheduling needs no database.
    let alarms = by_lane.iter().chain(&by_wheel).map(|order| (order.order_id(), order.deadline));
    assert_eq!(publisher.schedule_all(alarms).await, Ok(()));
    wait_for("the alarms returned", async || waiting(env).await >= 30).await;
    limit.assert_kept();

    bring_back(&network).await;
    // By alarm or sweep: a worker that has closed its session does not wait for alarms, so the sweep may close them
    // first.
    assert_each_closed_once(env, 50).await;
    worker.stop().await;
    env.assert_nothing_left_undone().await;
}

#[test]
fn stopped_database_loses_no_alarm() {
    on_private_database(&[], async |env: Arc<TestEnv>, database: Arc<Private>| {
        survive(&env, async |_| meanwhile(|| database.stop()), async |_| meanwhile(|| database.restart())).await;
    });
}

#[test]
fn killed_database_loses_no_alarm() {
    on_private_database(&[], async |env: Arc<TestEnv>, database: Arc<Private>| {
        survive(&env, async |_| meanwhile(|| database.kill()), async |_| meanwhile(|| database.restart())).await;
    });
}

#[test]
fn read_only_database_loses_no_alarm() {
    on_private_database(&[], async |env: Arc<TestEnv>, _| {
        // As after a failover that left the worker connected to the old primary. Applies to open connections too.
        let set = async |sql: &'static str| {
            sqlx::query(sql).execute(&env.pool).await.unwrap();
            sqlx::query("SELECT pg_reload_conf()").execute(&env.pool).await.unwrap();
        };
        survive(
            &env,
            async |_| set("ALTER SYSTEM SET default_transaction_read_only = on").await,
            async |_| set("ALTER SYSTEM RESET default_transaction_read_only").await,
        )
        .await;
    });
}

#[test]
fn reset_connections_lose_no_alarm() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        survive(&env, async |network| network.cut(), async |network| network.restore()).await;
    });
}

#[test]
fn vanished_database_host_loses_no_alarm() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        survive(&env, async |network| network.stall(), async |network| network.restore()).await;
    });
}

#[test]
fn lost_database_answers_lose_no_alarm() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        survive(&env, async |network| network.stall_one_way(Direction::ToClient), async |network| network.restore())
            .await;
    });
}

#[test]
fn frozen_database_loses_no_alarm() {
    on_private_database(&[], async |env: Arc<TestEnv>, database: Arc<Private>| {
        survive(&env, async |_| database.halt(), async |_| database.go_on()).await;
    });
}

#[test]
fn exhausted_connections_lose_no_alarm() {
    on_private_database(
        &["-c", "max_connections=20", "-c", "superuser_reserved_connections=0"],
        async |env: Arc<TestEnv>, _| {
            let hogs = std::sync::Mutex::new(Vec::new());
            let url = env.settings.database.url_of("postgres");
            let take_all = async || {
                let of_workers = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'order-timeout'";
                let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'order-timeout'";
                wait_for("every connection taken, none of them the worker's", async || {
                    env.count(end).await;
                    // All at once, before the held alarms fall due.
                    let opened = join_all((0..20).map(|_| PgConnection::connect(url.expose_secret()))).await;
                    hogs.lock().unwrap().extend(opened.into_iter().flatten());
                    env.count(of_workers).await == 0
                })
                .await;
            };
            survive(&env, async |_| take_all().await, async |_| hogs.lock().unwrap().clear()).await;
        },
    );
}

#[test]
fn close_cut_before_server_is_retried() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        let network = Proxy::before(&env.settings.database.url).await;
        let worker = worker_through(&env, &network).await;
        let orders = held_by_the_worker(&env, 20, 2 * SECOND).await;
        let is_cut = network.cut_at(&orders[7].id.to_string(), Then::CutBefore);
        wait_for("the cut", async || is_cut()).await;
        assert_each_closed_by_its_alarm(&env, 20).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn close_with_lost_answer_counts_once() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        let network = Proxy::before(&env.settings.database.url).await;
        let worker = worker_through(&env, &network).await;
        let orders = held_by_the_worker(&env, 20, 2 * SECOND).await;
        let is_cut = network.cut_at(&orders[7].id.to_string(), Then::CutAtAnswer);
        wait_for("the cut", async || is_cut()).await;
        assert_each_closed_by_its_alarm(&env, 20).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn database_vanishing_during_close_loses_no_alarm() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        let network = Proxy::before(&env.settings.database.url).await;
        let worker = worker_through(&env, &network).await;
        let orders = held_by_the_worker(&env, 20, 2 * SECOND).await;
        let has_vanished = network.cut_at(&orders[7].id.to_string(), Then::Vanish);
        wait_for("the close under way", async || has_vanished()).await;
        // On a busy machine an earlier batch may have closed some of them.
        let closed = async || usize::try_from(env.closed().await).unwrap();
        let given_back = async || waiting(&env).await + closed().await == 20;
        wait_for("the alarms returned", given_back).await;
        assert_eq!(env.status(&orders[7]).await, "unpaid");
        network.restore();
        assert_each_closed_by_its_alarm(&env, 20).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn locked_table_loses_no_alarm() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        let network = Proxy::before(&env.settings.database.url).await;
        let refusals = network.count(Direction::ToClient, "lock timeout");
        let worker = worker_through(&env, &network).await;
        held_by_the_worker(&env, 50, 2 * SECOND).await;
        let mut transaction = env.pool.begin().await.unwrap();
        sqlx::query("LOCK TABLE orders IN ACCESS EXCLUSIVE MODE").execute(&mut *transaction).await.unwrap();
        wait_for("a try for each of them", async || refusals.get() >= 100).await;
        transaction.rollback().await.unwrap();
        assert_each_closed_by_its_alarm(&env, 50).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn changed_column_type_loses_no_alarm() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        let worker = env.worker().await;
        let before = env.orders(20, Duration::ZERO).await;
        env.deliver(&before).await;
        wait_for("closes, so that the statements are prepared", async || env.closed().await == 20).await;
        for sql in [
            // Postgres alters no column that a view shows.
            "DROP VIEW orders_effective; ALTER TABLE orders ALTER expires_at TYPE timestamptz(3)",
            "ALTER TABLE event_outbox ALTER routing_key TYPE varchar(200)",
        ] {
            sqlx::raw_sql(sql).execute(&env.pool).await.unwrap();
        }
        let after = env.orders(50, SECOND).await;
        env.deliver(&after).await;
        assert_each_closed_by_its_alarm(&env, 70).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

/// The server sets no time limit for a commit that waits for a standby, even if the client has given up.
#[test]
fn hanging_commits_do_not_exhaust_connections() {
    on_private_database(&[], async |env, _| {
        let network = Proxy::before(&env.settings.database.url).await;
        let worker = worker_through(&env, &network).await;
        let orders = held_by_the_worker(&env, 50, 3 * SECOND).await;
        let wait_for_standby = |name: &str| format!("ALTER SYSTEM SET synchronous_standby_names = '{name}'");
        for sql in [wait_for_standby("missing"), "SELECT pg_reload_conf()".into()] {
            sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&env.pool).await.unwrap();
        }
        let before = network.accepted();
        wait_for("commits given up", async || network.accepted() >= before + 15).await;
        let connections = env.count("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'order-timeout'");
        let (connections, closers) = (connections.await, env.settings.worker.closers);
        // The worker's connections, and those being replaced.
        assert!(connections <= 2 * (i64::try_from(closers).unwrap() + 5), "{connections} connections");
        for sql in [wait_for_standby(""), "SELECT pg_reload_conf()".into()] {
            sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&env.pool).await.unwrap();
        }
        assert_each_closed_once(&env, orders.len()).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn statement_timeout_affects_only_its_order() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        let network = Proxy::before(&env.settings.database.url).await;
        let refusals = network.count(Direction::ToClient, "statement timeout");
        let worker = worker_through(&env, &network).await;
        let slow = held_by_the_worker(&env, 30, 3 * SECOND).await.remove(11);
        for sql in [
            "CREATE TABLE slow_orders (id uuid PRIMARY KEY)",
            "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN IF EXISTS (SELECT FROM slow_orders s WHERE s.id = new.id) THEN PERFORM pg_sleep(3600); END IF; RETURN new; END'",
            "CREATE TRIGGER dawdle BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION dawdle()",
        ] {
            sqlx::query(sql).execute(&env.pool).await.unwrap();
        }
        sqlx::query("INSERT INTO slow_orders VALUES ($1)").bind(slow.id).execute(&env.pool).await.unwrap();
        wait_for("every other close", async || env.closed().await == 29).await;
        let before = refusals.get();
        wait_for("two more tries", async || refusals.get() >= before + 2).await;
        // Orders that become due meanwhile are not delayed: retries leave a closer free for the others.
        let fresh = env.order(SECOND).await;
        env.deliver([&fresh]).await;
        wait_for("the fresh order's close", async || env.status(&fresh).await == "closed").await;
        sqlx::query("TRUNCATE slow_orders").execute(&env.pool).await.unwrap();
        assert_each_closed_by_its_alarm(&env, 31).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn ended_idle_connections_blame_no_order() {
    if Private::postgres_version().as_deref() == Some("13") {
        let test = "database_unavailable::ended_idle_connections_blame_no_order";
        return skipped(test, "idle_session_timeout came with PostgreSQL 14");
    }
    on_private_database(&["-c", "idle_session_timeout=300"], async |env: Arc<TestEnv>, _| {
        let network = Proxy::before(&env.settings.database.url).await;
        let worker = worker_through(&env, &network).await;
        for round in 1..=5 {
            held_by_the_worker(&env, 5, SECOND).await;
            wait_for("their closes", async || env.closed().await == 5 * round).await;
        }
        assert_each_closed_by_its_alarm(&env, 25).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn stopping_without_database_returns_all_alarms() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        let network = Proxy::before(&env.settings.database.url).await;
        let worker = worker_through(&env, &network).await;
        held_by_the_worker(&env, 30, 2 * SECOND).await;
        network.cut();
        let refused = network.accepted();
        wait_for("failed attempts", async || network.accepted() > refused + 3).await;
        worker.stop().await;
        assert_eq!(env.closed().await, 0);
        wait_for("the alarms returned", async || waiting(&env).await == 30).await;
        network.restore();
        let worker = worker_through(&env, &network).await;
        assert_each_closed_by_its_alarm(&env, 30).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn stopping_returns_unparkable_alarms() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        let network = Proxy::before(&env.settings.database.url).await;
        let worker = worker_through(&env, &network).await;
        network.cut();
        let due = env.names().due();
        for n in 0..3 {
            let body = format!("no alarm {n}");
            env.publish_raw(&due, order_timeout_amqp::topology::DUE_KEY, body.as_bytes(), Default::default()).await;
        }
        wait_for("the three returned", async || waiting(&env).await == 3).await;
        network.restore();
        wait_for("the three parked", async || env.parked().await.len() >= 3).await;
        wait_for("the three consumed again", async || waiting(&env).await == 0).await;
        worker.stop().await;
        assert_eq!(env.parked().await.len(), 3, "each of them once");
    });
}

#[test]
fn locked_article_delays_no_other_order() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        env.stock("another", 1_000).await;
        let network = Proxy::before(&env.settings.database.url).await;
        let refusals = network.count(Direction::ToClient, "lock timeout");
        let worker = worker_through(&env, &network).await;
        let mut transaction = env.pool.begin().await.unwrap();
        let lock = sqlx::query("SELECT FROM stock WHERE article_id = 'article' FOR UPDATE");
        let orders = env.orders(300, 3 * SECOND).await;
        let unaffected = env.orders_of("another", 20, 3 * SECOND).await;
        // All at the same deadline, so that they are closed in one batch.
        let together = "UPDATE orders SET expires_at = (SELECT max(expires_at) FROM orders)";
        sqlx::query(together).execute(&env.pool).await.unwrap();
        lock.execute(&mut *transaction).await.unwrap();
        env.deliver(&orders).await;
        env.deliver(&unaffected).await;
        for order in &unaffected {
            wait_for("an unaffected order's close", async || env.status(order).await == "closed").await;
        }
        let refused = refusals.get();
        transaction.rollback().await.unwrap();
        assert_each_closed_by_its_alarm(&env, 320).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
        assert!(refused <= 40, "the unaffected orders waited for {refused} refusals");
    });
}

#[test]
fn permanently_locked_article_delays_no_other() {
    TestEnv::builder().run(async |env| {
        env.stock("another", 1_000).await;
        let worker = env.worker().await;
        // Orders of both articles become due continuously, for long enough to see a backlog grow.
        let locked = env.orders(300, SECOND).await;
        let unaffected = env.orders_of("another", 150, SECOND).await;
        let spread = "UPDATE orders o SET expires_at = o.expires_at + n.n * interval '40 ms'
                          FROM (SELECT order_id, (row_number() OVER (PARTITION BY article_id ORDER BY order_id) - 1)
                                       / CASE article_id WHEN 'another' THEN 1 ELSE 2 END AS n FROM order_items) n
                          WHERE n.order_id = o.id";
        sqlx::query(spread).execute(&env.pool).await.unwrap();
        let mut transaction = env.pool.begin().await.unwrap();
        let lock = sqlx::query("SELECT FROM stock WHERE article_id = 'article' FOR UPDATE");
        lock.execute(&mut *transaction).await.unwrap();
        env.deliver(&locked).await;
        env.deliver(&unaffected).await;
        wait_for("every unaffected order's close", async || env.closed().await == 150).await;
        // Orders that wait for the lock are not closed yet, so they do not count.
        env.assert_on_time().await;
        transaction.rollback().await.unwrap();
        assert_each_closed_by_its_alarm(&env, 450).await;
        worker.stop().await;
    });
}

#[test]
fn foreign_order_status_causes_no_spinning() {
    TestEnv::builder().settings(shorten_database_timeouts).run(async |env| {
        sqlx::query("ALTER TYPE order_status ADD VALUE 'refunded'").execute(&env.pool).await.unwrap();
        let network = Proxy::before(&env.settings.database.url).await;
        let worker = worker_through(&env, &network).await;
        let orders = held_by_the_worker(&env, 20, 2 * SECOND).await;
        let ids: Vec<_> = orders.iter().map(|order| order.id).collect();
        let refund = sqlx::query("UPDATE orders SET status = 'refunded' WHERE id = ANY ($1)").bind(ids);
        refund.execute(&env.pool).await.unwrap();
        // A later order is the clock: when it is closed, the others have been due for seconds.
        let sentinel = env.order(9 * SECOND).await;
        let limit = RequestLimit::from_now(&network);
        env.publisher().await.schedule(sentinel.id.to_string(), sentinel.deadline).await.unwrap();
        wait_for("the sentinel's close", async || env.status(&sentinel).await == "closed").await;
        limit.assert_kept();
        worker.stop().await;
    });
}

/// Halts the server's processes behind open connections: these get no answer, while new connections are served. Resumes
/// the processes when dropped.
struct HaltedBackends(Vec<i32>);

impl HaltedBackends {
    async fn of(env: &TestEnv, closer_connections: usize) -> Self {
        let pids = backends_that_read_the_clock(env).await;
        assert_eq!(pids.len(), closer_connections);
        let halted = Self(pids);
        halted.signal(Signal::STOP);
        halted
    }

    /// The processes belong to the test's own server.
    fn signal(&self, signal: Signal) {
        for pid in &self.0 {
            linux::signal(u32::try_from(*pid).unwrap(), signal).unwrap();
        }
    }
}

impl Drop for HaltedBackends {
    fn drop(&mut self) {
        self.signal(Signal::CONT);
    }
}

async fn closer_with(env: &TestEnv, connections: u32) -> Closer {
    let database = Database::connect(&env.settings.database, connections).await.unwrap();
    let close = orders_statements::statements(&database, &env.settings, &Kind::ORDER).await.unwrap().close;
    Closer::prepare(WarmConnections::new(database), close).await.unwrap()
}

async fn backends_that_read_the_clock(env: &TestEnv) -> Vec<i32> {
    let backends = "SELECT pid FROM pg_stat_activity
                    WHERE datname = current_database() AND state = 'idle' AND query = 'SELECT clock_timestamp()'";
    sqlx::query_scalar(backends).fetch_all(&env.pool).await.unwrap()
}

#[test]
fn unresponsive_warm_connections_are_replaced_at_once() {
    on_private_database(&[], async |env, _| {
        let closer = closer_with(&env, 3).await;
        let ask_all = || async {
            tokio::join!(
                closer.connections().sample_clock(),
                closer.connections().sample_clock(),
                closer.connections().sample_clock()
            )
        };
        let warm = ask_all().await;
        assert!(matches!(warm, (Ok(_), Ok(_), Ok(_))), "{warm:?}");

        let _halted = HaltedBackends::of(&env, 3).await;
        let unanswered = closer.connections().sample_clock().await.unwrap_err().to_string();
        assert!(unanswered.contains("did not answer within"), "{unanswered}");
        let answers = ask_all().await;
        assert!(matches!(answers, (Ok(_), Ok(_), Ok(_))), "{answers:?}");
    });
}

#[test]
fn closers_get_warm_connections() {
    TestEnv::builder().without_broker().run(async |env| {
            let closer = closer_with(&env, 3).await;
            let ready = async || {
                let ready = "SELECT count(*) FROM pg_stat_activity
                             WHERE datname = current_database() AND state = 'idle' AND query LIKE '-- Closes orders of%'";
                env.count(ready).await
            };
            closer.warm_up().await.unwrap();
            assert_eq!(ready().await, 3);
            closer.warm_up().await.unwrap();
            assert_eq!(ready().await, 3);
            let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                       WHERE datname = current_database() AND query LIKE '-- Closes orders of%'";
            env.count(end).await;
            wait_for("their end", async || ready().await == 0).await;
            // A connection opened to read the clock has planned no statement.
            closer.connections().sample_clock().await.unwrap();
            closer.warm_up().await.unwrap();
            assert_eq!(ready().await, 3);
        });
}

#[test]
fn clock_reading_survives_ended_connection() {
    TestEnv::builder().without_broker().run(async |env| {
        let closer = closer_with(&env, 1).await;
        closer.connections().sample_clock().await.unwrap();
        let pids = backends_that_read_the_clock(&env).await;
        assert_eq!(pids.len(), 1);
        let end = "SELECT pg_terminate_backend($1)";
        assert!(sqlx::query_scalar::<_, bool>(end).bind(pids[0]).fetch_one(&env.pool).await.unwrap());
        wait_for("its end", async || backends_that_read_the_clock(&env).await.is_empty()).await;
        closer.connections().sample_clock().await.unwrap();
    });
}
