//! Runs what README and the guide tell an order service to run, and what docs/operating/deploy.md tells it to grant,
//! exactly as written there.

use std::time::{Duration, SystemTime};

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::message::is_traceparent;
use order_timeout_testkit::TestEnv;
use regex::Regex;
use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

const README: &str = include_str!("../../README.md");
const GUIDE: &str = include_str!("../../docs/guide/order-service.md");
const DEPLOY: &str = include_str!("../../docs/operating/deploy.md");

const MINUTE: Duration = Duration::from_secs(60);

/// The code blocks of this language, in order.
fn blocks(document: &'static str, language: &str) -> Vec<&'static str> {
    let blocks = document.split("```").skip(1).step_by(2);
    blocks.filter_map(|block| block.strip_prefix(language)?.strip_prefix('\n')).collect()
}

/// The guide's SQL statements.
struct Statements {
    stock: &'static str,
    create: &'static str,
    pay: &'static str,
    cancel: &'static str,
}

fn statements() -> Statements {
    let [stock, create, pay, cancel] = blocks(GUIDE, "sql")[..] else {
        panic!("the guide has SQL blocks that no test runs: {:?}", blocks(GUIDE, "sql"))
    };
    Statements { stock, create, pay, cancel }
}

async fn run_on(connection: &mut PgConnection, sql: &str) -> Result<u64, sqlx::Error> {
    Ok(sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await?.rows_affected())
}

async fn run(env: &TestEnv, sql: &str) -> u64 {
    run_on(&mut env.pool.acquire().await.unwrap(), sql).await.unwrap()
}

/// The available and the reserved stock of the article.
async fn mugs(env: &TestEnv) -> (i64, i64) {
    let sql = "SELECT available, reserved FROM stock WHERE article_id = 'mug'";
    sqlx::query_as(sql).fetch_one(&env.pool).await.unwrap()
}

#[test]
fn readme_creates_and_pays_order() {
    TestEnv::builder().without_broker().run(async |env| {
            let Statements { stock, create, pay, .. } = statements();
            run(&env, stock).await;
            run(&env, create).await;
            assert_eq!(mugs(&env).await, (8, 2));
            assert_eq!(env.count("SELECT count(*) FROM alarm_outbox a JOIN orders o ON o.id::text = a.order_id AND o.expires_at = a.deadline").await, 1);
            env.assert_ledger().await;

            assert_eq!(run(&env, pay).await, 1);
            assert_eq!(mugs(&env).await, (8, 0));
            assert_eq!(env.count("SELECT count(*) FROM orders WHERE status = 'paid'").await, 1);
            assert_eq!(run(&env, pay).await, 0, "a second payment changes nothing");
            assert_eq!(mugs(&env).await, (8, 0));
            env.assert_ledger().await;
            // An order that reserves nothing, such as the quickstart's.
            sqlx::query("UPDATE orders SET status = 'unpaid', paid_at = NULL").execute(&env.pool).await.unwrap();
            sqlx::query("DELETE FROM order_items").execute(&env.pool).await.unwrap();
            assert_eq!(run(&env, pay).await, 1, "paid is paid, with or without articles");
        });
}

#[test]
fn readme_cancels_order() {
    TestEnv::builder().without_broker().run(async |env| {
        let Statements { stock, create, pay, cancel } = statements();
        run(&env, stock).await;
        assert_eq!(run(&env, stock).await, 0, "what is there stays as it is");
        run(&env, create).await;
        assert_eq!(run(&env, cancel).await, 1);
        assert_eq!(mugs(&env).await, (10, 0));
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE status = 'cancelled'").await, 1);
        assert_eq!(run(&env, cancel).await, 0, "a second time changes nothing");
        assert_eq!(run(&env, pay).await, 0, "a cancelled order cannot be paid");
        assert_eq!(mugs(&env).await, (10, 0));
        env.assert_ledger().await;
    });
}

#[test]
fn readme_names_constraint_for_sold_out() {
    TestEnv::builder().without_broker().run(async |env| {
        let Statements { stock, create, .. } = statements();
        run(&env, stock).await;
        sqlx::query("UPDATE stock SET available = 1 WHERE article_id = 'mug'").execute(&env.pool).await.unwrap();
        // Detached from the pool, because the failed transaction is still open on it.
        let mut connection = env.pool.acquire().await.unwrap().detach();
        let refused = run_on(&mut connection, create).await.unwrap_err().to_string();
        let constraint = "available_is_never_negative";
        assert!(refused.contains(constraint) && GUIDE.contains(constraint), "{refused}");
    });
}

#[test]
fn documented_grants_suffice_and_open_nothing_else() {
    TestEnv::builder().without_broker().run(async |env| {
        let Statements { stock, create, pay, cancel } = statements();
        let [grants] =
            blocks(DEPLOY, "sql").into_iter().filter(|sql| sql.starts_with("GRANT ")).collect::<Vec<_>>()[..]
        else {
            panic!("docs/operating/deploy.md has not one block of grants")
        };
        // Roles belong to the server, not the database, so each test needs its own.
        let role = format!("shop_{}", env.settings.namespace);
        run(&env, &format!("CREATE ROLE {role}")).await;
        run(&env, &grants.replace("TO shop;", &format!("TO {role};"))).await;
        let mut service = env.pool.acquire().await.unwrap().detach();
        run_on(&mut service, &format!("SET ROLE {role}")).await.unwrap();
        let mut outcomes = Vec::new();
        for sql in [stock, create, cancel] {
            outcomes.push(run_on(&mut service, sql).await.map(drop));
        }
        run(&env, "DELETE FROM orders").await;
        for sql in [create, "SELECT move_deadline($1, $2)", pay] {
            let sql = sql.replace("$1", "'01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4c'").replace("$2", "now()");
            outcomes.push(run_on(&mut service, &sql).await.map(drop));
        }
        let paid = env.count("SELECT count(*) FROM orders WHERE status = 'paid'").await;
        let mut allowed = Vec::new();
        for sql in [
            "SELECT FROM alarm_outbox",
            "SELECT FROM event_outbox",
            "SELECT FROM parked_alarms",
            "SELECT FROM order_timeout_migrations",
            "INSERT INTO event_outbox (routing_key, type, payload) VALUES ('a', 'b', '{}')",
            "DELETE FROM orders",
            "INSERT INTO order_events (order_id, event, by, reason) SELECT id, 'closed', 'alarm', 'forged' FROM orders",
            "INSERT INTO alarm_outbox (order_id, deadline, sent_at) VALUES ('1', now(), now())",
            "DELETE FROM stock",
            "UPDATE order_events SET event = 'paid'",
        ] {
            allowed.extend(run_on(&mut service, sql).await.ok().map(|_| sql));
        }
        drop(service);
        // Before any assertion: a role outlives the test environment's database.
        run(&env, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
        let outcomes: Result<Vec<()>, _> = outcomes.into_iter().collect();
        outcomes.expect("the service can do all that the guide tells it to");
        assert_eq!((paid, allowed), (1, Vec::<&str>::new()));
    });
}

#[test]
fn readme_rust_schedules_order() {
    TestEnv::builder().run(async |env| {
        in_transaction(&env, Uuid::now_v7(), SystemTime::now() + 10 * MINUTE).await.unwrap();
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 2, "the first, and the earlier one");
    });
}

#[test]
fn readme_transaction_creates_scheduled_order() {
    let [transaction] = blocks(README, "sql")[..] else { panic!("README has more than the one transaction") };
    TestEnv::builder().without_broker().run(async |env| {
            run(&env, transaction).await;
            let scheduled = "SELECT count(*) FROM alarm_outbox a JOIN orders o ON o.id::text = a.order_id AND o.expires_at = a.deadline";
            assert_eq!(env.count(scheduled).await, 1);
        });
}

#[test]
fn plugin_page_schedules_waiting_orders() {
    let page = include_str!("../../docs/FROM-THE-PLUGIN.md").replace("\n   ", "\n");
    let statement = page.split("```sql\n").nth(1).unwrap().split("```").next().unwrap().to_owned();
    TestEnv::builder().without_broker().run(async move |env| {
            let waiting = env.orders(3, MINUTE).await;
            env.write_alarm(&waiting[0]).await;
            assert!(env.pay(&waiting[1]).await);
            sqlx::query("INSERT INTO orders (id, expires_at) VALUES (gen_random_uuid(), now())")
                .execute(&env.pool)
                .await
                .unwrap();
            assert_eq!(run(&env, &statement).await, 1, "not for paid and overdue orders, and no second one");
            assert_eq!(run(&env, &statement).await, 0);
            let scheduled = "SELECT count(*) FROM alarm_outbox a JOIN orders o ON o.id::text = a.order_id AND o.expires_at = a.deadline";
            assert_eq!(env.count(scheduled).await, 2);
        });
}

#[test]
fn wire_insert_takes_trace_context() {
    let wire = include_str!("../../docs/WIRE.md");
    let [insert] = blocks(wire, "sql")[..] else { panic!("docs/WIRE.md has more than one statement") };
    let context = Regex::new(r"`(00-[0-9a-f-]{52})`").unwrap().captures(wire).expect("an example of a trace context");
    let context = context[1].to_owned();
    assert!(is_traceparent(&context), "{context}");
    TestEnv::builder().without_broker().run(async move |env| {
        let insert = sqlx::query(insert).bind("7").bind(Timestamptz(SystemTime::now().into())).bind(&context);
        insert.execute(&env.pool).await.unwrap();
        let stored: String =
            sqlx::query_scalar("SELECT traceparent FROM alarm_outbox").fetch_one(&env.pool).await.unwrap();
        assert_eq!(stored, context);
    });
}

#[test]
fn printed_rust_is_compiled_code() {
    let compiled = include_str!("readme.rs");
    let snippets = [blocks(README, "rust"), blocks(GUIDE, "rust")].concat();
    assert!(snippets.len() > 2);
    for line in snippets.iter().flat_map(|snippet| snippet.lines()) {
        let line = line.split("   //").next().unwrap();
        assert!(compiled.contains(&format!("\n    {line}\n")), "{line:?} is not compiled anywhere");
    }
}

/// The guide's lines of Rust for an order's own transaction.
async fn in_transaction(env: &TestEnv, order_id: Uuid, deadline: SystemTime) -> Result<(), Box<dyn std::error::Error>> {
    let mut transaction = env.pool.begin().await?;
    let created = sqlx::query("INSERT INTO orders (id, expires_at) VALUES ($1, $2)").bind(order_id);
    created.bind(order_timeout_client::postgres::Timestamptz(deadline.into())).execute(&mut *transaction).await?;
    order_timeout_client::postgres::schedule(&mut transaction, order_id.to_string(), deadline).await?;
    let deadline = SystemTime::now() + MINUTE;
    use order_timeout_client::postgres;
    let moved = postgres::move_deadline(&mut *transaction, order_id.to_string(), deadline).await?;
    assert_eq!(moved, order_timeout_client::postgres::Moved::Earlier);
    transaction.commit().await?;
    Ok(())
}

/// The guide's other lines. They are not run, because they use the deployment of the environment variables instead of a
/// test environment.
#[expect(dead_code)]
async fn directly_to_broker(order_id: Uuid, deadline: SystemTime) -> Result<(), Box<dyn std::error::Error>> {
    let publisher = order_timeout_client::Publisher::connect("amqp://guest:guest@localhost:5672/%2f").await?;
    publisher.schedule(order_id.to_string(), deadline).await?;
    Ok(())
}
