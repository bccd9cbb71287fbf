//! The five kinds of `examples/kinds`, as they are shipped, in one worker; and five kinds of which three are in trouble.

use std::time::Duration;

use order_timeout::Settings;
use order_timeout::http::READYZ;
use order_timeout::operations::adopt::{Level, check};
use order_timeout::postgres::Database;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::figures::{Figures, get, serve_http};
use order_timeout_testkit::paths::repository;
use order_timeout_testkit::{TestEnv, promised, wait_for};
use sqlx::AssertSqlSafe;

use crate::kinds::{closed, create, create_table, kind, mapped};

const SECOND: Duration = Duration::from_secs(1);
/// The kinds that are shipped, and the type of the event of each.
const KINDS: [(&str, &str); 5] = [
    ("acceptance", "purchase.not_accepted.v1"),
    ("confirmation", "purchase.confirmed.v1"),
    ("review", "purchase.reviewed.v1"),
    ("seat_hold", "seats.released.v1"),
    ("trial", "trial.ended.v1"),
];

/// Two rows of each kind: one that nothing happens to, and one where it is done in time. With their alarms.
const ROWS: &str = "
INSERT INTO public.articles (id, reserved) VALUES ('lamp', 5);
INSERT INTO public.shows (id, free) VALUES ('monday', 90);
INSERT INTO public.purchases (state, accept_by, confirm_by, review_by) OVERRIDING SYSTEM VALUE VALUES
    ('paid', now() + interval '2 s', NULL, NULL), ('paid', now() + interval '2 s', NULL, NULL),
    ('shipped', NULL, now() + interval '2 s', NULL), ('shipped', NULL, now() + interval '2 s', NULL),
    ('confirmed', NULL, NULL, now() + interval '2 s'), ('confirmed', NULL, NULL, now() + interval '2 s');
INSERT INTO public.purchase_items (purchase, article, quantity) VALUES (1, 'lamp', 2), (2, 'lamp', 3);
INSERT INTO public.trials (account, ends_at) VALUES ('a', now() + interval '2 s'), ('b', now() + interval '2 s');
INSERT INTO public.seat_holds (id, show, seats, held_until) VALUES
    ('00000000-0000-0000-0000-000000000001', 'monday', 4, now() + interval '2 s'),
    ('00000000-0000-0000-0000-000000000002', 'monday', 6, now() + interval '2 s');
INSERT INTO alarm_outbox (kind, order_id, deadline)
    SELECT 'acceptance', id::text, accept_by FROM public.purchases WHERE accept_by IS NOT NULL
    UNION ALL SELECT 'confirmation', id::text, confirm_by FROM public.purchases WHERE confirm_by IS NOT NULL
    UNION ALL SELECT 'review', id::text, review_by FROM public.purchases WHERE review_by IS NOT NULL
    UNION ALL SELECT 'trial', account, ends_at FROM public.trials
    UNION ALL SELECT 'seat_hold', id::text, held_until FROM public.seat_holds";

const DONE_IN_TIME: &str = "
UPDATE public.purchases SET state = 'accepted' WHERE id = 2;
UPDATE public.purchases SET state = 'confirmed' WHERE id = 4;
UPDATE public.purchases SET reviewed_at = now() WHERE id = 6;
UPDATE public.trials SET state = 'subscribed' WHERE account = 'b';
UPDATE public.seat_holds SET state = 'sold' WHERE seats = 6";

/// What must hold when all five are closed.
const RIGHT: [&str; 6] = [
    "SELECT count(*) FROM public.purchases WHERE (id, state) IN
         ((1, 'cancelled'), (2, 'accepted'), (3, 'confirmed'), (4, 'confirmed'), (5, 'confirmed'), (6, 'confirmed'))
     HAVING count(*) = 6",
    "SELECT count(*) FROM public.articles WHERE reserved = 3",
    "SELECT count(*) FROM public.purchases p JOIN public.reviews r ON r.purchase = p.id
     WHERE p.id = 5 AND p.reviewed_at >= p.review_by AND r.stars = 5 AND r.is_default",
    "SELECT count(*) FROM public.purchases WHERE id = 1 AND cancelled_at >= accept_by
     UNION ALL SELECT count(*) FROM public.purchases WHERE id = 3 AND confirmed_at >= confirm_by",
    "SELECT count(*) FROM public.trials WHERE (account, state) IN (('a', 'ended'), ('b', 'subscribed')) HAVING count(*) = 2",
    "SELECT count(*) FROM public.shows WHERE free = 94",
];

fn as_shipped(settings: &mut Settings) {
    let file = repository().join("examples/kinds/order-timeout.toml");
    let shipped = Settings::load(Some(&file), &[]).expect("valid kinds");
    (settings.kinds, settings.worker.kinds) = (shipped.kinds, shipped.worker.kinds);
    serve_http(settings);
}

async fn execute(env: &TestEnv, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&env.pool).await.unwrap();
}

#[test]
fn shipped_kinds_do_what_they_say() {
    TestEnv::builder().settings(as_shipped).run(async |env| {
        let schema = std::fs::read_to_string(repository().join("examples/kinds/schema.sql")).unwrap();
        execute(&env, &schema).await;
        let database = Database::connect(&env.settings.database, 2).await.unwrap();
        for (name, _) in KINDS {
            let report = check::check(&database, &env.settings, &kind(name)).await.unwrap();
            let wrong: Vec<_> = report.findings.iter().filter(|finding| finding.level == Level::Wrong).collect();
            assert!(wrong.is_empty(), "{name}: {wrong:#?}");
        }
        let worker = env.worker().await;
        execute(&env, ROWS).await;
        execute(&env, DONE_IN_TIME).await;
        let events = async || {
            let select = "SELECT kind, type, payload ->> 'closed_by' FROM event_outbox
                          WHERE type NOT LIKE 'order.expiring%' ORDER BY kind";
            sqlx::query_as::<_, (String, String, String)>(select).fetch_all(&env.pool).await.unwrap()
        };
        wait_for("an event of each kind", async || events().await.len() == KINDS.len()).await;
        let expected = KINDS.map(|(kind, event)| (kind.to_owned(), event.to_owned(), "alarm".to_owned()));
        assert_eq!(events().await, expected);
        for (number, sql) in RIGHT.iter().enumerate() {
            let counts: Vec<i64> = sqlx::query_scalar(*sql).fetch_all(&env.pool).await.unwrap();
            assert!(!counts.is_empty() && counts.iter().all(|count| *count > 0), "{number}: {counts:?}");
        }
        let reviews = env.count("SELECT count(*) FROM public.reviews").await;
        assert_eq!((reviews, env.parked().await), (1, Vec::new()));
        worker.stop().await;
        env.assert_drained().await;
    });
}

/// Orders of the kind that is flooded.
const FLOOD: i32 = 4_000;
/// Orders of each kind that is not in trouble.
const EACH: i64 = 40;

/// The p99 of the lateness of a kind's closes.
async fn p99_ms(env: &TestEnv, name: &str) -> f64 {
    let select = format!(
        "SELECT percentile_disc(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM closed_at - until)::float8 * 1000)
         FROM public.{name} WHERE state = 'closed'"
    );
    sqlx::query_scalar(AssertSqlSafe(select)).fetch_one(&env.pool).await.unwrap()
}

#[test]
fn troubled_kinds_delay_no_other() {
    let names = ["failing", "locked", "flooded", "calm", "quiet"];
    let adjust = move |settings: &mut Settings| {
        names.iter().for_each(|name| mapped(settings, name));
        settings.worker.kinds = names.map(kind).into();
        serve_http(settings);
    };
    TestEnv::builder().settings(adjust).run(async move |env| {
        for name in names {
            create_table(&env, name).await;
        }
        let worker = env.worker().await;
        execute(&env, "ALTER TABLE public.failing RENAME COLUMN state TO other").await;
        let mut lock = env.pool.begin().await.unwrap();
        sqlx::raw_sql("LOCK TABLE public.locked IN ACCESS EXCLUSIVE MODE").execute(&mut *lock).await.unwrap();
        let publisher = env.publisher().await;
        let flood: Vec<(i64, time::OffsetDateTime)> = sqlx::query_as(
            "INSERT INTO public.flooded (until) SELECT now() + interval '4 s' FROM generate_series(1, $1)
             RETURNING id, until",
        )
        .bind(FLOOD)
        .fetch_all(&env.pool)
        .await
        .unwrap();
        let flood: Vec<(String, Timestamp)> =
            flood.into_iter().map(|(id, until)| (id.to_string(), Timestamp::from(until))).collect();
        publisher.schedule_all_kind(&kind("flooded"), flood.iter().map(|(id, until)| (id, *until))).await.unwrap();
        let soon = Timestamp::now_by_local_clock() + SECOND;
        for name in ["failing", "locked"] {
            let ids: Vec<String> = (1..=500).map(|id: i64| id.to_string()).collect();
            publisher.schedule_all_kind(&kind(name), ids.iter().map(|id| (id, soon))).await.unwrap();
        }
        for _ in 0..EACH {
            for name in ["calm", "quiet"] {
                let (id, deadline) = create(&env, name, 3 * SECOND).await;
                publisher.schedule_kind(&kind(name), id, deadline).await.unwrap();
            }
        }
        wait_for("the closes of the other three kinds", async || {
            closed(&env, "calm").await == EACH
                && closed(&env, "quiet").await == EACH
                && closed(&env, "flooded").await == i64::from(FLOOD)
        })
        .await;
        for name in ["flooded", "calm", "quiet"] {
            println!("{name}: p99 {:.1} ms late", p99_ms(&env, name).await);
        }
        for name in ["calm", "quiet"] {
            assert!(p99_ms(&env, name).await < promised(2 * SECOND).as_secs_f64() * 1e3, "{name}");
        }
        wait_for("both named as not ready", async || {
            let (_, text) = get(&worker, READYZ).await;
            text.contains("kind failing: database: ") && text.contains("kind locked: ")
        })
        .await;
        let (_, text) = get(&worker, READYZ).await;
        assert!(!text.contains("kind calm:") && !text.contains("kind quiet:"), "{text}");
        let figures = Figures::of(&worker).await;
        assert_eq!(figures.get("close_lateness_seconds_count{by=\"alarm\",kind=\"calm\"}"), 40.0);
        lock.rollback().await.unwrap();
        worker.stop().await;
    });
}
