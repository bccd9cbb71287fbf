//! Compares rendered statements with golden files; their mappings are those of the foreign shops in `tests/fixtures`.

use std::path::Path;

use order_timeout_core::kind::Kind;

use super::*;
use crate::config::Settings;
use crate::mapping::{RelationKind, default_tables};

/// A relation with these columns: name and type.
fn relation(schema: &str, name: &str, kind: RelationKind, columns: &[(&str, &str)]) -> Relation {
    let sql = |base: &str| match base {
        "int2" => "smallint".to_owned(),
        "int4" => "integer".to_owned(),
        "int8" => "bigint".to_owned(),
        "timestamp" => "timestamp without time zone".to_owned(),
        "timestamptz" => "timestamp with time zone".to_owned(),
        other => other.to_owned(),
    };
    let columns = columns
        .iter()
        .map(|(name, base)| ((*name).to_owned(), ColumnType { base: (*base).to_owned(), sql: sql(base) }));
    Relation { schema: schema.into(), name: name.into(), kind, columns: columns.collect() }
}

fn table(shop: &str) -> TableSettings {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/shops").join(shop).join("order-timeout.toml");
    let settings = Settings::load_with_environment(Some(&file), [].into_iter().collect(), &[]).unwrap();
    settings.table_of(&Kind::ORDER).unwrap().clone()
}

fn words() -> KindWords {
    KindWords { kind: Kind::ORDER, event: "order.closed".into(), reason: "unpaid".into() }
}

fn facts(shop: &str) -> Facts {
    use RelationKind::{PartitionedTable, Table};
    match shop {
        "mall" => Facts {
            orders: relation(
                "public",
                "oms_order",
                Table,
                &[
                    ("id", "int8"),
                    ("status", "int2"),
                    ("delete_status", "int4"),
                    ("create_time", "timestamp"),
                    ("modify_time", "timestamp"),
                ],
            ),
            deadline_type: "TIMESTAMP".into(),
            attempts: None,
            stock: vec![(
                relation(
                    "public",
                    "oms_order_item",
                    Table,
                    &[("order_id", "int8"), ("product_sku_id", "int8"), ("product_quantity", "int4")],
                ),
                relation(
                    "public",
                    "pms_sku_stock",
                    Table,
                    &[("id", "int8"), ("stock", "int4"), ("lock_stock", "int4")],
                ),
            )],
            status: None,
            money_fault: None,
        },
        "headless" => Facts {
            orders: relation(
                "medusa",
                "order",
                Table,
                &[
                    ("id", "text"),
                    ("payment_state", "payment_state"),
                    ("expiresAt", "timestamptz"),
                    ("canceledAt", "timestamptz"),
                    ("payment_method", "text"),
                ],
            ),
            deadline_type: "TIMESTAMPTZ".into(),
            attempts: None,
            stock: vec![(
                relation(
                    "medusa",
                    "reservation_item",
                    Table,
                    &[
                        ("order_id", "text"),
                        ("inventory_item_id", "text"),
                        ("location_id", "text"),
                        ("quantity", "numeric"),
                    ],
                ),
                relation(
                    "medusa",
                    "inventory_level",
                    Table,
                    &[("inventory_item_id", "text"), ("location_id", "text"), ("reserved_quantity", "numeric")],
                ),
            )],
            status: None,
            money_fault: None,
        },
        "tenants" => Facts {
            orders: relation(
                "platform",
                "orders",
                Table,
                &[
                    ("tenant", "text"),
                    ("number", "int8"),
                    ("state", "text"),
                    ("channel", "text"),
                    ("created_at", "timestamp"),
                    ("closed_at", "timestamptz"),
                ],
            ),
            deadline_type: "TIMESTAMPTZ".into(),
            attempts: None,
            stock: vec![(
                relation("platform", "order_lines", Table, &[("tenant", "text"), ("number", "int8"), ("sku", "text")]),
                relation("platform", "stock", Table, &[("tenant", "text"), ("sku", "text"), ("reserved", "int4")]),
            )],
            status: None,
            money_fault: None,
        },
        _ => Facts {
            orders: relation(
                "sales",
                "orders",
                PartitionedTable,
                &[("id", "uuid"), ("status", "text"), ("expires_at", "timestamptz")],
            ),
            deadline_type: "TIMESTAMPTZ".into(),
            attempts: None,
            stock: vec![(
                relation("sales", "items", Table, &[("order_id", "uuid"), ("article", "text"), ("quantity", "int4")]),
                relation("sales", "stock", Table, &[("article", "text"), ("on_hand", "int4"), ("reserved", "int4")]),
            )],
            status: None,
            money_fault: None,
        },
    }
}

/// Compares with a file. With `GOLDEN=write` in the environment it writes the file instead.
fn assert_golden(name: &str, sql: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mapping").join(name);
    let sql = format!("{sql}\n");
    if std::env::var_os("GOLDEN").is_some_and(|value| value == "write") {
        std::fs::write(&file, &sql).unwrap();
    }
    assert_eq!(sql, std::fs::read_to_string(&file).unwrap(), "{}", file.display());
}

#[test]
fn statements_match_golden_files() {
    let shops = ["mall", "headless", "tenants", "partitioned"];
    let of_shops = shops.map(|shop| (shop, render(&words(), &table(shop), &facts(shop)).unwrap()));
    for (shop, rendered) in of_shops.into_iter().chain([("default", default_tables::rendered().clone())]) {
        assert_golden(&format!("{shop}_close.sql"), &rendered.close);
        assert_golden(&format!("{shop}_overdue.sql"), &rendered.overdue);
        let moves = rendered.functions.iter().find(|function| function.name.ends_with("_move")).unwrap();
        assert_golden(&format!("{shop}_move.sql"), &format!("-- Moves deadlines of {shop}.\n{}", moves.create()));
        assert_eq!(rendered.why_not_moved.is_some(), ["mall", "tenants"].contains(&shop), "{shop}");
    }
}

/// What operators ask of many orders, in the default tables too.
#[test]
fn questions_match_golden_files() {
    let asked = ["mall", "tenants"].map(|shop| (shop, render(&words(), &table(shop), &facts(shop)).unwrap().questions));
    let default = default_tables::rendered().questions.clone();
    for (name, asked) in asked.into_iter().chain([("default", default)]) {
        let parts = [&asked.overdue, &asked.due, &asked.due_minutes, asked.units_by_minute.as_ref().unwrap()];
        let sql = format!("-- What operators ask about {name}.\n{}", parts.map(String::as_str).join(";\n\n"));
        assert_golden(&format!("{name}_questions.sql"), &sql);
    }
}

#[test]
fn close_locks_columns_that_are_read() {
    for (open, columns) in [
        ("\"status\" = 0", r#"o."create_time", o."id", o."status""#),
        (r#""Odd""name" = 0"#, r#"o."Odd""name", o."create_time", o."id", o."status""#),
        ("oms_order IS NOT NULL", "o.*"),
        ("(oms_order.*) IS NOT NULL", "o.*"),
        (r#"U&"delete\005fstatus" = 0"#, "o.*"),
    ] {
        let (mut table, mut facts) = (table("mall"), facts("mall"));
        let integer = ColumnType { base: "int4".into(), sql: "integer".into() };
        facts.orders.columns.insert("Odd\"name".into(), integer);
        table.open = open.to_owned();
        let close = render(&words(), &table, &facts).unwrap().close;
        assert!(close.contains(&format!("SELECT {columns} FROM \"public\".\"oms_order\"")), "{close}");
    }
}

#[test]
fn times_without_zone_need_one() {
    let (mut table, facts) = (table("mall"), facts("mall"));
    table.time_zone = None;
    assert_eq!(render(&words(), &table, &facts).unwrap_err().key, "time_zone");
}

#[test]
fn moment_needs_column_for_times() {
    let (mut table, facts) = (table("mall"), facts("mall"));
    table.close = CloseSettings::Set([("status".to_owned(), "now".to_owned())].into());
    assert_eq!(render(&words(), &table, &facts).unwrap_err().key, "close.status");
}

/// A share lock of a foreign key keeps such a row from being deleted.
#[test]
fn deleted_row_is_locked_as_a_whole() {
    let (mut table, facts) = (table("mall"), facts("mall"));
    assert!(render(&words(), &table, &facts).unwrap().close.contains("FOR NO KEY UPDATE OF o SKIP LOCKED"));
    table.close = CloseSettings::Delete;
    let close = render(&words(), &table, &facts).unwrap().close;
    assert!(
        close.contains("FOR UPDATE OF o SKIP LOCKED") && close.contains("DELETE FROM \"public\".\"oms_order\""),
        "{close}"
    );
}

/// Only a close has a path.
#[test]
fn path_is_a_text_where_an_order_is_paid() {
    let (mut table, facts) = (table("mall"), facts("mall"));
    table.pay = Some([("status".to_owned(), "path".to_owned())].into());
    let functions = render(&words(), &table, &facts).unwrap().functions;
    assert!(functions.iter().any(|function| function.body.contains("SET \"status\" = 'path'")));
}

#[test]
fn views_cannot_be_locked() {
    let (table, mut facts) = (table("mall"), facts("mall"));
    facts.stock[0].1.kind = RelationKind::View;
    assert_eq!(render(&words(), &table, &facts).unwrap_err().key, "stock[0].table");
}

#[test]
fn statements_write_words_of_kind() {
    let words = KindWords {
        kind: Kind::new("acceptance").unwrap(),
        event: "order.not_accepted".into(),
        reason: "merchant's silence".into(),
    };
    let rendered = render(&words, &table("headless"), &facts("headless")).unwrap();
    for part in [
        "INSERT INTO event_outbox (routing_key, type, payload, kind)",
        "SELECT 'order.not_accepted', 'order.not_accepted.v1',",
        "'reason', 'merchant''s silence')\n",
        "true), ''))) END, 'acceptance'",
        "kinds.acceptance.table.close leaves the order open",
    ] {
        assert!(rendered.close.contains(part), "{part}: {}", rendered.close);
    }
    let moves = rendered.functions.iter().find(|function| function.name == "kind_acceptance_move").unwrap();
    for part in ["INSERT INTO alarm_outbox (order_id, deadline, kind)", "m.deadline, 'acceptance'"] {
        assert!(moves.body.contains(part), "{part}: {}", moves.body);
    }
}

#[test]
fn index_is_what_overdue_sorts_by() {
    let index = |shop| render(&words(), &table(shop), &facts(shop)).unwrap().index;
    assert_eq!(
        index("mall"),
        "CREATE INDEX CONCURRENTLY ON \"public\".\"oms_order\" (((create_time + interval '30 minutes') AT TIME ZONE 'Asia/Shanghai'), \"id\") WHERE status = 0 AND delete_status = 0"
    );
    assert!(index("headless").contains("ON \"medusa\".\"order\" (\"expiresAt\", \"id\") WHERE "));
}
