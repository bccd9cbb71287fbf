//! Foreign shops are adopted from configuration alone, and a mapping that would do harm is refused.

mod attempts;
mod backlog;
mod deadlines;
mod foreseen;
mod never_due;
mod payments;
mod proposed;
mod providers;
mod refused;
mod shops;
pub mod types;

use std::path::{Path, PathBuf};

use order_timeout::Settings;
use sqlx::AssertSqlSafe;

use order_timeout_testkit::TestEnv;

/// A file of one of the shops.
fn fixture(shop: &str, file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/shops").join(shop).join(file)
}

/// Its text.
pub fn text(shop: &str, file: &str) -> String {
    let path = fixture(shop, file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Sets the mapping of this shop.
pub fn map(settings: &mut Settings, shop: &str) {
    settings.kinds = Settings::load(Some(&fixture(shop, "order-timeout.toml")), &[]).expect("a valid mapping").kinds;
}

/// Leaves payments out of the mappings: the shop pays by itself.
pub fn without_payments(settings: &mut Settings) {
    for table in settings.kinds.values_mut().filter_map(|kind| kind.table.as_mut()) {
        (table.pay, table.closing, table.reopen, table.attempts) = (None, None, None, None);
        for stock in &mut table.stock {
            stock.consume.clear();
            stock.take.clear();
            stock.left = None;
        }
    }
}

pub async fn execute(env: &TestEnv, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&env.pool).await.unwrap();
}
