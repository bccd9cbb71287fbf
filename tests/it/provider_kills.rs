//! kill -9 of a real worker between every two steps of the closing protocol with a payment provider over HTTP. The next
//! worker brings the order to the same end, from what is in the database and at the provider alone.
//!
//! A proxy before the provider or before Postgres stops the worker at a step: either its request does not arrive, or it
//! takes effect and its answer does not arrive.

use std::time::Duration;

use order_timeout::config::Settings;
use order_timeout_providers::ProviderSettings;
use order_timeout_providers::settings::LimitsSettings;
use order_timeout_testkit::payment_service::{PaymentService, wide_limits};
use order_timeout_testkit::process::WorkerProcess;
use order_timeout_testkit::proxy::{Proxy, Then};
use order_timeout_testkit::{Order, TIMEOUT, TestEnv, host_and_port, wait_for};

use crate::announce::{consume_events, message_id, receive};
use crate::providers::{adjust, begin_attempts};

/// Where the worker is stopped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Provider,
    Database,
}

/// The step at which the worker is killed, what holds then, and what the next worker leaves.
struct Kill {
    before: Before,
    /// In what the worker sends.
    bytes: &'static str,
    then: Then,
    is_paid: bool,
    /// The order's status when it is killed, and how often the provider was asked, and told to cancel.
    killed: (&'static str, usize, usize),
    /// All answers of the provider in the end.
    answered: &'static [&'static str],
}

/// Calls that do not end before the worker is killed.
fn limits() -> LimitsSettings {
    LimitsSettings { timeout: Duration::from_secs(20), ..wide_limits() }
}

fn through(settings: &mut Settings, before: Before, proxy: &Proxy) {
    if before == Before::Database {
        settings.database.url = proxy.address(&settings.database.url);
        return;
    }
    for provider in settings.providers.0.values_mut() {
        let ProviderSettings::Http(http) = provider else { continue };
        // The address has a user, which the settings of a provider refuse.
        http.url = format!("http://{}", host_and_port(&proxy.address(&http.url.clone().into())));
    }
}

/// Everything that the end of an order leaves, without by what it was found.
async fn end_state(env: &TestEnv) -> String {
    sqlx::query_scalar(
        "SELECT concat_ws(' | ',
             (SELECT string_agg(status::text, ' ') FROM orders),
             (SELECT string_agg(available || '/' || reserved, ' ') FROM stock),
             (SELECT string_agg(event, ', ' ORDER BY id) FROM order_events),
             (SELECT string_agg(type, ', ') FROM event_outbox),
             (SELECT string_agg(state, ', ') FROM payment_attempts),
             (SELECT count(*) FROM close_attempts) || ' left')",
    )
    .fetch_one(&env.pool)
    .await
    .unwrap()
}

/// What holds for a worker that looks on from outside, in the words of [`Kill::killed`].
async fn seen(env: &TestEnv, order: &Order, service: &PaymentService) -> (String, usize, usize) {
    let (asked, cancelled) = service.calls();
    (env.status(order).await, asked, cancelled)
}

async fn stop_and_kill(env: &TestEnv, order: &Order, service: &PaymentService, kill: &Kill) {
    let server = match kill.before {
        Before::Provider => service.url().into(),
        Before::Database => env.settings.database.url.clone(),
    };
    let proxy = Proxy::before(&server).await;
    let is_there = proxy.cut_at(kill.bytes, kill.then);
    let mut settings = env.settings.clone();
    through(&mut settings, kill.before, &proxy);
    let worker = WorkerProcess::start(&settings);
    wait_for("the step", async || is_there()).await;
    let (status, asked, cancelled) = kill.killed;
    wait_for("its effect", async || seen(env, order, service).await == (status.to_owned(), asked, cancelled)).await;
    worker.kill();
    assert_eq!(seen(env, order, service).await, (status.to_owned(), asked, cancelled));
}

fn killed_at(kill: Kill) {
    let service = PaymentService::start();
    let settings = |settings: &mut Settings| {
        adjust(settings);
        service.join(settings, "card", limits());
    };
    TestEnv::builder().settings(settings).with_clock().run(async move |env| {
        let order = env.order(Duration::ZERO).await;
        let reference = order.id.to_string();
        begin_attempts(&env, &[order], "card").await;
        assert!(!kill.is_paid || service.pay(&reference));
        env.deliver([&order]).await;
        let mut events = consume_events(&env).await;
        stop_and_kill(&env, &order, &service, &kill).await;
        // The lease of the killed worker is over.
        env.advance(Duration::from_secs(600)).await;
        let worker = WorkerProcess::start(&env.settings);
        let end = match kill.is_paid {
            false => "closed | 1000000/0 | closed | order.closed.v1 | closed | 0 left",
            true => "paid | 999999/0 | paid | order.paid_late_settled.v1 | paid | 0 left",
        };
        wait_for("the end", async || end_state(&env).await == end).await;
        let event = receive(&mut events, 1).await.remove(0);
        // An order behind it: by the time it has ended, nothing more was to be done about the first.
        let sentinel = env.order(Duration::ZERO).await;
        env.deliver([&sentinel]).await;
        let last = receive(&mut events, 1).await.remove(0);
        assert_eq!(worker.terminate(TIMEOUT), 0);
        let ids = "SELECT count(*) FROM event_outbox WHERE id::text = ANY ($1)";
        let ids = sqlx::query_scalar(ids).bind([&event, &last].map(|event| message_id(event).to_string()));
        let (of_events, all): (i64, _) =
            (ids.fetch_one(&env.pool).await.unwrap(), env.count("SELECT count(*) FROM event_outbox").await);
        assert_eq!((of_events, all), (2, 2), "each event was published once, by its id");
        assert_eq!(service.answered(), kill.answered);
        env.assert_ledger().await;
        env.assert_nothing_left_undone().await;
    });
}

const UNPAID: Kill = Kill {
    before: Before::Provider,
    bytes: "POST /ask",
    then: Then::Vanish,
    is_paid: false,
    killed: ("closing", 0, 0),
    answered: &["ask: open", "cancel: closed"],
};

const PAID: Kill = Kill { is_paid: true, answered: &["ask: paid"], ..UNPAID };

#[test]
fn kill_before_question_closes_once() {
    killed_at(Kill { bytes: "POST /ask", ..UNPAID });
}

#[test]
fn kill_before_answer_closes_once() {
    killed_at(Kill {
        bytes: "POST /ask",
        then: Then::StallAnswers,
        killed: ("closing", 1, 0),
        answered: &["ask: open", "ask: open", "cancel: closed"],
        ..UNPAID
    });
}

#[test]
fn kill_before_cancel_closes_once() {
    killed_at(Kill {
        bytes: "POST /cancel",
        killed: ("closing", 1, 0),
        answered: &["ask: open", "ask: open", "cancel: closed"],
        ..UNPAID
    });
}

#[test]
fn kill_before_cancel_answer_closes_once() {
    killed_at(Kill {
        bytes: "POST /cancel",
        then: Then::StallAnswers,
        killed: ("closing", 1, 1),
        answered: &["ask: open", "cancel: closed", "ask: closed"],
        ..UNPAID
    });
}

#[test]
fn kill_before_close_commit_closes_once() {
    killed_at(Kill {
        before: Before::Database,
        bytes: "cancel: closed",
        killed: ("closing", 1, 1),
        answered: &["ask: open", "cancel: closed", "ask: closed"],
        ..UNPAID
    });
}

#[test]
fn kill_after_close_commit_closes_once() {
    killed_at(Kill {
        before: Before::Database,
        bytes: "cancel: closed",
        then: Then::StallAnswersOfCommit,
        killed: ("closed", 1, 1),
        ..UNPAID
    });
}

#[test]
fn kill_before_settle_commit_settles_once() {
    killed_at(Kill {
        before: Before::Database,
        bytes: "ask: paid",
        killed: ("closing", 1, 0),
        answered: &["ask: paid", "ask: paid"],
        ..PAID
    });
}

#[test]
fn kill_after_settle_commit_settles_once() {
    killed_at(Kill {
        before: Before::Database,
        bytes: "ask: paid",
        then: Then::StallAnswers,
        killed: ("paid", 1, 0),
        ..PAID
    });
}
