//! `adopt` proposes a mapping from what the database says, and it may be used where nothing had to be guessed.

use order_timeout::Settings;
use order_timeout::operations::adopt::{Finding, Level, check, propose};
use order_timeout::operations::orders_statements;
use order_timeout::postgres::{Database, kind_functions};

use super::{execute, text};
use order_timeout_core::kind::Kind;
use order_timeout_testkit::TestEnv;
use order_timeout_testkit::process::call_with;

#[test]
fn proposal_for_clear_shop_is_right() {
    TestEnv::builder().without_broker().run(async |env| {
            execute(&env, &text("partitioned", "schema.sql")).await;
            execute(&env, &text("partitioned", "orders.sql")).await;
            execute(&env, "UPDATE sales.orders SET status = 'paid' WHERE id IN (SELECT id FROM sales.orders LIMIT 9);
                UPDATE sales.orders SET status = 'cancelled' WHERE id IN (SELECT id FROM sales.orders WHERE status = 'pending' LIMIT 2)").await;
            let database = Database::connect(&env.settings.database, 2).await.unwrap();
            let proposal = propose::propose(&database, &Kind::ORDER, None).await.unwrap();
            assert_eq!(proposal.table, "sales.orders");
            for part in [
                "id = [\"id\", \"created_at\"]",
                "created_at is timestamp with time zone, which an id cannot be",
                "# Found in status: pending (289), paid (9), cancelled (2).",
                "open = \"status = 'pending'\"",
                "paid = \"status = 'paid'\"",
                "deadline = \"expires_at\"",
                "close = { status = \"cancelled\", updated_at = \"now\" }",
            ] {
                assert!(proposal.toml.contains(part), "{part}: {}", proposal.toml);
            }
            assert!(
                proposal.ddl[0].contains("(expires_at, id, created_at) WHERE status = 'pending'"),
                "{:?}",
                proposal.ddl
            );
            // With the id corrected as the comment asks.
            let corrected = proposal.toml.replace("[\"id\", \"created_at\"]", "[\"id\"]");
            let found = checked(&env, &corrected).await;
            let wrong: Vec<_> = found.iter().filter(|finding| finding.level == Level::Wrong).collect();
            assert!(wrong.is_empty(), "{wrong:#?}");
        });
}

/// A mapping in the database: read, with its functions installed and checked.
async fn checked(env: &TestEnv, mapping: &str) -> Vec<Finding> {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::io::Write::write_all(&mut file, mapping.as_bytes()).unwrap();
    let mut settings = env.settings.clone();
    settings.kinds = Settings::load(Some(file.path()), &[]).unwrap().kinds;
    let database = Database::connect(&settings.database, 2).await.unwrap();
    let statements = orders_statements::statements(&database, &settings, &Kind::ORDER).await.unwrap();
    kind_functions::install(&database, &statements.functions).await.unwrap();
    check::check(&database, &settings, &Kind::ORDER).await.unwrap().findings
}

/// A close that takes the items away, without which nothing can be taken again.
const WITHOUT_ITEMS: &str = "left = \"size - booked\"\n\n[[kinds.order.table.also]]
sql = \"DELETE FROM tickets.pretixbase_orderposition WHERE order_id IN (SELECT id FROM closed)\"\n";

/// What is proposed for payments are comments, and right once a shop has taken them over.
#[test]
fn proposal_for_payments_can_be_used() {
    TestEnv::builder().without_broker().run(async |env| {
        execute(&env, &text("ticketing", "schema.sql")).await;
        execute(&env, &text("ticketing", "orders.sql")).await;
        execute(&env, "ALTER TABLE tickets.pretixbase_order ADD paid_at timestamptz").await;
        execute(
            &env,
            "UPDATE tickets.pretixbase_order SET expires = clock_timestamp() - interval '1 min';
             UPDATE tickets.pretixbase_order SET status = 'p' WHERE id % 3 = 0;
             UPDATE tickets.pretixbase_order SET status = 'e' WHERE id % 3 = 1",
        )
        .await;
        let database = Database::connect(&env.settings.database, 2).await.unwrap();
        let table = Some("tickets.pretixbase_order");
        let proposed = propose::propose(&database, &Kind::ORDER, table).await.unwrap().toml;
        let mut mapping = proposed;
        for setting in ["pay", "reopen", "consume", "take", "left"] {
            let proposed = format!("\n# {setting} = ");
            assert!(mapping.contains(&proposed), "{setting}: {mapping}");
            mapping = mapping.replace(&proposed, &format!("\n{setting} = "));
        }
        for part in ["\npay = { status = \"p\", paid_at = \"now\" }", "\nreopen = {}", "\nleft = \"size - booked\""] {
            assert!(mapping.contains(part), "{part}: {mapping}");
        }
        let found = checked(&env, &mapping).await;
        let proves = |key: &str, words: &str| {
            let is_it = |finding: &Finding| {
                finding.level == Level::Proven && finding.key.ends_with(key) && finding.sentence.contains(words)
            };
            assert!(found.iter().any(is_it), "{key}: {found:#?}");
        };
        proves(".pay", "10 of 10 overdue orders with an attempt to pay were claimed, 10 of them paid");
        proves(".stock[0].consume", "were consumed and rolled back");
        proves(".reopen", "10 of 10 closed orders were reopened, paid and rolled back");
        proves(".stock[0].take", "were taken again and rolled back");
        assert_eq!(env.count("SELECT count(*) FROM tickets.pretixbase_order WHERE paid_at IS NOT NULL").await, 0);
        let written = "SELECT (SELECT count(*) FROM payment_attempts) + (SELECT count(*) FROM received_payments)
                            + (SELECT count(*) FROM close_attempts) + (SELECT count(*) FROM event_outbox)";
        assert_eq!(env.count(written).await, 0);
        for (old, new, key, words) in [
            ("pay = { status = \"p\"", "pay = { status = \"n\"", ".pay", "kinds.order.table.pay leaves order"),
            (
                "paid = \"status = 'p'\"",
                "paid = \"status IN ('p', 'x')\"\nclosing = { status = \"x\" }",
                ".closing",
                "closing makes the order paid",
            ),
            ("booked - quantity\" }\n", "booked\" }\n", ".stock[0].consume", "check it, key and stock_key"),
            ("left = \"size - booked\"", "left = \"-size\"", ".reopen", "left and the order needs"),
            ("left = \"size - booked\"\n", WITHOUT_ITEMS, ".stock[0].take", "that the items are still there"),
        ] {
            let at = mapping.rfind(old).expect(old);
            let wrong = format!("{}{new}{}", &mapping[..at], &mapping[at + old.len()..]);
            let found = checked(&env, &wrong).await;
            let says = |finding: &Finding| {
                finding.level == Level::Wrong && finding.key.ends_with(key) && finding.sentence.contains(words)
            };
            assert!(found.iter().any(says), "{new}: {found:#?}");
        }
    });
}

#[test]
fn proposal_guesses_what_orders_cost() {
    const SHOPS: &str = "
        CREATE TABLE public.price_lists (id bigint PRIMARY KEY);
        CREATE TABLE public.cents (id bigint PRIMARY KEY, status text, expires_at timestamptz, item_total bigint, price_list_id bigint REFERENCES public.price_lists, total bigint, currency char(3));
        CREATE TABLE public.payments (order_id bigint REFERENCES public.cents, gateway text, out_trade_no text, amount bigint);
        CREATE TABLE public.numbers (id bigint PRIMARY KEY, status integer NOT NULL DEFAULT 1, create_time timestamp DEFAULT now());
        INSERT INTO public.numbers (id, status) VALUES (1, 1), (2, 2), (3, 3);
        CREATE TABLE public.yuan (id bigint PRIMARY KEY, status text, expires_at timestamptz, pay_amount numeric(10, 2))";
    TestEnv::builder().without_broker().run(async |env| {
        execute(&env, SHOPS).await;
        let database = Database::connect(&env.settings.database, 2).await.unwrap();
        for (table, part) in [
            ("public.cents", "\namount = \"total\"\n# It counts the smallest unit, such as cents; otherwise add minor_units.\ncurrency = \"currency\"\n"),
            ("public.cents", "# [kinds.order.table.attempts]\n# table = \"public.payments\"\n# order = [\"order_id\"]\n# open = \"?\"\n# provider = \"gateway\"\n# reference = \"out_trade_no\"\n# amount = \"amount\"\n# currency = \"'?'\"\n"),
            ("public.numbers", "\nopen = \"status = 1\"\npaid = \"status IN (2, 3)\"\n"),
            ("public.yuan", "In which currency?\n# amount = \"pay_amount\"\n# With two decimal places, as EUR has them? JPY has none, KWD three; for several, write a CASE in amount.\n# minor_units = 2\n# currency = \"'EUR'\"\n"),
        ] {
            let proposal = propose::propose(&database, &Kind::ORDER, Some(table)).await.unwrap();
            assert!(proposal.toml.contains(part), "{}", proposal.toml);
        }
    });
}

#[test]
fn proposal_finds_stock_by_foreign_keys() {
    TestEnv::builder().without_broker().run(async |env| {
        execute(&env, &text("tenants", "schema.sql")).await;
        let (code, said, error) = call_with(&env.settings, &["adopt", "--table", "platform.orders"]).await;
        assert_eq!(code, 0, "{error}");
        for part in [
            "id = [\"tenant\", \"number\"]",
            "order = [\"tenant\", \"number\"]",
            "key = [\"tenant\", \"sku\"]",
            "give_back = { reserved = \"reserved - quantity\" }",
            "how long may an order stay unpaid?",
            "# CREATE INDEX CONCURRENTLY",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let (code, _, error) = call_with(&env.settings, &["adopt", "--table", "platform.order"]).await;
        assert!(code == 1 && error.contains("there is no table"), "{error}");
    });
}

/// What is no table of rows that a close can lock, and what to do.
#[test]
fn views_and_foreign_tables_are_sent_on() {
    TestEnv::builder().without_broker().run(async |env| {
        execute(&env, &text("ticketing", "schema.sql")).await;
        execute(
            &env,
            "CREATE TABLE tickets.order_2025 (LIKE tickets.pretixbase_order);
             CREATE VIEW tickets.every_order AS SELECT * FROM tickets.pretixbase_order UNION ALL SELECT * FROM tickets.order_2025;
             CREATE MATERIALIZED VIEW tickets.order_copy AS SELECT * FROM tickets.pretixbase_order;
             CREATE SEQUENCE tickets.numbers;
             CREATE FOREIGN DATA WRAPPER nowhere; CREATE SERVER nowhere FOREIGN DATA WRAPPER nowhere;
             CREATE FOREIGN TABLE tickets.order_elsewhere (id integer, status text) SERVER nowhere",
        )
        .await;
        for (table, parts) in [
            ("every_order", &["a view", "a kind for each", "docs/OWN-SQL.md", "order_2025", "pretixbase_order"][..]),
            ("order_copy", &["a materialized view", "made from", "pretixbase_order"]),
            ("order_elsewhere", &["a foreign table", "run the worker on that database"]),
            ("numbers", &["no table"]),
        ] {
            let (code, said, error) = call_with(&env.settings, &["adopt", "--table", &format!("tickets.{table}")]).await;
            assert!(code == 1 && said.is_empty() && parts.iter().all(|part| error.contains(part)), "{table}: {said}{error}");
        }
        execute(&env, "DROP SERVER nowhere CASCADE; DROP FOREIGN DATA WRAPPER nowhere").await;
    });
}

/// Tables whose names say little: types, values, indexes and foreign keys say more.
const UNUSUAL: &str = "
    CREATE SCHEMA vendure;
    CREATE TABLE vendure.\"orderEntity\" (\"id\" serial PRIMARY KEY, \"createdAt\" timestamp DEFAULT now(), \"currencyCode\" text,
        \"orderStage\" varchar NOT NULL, \"expiresAt\" timestamptz, \"closedAt\" timestamptz, note text);
    INSERT INTO vendure.\"orderEntity\" (\"currencyCode\", \"orderStage\", note) SELECT 'EUR', s, md5(n::text)
        FROM unnest('{ArrangingPayment,PaymentSettled,Shipped,Cancelled}'::text[]) s, generate_series(1, 9) n;
    CREATE SCHEMA laden;
    CREATE TABLE laden.vorgang (nr bigint PRIMARY KEY, angelegt timestamptz DEFAULT now(), lage text, frist timestamptz);
    CREATE INDEX ON laden.vorgang (frist) WHERE lage = 'offen';
    INSERT INTO laden.vorgang (nr, lage) VALUES (1, 'offen'), (2, 'bezahlt'), (3, 'storniert');
    CREATE SCHEMA pay;
    CREATE TYPE pay.state AS ENUM ('open', 'paid', 'expired');
    CREATE TABLE pay.payment (id uuid PRIMARY KEY, amount integer, s pay.state NOT NULL, t0 timestamptz DEFAULT now(), t1 timestamptz);
    CREATE INDEX ON pay.payment (t1) WHERE s = 'open';
    INSERT INTO pay.payment VALUES (gen_random_uuid(), 5, 'open', now(), now() + interval '1 h');
    CREATE TABLE pay.orders (id bigint PRIMARY KEY, status text, created_at timestamptz);
    CREATE SCHEMA hall;
    CREATE TABLE hall.seat (id integer PRIMARY KEY, row_no integer, occupancy text NOT NULL);
    INSERT INTO hall.seat VALUES (1, 1, 'free'), (2, 1, 'reserved'), (3, 1, 'sold');
    CREATE TABLE hall.visitor (id integer PRIMARY KEY, status text);
    CREATE TABLE hall.visit (id integer PRIMARY KEY, visitor integer REFERENCES hall.visitor, status text NOT NULL, hold_until timestamptz);
    INSERT INTO hall.visit VALUES (1, NULL, 'held', now());
    CREATE TABLE hall.chosen (visit_id integer REFERENCES hall.visit, seat_id integer REFERENCES hall.seat, PRIMARY KEY (visit_id, seat_id));
    CREATE TABLE hall.receipt (id integer PRIMARY KEY, visit_id integer REFERENCES hall.visit, amount numeric);";

#[test]
fn proposals_weigh_types_and_values() {
    TestEnv::builder().run(async |env| {
        execute(&env, UNUSUAL).await;
        for (table, parts, never) in [
            (
                "vendure.orderEntity",
                &[
                    "open = \"\\\"orderStage\\\" = 'ArrangingPayment'\"",
                    "paid = \"\\\"orderStage\\\" IN ('PaymentSettled', 'Shipped')\"",
                    "deadline = \"\\\"expiresAt\\\"\"",
                    "close = { \"orderStage\" = \"Cancelled\", \"closedAt\" = \"now\" }",
                ][..],
                "Other tables",
            ),
            (
                "laden.vorgang",
                &[
                    "open = \"lage = 'offen'\"",
                    "paid = \"lage = 'bezahlt'\"",
                    "deadline = \"frist\"",
                    "lage = \"storniert\"",
                ],
                "Other tables",
            ),
            (
                "pay.payment",
                &["table = \"pay.payment\"", "open = \"s = 'open'\"", "paid = \"s = 'paid'\"", "deadline = \"t1\""],
                "Other tables",
            ),
            (
                "hall.visit",
                &[
                    "open = \"status = 'held'\"",
                    "deadline = \"hold_until\"",
                    "items = \"hall.chosen\"",
                    "quantity = \"1\"",
                    "table = \"hall.seat\"",
                    "give_back = { occupancy = \"?\" }",
                    "free, reserved, sold",
                ],
                "hall.receipt",
            ),
        ] {
            let (code, said, error) = call_with(&env.settings, &["adopt", "--table", table]).await;
            assert_eq!(code, 0, "{table}: {error}");
            for part in parts {
                assert!(said.contains(part), "{part}: {said}");
            }
            assert!(!said.contains(never), "{never}: {said}");
        }
        // Without a name, those that time out come first, and none of our own tables.
        let (_, said, error) = call_with(&env.settings, &["adopt"]).await;
        for table in ["laden.vorgang", "pay.payment", "hall.visit", "vendure.\"orderEntity\""] {
            assert!(said.contains(table), "{table}: {said}{error}");
        }
        assert!(!said.contains("order_timeout") && !said.contains("_outbox"), "{said}");
    });
}

#[test]
fn index_of_partitioned_table_can_be_created() {
    TestEnv::builder().without_broker().run(async |env| {
        execute(&env, &text("partitioned", "schema.sql")).await;
        let database = Database::connect(&env.settings.database, 2).await.unwrap();
        let proposal = propose::propose(&database, &Kind::ORDER, Some("sales.orders")).await.unwrap();
        assert!(proposal.ddl[0].contains("It blocks writes"), "{:?}", proposal.ddl);
        let corrected = proposal.ddl[0].replace("WHERE status = ?", "WHERE status = 'pending'");
        execute(&env, &corrected).await;
    });
}

/// Seats that are held for a range of time; the table names neither a deadline nor the usual statuses.
const SEATS: &str = "CREATE SCHEMA box;
    CREATE TABLE box.bookings (event_id uuid, seat_no text, hold tstzrange, status text, PRIMARY KEY (event_id, seat_no));
    INSERT INTO box.bookings SELECT gen_random_uuid(), 'R/1', tstzrange(now(), NULL), unnest('{held,sold,released}'::text[]);
    CREATE TABLE box.reservations (id bigint PRIMARY KEY, payment_due timestamptz, placed_at timestamptz)";

#[test]
fn proposal_recognises_ranges_and_due_columns() {
    TestEnv::builder().run(async |env| {
        execute(&env, SEATS).await;
        let database = Database::connect(&env.settings.database, 2).await.unwrap();
        let proposal = propose::propose(&database, &Kind::ORDER, Some("box.bookings")).await.unwrap();
        for part in [
            "# ANALYZE has not counted its rows yet.",
            "open = \"status = 'held'\"",
            "paid = \"status = 'sold'\"",
            "deadline = \"upper(hold)\"",
            "close = { status = \"released\" }",
        ] {
            assert!(proposal.toml.contains(part), "{part}: {}", proposal.toml);
        }
        execute(&env, &proposal.ddl[0].replace("CONCURRENTLY ", "")).await;
        let proposal = propose::propose(&database, &Kind::ORDER, Some("box.reservations")).await.unwrap();
        assert!(proposal.toml.contains("deadline = \"payment_due\""), "{}", proposal.toml);
    });
}
