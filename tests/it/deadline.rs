//! Another deadline for an order: the row is the truth, an alarm that comes early waits, an earlier deadline has an alarm
//! of its own.

use std::time::Duration;

use order_timeout::database::Timestamptz;
use order_timeout::message::write_rfc3339;
use order_timeout::topology::Topology;
use order_timeout::{Moved, Timestamp, move_deadline_in};
use secrecy::ExposeSecret;
use serde_json::{Value, json};

use crate::support::away::{be_impatient, with_database_behind};
use crate::support::process::{call_with, order_timeout, run};
use crate::support::proxy::{Proxy, Then};
use crate::support::{Order, TIMEOUT, TestEnv, wait_for, with_env};

/// Moves the order's deadline there and says what became of the wish.
async fn move_to(env: &TestEnv, order: &Order, deadline: Timestamp) -> Moved {
    move_deadline_in(&env.pool, order.id.to_string(), deadline).await.unwrap()
}

/// Messages in all queues of the env.
async fn alarms_at_the_broker(env: &TestEnv) -> u32 {
    let mut alarms = 0;
    for queue in Topology::new(&env.settings).queues {
        alarms += env.depth(&queue.name).await;
    }
    alarms
}

#[test]
fn an_order_extended_a_thousand_times_keeps_one_alarm_and_is_closed_at_the_last_deadline() {
    with_env(
        |_| {},
        async |env| {
            let order = env.order(Duration::from_secs(2)).await;
            env.publisher().await.schedule(order.id.to_string(), order.deadline).await.unwrap();
            let mut transaction = env.pool.begin().await.unwrap();
            let mut last = order.deadline;
            for _ in 0..1_000 {
                last = last + Duration::from_millis(4);
                let moved = move_deadline_in(&mut *transaction, order.id.to_string(), last).await.unwrap();
                assert_eq!(moved, Moved::Later);
            }
            transaction.commit().await.unwrap();
            assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 0);
            // It may be on its way from one queue to the next.
            wait_for("one alarm", async || alarms_at_the_broker(&env).await == 1).await;

            let worker = env.worker().await;
            wait_for("the close", async || env.closed().await == 1).await;
            assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 1);
            worker.stop().await;
            assert_eq!(alarms_at_the_broker(&env).await, 0);
            env.assert_ledger().await;
        },
    );
}

#[test]
fn a_shortened_order_is_closed_at_the_earlier_deadline_by_an_alarm() {
    with_env(
        |_| {},
        async |env| {
            let worker = env.worker().await;
            let order = env.order(Duration::from_secs(600)).await;
            env.publisher().await.schedule(order.id.to_string(), order.deadline).await.unwrap();
            let sooner = order.deadline - Duration::from_secs(598);
            assert_eq!(move_to(&env, &order, sooner).await, Moved::Earlier);
            wait_for("the close", async || env.closed().await == 1).await;
            assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 1);
            worker.stop().await;
            env.assert_ledger().await;
        },
    );
}

#[test]
fn the_deadline_of_an_order_that_is_not_unpaid_stands() {
    with_env(
        |_| {},
        async |env| {
            let order = env.order(Duration::from_secs(60)).await;
            assert!(env.pay(&order).await);
            let sooner = order.deadline - Duration::from_secs(1);
            let stands = Moved::Stands { status: "paid".into(), deadline: order.deadline };
            assert_eq!(move_to(&env, &order, sooner).await, stands);
            let stranger = Order { id: uuid::Uuid::now_v7(), deadline: order.deadline };
            assert_eq!(move_to(&env, &stranger, order.deadline).await, Moved::Unknown);
            assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 0);
        },
    );
}

#[test]
fn who_waits_for_somebody_who_makes_the_order_unpaid_moves_its_deadline() {
    with_env(
        |_| {},
        async |env| {
            for wanted_in in [Duration::from_secs(7_200), Duration::from_secs(1_800)] {
                let order = env.order(Duration::from_secs(3_600)).await;
                let close_soon = "UPDATE orders SET status = 'closing', next_attempt_at = now() WHERE id = $1";
                sqlx::query(close_soon).bind(order.id).execute(&env.pool).await.unwrap();
                let mut other = env.pool.begin().await.unwrap();
                let make_unpaid = "UPDATE orders SET status = 'unpaid', next_attempt_at = NULL WHERE id = $1";
                sqlx::query(make_unpaid).bind(order.id).execute(&mut *other).await.unwrap();
                let wanted = order.deadline - Duration::from_secs(3_600) + wanted_in;
                let commit_when_somebody_waits = async {
                    env.wait_for_a_wait().await;
                    other.commit().await.unwrap();
                };
                let (moved, ()) = tokio::join!(move_to(&env, &order, wanted), commit_when_somebody_waits);
                assert_eq!(moved, if wanted > order.deadline { Moved::Later } else { Moved::Earlier });
                assert_eq!(deadline_of(&env, &order).await, wanted, "what is said is what stands there");
            }
            assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 1, "of the earlier one");
        },
    );
}

async fn deadline_of(env: &TestEnv, order: &Order) -> Timestamp {
    let deadline = sqlx::query_scalar("SELECT expires_at FROM orders WHERE id = $1").bind(order.id);
    let Timestamptz(deadline) = deadline.fetch_one(&env.pool).await.unwrap();
    deadline
}

#[test]
fn a_deadline_that_a_trigger_keeps_is_not_said_to_have_moved() {
    with_env(
        |_| {},
        async |env| {
            let order = env.order(Duration::from_secs(60)).await;
            sqlx::raw_sql(
                "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
                 CREATE TRIGGER keep BEFORE UPDATE OF expires_at ON orders FOR EACH ROW EXECUTE FUNCTION keep();",
            )
            .execute(&env.pool)
            .await
            .unwrap();
            let second = Duration::from_secs(1);
            for wanted in [order.deadline - second, order.deadline + second] {
                let stands = Moved::Stands { status: "unpaid".into(), deadline: order.deadline };
                assert_eq!(move_to(&env, &order, wanted).await, stands);
            }
            assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 0);
            let id = order.id.to_string();
            let (code, said, _) = run(order_timeout(&env.settings).args(["deadline", "--order-id", &id, "--in", "1h"]));
            assert!(code == 1 && said.contains("a trigger in the database keeps its deadline"), "{said}");
        },
    );
}

#[test]
fn by_hand_it_counts_from_the_time_that_the_database_has() {
    with_env(
        |_| {},
        async |env| {
            let order = env.order(Duration::from_secs(7_200)).await;
            // A database whose clock is an hour ahead of everybody else's.
            let name = env.settings.database.url.expose_secret().rsplit('/').next().unwrap();
            let ahead = format!(
                "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
                 AS $$ SELECT pg_catalog.clock_timestamp() + interval '1 hour' $$;
                 ALTER DATABASE {name} SET search_path = public, pg_catalog;"
            );
            sqlx::raw_sql(sqlx::AssertSqlSafe(ahead)).execute(&env.pool).await.unwrap();
            let id = order.id.to_string();
            let half_an_hour_ahead = write_rfc3339(Timestamp::now_by_local_clock() + Duration::from_secs(1_800));
            let deadline =
                |when: [&str; 2]| run(order_timeout(&env.settings).args(["deadline", "--order-id", &id]).args(when));
            let (code, _, error) = deadline(["--deadline", &half_an_hour_ahead]);
            assert!(code == 1 && error.contains("has passed"), "{error}");
            let (code, said, error) = deadline(["--in", "10m"]);
            assert!(code == 0 && said.contains("an alarm for it is written"), "{said}{error}");
            let ahead = deadline_of(&env, &order).await.since(Timestamp::now_by_local_clock());
            assert!(ahead > Duration::from_secs(3_600), "{ahead:?} ahead of those whose clock is behind");
        },
    );
}

#[test]
fn by_hand_it_says_what_became_of_the_deadline() {
    with_env(
        |_| {},
        async |env| {
            let order = env.order(Duration::from_secs(60)).await;
            let deadline = |env: &TestEnv, arguments: &[&str]| {
                run(order_timeout(&env.settings).args(["deadline", "--order-id"]).args(arguments))
            };
            let id = order.id.to_string();
            let json = |arguments: &[&str]| -> (i32, Value) {
                let (code, said, _) = deadline(&env, &[arguments, &["--json"]].concat());
                (code, serde_json::from_str(&said).unwrap())
            };
            let (code, said) = json(&[&id, "--in", "1h"]);
            assert_eq!((code, &said["outcome"], &said["order_id"]), (0, &"later".into(), &id.as_str().into()));
            let (code, said, _) = deadline(&env, &[&id, "--in", "1h"]);
            assert!(code == 0 && said.contains("an alarm that was already scheduled adapts to it"), "{said}");
            for passed in [["--deadline", "2020-01-01T00:00:00Z"], ["--in", "0s"]] {
                let (code, _, error) = deadline(&env, &[&[id.as_str()][..], &passed].concat());
                assert!(code == 1 && error.contains("has passed") && error.contains("order-timeout close"), "{error}");
            }
            let (code, said, _) = deadline(&env, &[&id, "--in", "30s"]);
            assert!(code == 0 && said.contains("an alarm for it is written"), "{said}");
            assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 1);
            let (_, said) = json(&[&id, "--in", "2h"]);
            let last = &said["deadline"];

            assert!(env.pay(&order).await);
            let (code, said, _) = deadline(&env, &[&id, "--in", "1h"]);
            assert!(code == 1 && said.contains("is paid; its deadline is unchanged"), "{said}");
            let stands = json!({ "order_id": id, "status": "paid", "deadline": last, "outcome": "stands" });
            assert_eq!(
                json(&[&id, "--in", "1h"]),
                (1, stands),
                "the deadline that the order has, not the one wished for"
            );
            let stranger = uuid::Uuid::now_v7().to_string();
            let unknown = json!({ "order_id": stranger, "status": null, "deadline": null, "outcome": "unknown" });
            assert_eq!(json(&[&stranger, "--in", "1h"]), (1, unknown));
            let (code, _, error) = deadline(&env, &["no-such-order", "--in", "1h"]);
            assert!(code == 1 && error.contains("no-such-order") && error.contains("a UUID"), "{error}");
            let (code, _, error) = deadline(&env, &[&id, "--in", "4000d"]);
            assert!(code == 1 && error.contains("delay.max_delay"), "{error}");
            let (code, _, error) = deadline(&env, &[&id]);
            assert!(code == 2 && error.contains("--in"), "{error}");
            let own = ["--set", "orders.close_sql=own.sql", "--set", "orders.overdue_sql=own.sql"];
            let (code, _, error) = deadline(&env, &[&[id.as_str(), "--in", "1h"][..], &own].concat());
            assert!(code == 1 && error.contains("update its row yourself"), "{error}");
        },
    );
}

/// The program's answer, by this way to the database.
async fn by_way_of(network: &Proxy, env: &TestEnv, arguments: &[&str]) -> (i32, String, String) {
    let settings = with_database_behind(env, network);
    // The program ends with the network that the panic takes along.
    let said = tokio::time::timeout(TIMEOUT, call_with(&settings, arguments));
    said.await.expect("an answer within the test's timeout")
}

#[test]
fn where_the_answer_is_lost_nobody_claims_that_the_deadline_stands() {
    with_env(
        |_| {},
        async |env| {
            let order = env.order(Duration::from_secs(60)).await;
            let network = Proxy::before(&env.settings.database.url).await;
            // It goes by when the statement is prepared and is to be run.
            let id = order.id.to_string();
            let is_cut = network.cut_at(&id, Then::CutAtTheAnswer);
            let (code, _, error) = by_way_of(&network, &env, &["deadline", "--order-id", &id, "--in", "1h"]).await;
            assert!(is_cut());
            assert!(code == 1 && error.contains("not known to have moved; try again"), "{error}");
            assert!(!error.contains("stands"), "{error}");
            // It reached the database, which may be a moment behind.
            let has_moved = "SELECT count(*) FROM orders WHERE expires_at > clock_timestamp() + interval '50 minutes'";
            wait_for("the deadline moved", async || env.count(has_moved).await == 1).await;
        },
    );
}

#[test]
fn a_database_that_falls_silent_keeps_nobody_for_ever() {
    with_env(be_impatient, async |env| {
        let id = env.order(Duration::from_secs(60)).await.id.to_string();
        let deadline = &["deadline", "--order-id", &id, "--in", "1h"][..];
        let close = &["close", &id][..];
        for (at, arguments) in [("to_regclass", deadline), (&id, deadline), ("Closes those of the asked", close)] {
            let network = Proxy::before(&env.settings.database.url).await;
            let has_vanished = network.cut_at(at, Then::Vanish);
            let (code, _, error) = by_way_of(&network, &env, arguments).await;
            assert!(has_vanished(), "{arguments:?} never says {at}");
            assert!(code == 1 && error.contains("did not answer within"), "{arguments:?} at {at}: {error}");
        }
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await, 1);
    });
}
