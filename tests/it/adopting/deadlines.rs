//! Deadlines of every kind move alike: by the function of the kind, singly and in bulk, and no further than `extend_max`.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout::operations::orders_statements;
use order_timeout::postgres::Database;
use order_timeout_client::postgres::{Moved, Timestamptz, move_deadline_of};
use order_timeout_core::delay::Strategy;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{EnvBuilder, TestEnv};
use serde_json::{Value, json};

use super::execute;

const HOUR: Duration = Duration::from_secs(3_600);
const WHY: [&str; 3] = ["--why", "the app was down", "--yes"];

const TABLES: &str = r#"
    CREATE TABLE public."Rentals" (
        branch text, number integer, state text NOT NULL DEFAULT 'open', until timestamptz, PRIMARY KEY (branch, number));
    CREATE TABLE public.rooms (room text PRIMARY KEY, free integer NOT NULL DEFAULT 0);
    CREATE TABLE public.visits (
        id bigint PRIMARY KEY, state text NOT NULL DEFAULT 'open', until timestamp, room text NOT NULL DEFAULT 'a');
    CREATE TABLE public.trials (
        id bigint PRIMARY KEY, state text NOT NULL DEFAULT 'open', created_at timestamp with time zone NOT NULL DEFAULT now());
    INSERT INTO public."Rentals" (branch, number, until)
        SELECT 'a/b', n, now() + n * interval '1 hour' FROM generate_series(1, 3) n;
    INSERT INTO public."Rentals" VALUES ('c', 4, 'paid', now() + interval '1 hour'), ('c', 5, 'open', NULL);
    INSERT INTO public.visits (id, until) SELECT n, timestamp '2035-07-01 12:00' FROM generate_series(1, 2) n;
    INSERT INTO public.trials VALUES (1)"#;

fn environment() -> EnvBuilder {
    TestEnv::builder().without_broker().settings(|settings| {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/kinds/deadlines.toml");
        settings.kinds = Settings::load(Some(&file), &[]).expect("valid kinds").kinds;
        // Far enough for a deadline of which the time zone is compared.
        settings.delay.max_delay = Duration::from_secs(3_650 * 86_400);
        settings.delay.strategy = Strategy::Database;
    })
}

/// The tables, what moves their deadlines, and the settings that this must know.
async fn install(env: &TestEnv) {
    execute(env, TABLES).await;
    for arguments in [
        &["setup"][..],
        &["adopt", "--install", "--kind", "rental"],
        &["adopt", "--install", "--kind", "visit"],
        &["adopt", "--install", "--kind", "trial"],
    ] {
        let (code, said, error) = call_with(&env.settings, arguments).await;
        assert_eq!(code, 0, "{arguments:?}: {said}{error}");
    }
}

async fn refused(env: &TestEnv, arguments: &[&str], parts: &[&str]) {
    let (code, said, error) = call_with(&env.settings, arguments).await;
    assert!(code == 1 && parts.iter().all(|part| error.contains(part)), "{arguments:?}: {said}{error}");
    assert_eq!(error.lines().count(), 1, "one sentence: {error}");
}

async fn deadline_of(env: &TestEnv, row: &'static str) -> Timestamp {
    let Timestamptz(deadline) = sqlx::query_scalar(row).fetch_one(&env.pool).await.unwrap();
    deadline
}

const RENTAL: &str = "SELECT until FROM public.\"Rentals\" WHERE number = 1";
const VISIT: &str = "SELECT until AT TIME ZONE 'Asia/Shanghai' FROM public.visits WHERE id = 1";

#[test]
fn bulk_moves_mapped_orders() {
    environment().run(async |env| {
        install(&env).await;
        let before = deadline_of(&env, RENTAL).await;
        let bulk = ["deadline", "--kind", "rental", "--where", "branch = 'a/b' AND until > now() -- all"];
        let later = [&bulk[..], &["--in", "+30m", "--who", "night shift", "--json"], &WHY].concat();
        let (code, said, shown) = call_with(&env.settings, &later).await;
        let answer: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}{shown}"));
        assert_eq!((code, &answer["result"]["outcomes"]), (0, &json!({ "later": 3 })), "{answer}");
        assert!(shown.contains("3 unpaid orders match, 0 of them overdue\n") && shown.contains("a%2Fb/1"), "{shown}");
        assert_eq!(deadline_of(&env, RENTAL).await, before + HOUR / 2);
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 0, "a later deadline needs none");
        let recorded = "SELECT sum(jsonb_array_length(alarms)) FROM operator_actions
                        WHERE action = 'deadline_moved' AND who = 'night shift' AND why = 'the app was down'";
        assert_eq!(env.count(recorded).await, 3);
        let told = call_with(&env.settings, &["explain", "a%2Fb/1", "--kind", "rental"]).await.1;
        assert!(told.contains("given another deadline; who: night shift; why: the app was down"), "{told}");

        // What the run has moved is left out.
        let resume = [&later[..], &["--resume", answer["run"].as_str().unwrap()]].concat();
        let (code, said, _) = call_with(&env.settings, &resume).await;
        let resumed: Value = serde_json::from_str(&said).unwrap();
        assert_eq!((code, &resumed["preview"]["orders"], &resumed["preview"].get("units")), (0, &json!(0), &None));

        let earlier = [&["deadline", "--kind", "rental", "--where", "true", "--in", "-45m"][..], &WHY].concat();
        let (code, said, error) = call_with(&env.settings, &earlier).await;
        assert_eq!((code, said.as_str()), (0, "3 earlier, 1 no_deadline\n"), "{error}");
        let alarms = "SELECT count(*) FROM alarm_outbox a JOIN public.\"Rentals\" r
                      ON a.kind = 'rental' AND a.order_id = replace(r.branch, '/', '%2F') || '/' || r.number AND a.deadline = r.until";
        assert_eq!(env.count(alarms).await, 3);
        for (condition, part) in [("chanel = 'app'", "column \"chanel\" does not exist"), ("false)); SELECT ((true", "--where")] {
            let arguments = [&["deadline", "--kind", "rental", "--in", "1h", "--where", condition][..], &WHY].concat();
            refused(&env, &arguments, &[part, "columns of the orders table"]).await;
        }
    });
}

#[test]
fn zone_of_column_is_kept() {
    environment().run(async |env| {
        install(&env).await;
        let before = deadline_of(&env, VISIT).await;
        let moved = move_deadline_of(&env.pool, &Kind::new("visit").unwrap(), "1", before + HOUR).await.unwrap();
        assert_eq!((moved, deadline_of(&env, VISIT).await), (Moved::Later, before + HOUR));
        let bulk = ["deadline", "--kind", "visit", "--where", "until < '2036-01-01'", "--in", "-30m"];
        let (code, said, shown) = call_with(&env.settings, &[&bulk[..], &WHY].concat()).await;
        assert_eq!((code, said.as_str()), (0, "2 earlier\n"), "{shown}");
        assert!(shown.contains("they reserve 4 units in 2 items"), "{shown}");
        assert_eq!(deadline_of(&env, VISIT).await, before + HOUR / 2);
        assert_eq!(
            deadline_of(&env, "SELECT deadline FROM alarm_outbox WHERE order_id = '1'").await,
            before + HOUR / 2
        );
        let untouched = "SELECT count(*) FROM first_deadlines WHERE kind = 'visit'";
        assert_eq!(env.count(untouched).await, 0, "nothing is kept without extend_max");
    });
}

#[test]
fn expression_cannot_be_moved() {
    environment().run(async |env| {
        install(&env).await;
        let why = "kinds.trial.table.deadline is an expression";
        refused(&env, &["deadline", "1", "--kind", "trial", "--in", "1h"], &[why]).await;
        refused(&env, &[&["deadline", "--kind", "trial", "--where", "true", "--in", "1h"][..], &WHY].concat(), &[why])
            .await;
        let trial = Kind::new("trial").unwrap();
        let by_service = move_deadline_of(&env.pool, &trial, "1", Timestamp::now_by_local_clock() + HOUR).await;
        let by_service = by_service.unwrap_err().source().unwrap().to_string();
        assert!(by_service.contains(why), "{by_service}");
    });
}

#[test]
fn missing_and_former_functions_are_named() {
    environment().run(async |env| {
        execute(&env, TABLES).await;
        let (database, rental) =
            (Database::connect(&env.settings.database, 2).await.unwrap(), Kind::new("rental").unwrap());
        let statements = orders_statements::statements(&database, &env.settings, &rental).await.unwrap();
        let require = async || orders_statements::require_functions(&database, &rental, &statements.functions).await;
        require().await.expect("a worker needs no function that moves deadlines");
        let advice = "adopt --kind rental --install";
        refused(&env, &["deadline", "a%2Fb/1", "--kind", "rental", "--in", "1h"], &["kind_rental_move", advice]).await;
        let by_service = sqlx::query("SELECT move_deadline('a%2Fb/1', now(), 'rental')").execute(&env.pool).await;
        assert!(by_service.unwrap_err().to_string().contains(advice));
        install_again(&env).await;
        require().await.unwrap();
        let former = "SELECT replace(pg_get_functiondef('kind_rental_move'::regproc), 'is_open', 'was_open')";
        let former: String = sqlx::query_scalar(former).fetch_one(&env.pool).await.unwrap();
        execute(&env, &former).await;
        assert!(require().await.unwrap_err().to_string().contains(advice));
        refused(&env, &["deadline", "a%2Fb/1", "--kind", "rental", "--in", "1h"], &[advice]).await;
    });
}

async fn install_again(env: &TestEnv) {
    let (code, said, error) = call_with(&env.settings, &["adopt", "--install", "--kind", "rental"]).await;
    assert!(code == 0 && said.contains("kind_rental_move"), "{said}{error}");
}

#[test]
fn no_way_leads_beyond_extend_max() {
    environment().run(async |env| {
        install(&env).await;
        let (rental, first) = (Kind::new("rental").unwrap(), deadline_of(&env, RENTAL).await);
        let by_service = async |to: Timestamp| move_deadline_of(&env.pool, &rental, "a%2Fb/1", to).await.unwrap();
        // Earlier first: it still counts from the deadline that the order had before.
        assert_eq!(by_service(first - HOUR / 2).await, Moved::Earlier);
        assert_eq!(by_service(first + HOUR).await, Moved::Later);
        let latest = first + 2 * HOUR;
        assert_eq!(by_service(latest + Duration::from_micros(1)).await, Moved::TooFar { latest });
        assert_eq!(deadline_of(&env, RENTAL).await, first + HOUR, "nothing moved");
        refused(&env, &["deadline", "a%2Fb/1", "--kind", "rental", "--in", "+61m"], &["kinds.rental.extend_max"]).await;
        let bulk = [&["deadline", "--kind", "rental", "--where", "branch = 'a/b'", "--in", "+90m"][..], &WHY].concat();
        let (code, said, _) = call_with(&env.settings, &bulk).await;
        assert_eq!((code, said.as_str()), (0, "2 later, 1 too_far\n"));
        assert_eq!(by_service(latest).await, Moved::Later);
        assert_eq!(by_service(latest + HOUR).await, Moved::TooFar { latest });

        // The shop's own change is none of ours, and counts anew.
        execute(&env, "UPDATE public.\"Rentals\" SET until = until + interval '1 day' WHERE number = 1").await;
        let anew = deadline_of(&env, RENTAL).await;
        assert_eq!(by_service(anew + 2 * HOUR).await, Moved::Later);
        assert_eq!(by_service(anew + 3 * HOUR).await, Moved::TooFar { latest: anew + 2 * HOUR });

        // What no longer matters goes at the next move.
        execute(
            &env,
            "UPDATE first_deadlines SET deadline = now() - interval '170 hours 1 minute' WHERE order_id = 'a%2Fb/2'",
        )
        .await;
        assert_eq!(by_service(anew + HOUR).await, Moved::Earlier);
        assert_eq!(env.count("SELECT count(*) FROM first_deadlines WHERE order_id = 'a%2Fb/2'").await, 0);
        assert_eq!(env.count("SELECT count(*) FROM first_deadlines WHERE kind = 'rental'").await, 2);
    });
}

#[test]
fn concurrent_extensions_share_one_cap() {
    environment().run(async |env| {
        install(&env).await;
        let order = env.order(HOUR).await;
        let id = order.id.to_string();
        let mut other = env.pool.begin().await.unwrap();
        let by = async |connection: &mut sqlx::PgConnection, to| {
            move_deadline_of(connection, &Kind::ORDER, &id, to).await.unwrap()
        };
        assert_eq!(by(&mut *other, order.deadline + HOUR).await, Moved::Later);
        let mut waiting = env.pool.acquire().await.unwrap();
        let commit = async {
            env.wait_for_lock_waiter().await;
            other.commit().await.unwrap();
        };
        let (moved, ()) = tokio::join!(by(&mut *waiting, order.deadline + 2 * HOUR), commit);
        assert_eq!(moved, Moved::TooFar { latest: order.deadline + HOUR });
        assert_eq!(env.count("SELECT count(*) FROM order_events").await, 0, "a service writes no history");
    });
}
