//! The host, port, user and password in an address are those that are used, or the address is refused.
//!
//! Pure: no connection is opened.

use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::{AmqpAddress, Host, PostgresAddress, PostgresServer};

fn amqp(text: &str) -> Result<AmqpAddress, String> {
    text.parse::<AmqpAddress>().map_err(|fault| fault.to_string())
}

fn postgres(text: &str) -> Result<PostgresAddress, String> {
    text.parse::<PostgresAddress>().map_err(|fault| fault.to_string())
}

fn v6(text: &str) -> Host {
    Host::V6(text.parse().unwrap())
}

#[test]
fn reads_every_form_of_host() {
    for (text, host, port) in [
        ("amqp://guest:guest@[2001:db8::1]:5672/x", v6("2001:db8::1"), 5672),
        ("amqp://[::1]/x", v6("::1"), 5672),
        ("amqps://[::ffff:192.0.2.1]/x", v6("::ffff:192.0.2.1"), 5671),
        ("amqp://192.0.2.1:1/x", Host::V4(Ipv4Addr::new(192, 0, 2, 1)), 1),
        ("amqps://rabbit_1.shop.example/x", Host::Name("rabbit_1.shop.example".into()), 5671),
        ("amqp://Rabbit-1.:65535/x", Host::Name("Rabbit-1.".into()), 65535),
    ] {
        let read = amqp(text).unwrap();
        assert_eq!((read.host, read.port), (host, port), "{text}");
    }
    for (text, server, port) in [
        ("postgres://user@[::1]:5433/db", PostgresServer::Tcp(v6("::1")), 5433),
        ("postgresql://db.example", PostgresServer::Tcp(Host::Name("db.example".into())), 5432),
        ("postgres:///db?host=::1&port=6432", PostgresServer::Tcp(v6("::1")), 6432),
        ("postgres:///db?hostaddr=192.0.2.1", PostgresServer::Tcp(Host::V4(Ipv4Addr::new(192, 0, 2, 1))), 5432),
        ("postgres:///db?host=/run/pg", PostgresServer::Socket("/run/pg".into()), 5432),
        ("postgres://u@%2Frun%2Fpg/db", PostgresServer::Socket("/run/pg".into()), 5432),
        ("postgres://u@localhost/db?host=/run/pg", PostgresServer::Socket("/run/pg".into()), 5432),
    ] {
        assert_eq!(postgres(text), Ok(PostgresAddress { server, port }), "{text}");
    }
}

#[test]
fn shows_ipv6_address_in_brackets() {
    assert_eq!(v6("2001:db8::1").to_string(), "[2001:db8::1]");
    assert_eq!(v6("2001:db8::1").for_connecting(), "2001:db8::1");
}

#[test]
fn decodes_user_password_and_vhost() {
    let read = amqp("amqp://sh%C3%B6p:p%40ss%3A%2F%25:w%20rd@h/v%2fh").unwrap();
    assert_eq!((read.user.as_str(), read.password.as_str(), read.vhost.as_str()), ("shöp", "p@ss:/%:w rd", "v/h"));
    // The URL standard would resolve these as path segments.
    assert_eq!(amqp("amqp://h/..").unwrap().vhost, "..");
    assert_eq!(amqp("amqp://h").unwrap().vhost, "/");
    let (account, empty) = (amqp("amqp://h/v").unwrap(), amqp("amqp://u:@h/v").unwrap());
    assert_eq!((account.user.as_str(), account.password.as_str()), ("guest", "guest"));
    assert_eq!((empty.user.as_str(), empty.password.as_str()), ("u", ""));
    let external = amqp("amqps://u@h/v?auth_mechanism=EXTERNAL&heartbeat=600").unwrap();
    assert_eq!((external.mechanism.as_deref(), external.heartbeat_s), (Some("external"), Some(600)));
}

#[test]
fn refuses_incomplete_addresses_and_says_why() {
    for (rest, why) in [
        ("/x", "names no host"),
        (":5672/x", "names no host"),
        ("u:p@/x", "names no host"),
        ("u:p@:5672/x", "names no host"),
        ("[fe80::1%25eth0]:5672/x", "zone"),
        ("[fe80::1%eth0]/x", "zone"),
        ("[]/x", "not an IPv6 address"),
        ("[192.0.2.1]/x", "not an IPv6 address"),
        ("[::1/x", "no ]"),
        ("[::1]5672/x", "between its ] and its port"),
        ("2001:db8::1:5672/x", "in brackets"),
        ("h:/x", "port"),
        ("h:0/x", "port"),
        ("h:65536/x", "port"),
        ("h:+1/x", "port"),
        ("u:pa/ss@h/x", "@ behind its host"),
        ("u:pa?ss@h/x", "@ behind its host"),
        ("u:pa#ss@h/x", "%23"),
        ("u:100%@h/x", "%25"),
        ("u:%zz@h/x", "%25"),
        ("u:%E4@h/x", "UTF-8"),
        ("h /x", "space"),
        ("h\t/x", "control character"),
        (":p@h/x", "no user name"),
        ("@h/x", "no user name"),
        ("10.1/x", "number"),
        ("2130706433/x", "number"),
        ("0x7f000001/x", "number"),
        ("127.0.0.1.0x1/x", "number"),
        ("256.0.0.1/x", "number"),
        ("h%6Fst/x", "zone"),
        ("hö.example/x", "ASCII"),
        ("a,b/x", "ASCII"),
        ("h\\x/x", "ASCII"),
    ] {
        for (scheme, read) in [
            ("amqp", amqp(&format!("amqp://{rest}")).map(drop)),
            ("postgres", postgres(&format!("postgres://{rest}")).map(drop)),
        ] {
            let fault = read.expect_err(rest);
            assert!(fault.contains(why), "{scheme}://{rest}: {fault}");
        }
    }
    assert!(amqp("amqp://shop@h/v").unwrap_err().contains("no password"));
    assert!(postgres("postgres://shop@h/v").is_ok());
}

#[test]
fn refuses_two_servers_in_one_address() {
    for (text, why) in [
        ("postgres://a/d?host=b", "two servers"),
        ("postgres://[::1]/d?hostaddr=::2", "two servers"),
        ("postgres://%2Frun/d?host=/tmp", "two servers"),
        ("postgres:///d?host=a&hostaddr=192.0.2.1", "both host and hostaddr"),
        ("postgres:///d?host=a&host=b", "twice"),
        ("postgres:///d?hostaddr=a", "not an IP address"),
        ("postgres:///d?host=", "empty host"),
        ("postgres:///d?host=a,b", "ASCII"),
        ("postgres://a:1/d?port=2", "port twice"),
        ("postgres://a/d?port=0", "port"),
    ] {
        let fault = postgres(text).expect_err(text);
        assert!(fault.contains(why), "{text}: {fault}");
    }
}

#[test]
fn refuses_parameters_that_settings_govern() {
    for (parameter, setting) in [
        ("heartbeat=0", "amqp.heartbeat"),
        ("heartbeat=601", "amqp.heartbeat"),
        ("heartbeat=", "amqp.heartbeat"),
        ("heartbeat=30&heartbeat=0", "twice"),
        ("connection_timeout=0", "amqp.connect_timeout"),
        ("frame_max=0", "frame_max"),
        ("channel_max=1", "worker.shards"),
        ("cacertfile=/ca.pem", "amqp.ca_file"),
        ("verify=verify_none", "not supported"),
        ("auth_mechanism=magic", "auth_mechanism"),
    ] {
        let fault = amqp(&format!("amqp://h/v?{parameter}")).expect_err(parameter);
        assert!(fault.contains(setting), "{parameter}: {fault}");
    }
    assert_eq!(amqp("amqp://h/v?heartbeat=1").unwrap().heartbeat_s, Some(1));
    for (parameter, setting) in [
        ("statement_timeout=0", "database.statement_timeout"),
        ("connect_timeout=0", "database.acquire_timeout"),
        ("options=-c%20statement_timeout%3D0", "database.statement_timeout"),
        ("options=-c+search_path=shop+-cLock_Timeout=0", "database.lock_timeout"),
        ("options=-csearch_path=shop&options=--lock-timeout=0", "database.lock_timeout"),
        ("options=-c+search_path=a%5C+b+--idle-in-transaction-session-timeout=1", "database.statement_timeout"),
        ("options=-c+statement%5C_timeout=0", "database.statement_timeout"),
        ("options[statement_timeout]=0", "database.statement_timeout"),
        ("options%5BLOCK_TIMEOUT%5D=0", "database.lock_timeout"),
    ] {
        let fault = postgres(&format!("postgres://h/d?{parameter}")).expect_err(parameter);
        assert!(fault.contains(setting), "{parameter}: {fault}");
    }
    // A value is not a name.
    assert!(
        postgres("postgres://h/d?options=-csearch_path%3Dorder_timeout&options[application_name]=lock_timeout").is_ok()
    );
    assert!(postgres("postgres://h/d?options=-c+search_path%3Dlock_timeout").is_ok());
    assert!(postgres("postgres://h/d?options=-c+deadlock_timeout%3D1s+-cshop.lock_timeout%3D1").is_ok());
}

/// Every byte percent-encoded.
fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

/// A host as it is written in an address, and as it must be parsed.
fn host() -> impl Strategy<Value = (String, Host)> {
    prop_oneof![
        any::<u32>().prop_map(Ipv4Addr::from).prop_map(|host| (host.to_string(), Host::V4(host))),
        any::<u128>().prop_map(Ipv6Addr::from).prop_map(|host| (format!("[{host}]"), Host::V6(host))),
        "[A-Za-z][A-Za-z0-9_-]{0,10}(\\.[A-Za-z][A-Za-z0-9-]{0,5}){0,3}"
            .prop_map(|name: String| (name.clone(), Host::Name(name))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn connects_to_host_in_address(
        (written, host) in host(),
        port in proptest::option::of(1_u16..),
        account in proptest::option::of((".{1,8}", ".{0,8}")),
    ) {
        let user_part = account.as_ref().map_or_else(String::new, |(user, password)| {
            format!("{}:{}@", encoded(user), encoded(password))
        });
        let port_part = port.map_or_else(String::new, |port| format!(":{port}"));
        let read = amqp(&format!("amqp://{user_part}{written}{port_part}/v")).unwrap();
        let (user, password) = account.clone().unwrap_or(("guest".into(), "guest".into()));
        prop_assert_eq!(&read.host, &host);
        prop_assert_eq!((read.user, read.password, read.port), (user, password, port.unwrap_or(5672)));
        let read = postgres(&format!("postgres://{user_part}{written}{port_part}/d")).unwrap();
        let port = port.unwrap_or(5432);
        prop_assert_eq!(read, PostgresAddress { server: PostgresServer::Tcp(host), port });
    }

    /// The host of an accepted address is written literally in it: nothing is added, decoded or left out.
    #[test]
    fn accepts_no_host_that_is_not_written(rest in "[a-f0-9x:/@?\\[\\]%#.=&,;l-]{0,24}") {
        let authority = rest.split(['/', '?']).next().unwrap();
        let place = authority.rsplit('@').next().unwrap();
        let is_written = |host: &Host| match host {
            Host::V6(address) => {
                let inner = place.strip_prefix('[').and_then(|rest| rest.split(']').next());
                inner.and_then(|inner| inner.parse::<Ipv6Addr>().ok()) == Some(*address)
            }
            other => place.split(':').next() == Some(&other.to_string()),
        };
        if let Ok(read) = amqp(&format!("amqp://{rest}")) {
            prop_assert!(is_written(&read.host), "{rest}: {:?}", read.host);
        }
        if let Ok(PostgresAddress { server: PostgresServer::Tcp(host), .. }) = postgres(&format!("postgres://{rest}")) {
            prop_assert!(is_written(&host), "{rest}: {host:?}");
        }
    }

    #[test]
    fn errors_never_repeat_addresses(secret in "[A-Z]{6}", at in 0_usize..7) {
        let mut parts = ["u", "p", "h", "1", "v", "k", "w"].map(str::to_owned);
        parts[at] = format!("{secret}%");
        let [user, password, host, port, vhost, key, value] = parts;
        let rest = format!("{user}:{password}@{host}:{port}/{vhost}?{key}={value}");
        for fault in [amqp(&format!("amqp://{rest}")).map(drop), postgres(&format!("postgres://{rest}")).map(drop)] {
            prop_assert!(!fault.unwrap_err().contains(&secret));
        }
    }
}
