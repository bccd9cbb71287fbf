//! A settings file, and overrides after a line of three dashes. They are rejected with one sentence, or accepted: then
//! everything can be built from them, and the broker would accept every name and number.
#![cfg_attr(feature = "run", no_main)]

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use order_timeout::Settings;
use order_timeout_amqp::topology::{Argument, Destination, Topology};
use order_timeout_core::delay::Placement;
use order_timeout_core::delay::wheel::{Ring, Wheel};
use order_timeout_core::message::LONGEST_TTL;
use order_timeout_core::order::{OrderId, Timestamp};
use order_timeout_fuzz::{Corpus, fuzz_target};
use secrecy::ExposeSecret;

/// The limit of an AMQP short string.
const LONGEST_NAME_BYTES: usize = 255;
/// 64 lanes of 16 queues, 8 rings of 1 000 slots, 64 shards, the inbox, the queue for messages that the broker drops, and
/// 32 kinds with a queue and 64 lanes each.
const MOST_QUEUES: usize = 64 * 16 + 8 * 1_000 + 64 + 2 + 32 * 65;
/// The type of the exchange that distributes alarms over shards.
const CONSISTENT_HASH: &str = "x-consistent-hash";
const LONGEST_SENTENCE_BYTES: usize = 8 * 1_024;

/// The delays of alarms and retries, for all settings.
const WAITS_MS: [u64; 8] = [0, 1, 50, 1_000, 59_999, 61 * 60_000, 32 * 86_400_000, 730 * 86_400_000];
/// A TTL is in whole milliseconds.
const ROUNDING: Duration = Duration::from_millis(1);
/// An alarm is followed through at most this many stays in the coarsest ring.
const MOST_STAYS: u32 = 100;

thread_local! {
    static FILE: RefCell<(PathBuf, File)> = RefCell::new(scratch());
}

/// One file for all runs, in memory and unlinked, so that it disappears with the process.
fn scratch() -> (PathBuf, File) {
    let name = format!("/dev/shm/order-timeout-fuzz-{}", std::process::id());
    let file = File::create(&name).expect("a file in memory");
    std::fs::remove_file(&name).expect("a file in memory");
    (PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())), file)
}

fuzz_target!(|input: &str| -> Corpus {
    let (toml, overrides) = input.split_once("\n---\n").unwrap_or((input, ""));
    // A secret's file would be read, and the fuzzer must not read arbitrary files.
    if input.contains("_file") {
        return Corpus::Reject;
    }
    let overrides: Vec<String> = overrides.lines().map(str::to_owned).collect();
    let path = FILE.with_borrow_mut(|(path, file)| {
        file.set_len(0).expect("a file in memory");
        file.write_all_at(toml.as_bytes(), 0).expect("a file in memory");
        path.clone()
    });
    match Settings::load_with_environment(Some(&path), Default::default(), &overrides) {
        Ok(settings) => settings_are_usable(&settings),
        Err(fault) => {
            let sentence = fault.to_string();
            assert!(sentence.len() <= LONGEST_SENTENCE_BYTES, "a sentence of {} bytes", sentence.len());
        }
    }
    Corpus::Keep
});

fn settings_are_usable(settings: &Settings) {
    settings.validate().expect("what was loaded is valid");
    let _ = settings.validate_database();
    assert!(!format!("{settings:?}").contains(settings.amqp.url.expose_secret()), "an address in the debug form");
    broker_accepts_topology(settings, &settings.topology());

    let wheel = settings.delay.wheel().expect("accepted rings mesh");
    let id = OrderId::new("1").expect("an id");
    for now in [i64::MIN, 0, 1_800_000_000_000_000, i64::MAX].map(Timestamp::from_unix_micros) {
        for due in [now, now + Duration::from_secs(1_800), now + settings.delay.max_delay] {
            let _ = (wheel.place(due, now), wheel.place_retry(due, now), settings.delay.place(&id, due, now));
        }
    }
    for now in [0, 1_800_000_000_000_000, 1_800_000_000_000_001].map(Timestamp::from_unix_micros) {
        for wait in WAITS_MS.map(Duration::from_millis).into_iter().chain([settings.retry.longest_wait()]) {
            alarm_never_circulates(settings, &wheel, now + wait, now);
            retry_is_on_time(settings, &wheel, wait, now);
        }
    }
    let worker = &settings.worker;
    for wait in [worker.shutdown_grace, worker.hold_max, worker.requeue_after, settings.announce.keep] {
        let _ = Instant::now() + wait;
    }
}

/// From slot to slot until the worker holds it: at most once in each ring, and before that once per stay in the
/// coarsest.
fn alarm_never_circulates(settings: &Settings, wheel: &Wheel, due: Timestamp, mut now: Timestamp) {
    let rings = wheel.rings();
    let coarsest = rings.last().expect("one at least");
    let stay = coarsest.unit * (u32::from(coarsest.slots) * 5 / 6 - 1);
    let due = due.min(now + stay * MOST_STAYS);
    let most_hops = rings.len() as u128 + due.since(now).as_micros() / stay.as_micros() + 1;
    let mut hops = 0;
    while let Placement::Slot { ring, ttl, .. } = wheel.place(due, now) {
        hops += 1;
        assert!(hops <= most_hops, "more than {most_hops} slots for {:?}", due.since(now));
        assert!(ttl < ring_of(wheel, &ring).span(), "{ttl:?} in ring {ring}: its queue expires it before");
        now = now + ttl;
        assert!(now <= due + ROUNDING, "{:?} late", now.since(due));
    }
    assert!(due.since(now) <= settings.worker.hold_max, "{:?} early: it is rearmed", due.since(now));
}

fn retry_is_on_time(settings: &Settings, wheel: &Wheel, wait: Duration, now: Timestamp) {
    let wake_at = now + wait.min(settings.retry.longest_wait());
    match wheel.place_retry(wake_at, now) {
        Placement::Due => assert!(wake_at <= now, "{:?} early, at once", wake_at.since(now)),
        Placement::Slot { ring: name, ttl, .. } => {
            let ring = ring_of(wheel, &name);
            let (back, unit) = (now + ttl, ring.unit);
            assert!(back >= wake_at, "{:?} early", wake_at.since(back));
            assert!(back < wake_at + unit + ROUNDING, "{:?} late in units of {unit:?}", back.since(wake_at));
            assert!(ttl < ring.span(), "{ttl:?} in ring {name}: its queue expires it before");
            // From a coarse slot it returns through the inbox, which must not rearm it.
            assert!(*ring == wheel.rings()[0] || wheel.place(now, back) == Placement::Due);
        }
        other => panic!("{other:?} is no place in the wheel"),
    }
}

fn ring_of<'a>(wheel: &'a Wheel, name: &str) -> &'a Ring {
    wheel.rings().iter().find(|ring| ring.name == name).expect("a ring of this wheel")
}

fn broker_accepts_topology(settings: &Settings, topology: &Topology) {
    assert!(topology.queues.len() <= MOST_QUEUES, "{} queues", topology.queues.len());
    let exchanges: Exchanges<'_> =
        topology.exchanges.iter().map(|exchange| (exchange.name.as_str(), exchange.kind)).collect();
    let queues: HashSet<_> = topology.queues.iter().map(|queue| queue.name.as_str()).collect();
    assert_eq!((exchanges.len(), queues.len()), (topology.exchanges.len(), topology.queues.len()), "a name twice");
    for name in exchanges.keys().chain(&queues) {
        assert!((1..=LONGEST_NAME_BYTES).contains(&name.len()), "{name:?}");
        assert!(!name.starts_with("amq."), "{name:?} is reserved");
        assert!(!name.chars().any(char::is_control), "{name:?}");
    }
    for queue in &topology.queues {
        if let Some(ttl) = queue.arguments.get("x-message-ttl") {
            let longest = i64::try_from(LONGEST_TTL.as_millis()).expect("ten years");
            assert!(matches!(ttl, Argument::Number(ms) if (0..=longest).contains(ms)), "{queue:?}");
        }
    }
    bindings_have_targets(topology, &exchanges, &queues);
    shards_are_bound_evenly(settings, topology, &exchanges);
}

/// The exchanges by name, with their type.
type Exchanges<'a> = HashMap<&'a str, &'static str>;

fn bindings_have_targets(topology: &Topology, exchanges: &Exchanges<'_>, queues: &HashSet<&str>) {
    let (mut keys, mut bound) = (HashSet::new(), HashSet::new());
    for binding in &topology.bindings {
        assert!(binding.routing_key.len() <= LONGEST_NAME_BYTES, "{binding:?}");
        let kind = exchanges.get(binding.exchange.as_str()).unwrap_or_else(|| panic!("from nowhere: {binding:?}"));
        match &binding.destination {
            Destination::Queue(queue) => {
                assert!(queues.contains(queue.as_str()), "{binding:?}");
                bound.insert(queue.as_str());
            }
            // Only this exchange is bound to another one, and only queues are bound to it, so there are no cycles.
            Destination::Exchange(exchange) => {
                assert!(exchanges.get(exchange.as_str()) == Some(&CONSISTENT_HASH), "{binding:?}");
                assert!(*kind != CONSISTENT_HASH, "{binding:?}");
            }
        }
        // Each key has one destination, or messages would be duplicated. A fanout ignores keys, and for the
        // consistent-hash exchange they are weights.
        let key = if *kind == "fanout" { "" } else { binding.routing_key.as_str() };
        let is_alone = *kind == CONSISTENT_HASH || keys.insert((binding.exchange.as_str(), key));
        assert!(is_alone, "one key, two destinations: {binding:?}");
    }
    assert_eq!(bound.len(), queues.len(), "a queue without a binding");
}

/// With several shards, each is bound once to the consistent-hash exchange, with the same weight: bound twice it would
/// get a double share, not bound it would get none.
fn shards_are_bound_evenly(settings: &Settings, topology: &Topology, exchanges: &Exchanges<'_>) {
    let shares = || topology.bindings.iter().filter(|share| exchanges[share.exchange.as_str()] == CONSISTENT_HASH);
    let names = settings.names();
    let shards = if settings.worker.shards > 1 { settings.worker.shards } else { 0 };
    let expected: Vec<_> = (0..shards).map(|shard| (names.shards(), Destination::Queue(names.shard(shard)))).collect();
    let bound: Vec<_> = shares().map(|share| (share.exchange.clone(), share.destination.clone())).collect();
    assert_eq!(bound, expected, "{shards} shards");
    for share in shares() {
        // The broker accepts only whole numbers above 0 as weights.
        assert!(share.routing_key.parse::<u32>().is_ok_and(|weight| weight > 0), "{share:?}");
        assert!(shares().all(|other| other.routing_key == share.routing_key), "{share:?}");
    }
}
