//! The wheel by example, then for every accepted configuration: no alarm comes late, no retry comes early, none loops,
//! and no slot keeps an alarm behind another, whatever was away for however long.
//!
//! Pure: a broker's slots and a worker are modelled as queues; time is a number. Publishers do not occur, because the
//! wheel does not depend on their clocks.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestCaseError;

use super::*;
use crate::alarm::{Delivered, DeliveredAlarm, Receipt, Returns, SourceQueue, Wanted};
use crate::delay::testing::{
    DELAYS_MS, ROUNDING, Setup, check_alarm_arrives, check_retry_wait, index_of, longest_followed, max_hops, placed,
};
use crate::delay::{DelaySettings, RingSettings};
use crate::engine::{Action, Engine, Input, LONGEST_RETRY_FACTOR, Policy};
use crate::message::Alarm;
use crate::order::{CloseError, OrderId};

type Checked = Result<(), TestCaseError>;

fn ring(name: &str, unit_s: u64, slots: u16, early_s: u64) -> Ring {
    Ring { name: name.into(), unit: Duration::from_secs(unit_s), slots, early: Duration::from_secs(early_s) }
}

fn wheel() -> Wheel {
    Wheel::new(vec![ring("5s", 5, 20, 5), ring("1m", 60, 90, 10), ring("1h", 3_600, 36, 300)]).unwrap()
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_unix_micros(seconds * 1_000_000)
}

fn shifted(moment: Timestamp, micros: i64) -> Timestamp {
    Timestamp::from_unix_micros(moment.unix_micros().saturating_add(micros))
}

#[test]
fn rings_that_could_loop_are_rejected() {
    // 16 units of 5 s reach 80 s; a 1 m slot hands over up to 70 s ahead; a 2 m slot up to 130 s.
    assert!(Wheel::new(vec![ring("5s", 5, 20, 5), ring("1m", 60, 90, 10)]).is_ok());
    let gap = Wheel::new(vec![ring("5s", 5, 20, 5), ring("2m", 120, 90, 10)]).unwrap_err();
    assert!(gap.to_string().contains("give ring 5s more slots"), "{gap}");
    let none = Wheel::new(vec![]).unwrap_err();
    assert!(none.to_string().contains("delay.rings is empty"), "{none}");
}

#[test]
fn slot_is_released_its_margin_early() {
    let (ring, ttl) = ("5s".to_owned(), Duration::from_secs(1_030 - 5 - 1_000));
    assert_eq!(wheel().place(at(1_033), at(1_000)), Placement::Slot { ring, slot: 206 % 20, ttl });
}

#[test]
fn due_soon_goes_straight_to_processing() {
    assert_eq!(wheel().place(at(1_003), at(1_000)), Placement::Due);
    assert_eq!(wheel().place(at(900), at(1_000)), Placement::Due);
}

#[test]
fn retry_takes_first_slot_after_its_time() {
    let in_slot = |wake_at| match wheel().place_retry(wake_at, at(1_000)) {
        Placement::Slot { ring, ttl, .. } => (index_of(&wheel(), &ring), ttl),
        other => panic!("it comes back at once: {other:?}"),
    };
    // The finest slots are released at 1 000 s, 1 005 s and so on, those of a minute ten seconds before the minute.
    assert_eq!(in_slot(shifted(at(1_000), 1)), (0, Duration::from_secs(5)));
    assert_eq!(in_slot(at(1_005)), (0, Duration::from_secs(5)));
    assert_eq!(in_slot(shifted(at(1_005), 1)), (0, Duration::from_secs(10)));
    assert_eq!(in_slot(at(1_080)), (0, Duration::from_secs(80)));
    assert_eq!(in_slot(shifted(at(1_080), 1)), (1, Duration::from_secs(1_130 - 1_000)));
    assert_eq!(wheel().place_retry(at(1_000), at(1_000)), Placement::Due, "its time has come");
}

#[test]
fn long_lead_leaves_retries_their_wait() {
    for (lead_s, finest) in [(90, ring("5s", 5, 20, 90)), (10, ring("1s", 1, 12, 10))] {
        let unit = finest.unit;
        let wheel = Wheel::new(vec![finest]).unwrap();
        let Placement::Slot { ttl, .. } = wheel.place_retry(at(1_002), at(1_000)) else { panic!("lead {lead_s}") };
        assert!((Duration::from_secs(2)..Duration::from_secs(2) + unit).contains(&ttl), "lead {lead_s}: {ttl:?}");
        let far = wheel.place(at(5_000), at(1_000));
        assert!(matches!(far, Placement::Slot { .. }), "lead {lead_s}: distant alarms loop");
    }
}

#[test]
fn engine_asks_for_no_excessive_wait() {
    let policy = Policy { max_attempts: u32::MAX, sweep_page: 1, ..crate::engine::tests::policy() };
    let mut longest = Duration::ZERO;
    for attempt in 0..40 {
        let mut engine = Engine::new(policy.clone());
        let alarm = Alarm::new(OrderId::new("order-1").unwrap(), at(1_000));
        let alarm =
            DeliveredAlarm { alarm, attempt, first_published_at: None, traceparent: None, returns: Returns::default() };
        let receipt = Receipt { session: 1, channel: 0, tag: 1 };
        engine.handle(
            Input::Delivered(Delivered { receipt, source: SourceQueue::Timeout, content: Ok(alarm), death: None }),
            at(1_000),
        );
        for now in (0..1_000).map(|tenths| at(1_000) + tenths * Duration::from_millis(100)) {
            let mut actions = VecDeque::from(engine.poll_actions(now));
            while let Some(action) = actions.pop_front() {
                if let Action::Rearm(rearms) = &action {
                    let Wanted::NotBefore(moment) = rearms[0].wanted else { panic!("{rearms:?}") };
                    longest = longest.max(moment.since(now));
                } else if let Action::Close(batch) = action {
                    engine.handle(Input::Closed(batch, Err(CloseError::Rejected("a trigger says no".into()))), now);
                    actions.extend(engine.poll_actions(now));
                }
            }
        }
    }
    assert_eq!(longest, policy.retry_longest * LONGEST_RETRY_FACTOR);
}

// ------------------------------------------------------------------------------------------------ accepted settings

/// A ring as it is drawn: its unit in thousandths of the finer ring's reach, its slots, and its margin in thousandths
/// of what that leaves.
type DrawnRing = (u64, u16, u64);

/// Configurations that are accepted, including a lead longer than the finest ring, with `hold_max` from the shortest
/// that is allowed with them. What is drawn is close to what is accepted, on both sides.
fn accepted() -> impl Strategy<Value = Setup> {
    let unit_ms = prop_oneof![Just(100_u64), 100..2_000_u64, 1_000..60_000_u64, Just(5_000_u64)];
    let lead_ms = prop_oneof![Just(0_u64), 0..2_000_u64, 0..20_000_u64, 0..=600_000_u64];
    let slots = prop_oneof![Just(6_u16), 6..14_u16, 6..120_u16, 6..=1_000_u16];
    let coarser = proptest::collection::vec((1..1_020_u64, slots.clone(), 0..1_020_u64), 0..4);
    let longest_ms = prop_oneof![Just(1_000_u64), 1..2_000_u64, 1..=60_000_u64];
    (unit_ms, lead_ms, slots, coarser, prop_oneof![Just(0_u64), 0..600_000_u64], longest_ms).prop_filter_map(
        "rejected settings",
        |(unit_ms, lead_ms, slots, coarser, hold_more_ms, longest_ms)| {
            let delay = drawn(unit_ms, lead_ms, slots, &coarser);
            let hold_max = Duration::from_millis(lead_ms + unit_ms + 2_000 + hold_more_ms);
            let longest_retry = Duration::from_millis(longest_ms) * LONGEST_RETRY_FACTOR;
            let accepted = delay.validate().and_then(|()| delay.validate_hold(hold_max));
            let accepted = accepted.and_then(|()| delay.validate_longest_retry(longest_retry));
            accepted.is_ok().then_some(Setup { delay, hold_max, longest_retry })
        },
    )
}

fn drawn(unit_ms: u64, lead_ms: u64, slots: u16, coarser: &[DrawnRing]) -> DelaySettings {
    let mut rings = vec![RingSettings { unit: Duration::from_millis(unit_ms), slots, early: None }];
    for (unit_in_1000, slots, early_in_1000) in coarser {
        let finer = rings.last().expect("one at least");
        let reach_ms = u64::try_from(finer.unit.as_millis()).unwrap() * (u64::from(finer.slots) * 5 / 6);
        let unit_ms = reach_ms * unit_in_1000 / 1_000;
        let early_ms = reach_ms.saturating_sub(unit_ms) * early_in_1000 / 1_000;
        let [unit, early] = [unit_ms, early_ms].map(Duration::from_millis);
        rings.push(RingSettings { unit, slots: *slots, early: Some(early) });
    }
    DelaySettings {
        strategy: crate::delay::Strategy::DeadLetter,
        lanes: Vec::new(),
        lane_shards: 1,
        lead: Duration::from_millis(lead_ms),
        max_delay: Duration::from_secs(730 * 86_400),
        rings,
    }
}

/// A length of time that matters to a wheel.
#[derive(Debug, Clone)]
enum Span {
    Millis(u64),
    /// This many units of one of its rings, and a little more or less.
    Units {
        ring: Index,
        units: u32,
        more_us: i64,
    },
    /// One of its rings' reach (or the whole ring), and a little more or less.
    Round {
        ring: Index,
        whole: bool,
        more_us: i64,
    },
}

fn span() -> impl Strategy<Value = Span> {
    let more_us = || prop_oneof![Just(0_i64), -2..=2_i64, -1_500..=1_500_i64, -2_000_000..=2_000_000_i64];
    prop_oneof![
        2 => proptest::sample::select(DELAYS_MS.to_vec()).prop_map(Span::Millis),
        2 => prop_oneof![0..1_000_u64, 0..100_000_u64, 0..100_000_000_u64].prop_map(Span::Millis),
        2 => (any::<Index>(), 0..40_u32, more_us()).prop_map(|(ring, units, more_us)| Span::Units { ring, units, more_us }),
        2 => (any::<Index>(), any::<bool>(), more_us()).prop_map(|(ring, whole, more_us)| Span::Round { ring, whole, more_us }),
    ]
}

impl Span {
    fn of(&self, wheel: &Wheel) -> Duration {
        let (length, more_us) = match self {
            Self::Millis(ms) => (Duration::from_millis(*ms), 0),
            Self::Units { ring, units, more_us } => (ring.get(wheel.rings()).unit * *units, *more_us),
            Self::Round { ring, whole: true, more_us } => (ring.get(wheel.rings()).span(), *more_us),
            Self::Round { ring, whole: false, more_us } => (ring.get(wheel.rings()).reach(), *more_us),
        };
        let epoch = Timestamp::from_unix_micros(0);
        shifted(epoch + length, more_us).since(epoch).min(longest_followed(wheel))
    }
}

/// Any time, and often one at which a slot's unit begins or at which a slot is released.
fn time() -> impl Strategy<Value = (i64, Option<(Index, bool, i64)>)> {
    (0..4_000_000_000_000_000_i64, proptest::option::of((any::<Index>(), any::<bool>(), -2..=2_i64)))
}

fn moment((any_us, boundary): (i64, Option<(Index, bool, i64)>), wheel: &Wheel) -> Timestamp {
    let Some((ring, is_released, more_us)) = boundary else { return Timestamp::from_unix_micros(any_us) };
    let ring = ring.get(wheel.rings());
    let begins = Timestamp::from_unix_micros(any_us - any_us.rem_euclid(ring.unit_micros()));
    shifted(if is_released { begins - ring.early } else { begins }, more_us)
}

// ------------------------------------------------------------------------------------------- one alarm, by itself

fn lateness() -> impl Strategy<Value = Vec<Duration>> {
    // As the broker releases them, and as after a worker was stopped for long.
    let late_ms = prop_oneof![4 => Just(0_u64), 4 => 0..900_u64, 1 => 0..100_000_u64, 1 => 0..100_000_000_u64];
    proptest::collection::vec(late_ms.prop_map(Duration::from_millis), 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_048))]

    #[test]
    fn alarm_arrives_before_due_without_looping(
        setup in accepted(), time in time(), ahead in span(), late in lateness(),
    ) {
        let wheel = setup.delay.wheel().unwrap();
        let now = moment(time, &wheel);
        check_alarm_arrives(&setup, now + ahead.of(&wheel), now, &late).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn retry_returns_on_time(
        setup in accepted(), time in time(), wait in span(), doublings in 0..7_u32, exactly in any::<bool>(),
    ) {
        let wheel = setup.delay.wheel().unwrap();
        let longest = setup.longest_retry / LONGEST_RETRY_FACTOR;
        let wait = if exactly { longest * 2_u32.pow(doublings) } else { wait.of(&wheel) };
        check_retry_wait(&setup, wait, moment(time, &wheel)).map_err(TestCaseError::fail)?;
    }
}

// --------------------------------------------------------------------------------------------- many, and outages

/// What happens to a broker and a worker, and what is asked of them.
#[derive(Debug, Clone)]
enum Step {
    Arm {
        ahead: Span,
        times: u8,
    },
    Retry {
        wait: Span,
    },
    Pass(Span),
    /// Nothing is released and nothing written for this long.
    BrokerDown(Span),
    /// Released messages are not read for this long.
    WorkerStopped(Span),
    /// The slot of the next message to be released keeps its messages for this long (its target refuses them).
    SlotBlocked(Span),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (span(), 1..4_u8).prop_map(|(ahead, times)| Step::Arm { ahead, times }),
        3 => span().prop_map(|wait| Step::Retry { wait }),
        6 => span().prop_map(Step::Pass),
        1 => span().prop_map(Step::BrokerDown),
        1 => span().prop_map(Step::WorkerStopped),
        2 => span().prop_map(Step::SlotBlocked),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Target {
    By(Timestamp),
    NotBefore(Timestamp),
}

/// An alarm, and in how many slots it may still wait.
#[derive(Debug, Clone, Copy)]
struct TrackedAlarm {
    target: Target,
    hops_left: u128,
    /// Since when nothing but its own wait has kept it.
    delayed_until: Timestamp,
}

#[derive(Debug, Clone, Copy)]
struct Waiting {
    alarm: TrackedAlarm,
    release_at: Timestamp,
}

type SlotKey = (usize, u16);

struct Model<'a> {
    setup: &'a Setup,
    wheel: Wheel,
    now: Timestamp,
    slots: BTreeMap<SlotKey, VecDeque<Waiting>>,
    /// Slots that release nothing before then.
    blocked_until: BTreeMap<SlotKey, Timestamp>,
    /// Released alarms that wait for a worker, with where they come from.
    released: Vec<(SlotKey, TrackedAlarm)>,
}

impl Model<'_> {
    fn write(&mut self, alarm: TrackedAlarm) -> Checked {
        let place = match alarm.target {
            Target::By(due) => placed(self.setup, &self.wheel, due, self.now).map_err(TestCaseError::fail)?,
            Target::NotBefore(moment) => self.wheel.place_retry(moment, self.now),
        };
        let Placement::Slot { ring, slot, ttl } = place else { return self.arrive(alarm, ROUNDING) };
        let ring = index_of(&self.wheel, &ring);
        prop_assert!(alarm.hops_left > 0, "it loops: {alarm:?}");
        let release_at = self.now + ttl;
        let shape = &self.wheel.rings()[ring];
        let queue = self.slots.entry((ring, slot)).or_default();
        if let Some(last) = queue.back() {
            prop_assert!(
                last.release_at <= release_at + ROUNDING,
                "{:?} behind a later one",
                last.release_at.since(release_at)
            );
            let same_lap = release_at <= last.release_at + ROUNDING;
            // Otherwise it is a leftover: its time was a sixth of the ring ago.
            let sixth = shape.span() - shape.reach();
            prop_assert!(same_lap || last.release_at + sixth <= self.now + ROUNDING, "two laps in one slot");
        }
        let alarm = TrackedAlarm { hops_left: alarm.hops_left - 1, ..alarm };
        queue.push_back(Waiting { alarm, release_at });
        Ok(())
    }

    /// It has arrived at the worker, which holds it or tries again; at most this much after its time.
    fn arrive(&self, alarm: TrackedAlarm, late: Duration) -> Checked {
        match alarm.target {
            Target::By(due) => {
                let by = (due - self.setup.delay.lead).max(alarm.delayed_until) + ROUNDING;
                prop_assert!(self.now <= by, "{:?} too late", self.now.since(by));
                prop_assert!(due.since(self.now) <= self.setup.hold_max, "it goes back");
            }
            Target::NotBefore(moment) => {
                prop_assert!(self.now >= moment, "{:?} early", moment.since(self.now));
                let by = (moment + late).max(alarm.delayed_until) + ROUNDING;
                prop_assert!(self.now <= by, "{:?} too late", self.now.since(by));
            }
        }
        Ok(())
    }

    /// When a slot releases its head.
    fn release_time(&self, key: SlotKey, head: &Waiting) -> Timestamp {
        self.blocked_until.get(&key).map_or(head.release_at, |until| head.release_at.max(*until))
    }

    fn next_release(&self) -> Option<(Timestamp, SlotKey)> {
        let heads = self.slots.iter().filter_map(|(key, slot)| Some((*key, slot.front()?)));
        heads.map(|(key, head)| (self.release_time(key, head), key)).min()
    }

    /// Slots release messages until then; a worker, if there is one, handles them at once.
    fn pass_until(&mut self, end: Timestamp, worker_runs: bool) -> Checked {
        while let Some((at, key)) = self.next_release().filter(|(at, _)| *at <= end) {
            self.now = self.now.max(at);
            let blocked_until = self.blocked_until.get(&key).copied();
            let mut waiting = self.slots.get_mut(&key).and_then(VecDeque::pop_front).expect("it has a head");
            let kept_until = blocked_until.filter(|until| *until > waiting.release_at);
            // Whatever is in front of it, it leaves at its own time, or when its slot releases again.
            let leaves_by = kept_until.unwrap_or(waiting.release_at).max(waiting.alarm.delayed_until) + ROUNDING;
            prop_assert!(self.now <= leaves_by, "kept {:?} by another", self.now.since(leaves_by));
            if let Some(until) = kept_until {
                waiting.alarm.delayed_until = waiting.alarm.delayed_until.max(until);
            }
            self.released.push((key, waiting.alarm));
            if worker_runs {
                self.handle_released()?;
            }
        }
        self.now = self.now.max(end);
        Ok(())
    }

    fn handle_released(&mut self) -> Checked {
        for ((ring, _), alarm) in std::mem::take(&mut self.released) {
            match alarm.target {
                // The inbox sends a retry on, because it is overdue; from the processing queue the worker tries it.
                Target::NotBefore(_) => self.arrive(alarm, self.wheel.rings()[ring].unit)?,
                Target::By(due) if ring == 0 && due.since(self.now) <= self.setup.hold_max => {
                    self.arrive(alarm, Duration::ZERO)?;
                }
                Target::By(_) => self.write(alarm)?,
            }
        }
        Ok(())
    }

    /// Every waiting alarm was kept by an outage that ends now.
    fn outage_ends_now(&mut self) {
        let waiting = self.slots.values_mut().flatten().map(|waiting| &mut waiting.alarm);
        for alarm in waiting.chain(self.released.iter_mut().map(|(_, alarm)| alarm)) {
            alarm.delayed_until = self.now;
        }
    }

    fn take(&mut self, step: &Step) -> Checked {
        match step {
            Step::Arm { ahead, times } => {
                let ahead = ahead.of(&self.wheel);
                let hops_left = max_hops(&self.wheel, ahead);
                let alarm = TrackedAlarm { target: Target::By(self.now + ahead), hops_left, delayed_until: self.now };
                (0..*times).try_for_each(|_| self.write(alarm))
            }
            Step::Retry { wait } => {
                let wait = wait.of(&self.wheel).min(self.setup.longest_retry);
                self.write(TrackedAlarm {
                    target: Target::NotBefore(self.now + wait),
                    hops_left: 1,
                    delayed_until: self.now,
                })
            }
            Step::Pass(time) => self.pass_until(self.now + time.of(&self.wheel), true),
            Step::BrokerDown(time) => {
                self.now = self.now + time.of(&self.wheel);
                self.outage_ends_now();
                Ok(())
            }
            Step::WorkerStopped(time) => {
                self.pass_until(self.now + time.of(&self.wheel), false)?;
                self.outage_ends_now();
                self.handle_released()
            }
            Step::SlotBlocked(time) => {
                if let Some((_, key)) = self.next_release() {
                    let until = self.now + time.of(&self.wheel);
                    self.blocked_until.entry(key).and_modify(|old| *old = until.max(*old)).or_insert(until);
                }
                Ok(())
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_024))]

    #[test]
    fn outages_neither_block_nor_loop_alarms(
        setup in accepted(), time in time(), steps in proptest::collection::vec(step(), 1..60),
    ) {
        let wheel = setup.delay.wheel().unwrap();
        let now = moment(time, &wheel);
        let mut model = Model {
            setup: &setup,
            wheel,
            now,
            slots: BTreeMap::new(),
            blocked_until: BTreeMap::new(),
            released: Vec::new(),
        };
        for step in &steps {
            model.take(step)?;
        }
        model.pass_until(Timestamp::from_unix_micros(i64::MAX), true)?;
        prop_assert!(model.slots.values().all(VecDeque::is_empty), "an alarm is left behind");
    }
}
