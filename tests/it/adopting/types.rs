//! A mapping works with every type that an id, a key of stock and a column of the close can have.

use order_timeout::Settings;
use order_timeout::operations::adopt::{Finding, Level, check};
use order_timeout::postgres::Database;
use order_timeout_core::kind::Kind;
use order_timeout_testkit::TestEnv;
use order_timeout_testkit::process::call_with;

use super::execute;

/// Types of an id with two values that are written as the table prints them.
const IDS: &[(&str, [&str; 2])] = &[
    ("smallint", ["-7", "7"]),
    ("integer", ["-70000", "70000"]),
    ("bigint", ["-9223372036854775808", "7"]),
    ("uuid", ["01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b", "00000000-0000-0000-0000-000000000000"]),
    ("text", ["A 1", "Ä/%"]),
    ("character varying(5)", ["A-1", "12345"]),
    ("character(5)", ["A-1", "12345"]),
    ("citext", ["Order-A", "b"]),
    ("shop.number", ["70000", "7"]),
    ("shop.code", ["A-1", "12345"]),
    ("shop.short_code", ["A-1", "12345"]),
];

/// Types of a key of stock, each with a value as a literal.
const STOCK_KEYS: &[(&str, &str)] = &[
    ("smallint", "7"),
    ("bigint", "7"),
    ("numeric(10, 2)", "7.25"),
    ("numeric", "7.250"),
    ("real", "0.1"),
    ("double precision", "0.1"),
    ("uuid", "'01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b'"),
    ("text", "'A 1'"),
    ("character varying(6)", "'A-1'"),
    ("character(6)", "'A-1'"),
    ("\"char\"", "'x'"),
    ("name", "'A-1'"),
    ("citext", "'A-1'"),
    ("bit(8)", "B'10110011'"),
    ("bit varying(12)", "B'10110011'"),
    ("boolean", "true"),
    ("bytea", "'\\x00ff'"),
    ("date", "'2026-11-20'"),
    ("timestamp(3)", "'2026-11-20 10:30:00.123'"),
    ("timestamptz(0)", "'2026-11-20 10:30:00+00'"),
    ("time(2)", "'10:30:00.12'"),
    ("interval(3)", "'90 min'"),
    ("inet", "'10.0.0.1'"),
    ("shop.size", "'large'"),
    ("shop.code", "'A-1'"),
    ("shop.short_code", "'A-1'"),
    ("shop.price", "7.25"),
];

const TYPES: &str = "DROP SCHEMA IF EXISTS shop CASCADE;
    CREATE SCHEMA shop;
    CREATE EXTENSION IF NOT EXISTS citext SCHEMA public;
    CREATE TYPE shop.size AS ENUM ('small', 'large');
    CREATE DOMAIN shop.number AS bigint CHECK (VALUE > 0);
    CREATE DOMAIN shop.code AS character varying(5);
    CREATE DOMAIN shop.short_code AS shop.code CHECK (VALUE <> '');
    CREATE DOMAIN shop.price AS numeric(8, 2)";

/// A shop with an id of this type, and stock with a key of that.
pub fn tables(id: &str, stock_key: &str) -> String {
    format!(
        "{TYPES};
         CREATE TABLE shop.stock (sku {stock_key} PRIMARY KEY, reserved integer NOT NULL);
         CREATE TABLE shop.orders (id {id} PRIMARY KEY, state text NOT NULL DEFAULT 'open', due timestamptz,
             moment timestamptz, local timestamp, day date, clock time(0), closes integer);
         CREATE TABLE shop.items (id {id} NOT NULL REFERENCES shop.orders, sku {stock_key} NOT NULL, n integer NOT NULL);
         CREATE INDEX ON shop.items (id);
         CREATE TABLE shop.notes (id {id} PRIMARY KEY, text text);
         CREATE INDEX ON shop.orders (due, id) WHERE state = 'open'"
    )
    .replace("citext", "public.citext")
    .replace("EXISTS public.citext", "EXISTS citext")
}

pub const MAPPING: &str = r#"
[kinds.order.table]
table = "shop.orders"
id = "id"
open = "state = 'open'"
paid = "state = 'paid'"
deadline = "due"
time_zone = "Asia/Shanghai"
close = { state = "closed", moment = "now", local = "now", day = "now", clock = "now" }

[[kinds.order.table.stock]]
items = "shop.items"
order = "id"
key = "sku"
quantity = "n"
table = "shop.stock"
stock_key = "sku"
give_back = { reserved = "reserved - quantity" }

[[kinds.order.table.also]]
sql = "UPDATE shop.notes SET text = 'closed' WHERE id IN (SELECT id FROM closed)"
"#;

/// The environment's settings with this mapping, and the file that has it.
pub fn map_to(env: &TestEnv, mapping: &str) -> (Settings, tempfile::NamedTempFile) {
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), mapping).unwrap();
    let mut settings = env.settings.clone();
    settings.kinds = Settings::load(Some(file.path()), &[]).unwrap().kinds;
    (settings, file)
}

async fn findings(settings: &Settings) -> Vec<Finding> {
    let database = Database::connect(&settings.database, 2).await.unwrap();
    check::check(&database, settings, &Kind::ORDER).await.unwrap().findings
}

fn says<'a>(found: &'a [Finding], key: &str) -> Vec<&'a str> {
    found.iter().filter(|one| one.key.ends_with(key)).map(|one| one.sentence.as_str()).collect()
}

#[test]
fn every_type_of_id_works() {
    TestEnv::builder().without_broker().run(async |env| {
        for (kind, ids) in IDS {
            execute(&env, &tables(kind, "text")).await;
            execute(&env, "INSERT INTO shop.stock VALUES ('A', 2)").await;
            for id in ids {
                let due = "clock_timestamp() - interval '1 s'";
                execute(
                    &env,
                    &format!(
                        "INSERT INTO shop.orders (id, due) VALUES ('{id}', {due});
                         INSERT INTO shop.items VALUES ('{id}', 'A', 1); INSERT INTO shop.notes VALUES ('{id}', '')"
                    ),
                )
                .await;
            }
            let (settings, _file) = map_to(&env, MAPPING);
            let found = findings(&settings).await;
            let wrong: Vec<_> = found.iter().filter(|finding| finding.level == Level::Wrong).collect();
            assert!(wrong.is_empty(), "{kind}: {wrong:#?}");
            assert_eq!(says(&found, "table.close"), ["2 of 2 overdue orders were closed and rolled back"], "{kind}");
            assert_eq!(
                says(&found, "also[0].sql"),
                ["the statement changed 2 rows for the 2 orders that were closed, and was rolled back"],
                "{kind}"
            );
            let (code, said, error) = call_with(&settings, &["close", "--", ids[0]]).await;
            assert_eq!((code, said), (0, format!("{}: closed\n", ids[0])), "{kind}: {error}");
            let (_, said, error) = call_with(&settings, &["explain", "--", ids[0]]).await;
            assert!(said.starts_with(&format!("order {}: it is closed", ids[0])), "{kind}: {said}{error}");
            let (_, said, error) = call_with(&settings, &["explain", "--", ids[1]]).await;
            assert!(said.starts_with(&format!("order {}: it is unpaid", ids[1])), "{kind}: {said}{error}");
        }
    });
}

#[test]
fn every_type_of_stock_key_works() {
    TestEnv::builder().without_broker().run(async |env| {
        for (kind, value) in STOCK_KEYS {
            execute(&env, &tables("bigint", kind)).await;
            execute(
                &env,
                &format!(
                    "INSERT INTO shop.stock VALUES ({value}, 3);
                     INSERT INTO shop.orders (id, due) VALUES (1, now() - interval '1 s');
                     INSERT INTO shop.items VALUES (1, {value}, 3)"
                ),
            )
            .await;
            let (settings, _file) = map_to(&env, MAPPING);
            let found = findings(&settings).await;
            let wrong: Vec<_> = found.iter().filter(|finding| finding.level == Level::Wrong).collect();
            assert!(wrong.is_empty(), "{kind}: {wrong:#?}");
            let given = says(&found, "stock[0].give_back");
            assert!(given[0].starts_with("1 of 1 rows of shop.stock were given back"), "{kind}: {given:?}");
            let (code, _, error) = call_with(&settings, &["close", "1"]).await;
            assert_eq!(code, 0, "{kind}: {error}");
            assert_eq!(env.count("SELECT count(*) FROM shop.stock WHERE reserved = 0").await, 1, "{kind}");
        }
    });
}

#[test]
fn moment_fits_types_of_columns() {
    TestEnv::builder().without_broker().run(async |env| {
        execute(&env, &tables("bigint", "text")).await;
        execute(&env, "INSERT INTO shop.orders (id, due) VALUES (1, now() - interval '1 s')").await;
        let (settings, _file) = map_to(&env, MAPPING);
        assert_eq!(call_with(&settings, &["close", "1"]).await.0, 0);
        let right = "SELECT count(*) FROM shop.orders WHERE local = moment AT TIME ZONE 'Asia/Shanghai'
                     AND day = local::date AND clock = local::time(0)";
        assert_eq!(env.count(right).await, 1);
        for (right, wrong, words) in [
            ("time_zone = \"Asia/Shanghai\"", "", ["kinds.order.table.time_zone", "name the zone"]),
            ("local = \"now\"", "closes = \"now\"", ["kinds.order.table.close.closes", "let a trigger"]),
        ] {
            let (settings, _file) = map_to(&env, &MAPPING.replace(right, wrong));
            let found = findings(&settings).await;
            let why = found.iter().find(|finding| finding.level == Level::Wrong).unwrap();
            assert!(words.iter().all(|word| why.sentence.contains(word)), "{why:?}");
            assert!(!why.sentence.contains("also"), "{why:?}");
        }
    });
}
