//! What README tells an order service to run: run here as it stands there.

use sqlx::AssertSqlSafe;

use crate::support::{Stage, on_stage};

const README: &str = include_str!("../../README.md");

/// The blocks of SQL, in their order.
fn blocks() -> Vec<&'static str> {
    let sql = README.split("```sql\n").skip(1);
    sql.map(|rest| rest.split("```").next().expect("the end of a block")).collect()
}

async fn run(stage: &Stage, sql: &str) -> u64 {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&stage.pool).await.unwrap().rows_affected()
}

#[test]
fn an_order_is_created_and_paid_as_the_readme_says() {
    on_stage(
        |_| {},
        async |stage| {
            let [create, pay] = blocks()[..] else {
                panic!("README has blocks of SQL that nobody tries: {:?}", blocks())
            };
            stage.stock("mug", 10).await;
            let of_mug = async |column: &str| {
                let sql = format!("SELECT {column} FROM stock WHERE article_id = 'mug'");
                sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql)).fetch_one(&stage.pool).await.unwrap()
            };
            run(&stage, create).await;
            assert_eq!((of_mug("available").await, of_mug("reserved").await), (8, 2));
            assert_eq!(stage.count("SELECT count(*) FROM alarm_outbox a JOIN orders o ON o.id::text = a.order_id AND o.expires_at = a.deadline").await, 1);
            stage.assert_ledger().await;

            assert_eq!(run(&stage, pay).await, 1);
            assert_eq!((of_mug("available").await, of_mug("reserved").await), (8, 0));
            assert_eq!(stage.count("SELECT count(*) FROM orders WHERE status = 'paid'").await, 1);
            assert_eq!(run(&stage, pay).await, 0, "a second payment changes nothing");
            assert_eq!(of_mug("reserved").await, 0);
            stage.assert_ledger().await;
            // One that reserves nothing, such as the quickstart's.
            sqlx::query("UPDATE orders SET status = 'unpaid', paid_at = NULL").execute(&stage.pool).await.unwrap();
            sqlx::query("DELETE FROM order_items").execute(&stage.pool).await.unwrap();
            assert_eq!(run(&stage, pay).await, 1, "paid is paid, with or without articles");
        },
    );
}
