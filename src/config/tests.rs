//! Settings are merged, checked and refused correctly, and no error repeats a secret.
//!
//! Pure: environments and arguments are passed in, files are temporary.

use std::collections::BTreeSet;

use order_timeout_client::Publisher;
use order_timeout_core::delay::testing::{DELAYS_MS, Setup, check_alarm_arrives, check_no_alarm_loops};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::{OrderId, Timestamp};
use proptest::prelude::*;

use super::{DatabaseUse, Duration, ExposeSecret, Settings, load};

fn load(environment: &[(&str, &str)], overrides: &[&str]) -> Result<Settings, String> {
    let environment = environment.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
    Settings::load_with_environment(None, environment, &overrides).map_err(|fault| fault.to_string())
}

#[test]
fn defaults_are_valid() {
    let settings = Settings::defaults();
    assert_eq!(settings.delay.lanes[0].name, "30m");
    assert_eq!(settings.delay.lead, Duration::from_secs(20));
}

/// README's limit of one second for an order without an alarm, and of half a second while the broker is unreachable,
/// follow from these; a quarter of a second is left for the query and the close. On a busy machine a test with servers
/// could not assert them.
#[test]
fn sweep_defaults_match_documented_lateness() {
    let sweep = Settings::defaults().sweep;
    assert_eq!((sweep.every, sweep.grace), (Duration::from_millis(250), Duration::from_millis(500)));
}

#[test]
fn set_overrides_environment_overrides_defaults() {
    let settings = load(
        &[
            ("ORDER_TIMEOUT__DELAY__LANES", "15m,7200s"),
            ("ORDER_TIMEOUT__DELAY__LEAD", "3s"),
            ("ORDER_TIMEOUT__WORKER__CLOSERS", "3"),
        ],
        &["delay.lead=2s"],
    )
    .unwrap();
    assert_eq!(settings.delay.lanes.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(), ["15m", "2h"]);
    assert_eq!(settings.delay.lead, Duration::from_secs(2));
    assert_eq!(settings.worker.closers, 3);
}

#[test]
fn lists_are_separated_by_commas() {
    let shards = |text: &str| load(&[("ORDER_TIMEOUT__WORKER__TAKE_SHARDS", text)], &["worker.shards=3"]);
    assert_eq!(shards("0, 2").unwrap().worker.take_shards, [0, 2]);
    assert!(shards("").unwrap().worker.take_shards.is_empty());
    assert!(load(&[], &["delay.lanes= "]).unwrap().delay.lanes.is_empty());
}

#[test]
fn refuses_non_utf8_in_own_variables() {
    // As `environment` reads what is not UTF-8.
    let not_utf8 = String::from_utf8_lossy(b"p\xe4ss");
    let address = format!("amqp://guest:{not_utf8}@host");
    let fault = load(&[("ORDER_TIMEOUT__AMQP__URL", &address)], &[]).unwrap_err();
    let why = "is not UTF-8; in an address, write such a letter as %C3%A4";
    assert_eq!(fault, format!("setting amqp.url (from the environment): {why}"));
    let fault = load(&[("ORDER_TIMEOUT__NAMESPACE", &not_utf8)], &[]).unwrap_err();
    assert!(fault.contains("namespace") && fault.contains(why), "{fault}");
    assert!(load(&[("PS1", &not_utf8)], &[]).is_ok());
    // It may belong to the shop.
    let address = format!("postgres://shop:{not_utf8}@host/shop");
    let settings = load(&[("DATABASE_URL", &address)], &[]).unwrap();
    let fault = settings.validate_database().unwrap_err().to_string();
    assert!(fault.contains("database.url") && fault.contains("is not UTF-8") && !fault.contains("ss@host"), "{fault}");
}

#[test]
fn refuses_variables_that_name_no_setting() {
    for name in ["ORDER_TIMEOUT__", "ORDER_TIMEOUT__DELAY__", "ORDER_TIMEOUT____LEAD", "ORDER_TIMEOUT__1"] {
        let fault = load(&[(name, "3s")], &[]).unwrap_err();
        let why = "it names no setting; write it as ORDER_TIMEOUT__DELAY__LEAD";
        assert_eq!(fault, format!("setting {name} (from the environment): {why}"));
    }
}

#[test]
fn refuses_variables_that_lack_underscores() {
    for (name, meant) in [
        ("ORDER_TIMEOUT_DATABASE__URL", "ORDER_TIMEOUT__DATABASE__URL"),
        ("ORDER_TIMEOUT_DATABASE__ULR", "ORDER_TIMEOUT__DATABASE__ULR"),
        ("ORDER_TIMEOUT_DATABASE_URL", "ORDER_TIMEOUT__DATABASE__URL"),
        ("ORDER_TIMEOUT_AMQP_URL", "ORDER_TIMEOUT__AMQP__URL"),
        ("ORDER_TIMEOUT_WORKER_HOLD_MAX", "ORDER_TIMEOUT__WORKER__HOLD_MAX"),
        ("ORDER_TIMEOUT_NAMESPACE", "ORDER_TIMEOUT__NAMESPACE"),
    ] {
        let fault = load(&[(name, "amqp://u:hunter2@h/v")], &[]).unwrap_err();
        assert_eq!(fault, format!("setting {name} (from the environment): it is not read; did you mean {meant}?"));
    }
    // Names used by our scripts, and by Kubernetes for services of these names.
    for name in [
        "ORDER_TIMEOUT_SERVICES",
        "ORDER_TIMEOUT_RABBITMQ",
        "ORDER_TIMEOUT_POSTGRES",
        "ORDER_TIMEOUT_CHAOS_SEED",
        "ORDER_TIMEOUT_SERVICE_HOST",
        "ORDER_TIMEOUT_WORKER_SERVICE_PORT_HTTP",
        "ORDER_TIMEOUT_PORT_9394_TCP",
        "ORDER_TIMEOUT",
    ] {
        assert!(load(&[(name, "x")], &[]).is_ok(), "{name} is not ours");
    }
}

#[test]
fn long_name_wins_over_database_url() {
    let short = load(&[("DATABASE_URL", "postgres://a@h/short")], &[]).unwrap();
    assert_eq!(short.database.url.expose_secret(), "postgres://a@h/short");
    let both =
        load(&[("DATABASE_URL", "postgres://a@h/short"), ("ORDER_TIMEOUT__DATABASE__URL", "postgres://a@h/long")], &[])
            .unwrap();
    assert_eq!(both.database.url.expose_secret(), "postgres://a@h/long");
}

#[test]
fn http_listens_on_loopback_by_default() {
    let listen = |overrides: &[&str]| load(&[], overrides).unwrap().http.listen.0;
    assert!(listen(&[]).is_some_and(|address| address.ip().is_loopback()));
    assert_eq!(listen(&["http.listen="]), None);
    assert_eq!(listen(&["http.listen=[::]:9394"]), Some("[::]:9394".parse().unwrap()));
}

#[test]
fn publisher_accepts_other_database_urls() {
    for url in ["mysql://shop:hunter2@h/shop", "sqlite::memory:", "", "postgres://u:hunter2@h:port/d"] {
        let settings = load(&[("DATABASE_URL", url)], &[]).unwrap();
        let fault = settings.validate_database().unwrap_err().to_string();
        assert!(fault.contains("database.url") && !fault.contains("hunter2"), "{fault}");
    }
}

#[test]
fn each_fault_names_its_key_and_origin() {
    let check = |environment: &[(&str, &str)], overrides: &[&str], expect: &[&str]| {
        let fault = load(environment, overrides).unwrap_err();
        for part in expect {
            assert!(fault.contains(part), "{fault:?} lacks {part:?}");
        }
    };
    check(&[("ORDER_TIMEOUT__DELAY__LEED", "3s")], &[], &["delay.leed", "environment", "did you mean delay.lead?"]);
    check(&[("ORDER_TIMEOUT__DELAY__LEAD", "3 parsecs")], &[], &["delay.lead", "environment", "parsecs"]);
    check(&[], &["worker.closers=many"], &["worker.closers", "--set"]);
    check(&[("ORDER_TIMEOUT__AMQP__URL", "http://x:hunter2@y")], &[], &["amqp.url", "amqp://"]);
    check(&[], &["database.acquire_timeout=2h"], &["database.acquire_timeout", "--set"]);
    check(&[], &["worker.hold_max=6s"], &["worker.hold_max", "27s"]);
    check(&[], &["nonsense"], &["--set", "="]);
    check(
        &[],
        &["delay.strategy=magic"],
        &["delay.strategy", "magic", "one of \"dead-letter\", \"delayed-exchange\", \"database\""],
    );
    check(&[("ORDER_TIMEOUT__LOG__FORMAT", "xml")], &[], &["log.format", "\"xml\"", "\"human\" or \"json\""]);
    check(&[], &["amqp.url=amqp://h:5672/"], &["amqp.url", "--set", "write /%2f for the default virtual host"]);
    check(&[], &["worker.take_shards=0,two"], &["worker.take_shards[1]", "--set", "two"]);
    check(&[], &["worker.take_shards=0,256"], &["worker.take_shards[1]", "--set", "256"]);
    check(&[], &["delay.rings=5s"], &["delay.rings", "--set", "write it in brackets"]);
    check(
        &[("ORDER_TIMEOUT__DELAY__RINGS", "[{ unit = \"5s")],
        &[],
        &["delay.rings", "environment", "as a file has it"],
    );
    check(&[], &["delay.lanes=30m,1800s"], &["delay.lanes", "twice"]);
    check(&[], &["http.hosts=ops.example:443"], &["http.hosts", "\"ops.example:443\"", "without scheme"]);
    check(&[], &["http.hosts=*"], &["http.hosts", "like ops.example"]);
    check(&[], &["http.listen=9394"], &["http.listen", "--set", "\"9394\"", "127.0.0.1:9394"]);
    check(&[("ORDER_TIMEOUT__HTTP__LISTEN", "localhost:9394")], &[], &["http.listen", "environment", "IP address"]);
}

#[test]
fn errors_never_repeat_misplaced_addresses() {
    for address in
        ["amqp://shop:hunter2@host/v", "postgres://shop:hunter2@h/d?a=b", "shop:hunter2@host", "amqps://hunter2"]
    {
        let keys = load::every_key().into_iter().map(|key| format!("{key}={address}"));
        let without_a_key = ["", "=", " = 3", "delay.leed=", "x[0].y="].map(|before| format!("{before}{address}"));
        for text in keys.chain(without_a_key) {
            let fault = load(&[], &[&text]).map(drop);
            assert!(!format!("{fault:?}").contains("hunter2"), "{text}: {fault:?}");
        }
        for contents in [
            format!("namespace = {address:?}"),
            format!("{address:?} = 1"),
            format!("[{address:?}]\na = 1"),
            format!("delay = {{ lanes = [{address:?}], rings = [{{ unit = {address:?}, slots = 9 }}] }}"),
            format!("delay = {{ rings = [{{ {address:?} = 5 }}] }}"),
        ] {
            let fault = load_file(&contents).unwrap_err();
            assert!(!fault.contains("hunter2"), "{contents}: {fault}");
        }
    }
}

#[test]
fn every_duration_and_number_is_bounded() {
    for (setting, bound) in [
        ("amqp.heartbeat=11m", "10m"),
        ("amqp.connect_timeout=61m", "1h"),
        ("delay.lead=11m", "10m"),
        ("delay.max_delay=101years", "99years"),
        ("delay.lanes=3650d", "and 9years"),
        ("worker.hold_max=21m", "20m"),
        ("worker.requeue_after=61m", "1h"),
        ("worker.shutdown_grace=18446744073709551615s", "1h"),
        ("announce.keep=3651d", "9years"),
        ("announce.webhook_timeout=61s", "1m"),
        ("retry.missing_for=8d", "7days"),
        ("retry.max_attempts=1001", "1000"),
        ("delay.lanes=1500us", "whole number of milliseconds"),
    ] {
        let fault = load(&[], &[setting]).unwrap_err();
        let key = setting.split('=').next().unwrap();
        for part in [key, "--set", bound] {
            assert!(fault.contains(part), "{setting}: {fault:?} lacks {part:?}");
        }
    }
    let lanes = (1..=65).map(|minutes| format!("{minutes}m")).collect::<Vec<_>>().join(",");
    assert!(load(&[], &[&format!("delay.lanes={lanes}")]).unwrap_err().contains("more than 64"));
}

#[test]
fn events_are_announced_in_one_way() {
    const DATABASE: &str = "delay.strategy=database";
    const WEBHOOK: &str = "announce.webhook=https://shop.example.com/order-events";
    const KEY: &str = "announce.webhook_key_file=/run/secrets/webhook";
    assert!(load(&[], &[DATABASE, WEBHOOK, KEY]).is_ok());
    for (settings, words) in [
        (&[WEBHOOK, KEY][..], "events go to its exchange"),
        (&[DATABASE, WEBHOOK, KEY, "announce.notify=shop"], "leave one of them out"),
        (&[DATABASE, WEBHOOK], "openssl rand"),
        (&[DATABASE, KEY], "announce.webhook is empty"),
        (&[DATABASE, KEY, "announce.webhook=http://shop.example.com/"], "is not this machine"),
        (&[DATABASE, KEY, "announce.webhook=https://a:hunter2@shop.example.com/"], "has an account"),
    ] {
        let fault = load(&[], settings).unwrap_err();
        assert!(fault.contains(words) && fault.contains("announce.") && !fault.contains("hunter2"), "{fault}");
    }
}

#[test]
fn refuses_fractions_and_booleans() {
    for (file, key, found) in [
        ("[worker]\nshards = 2.5\n", "worker.shards", "2.5 is a fraction"),
        ("[worker]\nshards = true\n", "worker.shards", "true is a truth value"),
        ("[worker]\ntake_shards = [0.4]\n", "worker.take_shards[0]", "0.4 is a fraction"),
        ("[retry]\nmax_attempts = nan\n", "retry.max_attempts", "NaN is a fraction"),
        ("[delay]\nrings = [{ unit = \"5s\", slots = 24.5 }]\n", "delay.rings[0].slots", "24.5 is a fraction"),
        ("namespace = true\n", "namespace", "true is a truth value"),
        ("[orders]\npay_after_deadline = 0\n", "orders.pay_after_deadline", "0 is no truth value; write true or false"),
        ("[orders]\npay_after_deadline = \"never\"\n", "orders.pay_after_deadline", "never"),
        ("[delay]\nrings = [{ unit = \"5s\" }]\n", "delay.rings[0].slots", "is missing; add it"),
    ] {
        let fault = load_file(file).unwrap_err();
        for part in [key, found] {
            assert!(fault.contains(part), "{file}: {fault:?} lacks {part:?}");
        }
    }
}

#[test]
fn truth_values_are_read_from_every_source() {
    let pays = |settings: Result<Settings, String>| settings.unwrap().orders.pay_after_deadline;
    assert!(pays(load(&[], &[])));
    assert!(!pays(load_file("[orders]\npay_after_deadline = false\n")));
    assert!(!pays(load(&[], &["orders.pay_after_deadline=false"])));
    assert!(!pays(load(&[("ORDER_TIMEOUT__ORDERS__PAY_AFTER_DEADLINE", "false")], &[])));
}

/// The code blocks of a document in TOML.
fn printed_toml(document: &str) -> Vec<String> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(document);
    let text = std::fs::read_to_string(path).unwrap();
    let blocks = text.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap().to_owned());
    blocks.collect()
}

/// The values of a file as keys and the texts that an environment or a command line would give.
fn as_texts(toml: &str) -> Vec<(String, String)> {
    fn add(key: &str, value: &toml::Value, texts: &mut Vec<(String, String)>) {
        match value {
            toml::Value::Table(table) => {
                for (name, value) in table {
                    add(&if key.is_empty() { name.clone() } else { format!("{key}.{name}") }, value, texts);
                }
            }
            toml::Value::String(text) => texts.push((key.to_owned(), text.clone())),
            other => texts.push((key.to_owned(), other.to_string())),
        }
    }
    let mut texts = Vec::new();
    add("", &toml::Value::Table(toml.parse().unwrap()), &mut texts);
    texts
}

#[test]
fn printed_provider_tables_load_from_every_source() {
    let mut kinds = BTreeSet::new();
    for document in ["PROVIDERS.md", "PAYMENTS.md"] {
        for toml in printed_toml(document) {
            let shown = |settings: Result<Settings, String>| {
                let settings = settings.unwrap_or_else(|fault| panic!("{document}: {fault}\n{toml}"));
                (settings.providers, settings.kinds[&Kind::ORDER].providers.clone(), settings.orders.pay_after_deadline)
            };
            // Otherwise there is no such kind.
            let with_kind = if toml.contains("[kinds.order]") {
                toml.clone()
            } else {
                format!("{toml}\n[kinds.order]\nproviders = []\n")
            };
            let from_file = shown(load_file(&with_kind));
            kinds.extend(
                from_file.0.0.values().map(|provider| format!("{provider:?}").split('(').next().unwrap().to_owned()),
            );
            let texts = as_texts(&with_kind);
            let set: Vec<String> = texts.iter().map(|(key, text)| format!("{key}={text}")).collect();
            assert_eq!(shown(load(&[], &set.iter().map(String::as_str).collect::<Vec<_>>())), from_file);
            let name = |key: &str| format!("ORDER_TIMEOUT__{}", key.replace('.', "__").to_uppercase());
            let environment: Vec<_> = texts.iter().map(|(key, text)| (name(key), text.as_str())).collect();
            let environment: Vec<_> = environment.iter().map(|(name, text)| (name.as_str(), *text)).collect();
            assert_eq!(shown(load(&environment, &[])), from_file);
        }
    }
    assert_eq!(kinds.len(), 6, "{kinds:?}");
}

#[test]
fn wrong_provider_values_name_setting_and_fix() {
    let paypal = "[providers.p]\nkind = \"paypal\"\nclient_id = \"a\"\nclient_secret_file = \"s\"\n";
    let promise = |value: &str| load_file(&format!("{paypal}shop_captures_only_open_orders = {value}"));
    for value in ["true", "\"true\"", "false"] {
        assert!(promise(value).is_ok(), "{value}");
    }
    for (fault, words) in [
        (promise("1"), "true` or `false`"),
        (promise("1.5"), "is a fraction"),
        (promise("[true]"), "write one value"),
        (load_file(paypal), "is missing; add it"),
        (promise("true\n[providers.p.limits]\nconcurrency = true"), "invalid digit"),
        (promise("true\n[providers.p.limits]\nconcurrency = \"many\""), "invalid digit"),
        (promise("true\n[providers.p.limits]\ntimeout = 5"), "a duration"),
        (promise("true\nsecret = 1"), "unknown field `secret`"),
    ] {
        let fault = fault.map(drop).unwrap_err();
        assert!(fault.contains("providers.p") && fault.contains(words) && fault.contains(".toml"), "{fault}");
    }
    let fault = load(&[], &["providers.w.kind=wechat", "providers.w.platform_keys=[{ file ="]).unwrap_err();
    assert!(fault.contains("providers.w.platform_keys") && fault.contains("as a file has it"), "{fault}");
}

#[test]
fn values_of_columns_have_any_type() {
    let table = |close: &str| {
        load_file(&format!(
            "[kinds.booking.table]\ntable = \"b\"\nid = \"id\"\nopen = \"o\"\npaid = \"p\"\ndeadline = \"d\"\nclose = {close}\n"
        ))
    };
    let close = |settings: Result<Settings, String>| {
        settings.unwrap().kinds[&Kind::new("booking").unwrap()].table.clone().unwrap().close
    };
    let from_file = close(table("{ gone = true, state = 4, price = 0.5, at = \"now\" }"));
    assert_eq!(from_file.columns().unwrap().values().collect::<Vec<_>>(), ["now", "true", "0.5", "4"]);
    let others = ["table=b", "id=tenant, id", "open=o", "paid=p", "deadline=d", "close={ gone = true, state = 4 }"];
    let set: Vec<_> = others.iter().map(|one| format!("kinds.booking.table.{one}")).collect();
    let settings = load(&[], &set.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    let table = settings.kinds[&Kind::new("booking").unwrap()].table.as_ref().unwrap();
    assert_eq!(
        (table.id.0.as_slice(), table.close.columns().unwrap().len()),
        (&["tenant".to_owned(), "id".to_owned()][..], 2)
    );
}

#[test]
fn refuses_rings_beyond_broker_limits() {
    for (ring, why) in [
        ("{ unit = \"10000000000s\", slots = 20 }", "is not between"),
        ("{ unit = \"18446744073709551615s\", slots = 65535 }", "is not between"),
        ("{ unit = \"200d\", slots = 20 }", "is not between"),
        ("{ unit = \"1h\", slots = 20 }", "begin with a finer ring"),
        (
            "{ unit = \"5s\", slots = 24 }, { unit = \"1m\", slots = 9, early = \"18446744073709551615s\" }",
            "is not between",
        ),
        ("{ unit = \"5s\", slots = 24, early = \"1s\" }", "the finest ring has an early"),
        ("{ unit = \"1m\", slots = 90, early = \"25s\" }, { unit = \"5s\", slots = 24 }", "from fine to coarse"),
        ("{ unit = \"1500500us\", slots = 20 }", "whole number of milliseconds"),
    ] {
        let fault = load_file(&format!("[delay]\nrings = [{ring}]\n")).unwrap_err();
        assert!(fault.contains("delay.rings") && fault.contains(why), "{ring}: {fault:?}");
    }
    // More queues than a broker declares within the time limit.
    let rings = |slots: [u32; 3]| {
        let ring = |(unit, slots)| format!("{{ unit = \"{unit}s\", slots = {slots} }}");
        let rings: Vec<_> = [5, 300, 3_600].into_iter().zip(slots).map(ring).collect();
        load_file(&format!("[delay]\nrings = [{}]\n", rings.join(", ")))
    };
    assert!(rings([1_000, 500, 500]).is_ok());
    let fault = rings([1_000, 500, 501]).unwrap_err();
    assert!(fault.contains("delay.rings") && fault.contains("2001 slots are more than 2000"), "{fault:?}");
}

#[test]
fn refuses_rings_shorter_than_longest_retry() {
    let rings = |slots, longest: &str| {
        load_file(&format!(
            "[delay]\nrings = [{{ unit = \"1s\", slots = {slots} }}]\n[retry]\nlongest = \"{longest}\"\n"
        ))
    };
    let fault = rings(12, "1s").unwrap_err();
    for part in ["delay.rings", "9s", "32s", "retry.longest", "coarser ring"] {
        assert!(fault.contains(part), "{fault:?} lacks {part:?}");
    }
    // 33 units less one are 32 s.
    assert!(rings(40, "1s").is_ok());
    assert!(rings(39, "1s").is_err());
    assert!(rings(12, "280ms").is_ok());
}

fn load_file(contents: &str) -> Result<Settings, String> {
    let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    std::fs::write(file.path(), contents).unwrap();
    Settings::load_with_environment(Some(file.path()), Default::default(), &[]).map_err(|fault| fault.to_string())
}

/// Values that are never meant, but may be typed.
fn extreme_value() -> impl Strategy<Value = String> {
    let numbers = ["-1", "0", "1", "255", "256", "65535", "65536", "4294967296", "9223372036854775807", "1e400"];
    let far = ["18446744073709551615", "315360000", "9223372036854", "584554049253", "1000000", "1", "0"];
    let units = ["ns", "us", "ms", "s", "m", "h", "d", "years"];
    let words = [
        "",
        ",",
        "=",
        "amqp://h/?heartbeat=65536",
        "amqp://h:65535/?frame_max=0",
        "postgres://h",
        "\u{0}",
        "[",
        "true",
    ];
    prop_oneof![
        proptest::sample::select(numbers.to_vec()).prop_map(str::to_owned),
        (proptest::sample::select(far.to_vec()), proptest::sample::select(units.to_vec()))
            .prop_map(|(number, unit)| format!("{number}{unit}")),
        proptest::sample::select(words.to_vec()).prop_map(str::to_owned),
        (1_usize..400).prop_map(|length| format!("amqp://h/{}", "v".repeat(length))),
    ]
}

/// Builds everything that is derived from settings before a connection is opened.
fn build(settings: &Settings) {
    let wheel = settings.delay.wheel().expect("accepted rings mesh");
    assert!(!settings.topology().definitions("v").is_null());
    let id = OrderId::new("1").unwrap();
    for now in [i64::MIN, 0, 4_000_000_000_000_000, i64::MAX].map(Timestamp::from_unix_micros) {
        for due in [now, now + settings.delay.max_delay, Timestamp::from_unix_micros(i64::MAX)] {
            let _ = (wheel.place(due, now), wheel.place_retry(due, now), settings.delay.place(&id, due, now));
        }
    }
    for now in [0, 4_000_000_000_000_000].map(Timestamp::from_unix_micros) {
        check_no_alarm_loops(&setup_of(settings), now).unwrap();
    }
    for wait in [settings.worker.shutdown_grace, settings.worker.hold_max, settings.worker.requeue_after] {
        let _ = std::time::Instant::now() + wait;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_value_is_accepted_or_refused(
        settings in proptest::collection::vec((any::<proptest::sample::Index>(), extreme_value()), 1..4),
    ) {
        let keys = load::every_key();
        let overrides: Vec<String> =
            settings.iter().map(|(index, value)| format!("{}={value}", index.get(&keys))).collect();
        let given: Vec<&str> = overrides.iter().map(String::as_str).collect();
        if let Ok(settings) = load(&[], &given) {
            build(&settings);
        }
    }

    #[test]
    fn any_rings_are_accepted_or_refused(
        rings in proptest::collection::vec((extreme_value(), 0_u32..70_000, extreme_value()), 1..4),
        first_with_early in 0_usize..4,
    ) {
        let rings: Vec<String> = rings
            .iter()
            .enumerate()
            .map(|(ring, (unit, slots, early))| {
                let early = if ring < first_with_early { String::new() } else { format!(", early = {early:?}") };
                format!("{{ unit = {unit:?}, slots = {slots}{early} }}")
            })
            .collect();
        if let Ok(settings) = load_file(&format!("[delay]\nrings = [{}]\n", rings.join(", "))) {
            build(&settings);
        }
    }
}

#[test]
fn errors_never_repeat_passwords() {
    for url in ["http://x:hunter2@y", "postgres://u:hunter2@[bad", "amqp://u:hunter2@host:notaport/"] {
        for key in ["amqp.url", "database.url"] {
            let fault = load(&[], &[&format!("{key}={url}")]).map(drop);
            assert!(!format!("{fault:?}").contains("hunter2"), "{fault:?}");
        }
    }
    let settings = load(&[("ORDER_TIMEOUT__AMQP__URL", "amqp://u:hunter2@h/v")], &[]).unwrap();
    assert!(!format!("{settings:?}").contains("hunter2"));
}

#[test]
fn refuses_lock_timeout_above_statement_timeout() {
    let fault = load(&[], &["database.lock_timeout=5s"]).unwrap_err();
    let why = "must be shorter than database.statement_timeout, which is 5s";
    assert!(fault.contains("database.lock_timeout") && fault.contains(why), "{fault:?}");
}

#[test]
fn refused_addresses_name_setting_to_use() {
    for (setting, parts) in [
        ("amqp.url=amqp://u:hunter2@h/v?heartbeat=0", ["amqp.url", "from 1 to 600", "set amqp.heartbeat"]),
        (
            "amqp.url=amqp://u:hunter2@h/v?connection_timeout=9",
            ["amqp.url", "connection_timeout", "amqp.connect_timeout"],
        ),
        ("amqp.url=amqp:///v", ["amqp.url", "--set", "names no host; write localhost"]),
        ("amqp.url=amqp://u:hunter2@[fe80::1%25eth0]/v", ["amqp.url", "--set", "zone"]),
        ("amqp.url=amqp://u:hunt@er2/x@h/v", ["amqp.url", "--set", "has an @ behind its host"]),
    ] {
        let fault = load(&[], &[setting]).unwrap_err();
        assert!(!fault.contains("hunter2"), "{fault}");
        for part in parts.into_iter().chain(["its form: amqp://user:password@host:5672/vhost"]) {
            assert!(fault.contains(part), "{setting}: {fault:?} lacks {part:?}");
        }
    }
    for (url, part) in [
        ("postgres://u@h/d?options=-cstatement_timeout%3D0", "set database.statement_timeout"),
        ("postgres://u@h/d?lock_timeout=0", "set database.lock_timeout"),
        ("postgres:///d", "names no host; write localhost"),
    ] {
        let settings = load(&[("DATABASE_URL", url)], &[]).unwrap();
        let fault = settings.validate_database().unwrap_err().to_string();
        assert!(fault.contains("database.url") && fault.contains(part), "{url}: {fault}");
    }
}

#[test]
fn suggests_only_similar_settings() {
    for (setting, meant) in [
        ("amqp.foo=1", None),
        ("delay.x=1", None),
        ("nonsense=1", None),
        ("delay.leed=1s", Some("delay.lead")),
        ("worker.lead=1s", Some("delay.lead")),
        ("amqp.ulr=x", Some("amqp.url")),
        ("worker.closer=1", Some("worker.closers")),
    ] {
        let fault = load(&[], &[setting]).unwrap_err();
        match meant {
            Some(meant) => assert!(fault.ends_with(&format!("did you mean {meant}?")), "{fault}"),
            None => assert!(fault.ends_with("there is no such setting"), "{fault}"),
        }
    }
}

#[test]
fn refuses_word_instead_of_list() {
    for file in ["[delay]\nlanes = \"15m\"\n", "[worker]\ntake_shards = 1\n"] {
        let fault = load_file(file).unwrap_err();
        assert!(fault.contains("expected a list") && fault.contains("lanes = [\"15m\"]"), "{fault}");
    }
}

#[test]
fn publisher_has_database_only_if_given() {
    let load = |environment: &[(&str, &str)]| {
        let environment = environment.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        load::load(DatabaseUse::IfGiven, load::merge(None, environment, &[]).unwrap()).unwrap().database
    };
    assert!(!load(&[]).is_given());
    for other in ["mysql://shop:hunter2@h/shop", "", "postgres:///shop"] {
        assert!(!load(&[("DATABASE_URL", other)]).is_given(), "{other}");
    }
    assert!(!load(&[("ORDER_TIMEOUT__DATABASE__URL_FILE", "/no/such/file")]).is_given());
    assert!(load(&[("DATABASE_URL", "postgres://a@h/shop")]).is_given());
    let given = load(&[("ORDER_TIMEOUT__DATABASE__URL", "postgres://a@h/shop")]);
    assert_eq!(given.url.expose_secret(), "postgres://a@h/shop");
}

fn setup_of(settings: &Settings) -> Setup {
    Setup {
        delay: settings.delay.clone(),
        hold_max: settings.worker.hold_max,
        longest_retry: settings.retry.longest_wait(),
    }
}

#[test]
fn default_rings_deliver_every_delay_on_time() {
    let setup = setup_of(&Settings::defaults());
    for delay_ms in DELAYS_MS {
        for second in 0..7_200 {
            let now = Timestamp::from_unix_micros((1_800_000_000 + second) * 1_000_000);
            check_alarm_arrives(&setup, now + Duration::from_millis(delay_ms), now, &[]).unwrap();
        }
    }
}

#[test]
fn builder_has_default_settings_of_worker() {
    let settings = Settings::defaults();
    let defaults = Publisher::builder(settings.amqp.url.expose_secret());
    assert_eq!(format!("{defaults:?}"), format!("{:?}", settings.publisher()));
}

#[test]
fn kinds_are_named_in_file() {
    let settings = load_file(
        "[kinds.acceptance]\nlanes = [\"5m\"]\n[kinds.acceptance.table]\ntable = \"t\"\nid = \"id\"\nopen = \"o\"\n\
         paid = \"p\"\ndeadline = \"d\"\nclose = { o = \"false\" }\n[kinds.trial]\nlanes = []\n[kinds.review]\n\
         close_sql = \"c.sql\"\noverdue_sql = \"o.sql\"\n",
    )
    .unwrap();
    let names = |kinds: BTreeSet<Kind>| kinds.iter().map(Kind::to_string).collect::<Vec<_>>().join(" ");
    assert_eq!(names(settings.all_kinds()), "order acceptance review trial");
    assert_eq!(names(settings.served_kinds()), "order acceptance review", "trial is another team's");
    let kind = |name: &str| Kind::new(name).unwrap();
    assert_eq!(settings.words_of(&kind("acceptance")).event, "acceptance.closed");
    assert_eq!(settings.words_of(&Kind::ORDER).reason, "unpaid");
    let queues: Vec<String> = settings.topology().queues.into_iter().map(|queue| queue.name).collect();
    for name in
        ["order.timeout.acceptance", "order.delay.acceptance.5m.0", "order.timeout.trial", "order.timeout.review"]
    {
        assert!(queues.contains(&name.to_owned()), "{name}: {queues:?}");
    }
    assert_eq!(queues.len(), Settings::defaults().topology().queues.len() + 4);
}

#[test]
fn wrong_kinds_name_setting_and_fix() {
    let table = "[kinds.a.table]\ntable = \"t\"\nid = \"id\"\nopen = \"o\"\npaid = \"p\"\ndeadline = \"d\"\nclose = { o = \"f\" }\n";
    let payable = format!("{table}pay = {{ o = \"p\" }}\n");
    let stock = "[[kinds.a.table.stock]]\nitems = \"i\"\norder = \"o\"\nkey = \"k\"\nquantity = \"1\"\ntable = \"s\"\nstock_key = \"k\"\n";
    for (file, parts) in [
        ("[kinds.Trial]\nlanes = []\n".to_owned(), ["kinds.Trial", "lower-case letter"]),
        ("[kinds.7d]\n".to_owned(), ["kinds.7d", "lower-case letter"]),
        ("[kinds.order]\nlanes = [\"5m\"]\n".to_owned(), ["kinds.order.lanes", "delay.lanes"]),
        ("[kinds.order]\nclose_sql = \"c\"\n".to_owned(), ["kinds.order.close_sql", "orders.close_sql"]),
        ("[kinds.order]\nevent = \"a.b\"\n".to_owned(), ["kinds.order.event", "leave it out"]),
        ("[kinds.a]\nclose_sql = \"c\"\n".to_owned(), ["kinds.a.close_sql", "without overdue_sql"]),
        (format!("[kinds.a]\nclose_sql = \"c\"\noverdue_sql = \"o\"\n{table}"), ["kinds.a.table.table", "close_sql"]),
        (format!("[kinds.a]\nevent = \"not accepted\"\n{table}"), ["kinds.a.event", "routing key"]),
        (format!("[kinds.a]\nreason = \"\"\n{table}"), ["kinds.a.reason", "is empty"]),
        (
            "[kinds.a]\nclose_sql = \"c\"\noverdue_sql = \"o\"\nextend_max = \"1h\"\n".to_owned(),
            ["kinds.a.extend_max", "leave it out"],
        ),
        ("[kinds.order]\nextend_max = \"4000d\"\n".to_owned(), ["kinds.order.extend_max", "delay.max_delay"]),
        ("[kinds.a]\nlanes = [\"5m\", \"300s\"]\n".to_owned(), ["kinds.a.lanes", "named twice"]),
        (table.replace("open = \"o\"", "open = \"\""), ["kinds.a.table.open", "is empty"]),
        (format!("{table}amount = \"a\"\n"), ["kinds.a.table.amount", "without currency"]),
        (format!("{table}currency = \"c\"\n"), ["kinds.a.table.currency", "without amount"]),
        (format!("{table}minor_units = 2\n"), ["kinds.a.table.minor_units", "without amount"]),
        (
            format!("{table}amount = \"a\"\ncurrency = \"c\"\nminor_units = 5\n"),
            ["kinds.a.table.minor_units", "0 to 4 decimal places"],
        ),
        (format!("{table}pay = {{}}\n"), ["kinds.a.table.pay", "is empty"]),
        (format!("{table}closing = {{ o = \"g\" }}\n"), ["kinds.a.table.closing", "without pay"]),
        (
            format!("{table}closing = {{ o = \"f\" }}\npay = {{ o = \"p\" }}\n"),
            ["kinds.a.table.closing.o", "not overwritten by close"],
        ),
        (
            format!("{table}closing = {{ o = \"g\" }}\npay = {{ q = \"p\" }}\n"),
            ["kinds.a.table.closing.o", "not overwritten by pay"],
        ),
        (format!("{table}reopen = {{}}\n"), ["kinds.a.table.reopen", "without pay"]),
        (
            format!("{table}pay = {{ o = \"p\" }}\nreopen = {{}}\n")
                .replace("close = { o = \"f\" }", "close = \"delete\""),
            ["kinds.a.table.reopen", "leaves no row to reopen"],
        ),
        (
            format!("{table}{stock}give_back = {{}}\n"),
            ["kinds.a.table.stock[0].give_back", "nothing changes this stock"],
        ),
        (format!("{table}{stock}consume = {{ s = \"1\" }}\n"), ["kinds.a.table.stock[0].consume", "without pay"]),
        (
            format!("{payable}reopen = {{}}\n{stock}give_back = {{ s = \"1\" }}\n"),
            ["stock[0].take", "reserved + quantity"],
        ),
        (format!("{payable}{stock}take = {{ s = \"1\" }}\nleft = \"s\"\n"), ["stock[0].take", "without reopen"]),
        (format!("{payable}reopen = {{}}\n{stock}take = {{ s = \"1\" }}\n"), ["stock[0].left", "left = \"available\""]),
        (
            format!("{payable}{stock}consume = {{ s = \"1\" }}\nleft = \"s\"\n"),
            ["kinds.a.table.stock[0].left", "without take"],
        ),
        (
            format!(
                "[providers.card]\nkind = \"stripe\"\nsecret_key_file = \"/run/secrets/stripe\"\n[kinds.a]\nproviders = [\"card\"]\n{table}"
            ),
            ["kinds.a.providers", "the table's pay is not"],
        ),
        ("[worker]\nkinds = [\"b\"]\n".to_owned(), ["worker.kinds", "there is no kind"]),
        ("[worker]\nkinds = [\"a\"]\n[kinds.a]\nlanes = []\n".to_owned(), ["worker.kinds", "[kinds.a.table]"]),
        ("[worker]\nkinds = [\"order\", \"order\"]\n".to_owned(), ["worker.kinds", "named twice"]),
    ] {
        let fault = load_file(&file).unwrap_err();
        for part in parts {
            assert!(fault.contains(part), "{file}: {fault:?} lacks {part:?}");
        }
    }
    let settings = load(&[("ORDER_TIMEOUT__KINDS__TRIAL__LANES", "3d,7d")], &["worker.kinds=order"]).unwrap();
    assert_eq!(settings.lanes().iter().nth(1).map(|(_, lanes)| lanes.lanes.len()), Some(2));
}
