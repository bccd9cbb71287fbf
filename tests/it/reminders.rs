//! Reminders are announced once for an order and a deadline, and never for an order that needs none.

use std::time::Duration;

use order_timeout::config::kinds::Remind;
use order_timeout::effects::sweep::Sweeper;
use order_timeout::operations::orders_statements;
use order_timeout::outbox::reminders::Reminders;
use order_timeout::postgres::Database;
use order_timeout_core::kind::Kind;
use order_timeout_testkit::page::with_page;
use order_timeout_testkit::{TestEnv, wait_for};

const MINUTE: Duration = Duration::from_secs(60);
const FIVE_MINUTES: Duration = Duration::from_secs(300);

async fn execute(env: &TestEnv, sql: &str) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())).execute(&env.pool).await.unwrap();
}

async fn reminders(env: &TestEnv) -> Reminders {
    let database = Database::connect(&env.settings.database, 2).await.unwrap();
    let overdue = orders_statements::statements(&database, &env.settings, &Kind::ORDER).await.unwrap().overdue;
    let sweeper = Sweeper::prepare(database.clone(), overdue).await.unwrap();
    Reminders::new(database, sweeper.statement(), "order", vec![FIVE_MINUTES])
}

async fn announced(env: &TestEnv) -> Vec<(String, String)> {
    sqlx::query_as("SELECT payload ->> 'order_id', payload ->> 'remind_s' FROM event_outbox WHERE type = 'order.expiring.v1' ORDER BY created_at, id")
        .fetch_all(&env.pool)
        .await
        .unwrap()
}

async fn order(env: &TestEnv, minutes: u32) -> String {
    sqlx::query_scalar(
        "INSERT INTO orders (id, expires_at) VALUES (gen_random_uuid(), now() + make_interval(mins => $1)) RETURNING id::text",
    )
    .bind(i32::try_from(minutes).unwrap())
    .fetch_one(&env.pool)
    .await
    .unwrap()
}

#[test]
fn each_deadline_is_announced_once() {
    TestEnv::builder().without_broker().with_clock().run(async |env| {
        let created_late = order(&env, 3).await;
        let reminders = reminders(&env).await;
        assert_eq!(reminders.announce().await.unwrap(), (0, false), "{created_late}: its moment had passed");
        let [kept, paid] = [order(&env, 10).await, order(&env, 10).await];
        execute(&env, &format!("UPDATE orders SET status = 'paid', paid_at = now() WHERE id = '{paid}'")).await;
        assert_eq!(reminders.announce().await.unwrap(), (0, false));
        env.advance(Duration::from_secs(301)).await;
        assert_eq!(reminders.announce().await.unwrap(), (1, false));
        assert_eq!(reminders.announce().await.unwrap(), (0, false));
        assert_eq!(announced(&env).await, [(kept.clone(), "300".to_owned())]);

        // Created, and moved to a time, after the moment.
        order(&env, 4).await;
        assert_eq!(reminders.announce().await.unwrap(), (0, false));
        // Another deadline is announced again.
        execute(&env, &format!("UPDATE orders SET expires_at = now() + interval '301 s' WHERE id = '{kept}'")).await;
        env.advance(Duration::from_secs(2)).await;
        assert_eq!(reminders.announce().await.unwrap(), (1, false));
        assert_eq!(announced(&env).await.len(), 2);
    });
}

#[test]
fn workers_announce_each_order_once() {
    TestEnv::builder().without_broker().with_clock().run(async |env| {
        let workers = [reminders(&env).await, reminders(&env).await, reminders(&env).await];
        workers[0].announce().await.unwrap();
        execute(
            &env,
            "INSERT INTO orders (id, expires_at) SELECT gen_random_uuid(), now() + interval '6 min' + n * interval '1 ms' FROM generate_series(1, 5000) n",
        )
        .await;
        env.advance(Duration::from_secs(120)).await;
        let empty = async |reminders: &Reminders| {
            while reminders.announce().await.unwrap().1 {}
        };
        tokio::join!(empty(&workers[0]), empty(&workers[1]), empty(&workers[2]));
        // The last page may have been taken by a worker while the others found nothing to do.
        empty(&workers[0]).await;
        let (events, orders): (i64, i64) = sqlx::query_as(
            "SELECT count(*), count(DISTINCT payload ->> 'order_id') FROM event_outbox WHERE type = 'order.expiring.v1'",
        )
        .fetch_one(&env.pool)
        .await
        .unwrap();
        assert_eq!((events, orders), (5_000, 5_000));
    });
}

#[test]
fn page_counts_sent_reminders() {
    TestEnv::builder()
        .settings(with_page(None))
        .settings(|settings| {
            settings.kinds.entry(Kind::ORDER).or_default().remind = vec![Remind(FIVE_MINUTES)];
        })
        .run(async |env| {
            let worker = env.worker().await;
            wait_for("the reminders to begin", async || env.count("SELECT count(*) FROM reminder_progress").await == 1)
                .await;
            execute(
                &env,
                "INSERT INTO orders (id, expires_at)
                 SELECT gen_random_uuid(), now() + interval '301 s' + n * interval '5 min' FROM generate_series(0, 2) n",
            )
            .await;
            let row = "<th scope=\"row\">5m</th><td class=\"number\">1</td>";
            let page = async || crate::api::get(&worker, "/").await.body;
            wait_for("the reminder", async || page().await.contains(row)).await;
            worker.stop().await;
        });
}

/// As when the clock is set back: what has been read lies further ahead than the horizon.
#[test]
fn progress_never_goes_back() {
    TestEnv::builder().without_broker().run(async |env| {
        let reminders = reminders(&env).await;
        reminders.announce().await.unwrap();
        order(&env, 7).await;
        execute(&env, "UPDATE reminder_progress SET reached = now() + interval '8 min'").await;
        assert_eq!(reminders.announce().await.unwrap(), (0, false));
        let kept = env.count("SELECT count(*) FROM reminder_progress WHERE reached > now() + interval '7 min'").await;
        assert_eq!(kept, 1);
    });
}

#[test]
fn passed_deadlines_are_not_announced() {
    TestEnv::builder().without_broker().with_clock().run(async |env| {
        let reminders = reminders(&env).await;
        reminders.announce().await.unwrap();
        let (soon, later) = (order(&env, 6).await, order(&env, 12).await);
        // No worker ran meanwhile.
        env.advance(Duration::from_secs(480)).await;
        assert_eq!(reminders.announce().await.unwrap(), (1, false), "{soon} is being closed");
        assert_eq!(announced(&env).await, [(later, "300".to_owned())]);
    });
}

#[test]
fn worker_announces_what_its_kind_says() {
    TestEnv::builder()
        .settings(|settings| {
            let kind = settings.kinds.entry(Kind::ORDER).or_default();
            kind.remind = vec![Remind(10 * MINUTE), Remind(60 * MINUTE)];
        })
        .with_clock()
        .run(async |env| {
            let worker = env.worker().await;
            wait_for("the reminders to begin", async || env.count("SELECT count(*) FROM reminder_progress").await == 2)
                .await;
            // It is past the moment of one reminder already.
            let id = order(&env, 30).await;
            env.advance(25 * MINUTE).await;
            let expected = [(id, "600".to_owned())];
            wait_for("the reminder", async || announced(&env).await == expected).await;
            env.advance(5 * MINUTE).await;
            wait_for("the close", async || env.closed().await == 1).await;
            assert_eq!(announced(&env).await, expected);
            worker.stop().await;
        });
}
