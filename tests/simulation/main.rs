//! The protocol without I/O: the production desk, hold and wheel driven through arbitrary interleavings of crash,
//! duplicate, delay, clock skew, payment and extension, with a ledger as the oracle. Known bugs stand beside it, and
//! the oracle must find each of them.
//!
//! `SIMULATED_HISTORIES=1000000 cargo test --release --test simulation -- --nocapture` runs longer and prints counts.

mod world;

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use world::{Fate, Mutant, Scheduling, Status, WORKERS, World};

/// Histories of a usual run.
const HISTORIES: u32 = 2_000;
const FEWEST_STEPS: usize = 20;
const MOST_STEPS: usize = 80;
/// The worst that two clocks differ here, and so the worst that a slot may hold up one message behind another.
const MOST_SKEW_MS: i64 = 400;
/// How far somebody sets the database's clock.
const MOST_CLOCK_SET_MS: i64 = 600_000;
/// How long it may take until every order is closed once all faults are over: the furthest deadline is 25 s away, or as
/// much further as the clock was set back; an order that refused again and again is left alone for five minutes.
const LONGEST_SETTLING: Duration = Duration::from_secs(25 + 1_200 + 300 + 60);
/// Fine steps first; who is not closed after [`FINE_STEPS`] of them waits for something far away.
const FINE_STEP: Duration = Duration::from_millis(250);
const COARSE_STEP: Duration = Duration::from_secs(5);
const FINE_STEPS: u128 = 160;

#[derive(Debug, Clone)]
enum Step {
    Create { delay_ms: u64, scheduling: Scheduling },
    BeginPayment(usize),
    CommitPayments,
    Extend { order: usize, delay_ms: u64 },
    Pass { ms: u64 },
    Turn { worker: usize },
    Progress { worker: usize, errand: usize },
    LoseAnswer { worker: usize, errand: usize },
    Deadlock { worker: usize, errand: usize },
    Refuse { order: usize, refuses: bool },
    Crash { worker: usize },
    Stop { worker: usize },
    Start { worker: usize },
    LoseSession { worker: usize },
    Duplicate(usize),
    Skew { ms: i64 },
    SetClock { ms: i64 },
    DatabaseAway(bool),
    BrokerAway(bool),
    BrokerRefuses(bool),
    Relay,
    MarkRelayed { crashed: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let scheduling = prop_oneof![
        4 => Just(Scheduling::Published),
        3 => Just(Scheduling::InTransaction),
        1 => Just(Scheduling::Forgotten),
    ];
    prop_oneof![
        4 => (0..25_000_u64, scheduling).prop_map(|(delay_ms, scheduling)| Step::Create { delay_ms, scheduling }),
        2 => any::<usize>().prop_map(Step::BeginPayment),
        2 => Just(Step::CommitPayments),
        2 => (any::<usize>(), 0..15_000_u64).prop_map(|(order, delay_ms)| Step::Extend { order, delay_ms }),
        6 => prop_oneof![4 => 1..4_000_u64, 1 => 4_000..15_000_u64].prop_map(|ms| Step::Pass { ms }),
        12 => worker().prop_map(|worker| Step::Turn { worker }),
        14 => (worker(), any::<usize>()).prop_map(|(worker, errand)| Step::Progress { worker, errand }),
        1 => (worker(), any::<usize>()).prop_map(|(worker, errand)| Step::LoseAnswer { worker, errand }),
        1 => (worker(), any::<usize>()).prop_map(|(worker, errand)| Step::Deadlock { worker, errand }),
        1 => (any::<usize>(), any::<bool>()).prop_map(|(order, refuses)| Step::Refuse { order, refuses }),
        1 => worker().prop_map(|worker| Step::Crash { worker }),
        1 => worker().prop_map(|worker| Step::Stop { worker }),
        3 => worker().prop_map(|worker| Step::Start { worker }),
        1 => worker().prop_map(|worker| Step::LoseSession { worker }),
        2 => any::<usize>().prop_map(Step::Duplicate),
        1 => (-MOST_SKEW_MS..=MOST_SKEW_MS).prop_map(|ms| Step::Skew { ms }),
        1 => (-MOST_CLOCK_SET_MS..=MOST_CLOCK_SET_MS).prop_map(|ms| Step::SetClock { ms }),
        1 => any::<bool>().prop_map(Step::DatabaseAway),
        1 => any::<bool>().prop_map(Step::BrokerAway),
        1 => any::<bool>().prop_map(Step::BrokerRefuses),
        2 => Just(Step::Relay),
        2 => any::<bool>().prop_map(|crashed| Step::MarkRelayed { crashed }),
    ]
}

fn worker() -> impl Strategy<Value = usize> {
    0..WORKERS
}

fn take(world: &mut World, step: &Step) {
    match step {
        Step::Create { delay_ms, scheduling } => world.create(Duration::from_millis(*delay_ms), *scheduling),
        Step::BeginPayment(order) => world.begin_payment(*order),
        Step::CommitPayments => world.commit_payments(),
        Step::Extend { order, delay_ms } => world.extend(*order, Duration::from_millis(*delay_ms)),
        Step::Pass { ms } => world.advance(Duration::from_millis(*ms)),
        Step::Turn { worker } => world.turn(*worker),
        Step::Progress { worker, errand } => world.progress(*worker, *errand, Fate::Done),
        Step::LoseAnswer { worker, errand } => world.progress(*worker, *errand, Fate::AnswerIsLost),
        Step::Deadlock { worker, errand } => world.progress(*worker, *errand, Fate::Transient),
        Step::Refuse { order, refuses } => world.refuse(*order, *refuses),
        Step::Crash { worker } => world.crash(*worker),
        Step::Stop { worker } => world.stop(*worker),
        Step::Start { worker } => world.start(*worker),
        Step::LoseSession { worker } => world.lose_session(*worker),
        Step::Duplicate(message) => world.duplicate(*message),
        Step::Skew { ms } => world.skew_ms = *ms,
        Step::SetClock { ms } => world.set_clock(*ms),
        Step::DatabaseAway(away) => world.database_is_away = *away,
        Step::BrokerAway(away) => world.set_broker_away(*away),
        Step::BrokerRefuses(refuses) => world.broker_refuses = *refuses,
        Step::Relay => world.relay(),
        Step::MarkRelayed { crashed } => world.mark_relayed(*crashed),
    }
}

/// What must hold after every step.
fn check(world: &World) -> Result<(), String> {
    let spoken_for = world.spoken_for();
    for (order_id, row) in &world.rows {
        let paid = row.status == Status::Paid;
        if paid && row.closes > 0 {
            return Err(format!("{order_id} is paid and was closed"));
        }
        if row.closes > 1 {
            return Err(format!("{order_id} was closed {} times", row.closes));
        }
        if row.closed_early {
            return Err(format!("{order_id} was closed early"));
        }
        if row.stock_returned != row.closes || row.events != row.closes {
            return Err(format!(
                "{order_id}: stock returned {} times, {} events, {} closes",
                row.stock_returned, row.events, row.closes
            ));
        }
        if row.has_alarm && row.status == Status::Unpaid && !spoken_for.contains(&order_id) {
            return Err(format!("{order_id} has lost its alarm"));
        }
    }
    let most_blocked = Duration::from_millis(2 * MOST_SKEW_MS.unsigned_abs());
    if world.worst_blocked > most_blocked {
        return Err(format!("a slot kept an alarm for {:?} behind another", world.worst_blocked));
    }
    Ok(())
}

/// Every fault ends; then every order that was not paid must close, and the worker must be at work again.
fn settle(world: &mut World) -> Result<(), String> {
    (world.database_is_away, world.broker_refuses) = (false, false);
    world.set_broker_away(false);
    world.skew_ms = 0;
    world.rows.values_mut().for_each(|row| row.refuses = false);
    world.commit_payments();
    world.relay();
    world.mark_relayed(false);
    let coarse_steps = LONGEST_SETTLING.as_millis() / COARSE_STEP.as_millis();
    for step in 0..FINE_STEPS + coarse_steps {
        world.advance(if step < FINE_STEPS { FINE_STEP } else { COARSE_STEP });
        for worker in 0..WORKERS {
            world.start(worker);
            for _ in 0..4 {
                world.turn(worker);
                (0..8).for_each(|errand| world.progress(worker, errand, Fate::Done));
            }
        }
        check(world)?;
        if world.rows.values().all(|row| row.status != Status::Unpaid) && world.all_are_consuming() {
            return Ok(());
        }
    }
    let open: Vec<_> = world.rows.iter().filter(|(_, row)| row.status == Status::Unpaid).collect();
    Err(format!("never closed, or never consuming again: {open:?}"))
}

fn play(mutant: Mutant, steps: &[Step]) -> Result<(), String> {
    let mut world = World::new(mutant);
    world.start(0);
    for step in steps {
        take(&mut world, step);
        check(&world)?;
    }
    settle(&mut world)
}

/// Plays histories until one is against the rules; returns why, with the shortest that shows it.
fn violation(mutant: Mutant, histories: u32, counts: &std::cell::RefCell<Counts>) -> Option<String> {
    let config = Config { cases: histories, failure_persistence: None, max_shrink_iters: 2_000, ..Config::default() };
    let mut runner = TestRunner::new(config);
    let steps = proptest::collection::vec(step(), FEWEST_STEPS..=MOST_STEPS);
    let played = runner.run(&steps, |steps| {
        counts.borrow_mut().add(&steps);
        play(mutant, &steps).map_err(TestCaseError::fail)
    });
    match played {
        Ok(()) => None,
        Err(TestError::Fail(why, steps)) => Some(format!("{why}; {steps:?}")),
        Err(aborted) => panic!("{aborted}"),
    }
}

/// In how many histories each kind of step occurred.
#[derive(Default)]
struct Counts {
    histories: u64,
    steps: u64,
    by_kind: BTreeMap<String, u64>,
}

impl Counts {
    fn add(&mut self, steps: &[Step]) {
        self.histories += 1;
        self.steps += steps.len() as u64;
        let kind = |step: &Step| format!("{step:?}").split([' ', '(']).next().unwrap_or_default().to_owned();
        let kinds: std::collections::BTreeSet<String> = steps.iter().map(kind).collect();
        for kind in kinds {
            *self.by_kind.entry(kind).or_default() += 1;
        }
    }
}

#[test]
fn no_interleaving_loses_doubles_or_closes_what_is_paid() {
    let histories = std::env::var("SIMULATED_HISTORIES").ok().map_or(HISTORIES, |text| text.parse().expect("a number"));
    let counts = std::cell::RefCell::default();
    if let Some(why) = violation(Mutant::Sound, histories, &counts) {
        panic!("{why}");
    }
    let counts = counts.into_inner();
    println!("{} histories, {} steps; histories with", counts.histories, counts.steps);
    for (kind, seen_in) in &counts.by_kind {
        println!("  {kind:<15} {seen_in}");
        assert!(seen_in * 20 >= counts.histories, "{kind} in less than 5 % of the histories");
    }
    assert_eq!(counts.by_kind.len(), 22, "every kind of step");
}

fn must_be_found(mutant: Mutant) {
    let found = violation(mutant, 100_000, &std::cell::RefCell::default());
    println!("{mutant:?}: {}", found.unwrap_or_else(|| panic!("{mutant:?} was not found")));
}

#[test]
fn an_ack_before_the_commit_is_found() {
    must_be_found(Mutant::AckBeforeCommit);
}

#[test]
fn an_update_without_a_status_guard_is_found() {
    must_be_found(Mutant::NoStatusGuard);
}

#[test]
fn a_sweep_that_ignores_a_payment_in_flight_is_found() {
    must_be_found(Mutant::SweepIgnoresPayment);
}

#[test]
fn stock_returned_per_delivery_is_found() {
    must_be_found(Mutant::StockPerDelivery);
}

#[test]
fn a_re_arm_lost_between_ack_and_publish_is_found() {
    must_be_found(Mutant::AckBeforeConfirm);
}

#[test]
fn two_laps_in_one_slot_are_found() {
    must_be_found(Mutant::TwoLapsInOneSlot);
}
