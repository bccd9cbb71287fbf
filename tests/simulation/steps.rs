//! What happens to a world, drawn at random: what shops, servers and clocks do, and how far each worker gets meanwhile.

use std::time::Duration;

use proptest::prelude::*;

use crate::oracle::{calm, calm_until, calm_with_missed};
use crate::world::{CustomerAct, Fault, PendingSort, Scheduling, WORKERS, World, closing_policy};

pub const MIN_STEPS: usize = 30;
pub const MAX_STEPS: usize = 100;
/// The most that two clocks differ here, and so the longest that a slot may keep one message behind another.
pub const MAX_SKEW_MS: i64 = 400;
/// After so long in undisturbed time nothing of the faults before it is left.
const RECOVERED_MS: u64 = 2_600;
/// So many orders whose alarms are missing show that alarms do not arrive (`engine/arrivals.rs`).
pub const MISSED_TOGETHER: usize = 15;
/// By then every session is older than an alarm is held.
const MISSED_IN_MS: u64 = 6_500;
/// How far the database's clock is set.
const MAX_CLOCK_SET_MS: i64 = 600_000;

#[derive(Debug, Clone)]
pub enum Step {
    Create {
        delay_ms: u64,
        scheduling: Scheduling,
        times: u8,
    },
    BeginPayment(usize),
    CommitPayments,
    RollBackPayments,
    MoveDeadline {
        order: usize,
        delay_ms: u64,
    },
    Pass {
        ms: u64,
    },
    Calm {
        ms: u64,
    },
    CalmUntil {
        sort: PendingSort,
        ms: u64,
    },
    /// Orders without an alarm fall due, some seconds apart, and nothing disturbs that.
    MissAlarms {
        apart_ms: u64,
    },
    /// Many orders without alarms fall due at the same moment, and nothing disturbs that.
    MissAlarmsTogether,
    Turn {
        worker: usize,
    },
    Progress {
        worker: usize,
        action: usize,
    },
    LoseResult {
        action: usize,
    },
    Deadlock {
        action: usize,
    },
    Refuse {
        order: usize,
        refuses: bool,
    },
    Crash {
        worker: usize,
    },
    Stop {
        worker: usize,
    },
    Start {
        worker: usize,
    },
    LoseSession {
        worker: usize,
    },
    Duplicate(usize),
    Skew {
        ms: i64,
    },
    SetClock {
        ms: i64,
    },
    PauseClosing,
    ResumeClosing,
    DatabaseAway(bool),
    BrokerAway(bool),
    BrokerRefuses(bool),
    BrokerSilent(bool),
    Relay,
    RelayAndCrash,
    MarkRelayed {
        crashed: bool,
    },
    BeginAttempt {
        order: usize,
        is_confirmed: bool,
    },
    CustomerActs {
        attempt: usize,
        prefers_closing: bool,
        act: CustomerAct,
    },
    ProviderAway(bool),
    /// Undisturbed time until a worker is about to do this, and then what hits it.
    Disturb {
        sort: PendingSort,
        ms: u64,
        by: Disturbance,
    },
}

/// What happens while a worker is about to do something.
#[derive(Debug, Clone, Copy)]
pub enum Disturbance {
    CustomerActs(CustomerAct),
    /// The provider's callback pays the order.
    Callback,
    LoseResult(usize),
    Crash(usize),
    Stop(usize),
    /// It takes longer than the lease.
    OutlastLease,
}

/// Steps of a world in which a payment provider is asked; the others happen as well.
pub fn step_with_provider() -> impl Strategy<Value = Step> {
    let act = || {
        prop_oneof![
            2 => Just(CustomerAct::Confirm),
            4 => Just(CustomerAct::BeginToPay),
            1 => Just(CustomerAct::GiveUp),
            5 => Just(CustomerAct::Pay),
            2 => Just(CustomerAct::PayOtherAmount),
            2 => Just(CustomerAct::GetRefund),
        ]
    };
    let sort = prop_oneof![
        1 => Just(PendingSort::Ask),
        2 => Just(PendingSort::Cancel),
        1 => Just(PendingSort::CloseClaimed),
        2 => Just(PendingSort::SettlePaid),
    ];
    let disturbance = prop_oneof![
        3 => act().prop_map(Disturbance::CustomerActs),
        3 => Just(Disturbance::CustomerActs(CustomerAct::Pay)),
        6 => Just(Disturbance::Callback),
        4 => any::<usize>().prop_map(Disturbance::LoseResult),
        2 => worker().prop_map(Disturbance::Crash),
        2 => worker().prop_map(Disturbance::Stop),
        2 => Just(Disturbance::OutlastLease),
    ];
    prop_oneof![
        20 => step(),
        12 => (0..6_000_u64, 1..=3_u8).prop_map(|(delay_ms, times)| {
            Step::Create { delay_ms, scheduling: Scheduling::Published, times }
        }),
        24 => (any::<usize>(), proptest::bool::weighted(0.9))
            .prop_map(|(order, is_confirmed)| Step::BeginAttempt { order, is_confirmed }),
        12 => (any::<usize>(), any::<bool>(), act())
            .prop_map(|(attempt, prefers_closing, act)| Step::CustomerActs { attempt, prefers_closing, act }),
        24 => (1_000..8_000_u64, sort, disturbance).prop_map(|(ms, sort, by)| Step::Disturb { sort, ms, by }),
        2 => proptest::bool::weighted(0.3).prop_map(Step::ProviderAway),
        3 => any::<usize>().prop_map(|action| Step::LoseResult { action }),
        6 => worker().prop_map(|worker| Step::Start { worker }),
    ]
}

pub fn step() -> impl Strategy<Value = Step> {
    let scheduling = prop_oneof![
        5 => Just(Scheduling::Published),
        3 => Just(Scheduling::InTransaction),
        1 => Just(Scheduling::Forgotten),
        1 => Just(Scheduling::WithoutAnOrder),
    ];
    let delay_ms = || prop_oneof![2 => 0..4_000_u64, 3 => 0..25_000_u64];
    let times = prop_oneof![4 => Just(1_u8), 1 => 2..=6_u8];
    prop_oneof![
        16 => (delay_ms(), scheduling, times)
            .prop_map(|(delay_ms, scheduling, times)| Step::Create { delay_ms, scheduling, times }),
        9 => any::<usize>().prop_map(Step::BeginPayment),
        6 => Just(Step::CommitPayments),
        2 => Just(Step::RollBackPayments),
        11 => (any::<usize>(), 0..15_000_u64).prop_map(|(order, delay_ms)| Step::MoveDeadline { order, delay_ms }),
        6 => prop_oneof![4 => 1..4_000_u64, 1 => 4_000..15_000_u64].prop_map(|ms| Step::Pass { ms }),
        12 => (100..10_000_u64).prop_map(|ms| Step::Calm { ms }),
        12 => (100..10_000_u64).prop_map(|ms| Step::CalmUntil { sort: PendingSort::Close, ms }),
        10 => worker().prop_map(|worker| Step::Turn { worker }),
        12 => (worker(), any::<usize>()).prop_map(|(worker, action)| Step::Progress { worker, action }),
        13 => any::<usize>().prop_map(|action| Step::LoseResult { action }),
        5 => any::<usize>().prop_map(|action| Step::Deadlock { action }),
        15 => (any::<usize>(), any::<bool>()).prop_map(|(order, refuses)| Step::Refuse { order, refuses }),
        3 => worker().prop_map(|worker| Step::Crash { worker }),
        6 => worker().prop_map(|worker| Step::Stop { worker }),
        8 => worker().prop_map(|worker| Step::Start { worker }),
        9 => worker().prop_map(|worker| Step::LoseSession { worker }),
        4 => any::<usize>().prop_map(Step::Duplicate),
        1 => (-MAX_SKEW_MS..=MAX_SKEW_MS).prop_map(|ms| Step::Skew { ms }),
        1 => (-MAX_CLOCK_SET_MS..=MAX_CLOCK_SET_MS).prop_map(|ms| Step::SetClock { ms }),
        2 => Just(Step::PauseClosing),
        8 => Just(Step::ResumeClosing),
        4 => proptest::bool::weighted(0.4).prop_map(Step::DatabaseAway),
        4 => proptest::bool::weighted(0.4).prop_map(Step::BrokerAway),
        3 => proptest::bool::weighted(0.4).prop_map(Step::BrokerRefuses),
        3 => proptest::bool::weighted(0.4).prop_map(Step::BrokerSilent),
        2 => (1_500..4_000_u64).prop_map(|apart_ms| Step::MissAlarms { apart_ms }),
        2 => Just(Step::MissAlarmsTogether),
        4 => Just(Step::Relay),
        6 => Just(Step::RelayAndCrash),
        6 => proptest::bool::weighted(0.5).prop_map(|crashed| Step::MarkRelayed { crashed }),
    ]
}

fn worker() -> impl Strategy<Value = usize> {
    0..WORKERS
}

/// What the oracle finds, if the step is one that it watches.
pub fn take(world: &mut World, step: &Step) -> Result<(), String> {
    match step {
        Step::Create { delay_ms, scheduling, times } => {
            (0..*times).for_each(|_| world.create(Duration::from_millis(*delay_ms), *scheduling));
        }
        Step::BeginPayment(order) => world.begin_payment(*order),
        Step::CommitPayments => world.commit_payments(),
        Step::RollBackPayments => world.roll_back_payments(),
        Step::MoveDeadline { order, delay_ms } => world.move_deadline(*order, Duration::from_millis(*delay_ms)),
        Step::Pass { ms } => world.advance(Duration::from_millis(*ms)),
        Step::Calm { ms } => return calm(world, Duration::from_millis(*ms)),
        Step::MissAlarms { apart_ms } => {
            for delay_ms in [RECOVERED_MS, RECOVERED_MS + apart_ms] {
                world.create(Duration::from_millis(delay_ms), Scheduling::Forgotten);
            }
            return calm(world, Duration::from_millis(RECOVERED_MS + apart_ms + 1_000));
        }
        Step::MissAlarmsTogether => {
            (0..MISSED_TOGETHER).for_each(|_| world.create(Duration::from_millis(MISSED_IN_MS), Scheduling::Forgotten));
            return calm_with_missed(world, Duration::from_millis(MISSED_IN_MS));
        }
        Step::CalmUntil { sort, ms } => return calm_until(world, *sort, Duration::from_millis(*ms)),
        Step::Turn { worker } => world.turn(*worker),
        Step::Progress { worker, action } => world.progress(*worker, *action, Fault::None),
        Step::LoseResult { action } => world.progress_any(*action, Fault::ResultLost),
        Step::Deadlock { action } => world.progress_any(*action, Fault::Transient),
        Step::Refuse { order, refuses } => world.refuse(*order, *refuses),
        Step::Crash { worker } => world.crash(*worker),
        Step::Stop { worker } => world.stop(*worker),
        Step::Start { worker } => world.start(*worker),
        Step::LoseSession { worker } => world.lose_session(*worker),
        Step::Duplicate(message) => world.duplicate(*message),
        Step::Skew { ms } => world.skew(*ms),
        Step::SetClock { ms } => world.set_clock(*ms),
        Step::PauseClosing => world.pause_closing(),
        Step::ResumeClosing => world.resume_closing(),
        Step::DatabaseAway(away) => world.set_database_away(*away),
        Step::BrokerAway(away) => world.set_broker_away(*away),
        Step::BrokerRefuses(refuses) => world.set_broker_refuses(*refuses),
        Step::BrokerSilent(silent) => world.set_broker_silent(*silent),
        Step::Relay => world.relay(),
        Step::RelayAndCrash => {
            world.relay();
            world.mark_relayed(true);
        }
        Step::MarkRelayed { crashed } => world.mark_relayed(*crashed),
        Step::BeginAttempt { order, is_confirmed } => world.begin_attempt(*order, *is_confirmed),
        Step::CustomerActs { attempt, prefers_closing, act } => world.customer_acts(*attempt, *prefers_closing, *act),
        Step::ProviderAway(away) => world.set_provider_away(*away),
        Step::Disturb { sort, ms, by } => {
            calm_until(world, *sort, Duration::from_millis(*ms))?;
            disturb(world, *by);
        }
    }
    Ok(())
}

fn disturb(world: &mut World, by: Disturbance) {
    match by {
        Disturbance::CustomerActs(act) => world.customer_acts(0, true, act),
        Disturbance::Callback => {
            world.begin_payment(0);
            world.commit_payments();
        }
        Disturbance::LoseResult(action) => world.progress_any(action, Fault::ResultLost),
        Disturbance::Crash(worker) => world.crash(worker),
        Disturbance::Stop(worker) => world.stop(worker),
        Disturbance::OutlastLease => world.advance(closing_policy().lease),
    }
}
