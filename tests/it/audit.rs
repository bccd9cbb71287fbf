//! `audit` finds what was planted in a shop's orders and nothing else, by a role that may only read, and says what it cannot
//! know.

use std::collections::BTreeMap;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout_testkit::TestEnv;
use order_timeout_testkit::process::call_with;
use serde_json::{Value, json};

use crate::adopting::{execute, map, text, types};

/// A shop like Spree without a fault: 20 paid, 20 closed 40 ms after their deadline, 20 open; each of two articles.
async fn shop(env: &TestEnv) {
    execute(env, &text("spree", "schema.sql")).await;
    execute(
        env,
        "INSERT INTO spree.stock_items (variant_id, count_on_hand) SELECT n, 2000 FROM generate_series(1, 9) n;
         INSERT INTO spree.orders (id, number, state, payment_state, expires_at, completed_at, canceled_at)
             OVERRIDING SYSTEM VALUE
         SELECT n, 'R' || n, s.state, s.payment_state, d.due,
                CASE s.state WHEN 'complete' THEN d.due - interval '5 minutes' END,
                CASE s.state WHEN 'canceled' THEN d.due + interval '40 ms' END
         FROM generate_series(1, 60) n
         JOIN (VALUES (0, 'payment', 'balance_due'), (1, 'complete', 'paid'), (2, 'canceled', 'void')) s (at, state, payment_state)
             ON s.at = n % 3
         CROSS JOIN LATERAL (SELECT clock_timestamp() AT TIME ZONE 'UTC'
             + CASE s.state WHEN 'payment' THEN interval '1 hour' ELSE - n * interval '1 day' END AS due) d;
         INSERT INTO spree.line_items (order_id, variant_id, quantity)
         SELECT o.id, 1 + (o.id + k) % 9, 2 FROM spree.orders o, generate_series(1, 2) k;
         UPDATE spree.stock_items s SET reserved = l.q
         FROM (SELECT l.variant_id, sum(l.quantity) AS q FROM spree.line_items l JOIN spree.orders o ON o.id = l.order_id
               WHERE o.state = 'payment' GROUP BY 1) l WHERE l.variant_id = s.variant_id",
    )
    .await;
}

/// What is wrong, and the orders or rows of stock that show it.
const PLANTED: [(&str, &[&str], &str); 9] = [
    (
        "closed_although_paid",
        &["2", "5"],
        "UPDATE spree.orders SET completed_at = expires_at - interval '1 s' WHERE id IN (2, 5)",
    ),
    (
        "paid_after_close",
        &["8", "11", "14"],
        "UPDATE spree.orders SET completed_at = canceled_at + interval '1 s' WHERE id IN (8, 11, 14)",
    ),
    ("open_although_paid", &["3"], "UPDATE spree.orders SET completed_at = expires_at - interval '2 h' WHERE id = 3"),
    (
        "open_long_after_deadline",
        &["6", "9"],
        "UPDATE spree.orders SET expires_at = expires_at - interval '2 h' WHERE id IN (6, 9)",
    ),
    ("closed_early", &["17"], "UPDATE spree.orders SET canceled_at = expires_at - interval '10 ms' WHERE id = 17"),
    (
        "closed_late",
        &["20", "23"],
        "UPDATE spree.orders SET canceled_at = expires_at + interval '61 s' WHERE id IN (20, 23)",
    ),
    ("closed_without_deadline", &["26"], "UPDATE spree.orders SET expires_at = NULL WHERE id = 26"),
    (
        "stock_not_given_back",
        &["spree.stock_items 4"],
        "UPDATE spree.stock_items SET reserved = reserved + 2 WHERE variant_id = 4",
    ),
    (
        "stock_given_back_twice",
        &["spree.stock_items 8"],
        "UPDATE spree.stock_items SET reserved = reserved - 1 WHERE variant_id = 8",
    ),
];

async fn audit(settings: &Settings, code: i32) -> Value {
    let (found, stdout, stderr) = call_with(settings, &["audit", "--json"]).await;
    assert_eq!((found, stderr.as_str()), (code, ""), "{stdout}");
    serde_json::from_str(&stdout).unwrap()
}

/// The ids of each fault that was found, sorted.
fn found(audit: &Value) -> BTreeMap<&str, Vec<&str>> {
    let faults = audit["faults"].as_array().unwrap().iter().filter(|found| found["count"] != 0);
    let ids = |found: &Value| found["examples"].as_array().unwrap().len() as u64 == found["count"].as_u64().unwrap();
    faults
        .map(|found| {
            assert!(ids(found), "{found}");
            let examples = found["examples"].as_array().unwrap().iter();
            let mut ids: Vec<&str> = examples.map(|example| example["id"].as_str().unwrap()).collect();
            ids.sort_by_key(|id| (id.len(), *id));
            (found["fault"].as_str().unwrap(), ids)
        })
        .collect()
}

fn of<'a>(audit: &'a Value, fault: &str) -> &'a Value {
    audit["faults"].as_array().unwrap().iter().find(|found| found["fault"] == fault).unwrap()
}

fn not_known(audit: &Value) -> Vec<&str> {
    audit["not_known"].as_array().unwrap().iter().map(|one| one["what"].as_str().unwrap()).collect()
}

#[test]
fn planted_faults_are_found_and_none_invented() {
    TestEnv::builder().without_broker().run(async |env| {
        shop(&env).await;
        let mut settings = env.settings.clone();
        map(&mut settings, "spree");
        let clean = audit(&settings, 0).await;
        assert_eq!(found(&clean), BTreeMap::new());
        assert_eq!((&clean["rows"], &clean["open"], &clean["closed"]), (&json!(60), &json!(20), &json!(20)));
        assert_eq!((&clean["lateness"]["p99_ms"], &clean["lateness"]["max_ms"]), (&json!(40), &json!(40)));
        for (_, _, plant) in PLANTED {
            execute(&env, plant).await;
        }
        // An order that fell due before the days that are asked about.
        execute(&env, "UPDATE spree.orders SET expires_at = expires_at - interval '1 year' WHERE id = 29").await;
        let faulty = audit(&settings, 1).await;
        let planted = PLANTED.iter().map(|(fault, ids, _)| (*fault, ids.to_vec()));
        assert_eq!(found(&faulty), planted.collect());
        assert_eq!(of(&faulty, "paid_after_close")["money"], json!([{ "currency": "CNY", "amount_minor": 3 * 4_990 }]));
        let stock = &of(&faulty, "stock_not_given_back")["examples"][0];
        assert_ne!(stock["reserves"], stock["needs"]);
        assert_eq!(faulty["lateness"]["hours"].as_array().unwrap().len(), 24);
        assert_eq!(not_known(&faulty), ["refunds"]);

        let (code, text, _) = call_with(&settings, &["audit", "--days", "400"]).await;
        assert_eq!(code, 1);
        for part in ["wrong   closed although paid: 2, 99.80 CNY", "20, deadline 20", "not known: refunds:"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    });
}

/// What a close and a payment both write tells neither from the other.
#[test]
fn paid_orders_are_not_taken_for_closed() {
    TestEnv::builder().without_broker().run(async |env| {
        execute(&env, &types::tables("bigint", "text")).await;
        execute(
            &env,
            "INSERT INTO shop.orders (id, state, due, closes)
             VALUES (1, 'paid', now() - interval '1 day', 1), (2, 'open', now() + interval '1 h', 1);
             UPDATE shop.orders SET local = due AT TIME ZONE 'UTC' - interval '1 h' WHERE id = 1",
        )
        .await;
        let close = "close = { state = \"closed\", moment = \"now\", local = \"now\", day = \"now\", clock = \"now\" }";
        for (close_and_pay, unknown) in [
            ("close = { closes = \"null\" }\npay = { closes = \"null\", local = \"now\" }", "closed orders"),
            ("close = { closes = \"null\" }", "closed orders"),
            (
                "close = { closes = \"null\", local = \"now\" }\npay = { state = \"paid\", local = \"now\" }",
                "when orders were closed",
            ),
            ("close = { state = \"closed\", due = \"null\", moment = \"now\" }", "early and late closes"),
        ] {
            let mapping = types::MAPPING.replace(close, close_and_pay);
            assert_ne!(mapping, types::MAPPING);
            let is_local = mapping.contains("local");
            let mapping = if is_local { mapping } else { mapping.replace("time_zone = \"Asia/Shanghai\"", "") };
            let (settings, _file) = types::map_to(&env, &mapping);
            let audit = audit(&settings, 0).await;
            assert!(not_known(&audit).contains(&unknown), "{close_and_pay}: {audit}");
        }
    });
}

#[test]
fn reading_role_without_our_schema_suffices() {
    TestEnv::builder().without_broker().run(async |env| {
        shop(&env).await;
        let role = format!("auditor_{}", env.settings.namespace);
        execute(&env, &format!("DROP SCHEMA public CASCADE; CREATE ROLE {role} LOGIN PASSWORD 'secret'")).await;
        let mut settings = env.settings.clone();
        map(&mut settings, "spree");
        let login = format!("{role}:secret");
        settings.database.url = order_timeout_testkit::with_parts(&settings.database.url, Some(&login), None, None);
        let (code, _, error) = call_with(&settings, &["audit"]).await;
        let (_, grants) = error.split_once("as their owner: ").expect("statements");
        assert!(code == 1 && error.lines().count() == 1 && !grants.contains("UPDATE"), "{error}");
        execute(&env, grants).await;
        assert_eq!(found(&audit(&settings, 0).await), BTreeMap::new());
        execute(&env, "ALTER TABLE spree.orders ENABLE ROW LEVEL SECURITY").await;
        // What it does not see would look like stock that was not given back.
        let (code, _, error) = call_with(&settings, &["audit"]).await;
        assert!(code == 1 && error.contains("\"spree\".\"orders\": row-level security"), "{error}");
        execute(&env, &format!("CREATE POLICY auditor ON spree.orders FOR SELECT TO {role} USING (true)")).await;
        assert_eq!(found(&audit(&settings, 0).await), BTreeMap::new());
        execute(&env, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
    });
}

#[test]
fn audit_says_what_mapping_does_not_tell() {
    TestEnv::builder().without_broker().run(async |env| {
        for (shop, expected) in [
            ("mall", &["when orders were paid", "refunds", "stock not given back"][..]),
            ("booking", &["closed orders"]),
        ] {
            execute(&env, &text(shop, "schema.sql")).await;
            let mut settings = env.settings.clone();
            map(&mut settings, shop);
            let audit = audit(&settings, 0).await;
            assert_eq!(not_known(&audit), expected, "{shop}");
            assert!(audit["not_known"].to_string().contains("kinds.order.table."), "{audit}");
            assert!(audit["lateness"].is_null(), "{audit}");
        }
    });
}

/// More than a page, with a key of two columns.
#[test]
fn audit_reads_every_page() {
    TestEnv::builder().without_broker().run(async |env| {
        execute(&env, &text("tenants", "schema.sql")).await;
        execute(
            &env,
            "INSERT INTO platform.orders (tenant, number, channel, state, created_at, closed_at)
             SELECT 't/' || n % 2, n - 25000, CASE WHEN n % 5000 = 0 THEN 'invoice' ELSE 'app' END, 'expired',
                    now() - interval '1 hour', now() - interval '45 minutes'
             FROM generate_series(1, 50000) n",
        )
        .await;
        let mut settings = env.settings.clone();
        map(&mut settings, "tenants");
        let audit = audit(&settings, 1).await;
        assert_eq!((&audit["rows"], &audit["closed"]), (&json!(50_000), &json!(50_000)));
        assert_eq!(audit["lateness"]["closes"], 50_000 - 10);
        let invoices = &found(&audit)["closed_without_deadline"];
        assert_eq!((invoices.len(), invoices[0]), (10, "t%2F0/0"));
    });
}

#[test]
fn audit_proves_closes_of_default_tables() {
    TestEnv::builder().without_broker().run(async |env| {
        env.stock("shoe", 10).await;
        let orders = env.orders_of("shoe", 3, Duration::ZERO).await;
        assert!(env.pay(&env.order(Duration::from_secs(60)).await).await);
        assert_eq!(call_with(&env.settings, &["close", &orders[0].id.to_string()]).await.0, 0);
        assert_eq!(call_with(&env.settings, &["close", &orders[1].id.to_string()]).await.0, 0);
        let clean = audit(&env.settings, 0).await;
        assert_eq!((found(&clean), &clean["not_known"]), (BTreeMap::new(), &json!([])));
        let pay = format!(
            "INSERT INTO received_payments (provider, reference, order_id, amount_minor, currency, outcome)
             VALUES ('stripe', 'pi_1', '{id}', 700, 'EUR', 'paid');
             UPDATE stock SET reserved = reserved + 5 WHERE article_id = 'shoe'",
            id = orders[1].id
        );
        execute(&env, &pay).await;
        let faulty = audit(&env.settings, 1).await;
        let id = orders[1].id.to_string();
        let expected = [("money_kept", vec![id.as_str()]), ("stock_not_given_back", vec!["stock shoe"])];
        assert_eq!(found(&faulty), expected.into());
        execute(
            &env,
            "INSERT INTO late_payments (order_id, provider, reference, amount_minor, currency, reason)
             SELECT order_id, provider, reference, amount_minor, currency, 'closed' FROM received_payments",
        )
        .await;
        assert_eq!(found(&audit(&env.settings, 1).await).len(), 1);
    });
}

#[test]
fn page_is_one_file_without_script() {
    TestEnv::builder().without_broker().run(async |env| {
        execute(&env, &types::tables("text", "text")).await;
        execute(
            &env,
            "INSERT INTO shop.orders (id, state, due, moment) SELECT n::text, 'closed', d, d + interval '90 s'
             FROM generate_series(1, 1233) n, LATERAL (SELECT now() - interval '1 day' AS d) d;
             INSERT INTO shop.orders (id, due) VALUES ('<script>alert(1)</script>', now() - interval '1 day')",
        )
        .await;
        let (settings, _file) = types::map_to(&env, types::MAPPING);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("audit.html");
        let (code, text, error) = call_with(&settings, &["audit", "--html", file.to_str().unwrap()]).await;
        assert!(code == 1 && text.contains("wrong   closed late: 1233"), "{text}{error}");
        let page = std::fs::read_to_string(&file).unwrap();
        for part in ["1,233", "&lt;script&gt;alert(1)&lt;/script&gt;", "<svg", "prefers-color-scheme: dark", "1m 30s"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        for part in ["<script", "http://", "https://", "src=", "NaN"] {
            assert!(!page.contains(part), "{part}: {page}");
        }
    });
}

#[test]
fn bad_input_is_refused_in_one_sentence() {
    TestEnv::builder().without_broker().run(async |env| {
        let own = ["--set", "orders.close_sql=a", "--set", "orders.overdue_sql=b"];
        for (arguments, code, part) in [
            (&["audit", "--html", "/nowhere/audit.html"][..], 2, "folder that exists"),
            (&[&own[..], &["audit"]].concat(), 2, "[kinds.order.table]"),
            (&["audit", "--kind", "nope"], 2, "add [kinds.nope.table]"),
        ] {
            let (found, stdout, error) = call_with(&env.settings, arguments).await;
            assert!(found == code && error.contains(part), "{arguments:?}: {found} {error}");
            assert_eq!((stdout.as_str(), error.lines().count()), ("", 1), "{arguments:?}: {error}");
        }
        assert_eq!(call_with(&env.settings, &["audit", "--days", "0"]).await.0, 2);
        execute(&env, "DROP SCHEMA public CASCADE; CREATE SCHEMA public").await;
        let (code, _, error) = call_with(&env.settings, &["audit"]).await;
        assert!(code == 1 && error.contains("name your orders table in [kinds.order.table]"), "{error}");
    });
}
