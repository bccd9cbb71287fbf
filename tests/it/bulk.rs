//! Many orders at once: `deadline --where` shows what it chooses, asks, keeps a rate, can be stopped and resumed, and
//! writes into the history who asked for it and why.

use std::io::Write;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use order_timeout_core::order::Timestamp;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Executor};
use uuid::Uuid;

use order_timeout_testkit::linux::{self, Signal};
use order_timeout_testkit::process::{call_with, order_timeout};
use order_timeout_testkit::{Order, TestEnv, wait_for};

const SECOND: Duration = Duration::from_secs(1);
const WHY: [&str; 2] = ["--why", "the app was down"];

async fn call(env: &TestEnv, arguments: &[&str]) -> (i32, String, String) {
    call_with(&env.settings, arguments).await
}

async fn execute(env: &TestEnv, sql: &str) {
    env.pool.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await.unwrap();
}

/// Orders of a channel, a column that the shop has added.
async fn orders_of(env: &TestEnv, channel: &str, count: usize, delay: Duration) -> Vec<Order> {
    execute(env, "ALTER TABLE orders ADD COLUMN IF NOT EXISTS channel text NOT NULL DEFAULT 'web'").await;
    let orders = env.orders(count, delay).await;
    let ids: Vec<_> = orders.iter().map(|order| order.id).collect();
    let update = sqlx::query("UPDATE orders SET channel = $1 WHERE id = ANY ($2)").bind(channel).bind(ids);
    update.execute(&env.pool).await.unwrap();
    orders
}

async fn deadline_of(env: &TestEnv, order: &Order) -> Timestamp {
    let deadline = sqlx::query_scalar("SELECT expires_at FROM orders WHERE id = $1").bind(order.id);
    let order_timeout_client::postgres::Timestamptz(deadline) = deadline.fetch_one(&env.pool).await.unwrap();
    deadline
}

/// The result of a command that was told `--yes --json`.
async fn result_of(env: &TestEnv, arguments: &[&str]) -> (i32, Value) {
    let (code, stdout, stderr) =
        call(env, &[arguments, &WHY[..], &["--yes", "--json", "--rate", "10000"]].concat()).await;
    let answer = serde_json::from_str(&stdout).unwrap_or_else(|_| panic!("{arguments:?}: {stdout}{stderr}"));
    (code, answer)
}

#[test]
fn moves_only_chosen_unpaid_orders() {
    TestEnv::builder().without_broker().run(async |env| {
            let app = orders_of(&env, "app", 5, 3_600 * SECOND).await;
            let web = orders_of(&env, "web", 3, 3_600 * SECOND).await;
            assert!(env.pay(&app[4]).await);
            let command =
                ["deadline", "--where", "channel = 'app' -- all of them", "--in", "+30m", "--who", "night shift"];
            let (code, answer) = result_of(&env, &command).await;
            assert_eq!((code, &answer["result"]["outcomes"]), (0, &json!({ "later": 4 })), "{answer}");
            for order in &app[..4] {
                assert_eq!(deadline_of(&env, order).await, order.deadline + 1_800 * SECOND);
            }
            for order in web.iter().chain([&app[4]]) {
                assert_eq!(deadline_of(&env, order).await, order.deadline);
            }
            let history = "SELECT count(*) FROM order_events WHERE event = 'extended' AND by = 'manual'
                           AND who = 'night shift' AND why = 'the app was down' AND run IS NOT NULL
                           AND reason LIKE 'deadline moved from 2%Z to 2%Z'";
            assert_eq!(env.count(history).await, 4);
            assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 0, "a later deadline needs none");

            // Earlier than before needs an alarm; the sign counts from each order's own deadline.
            let (code, answer) = result_of(&env, &["deadline", "--where", "channel = 'app'", "--in", "-40m"]).await;
            assert_eq!((code, &answer["result"]["outcomes"]), (0, &json!({ "earlier": 4 })), "{answer}");
            assert_eq!(deadline_of(&env, &app[0]).await, app[0].deadline - 600 * SECOND);
            let right = "SELECT count(*) FROM alarm_outbox a JOIN orders o ON o.id::text = a.order_id AND o.expires_at = a.deadline";
            assert_eq!(env.count(right).await, 4);
            let (_, answer) = result_of(&env, &["deadline", "--where", "channel = 'app'", "--in", "-40m"]).await;
            let (_, passed) = result_of(&env, &["deadline", "--where", "channel = 'app'", "--in", "-40m"]).await;
            assert_eq!(answer["result"]["outcomes"], json!({ "earlier": 4 }));
            assert_eq!(passed["result"]["outcomes"], json!({ "passed": 4 }), "never closed by a mistake in the sign");

            // Without a sign it counts from now, and all get the same.
            let (_, answer) = result_of(&env, &["deadline", "--where", "true", "--in", "2h"]).await;
            assert_eq!(answer["result"]["outcomes"], json!({ "later": 7 }));
            assert_eq!(env.count("SELECT count(DISTINCT expires_at) FROM orders WHERE status = 'unpaid'").await, 1);
            env.assert_ledger().await;
        });
}

#[test]
fn preview_shows_figures_and_examples() {
    TestEnv::builder().without_broker().run(async |env| {
        let app = orders_of(&env, "app", 12, 3_600 * SECOND).await;
        orders_of(&env, "app", 1, Duration::ZERO).await;
        execute(
            &env,
            "UPDATE order_items SET quantity = 2; UPDATE stock SET available = available - 13, reserved = 26",
        )
        .await;
        let question = [&["deadline", "--where", "channel = 'app'", "--in", "+30m"][..], &WHY].concat();
        let (code, stdout, stderr) = call(&env, &question).await;
        assert_eq!((code, stdout.as_str()), (1, ""));
        for part in [
            "13 unpaid orders match, 1 of them overdue; they reserve 26 units in 13 items",
            "and 3 more",
            "nothing was changed: there is no terminal to ask at; add --yes to move the deadlines of 13 unpaid orders",
        ] {
            assert!(stderr.contains(part), "lacks {part:?}: {stderr}");
        }
        assert_eq!(stderr.lines().filter(|line| line.contains(" -> ")).count(), 10);
        assert_eq!(deadline_of(&env, &app[0]).await, app[0].deadline, "nothing is done without an answer");
        let (_, answer) = result_of(&env, &["deadline", "--where", "channel = 'app'", "--in", "+30m"]).await;
        let preview = &answer["preview"];
        assert_eq!((&preview["orders"], &preview["overdue"]), (&json!(13), &json!(1)));
        assert_eq!(preview["examples"].as_array().unwrap().len(), 10);
        let (code, answer) = result_of(&env, &["deadline", "--where", "false", "--in", "1h"]).await;
        assert_eq!((code, &answer["preview"]["orders"]), (0, &json!(0)));
    });
}

#[test]
fn condition_can_only_read() {
    TestEnv::builder().without_broker().settings(|settings| settings.database.statement_timeout = SECOND).run(
        async |env| {
            env.orders(2, Duration::ZERO).await;
            for (condition, part) in [
                ("chanel = 'app'", "column \"chanel\" does not exist"),
                ("id = ", "syntax error"),
                ("1", "must be type boolean"),
                ("true); DELETE FROM orders; SELECT (true", "cannot be used"),
                ("nextval('order_events_id_seq') > 0", "read-only transaction"),
                ("pg_sleep(5) IS NOT NULL", "--set database.statement_timeout=1m"),
            ] {
                let arguments = [&["deadline", "--in", "1h", "--where", condition, "--yes"][..], &WHY].concat();
                let (code, stdout, stderr) = call(&env, &arguments).await;
                assert_eq!((code, stdout.as_str()), (1, ""), "{condition}: {stderr}");
                assert!(stderr.contains(part) && stderr.contains("--where"), "{condition}: {stderr}");
                assert_eq!(stderr.lines().count(), 1, "one sentence: {stderr}");
            }
            assert_eq!(env.count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await, 2);
            let (code, _, stderr) = call(&env, &["deadline", "--in", "1h", "--where", "true", "--yes"]).await;
            assert!(code == 2 && stderr.contains("--why"), "{stderr}");
        },
    );
}

#[test]
fn only_manual_closes_name_an_operator() {
    TestEnv::builder().run(async |env| {
        let orders = env.orders(3, Duration::ZERO).await;
        let ids: Vec<String> = orders[..2].iter().map(|order| order.id.to_string()).collect();
        let (code, said, stderr) = call(&env, &[&["close", &ids[0], &ids[1]][..], &WHY].concat()).await;
        assert_eq!((code, env.closed().await), (0, 2), "{said}{stderr}");
        let history = "SELECT count(*) FROM order_events WHERE event = 'closed' AND by = 'manual'
                           AND who <> '' AND why = 'the app was down'";
        assert_eq!(env.count(history).await, 2, "with the user of the system");
        // A worker names neither.
        let worker = env.worker_without_broker().await;
        wait_for("its close", async || env.closed().await == 3).await;
        worker.stop().await;
        let by_worker = "SELECT count(*) FROM order_events WHERE event = 'closed' AND by <> 'manual'
                             AND who IS NULL AND why IS NULL";
        assert_eq!(env.count(by_worker).await, 1);
        env.assert_ledger().await;
    });
}

#[test]
fn failing_and_locked_orders_stay_alone() {
    TestEnv::builder().without_broker().run(async |env| {
        env.stock("bad", 10).await;
        env.orders(30, Duration::ZERO).await;
        env.orders_of("bad", 1, Duration::ZERO).await;
        let locked = env.order(Duration::ZERO).await;
        env.refuse_to_close("bad").await;
        let mut other = env.pool.begin().await.unwrap();
        sqlx::query("SELECT FROM orders WHERE id = $1 FOR UPDATE").bind(locked.id).execute(&mut *other).await.unwrap();
        let bad = "SELECT order_id::text FROM order_items WHERE article_id = 'bad'";
        let bad: String = sqlx::query_scalar(bad).fetch_one(&env.pool).await.unwrap();
        let good = env.order(Duration::ZERO).await;
        let ids = [bad, locked.id.to_string(), good.id.to_string()];
        let (code, said, stderr) = call(&env, &[&["close", &ids[0], &ids[1], &ids[2]][..], &WHY].concat()).await;
        assert_eq!((code, env.closed().await, env.status(&good).await.as_str()), (1, 1, "closed"), "{said}{stderr}");
        assert!(said.contains("busy") && format!("{said}{stderr}").contains("this order stays"), "{said}{stderr}");

        env.orders(5, 3_600 * SECOND).await;
        let (code, answer) = result_of(&env, &["deadline", "--where", "true", "--in", "3h"]).await;
        let result = &answer["result"];
        assert_eq!((code, &result["outcomes"]), (1, &json!({ "busy": 1, "failed": 1, "later": 35 })), "{answer}");
        assert!(result["failed"][0]["why"].as_str().unwrap().contains("this order stays"), "{answer}");
        other.rollback().await.unwrap();
        let (_, answer) = result_of(&env, &["deadline", "--where", "true", "--in", "3h"]).await;
        assert_eq!(answer["result"]["failed"][0]["order_id"].as_str().map(str::len), Some(36), "{answer}");
        assert!(deadline_of(&env, &locked).await.since(locked.deadline) > 7_200 * SECOND);
        env.assert_ledger().await;
    });
}

/// A command that runs until a signal ends it. Killed when dropped.
struct Running(Option<Child>);

impl Running {
    fn start(env: &TestEnv, arguments: &[&str]) -> Self {
        let mut command = order_timeout(&env.settings);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(Some(command.spawn().unwrap()))
    }

    /// Ctrl-C; returns the exit code and the output.
    async fn interrupt(mut self) -> (i32, Value) {
        let child = self.0.take().unwrap();
        linux::signal(child.id(), Signal::INT).unwrap();
        let output = tokio::task::spawn_blocking(move || child.wait_with_output().unwrap()).await.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code().unwrap_or(-1), serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}")))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn interrupted_run_is_resumed() {
    TestEnv::builder().run(async |env| {
        let orders = orders_of(&env, "app", 200, 3_600 * SECOND).await;
        let command =
            [&["deadline", "--where", "channel = 'app'", "--in", "+30m", "--yes", "--json"][..], &WHY].concat();
        let running = Running::start(&env, &[&command[..], &["--rate", "20"]].concat());
        let moved = "SELECT count(*) FROM order_events WHERE event = 'extended'";
        wait_for("the first batches", async || env.count(moved).await >= 8).await;
        let (code, answer) = running.interrupt().await;
        let result = &answer["result"];
        assert_eq!((code, result["stopped"].as_str()), (1, Some("interrupted")));
        let (later, left) = (result["outcomes"]["later"].as_i64().unwrap(), result["left"].as_i64().unwrap());
        assert!(left > 0 && later + left == 200, "{answer}");
        assert_eq!(env.count(moved).await, later, "what it reports is done");

        let run = answer["run"].as_str().unwrap().to_owned();
        let other = Uuid::now_v7().to_string();
        for (arguments, part) in [
            (["--where", "channel = 'app'", "--in", "+30m", "--resume", &other], "no order was moved by such a run"),
            (["--where", "channel = 'app'", "--in", "+31m", "--resume", &run], "was started with another"),
            (["--where", "channel = 'app'", "--in", "30m", "--resume", &run], "was started with another"),
            (["--where", "true", "--in", "+30m", "--resume", &run], "was started with another"),
        ] {
            let (code, _, stderr) = call(&env, &[&["deadline", "--yes"][..], &arguments, &WHY].concat()).await;
            assert!(code == 2 && stderr.contains(part), "{arguments:?}: {stderr}");
        }
        assert_eq!(env.count(moved).await, later, "nothing moved twice");
        let (code, stdout, _) = call(&env, &[&command[..], &["--rate", "10000", "--resume", &run]].concat()).await;
        let answer: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!((code, answer["result"]["outcomes"]["later"].as_i64()), (0, Some(left)));
        for order in &orders {
            assert_eq!(deadline_of(&env, order).await, order.deadline + 1_800 * SECOND, "moved once");
        }
    });
}

/// Answers the question of a command at a terminal; returns its exit code and standard output.
fn answer(env: &TestEnv, arguments: &[&str], answer: &str) -> (i32, String) {
    let (mut operator, program) = linux::terminal().unwrap();
    // Read when the program asks for a line; the terminal keeps it until then.
    writeln!(operator, "{answer}").unwrap();
    let mut command = order_timeout(&env.settings);
    command.args(arguments).stdin(program.try_clone().unwrap()).stderr(program).stdout(Stdio::piped());
    let output = command.output().unwrap();
    (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn only_yes_at_terminal_goes_on() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(3_600 * SECOND).await;
        let command = [&["deadline", "--where", "true", "--in", "+30m"][..], &WHY].concat();
        for no in ["no", "", "y"] {
            assert_eq!(tokio::task::block_in_place(|| answer(&env, &command, no)), (1, String::new()));
            assert_eq!(deadline_of(&env, &order).await, order.deadline);
        }
        let done = tokio::task::block_in_place(|| answer(&env, &command, "yes"));
        assert_eq!(done, (0, "1 later\n".to_owned()));
        assert_eq!(deadline_of(&env, &order).await, order.deadline + 1_800 * SECOND);
    });
}

#[test]
fn single_order_has_sign_and_history() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(3_600 * SECOND).await;
        let id = order.id.to_string();
        for (by, expected) in [("+30m", order.deadline + 1_800 * SECOND), ("-10m", order.deadline + 1_200 * SECOND)] {
            let (code, stdout, stderr) = call(&env, &["deadline", &id, "--in", by, "--why", "asked by phone"]).await;
            assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
            assert_eq!(deadline_of(&env, &order).await, expected);
        }
        let history =
            "SELECT count(*) FROM order_events WHERE event = 'extended' AND who <> '' AND why = 'asked by phone'";
        assert_eq!(env.count(history).await, 2);
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 1, "of the earlier one");
    });
}

#[test]
fn nothing_to_do_says_why() {
    TestEnv::builder().without_broker().run(async |env| {
        env.order(3_600 * SECOND).await;
        env.order(3_600 * SECOND).await;
        let command = ["deadline", "--where", "false", "--in", "1h"];
        let (code, stdout, stderr) = call(&env, &[&command[..], &WHY].concat()).await;
        assert_eq!((code, stdout.as_str()), (0, "nothing to do: no unpaid order matches\n"), "{stderr}");
    });
}

#[test]
fn own_statements_refuse_conditions() {
    TestEnv::builder()
        .without_broker()
        .settings(|settings| {
            let path = |file: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(file).to_str().unwrap().to_owned();
            (settings.orders.close_sql, settings.orders.overdue_sql) =
                (path("tests/fixtures/mapping/default_close.sql"), path("tests/fixtures/mapping/default_overdue.sql"));
        })
        .run(async |env| {
            let command = ["deadline", "--in", "1h", "--where", "true", "--yes"];
            let (code, _, stderr) = call(&env, &[&command[..], &WHY].concat()).await;
            assert!(code == 2 && stderr.contains("update its row yourself"), "{stderr}");
        });
}
