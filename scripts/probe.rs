//! Checks whether order-timeout can work with a broker or a database: reachable, new enough, and with sufficient
//! permissions.
//!
//! `scripts/services` calls it before choosing a server: `probe amqp URL`, `probe postgres URL`; `-` instead of the URL
//! reads it from standard input, so that a password is not visible in the process list. It prints the server's version
//! and exits 0, or prints one sentence and exits 1, within [`TIME_LIMIT`].
//!
//! It may not leave anything behind (its queue and its exchange have unique names, are deleted, and expire if it dies
//! in between), print a password, or depend on the worker.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use lapin::options::{ExchangeDeclareOptions, ExchangeDeleteOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{Channel, ExchangeKind};
use order_timeout_amqp::AmqpSettings;
use order_timeout_amqp::connect::connect;
use order_timeout_amqp::tls::choose_crypto_provider;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Connection};

/// A server without an answer after this time counts as unreachable.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// The first `RabbitMQ` release with quorum queues that support message TTLs and at-least-once dead-lettering.
const OLDEST_BROKER: (u32, u32) = (3, 10);

/// In the form of `server_version_num`.
const OLDEST_DATABASE: i32 = 130_000;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let answer = match arguments.as_slice() {
        [kind, url] => read_url(url).and_then(|url| probe(kind, &url)),
        _ => Err(anyhow::anyhow!(
            "probe takes two arguments, `amqp URL` or `postgres URL`, where `-` reads the URL from standard input"
        )),
    };
    let code = match answer {
        Ok(version) => {
            println!("{version}");
            0
        }
        Err(error) => {
            eprintln!("{}", one_sentence(&error));
            1
        }
    };
    // Not a return: a name lookup that still blocks its own thread would keep the process beyond its time limit.
    std::process::exit(code)
}

/// The URL as given, or the first line of standard input for `-`.
fn read_url(given: &str) -> Result<String> {
    if given != "-" {
        return Ok(given.to_owned());
    }
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).context("no URL could be read from standard input")?;
    Ok(line.trim_end().to_owned())
}

/// Runs the check for this kind of server, within the time limit.
fn probe(kind: &str, url: &str) -> Result<String> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("the probe's runtime did not start")?;
    choose_crypto_provider();
    let version = runtime.block_on(async {
        match kind {
            "amqp" => tokio::time::timeout(TIME_LIMIT, probe_broker(url)).await,
            "postgres" => tokio::time::timeout(TIME_LIMIT, probe_database(url)).await,
            other => Ok(Err(anyhow::anyhow!("probe knows `amqp` and `postgres`, not `{other}`"))),
        }
    });
    std::mem::forget(runtime); // see `main`
    version.unwrap_or_else(|_| bail!("no complete answer within {} s", TIME_LIMIT.as_secs()))
}

/// Logs in, and declares and deletes the kinds of objects in the worker's topology.
async fn probe_broker(url: &str) -> Result<String> {
    let uri = AMQPUri::from_str(url)
        .map_err(|fault| anyhow::anyhow!("this is no AMQP URL (amqp://user:password@host:port/vhost): {fault}"))?;
    let host = uri.authority.host.clone();
    let place = format!("the broker at {host}:{}", uri.authority.port);
    let account = format!("{place}, user {}, virtual host {}", uri.authority.userinfo.username, uri.vhost);

    let version = match uri.scheme {
        AMQPScheme::AMQP => {
            let port = uri.authority.port;
            let greeting = tokio::task::spawn_blocking(move || broker_version(&host, port)).await?;
            Some(greeting.with_context(|| format!("{place} does not answer as an AMQP broker"))?)
        }
        // Behind TLS the greeting cannot be read; the queue's arguments below still require a broker that is new
        // enough.
        AMQPScheme::AMQPS => None,
    };
    if let Some(version) = &version {
        require_broker_version(version, &place)?;
    }

    let connection = connect(&settings(url), "probe").await.with_context(|| format!("{account}: no login"))?;
    let channel = connection.create_channel().await.with_context(|| format!("{account}: no channel"))?;
    declare_and_delete(&channel).await.with_context(|| format!("{account}: the rights do not suffice"))?;
    connection.close(200, "probed".into()).await.with_context(|| format!("{account}: no clean goodbye"))?;
    Ok(version.unwrap_or_else(|| "of at least 3.10 (TLS)".to_owned()))
}

fn settings(url: &str) -> AmqpSettings {
    AmqpSettings {
        url: url.to_owned().into(),
        url_file: String::new(),
        ca_file: String::new(),
        client_cert_file: String::new(),
        client_key_file: String::new(),
        heartbeat: TIME_LIMIT,
        connect_timeout: TIME_LIMIT,
        confirm_timeout: TIME_LIMIT,
    }
}

/// A quorum queue with the arguments of a lane, and an exchange, under a unique name.
async fn declare_and_delete(channel: &Channel) -> Result<()> {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let name = format!("order-timeout-probe-{}-{nanos}", std::process::id());

    let exchange = ExchangeDeclareOptions { auto_delete: true, ..Default::default() };
    channel
        .exchange_declare(name.as_str().into(), ExchangeKind::Topic, exchange, FieldTable::default())
        .await
        .context("an exchange could not be declared")?;

    // A quorum queue can be neither exclusive nor auto-delete; `x-expires` removes it if this program dies here.
    let mut arguments = FieldTable::default();
    for (argument, value) in [
        ("x-queue-type", AMQPValue::LongString("quorum".into())),
        ("x-message-ttl", AMQPValue::LongInt(1_000)),
        ("x-overflow", AMQPValue::LongString("reject-publish".into())),
        ("x-dead-letter-exchange", AMQPValue::LongString(name.as_str().into())),
        ("x-dead-letter-strategy", AMQPValue::LongString("at-least-once".into())),
        ("x-expires", AMQPValue::LongInt(60_000)),
    ] {
        arguments.insert(argument.into(), value);
    }
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    channel
        .queue_declare(name.as_str().into(), durable, arguments)
        .await
        .context("a quorum queue with time to live could not be declared")?;

    channel
        .queue_delete(name.as_str().into(), QueueDeleteOptions::default())
        .await
        .context("the probe's queue could not be deleted")?;
    channel
        .exchange_delete(name.as_str().into(), ExchangeDeleteOptions::default())
        .await
        .context("the probe's exchange could not be deleted")
}

/// The version from the broker's greeting (`Connection.Start`), which lapin reads but does not expose.
fn broker_version(host: &str, port: u16) -> Result<String> {
    let mut last = None;
    // `localhost` also resolves to ::1, where the broker may not listen.
    for address in (host, port).to_socket_addrs().context("the host name does not resolve")? {
        match TcpStream::connect_timeout(&address, TIME_LIMIT) {
            Ok(stream) => return read_greeting(stream),
            Err(error) => last = Some(error),
        }
    }
    match last {
        Some(error) => Err(error).context("no connection"),
        None => bail!("the host name has no address"),
    }
}

/// Offers AMQP 0-9-1 and reads the frame that answers it.
fn read_greeting(mut stream: TcpStream) -> Result<String> {
    stream.set_read_timeout(Some(TIME_LIMIT))?;
    stream.write_all(b"AMQP\x00\x00\x09\x01")?;
    let mut head = [0_u8; 7]; // frame type, channel, size
    stream.read_exact(&mut head).context("no greeting")?;
    let size = u32::from_be_bytes([head[3], head[4], head[5], head[6]]) as usize;
    if head[0] != 1 || size > 64 * 1024 {
        bail!("the greeting is not AMQP 0-9-1");
    }
    let mut frame = vec![0_u8; size];
    stream.read_exact(&mut frame).context("the greeting breaks off")?;
    version_in(&frame).context("the greeting names no version")
}

/// Finds the table entry `version` (short string name, type `S`, length, text).
fn version_in(frame: &[u8]) -> Option<String> {
    const ENTRY: &[u8] = b"\x07versionS";
    let start = frame.windows(ENTRY.len()).position(|window| window == ENTRY)? + ENTRY.len();
    let length = u32::from_be_bytes(frame.get(start..start + 4)?.try_into().ok()?) as usize;
    let text = frame.get(start + 4..(start + 4).checked_add(length)?)?;
    String::from_utf8(text.to_vec()).ok()
}

fn require_broker_version(version: &str, place: &str) -> Result<()> {
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if found < OLDEST_BROKER {
        bail!(
            "{place} is RabbitMQ {version}, and order-timeout needs {}.{} or newer",
            OLDEST_BROKER.0,
            OLDEST_BROKER.1
        );
    }
    Ok(())
}

/// Logs in, and checks the version and the right to create databases (the demo and the tests create their own).
async fn probe_database(url: &str) -> Result<String> {
    let options = PgConnectOptions::from_str(url)
        .context("this is no Postgres URL (postgres://user:password@host:port/database)")?
        .disable_statement_logging();
    let place = format!(
        "the database at {}:{}, user {}, database {}",
        options.get_host(),
        options.get_port(),
        options.get_username(),
        options.get_database().unwrap_or(options.get_username()),
    );
    let mut connection = PgConnection::connect_with(&options).await.with_context(|| format!("{place}: no login"))?;
    let (version, number, may_create): (String, i32, bool) = sqlx::query_as(
        "SELECT current_setting('server_version'), current_setting('server_version_num')::int4,
                rolcreatedb OR rolsuper
           FROM pg_roles WHERE rolname = current_user",
    )
    .fetch_one(&mut connection)
    .await
    .with_context(|| format!("{place}: no answer"))?;
    connection.close().await.with_context(|| format!("{place}: no clean goodbye"))?;

    if number < OLDEST_DATABASE {
        bail!("{place}: PostgreSQL {version}, and order-timeout needs {} or newer", OLDEST_DATABASE / 10_000);
    }
    if !may_create {
        bail!("{place}: this user may not create databases; fix it with ALTER ROLE … CREATEDB");
    }
    // "15.14 (Debian 15.14-0+deb12u1)" is no more useful than "15.14".
    Ok(version.split_whitespace().next().unwrap_or(&version).to_owned())
}

/// The error chain in one line, without causes that the cause before them already quotes.
fn one_sentence(error: &anyhow::Error) -> String {
    let mut said = String::new();
    for cause in error.chain() {
        let cause = cause.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        if said.is_empty() {
            said = cause;
        } else if !said.contains(&cause) {
            said = format!("{said}: {cause}");
        }
    }
    said.trim_end_matches('.').to_owned()
}
