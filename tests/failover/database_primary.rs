//! A Postgres primary that dies under load and is replaced by its standby: committed data stays, and every order is
//! closed once.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::QueueDeleteOptions;
use order_timeout::Settings;
use order_timeout_testkit::away::keep_events;
use order_timeout_testkit::private::Private;
use order_timeout_testkit::process::WorkerProcess;
use order_timeout_testkit::{TIMEOUT, TestEnv, wait_for, with_parts};

use crate::forwarder::Forwarder;
use crate::traffic::{Traffic, assert_each_closed_once, by_sweep, database_time, print_lateness};

const SECOND: Duration = Duration::from_secs(1);
/// Through the lane and through the wheel.
const DELAYS: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(5)];
const AFTERMATH: Duration = Duration::from_secs(15);

fn port(server: &Private) -> u16 {
    url::Url::parse(&server.url).ok().and_then(|url| url.port()).expect("an address with a port")
}

#[test]
fn promoted_standby_closes_orders_once() {
    let primary = Arc::new(Private::postgres(&[]));
    let standby = Arc::new(primary.standby());
    // Like a virtual address or a proxy: the client library supports only one address.
    let front = Arc::new(Forwarder::start(vec![port(&primary)]));
    let url = with_parts(&primary.url.clone().into(), None, Some(&format!("127.0.0.1:{}", front.port)), None);
    // Kept until the test environment is cleaned up.
    let _outlive = (primary.clone(), standby.clone(), front.clone());
    TestEnv::builder()
        .settings(|settings| {
            settings.sweep.grace = Settings::defaults().sweep.grace;
            settings.database.url = url;
            settings.database.url = settings.database.url_of(&format!("order_timeout_{}", settings.namespace));
        })
        .run(async move |env| fail_over(&env, &primary, &standby, &front).await);
}

/// From now on a commit is answered only after the standby has it.
async fn commit_on_both(env: &TestEnv) {
    // Separate statements: ALTER SYSTEM cannot run in a transaction.
    for statement in ["ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()"] {
        sqlx::query(statement).execute(&env.pool).await.unwrap();
    }
    let in_step = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'";
    wait_for("a standby in step", async || env.count(in_step).await == 1).await;
}

async fn fail_over(env: &Arc<TestEnv>, primary: &Private, standby: &Private, front: &Forwarder) {
    commit_on_both(env).await;
    let workers = [WorkerProcess::start(&env.settings), WorkerProcess::start(&env.settings)];
    let kept_events = keep_events(env).await;
    let traffic = Traffic::start(env.clone(), &DELAYS).await;
    tokio::time::sleep(10 * SECOND).await;

    let killed_at = database_time(env).await;
    tokio::task::block_in_place(|| {
        primary.kill();
        standby.promote();
    });
    front.set_servers(vec![port(standby)]);
    front.cut();
    wait_for("the new primary", async || {
        sqlx::query_scalar::<_, bool>("SELECT NOT pg_is_in_recovery()").fetch_one(&env.pool).await.unwrap_or(false)
    })
    .await;
    let moved_at = database_time(env).await;
    tokio::time::sleep(AFTERMATH).await;

    let taken = traffic.stop().await;
    assert_each_closed_once(env, &taken, &kept_events).await;
    env.channel().queue_delete(kept_events.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
    println!(
        "\nPostgres, primary killed and standby promoted within {}: {} orders taken, {} commits said again; each closed once, {} by the sweep",
        moved_at - killed_at,
        taken.orders.len(),
        taken.committed_again,
        by_sweep(env).await
    );
    print_lateness(env, "before", killed_at - AFTERMATH, killed_at).await;
    print_lateness(env, &format!("{AFTERMATH:?} after"), killed_at, killed_at + AFTERMATH).await;
    for worker in workers {
        assert_eq!(worker.terminate(TIMEOUT), 0, "a worker drained in time");
    }
    env.assert_drained().await;
}
