//! A definite failure closes an order before its deadline: once, with all that a close does, and never one that may still be
//! paid.

use std::time::Duration;

use order_timeout::operations::orders_statements;
use order_timeout::postgres::{Database, kind_functions};
use order_timeout_client::payment::{Attempt, Currency, Money};
use order_timeout_client::postgres::{PaymentVerdict, ReleaseError, Released, payment_received, release};
use order_timeout_core::kind::Kind;
use order_timeout_core::with_causes;
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{Order, TestEnv, wait_for, wait_long_for_locks};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, PgPool};
use uuid::Uuid;

use crate::adopting::{execute, map, text, without_payments};

const GUIDE: &str = include_str!("../../docs/PAYMENTS.md");
const HOUR: Duration = Duration::from_secs(3600);
const WHY: &str = "the card was declined";

async fn try_release(pool: &PgPool, id: impl ToString) -> Result<Released, ReleaseError> {
    release(pool, id.to_string(), WHY, &Kind::ORDER).await
}

async fn released(pool: &PgPool, id: impl ToString) -> Released {
    try_release(pool, id).await.unwrap()
}

async fn pay(pool: &PgPool, id: impl ToString) -> PaymentVerdict {
    let id = id.to_string();
    let money = Money { amount_minor: 4_990, currency: Currency::new("CNY").unwrap() };
    let payment = Attempt { provider: "card".into(), reference: format!("pi_{id}"), money };
    payment_received(pool, id, &payment).await.unwrap().verdict
}

async fn attempt(env: &TestEnv, id: impl ToString) {
    let insert = "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
                  VALUES ('card', 'pi_' || $1, $1, 4990, 'CNY')";
    sqlx::query(insert).bind(id.to_string()).execute(&env.pool).await.unwrap();
}

async fn events(env: &TestEnv) -> Vec<Value> {
    let select = "SELECT payload FROM event_outbox WHERE type = 'order.closed.v1' ORDER BY created_at";
    sqlx::query_scalar(select).fetch_all(&env.pool).await.unwrap()
}

#[test]
fn released_order_is_closed_with_all_it_has() {
    TestEnv::builder().run(async |env| {
        let order = env.order(HOUR).await;
        let mut transaction = env.pool.begin().await.unwrap();
        let id = format!("urn:uuid:{}", order.id.to_string().to_uppercase());
        assert_eq!(release(&mut *transaction, &id, WHY, &Kind::ORDER).await.unwrap(), Released::Closed);
        let left: (Option<String>, String) =
            sqlx::query_as("SELECT current_setting('order_timeout.why', true), current_setting('enable_seqscan')")
                .fetch_one(&mut *transaction)
                .await
                .unwrap();
        assert_eq!((left.0.as_deref().unwrap_or_default(), &*left.1), ("", "on"), "its settings end with it");
        transaction.commit().await.unwrap();
        assert_eq!(released(&env.pool, order.id).await, Released::AlreadyClosed);
        let events = events(&env).await;
        let said = |key: &str| events[0][key].as_str().unwrap().to_owned();
        assert_eq!((events.len(), said("closed_by"), said("why")), (1, "released".into(), WHY.into()));
        assert!(said("closed_at") < said("deadline"), "{events:?}");
        let history = "SELECT count(*) FROM order_events WHERE event = 'closed' AND by = 'released' AND who IS NULL
                       AND why = 'the card was declined'";
        assert_eq!(env.count(history).await, 1);
        env.assert_ledger().await;
        // Its alarm comes later, and finds it closed; one for an order that is due then comes with it.
        let worker = env.worker().await;
        let due = env.order(Duration::from_secs(1)).await;
        env.deliver([&Order { id: order.id, deadline: due.deadline }, &due]).await;
        wait_for("the close", async || env.closed().await == 2).await;
        worker.stop().await;
        env.assert_drained().await;
        assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, 2);
        let (_, told, error) = call_with(&env.settings, &["explain", &order.id.to_string()]).await;
        for part in
            ["it is closed: released, ", " before its deadline, because the card was declined", "; why: the card"]
        {
            assert!(told.contains(part), "{part}: {told}{error}");
        }
    });
}

#[test]
fn order_that_may_be_paid_is_not_released() {
    TestEnv::builder().without_broker().run(async |env| {
        let orders = env.orders(6, HOUR).await;
        let [open, paid, closing, cancelled, never, parts] = &orders[..] else { unreachable!() };
        execute(&env, "UPDATE orders SET amount_minor = 9980, currency = 'CNY'").await;
        attempt(&env, open.id).await;
        let _part = pay(&env.pool, parts.id).await;
        let set = |columns: &str, order: &Order| format!("UPDATE orders SET {columns} WHERE id = '{}'", order.id);
        execute(&env, &set("amount_minor = 4990", paid)).await;
        assert_eq!(pay(&env.pool, paid.id).await, PaymentVerdict::Paid { surplus_minor: 0 });
        execute(&env, &set("status = 'closing'", closing)).await;
        execute(&env, &set("status = 'cancelled'", cancelled)).await;
        execute(&env, &set("expires_at = NULL", never)).await;
        for (id, answer) in [
            (open.id.to_string(), Released::AttemptOpen),
            (paid.id.to_string(), Released::Paid),
            (closing.id.to_string(), Released::Closing),
            (cancelled.id.to_string(), Released::AlreadyClosed),
            (never.id.to_string(), Released::NotDue),
            (Uuid::now_v7().to_string(), Released::Unknown),
            ("4711".into(), Released::Malformed),
        ] {
            assert_eq!(released(&env.pool, id).await, answer);
        }
        assert_eq!((env.status(open).await, events(&env).await.len()), ("unpaid".into(), 0));
        assert_eq!(env.count("SELECT count(*) FROM close_attempts").await, 0, "nothing is claimed");
        // What was paid once may be paid for all that is known; other attempts have ended.
        for (state, answer) in [("paid", Released::AttemptOpen), ("closed", Released::Closed)] {
            execute(&env, &format!("UPDATE payment_attempts SET state = '{state}'")).await;
            assert_eq!(released(&env.pool, open.id).await, answer, "{state}");
        }
        // The part of a price comes back.
        assert_eq!(released(&env.pool, parts.id).await, Released::Closed);
        assert_eq!(env.count("SELECT amount_minor FROM late_payments WHERE reason = 'part_payment'").await, 4_990);
    });
}

#[test]
fn bad_reason_or_kind_is_refused() {
    TestEnv::builder().without_broker().run(async |env| {
        let id = env.order(HOUR).await.id.to_string();
        let long = "é".repeat(101);
        for (reason, kind, parts) in [
            ("", "order", ["the reason '' is not 1 to 200 bytes", "correct what is reported"]),
            (&*long, "order", ["without control characters", "correct what is reported"]),
            ("a\nb", "order", ["without control characters", "say in a sentence why"]),
            (WHY, "seat", ["the kind seat lacks the function", "run order-timeout adopt --kind seat --install"]),
        ] {
            let refused = release(&env.pool, &id, reason, &Kind::new(kind).unwrap()).await.unwrap_err();
            let said = with_causes(&refused);
            assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        }
    });
}

#[test]
fn release_is_held_by_a_pause() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(HOUR).await;
        // The last one was claimed before, and has been opened again.
        let claim = "INSERT INTO close_attempts (kind, order_id, claimed_by, queue, next_attempt_at)
                     SELECT 'order', id::text, 'sweep', 'stripe', now() FROM orders WHERE $1";
        for (kind, answer, is_claimed) in [
            ("'seat'", Released::Closed, false),
            ("NULL", Released::Paused, false),
            ("'order'", Released::Paused, false),
            ("'order'", Released::Paused, true),
        ] {
            let pause = format!(
                "INSERT INTO closing_pauses (kind, cause, reason, paused_by) VALUES ({kind}, 'operator', 'a', 'b')"
            );
            execute(&env, &pause).await;
            let mut transaction = env.pool.begin().await.unwrap();
            sqlx::query(claim).bind(is_claimed).execute(&mut *transaction).await.unwrap();
            let id = order.id.to_string();
            assert_eq!(release(&mut *transaction, id, WHY, &Kind::ORDER).await.unwrap(), answer, "{kind}");
            transaction.rollback().await.unwrap();
            execute(&env, "DELETE FROM closing_pauses").await;
        }
    });
}

#[test]
fn release_waits_for_payment_in_flight() {
    TestEnv::builder().without_broker().settings(wait_long_for_locks).run(async |env| {
        let order = env.order(HOUR).await;
        let mut payment = env.pool.begin().await.unwrap();
        let paid = "UPDATE orders SET status = 'paid', paid_at = now() WHERE id = $1";
        sqlx::query(paid).bind(order.id).execute(&mut *payment).await.unwrap();
        let (pool, id) = (env.pool.clone(), order.id);
        let releasing = tokio::spawn(async move { released(&pool, id).await });
        let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted";
        wait_for("the release to wait", async || env.count(waits).await > 0).await;
        payment.commit().await.unwrap();
        assert_eq!(releasing.await.unwrap(), Released::Paid);
    });
}

#[test]
fn payment_and_release_have_one_winner() {
    TestEnv::builder().without_broker().run(async |env| {
        let orders = env.orders(200, HOUR).await;
        execute(&env, "UPDATE orders SET amount_minor = 4990, currency = 'CNY'").await;
        let races = orders.iter().enumerate().map(|(number, order)| {
            let (pool, id) = (env.pool.clone(), order.id);
            tokio::spawn(async move {
                match number % 2 {
                    0 => tokio::join!(pay(&pool, id), released(&pool, id)),
                    _ => {
                        let (answer, verdict) = tokio::join!(released(&pool, id), pay(&pool, id));
                        (verdict, answer)
                    }
                }
            })
        });
        let mut closed = 0;
        for race in futures_util::future::join_all(races).await {
            match race.unwrap() {
                (PaymentVerdict::Paid { .. }, Released::Paid) => {}
                (PaymentVerdict::Late { .. }, Released::Closed) => closed += 1,
                other => panic!("{other:?}"),
            }
        }
        assert!(closed > 0, "some releases win");
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE status = 'closed'").await, closed);
        assert_eq!(env.count("SELECT count(*) FROM late_payments").await, closed);
        assert_eq!(events(&env).await.len(), usize::try_from(closed).unwrap());
        env.assert_ledger().await;
    });
}

#[test]
fn repeatable_read_is_refused() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(HOUR).await;
        for call in ["payment_received($1, 'card', 'pi_1', 4990, 'CNY')", "release($1, 'declined')"] {
            let mut transaction = env.pool.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ").await.unwrap();
            let called = sqlx::query(AssertSqlSafe(format!("SELECT {call}"))).bind(order.id.to_string());
            let refused = called.execute(&mut *transaction).await.unwrap_err().to_string();
            assert!(refused.contains("begin it as READ COMMITTED"), "{call}: {refused}");
        }
    });
}

#[test]
fn older_snapshot_misses_no_part_payment() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(HOUR).await;
        execute(&env, "UPDATE orders SET amount_minor = 9980, currency = 'CNY'").await;
        let mut transaction = env.pool.begin_with("BEGIN ISOLATION LEVEL SERIALIZABLE").await.unwrap();
        sqlx::query("SELECT FROM orders").execute(&mut *transaction).await.unwrap();
        assert!(matches!(pay(&env.pool, order.id).await, PaymentVerdict::Partial { .. }));
        let refused = release(&mut *transaction, order.id.to_string(), WHY, &Kind::ORDER).await.unwrap_err();
        assert!(with_causes(&refused).contains("could not serialize"), "{}", with_causes(&refused));
    });
}

#[test]
fn callback_needs_one_right() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(HOUR).await;
        let grant = GUIDE.lines().find(|line| line.starts_with("GRANT EXECUTE ON FUNCTION release")).unwrap();
        let role = format!("release_{}", env.settings.namespace);
        execute(&env, &format!("CREATE ROLE {role}")).await;
        let mut callback = env.pool.acquire().await.unwrap().detach();
        let become_role = format!("CREATE TEMPORARY TABLE orders (id uuid); SET ROLE {role}");
        sqlx::raw_sql(AssertSqlSafe(become_role)).execute(&mut callback).await.unwrap();
        let refused = release(&mut callback, order.id.to_string(), WHY, &Kind::ORDER).await;
        execute(&env, &grant.replace("TO shop;", &format!("TO {role};"))).await;
        let closed = release(&mut callback, order.id.to_string(), WHY, &Kind::ORDER).await;
        let bare = "SELECT FROM default_close('{}', 'released', true, false)";
        let allowed = sqlx::raw_sql(bare).execute(&mut callback).await.is_ok();
        drop(callback);
        // Before any assertion: a role outlives the test environment's database.
        execute(&env, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
        assert!(with_causes(&refused.unwrap_err()).contains("GRANT EXECUTE ON FUNCTION release"));
        assert_eq!((closed.unwrap(), allowed), (Released::Closed, false));
    });
}

#[test]
fn command_releases_for_an_operator() {
    TestEnv::builder().without_broker().run(async |env| {
        let orders = env.orders(2, HOUR).await;
        attempt(&env, orders[1].id).await;
        let [first, second] = [&orders[0], &orders[1]].map(|order| order.id.to_string());
        let (code, said, error) = call_with(
            &env.settings,
            &["close", "--before-deadline", "--who", "ann", "--why", "no payment will come", &first, &second, "x"],
        )
        .await;
        assert_eq!(said, format!("{first}: closed\n{second}: attempt_open\nx: malformed\n"), "{error}");
        assert_eq!(code, 1);
        let history = "SELECT count(*) FROM order_events WHERE event = 'closed' AND by = 'released' AND who = 'ann'
                       AND why = 'no payment will come'";
        assert_eq!(env.count(history).await, 1);
        let (code, _, error) = call_with(&env.settings, &["close", "--before-deadline", &first]).await;
        assert!(code == 2 && error.contains("--why"), "{code}: {error}");
    });
}

/// Half of the orders are released, by a function or by the command; a worker closes the others at their deadline.
fn releases(shop: &'static str, has_pay: bool) {
    TestEnv::builder()
        .settings(move |settings| {
            map(settings, shop);
            settings.sweep.grace = Duration::ZERO;
            if !has_pay {
                without_payments(settings);
            }
        })
        .run(async move |env| {
            execute(&env, &text(shop, "schema.sql")).await;
            let orders = text(shop, "orders.sql").replace("interval '2 s'", "interval '1 h'");
            execute(&env, &orders).await;
            let select = format!("SELECT s.id, s.state FROM ({}) AS s (id, state, deadline)", text(shop, "state.sql"));
            let states = async || {
                let select = sqlx::query_as::<_, (String, String)>(AssertSqlSafe(select.clone()));
                select.fetch_all(&env.pool).await.unwrap()
            };
            let ids: Vec<String> = states().await.into_iter().map(|(id, _)| id).collect();
            let by_hand = ["close", "--before-deadline", "--why", "no payment will come", &ids[0]];
            let (code, said, error) = call_with(&env.settings, &by_hand).await;
            assert!(code == 1 && error.contains("adopt --kind order --install"), "{said}{error}");
            if !has_pay {
                // What only a release needs keeps no worker from starting.
                env.worker().await.stop().await;
            }
            let (code, said, error) = call_with(&env.settings, &["adopt", "--install"]).await;
            assert!(code == 0 && said.contains("kind_order_close"), "{said}{error}");
            assert_eq!(call_with(&env.settings, &by_hand).await.1, format!("{}: closed\n", ids[0]));
            for id in ids.iter().step_by(2) {
                let answer = released(&env.pool, id).await;
                assert_eq!(answer, if *id == ids[0] { Released::AlreadyClosed } else { Released::Closed }, "{id}");
            }
            if has_pay {
                match shop {
                    // It has a table of attempts.
                    "spree" => {
                        execute(
                            &env,
                            &format!("INSERT INTO spree.payments (order_id, number) VALUES ({0}, 'pi_{0}')", ids[1]),
                        )
                        .await
                    }
                    _ => attempt(&env, &ids[1]).await,
                }
                assert_eq!(released(&env.pool, &ids[1]).await, Released::AttemptOpen);
                assert!(matches!(pay(&env.pool, &ids[1]).await, PaymentVerdict::Paid { .. }));
                assert_eq!(released(&env.pool, &ids[1]).await, Released::Paid);
            }
            for (place, (id, state)) in states().await.into_iter().enumerate() {
                let wanted = match place {
                    1 if has_pay => "paid",
                    place if place % 2 == 0 => "closed",
                    _ => "open",
                };
                assert_eq!(state, wanted, "{id}");
            }
            let why: Vec<Value> = events(&env).await.iter().map(|event| event["why"].clone()).collect();
            assert_eq!((why.len(), &why[0], &why[1]), (150, &json!("no payment will come"), &json!(WHY)));
            let odd = sqlx::query_scalar::<_, String>(AssertSqlSafe(text(shop, "books.sql"))).fetch_all(&env.pool);
            assert_eq!(odd.await.unwrap(), Vec::<String>::new());
            // A mapping that has changed since is refused.
            let mut changed = env.settings.clone();
            let table = changed.kinds.get_mut(&Kind::ORDER).and_then(|kind| kind.table.as_mut()).unwrap();
            table.open += " AND true";
            let database = Database::connect(&changed.database, 2).await.unwrap();
            let functions = orders_statements::statements(&database, &changed, &Kind::ORDER).await.unwrap().functions;
            let refused = orders_statements::require_functions(&database, &Kind::ORDER, &functions).await.unwrap_err();
            assert!(refused.to_string().contains("kind_order_close"), "{refused}");
            assert!(kind_functions::is_there(&database, &Kind::ORDER, "close").await.unwrap());
        });
}

#[test]
fn shop_that_claims_releases_its_orders() {
    releases("spree", true);
}

#[test]
fn shop_of_holds_releases_them() {
    releases("booking", true);
}

#[test]
fn shop_without_payments_releases_its_orders() {
    releases("ticketing", false);
}

#[test]
fn shop_of_tenants_releases_its_orders() {
    releases("tenants", false);
}
