//! Malicious messages from a publisher with valid credentials.

use std::time::Duration;

use order_timeout_testkit::process::WorkerProcess;
use order_timeout_testkit::{TIMEOUT, TestEnv, raw, wait_for};

#[test]
fn alarm_with_nested_header_tables_closes_order() {
    TestEnv::builder().run(async |env| {
        let orders = env.orders(2, Duration::from_millis(500)).await;
        // The AMQP client parses tables recursively: this message, read whole, would crash the worker, and every worker
        // that it is redelivered to.
        let (due, headers) = (env.names().due(), raw::nested_table());
        raw::publish(&env.settings, &due, "due", &headers, &orders[0].body());
        env.deliver(&orders[1..]).await;
        let worker = WorkerProcess::start(&env.settings);
        wait_for("both closes", async || env.closed().await == 2).await;
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 2);
        assert_eq!(worker.terminate(TIMEOUT), 0);
        env.assert_drained().await;
    });
}
