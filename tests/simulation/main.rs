//! The protocol without I/O: the production engine, hold and wheel driven through arbitrary interleavings of crash,
//! duplicate, delay, clock skew, payment and extension, with a ledger and a clock as the oracle. Mutants contain known
//! bugs, some in the steps around the engine and some in its own rules, and the oracle must find each of them.
//!
//! `SIMULATED_HISTORIES=1000000 cargo test --release --test simulation -- --nocapture` runs longer and prints counts.

mod events;
mod oracle;
mod steps;
mod world;

use std::cell::RefCell;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRunner};

use events::{Counts, Event};
use oracle::{check, settle};
use steps::{MAX_STEPS, MIN_STEPS, Step, step, step_with_provider, take};
use world::{Mutant, WORKERS, World};

/// Histories of a usual run.
const HISTORIES: u32 = 2_000;
/// The same with a payment provider, where each history takes longer.
const HISTORIES_WITH_PROVIDER: u32 = 1_000;
/// A history in which an order is never closed takes long to play.
const MAX_SHRINK_MS: u32 = 5_000;
/// The minimum percentage of histories in which each kind of event must occur.
const MIN_PERCENT: u64 = 5;

/// Plays a history to its end. Events while everything settles are not counted: that every order is closed then tells
/// nothing about the steps before.
fn play(mutant: Mutant, has_provider: bool, steps: &[Step], counts: &RefCell<Counts>) -> Result<(), String> {
    let mut world = World::new(mutant, has_provider);
    (0..WORKERS).for_each(|worker| world.start(worker));
    for step in steps {
        take(&mut world, step)?;
        check(&world)?;
    }
    counts.borrow_mut().add(steps.len(), world.seen());
    settle(&mut world)
}

/// Plays histories until one breaks a rule; returns the reason, with the shortest steps found that show it.
fn violation(
    mutant: Mutant,
    has_provider: bool,
    histories: u32,
    counts: &RefCell<Counts>,
) -> Option<(String, Vec<Step>)> {
    let config = Config {
        cases: histories,
        failure_persistence: None,
        max_shrink_iters: 2_000,
        max_shrink_time: MAX_SHRINK_MS,
        // Most of the time went into random numbers of a quality that is not needed here.
        rng_algorithm: RngAlgorithm::XorShift,
        ..Config::default()
    };
    let mut runner = TestRunner::new(config);
    let step = if has_provider { step_with_provider().boxed() } else { step().boxed() };
    let steps = proptest::collection::vec(step, MIN_STEPS..=MAX_STEPS);
    let played = runner.run(&steps, |steps| play(mutant, has_provider, &steps, counts).map_err(TestCaseError::fail));
    match played {
        Ok(()) => None,
        Err(TestError::Fail(why, steps)) => Some((why.to_string(), steps)),
        Err(aborted) => panic!("{aborted}"),
    }
}

/// Plays histories of the production code; each of these events must occur often.
fn must_keep_invariants(has_provider: bool, events: &[Event]) {
    let usual = if has_provider { HISTORIES_WITH_PROVIDER } else { HISTORIES };
    let histories = std::env::var("SIMULATED_HISTORIES").ok().map_or(usual, |text| text.parse().expect("a number"));
    let counts = RefCell::default();
    if let Some((why, steps)) = violation(Mutant::Sound, has_provider, histories, &counts) {
        panic!("{why}; {steps:?}");
    }
    let counts = counts.into_inner();
    counts.print(events);
    let rare = counts.rarer_than(events, MIN_PERCENT);
    assert!(rare.is_empty(), "in less than {MIN_PERCENT} % of the histories: {rare:?}");
}

#[test]
fn every_interleaving_keeps_invariants() {
    must_keep_invariants(false, Event::ALL);
}

#[test]
fn every_interleaving_with_provider_keeps_invariants() {
    must_keep_invariants(true, Event::WITH_PROVIDER);
}

fn must_be_found(mutant: Mutant) {
    let (counts, has_provider) = (RefCell::default(), mutant.needs_provider());
    let (why, steps) =
        violation(mutant, has_provider, 100_000, &counts).unwrap_or_else(|| panic!("{mutant:?} was not found"));
    println!("{mutant:?}: {why}; {steps:?}");
    assert_eq!(play(Mutant::Sound, has_provider, &steps, &counts), Ok(()), "only the mutant fails");
}

#[test]
fn finds_ack_before_commit() {
    must_be_found(Mutant::AckBeforeCommit);
}

#[test]
fn finds_update_without_status_guard() {
    must_be_found(Mutant::NoStatusGuard);
}

#[test]
fn finds_sweep_ignoring_payment() {
    must_be_found(Mutant::SweepIgnoresPayment);
}

#[test]
fn finds_stock_returned_per_delivery() {
    must_be_found(Mutant::StockPerDelivery);
}

#[test]
fn finds_ack_before_rearm_confirm() {
    must_be_found(Mutant::AckBeforeConfirm);
}

#[test]
fn finds_two_laps_in_one_slot() {
    must_be_found(Mutant::TwoLapsInOneSlot);
}

#[test]
fn finds_retries_without_delay() {
    must_be_found(Mutant::RetriesAtOnce);
}

#[test]
fn finds_acknowledged_redelivery() {
    must_be_found(Mutant::AcknowledgesRedelivery);
}

#[test]
fn finds_dropped_not_due() {
    must_be_found(Mutant::DropsNotDue);
}

#[test]
fn finds_busy_counted_as_closed() {
    must_be_found(Mutant::TakesBusyForClosed);
}

#[test]
fn finds_sweep_forgetting_failed_orders() {
    must_be_found(Mutant::ForgetsFailed);
}

#[test]
fn finds_sweep_ending_at_failed_order() {
    must_be_found(Mutant::FailureEndsPass);
}

#[test]
fn finds_sweep_once_per_minute() {
    must_be_found(Mutant::SweepsEveryMinute);
}

#[test]
fn finds_alarms_held_too_long() {
    must_be_found(Mutant::HoldsTooLong);
}

#[test]
fn finds_brake_forgotten_on_restart() {
    must_be_found(Mutant::BrakeForgetsOnRestart);
}

#[test]
fn finds_stock_released_on_unknown() {
    must_be_found(Mutant::ReleasesOnUnknown);
}

#[test]
fn finds_order_settled_twice() {
    must_be_found(Mutant::SettlesTwice);
}

#[test]
fn finds_cancel_before_ask() {
    must_be_found(Mutant::CancelsBeforeAsking);
}

#[test]
fn finds_resume_skipping_verdict() {
    must_be_found(Mutant::ResumeSkipsVerdict);
}

#[test]
fn finds_one_verdict_deciding_order() {
    must_be_found(Mutant::OneVerdictDecides);
}
