//! A database that goes away, in whatever manner: no alarm is acknowledged, parked or blamed for it, nothing spins, and
//! when it is back every order is closed once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use order_timeout::close::Closer;
use order_timeout::database::Database;
use secrecy::ExposeSecret;
use sqlx::{Connection, PgConnection};

use crate::support::away::{
    COMING_BACK, be_impatient, held_by_the_worker, meanwhile, on_private_database, worker_through,
};
use crate::support::private::Private;
use crate::support::proxy::{Direction, Proxy, Then};
use crate::support::witness::Witness;
use crate::support::{Stage, on_stage, wait_for, wait_within};

const SECOND: Duration = Duration::from_secs(1);

/// Messages ready in the processing queue.
async fn waiting(stage: &Stage) -> usize {
    stage.depth(&stage.names().timeout()).await as usize
}

/// The worker has asked neither much nor often since then: it does not spin.
struct Bound<'a> {
    network: &'a Proxy,
    asked_before: usize,
    began: Instant,
}

impl<'a> Bound<'a> {
    fn from_now(network: &'a Proxy) -> Self {
        Self { network, asked_before: network.asked(), began: Instant::now() }
    }

    /// The relay looks into two outboxes ten times a second, the sweep four times and the clock once, each of them with
    /// a question or two, and as many to see whether the connection still lives: eighty a second where nothing else is
    /// done. Whoever spins asks a thousand times a second.
    fn assert_kept(&self) {
        let asked = self.network.asked() - self.asked_before;
        let allowed = 200.0 + 120.0 * self.began.elapsed().as_secs_f64();
        #[allow(clippy::cast_precision_loss)]
        let is_kept = (asked as f64) < allowed;
        assert!(is_kept, "asked {asked} times within {:?}", self.began.elapsed());
    }
}

/// Insists that each of so many orders was closed once by its alarm, and all the rest of [`assert_each_closed_once`].
async fn assert_each_closed_by_its_alarm(stage: &Stage, orders: usize) {
    assert_each_closed_once(stage, orders).await;
    let orders = i64::try_from(orders).unwrap();
    assert_eq!(stage.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, orders);
}

/// Insists that each of so many orders was closed once, that its event was sent, and that no alarm was blamed or is
/// left.
async fn assert_each_closed_once(stage: &Stage, orders: usize) {
    let orders = i64::try_from(orders).unwrap();
    wait_within(COMING_BACK, "every close", async || stage.closed().await == orders).await;
    let sent = "SELECT count(*) FROM event_outbox WHERE sent_at IS NOT NULL";
    wait_within(COMING_BACK, "every event sent", async || stage.count(sent).await == orders).await;
    assert_eq!(stage.count("SELECT count(*) FROM order_events WHERE event = 'closed'").await, orders);
    assert_eq!(stage.count("SELECT count(DISTINCT payload ->> 'order_id') FROM event_outbox").await, orders);
    assert_eq!(stage.parked().await, []);
    stage.assert_ledger().await;
}

/// Alarms in the worker's hands fall due while the database is away: they go back to the broker, and are closed when
/// it is there again.
async fn survive(stage: &Stage, go_away: impl AsyncFnOnce(&Proxy), come_back: impl AsyncFnOnce(&Proxy)) {
    let network = Proxy::before(&stage.settings.database.url).await;
    let publisher = stage.publisher().await;
    let worker = worker_through(stage, &network).await;
    held_by_the_worker(stage, 30, 3 * SECOND).await;
    let by_lane = stage.orders(10, 4 * SECOND).await;
    let by_wheel = stage.orders(10, 12 * SECOND).await;

    go_away(&network).await;
    let bound = Bound::from_now(&network);
    // Scheduling takes no database.
    let alarms = by_lane.iter().chain(&by_wheel).map(|order| (order.order_id(), order.deadline));
    assert_eq!(publisher.schedule_all(alarms).await, Ok(20));
    wait_within(COMING_BACK, "the alarms given back", async || waiting(stage).await >= 30).await;
    bound.assert_kept();

    come_back(&network).await;
    // By alarm or sweep: a worker that had closed its session does not wait for alarms, and may find the orders first.
    assert_each_closed_once(stage, 50).await;
    worker.stop().await;
    stage.assert_nothing_left_undone().await;
}

#[test]
fn a_database_that_is_stopped_costs_no_alarm() {
    on_private_database(&[], async |stage: Arc<Stage>, database: Arc<Private>| {
        survive(&stage, async |_| meanwhile(|| database.stop()), async |_| meanwhile(|| database.restart())).await;
    });
}

#[test]
fn a_database_that_is_killed_costs_no_alarm() {
    on_private_database(&[], async |stage: Arc<Stage>, database: Arc<Private>| {
        survive(&stage, async |_| meanwhile(|| database.kill()), async |_| meanwhile(|| database.restart())).await;
    });
}

#[test]
fn a_database_that_has_become_read_only_costs_no_alarm() {
    on_private_database(&[], async |stage: Arc<Stage>, _| {
        // As after a failover that left the worker with the old primary. In force for open connections too.
        let turn = async |sql: &'static str| {
            sqlx::query(sql).execute(&stage.pool).await.unwrap();
            sqlx::query("SELECT pg_reload_conf()").execute(&stage.pool).await.unwrap();
        };
        survive(
            &stage,
            async |_| turn("ALTER SYSTEM SET default_transaction_read_only = on").await,
            async |_| turn("ALTER SYSTEM RESET default_transaction_read_only").await,
        )
        .await;
    });
}

#[test]
fn a_network_that_resets_every_connection_costs_no_alarm() {
    on_stage(be_impatient, async |stage| {
        survive(&stage, async |network| network.cut(), async |network| network.restore()).await;
    });
}

#[test]
fn a_database_host_that_has_vanished_costs_no_alarm() {
    on_stage(be_impatient, async |stage| {
        survive(&stage, async |network| network.stall(), async |network| network.restore()).await;
    });
}

#[test]
fn a_database_whose_answers_are_lost_costs_no_alarm() {
    on_stage(be_impatient, async |stage| {
        survive(&stage, async |network| network.stall_one_way(Direction::ToClient), async |network| network.restore())
            .await;
    });
}

#[test]
fn a_database_that_stands_still_costs_no_alarm() {
    on_private_database(&[], async |stage: Arc<Stage>, database: Arc<Private>| {
        survive(&stage, async |_| database.halt(), async |_| database.go_on()).await;
    });
}

#[test]
fn a_database_without_a_connection_to_spare_costs_no_alarm() {
    on_private_database(
        &["-c", "max_connections=20", "-c", "superuser_reserved_connections=0"],
        async |stage: Arc<Stage>, _| {
            let hogs = std::sync::Mutex::new(Vec::new());
            let url = stage.settings.database.url_of("postgres");
            let take_all = async || {
                let of_workers = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'order-timeout'";
                let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'order-timeout'";
                wait_for("every connection taken, none of them the worker's", async || {
                    stage.count(end).await;
                    while let Ok(hog) = PgConnection::connect(url.expose_secret()).await {
                        hogs.lock().unwrap().push(hog);
                    }
                    stage.count(of_workers).await == 0
                })
                .await;
            };
            survive(&stage, async |_| take_all().await, async |_| hogs.lock().unwrap().clear()).await;
        },
    );
}

#[test]
fn a_close_cut_off_before_the_server_heard_of_it_is_tried_again() {
    on_stage(be_impatient, async |stage| {
        let network = Proxy::before(&stage.settings.database.url).await;
        let worker = worker_through(&stage, &network).await;
        let orders = held_by_the_worker(&stage, 20, 2 * SECOND).await;
        let is_cut = network.cut_at(&orders[7].id.to_string(), Then::CutBefore);
        wait_for("the cut", async || is_cut()).await;
        assert_each_closed_by_its_alarm(&stage, 20).await;
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
    });
}

#[test]
fn a_close_whose_answer_is_lost_after_its_commit_is_found_closed() {
    on_stage(be_impatient, async |stage| {
        let network = Proxy::before(&stage.settings.database.url).await;
        let worker = worker_through(&stage, &network).await;
        let orders = held_by_the_worker(&stage, 20, 2 * SECOND).await;
        let is_cut = network.cut_at(&orders[7].id.to_string(), Then::CutAtTheAnswer);
        wait_for("the cut", async || is_cut()).await;
        assert_each_closed_by_its_alarm(&stage, 20).await;
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
    });
}

#[test]
fn a_database_that_vanishes_in_the_middle_of_a_close_costs_no_alarm() {
    on_stage(be_impatient, async |stage| {
        let network = Proxy::before(&stage.settings.database.url).await;
        let worker = worker_through(&stage, &network).await;
        let orders = held_by_the_worker(&stage, 20, 2 * SECOND).await;
        let has_vanished = network.cut_at(&orders[7].id.to_string(), Then::Vanish);
        wait_for("the close under way", async || has_vanished()).await;
        // On a busy machine some were closed before it, in a batch of their own.
        let closed = async || usize::try_from(stage.closed().await).unwrap();
        let given_back = async || waiting(&stage).await + closed().await == 20;
        wait_within(COMING_BACK, "the alarms given back", given_back).await;
        assert_eq!(stage.status(&orders[7]).await, "unpaid");
        network.restore();
        assert_each_closed_by_its_alarm(&stage, 20).await;
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
    });
}

#[test]
fn a_table_that_is_locked_for_a_while_costs_no_alarm() {
    on_stage(be_impatient, async |stage| {
        let network = Proxy::before(&stage.settings.database.url).await;
        let refusals = network.count(Direction::ToClient, "lock timeout");
        let worker = worker_through(&stage, &network).await;
        held_by_the_worker(&stage, 50, 2 * SECOND).await;
        let mut transaction = stage.pool.begin().await.unwrap();
        sqlx::query("LOCK TABLE orders IN ACCESS EXCLUSIVE MODE").execute(&mut *transaction).await.unwrap();
        wait_for("a try for each of them", async || refusals.get() >= 100).await;
        transaction.rollback().await.unwrap();
        assert_each_closed_by_its_alarm(&stage, 50).await;
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
    });
}

#[test]
fn a_column_that_changes_its_type_costs_no_alarm() {
    on_stage(be_impatient, async |stage| {
        let worker = stage.worker().await;
        let before = stage.orders(20, Duration::ZERO).await;
        stage.deliver(&before).await;
        wait_for("closes by statements that are prepared by now", async || stage.closed().await == 20).await;
        for sql in [
            "ALTER TABLE orders ALTER expires_at TYPE timestamptz(3)",
            "ALTER TABLE event_outbox ALTER routing_key TYPE varchar(200)",
        ] {
            sqlx::query(sql).execute(&stage.pool).await.unwrap();
        }
        let after = stage.orders(50, SECOND).await;
        stage.deliver(&after).await;
        assert_each_closed_by_its_alarm(&stage, 70).await;
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
    });
}

/// A commit that waits for a standby is under no time limit at the server, whoever may still be waiting for it.
#[test]
fn commits_that_hang_do_not_take_one_connection_after_the_other() {
    on_private_database(&[], async |stage, _| {
        let network = Proxy::before(&stage.settings.database.url).await;
        let worker = worker_through(&stage, &network).await;
        let orders = held_by_the_worker(&stage, 50, 3 * SECOND).await;
        let wait_for_a_standby = |whom: &str| format!("ALTER SYSTEM SET synchronous_standby_names = '{whom}'");
        for sql in [wait_for_a_standby("nobody"), "SELECT pg_reload_conf()".into()] {
            sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&stage.pool).await.unwrap();
        }
        let before = network.accepted();
        wait_within(COMING_BACK, "commits given up", async || network.accepted() >= before + 15).await;
        let connections = stage.count("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'order-timeout'");
        let (connections, closers) = (connections.await, stage.settings.worker.closers);
        // Its own, and those that are just being replaced.
        assert!(connections <= 2 * (i64::try_from(closers).unwrap() + 5), "{connections} connections");
        for sql in [wait_for_a_standby(""), "SELECT pg_reload_conf()".into()] {
            sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&stage.pool).await.unwrap();
        }
        assert_each_closed_once(&stage, orders.len()).await;
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
    });
}

#[test]
fn an_order_that_exceeds_the_statement_timeout_holds_up_nobody_else_and_is_not_parked() {
    on_stage(be_impatient, async |stage| {
        let network = Proxy::before(&stage.settings.database.url).await;
        let refusals = network.count(Direction::ToClient, "statement timeout");
        let worker = worker_through(&stage, &network).await;
        let slow = held_by_the_worker(&stage, 30, 3 * SECOND).await.remove(11);
        for sql in [
            "CREATE TABLE slow_orders (id uuid PRIMARY KEY)",
            "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN IF EXISTS (SELECT FROM slow_orders s WHERE s.id = new.id) THEN PERFORM pg_sleep(3600); END IF; RETURN new; END'",
            "CREATE TRIGGER dawdle BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION dawdle()",
        ] {
            sqlx::query(sql).execute(&stage.pool).await.unwrap();
        }
        sqlx::query("INSERT INTO slow_orders VALUES ($1)").bind(slow.id).execute(&stage.pool).await.unwrap();
        wait_for("everybody else's close", async || stage.closed().await == 29).await;
        let before = refusals.get();
        wait_for("two more tries", async || refusals.get() >= before + 2).await;
        // Others that fall due meanwhile are not held up: what was tried before leaves a closer to the rest.
        let fresh = stage.order(SECOND).await;
        stage.deliver([&fresh]).await;
        wait_for("a fresh one's close", async || stage.status(&fresh).await == "closed").await;
        sqlx::query("TRUNCATE slow_orders").execute(&stage.pool).await.unwrap();
        assert_each_closed_by_its_alarm(&stage, 31).await;
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
    });
}

#[test]
fn idle_connections_that_the_server_ends_blame_no_order() {
    on_private_database(&["-c", "idle_session_timeout=300"], async |stage: Arc<Stage>, _| {
        let network = Proxy::before(&stage.settings.database.url).await;
        let worker = worker_through(&stage, &network).await;
        for round in 1..=5 {
            held_by_the_worker(&stage, 5, SECOND).await;
            wait_for("their close", async || stage.closed().await == 5 * round).await;
        }
        assert_each_closed_by_its_alarm(&stage, 25).await;
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
    });
}

#[test]
fn a_worker_asked_to_stop_while_the_database_is_away_gives_everything_back() {
    on_stage(be_impatient, async |stage| {
        let network = Proxy::before(&stage.settings.database.url).await;
        let worker = worker_through(&stage, &network).await;
        held_by_the_worker(&stage, 30, 2 * SECOND).await;
        network.cut();
        let refused = network.accepted();
        wait_for("a try in vain", async || network.accepted() > refused + 3).await;
        worker.stop().await;
        assert_eq!(stage.closed().await, 0);
        wait_for("the alarms given back", async || waiting(&stage).await == 30).await;
        network.restore();
        let worker = worker_through(&stage, &network).await;
        assert_each_closed_by_its_alarm(&stage, 30).await;
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
    });
}

#[test]
fn what_cannot_be_parked_is_given_back_as_well() {
    on_stage(be_impatient, async |stage| {
        let network = Proxy::before(&stage.settings.database.url).await;
        let worker = worker_through(&stage, &network).await;
        network.cut();
        let due = stage.names().due();
        for n in 0..3 {
            let body = format!("no alarm {n}");
            stage.publish_raw(&due, order_timeout::topology::DUE_KEY, body.as_bytes(), Default::default()).await;
        }
        wait_within(COMING_BACK, "the three given back", async || waiting(&stage).await == 3).await;
        network.restore();
        wait_within(COMING_BACK, "the three parked", async || stage.parked().await.len() >= 3).await;
        wait_within(COMING_BACK, "the three taken again", async || waiting(&stage).await == 0).await;
        worker.stop().await;
        assert_eq!(stage.parked().await.len(), 3, "each of them once");
    });
}

#[test]
fn a_locked_article_holds_up_nobody_elses_orders() {
    on_stage(be_impatient, async |stage| {
        stage.stock("another", 1_000).await;
        let network = Proxy::before(&stage.settings.database.url).await;
        let refusals = network.count(Direction::ToClient, "lock timeout");
        let worker = worker_through(&stage, &network).await;
        let mut transaction = stage.pool.begin().await.unwrap();
        let lock = sqlx::query("SELECT FROM stock WHERE article_id = 'article' FOR UPDATE");
        let orders = stage.orders(300, 3 * SECOND).await;
        let innocent = stage.orders_of("another", 20, 3 * SECOND).await;
        // All of them at the same moment, so that they are closed in one batch.
        let together = "UPDATE orders SET expires_at = (SELECT max(expires_at) FROM orders)";
        sqlx::query(together).execute(&stage.pool).await.unwrap();
        lock.execute(&mut *transaction).await.unwrap();
        stage.deliver(&orders).await;
        stage.deliver(&innocent).await;
        for order in &innocent {
            wait_for("an innocent order's close", async || stage.status(order).await == "closed").await;
        }
        let refused = refusals.get();
        transaction.rollback().await.unwrap();
        assert_each_closed_by_its_alarm(&stage, 320).await;
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
        assert!(refused <= 40, "the innocent waited for {refused} refusals");
    });
}

#[test]
fn an_article_that_stays_locked_makes_no_order_of_another_late() {
    on_stage(
        |_| {},
        async |stage| {
            let witness = Witness::open(&stage).await;
            stage.stock("another", 1_000).await;
            let worker = stage.worker().await;
            // Orders of both fall due all the time, for as long as it takes to see a backlog grow.
            let locked = stage.orders(300, SECOND).await;
            let innocent = stage.orders_of("another", 150, SECOND).await;
            let spread = "UPDATE orders o SET expires_at = o.expires_at + n.n * interval '40 ms'
                          FROM (SELECT order_id, (row_number() OVER (PARTITION BY article_id ORDER BY order_id) - 1)
                                       / CASE article_id WHEN 'another' THEN 1 ELSE 2 END AS n FROM order_items) n
                          WHERE n.order_id = o.id";
            sqlx::query(spread).execute(&stage.pool).await.unwrap();
            let mut transaction = stage.pool.begin().await.unwrap();
            let lock = sqlx::query("SELECT FROM stock WHERE article_id = 'article' FOR UPDATE");
            lock.execute(&mut *transaction).await.unwrap();
            stage.deliver(&locked).await;
            stage.deliver(&innocent).await;
            wait_for("every innocent order's close", async || stage.closed().await == 150).await;
            // Whoever waits for the lock is not closed yet.
            witness.assert_on_time(&stage).await;
            transaction.rollback().await.unwrap();
            assert_each_closed_by_its_alarm(&stage, 450).await;
            worker.stop().await;
        },
    );
}

#[test]
fn an_order_in_a_status_of_the_shops_own_does_not_make_the_worker_spin() {
    on_stage(be_impatient, async |stage| {
        sqlx::query("ALTER TYPE order_status ADD VALUE 'refunded'").execute(&stage.pool).await.unwrap();
        let network = Proxy::before(&stage.settings.database.url).await;
        let worker = worker_through(&stage, &network).await;
        let orders = held_by_the_worker(&stage, 20, 2 * SECOND).await;
        let ids: Vec<_> = orders.iter().map(|order| order.id).collect();
        let refund = sqlx::query("UPDATE orders SET status = 'refunded' WHERE id = ANY ($1)").bind(ids);
        refund.execute(&stage.pool).await.unwrap();
        // Whoever is due later is the clock: the others have been due for long when it is closed.
        let witness = stage.order(9 * SECOND).await;
        let bound = Bound::from_now(&network);
        stage.publisher().await.schedule(witness.id.to_string(), witness.deadline).await.unwrap();
        wait_for("the witness' close", async || stage.status(&witness).await == "closed").await;
        bound.assert_kept();
        worker.stop().await;
    });
}

/// The server's processes that kept connections lead to, halted: they do not answer, while whoever connects anew is served.
/// They go on when this is dropped.
struct HaltedBackends(Vec<i32>);

impl HaltedBackends {
    async fn of(stage: &Stage, closer_connections: usize) -> Self {
        let pids = backends_that_told_the_time(stage).await;
        assert_eq!(pids.len(), closer_connections);
        let halted = Self(pids);
        halted.signal(libc::SIGSTOP);
        halted
    }

    fn signal(&self, signal: i32) {
        for pid in &self.0 {
            // SAFETY: no memory is involved; the processes are of the test's own server.
            assert_eq!(unsafe { libc::kill(*pid, signal) }, 0);
        }
    }
}

impl Drop for HaltedBackends {
    fn drop(&mut self) {
        self.signal(libc::SIGCONT);
    }
}

async fn closer_with(stage: &Stage, connections: u32) -> Closer {
    let database = Database::connect(&stage.settings.database, connections).await.unwrap();
    Closer::prepare(database, "").await.unwrap()
}

async fn backends_that_told_the_time(stage: &Stage) -> Vec<i32> {
    let backends = "SELECT pid FROM pg_stat_activity
                    WHERE datname = current_database() AND state = 'idle' AND query = 'SELECT clock_timestamp()'";
    sqlx::query_scalar(backends).fetch_all(&stage.pool).await.unwrap()
}

#[test]
fn kept_connections_that_nobody_answers_make_room_for_others_at_once() {
    on_private_database(&[], async |stage, _| {
        let closer = closer_with(&stage, 3).await;
        let ask_all = || async { tokio::join!(closer.sample_clock(), closer.sample_clock(), closer.sample_clock()) };
        let kept = ask_all().await;
        assert!(matches!(kept, (Ok(_), Ok(_), Ok(_))), "{kept:?}");

        let _halted = HaltedBackends::of(&stage, 3).await;
        let unanswered = closer.sample_clock().await.unwrap_err().to_string();
        assert!(unanswered.contains("did not answer within"), "{unanswered}");
        let answers = ask_all().await;
        assert!(matches!(answers, (Ok(_), Ok(_), Ok(_))), "{answers:?}");
    });
}

#[test]
fn closers_find_every_connection_open_and_the_statement_planned() {
    on_stage(
        |_| {},
        async |stage| {
            let closer = closer_with(&stage, 3).await;
            let ready = async || {
                let ready = "SELECT count(*) FROM pg_stat_activity
                             WHERE datname = current_database() AND state = 'idle' AND query LIKE '-- Closes those%'";
                stage.count(ready).await
            };
            closer.make_ready().await.unwrap();
            assert_eq!(ready().await, 3);
            closer.make_ready().await.unwrap();
            assert_eq!(ready().await, 3);
            let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                       WHERE datname = current_database() AND query LIKE '-- Closes those%'";
            stage.count(end).await;
            wait_for("their end", async || ready().await == 0).await;
            // Opened to read the clock, it has planned nothing.
            closer.sample_clock().await.unwrap();
            closer.make_ready().await.unwrap();
            assert_eq!(ready().await, 3);
        },
    );
}

#[test]
fn a_clock_that_is_read_on_a_connection_which_the_server_has_ended_is_read_on_another() {
    on_stage(
        |_| {},
        async |stage| {
            let closer = closer_with(&stage, 1).await;
            closer.sample_clock().await.unwrap();
            let pids = backends_that_told_the_time(&stage).await;
            assert_eq!(pids.len(), 1);
            let end = "SELECT pg_terminate_backend($1)";
            assert!(sqlx::query_scalar::<_, bool>(end).bind(pids[0]).fetch_one(&stage.pool).await.unwrap());
            wait_for("its end", async || backends_that_told_the_time(&stage).await.is_empty()).await;
            closer.sample_clock().await.unwrap();
        },
    );
}
