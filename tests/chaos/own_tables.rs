//! A run over tables of the shop's own (`own_tables.sql`), which the workers know by a mapping (`own_tables.toml`).
//!
//! The run's statements are the same: its connections see views with the names of the default tables. The workers' see none
//! of them: what falls back to a default table finds it empty, and what writes there is found at the end.
//!
//! The shop reopens no late money, lowers no price and is paid for no order before it is there, which mapped tables do not
//! have. So nothing is left out.

use order_timeout::Settings;
use order_timeout_core::kind::Kind;
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{TestEnv, paths};

/// Gives the default kind the mapping.
pub fn map(settings: &mut Settings) {
    let file = paths::repository().join("tests/chaos/own_tables.toml");
    let mapped = Settings::load(Some(&file), &[]).expect("a valid mapping").kinds.remove(&Kind::ORDER);
    let (mapped, kind) = (mapped.expect("a mapping"), settings.kinds.entry(Kind::ORDER).or_default());
    (kind.table, kind.origin) = (mapped.table, mapped.origin);
}

/// Creates the tables, and the functions by which payments pay their orders. From now on the environment's pool sees the
/// views.
pub async fn install(env: &TestEnv) {
    sqlx::raw_sql(include_str!("own_tables.sql")).execute(&env.pool).await.unwrap();
    let (code, printed, error) = call_with(&env.settings, &["adopt", "--kind", "order", "--install"]).await;
    assert!(code == 0 && printed.contains("kind_order_pay"), "{code}: {printed}{error}");
    let options = (*env.pool.connect_options()).clone().options([("search_path", "as_default,public")]);
    env.pool.set_connect_options(options);
    // Those that it has see the default tables.
    while env.pool.size() > 0 {
        env.pool.acquire().await.unwrap().close().await.unwrap();
    }
    assert_eq!(env.count("SELECT count(*) FROM orders JOIN shop.purchases ON purchase_no = id").await, 0);
}

/// What was written to the default tables.
pub async fn violations(env: &TestEnv) -> Vec<String> {
    let written = "SELECT (SELECT count(*) FROM public.orders) + (SELECT count(*) FROM public.order_items)
                        + (SELECT count(*) FROM public.order_events)";
    let written = env.count(written).await;
    (written > 0).then(|| format!("{written} rows were written to the default tables")).into_iter().collect()
}
