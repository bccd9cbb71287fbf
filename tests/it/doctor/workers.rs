//! One fault of the workers after the other.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::QueueDeleteOptions;
use order_timeout::operations::doctor::examine;
use order_timeout_core::kind::Kind;
use order_timeout_core::problem::Cause;
use order_timeout_testkit::away::{meanwhile, on_private_database};
use order_timeout_testkit::paths::repository;
use order_timeout_testkit::process::WorkerProcess;
use order_timeout_testkit::{RunningWorker, TIMEOUT, TestEnv, wait_for};

use super::{Stack, here, only, register};

#[test]
fn each_fault_of_workers_is_found() {
    on_private_database(&[], async |env, _server| here(faults_of_workers_are_found(env)));
}

async fn faults_of_workers_are_found(env: Arc<TestEnv>) {
    let mut stack = Stack::new(env).await;
    // No worker runs, and its alarms wait.
    stack.sql("INSERT INTO alarm_outbox (order_id, deadline, created_at) VALUES ('1', now() + interval '1 h', now() - interval '5 min')").await;
    assert!(stack.found(Cause::RelayStalled).await.fix.contains("start a worker"));
    let worker = WorkerProcess::start(&stack.settings);
    wait_for("the alarm sent", async || stack.report().await.problems().next().is_none()).await;

    // Another worker has another lead; then it is stopped.
    register(&stack, "{order}", r#"{"delay.lead": "99s"}"#).await;
    assert!(stack.found(Cause::WorkersDisagree).await.what.contains("host shop-2 (pid 17) has delay.lead \"99s\""));
    stack.sql("DELETE FROM order_timeout_workers WHERE host = 'shop-2'").await;
    stack.assert_nothing_found("that worker stopped").await;

    // What only a worker can find, until it finds it no more.
    let found =
        r#"[{"cause": "alarms_circulate", "what": "w", "why": "y", "fix": "f"}, {"cause": "of_a_later_version"}]"#;
    register(&stack, "{order}", "{}").await;
    stack.sql(&format!("UPDATE order_timeout_workers SET problems = '{found}' WHERE host = 'shop-2'")).await;
    let problem = stack.found(Cause::AlarmsCirculate).await;
    assert_eq!(problem.what, "w (host shop-2, pid 17)");
    stack.sql("DELETE FROM order_timeout_workers WHERE host = 'shop-2'").await;
    stack.assert_nothing_found("that worker stopped as well").await;

    // An order that a trigger keeps open. No worker runs that could close it before the trigger is there. The sweep's grace is
    // short.
    assert_eq!(meanwhile(|| worker.terminate(TIMEOUT)), 0);
    stack.settings.sweep.grace = Duration::ZERO;
    stack.env.order(Duration::ZERO).await;
    stack.sql("UPDATE orders SET expires_at = now() - interval '90 seconds'").await;
    stack.env.refuse_to_close("article").await;
    stack.found(Cause::NoWorker).await;
    let worker = WorkerProcess::start(&stack.settings);
    wait_for("a worker registered", async || {
        !stack.report().await.problems().any(|problem| problem.cause == Cause::NoWorker)
    })
    .await;
    stack.found(Cause::OrdersOverdue).await;
    stack.sql("DROP TRIGGER refuse ON orders").await;
    wait_for("the order closed", async || stack.report().await.problems().next().is_none()).await;

    // A worker that is frozen takes messages and is not alive; it is resumed.
    worker.halt();
    let found = stack.found_in_time(Cause::ForeignConsumers).await;
    worker.go_on();
    assert!(found.fix.contains("restart a worker that hangs"), "{found:?}");
    wait_for("the worker alive", async || stack.report().await.exit_code() == 0).await;

    // A kind that no worker serves, until one does.
    assert_eq!(meanwhile(|| worker.terminate(TIMEOUT)), 0);
    kind_without_worker_is_found(&stack).await;

    // A worker that is alive and has no session, until one has.
    register(&stack, "{order}", "{}").await;
    assert!(stack.found(Cause::AlarmsNotArriving).await.what.contains("no worker reads"));
    let worker = WorkerProcess::start(&stack.settings);
    stack.sql("DELETE FROM order_timeout_workers WHERE host = 'shop-2'").await;
    wait_for("a session", async || stack.report().await.problems().next().is_none()).await;
    assert_eq!(meanwhile(|| worker.terminate(TIMEOUT)), 0);
}

async fn kind_without_worker_is_found(stack: &Stack) {
    let kind = Kind::new("acceptance").unwrap();
    let mut settings = stack.settings.clone();
    settings.kinds.entry(kind.clone()).or_default();
    settings.topology().declare(stack.env.broker()).await.unwrap();
    let worker = RunningWorker::start(settings.clone()).await;
    let report = async || examine(&settings, &stack.options).await;
    wait_for("a worker", async || report().await.problems().map(|problem| problem.cause).eq([Cause::KindNotServed]))
        .await;
    assert!(only(&report().await, Cause::KindNotServed).what.contains("no worker serves the kind acceptance"));

    let mut of_kind = settings.clone();
    let path = |file: &str| repository().join(file).to_str().unwrap().to_owned();
    let entry = of_kind.kinds.get_mut(&kind).unwrap();
    (entry.close_sql, entry.overdue_sql) =
        (path("tests/fixtures/mapping/default_close.sql"), path("tests/fixtures/nothing_overdue.sql"));
    of_kind.worker.kinds = vec![kind.clone()];
    let other = RunningWorker::start(of_kind).await;
    wait_for("its worker", async || report().await.problems().next().is_none()).await;
    worker.stop().await;
    other.stop().await;
    let queue = stack.env.names().timeout_of(&kind);
    stack.env.channel().queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
}
