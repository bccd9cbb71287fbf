//! The page in a real Chromium, driven through WebDriver, before a real worker, broker and database: what it shows in every
//! state, that the keyboard alone reaches and does everything, that it fits a phone, and that axe-core finds no barrier.
//!
//! Reported as skipped where there is no Chromium. `ORDER_TIMEOUT_SCREENSHOTS=1` has the tests write the pictures in
//! docs/images.

mod browser;
mod keyboard;
mod speed;
mod states;

use std::sync::Arc;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout_testkit::page::TOKEN;
use order_timeout_testkit::proxy::Proxy;
use order_timeout_testkit::{RunningWorker, TestEnv};
use sqlx::AssertSqlSafe;
use tempfile::NamedTempFile;

use browser::Browser;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// What the first page says of a worker that does its work.
const ON_TIME: &str = "Orders are closed on time.";

/// A test of the page in the browser: what there is before the first page is open.
struct PageTest {
    name: &'static str,
    adjust: Box<dyn FnOnce(&mut Settings)>,
    sql: &'static str,
    behind: Option<Server>,
}

/// A server that a test can make unavailable.
#[derive(Clone, Copy)]
enum Server {
    Broker,
    Database,
}

/// The first page of a worker, which says that orders are closed on time.
struct Opened {
    env: Arc<TestEnv>,
    worker: RunningWorker,
    browser: Browser,
    /// Before the server of [`PageTest::behind`].
    network: Option<Proxy>,
}

/// A token opens the page for changes.
fn page_test(name: &'static str) -> PageTest {
    PageTest { name, adjust: Box::new(|_| {}), sql: "", behind: None }
}

impl PageTest {
    fn settings(self, adjust: impl FnOnce(&mut Settings) + 'static) -> Self {
        Self { adjust: Box::new(adjust), ..self }
    }

    /// Runs this before the worker starts.
    fn prepared_by(self, sql: &'static str) -> Self {
        Self { sql, ..self }
    }

    /// Puts a network before this server that the test can cut.
    fn behind(self, server: Server) -> Self {
        Self { behind: Some(server), ..self }
    }

    /// Opens the first page, and marks it, so that the test knows whether it was loaded again. Nothing is run where there is
    /// no browser.
    fn run<T, F>(self, test: T)
    where
        T: FnOnce(Opened) -> F + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let Self { name, adjust, sql, behind } = self;
        if !browser::is_installed(name) {
            return;
        }
        let token = NamedTempFile::new().unwrap();
        let with_page = order_timeout_testkit::page::with_page(Some(&token));
        TestEnv::builder().settings(with_page).settings(adjust).run(async move |env| {
            execute(&env, sql).await;
            let (settings, network) = with_network(&env.settings, behind).await;
            let worker = RunningWorker::start(settings).await;
            let browser = Browser::open(worker.http.expect("the worker serves the page"), name).await;
            browser.visit("/").await;
            browser.wait_for_text("#verdict", ON_TIME).await;
            browser.mark().await;
            test(Opened { env, worker, browser, network }).await;
        });
    }
}

async fn with_network(settings: &Settings, behind: Option<Server>) -> (Settings, Option<Proxy>) {
    let mut settings = settings.clone();
    let url = match behind {
        None => return (settings, None),
        Some(Server::Broker) => &mut settings.amqp.url,
        Some(Server::Database) => &mut settings.database.url,
    };
    let network = Proxy::before(url).await;
    *url = network.address(url);
    (settings, Some(network))
}

async fn execute(env: &TestEnv, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&env.pool).await.unwrap();
}

/// An alarm that could not be handled.
async fn park(env: &TestEnv, reason: &str, order_id: &str, body: &[u8]) {
    let insert =
        "INSERT INTO parked_alarms (reason, detail, order_id, body) VALUES ($1, 'a trigger refuses it', $2, $3)";
    sqlx::query(insert).bind(reason).bind(order_id).bind(body).execute(&env.pool).await.unwrap();
}

/// A shop's afternoon: orders that fall due over the next hours, with a sale at the hour and a half.
async fn fill(env: &TestEnv) {
    execute(
        env,
        "WITH placed AS (
             INSERT INTO orders (id, expires_at, amount_minor, currency)
             SELECT gen_random_uuid(),
                    now() + interval '1 minute' * (12 + n % 330)
                        + CASE WHEN n % 5 = 0 THEN interval '0' ELSE interval '1 minute' * ((n * 37 % 11) - 5) END,
                    999 + n * 7919 % 20000, CASE WHEN n % 9 = 0 THEN 'USD' ELSE 'EUR' END
             FROM generate_series(1, 1500) n
             UNION ALL
             SELECT gen_random_uuid(), now() + interval '90 minutes' + interval '1 second' * (n % 300), 4999, 'EUR'
             FROM generate_series(1, 600) n
             RETURNING id)
         INSERT INTO order_items (order_id, article_id, quantity) SELECT id, 'article', 1 FROM placed",
    )
    .await;
}

/// The alarms of all orders that are due within a minute, in one statement.
async fn write_alarms(env: &TestEnv) {
    execute(
        env,
        "INSERT INTO alarm_outbox (order_id, deadline)
         SELECT id::text, expires_at FROM orders WHERE status = 'unpaid' AND expires_at < now() + interval '1 minute'",
    )
    .await;
}

/// Logs in with the form.
async fn log_in(browser: &Browser, who: &str) {
    browser.visit("/login").await;
    browser.click("#who").await;
    browser.type_text(who).await;
    browser.click("#token").await;
    browser.type_text(TOKEN).await;
    browser.click("main form button").await;
    browser.wait_for_text("h1", "Parked alarms").await;
}
