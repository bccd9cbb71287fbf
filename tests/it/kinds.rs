//! Several kinds of deadlines in one deployment: each closes on time by every path, and none delays another.

use std::time::Duration;

use lapin::BasicProperties;
use order_timeout::Settings;
use order_timeout::config::kinds::{CloseSettings, KindSettings, Names as Columns, TableSettings};
use order_timeout::http::READYZ;
use order_timeout_amqp::envelope::{self, Route};
use order_timeout_amqp::publisher::{ConfirmedPublisher, PublishError};
use order_timeout_amqp::topology::{DUE_KEY, Names};
use order_timeout_client::postgres::NewAlarm;
use order_timeout_core::delay::Placement;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::{OrderId, Timestamp};
use order_timeout_testkit::figures::{Figures, get, serve_http};
use order_timeout_testkit::page::with_page;
use order_timeout_testkit::paths::repository;
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{TestEnv, wait_for};
use sqlx::AssertSqlSafe;

const SECOND: Duration = Duration::from_secs(1);

pub(crate) fn kind(name: &str) -> Kind {
    Kind::new(name).unwrap()
}

/// A kind of orders in a table of its name, whose ids are numbers: each has a deadline and a state.
pub(crate) fn mapped(settings: &mut Settings, name: &str) {
    let text = |text: &str| text.to_owned();
    let table = TableSettings {
        table: format!("public.{name}"),
        id: Columns(vec![text("id")]),
        open: text("state = 'open'"),
        paid: text("state = 'done'"),
        deadline: text("until"),
        time_zone: None,
        amount: None,
        currency: None,
        minor_units: None,
        close: CloseSettings::Set([(text("state"), text("closed")), (text("closed_at"), text("now"))].into()),
        closing: None,
        pay: None,
        reopen: None,
        attempts: None,
        stock: Vec::new(),
        also: Vec::new(),
        is_built_in: false,
    };
    let settings = settings.kinds.entry(kind(name)).or_default();
    *settings = KindSettings {
        lanes: vec!["2s".parse().unwrap()],
        event: Some(format!("order.{name}_over")),
        table: Some(table),
        ..KindSettings::default()
    };
}

fn with_acceptance(settings: &mut Settings) {
    mapped(settings, "acceptance");
    serve_http(settings);
}

pub(crate) async fn create_table(env: &TestEnv, name: &str) {
    let create = format!(
        "CREATE TABLE public.{name} (id bigserial PRIMARY KEY, state text NOT NULL DEFAULT 'open',
             until timestamptz NOT NULL, closed_at timestamptz, CHECK (closed_at >= until));
         CREATE INDEX ON public.{name} (until, id) WHERE state = 'open'"
    );
    sqlx::raw_sql(AssertSqlSafe(create)).execute(&env.pool).await.unwrap();
}

/// Creates an order that is due after this delay, and returns its id and deadline.
pub(crate) async fn create(env: &TestEnv, name: &str, delay: Duration) -> (String, Timestamp) {
    let insert = format!(
        "INSERT INTO public.{name} (until) VALUES (clock_timestamp() + make_interval(secs => $1)) RETURNING id, until"
    );
    let (id, until): (i64, time::OffsetDateTime) =
        sqlx::query_as(AssertSqlSafe(insert)).bind(delay.as_secs_f64()).fetch_one(&env.pool).await.unwrap();
    (id.to_string(), Timestamp::from(until))
}

pub(crate) async fn closed(env: &TestEnv, name: &str) -> i64 {
    let count = format!("SELECT count(*) FROM public.{name} WHERE state = 'closed'");
    sqlx::query_scalar(AssertSqlSafe(count)).fetch_one(&env.pool).await.unwrap()
}

/// How many events of this type there are for each path that closed.
async fn events(env: &TestEnv, event: &str) -> Vec<(String, i64)> {
    let select = "SELECT payload ->> 'closed_by', count(*) FROM event_outbox
                  WHERE type = $1 AND routing_key || '.v1' = type GROUP BY 1 ORDER BY 1";
    sqlx::query_as(select).bind(event).fetch_all(&env.pool).await.unwrap()
}

#[test]
fn two_kinds_close_by_every_path() {
    TestEnv::builder().settings(with_acceptance).run(async |env| {
        create_table(&env, "acceptance").await;
        let worker = env.worker().await;
        let (publisher, acceptance) = (env.publisher().await, kind("acceptance"));
        // Through a lane, through the wheel, through the inbox as a service in another language does, and through the
        // outbox; each beside an order of the default kind.
        for delay in [2 * SECOND, 8 * SECOND, 3 * SECOND] {
            let (id, deadline) = create(&env, "acceptance", delay).await;
            publisher.schedule_kind(&acceptance, id, deadline).await.unwrap();
            let order = env.order(delay).await;
            publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
        }
        let (id, deadline) = create(&env, "acceptance", 4 * SECOND).await;
        let body = Alarm { kind: acceptance.clone(), order_id: OrderId::new(id).unwrap(), deadline }.to_bytes();
        env.publish_raw(&env.names().schedule(), "", &body, BasicProperties::default().with_delivery_mode(2)).await;
        let (id, deadline) = create(&env, "acceptance", 3 * SECOND).await;
        let mut connection = env.pool.acquire().await.unwrap();
        NewAlarm::new(id, deadline).kind(acceptance).schedule(&mut connection).await.unwrap();

        wait_for("the closes of both kinds", async || closed(&env, "acceptance").await == 5 && env.closed().await == 3)
            .await;
        env.assert_closed_by_alarms().await;
        assert_eq!(events(&env, "order.acceptance_over.v1").await, [("alarm".to_owned(), 5)]);
        assert_eq!(events(&env, "order.closed.v1").await, [("alarm".to_owned(), 3)]);
        let reasons = "SELECT count(*) FROM event_outbox
                       WHERE kind = 'acceptance' AND payload ->> 'reason' = 'acceptance' AND type LIKE '%acceptance%'";
        assert_eq!(env.count(reasons).await, 5);
        let figures = Figures::of(&worker).await;
        assert_eq!(figures.get("orders_closed_total{by=\"alarm\",kind=\"acceptance\"}"), 5.0);
        assert_eq!(figures.get("orders_closed_total{by=\"alarm\"}"), 3.0);
        worker.stop().await;
        assert_eq!(env.parked().await, []);
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn sweep_closes_kind_without_alarms() {
    let adjust = |settings: &mut Settings| {
        with_acceptance(settings);
        settings.sweep.grace = Duration::from_millis(200);
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        create_table(&env, "acceptance").await;
        let worker = env.worker().await;
        create(&env, "acceptance", SECOND).await;
        wait_for("the close", async || closed(&env, "acceptance").await == 1).await;
        assert_eq!(events(&env, "order.acceptance_over.v1").await, [("sweep".to_owned(), 1)]);
        worker.stop().await;
    });
}

#[test]
fn unknown_kind_is_parked() {
    TestEnv::builder().settings(with_acceptance).run(async |env| {
        create_table(&env, "acceptance").await;
        let worker = env.worker().await;
        let deadline = Timestamp::now_by_local_clock() + SECOND;
        for body in [
            Alarm { kind: kind("trial"), order_id: OrderId::new("7").unwrap(), deadline }.to_bytes(),
            br#"{"kind":"Not A Kind","order_id":"8","deadline":"2026-11-20T10:30:00Z"}"#.to_vec(),
        ] {
            env.publish_raw(&env.names().schedule(), "", &body, BasicProperties::default()).await;
        }
        wait_for("both parked", async || env.parked().await.len() == 2).await;
        let mut parked = env.parked().await;
        parked.sort();
        let [(unknown, why, id), (unreadable, what, _)] = &parked[..] else { unreachable!() };
        assert_eq!((unknown.as_str(), unreadable.as_str(), id.as_deref()), ("unknown_kind", "unreadable", Some("7")));
        assert!(why.contains("[kinds.trial]") && what.contains("names no kind"), "{parked:?}");
        worker.stop().await;
        let (code, listed, _) = call_with(&without_file(&env), &["parked", "list", "--json"]).await;
        assert!(code == 0 && listed.contains("\"kind\":\"trial\""), "{listed}");
    });
}

/// For a child process, which needs no table for what it is asked.
fn without_file(env: &TestEnv) -> Settings {
    let mut settings = env.settings.clone();
    settings.kinds.clear();
    settings
}

#[test]
fn worker_forwards_alarms_of_other_kinds() {
    TestEnv::builder().settings(with_acceptance).run(async |env| {
        create_table(&env, "acceptance").await;
        let only = |name: &str| {
            let mut settings = env.settings.clone();
            settings.worker.kinds = vec![kind(name)];
            settings
        };
        // It serves the default kind alone, and sends on what comes through the inbox: near, and far.
        let orders = order_timeout_testkit::RunningWorker::start(only("order")).await;
        let publisher = env.publisher().await;
        for delay in [SECOND, 7 * SECOND] {
            let (id, deadline) = create(&env, "acceptance", delay).await;
            publisher.schedule_kind(&kind("acceptance"), id, deadline).await.unwrap();
        }
        let queue = env.names().timeout_of(&kind("acceptance"));
        wait_for("both in the kind's own queue", async || env.depth(&queue).await == 2).await;
        assert_eq!((closed(&env, "acceptance").await, env.parked().await), (0, Vec::new()));
        let figures = Figures::of(&orders).await;
        assert_eq!(figures.find("alarms_held{kind=\"acceptance\"}"), None);
        orders.stop().await;
        // The other team's worker, with which the default kind's alarms are in its queue.
        let acceptance = order_timeout_testkit::RunningWorker::start(only("acceptance")).await;
        wait_for("the closes", async || closed(&env, "acceptance").await == 2).await;
        let order = env.order(SECOND).await;
        publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
        wait_for("the order's alarm sent on", async || env.depth(&env.names().timeout()).await == 1).await;
        acceptance.stop().await;
        assert_eq!(env.status(&order).await, "unpaid");
    });
}

#[test]
fn failing_and_locked_kinds_delay_no_other() {
    let adjust = |settings: &mut Settings| {
        for name in ["failing", "locked", "flowing"] {
            mapped(settings, name);
        }
        serve_http(settings);
        settings.worker.requeue_after = 2 * SECOND;
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        for name in ["failing", "locked", "flowing"] {
            create_table(&env, name).await;
        }
        let worker = env.worker().await;
        // One kind's statement fails from now on, another's table is locked.
        sqlx::raw_sql("ALTER TABLE public.failing RENAME COLUMN state TO other").execute(&env.pool).await.unwrap();
        let mut lock = env.pool.begin().await.unwrap();
        sqlx::raw_sql("LOCK TABLE public.locked IN ACCESS EXCLUSIVE MODE").execute(&mut *lock).await.unwrap();
        let publisher = env.publisher().await;
        let deadline = Timestamp::now_by_local_clock() + 2 * SECOND;
        for name in ["failing", "locked"] {
            let ids: Vec<String> = (1..=500).map(|id: i64| id.to_string()).collect();
            publisher.schedule_all_kind(&kind(name), ids.iter().map(|id| (id, deadline))).await.unwrap();
        }
        let unhealthy = async || {
            let (_, text) = get(&worker, READYZ).await;
            text.contains("kind failing: database: ") && text.contains("kind locked: ")
        };
        wait_for("both kinds named as not ready", unhealthy).await;

        for delay in [2 * SECOND, 5 * SECOND] {
            for _ in 0..20 {
                let (id, deadline) = create(&env, "flowing", delay).await;
                publisher.schedule_kind(&kind("flowing"), id, deadline).await.unwrap();
            }
        }
        let order = env.order(3 * SECOND).await;
        publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
        wait_for("the other kinds' closes", async || {
            closed(&env, "flowing").await == 40 && env.status(&order).await == "closed"
        })
        .await;
        assert_eq!(events(&env, "order.flowing_over.v1").await, [("alarm".to_owned(), 40)]);
        env.assert_closed_by_alarms().await;
        let (_, text) = get(&worker, READYZ).await;
        assert!(!text.contains("kind flowing:") && !text.contains("kind order:"), "{text}");
        lock.rollback().await.unwrap();
        worker.stop().await;
    });
}

#[test]
fn dead_letters_keep_key_of_kind() {
    TestEnv::builder().settings(with_acceptance).run(async |env| {
        env.declare_slots().await;
        let (names, acceptance) = (env.names(), kind("acceptance"));
        let confirmed = ConfirmedPublisher::connect(&env.settings.amqp, "test").await.unwrap();
        let now = Timestamp::now_by_local_clock();
        let message = |kind: &Kind, slot: u16, mandatory_in: &Names| {
            let alarm = Alarm { kind: kind.clone(), order_id: OrderId::new("7").unwrap(), deadline: now + SECOND };
            let placement = Placement::Slot { ring: "1s-12".into(), slot, ttl: Duration::from_millis(200) };
            envelope::address(alarm.into(), Route::to(&placement, kind, mandatory_in), now)
        };
        for kind in [&Kind::ORDER, &acceptance] {
            confirmed.publish(message(kind, 3, &names)).await.unwrap();
        }
        let (order, other) = (names.timeout(), names.timeout_of(&acceptance));
        wait_for("each in its kind's queue", async || env.depth(&order).await == 1 && env.depth(&other).await == 1)
            .await;
        assert_eq!((env.take_out(&order).await.len(), env.take_out(&other).await.len()), (1, 1), "exactly once");
        // The header routes nothing on the wheel's exchange: without its slot the alarm is returned.
        for kind in [&Kind::ORDER, &acceptance] {
            let returned = confirmed.publish(message(kind, 99, &names)).await;
            assert!(matches!(returned, Err(PublishError::Unroutable(_))), "{returned:?}");
        }
        assert_eq!((env.depth(&order).await, env.depth(&other).await), (0, 0));
    });
}

#[test]
fn alarm_in_wrong_queue_is_forwarded() {
    TestEnv::builder().settings(with_acceptance).run(async |env| {
        create_table(&env, "acceptance").await;
        let worker = env.worker().await;
        let (id, deadline) = create(&env, "acceptance", SECOND).await;
        let alarm = Alarm { kind: kind("acceptance"), order_id: OrderId::new(id).unwrap(), deadline };
        env.publish_raw(&env.names().due(), DUE_KEY, &alarm.to_bytes(), BasicProperties::default()).await;
        wait_for("the close", async || closed(&env, "acceptance").await == 1).await;
        assert_eq!(events(&env, "order.acceptance_over.v1").await, [("alarm".to_owned(), 1)]);
        worker.stop().await;
        env.assert_drained().await;
    });
}

#[test]
fn command_line_works_by_kind() {
    let from_file = |settings: &mut Settings| {
        let file = repository().join("tests/fixtures/kinds/acceptance.toml");
        settings.kinds = Settings::load(Some(&file), &[]).expect("a valid kind").kinds;
    };
    TestEnv::builder().settings(from_file).with_clock().run(async |env| {
        create_table(&env, "acceptance").await;
        let run = async |arguments: &[&str]| {
            let (code, stdout, stderr) = call_with(&env.settings, arguments).await;
            assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}: {stdout}");
            stdout
        };
        run(&["setup"]).await;
        let sql = run(&["sql", "--kind", "acceptance"]).await;
        assert!(sql.contains("'acceptance.closed.v1'") && sql.contains("kinds.acceptance.table"), "{sql}");
        let (id, _) = create(&env, "acceptance", 3_600 * SECOND).await;
        assert!(
            run(&["forecast", "--orders", "--kind", "acceptance", "--next", "2h"]).await.contains(&format!("  {id} "))
        );
        assert!(run(&["forecast", "--kind", "acceptance"]).await.contains(": 1 orders"));
        run(&["adopt", "--install", "--kind", "acceptance"]).await;
        let moved = run(&["deadline", &id, "--kind", "acceptance", "--in", "10s"]).await;
        assert!(moved.contains("an alarm for it is written"), "{moved}");
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox WHERE kind = 'acceptance'").await, 1);
        let shown = call_with(&env.settings, &["explain", &id, "--kind", "acceptance", "--json"]).await.1;
        assert!(shown.contains("\"kind\":\"acceptance\"") && shown.contains("\"alarms\":[{"), "{shown}");
        run(&["schedule", &id, "--kind", "acceptance"]).await;
        let unknown = call_with(&env.settings, &["schedule", &id, "--kind", "acceptanse", "--in", "20m"]).await;
        assert!(unknown.0 == 2 && unknown.2.contains("there is no kind \"acceptanse\""), "{unknown:?}");
        env.advance(10 * SECOND).await;
        assert!(run(&["close", &id, "--kind", "acceptance"]).await.contains(": closed"));
        assert_eq!(closed(&env, "acceptance").await, 1);
        let checked = call_with(&env.settings, &["adopt", "--kind", "acceptance", "--check"]).await;
        assert!(checked.1.contains("kinds.acceptance.table"), "{checked:?}");
    });
}

#[test]
fn api_and_page_know_every_kind() {
    let adjust = |settings: &mut Settings| {
        mapped(settings, "acceptance");
        with_page(None)(settings);
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        create_table(&env, "acceptance").await;
        let worker = env.worker().await;
        let (id, _) = create(&env, "acceptance", 90 * SECOND).await;
        create(&env, "acceptance", SECOND).await;
        wait_for("the close", async || closed(&env, "acceptance").await == 1).await;
        let json = async |path: &str| -> serde_json::Value {
            let (status, text) = get(&worker, path).await;
            assert_eq!(status, 200, "{path}: {text}");
            serde_json::from_str(&text).unwrap()
        };
        let listed = json("/api/v1/forecast/orders?kind=acceptance").await;
        assert_eq!(listed["orders"][0]["order_id"], id, "{listed}");
        assert_eq!(json("/api/v1/forecast/orders").await["orders"], serde_json::json!([]));
        assert_eq!(json("/api/v1/forecast?kind=acceptance&next=10m").await["total"]["orders"], 1);
        let told = json("/api/v1/orders/1?kind=acceptance").await;
        assert_eq!(told["kind"], "acceptance", "{told}");
        let kinds = json("/api/v1/status").await["kinds"].clone();
        assert_eq!((&kinds[0]["kind"], &kinds[1]["kind"]), (&"order".into(), &"acceptance".into()), "{kinds}");
        let (status, problem) = get(&worker, "/api/v1/forecast?kind=seat").await;
        assert!(status == 404 && problem.contains("give one of order, acceptance"), "{problem}");

        let (_, page) = get(&worker, "/").await;
        for part in ["Kinds of deadlines", "/forecast?kind=acceptance", "Due in the next six hours: acceptance"] {
            assert!(page.contains(part), "lacks {part}: {page}");
        }
        let (_, page) = get(&worker, "/forecast?kind=acceptance").await;
        assert!(page.contains(&format!("href=\"/orders/{id}?kind=acceptance\"")), "{page}");
        worker.stop().await;
    });
}
