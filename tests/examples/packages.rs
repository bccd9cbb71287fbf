//! The packages in clients/ run their own tests against a real worker, broker and database. What they need and cannot be had on
//! this machine is reported as skipped.

use std::process::Command;
use std::time::Duration;

use order_timeout_testkit::away::meanwhile;
use order_timeout_testkit::skip::skipped;
use order_timeout_testkit::{RunningWorker, TestEnv};

use crate::listeners::{node, python};
use crate::{amqp_url, database_url, root};

/// As `timeout` reads it. The tests take ten seconds.
const LIMIT: &str = "180";

fn passes_its_tests(tests: Command) {
    let mut command = Command::new("timeout");
    command.arg(LIMIT).arg(tests.get_program()).args(tests.get_args());
    command.envs(tests.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(tests.get_current_dir().unwrap_or(root()));
    TestEnv::builder().run(async move |env| {
        let mut settings = env.settings.clone();
        settings.sweep.grace = Duration::ZERO;
        let worker = RunningWorker::start(settings).await;
        command.env("AMQP_URL", amqp_url(&env)).env("DATABASE_URL", database_url(&env));
        command.env("NAMESPACE", &env.settings.namespace).env("FIXTURES", root().join("crates/core/tests/fixtures"));
        let output = meanwhile(|| command.output()).unwrap();
        let printed = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
        assert!(output.status.success(), "{printed}");
        worker.stop().await;
    });
}

#[test]
fn python_package_passes_its_tests() {
    match python() {
        Ok(mut command) => {
            command.args(["-m", "unittest", "discover", "-s"]).arg(root().join("clients/python/tests"));
            passes_its_tests(command);
        }
        Err(why) => skipped("packages::python_package_passes_its_tests", &why),
    }
}

#[test]
fn node_package_passes_its_tests() {
    match node() {
        Ok((mut command, folder)) => {
            // Node looks for a program's packages beside the program.
            std::fs::copy(root().join("clients/node/test/package.test.js"), folder.join("package.test.mjs")).unwrap();
            command.args(["--test", "package.test.mjs"]);
            passes_its_tests(command);
        }
        Err(why) => skipped("packages::node_package_passes_its_tests", &why),
    }
}
