//! Work that is abandoned while the database has not answered leaves nothing behind: its connection is closed, and no later
//! work happens inside its transaction.

use std::future::pending;

use order_timeout::operations::pause_closing;
use order_timeout::postgres::Database;
use order_timeout_testkit::away::with_database_behind;
use order_timeout_testkit::proxy::{Direction, Proxy, Then};
use order_timeout_testkit::{TestEnv, wait_for};
use sqlx::Connection;

/// Work as of a request about an order: it reads inside a transaction.
async fn read_in_transaction(database: &Database) {
    let work = async |connection: &mut sqlx::PgConnection| {
        let _transaction = connection.begin().await?;
        pending().await
    };
    let _: Result<(), _> = database.run(work).await;
}

#[test]
fn abandoned_begin_hides_no_later_pause() {
    TestEnv::builder().run(async |env| {
        let network = Proxy::before(&env.settings.database.url).await;
        let settings = with_database_behind(&env, &network);
        let database = Database::connect(&settings.database, 1).await.unwrap();
        let is_held_back = network.cut_at("BEGIN", Then::StallAnswers);
        tokio::select! {
            () = read_in_transaction(&database) => unreachable!("it never ends"),
            () = wait_for("a transaction without an answer", async || is_held_back()) => {}
        }
        network.restore();
        let paused = pause_closing::pause(&database, None, "the provider is away", "night shift").await.unwrap();
        assert!(paused.began);
        assert_eq!(env.count("SELECT count(*) FROM closing_pauses WHERE resumed_at IS NULL").await, 1);
    });
}

#[test]
fn vanished_server_keeps_no_connection() {
    TestEnv::builder().run(async |env| {
        let network = Proxy::before(&env.settings.database.url).await;
        let settings = with_database_behind(&env, &network);
        let database = Database::connect(&settings.database, 1).await.unwrap();
        let work = async |connection: &mut sqlx::PgConnection| {
            sqlx::query("SELECT 1").execute(connection).await?;
            network.stall_one_way(Direction::ToClient);
            Ok(())
        };
        database.run(work).await.unwrap();
        wait_for("a place for another connection", async || database.has_spare_connection()).await;
    });
}
