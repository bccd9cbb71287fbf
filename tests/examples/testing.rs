//! The tests in examples/testing/ pass against a worker on a database for tests. What they need and cannot be had on this machine
//! is reported as skipped.

use std::process::Command;

use order_timeout_testkit::TestEnv;
use order_timeout_testkit::away::meanwhile;
use order_timeout_testkit::skip::skipped;
use url::Url;

use crate::listeners::{folder, install, node, python};
use crate::{database_url, root};

async fn execute(env: &TestEnv, sql: String) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&env.pool).await.unwrap();
}

fn passes(test: &str, command: Result<Command, String>) {
    let mut command = match command {
        Ok(command) => command,
        Err(why) => return skipped(&format!("testing::{test}"), &why),
    };
    TestEnv::builder().with_clock().run(async move |env| {
        let worker = env.worker().await;
        // The driver for Java refuses a password of one round of hashing, as that of the tests' server.
        let role = &env.settings.namespace;
        execute(&env, format!("CREATE ROLE {role} LOGIN SUPERUSER PASSWORD '{role}'")).await;
        let url = Url::parse(&database_url(&env)).unwrap();
        let jdbc = format!("jdbc:postgresql://{}?user={role}&password={role}", &url[url::Position::BeforeHost..]);
        command.env("DATABASE_URL", database_url(&env)).env("JDBC_URL", jdbc);
        let output = meanwhile(|| command.output()).unwrap();
        execute(&env, format!("DROP ROLE {role}")).await;
        let printed = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
        assert!(output.status.success(), "{printed}");
        worker.stop().await;
    });
}

#[test]
fn pytest_fixture_moves_clock() {
    let pytest = || {
        let mut command = python()?;
        command.args(["-m", "pytest", "-p", "no:cacheprovider"]).arg(root().join("examples/testing/python"));
        Ok(command)
    };
    passes("pytest_fixture_moves_clock", pytest());
}

#[test]
fn node_test_moves_clock() {
    let test = || {
        let (mut command, folder) = node()?;
        std::fs::copy(root().join("examples/testing/node/timeout.test.mjs"), folder.join("timeout.test.mjs")).unwrap();
        command.args(["--test", "timeout.test.mjs"]);
        Ok(command)
    };
    passes("node_test_moves_clock", test());
}

/// With the libraries as Debian packages them, unpacked and not installed.
#[test]
fn junit_extension_moves_clock() {
    let junit = || {
        let folder = folder("junit");
        install(&folder, "javac", &["--version"])?;
        if !folder.join("usr/share/java/postgresql.jar").exists() {
            let unpack = "apt-get download libpostgresql-jdbc-java junit5 libapiguardian-java libopentest4j-java \
                          libpicocli-java libunivocity-parsers-java && for file in *.deb; do dpkg -x $file .; done";
            install(&folder, "sh", &["-c", unpack])?;
        }
        let path = format!("{0}/usr/share/java/*:{0}/classes", folder.display());
        let source = root().join("examples/testing/java/TimeoutTest.java");
        install(&folder, "javac", &["-cp", &path, "-d", "classes", source.to_str().unwrap()])?;
        let mut command = Command::new("java");
        command.args(["-cp", &path, "org.junit.platform.console.ConsoleLauncher", "--select-class", "TimeoutTest"]);
        Ok(command)
    };
    passes("junit_extension_moves_clock", junit());
}
