//! The default tables as a mapping: `default_tables.toml`, and the facts that the catalog would tell of them.
//!
//! Pure: no I/O. The facts are constants, so that no command looks up what our own migrations say.

use std::sync::LazyLock;

use config::{Config, File, FileFormat};
use order_timeout_core::kind::Kind;

use super::{ColumnType, Facts, KindWords, Relation, RelationKind, Rendered, render};
use crate::config::kinds::TableSettings;

/// As a settings file has it below `kinds.NAME.table`.
pub const MAPPING: &str = include_str!("default_tables.toml");

/// Columns that the statements name: name, type in `pg_type`, type as SQL casts to it.
type Columns = &'static [(&'static str, &'static str, &'static str)];

const ORDERS: Columns = &[
    ("id", "uuid", "uuid"),
    ("status", "order_status", "order_status"),
    ("expires_at", "timestamptz", "timestamp with time zone"),
    ("paid_at", "timestamptz", "timestamp with time zone"),
    ("closed_at", "timestamptz", "timestamp with time zone"),
    ("closed_by", "text", "text"),
    ("close_reason", "text", "text"),
];
const ORDER_ITEMS: Columns = &[("order_id", "uuid", "uuid"), ("article_id", "text", "text")];
const STOCK: Columns =
    &[("article_id", "text", "text"), ("available", "int8", "bigint"), ("reserved", "int8", "bigint")];
const ORDER_RESOURCES: Columns =
    &[("order_id", "uuid", "uuid"), ("kind", "text", "text"), ("resource_id", "text", "text")];
const RESERVED_RESOURCES: Columns = &[
    ("kind", "text", "text"),
    ("id", "text", "text"),
    ("available", "int8", "bigint"),
    ("reserved", "int8", "bigint"),
];

static RENDERED: LazyLock<Rendered> = LazyLock::new(|| {
    let words = KindWords { kind: Kind::ORDER, event: "order.closed".into(), reason: "unpaid".into() };
    render(&words, table(), &facts()).expect("a test renders it")
});

/// The statements of the default tables.
#[must_use]
pub fn rendered() -> &'static Rendered {
    &RENDERED
}

static TABLE: LazyLock<TableSettings> = LazyLock::new(|| {
    let read = Config::builder().add_source(File::from_str(MAPPING, FileFormat::Toml)).build();
    let table: TableSettings = read.and_then(Config::try_deserialize).expect("a test reads it");
    TableSettings { is_built_in: true, ..table }
});

/// The mapping.
#[must_use]
pub fn table() -> &'static TableSettings {
    &TABLE
}

/// What the catalog would say of them.
#[must_use]
pub fn facts() -> Facts {
    Facts {
        orders: relation("orders", ORDERS),
        deadline_type: "TIMESTAMPTZ".into(),
        attempts: None,
        stock: vec![
            (relation("order_items", ORDER_ITEMS), relation("stock", STOCK)),
            (relation("order_resources", ORDER_RESOURCES), relation("reserved_resources", RESERVED_RESOURCES)),
        ],
        status: Some("status"),
        money_fault: None,
    }
}

fn relation(name: &str, columns: Columns) -> Relation {
    let column = |(name, base, sql): &(&str, &str, &str)| {
        ((*name).to_owned(), ColumnType { base: (*base).to_owned(), sql: (*sql).to_owned() })
    };
    Relation {
        schema: String::new(),
        name: name.to_owned(),
        kind: RelationKind::Table,
        columns: columns.iter().map(column).collect(),
    }
}
