//! A settings file, and overrides behind a line of three dashes. Refused with one sentence, or accepted: then everything
//! that is built from settings can be built, and the broker would take every name and number in it.
#![no_main]

use std::cell::RefCell;
use std::collections::HashSet;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use libfuzzer_sys::{Corpus, fuzz_target};
use order_timeout::message::LONGEST_TTL;
use order_timeout::schedule::lane::Lanes;
use order_timeout::topology::{Argument, Topology};
use order_timeout::{Moment, OrderId, Settings};
use secrecy::ExposeSecret;

/// An AMQP short string.
const LONGEST_NAME_BYTES: usize = 255;
/// 64 lanes of 16 queues, some rings of 1 000, and what every deployment has.
const MOST_QUEUES: usize = 64 * 16 + 8 * 1_000 + 3;
const LONGEST_SENTENCE_BYTES: usize = 8 * 1_024;

thread_local! {
    static FILE: RefCell<(PathBuf, File)> = RefCell::new(scratch());
}

/// One file for all runs, in memory, and without a name, so that it goes with the process however that ends.
fn scratch() -> (PathBuf, File) {
    let name = format!("/dev/shm/order-timeout-fuzz-{}", std::process::id());
    let file = File::create(&name).expect("a file in memory");
    std::fs::remove_file(&name).expect("a file in memory");
    (PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())), file)
}

fuzz_target!(|input: &str| -> Corpus {
    let (toml, overrides) = input.split_once("\n---\n").unwrap_or((input, ""));
    // A secret's file would be read, and whatever name the fuzzer thinks of is none of its business.
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
        Ok(settings) => can_be_used(&settings),
        Err(fault) => {
            let sentence = fault.to_string();
            assert!(sentence.len() <= LONGEST_SENTENCE_BYTES, "a sentence of {} bytes", sentence.len());
        }
    }
    Corpus::Keep
});

fn can_be_used(settings: &Settings) {
    settings.validate().expect("what was loaded is valid");
    let _ = settings.validate_database();
    assert!(!format!("{settings:?}").contains(settings.amqp.url.expose_secret()), "an address in the debug form");
    the_broker_would_take(&Topology::new(settings));

    let (wheel, lanes) = (settings.wheel().expect("accepted rings mesh"), Lanes::new(settings));
    let id = OrderId::new("1").expect("an id");
    for now in [i64::MIN, 0, 1_800_000_000_000_000, i64::MAX].map(Moment::from_unix_micros) {
        for due in [now, now + Duration::from_secs(1_800), now + settings.delay.max_delay] {
            let _ = (wheel.place(due, now), wheel.place_retry(due, now), lanes.entry(&id, due, now));
        }
    }
    let worker = &settings.worker;
    for wait in [worker.shutdown_grace, worker.hold_max, worker.away_patience, settings.announce.keep] {
        let _ = Instant::now() + wait;
    }
}

fn the_broker_would_take(topology: &Topology) {
    assert!(topology.queues.len() <= MOST_QUEUES, "{} queues", topology.queues.len());
    let exchanges: HashSet<_> = topology.exchanges.iter().map(|exchange| exchange.name.as_str()).collect();
    let queues: HashSet<_> = topology.queues.iter().map(|queue| queue.name.as_str()).collect();
    assert_eq!((exchanges.len(), queues.len()), (topology.exchanges.len(), topology.queues.len()), "a name twice");
    for name in exchanges.iter().chain(&queues) {
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
    let mut bindings = HashSet::new();
    for binding in &topology.bindings {
        assert!(
            exchanges.contains(binding.exchange.as_str()) && queues.contains(binding.queue.as_str()),
            "{binding:?}"
        );
        assert!(binding.routing_key.len() <= LONGEST_NAME_BYTES, "{binding:?}");
        // The events' exchange and the fanouts have one queue of ours at most.
        assert!(bindings.insert((&binding.exchange, &binding.routing_key)), "one key, two queues: {binding:?}");
    }
}
