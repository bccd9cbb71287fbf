//! A wrong mapping of each sort is refused by `adopt --check`, with file, key and fix; and by the worker's start where
//! orders would be harmed or no order could be closed.

use order_timeout::config::kinds::{AlsoSettings, AttemptsSettings, CloseSettings, Names, TableSettings};
use order_timeout::operations::adopt::check;
use order_timeout::operations::adopt::{Finding, Level};
use order_timeout::postgres::Database;
use order_timeout::{Settings, Worker};

use super::{execute, fixture, map, text};
use order_timeout_core::kind::Kind;
use order_timeout_testkit::TestEnv;
use order_timeout_testkit::process::call_with;

/// One overdue order with its ticket.
const OVERDUE: &str = "INSERT INTO tickets.pretixbase_quota (id, size, booked) VALUES (1, 10, 1);
    INSERT INTO tickets.pretixbase_order (code, expires) VALUES ('A', now() - interval '1 s');
    INSERT INTO tickets.pretixbase_orderposition (order_id, quota_id) VALUES (1, 1)";

/// A mapping that is wrong.
struct Wrong {
    what: &'static str,
    mapping: fn(&mut TableSettings),
    /// What is done to the shop's tables.
    sql: &'static str,
    /// The setting that is named, without `kinds.order.table.`, and words of its sentence.
    key: &'static str,
    words: &'static [&'static str],
    refused_at_start: bool,
}

const NOTHING: fn(&mut TableSettings) = |_| {};

fn set(column: &str, value: &str) -> CloseSettings {
    CloseSettings::Set([(column.to_owned(), value.to_owned())].into())
}

/// With payments and late money.
fn reopens(table: &mut TableSettings, reopen: &[(&str, &str)], left: &str) {
    let set = |column: &str, value: &str| (column.to_owned(), value.to_owned());
    table.pay = Some([set("status", "p")].into());
    table.reopen = Some(reopen.iter().map(|(column, value)| set(column, value)).collect());
    table.stock[0].take = [set("booked", "booked + quantity")].into();
    table.stock[0].left = Some(left.to_owned());
}

/// With attempts of the shop's own, for which the positions stand.
fn attempts(table: &mut TableSettings, change: fn(&mut AttemptsSettings)) {
    table.pay = Some([("status".into(), "p".into())].into());
    let mut attempts = AttemptsSettings {
        table: "tickets.pretixbase_orderposition".into(),
        order: Names(vec!["order_id".into()]),
        open: "quota_id > 0".into(),
        provider: "'card'".into(),
        reference: "id".into(),
        amount: "quota_id".into(),
        currency: "'EUR'".into(),
        created_at: None,
        payable_until: None,
    };
    change(&mut attempts);
    table.attempts = Some(attempts);
}

const WRONG: &[Wrong] = &[
    Wrong {
        what: "attempts in a table that is not there",
        mapping: |table| attempts(table, |attempts| attempts.table = "tickets.payments".into()),
        sql: "",
        key: "attempts.table",
        words: &["there is no table", "correct the name"],
        refused_at_start: true,
    },
    Wrong {
        what: "attempts whose order is not there",
        mapping: |table| attempts(table, |attempts| attempts.order = Names(vec!["order".into()])),
        sql: "",
        key: "attempts.order",
        words: &["has no column order", "did you mean order_id?"],
        refused_at_start: true,
    },
    Wrong {
        what: "attempts that are open by a number",
        mapping: |table| attempts(table, |attempts| attempts.open = "quota_id".into()),
        sql: "",
        key: "attempts.open",
        words: &["not a condition; compare it"],
        refused_at_start: true,
    },
    Wrong {
        what: "attempts whose time names no moment",
        mapping: |table| attempts(table, |attempts| attempts.created_at = Some("localtimestamp".into())),
        sql: "",
        key: "attempts.created_at",
        words: &["is timestamp, which names no moment", "AT TIME ZONE"],
        refused_at_start: true,
    },
    Wrong {
        what: "attempts whose currency is a number",
        mapping: |table| attempts(table, |attempts| attempts.currency = "quota_id".into()),
        sql: "",
        key: "attempts.currency",
        words: &["not three letters"],
        refused_at_start: true,
    },
    Wrong {
        what: "a table that is not there",
        mapping: |table| table.table = "tickets.order".into(),
        sql: "",
        key: "table",
        words: &["there is no table", "correct the name"],
        refused_at_start: true,
    },
    Wrong {
        what: "a column that is not there",
        mapping: |table| {
            table.close = set("stat", "e");
        },
        sql: "",
        key: "close.stat",
        words: &["has no column stat", "did you mean status?"],
        refused_at_start: true,
    },
    Wrong {
        what: "a paid order's column that is not there",
        mapping: |table| table.pay = Some([("stat".into(), "p".into())].into()),
        sql: "",
        key: "pay.stat",
        words: &["has no column stat", "did you mean status?"],
        refused_at_start: true,
    },
    Wrong {
        what: "a value that the column of closing cannot have",
        mapping: |table| {
            table.pay = Some([("status".into(), "p".into())].into());
            table.closing = Some([("datetime".into(), "soon".into())].into());
        },
        sql: "",
        key: "closing.datetime",
        words: &["\"soon\"", "which the column cannot be"],
        refused_at_start: true,
    },
    Wrong {
        what: "a value that the column of reopen cannot have",
        mapping: |table| reopens(table, &[("datetime", "never")], "size"),
        sql: "",
        key: "reopen.datetime",
        words: &["\"never\"", "which the column cannot be", "\"null\""],
        refused_at_start: true,
    },
    Wrong {
        what: "what is left that is no number",
        mapping: |table| reopens(table, &[], "'many'::text"),
        sql: "",
        key: "stock[0].left",
        words: &["is text; write an expression of a number"],
        refused_at_start: true,
    },
    Wrong {
        what: "stock that is taken in a column that is not there",
        mapping: |table| {
            reopens(table, &[], "size - booked");
            table.stock[0].take = [("reserved".to_owned(), "1".to_owned())].into();
        },
        sql: "",
        key: "stock[0].take.reserved",
        words: &["has no column reserved", "did you mean"],
        refused_at_start: true,
    },
    Wrong {
        what: "functions that are not installed",
        mapping: |table| table.pay = Some([("status".into(), "p".into())].into()),
        sql: "",
        key: "pay",
        words: &["kind_order_pay", "adopt --kind order --install"],
        refused_at_start: false,
    },
    Wrong {
        what: "a type that no id can have",
        mapping: |table| table.id = Names(vec!["datetime".into()]),
        sql: "",
        key: "id",
        words: &["timestamp with time zone", "name such a unique column"],
        refused_at_start: true,
    },
    Wrong {
        what: "a value that the column cannot have",
        mapping: |table| {
            table.close = set("status", "expired");
        },
        sql: "",
        key: "close",
        words: &["cannot be planned", "too long"],
        refused_at_start: false,
    },
    Wrong {
        what: "an expression instead of a value",
        mapping: |table| {
            table.close = set("id", "id + 1");
        },
        sql: "",
        key: "close.id",
        words: &["cannot be", "write one value", "trigger"],
        refused_at_start: true,
    },
    Wrong {
        what: "a predicate with a misspelt column",
        mapping: |table| table.open = "state = 'n'".into(),
        sql: "",
        key: "open",
        words: &["column \"state\" does not exist", "correct it"],
        refused_at_start: true,
    },
    Wrong {
        what: "a predicate that is no condition",
        mapping: |table| table.paid = "status".into(),
        sql: "",
        key: "paid",
        words: &["not a condition"],
        refused_at_start: true,
    },
    Wrong {
        what: "an amount that is no number",
        mapping: |table| (table.amount, table.currency) = (Some("code".into()), Some("'EUR'".into())),
        sql: "",
        key: "amount",
        words: &["is varchar; write an expression of type bigint or numeric"],
        refused_at_start: false,
    },
    Wrong {
        what: "an amount in an unknown unit",
        mapping: |table| (table.amount, table.currency) = (Some("id * 1.5".into()), Some("'EUR'".into())),
        sql: "",
        key: "amount",
        words: &["is numeric, of which minor_units is not given", "write minor_units = 2"],
        refused_at_start: false,
    },
    Wrong {
        what: "an amount that is an aggregate",
        mapping: |table| (table.amount, table.currency) = (Some("max(id)".into()), Some("'EUR'".into())),
        sql: "",
        key: "amount",
        words: &["cannot be used in the forecast", "correct it"],
        refused_at_start: false,
    },
    Wrong {
        what: "a currency that is a number",
        mapping: |table| (table.amount, table.currency) = (Some("id".into()), Some("id".into())),
        sql: "",
        key: "currency",
        words: &["not three letters", "name a column that has them"],
        refused_at_start: false,
    },
    Wrong {
        what: "a close that leaves the order open",
        mapping: |table| table.close = set("code", "X"),
        sql: "",
        key: "close",
        words: &["order 1 stays open: kinds.order.table.close leaves the order open", "set there what open tests"],
        refused_at_start: false,
    },
    Wrong {
        what: "no index on the deadline",
        mapping: NOTHING,
        sql: "DROP INDEX tickets.pretixbase_order_open_by_deadline",
        key: "deadline",
        words: &[
            "CREATE INDEX CONCURRENTLY ON \"tickets\".\"pretixbase_order\" (\"expires\", \"id\") WHERE status = 'n'",
            "ANALYZE",
        ],
        refused_at_start: false,
    },
    Wrong {
        what: "no index on the items",
        mapping: NOTHING,
        sql: "DROP INDEX tickets.pretixbase_orderposition_order",
        key: "stock[0].order",
        words: &["read the whole table", "CREATE INDEX CONCURRENTLY"],
        refused_at_start: false,
    },
    Wrong {
        what: "an id that is not unique",
        mapping: |table| table.id = Names(vec!["batch".into()]),
        sql: "ALTER TABLE tickets.pretixbase_order ADD COLUMN batch integer NOT NULL DEFAULT 1",
        key: "id",
        words: &["not unique", "primary key is id"],
        refused_at_start: false,
    },
    Wrong {
        what: "no time zone",
        mapping: NOTHING,
        sql: "ALTER TABLE tickets.pretixbase_order ALTER COLUMN expires TYPE timestamp",
        key: "time_zone",
        words: &["not given", "hours early or late"],
        refused_at_start: true,
    },
    Wrong {
        what: "a time zone too many",
        mapping: |table| table.time_zone = Some("Asia/Shanghai".into()),
        sql: "",
        key: "time_zone",
        words: &["leave time_zone out"],
        refused_at_start: true,
    },
    Wrong {
        what: "a time zone that is unknown",
        mapping: |table| table.time_zone = Some("Asia/Shanghay".into()),
        sql: "ALTER TABLE tickets.pretixbase_order ALTER COLUMN expires TYPE timestamp",
        key: "time_zone",
        words: &["no zone that the database knows"],
        refused_at_start: true,
    },
    Wrong {
        what: "a deadline that no index can bound",
        mapping: |table| table.deadline = "expires + (clock_timestamp() - clock_timestamp())".into(),
        sql: "",
        key: "deadline",
        words: &["in every sweep", "CREATE INDEX"],
        refused_at_start: false,
    },
    Wrong {
        what: "a function that reads before the lock",
        mapping: |table| table.paid = "tickets.is_paid(id)".into(),
        sql: "CREATE FUNCTION tickets.is_paid(integer) RETURNS boolean LANGUAGE sql STABLE AS 'SELECT EXISTS (SELECT FROM tickets.pretixbase_order WHERE id = $1 AND status = ''p'')'",
        key: "paid",
        words: &["STABLE", "ALTER FUNCTION", "VOLATILE"],
        refused_at_start: true,
    },
    Wrong {
        what: "a statement that changes stock again",
        mapping: |table| {
            let sql = "UPDATE tickets.pretixbase_quota SET size = size WHERE id IN (SELECT id FROM closed)";
            table.also.push(AlsoSettings { sql: sql.into() });
        },
        sql: "",
        key: "also[0].sql",
        words: &["pretixbase_quota", "changes already", "give_back"],
        refused_at_start: true,
    },
    Wrong {
        what: "a row that is deleted although others refer to it",
        mapping: |table| table.close = CloseSettings::Delete,
        sql: "",
        key: "close",
        words: &["order 1 cannot be closed", "violates foreign key constraint", "correct the trigger or constraint"],
        refused_at_start: false,
    },
    Wrong {
        what: "a trigger that refuses the close",
        mapping: NOTHING,
        sql: "CREATE FUNCTION tickets.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not today'; END $$;
              CREATE TRIGGER refuse BEFORE UPDATE ON tickets.pretixbase_order FOR EACH ROW EXECUTE FUNCTION tickets.refuse()",
        key: "close",
        words: &["order 1 cannot be closed", "not today", "correct the trigger"],
        refused_at_start: false,
    },
    Wrong {
        what: "a trigger that suppresses the close",
        mapping: NOTHING,
        sql: "CREATE FUNCTION tickets.keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
              CREATE TRIGGER keep BEFORE UPDATE ON tickets.pretixbase_order FOR EACH ROW EXECUTE FUNCTION tickets.keep()",
        key: "open",
        words: &["its close says not_due", "no trigger suppresses"],
        refused_at_start: false,
    },
    Wrong {
        what: "stock that is not changed",
        mapping: |table| table.stock[0].give_back = [("booked".to_owned(), "booked".to_owned())].into(),
        sql: "",
        key: "stock[0].give_back",
        words: &["0 of the 1 rows", "check it, key and stock_key"],
        refused_at_start: false,
    },
];

/// The settings of this environment with another mapping.
fn settings_of(env: &TestEnv, wrong: &Wrong) -> Settings {
    let mut settings = env.settings.clone();
    map(&mut settings, "ticketing");
    (wrong.mapping)(settings.kinds.get_mut(&Kind::ORDER).and_then(|kind| kind.table.as_mut()).unwrap());
    settings
}

async fn findings(settings: &Settings) -> Vec<Finding> {
    let database = Database::connect(&settings.database, 2).await.unwrap();
    let report = check::check(&database, settings, &Kind::ORDER).await.unwrap();
    report.findings.into_iter().filter(|finding| finding.level == Level::Wrong).collect()
}

#[test]
fn wrong_mapping_is_refused_with_fix() {
    let file = fixture("ticketing", "order-timeout.toml").display().to_string();
    TestEnv::builder().run(async move |env| {
        for wrong in WRONG {
            let what = wrong.what;
            execute(&env, "DROP SCHEMA IF EXISTS tickets CASCADE").await;
            execute(&env, &text("ticketing", "schema.sql")).await;
            execute(&env, OVERDUE).await;
            execute(&env, wrong.sql).await;
            let settings = settings_of(&env, wrong);
            let found = findings(&settings).await;
            let key = format!("kinds.order.table.{}", wrong.key);
            let says = |finding: &Finding| {
                let names = finding.key == key || finding.sentence.contains(&key);
                names && wrong.words.iter().all(|word| finding.sentence.contains(word))
            };
            assert!(found.iter().any(says), "{what}: {found:#?}");
            assert!(found.iter().all(|finding| finding.file.as_ref() == Some(&file)), "{what}: {found:#?}");
            if wrong.refused_at_start {
                let why = Worker::start(settings).await.map(drop).expect_err(what).to_string();
                assert!(why.contains(&key) && why.contains(&file), "{what}: {why}");
            }
        }
    });
}

/// A role that may only use the worker's own tables, and settings that connect as it.
async fn role_without_rights(env: &TestEnv, shop: &str) -> (String, Settings) {
    let role = format!("shop_{}", env.settings.namespace);
    execute(
        env,
        &format!("CREATE ROLE {role} LOGIN PASSWORD 'secret'; GRANT SELECT, INSERT ON event_outbox, order_timeout_adoption TO {role}"),
    )
    .await;
    let mut settings = env.settings.clone();
    map(&mut settings, shop);
    let login = format!("{role}:secret");
    settings.database.url = order_timeout_testkit::with_parts(&settings.database.url, Some(&login), None, None);
    (role, settings)
}

#[test]
fn check_prints_all_grants_at_once() {
    for shop in ["ticketing", "mall"] {
        TestEnv::builder().without_broker().run(async move |env| {
            execute(&env, &text(shop, "schema.sql")).await;
            let (role, settings) = role_without_rights(&env, shop).await;
            if shop == "ticketing" {
                let (code, _, error) = call_with(&settings, &["adopt", "--table", "tickets.pretixbase_order"]).await;
                assert!(code == 1 && error.contains("GRANT USAGE ON SCHEMA \"tickets\" TO"), "{error}");
                assert!(error.contains("GRANT SELECT, UPDATE ON \"tickets\".\"pretixbase_order\" TO"), "{error}");
            }
            let found = findings(&settings).await;
            assert_eq!(found.len(), 1, "{found:#?}");
            assert_eq!(found[0].key, "kinds.order.table.table");
            let (_, statements) = found[0].sentence.split_once("as their owner: ").expect("statements");
            let printed = call_with(&settings, &["sql"]).await;
            assert_eq!(printed.0, 1);
            assert!(printed.2.contains(statements), "{}", printed.2);
            execute(&env, statements).await;
            assert_eq!(findings(&settings).await, []);
            assert_eq!(call_with(&settings, &["sql"]).await.0, 0);
            execute(&env, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
        });
    }
}

#[test]
fn role_without_rights_is_refused() {
    TestEnv::builder().without_broker().run(async |env| {
        execute(&env, &text("ticketing", "schema.sql")).await;
        execute(&env, OVERDUE).await;
        let (role, settings) = role_without_rights(&env, "ticketing").await;
        // One column is not all of them: the database says which table.
        execute(
            &env,
            &format!(
                "GRANT USAGE ON SCHEMA tickets TO {role}; GRANT SELECT ON ALL TABLES IN SCHEMA tickets TO {role};
                 GRANT UPDATE (id) ON tickets.pretixbase_order, tickets.pretixbase_quota TO {role}"
            ),
        )
        .await;
        let found = findings(&settings).await;
        let lacking = found.iter().find(|finding| finding.sentence.contains("permission denied"));
        assert!(lacking.is_some_and(|finding| finding.sentence.contains("GRANT")), "{found:#?}");
        execute(&env, &format!("GRANT UPDATE ON ALL TABLES IN SCHEMA tickets TO {role}")).await;
        assert_eq!(findings(&settings).await, []);
        execute(&env, "ALTER TABLE tickets.pretixbase_order ENABLE ROW LEVEL SECURITY").await;
        let found = findings(&settings).await;
        assert!(found.iter().any(|finding| finding.sentence.contains("row security may hide rows")), "{found:#?}");
        execute(&env, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
    });
}

#[test]
fn settings_refuse_unsafe_mappings() {
    let text = text("ticketing", "order-timeout.toml");
    let cases = [
        ("open = \"status = 'n'\"", "open = \"EXISTS (SELECT 1)\"", "kinds.order.table.open", "has a subquery"),
        (
            "paid = \"status = 'p'\"",
            "paid = \"id IN (SELECT order_id FROM payments)\"",
            "kinds.order.table.paid",
            "VOLATILE",
        ),
        ("deadline = \"expires\"", "deadline = \"expires; DROP TABLE x\"", "kinds.order.table.deadline", "semicolon"),
        ("id = [\"id\"]", "id = [\"id\", \"code\"]", "kinds.order.table.stock[0].order", "name as many"),
        ("close = { status = \"e\" }", "close = {}", "kinds.order.table.close", "is empty"),
        ("close = { status = \"e\" }", "close = \"drop\"", "close", "or \"delete\""),
        ("[kinds.order.table]", "[kinds.Trial.table]", "kinds.Trial", "lower-case letter"),
        ("stock_key =", "stock_keys =", "kinds", "stock_keys"),
    ];
    for (old, new, key, words) in cases {
        assert!(text.contains(old), "{old}");
        let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        // The sections of a list belong to the kind as well.
        let mut wrong = text.replace(old, new);
        if new.contains("Trial") {
            wrong = wrong.replace("[[kinds.order.", "[[kinds.Trial.");
        }
        std::io::Write::write_all(&mut file, wrong.as_bytes()).unwrap();
        let why = Settings::load(Some(file.path()), &[]).map(drop).expect_err(new).to_string();
        assert!(why.contains(key) && why.contains(words), "{new}: {why}");
        assert!(why.contains(file.path().to_str().unwrap()), "{new}: {why}");
    }
    let both = ["orders.close_sql=a".to_owned(), "orders.overdue_sql=b".to_owned()];
    let why = Settings::load(Some(&fixture("ticketing", "order-timeout.toml")), &both).map(drop).unwrap_err();
    assert!(why.to_string().contains("orders.close_sql"), "{why}");
}
