//! The default tables as a mapping: `default_tables.toml`, and the facts that the catalog would tell of them.
//!
//! Pure: no I/O. The facts are constants, so that no command looks up what our own migrations say.

use std::sync::LazyLock;

use config::{Config, File, FileFormat};
use order_timeout_core::kind::Kind;

use super::{ColumnType, Facts, KindWords, Questions, Relation, RelationKind, render};
use crate::config::kinds::TableSettings;

const MAPPING: &str = include_str!("default_tables.toml");

/// Columns that the questions name: name, type in `pg_type`, type as SQL casts to it.
type Columns = &'static [(&'static str, &'static str, &'static str)];

const ORDERS: Columns = &[("id", "uuid", "uuid"), ("expires_at", "timestamptz", "timestamp with time zone")];
const ORDER_ITEMS: Columns = &[("order_id", "uuid", "uuid"), ("article_id", "text", "text")];

static QUESTIONS: LazyLock<Questions> = LazyLock::new(|| {
    let words = KindWords { kind: Kind::ORDER, event: "order.closed".into(), reason: "unpaid".into() };
    render::questions(&words, &mapping(), &facts()).expect("a test renders it")
});

/// What operators ask about the default tables.
#[must_use]
pub fn questions() -> &'static Questions {
    &QUESTIONS
}

fn mapping() -> TableSettings {
    let read = Config::builder().add_source(File::from_str(MAPPING, FileFormat::Toml)).build();
    read.and_then(Config::try_deserialize).expect("a test reads it")
}

fn facts() -> Facts {
    Facts {
        orders: relation("orders", ORDERS),
        deadline_type: "TIMESTAMPTZ".into(),
        give_back: vec![(relation("order_items", ORDER_ITEMS), relation("stock", &[]))],
        consume: Vec::new(),
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
