//! The limits of each provider, counted at the provider's side: concurrency, rate, circuit breaker, and a queue of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use order_timeout_core::payment::Answer;
use serde_json::json;

use crate::server::{Reply, Server, json, with_headers};
use crate::setup::{Setup, why};

fn open() -> Reply {
    json(200, &json!({"reference": "att-1", "state": "open"}))
}

fn limits(text: &str) -> String {
    format!("[http.limits]\n{text}")
}

#[tokio::test]
async fn concurrency_is_never_exceeded() {
    let server = Server::start(|_| Reply::After(Duration::from_millis(20), Box::new(open()))).await;
    let setup = Setup::new("http", &server.url(), &limits("concurrency = 4\nrequests_per_s = 10000"));
    let attempt = setup.attempt("att-1");
    let answers = join_all((0..60).map(|_| setup.provider.ask(&attempt))).await;
    assert!(answers.iter().all(|answer| *answer == Answer::Open), "{answers:?}");
    assert_eq!((server.most_under_way(), server.seen().len()), (4, 60));
}

#[tokio::test]
async fn rate_is_never_exceeded() {
    let server = Server::start(|_| open()).await;
    let setup = Setup::new("http", &server.url(), &limits("concurrency = 50\nrequests_per_s = 20"));
    let attempt = setup.attempt("att-1");
    let answers = join_all((0..50).map(|_| setup.provider.ask(&attempt))).await;
    assert!(answers.iter().all(|answer| *answer == Answer::Open), "{answers:?}");
    let mut times: Vec<_> = server.seen().iter().map(|seen| seen.at).collect();
    times.sort();
    for (at, first) in times.iter().enumerate() {
        let within = times[at..].iter().take_while(|time| **time - *first < Duration::from_millis(1_000)).count();
        // Of requests a twentieth of a second apart, 20 begin within a second; the way to the server adds one.
        assert!(within <= 21, "{within} requests within a second");
    }
    // And it is used: 49 spaces of a twentieth.
    let took = *times.last().unwrap() - times[0];
    assert!((Duration::from_millis(2_400)..Duration::from_secs(10)).contains(&took), "{took:?}");
}

#[tokio::test]
async fn breaker_opens_and_recovers() {
    let is_broken = Arc::new(AtomicBool::new(true));
    let shared = Arc::clone(&is_broken);
    let server =
        Server::start(move |_| if shared.load(Ordering::SeqCst) { with_headers(502, &[], "<html>") } else { open() })
            .await;
    let more = limits("failures_to_open = 3\nopen_for = \"2s\"\nrequests_per_s = 10000");
    let setup = Setup::new("http", &server.url(), &more);
    for reference in ["att-1", "att-1", "att-2", "att-3"] {
        assert!(why(&setup.ask(reference).await).contains("HTTP 502"));
    }
    // One that has failed is left alone for longer.
    let said = setup.ask("att-1").await;
    assert!(why(&said).contains("its last calls failed (it failed (HTTP 502))"), "{said:?}");
    let Answer::Unknown(unknown) = said else { unreachable!() };
    assert!(unknown.retry_after.is_some_and(|pause| pause <= Duration::from_secs(2)));
    assert_eq!(server.seen().len(), 4, "a provider that failed is left alone");
    // One of many calls tests it; the others wait for what it finds out, and are refused.
    let attempt = setup.attempt("att-4");
    let many = || join_all((0..10).map(|_| setup.provider.ask(&attempt)));
    let opened = Instant::now();
    while server.seen().len() == 4 {
        many().await;
        assert!(opened.elapsed() < Duration::from_secs(30));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(server.seen().len(), 5);
    is_broken.store(false, Ordering::SeqCst);
    until(Answer::Open, || setup.ask("att-1")).await;
    let answers = join_all((0..10).map(|_| setup.ask("att-1"))).await;
    assert!(answers.iter().all(|answer| *answer == Answer::Open), "{answers:?}");
}

/// Asks until this is the answer; until then no call may be sent.
async fn until<F: Future<Output = Answer>>(expected: Answer, ask: impl Fn() -> F) {
    let begun = Instant::now();
    loop {
        let said = ask().await;
        if said == expected {
            return;
        }
        assert!(why(&said).contains("not asked"), "{said:?}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{said:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn refusals_do_not_open_breaker() {
    let server = Server::start(|seen| {
        let status = if seen.path == "/ask" { 403 } else { 200 };
        json(status, &json!({"reference": "att-2", "state": "open"}))
    })
    .await;
    let setup = Setup::new("http", &server.url(), &limits("failures_to_open = 2\nrequests_per_s = 10000"));
    for _ in 0..5 {
        assert!(why(&setup.ask("att-1").await).contains("refuses this client"));
        assert!(why(&setup.cancel("att-1").await).contains("another payment"));
    }
    assert_eq!(server.seen().len(), 10);
}

#[tokio::test]
async fn unsent_calls_say_nothing_of_provider() {
    let server = Server::start(|_| with_headers(502, &[], "")).await;
    let more = "[stripe.limits]\nfailures_to_open = 2\nopen_for = \"2s\"\nrequests_per_s = 10000";
    let setup = Setup::new("stripe", &server.url(), more);
    for reference in ["pi_1", "pi_2"] {
        assert!(why(&setup.ask(reference).await).contains("HTTP 502"));
        // Between two failures, and as the test of an open breaker.
        why(&setup.ask("no_stripe_id").await);
    }
    assert!(why(&setup.ask("pi_1").await).contains("not asked"));
    let opened = Instant::now();
    loop {
        let said = setup.ask("no_stripe_id").await;
        if why(&said).contains("pi_") {
            break;
        }
        assert!(why(&said).contains("not asked") && opened.elapsed() < Duration::from_secs(30), "{said:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // One failed test opens it again, which two failures would be needed for if it had closed.
    assert!(why(&setup.ask("pi_3").await).contains("HTTP 502"));
    assert!(why(&setup.ask("pi_1").await).contains("not asked"));
    assert_eq!(server.seen().len(), 3);
}

#[tokio::test]
async fn throttled_provider_is_left_alone() {
    let count = AtomicU32::new(0);
    let server = Server::start(move |_| match count.fetch_add(1, Ordering::SeqCst) {
        0 => with_headers(429, &[("retry-after", "1")], ""),
        _ => open(),
    })
    .await;
    let setup = Setup::new("http", &server.url(), &limits("requests_per_s = 10000"));
    let throttled_at = Instant::now();
    assert!(why(&setup.ask("att-1").await).contains("HTTP 429"));
    until(Answer::Open, || setup.ask("att-1")).await;
    let seen = server.seen();
    assert_eq!(seen.len(), 2);
    assert!(seen[1].at - throttled_at >= Duration::from_secs(1), "{:?}", seen[1].at - throttled_at);
}

#[tokio::test]
async fn hanging_provider_delays_no_other() {
    let (sick, healthy) = (Server::start(|_| Reply::Hang).await, Server::start(|_| open()).await);
    let of_sick = Setup::new("http", &sick.url(), &limits("concurrency = 2\ntimeout = \"60s\""));
    let of_healthy = Setup::new("http", &healthy.url(), &limits("requests_per_s = 10000"));
    let (sick_attempt, healthy_attempt) = (of_sick.attempt("att-1"), of_healthy.attempt("att-1"));
    let sick_calls = join_all((0..100).map(|_| of_sick.provider.ask(&sick_attempt)));
    let healthy_calls = async {
        // After the sick one's calls have begun.
        while sick.most_under_way() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let mut longest = Duration::ZERO;
        for _ in 0..200 {
            let begun = Instant::now();
            assert_eq!(of_healthy.provider.ask(&healthy_attempt).await, Answer::Open);
            longest = longest.max(begun.elapsed());
        }
        longest
    };
    tokio::select! {
        _ = sick_calls => panic!("the hanging provider answered"),
        longest = healthy_calls => assert!(longest < Duration::from_secs(10), "{longest:?}"),
    }
}

#[tokio::test]
async fn waiting_for_turn_is_bounded() {
    let server = Server::start(|_| Reply::Hang).await;
    let more = limits("concurrency = 1\ntimeout = \"30s\"\nqueue_timeout = \"200ms\"");
    let setup = Setup::new("http", &server.url(), &more);
    let attempt = setup.attempt("att-1");
    let first = setup.provider.ask(&attempt);
    let second = async {
        while server.most_under_way() < 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        setup.provider.ask(&attempt).await
    };
    tokio::select! {
        _ = first => panic!("the first call ended"),
        said = second => assert!(why(&said).contains("providers.http.limits"), "{said:?}"),
    }
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn dropped_calls_free_their_place() {
    let server = Server::start(|seen| if seen.path == "/ask" { Reply::Hang } else { open() }).await;
    let setup = Setup::new("http", &server.url(), &limits("concurrency = 1\nrequests_per_s = 10000"));
    let attempt = setup.attempt("att-1");
    for _ in 0..10 {
        let dropped = tokio::time::timeout(Duration::from_millis(20), setup.provider.ask(&attempt)).await;
        assert!(dropped.is_err());
    }
    assert_eq!(setup.cancel("att-1").await, Answer::Open);
}
