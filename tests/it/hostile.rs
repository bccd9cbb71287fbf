//! Messages that are meant to hurt, from somebody who may publish.

use std::time::Duration;

use crate::support::process::WorkerProcess;
use crate::support::{on_stage, raw, wait_for};

#[test]
fn a_message_of_tables_in_tables_is_an_alarm_like_any_other() {
    on_stage(
        |_| {},
        async |stage| {
            let orders = stage.orders(2, Duration::from_millis(500)).await;
            // The AMQP client reads tables by recursion: on a usual stack the worker would die of this one, and so would
            // every worker that it is delivered to next.
            let (due, headers) = (stage.names().due(), raw::nested_table());
            raw::publish(&stage.settings, &due, "due", &headers, &orders[0].body());
            stage.deliver(&orders[1..]).await;
            let worker = WorkerProcess::start(&stage.settings);
            wait_for("both closes", async || stage.closed().await == 2).await;
            assert_eq!(stage.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 2);
            assert_eq!(worker.terminate(Duration::from_secs(20)), 0);
            stage.assert_drained().await;
        },
    );
}
