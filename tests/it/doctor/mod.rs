//! `order-timeout doctor` finds nothing on a healthy deployment. On one that is broken in one way it finds exactly that,
//! and nothing any more when its fix was applied.
//!
//! `database.rs`, `workers.rs` and `broker.rs` break one thing after the other; what they share is here.

mod broker;
mod database;
mod workers;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout::operations::doctor::{CHECKED, Options, Report, examine};
use order_timeout_core::problem::{Cause, Problem};
use order_timeout_testkit::away::meanwhile;
use order_timeout_testkit::{TestEnv, wait_for, with_parts};
use regex::Regex;
use sqlx::{AssertSqlSafe, PgPool};

const SECOND: Duration = Duration::from_secs(1);
/// Of the role of the worker and the doctor.
const PASSWORD: &str = "s3cret-4711";

/// Runs a test's future on this thread. Its tables of borrowed texts keep it from being sent to another.
pub fn here<T>(test: impl Future<Output = T>) -> T {
    meanwhile(|| tokio::runtime::Handle::current().block_on(test))
}

/// A deployment on private servers, as its doctor sees it.
struct Stack {
    env: Arc<TestEnv>,
    role: String,
    settings: Settings,
    options: Options,
}

async fn execute(pool: &PgPool, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
}

impl Stack {
    /// With a role of its own, as docs/operating/deploy.md says under "Rights".
    async fn new(env: Arc<TestEnv>) -> Self {
        let role = format!("worker_{}", env.settings.namespace);
        let mut settings = env.settings.clone();
        // No server is away for long here, and a machine that stalls for a second is no finding.
        (settings.database.acquire_timeout, settings.database.statement_timeout) = (10 * SECOND, 10 * SECOND);
        let stack = Self { role, settings, options: Options::default(), env };
        stack
            .sql(
                "CREATE ROLE {role} LOGIN PASSWORD 's3cret-4711'; GRANT USAGE ON SCHEMA public TO {role};
                 GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
            )
            .await;
        let settings = stack.with_account(PASSWORD);
        Self { settings, ..stack }
    }

    fn with_account(&self, password: &str) -> Settings {
        let mut settings = self.settings.clone();
        settings.database.url =
            with_parts(&settings.database.url, Some(&format!("{}:{password}", self.role)), None, None);
        settings
    }

    /// Runs SQL as a superuser. `{role}` is the worker's role, `{database}` its database.
    async fn sql(&self, sql: &str) {
        let database = format!("order_timeout_{}", self.env.settings.namespace);
        execute(&self.env.pool, &sql.replace("{role}", &self.role).replace("{database}", &database)).await;
    }

    async fn report(&self) -> Report {
        examine(&self.settings, &self.options).await
    }

    async fn assert_nothing_found(&self, after: &str) {
        let report = self.report().await;
        assert_eq!(report.problems().collect::<Vec<_>>(), Vec::<&Problem>::new(), "{after}");
    }

    /// The same, as soon as something is found.
    async fn found_in_time(&self, name: Cause) -> Problem {
        wait_for(name.as_str(), async || self.report().await.exit_code() != 0).await;
        self.found(name).await
    }

    async fn wait_until_nothing_found(&self, after: &str) {
        wait_for(after, async || self.report().await.exit_code() == 0).await;
    }

    /// The first finding of this check, if it is the only check that finds something.
    async fn found(&self, name: Cause) -> Problem {
        only(&self.report().await, name)
    }
}

/// The first finding of this check, if it is the only check that finds something.
fn only(report: &Report, cause: Cause) -> Problem {
    let causes: BTreeSet<Cause> = report.problems().map(|problem| problem.cause).collect();
    assert_eq!(causes, BTreeSet::from([cause]), "{:#?}", report.problems().collect::<Vec<_>>());
    let problem = report.problems().next().expect("a problem");
    assert!(!problem.what.is_empty() && !problem.why.is_empty() && !problem.fix.is_empty(), "{problem:?}");
    problem.clone()
}

/// A worker on another host that has just been seen, with these settings that must agree.
async fn register(stack: &Stack, kinds: &str, delays: &str) {
    let namespace = &stack.env.settings.namespace;
    stack
        .sql(&format!(
            "INSERT INTO order_timeout_workers (id, host, pid, version, namespace, kinds, delays)
             VALUES (gen_random_uuid(), 'shop-2', 17, '0.1.0', '{namespace}', '{kinds}', '{delays}')"
        ))
        .await;
}

#[test]
fn documents_list_every_check() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operating/doctor.md");
    let row = Regex::new(r"(?m)^\| `(\w+)` \|").unwrap();
    let text = std::fs::read_to_string(path).unwrap();
    let listed: Vec<&str> = row.captures_iter(&text).map(|found| found.get(1).unwrap().as_str()).collect();
    assert_eq!(listed, CHECKED.iter().map(|cause| cause.as_str()).collect::<Vec<_>>());
}
