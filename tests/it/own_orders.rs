//! A shop that keeps its own table of orders: the example's two statements are all it takes.

use std::path::Path;
use std::time::Duration;

use order_timeout::Moment;

use crate::support::process::{order_timeout, run};
use crate::support::{Stage, on_stage, wait_for};

const SCHEMA: &str = include_str!("../../examples/own_orders/schema.sql");

fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/own_orders").join(name);
    path.to_str().expect("a path in plain letters").to_owned()
}

async fn states(stage: &Stage) -> Vec<(i64, String)> {
    sqlx::query_as("SELECT id, state FROM public.purchases ORDER BY id").fetch_all(&stage.pool).await.unwrap()
}

#[test]
fn a_table_of_the_shops_own_is_closed_by_alarm_and_sweep_and_its_events_are_announced() {
    on_stage(
        |settings| {
            settings.orders.close_sql = example("close.sql");
            settings.orders.overdue_sql = example("overdue.sql");
            // In which an alarm arrives on a busy machine, too.
            settings.sweep.grace = Duration::from_secs(4);
        },
        async |stage| {
            sqlx::raw_sql(SCHEMA).execute(&stage.pool).await.unwrap();
            // First, or the sweep would be at the orders before their alarms are.
            let worker = stage.worker().await;
            let publisher = stage.publisher().await;
            sqlx::raw_sql(
                "INSERT INTO public.purchases (id, pay_until, state) VALUES
                     (1, now() + interval '2 s', 'open'), (2, now() + interval '2 s', 'paid'),
                     (3, now() + interval '1 s', 'open'), (4, now() + interval '1 h', 'open')",
            )
            .execute(&stage.pool)
            .await
            .unwrap();
            let deadline = Moment::now_by_local_clock() + Duration::from_secs(2);
            // Nobody schedules the third; the last is not there, or not of the table's form.
            for id in ["1", "2", "none", "99"] {
                publisher.schedule(id, deadline).await.unwrap();
            }
            let wanted = ["expired", "paid", "expired", "open"];
            let as_wanted = |states: Vec<(i64, String)>| states.iter().map(|(_, state)| state).eq(wanted);
            wait_for("the closes", async || as_wanted(states(&stage).await)).await;
            let sent = "SELECT count(*) FROM event_outbox WHERE sent_at IS NOT NULL";
            wait_for("the events", async || stage.count(sent).await == 2).await;
            assert_eq!(
                stage.count("SELECT count(*) FROM event_outbox WHERE payload ->> 'closed_by' = 'sweep'").await,
                1
            );
            wait_for("the alarms of no order", async || stage.parked().await.len() == 2).await;
            worker.stop().await;
            assert!(as_wanted(states(&stage).await));
        },
    );
}

#[test]
fn one_of_the_two_statements_alone_is_refused() {
    on_stage(
        |_| {},
        async |stage| {
            for (given, missing) in [("close_sql", "overdue_sql"), ("overdue_sql", "close_sql")] {
                let one = format!("orders.{given}=own.sql");
                let (code, _, error) = run(order_timeout(&stage.settings).args(["worker", "--set", &one]));
                assert!(code == 2 && error.contains(&format!("without orders.{missing}")), "{error}");
            }
        },
    );
}
