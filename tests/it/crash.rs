//! Workers that are killed, stopped, frozen or duplicated, or that cannot write their log: every order is closed once.

use std::io::Write;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout_testkit::away::is_consumed;
use order_timeout_testkit::process::WorkerProcess;
use order_timeout_testkit::proxy::Proxy;
use order_timeout_testkit::{TIMEOUT, TestEnv, alarms_alone, wait_for};

const SECOND: Duration = Duration::from_secs(1);

/// A worker reads ahead in the database while it has no session, and on a busy machine would close orders before their
/// alarms are delivered again. Those are held until the deadline.
fn without_sweep(settings: &mut Settings) {
    alarms_alone(settings);
    settings.worker.hold_max = 60 * SECOND;
}

/// Messages ready in the processing queue.
async fn waiting(env: &TestEnv) -> usize {
    env.depth(&env.names().timeout()).await as usize
}

/// Asserts that each of the orders was closed once, by its alarm, and that no alarm is left.
async fn assert_each_closed_once(env: &TestEnv, orders: usize) {
    let orders = i64::try_from(orders).unwrap();
    assert_eq!(env.closed().await, orders);
    assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, orders);
    assert_eq!(env.count("SELECT count(*) FROM order_events WHERE event = 'closed'").await, orders);
    assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, orders);
    assert_eq!(env.count("SELECT count(DISTINCT payload ->> 'order_id') FROM event_outbox").await, orders);
    assert_eq!(env.parked().await, []);
    env.assert_nothing_left_undone().await;
    env.assert_ledger().await;
}

#[test]
fn next_worker_closes_killed_workers_alarms() {
    TestEnv::builder().settings(without_sweep).run(async |env| {
        let orders = env.orders(500, 15 * SECOND).await;
        env.deliver(&orders).await;
        let worker = WorkerProcess::start(&env.settings);
        wait_for("500 held alarms", async || waiting(&env).await == 0).await;
        worker.kill();
        wait_for("the alarms back in the queue", async || waiting(&env).await == 500).await;
        assert_eq!(env.closed().await, 0, "killed before the deadline");
        let worker = WorkerProcess::start(&env.settings);
        wait_for("all closed", async || env.closed().await == 500).await;
        assert_eq!(worker.terminate(TIMEOUT), 0);
        assert_each_closed_once(&env, 500).await;
    });
}

#[test]
fn repeatedly_killed_worker_closes_orders_once() {
    TestEnv::builder().settings(alarms_alone).run(async |env| {
        // Deadlines spread over some seconds, so that every kill interrupts work in flight.
        let mut orders = Vec::new();
        for step in 0..60 {
            orders.extend(env.orders(10, Duration::from_millis(100 * step)).await);
        }
        env.deliver(&orders).await;
        for _ in 0..3 {
            let worker = WorkerProcess::start(&env.settings);
            let before = env.closed().await;
            wait_for("the worker at work", async || (env.closed().await > before) || before == 600).await;
            worker.kill();
        }
        let worker = WorkerProcess::start(&env.settings);
        wait_for("all closed", async || env.closed().await == 600).await;
        let sentinel = env.order(SECOND).await;
        env.deliver([&sentinel]).await;
        wait_for("the sentinel's close", async || env.status(&sentinel).await == "closed").await;
        assert_eq!(worker.terminate(TIMEOUT), 0);
        assert_each_closed_once(&env, 601).await;
    });
}

#[test]
fn stopping_worker_returns_held_alarms() {
    TestEnv::builder().settings(without_sweep).run(async |env| {
        let due = env.orders(50, Duration::ZERO).await;
        env.deliver(&due).await;
        let worker = WorkerProcess::start(&env.settings);
        wait_for("the due ones' close", async || env.closed().await == 50).await;
        // Created now, because on a busy machine a worker takes seconds to start and must be stopped before they
        // are due.
        let held = env.orders(300, 10 * SECOND).await;
        env.deliver(&held).await;
        wait_for("300 held alarms", async || waiting(&env).await == 0).await;
        assert_eq!(worker.terminate(TIMEOUT), 0, "it drained in time");
        wait_for("the alarms back in the queue", async || waiting(&env).await == 300).await;
        assert_eq!(env.closed().await, 50, "stopped before the deadline");
        let worker = WorkerProcess::start(&env.settings);
        wait_for("all closed", async || env.closed().await == 350).await;
        assert_eq!(worker.terminate(TIMEOUT), 0);
        assert_each_closed_once(&env, 350).await;
    });
}

#[test]
fn two_workers_close_each_order_once() {
    TestEnv::builder().settings(alarms_alone).run(async |env| {
        let workers = [WorkerProcess::start(&env.settings), WorkerProcess::start(&env.settings)];
        let orders = env.orders(2_000, 3 * SECOND).await;
        // Some alarms twice, so that both workers may close an order at the same time.
        env.deliver(&orders).await;
        env.deliver(&orders[..500]).await;
        wait_for("all closed", async || env.closed().await == 2_000).await;
        let sentinel = env.order(2 * SECOND).await;
        env.deliver([&sentinel]).await;
        wait_for("the sentinel's close", async || env.status(&sentinel).await == "closed").await;
        for worker in workers {
            assert_eq!(worker.terminate(TIMEOUT), 0);
        }
        assert_each_closed_once(&env, 2_001).await;
    });
}

#[test]
fn frozen_worker_loses_alarms_and_recovers() {
    TestEnv::builder()
        .settings(|settings| {
            without_sweep(settings);
            settings.amqp.heartbeat = SECOND;
        })
        .run(async |env| {
            let frozen = WorkerProcess::start(&env.settings);
            let orders = env.orders(200, 6 * SECOND).await;
            env.deliver(&orders).await;
            wait_for("200 held alarms", async || waiting(&env).await == 0).await;
            frozen.halt();
            let other = WorkerProcess::start(&env.settings);
            wait_for("all closed by the other", async || env.closed().await == 200).await;
            // It still has every alarm in memory; all are due, and every receipt is void.
            frozen.go_on();
            let later = env.orders(200, SECOND).await;
            env.deliver(&later).await;
            wait_for("all closed", async || env.closed().await == 400).await;
            assert_eq!(frozen.terminate(TIMEOUT), 0);
            assert_eq!(other.terminate(TIMEOUT), 0);
            assert_each_closed_once(&env, 400).await;
        });
}

/// The capacity of a pipe (pipe(7) on Linux).
const PIPE_BYTES: usize = 65_536;

#[test]
fn unread_log_blocks_neither_closing_nor_stopping() {
    TestEnv::builder().settings(|settings| settings.log.filter = "trace,lapin=off".into()).run(async |env| {
        let (unread, mut log) = std::io::pipe().unwrap();
        log.write_all(&[b'\n'; PIPE_BYTES]).unwrap();
        let worker = WorkerProcess::start_with_stderr(&env.settings, log.into());
        let orders = env.orders(500, SECOND).await;
        env.deliver(&orders).await;
        wait_for("all closed", async || env.closed().await == 500).await;
        assert_eq!(worker.terminate(TIMEOUT), 0);
        drop(unread);
        assert_each_closed_once(&env, 500).await;
    });
}

#[test]
fn worker_without_file_handles_reconnects_later() {
    TestEnv::builder().run(async |env| {
        let network = Proxy::before(&env.settings.amqp.url).await;
        let mut settings = env.settings.clone();
        settings.amqp.url = network.address(&settings.amqp.url);
        let mut worker = WorkerProcess::start(&settings);
        let inbox = env.names().schedule();
        wait_for("the session", async || is_consumed(&env, &inbox).await).await;
        worker.take_away_handles();
        network.cut();
        wait_for("the end of the session", async || !is_consumed(&env, &inbox).await).await;
        network.restore();
        worker.give_handles();
        wait_for("the next session", async || is_consumed(&env, &inbox).await).await;
        assert_eq!(worker.ended(), None);
        assert_eq!(worker.terminate(TIMEOUT), 0);
    });
}
