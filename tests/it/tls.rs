//! TLS to both servers: an order closes over it, and every certificate fault is reported in one sentence that says how
//! to fix it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use order_timeout::config::DatabaseSettings;
use order_timeout::postgres::Database;
use order_timeout_amqp::AmqpSettings;
use order_timeout_amqp::connect::{self, BrokerError};
use order_timeout_testkit::away::held_by_the_worker;
use order_timeout_testkit::private::Private;
use order_timeout_testkit::{TestEnv, host_and_port, small_settings, wait_for, with_parts};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair};
use secrecy::ExposeSecret;
use sqlx::{Executor, PgPool};
use tempfile::TempDir;

/// The host name in the servers' certificates, which do not include the address.
const NAME: &str = "localhost";

/// Certificates of all kinds, in one folder.
struct Certificates {
    folder: TempDir,
}

type Ca = CertifiedIssuer<'static, KeyPair>;

impl Certificates {
    fn make() -> Self {
        let certificates = Self { folder: tempfile::tempdir().unwrap() };
        let (ours, others) = (authority("our CA"), authority("another CA"));
        certificates.write("ca.pem", &ours.pem());
        certificates.write("other-ca.pem", &others.pem());
        certificates.issue("server", &ours, named(NAME));
        certificates.issue("client", &ours, named("a worker"));
        certificates.issue("stranger", &others, named("a stranger"));
        let mut expired = named(NAME);
        (expired.not_before, expired.not_after) = (rcgen::date_time_ymd(2001, 1, 1), rcgen::date_time_ymd(2002, 1, 1));
        certificates.issue("expired", &ours, expired);
        certificates
    }

    fn issue(&self, file: &str, ca: &Ca, parameters: CertificateParams) {
        let key = KeyPair::generate().unwrap();
        self.write(&format!("{file}.pem"), &parameters.signed_by(&key, ca).unwrap().pem());
        self.write(&format!("{file}.key"), &key.serialize_pem());
    }

    fn write(&self, file: &str, pem: &str) {
        std::fs::write(self.path(file), pem).unwrap();
    }

    fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    fn named(&self, file: &str) -> String {
        self.path(file).to_str().unwrap().to_owned()
    }

    /// Replaces the server certificate that a private server started with.
    fn replace(&self, server: &Private, with: &str) {
        for ending in ["pem", "key"] {
            // Written into the existing file, which keeps its owner and its permissions.
            let contents = std::fs::read(self.path(&format!("{with}.{ending}"))).unwrap();
            std::fs::write(server.state().join(format!("tls/server.{ending}")), contents).unwrap();
        }
    }
}

fn authority(name: &str) -> Ca {
    let mut parameters = named(name);
    parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(parameters, KeyPair::generate().unwrap()).unwrap()
}

fn named(name: &str) -> CertificateParams {
    let names = if name == NAME { vec![name.to_owned()] } else { Vec::new() };
    let mut parameters = CertificateParams::new(names).unwrap();
    parameters.distinguished_name = DistinguishedName::new();
    parameters.distinguished_name.push(DnType::CommonName, name);
    parameters
}

/// Both servers with their certificates. One test for all checks, because servers take seconds to start.
#[test]
fn rejects_invalid_server_certificates() {
    let certificates = Certificates::make();
    let folder = certificates.folder.path().to_str().unwrap();
    let broker = Private::broker(&["--tls", folder]);
    let postgres = Private::postgres(&["--tls", folder]);
    let amqp = amqp_settings(&broker, &certificates);
    let database = database_settings(&postgres, &certificates);

    TestEnv::builder()
        .settings(|settings| {
            settings.amqp = amqp.clone();
            // In the address, because a test environment's pool does not use our settings.
            let database_name = format!("order_timeout_{}", settings.namespace);
            settings.database = database.clone();
            for (parameter, file) in [("sslrootcert", "ca.pem"), ("sslcert", "client.pem"), ("sslkey", "client.key")] {
                append(&mut settings.database, parameter, &certificates.named(file));
            }
            append(&mut settings.database, "sslmode", "verify-full");
            settings.database.url = settings.database.url_of(&database_name);
            for file in [
                &mut settings.database.ca_file,
                &mut settings.database.client_cert_file,
                &mut settings.database.client_key_file,
            ] {
                file.clear();
            }
            settings.validate().unwrap();
            settings.validate_database().unwrap();
            in_a_runtime(demand_client_certificates(&postgres, &settings.database));
        })
        .run(async move |env| {
            let encrypted = "SELECT count(*) FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl";
            assert_eq!(env.count(encrypted).await, 1, "over TLS");
            let worker = env.worker().await;
            let (held, armed) = (env.order(Duration::from_secs(2)).await, env.order(Duration::from_secs(6)).await);
            let publisher = env.publisher().await;
            for order in [&held, &armed] {
                publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
            }
            for order in [&held, &armed] {
                wait_for("the close", async || env.status(order).await == "closed").await;
            }
            assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 2);
            wait_for("the events", async || {
                env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await == 0
            })
            .await;
            batches_fit_into_one_record(&env).await;
            env.assert_ledger().await;
            worker.stop().await;
        });

    in_a_runtime(async {
        invalid_brokers_are_rejected(&broker, &amqp, &certificates).await;
        invalid_databases_are_rejected(&postgres, &database, &certificates).await;
    });
}

/// A batch that needs two records may wait for the first to be acknowledged.
async fn batches_fit_into_one_record(env: &TestEnv) {
    let orders = env.settings.worker.batch_size;
    assert!(orders > 400, "where nothing is encrypted, more are closed at once");
    held_by_the_worker(env, orders, Duration::from_secs(3)).await;
    let by_alarm = "SELECT count(*) FROM orders WHERE closed_by = 'alarm'";
    wait_for("all closes", async || usize::try_from(env.count(by_alarm).await).unwrap() == orders + 2).await;
    // The row's xmin is the transaction that closed it.
    let together = "SELECT max(orders) FROM (SELECT count(*) FROM orders GROUP BY xmin::text) AS transaction (orders)";
    let together = env.count(together).await;
    assert!(together <= 400, "{together} were closed by one statement");
}

fn in_a_runtime(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(work);
}

fn amqp_settings(broker: &Private, certificates: &Certificates) -> AmqpSettings {
    let mut settings = small_settings().amqp;
    let place = format!("{NAME}:{}", broker.recorded("TLS_PORT"));
    let url = with_parts(&broker.url.clone().into(), None, Some(&place), None);
    settings.url = url.expose_secret().replace("amqp://", "amqps://").into();
    settings.ca_file = certificates.named("ca.pem");
    settings.client_cert_file = certificates.named("client.pem");
    settings.client_key_file = certificates.named("client.key");
    settings
}

fn database_settings(postgres: &Private, certificates: &Certificates) -> DatabaseSettings {
    let mut settings = small_settings().database;
    let place = format!("{NAME}:{}", postgres.recorded("PORT"));
    settings.url = with_parts(&postgres.url.clone().into(), None, Some(&place), None);
    settings.ca_file = certificates.named("ca.pem");
    settings.client_cert_file = certificates.named("client.pem");
    settings.client_key_file = certificates.named("client.key");
    settings
}

fn append(settings: &mut DatabaseSettings, parameter: &str, value: &str) {
    let mut url = url::Url::parse(settings.url.expose_secret()).unwrap();
    url.query_pairs_mut().append_pair(parameter, value);
    settings.url = String::from(url).into();
}

/// From now on the server accepts neither plain connections nor clients without a certificate of its CA.
async fn demand_client_certificates(postgres: &Private, with_certificate: &DatabaseSettings) {
    let rules = postgres.state().join("data/pg_hba.conf");
    std::fs::write(rules, "hostssl all all 127.0.0.1/32 scram-sha-256 clientcert=verify-ca\n").unwrap();
    let pool = PgPool::connect(with_certificate.url_of("postgres").expose_secret()).await.unwrap();
    pool.execute("SELECT pg_reload_conf()").await.unwrap();
    pool.close().await;
    let in_the_clear = format!("{}?sslmode=disable", postgres.url);
    wait_for("the new rules", async || PgPool::connect(&in_the_clear).await.is_err()).await;
}

/// The output is one of our sentences and contains all these parts.
fn assert_says(what: &str, said: &str, parts: &[&str]) {
    assert!(!said.contains('\n'), "{what}: {said}");
    for part in parts {
        assert!(said.contains(part), "{what}: {said:?} lacks {part:?}");
    }
    eprintln!("{what}: {said}");
}

async fn refused_by_broker(what: &str, settings: &AmqpSettings, parts: &[&str]) {
    match connect::connect(settings, "test").await {
        Err(BrokerError::Refused(said)) => assert_says(what, &said, parts),
        // The cause may only be guessed: then the worker retries, because the broker may be shutting down.
        Err(BrokerError::Away(said)) if said.contains("is it running") || said.contains("if it is running") => {
            assert_says(what, &said, parts);
        }
        other => panic!("{what}: {other:?}"),
    }
}

async fn invalid_brokers_are_rejected(broker: &Private, good: &AmqpSettings, certificates: &Certificates) {
    let with = |change: &dyn Fn(&mut AmqpSettings)| {
        let mut settings = good.clone();
        change(&mut settings);
        settings
    };
    let at = |place: &str| with_parts(&good.url, None, Some(place), None);
    let wrong_ca = with(&|settings| settings.ca_file = certificates.named("other-ca.pem"));
    refused_by_broker("a CA that did not sign it", &wrong_ca, &["signed by a CA that is not trusted", "amqp.ca_file"])
        .await;

    let wrong_name = with(&|settings| settings.url = at(&format!("127.0.0.1:{}", broker.recorded("TLS_PORT"))));
    refused_by_broker("another host name", &wrong_name, &[NAME, "not for this host name", "amqp.url"]).await;

    let no_certificate = with(&|settings| {
        settings.client_cert_file.clear();
        settings.client_key_file.clear();
    });
    let parts = ["demands a client certificate", "amqp.client_cert_file", "amqp.client_key_file"];
    refused_by_broker("no client certificate", &no_certificate, &parts).await;

    let stranger = with(&|settings| {
        settings.client_cert_file = certificates.named("stranger.pem");
        settings.client_key_file = certificates.named("stranger.key");
    });
    let parts = ["does not accept the certificate", "amqp.client_cert_file"];
    refused_by_broker("a client of another CA", &stranger, &parts).await;

    let wrong_key = with(&|settings| settings.client_key_file = certificates.named("stranger.key"));
    refused_by_broker("another's key", &wrong_key, &["amqp.client_key_file is not the key"]).await;

    let no_ca = with(&|settings| settings.ca_file = certificates.named("nothing.pem"));
    refused_by_broker("no such file", &no_ca, &["amqp.ca_file", "nothing.pem", "cannot be read"]).await;

    let to_plain =
        with(&|settings| settings.url = at(&host_and_port(&broker.url.clone().into()).replace("127.0.0.1", NAME)));
    refused_by_broker("TLS to a plain port", &to_plain, &["does not speak TLS", "amqp.url", "amqp://"]).await;

    let mut in_the_clear = good.clone();
    in_the_clear.url = good.url.expose_secret().replace("amqps://", "amqp://").into();
    for file in [&mut in_the_clear.ca_file, &mut in_the_clear.client_cert_file, &mut in_the_clear.client_key_file] {
        file.clear();
    }
    refused_by_broker("plain to a TLS port", &in_the_clear, &["For a port with TLS write amqps:// in amqp.url"]).await;

    connect::connect(good, "test").await.expect("correct settings connect");
    certificates.replace(broker, "expired");
    broker.ctl(&["eval", "ssl:clear_pem_cache()."]);
    refused_by_broker("an expired certificate", good, &["has expired", "renew it"]).await;
}

async fn refused_by_database(what: &str, settings: &DatabaseSettings, parts: &[&str]) {
    let said = Database::connect(settings, 1).await.map(drop).expect_err(what).to_string();
    assert_says(what, &said, parts);
}

async fn invalid_databases_are_rejected(postgres: &Private, good: &DatabaseSettings, certificates: &Certificates) {
    let with = |change: &dyn Fn(&mut DatabaseSettings)| {
        let mut settings = good.clone();
        change(&mut settings);
        settings
    };
    let wrong_ca = with(&|settings| settings.ca_file = certificates.named("other-ca.pem"));
    let parts = ["signed by a CA that is not trusted", "database.ca_file"];
    refused_by_database("a CA that did not sign it", &wrong_ca, &parts).await;

    let wrong_name = with(&|settings| {
        settings.url = with_parts(&good.url, None, Some(&host_and_port(&good.url).replace(NAME, "127.0.0.1")), None)
    });
    refused_by_database("another host name", &wrong_name, &[NAME, "not for this host name", "database.url"]).await;

    let no_certificate = with(&|settings| {
        settings.client_cert_file.clear();
        settings.client_key_file.clear();
    });
    let parts = ["client certificate", "database.client_cert_file", "database.client_key_file"];
    refused_by_database("no client certificate", &no_certificate, &parts).await;

    let stranger = with(&|settings| {
        settings.client_cert_file = certificates.named("stranger.pem");
        settings.client_key_file = certificates.named("stranger.key");
    });
    let parts = ["does not accept the certificate", "database.client_cert_file"];
    refused_by_database("a client of another CA", &stranger, &parts).await;

    let wrong_key = with(&|settings| settings.client_key_file = certificates.named("stranger.key"));
    refused_by_database("another's key", &wrong_key, &["database.client_key_file is not the key"]).await;

    let mut in_the_clear = no_certificate.clone();
    in_the_clear.ca_file.clear();
    append(&mut in_the_clear, "sslmode", "disable");
    let in_its_words = if Private::postgres_version().as_deref() == Some("13") { "SSL off" } else { "no encryption" };
    refused_by_database("plain to a server that wants TLS", &in_the_clear, &[in_its_words, "sslmode=verify-full"])
        .await;

    database_without_tls(good).await;

    Database::connect(good, 1).await.expect("correct settings connect");
    certificates.replace(postgres, "expired");
    let pool = {
        let mut url = good.clone();
        for (parameter, file) in [("sslrootcert", "ca.pem"), ("sslcert", "client.pem"), ("sslkey", "client.key")] {
            append(&mut url, parameter, &certificates.named(file));
        }
        append(&mut url, "sslmode", "require");
        PgPool::connect(url.url.expose_secret()).await.unwrap()
    };
    pool.execute("SELECT pg_reload_conf()").await.unwrap();
    wait_for("the new certificate", async || Database::connect(good, 1).await.is_err()).await;
    refused_by_database("an expired certificate", good, &["has expired", "renew it"]).await;
    pool.close().await;
}

/// The other tests' server, if it does not use TLS.
async fn database_without_tls(good: &DatabaseSettings) {
    let usual = small_settings().database.url_of("postgres");
    let pool = PgPool::connect(usual.expose_secret()).await.unwrap();
    let has_tls: bool = sqlx::query_scalar("SELECT current_setting('ssl')::bool").fetch_one(&pool).await.unwrap();
    pool.close().await;
    if has_tls {
        return order_timeout_testkit::skip::skipped("TLS to a server without it", "the server of the tests has TLS");
    }
    let mut settings = good.clone();
    settings.url = usual;
    refused_by_database(
        "TLS to a server without it",
        &settings,
        &["does not support TLS", "ssl = on", "sslmode=disable"],
    )
    .await;
}

#[test]
fn unused_certificate_settings_are_refused() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml").display().to_string();
    let check = |overrides: &[String], parts: &[&str]| {
        let mut settings = order_timeout::Settings::load_with_environment(None, Default::default(), overrides);
        if let Ok(accepted) = settings.clone() {
            settings = accepted.validate_database().map(|()| accepted);
        }
        let said = settings.map(drop).expect_err(&format!("{overrides:?}")).to_string();
        for part in parts {
            assert!(said.contains(part), "{overrides:?}: {said:?} lacks {part:?}");
        }
    };
    let set = |key: &str, value: &str| format!("{key}={value}");
    let plain = set("amqp.url", "amqp://h");
    check(&[plain, set("amqp.ca_file", &file)], &["amqp.url", "would not be encrypted", "amqps://"]);
    let tls = set("amqp.url", "amqps://h");
    check(&[tls, set("amqp.client_cert_file", &file)], &["amqp.client_cert_file", "amqp.client_key_file"]);
    for (url, ca, parts) in [
        ("postgres://h/d?sslmode=require", file.as_str(), &["sslmode=require", "checks nothing", "verify-full"][..]),
        ("postgres://h/d?sslmode=prefer&sslrootcert=a", "", &["sslmode=prefer", "checks nothing"]),
        ("postgres://h/d?sslrootcert=a", &file, &["database.ca_file", "sslrootcert", "leave one of them out"]),
        ("postgres://h/d?passwd=secret", "", &["database.url", "passwd", "does not know"]),
    ] {
        check(&[set("database.url", url), set("database.ca_file", ca)], parts);
    }
    for url in ["postgres://h/d?sslmode=verify-ca&sslrootcert=a", "postgres://h/d?sslrootcert=a", "postgres://h/d"] {
        let overrides = [set("database.url", url)];
        let settings = order_timeout::Settings::load_with_environment(None, Default::default(), &overrides).unwrap();
        settings.validate_database().unwrap();
        assert_eq!(settings.database.verifies_by_default(), url.ends_with("/d?sslrootcert=a"), "{url}");
    }
}
