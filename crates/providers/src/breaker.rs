//! The circuit breaker: after some failures in a row a provider is left alone for a while, then one call tests it.
//!
//! A payment that fails at every call says something of itself, and once something of its provider: its failures count
//! once, and it is not what the provider is tested with while another may be.
//!
//! Pure: no clock, no task. It is told the time and what became of each call it admitted.

use std::collections::HashSet;
use std::time::{Duration, Instant};

/// A pause that a provider asks for is kept, up to this long: a mistaken `Retry-After` must not stop it for a day.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
/// The first pause, so that some payments which fail side by side do not hold up the others for long. It doubles with each test
/// that fails.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// More payments that fail are not remembered: then each counts once more.
const MOST_FAILING: usize = 10_000;

/// When it opens, and for how long.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BreakerLimits {
    /// So many failures in a row open it, of as many payments; at least 1.
    pub(crate) failures_to_open: u32,
    /// The longest time that no call is admitted then.
    pub(crate) open_for: Duration,
}

/// A call that was admitted; [`Breaker::settle`] takes it back.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Admission {
    /// In which phase it was admitted: what an earlier phase's call finds out is no news.
    phase: u64,
    /// The payment that it is about.
    reference: String,
}

/// Why a call is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// For so long.
    Open(Duration),
    /// Another call is testing the provider, and ends within its own timeout.
    Testing,
}

/// What became of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallResult {
    /// The provider answered, whatever the answer was.
    Answered,
    /// The provider failed, and asks to be left alone for so long.
    Failed(Option<Duration>),
    /// The call ended without saying anything of the provider: it was dropped, or nothing was sent.
    NothingLearnt,
}

#[derive(Debug)]
enum State {
    /// Calls are admitted.
    Closed { failures: u32 },
    /// None is admitted until then; afterwards one, of a payment that has not failed for as long as the pause was.
    Open { until: Instant, pause: Duration },
    /// One call is testing the provider, after this pause.
    Testing { pause: Duration },
}

/// The breaker of one provider.
#[derive(Debug)]
pub(crate) struct Breaker {
    limits: BreakerLimits,
    state: State,
    phase: u64,
    /// The payments whose last call failed.
    failing: HashSet<String>,
}

impl Breaker {
    pub(crate) fn new(limits: BreakerLimits) -> Self {
        Self { limits, state: State::Closed { failures: 0 }, phase: 0, failing: HashSet::new() }
    }

    /// Admits a call about this payment, or says why not.
    pub(crate) fn admit(&mut self, reference: &str, now: Instant) -> Result<Admission, Refusal> {
        if let Some(refusal) = self.refuses(reference, now) {
            return Err(refusal);
        }
        if let State::Open { pause, .. } = self.state {
            self.enter(State::Testing { pause });
        }
        Ok(Admission { phase: self.phase, reference: reference.to_owned() })
    }

    /// Why [`admit`](Self::admit) would refuse, if it would.
    pub(crate) fn refuses(&self, reference: &str, now: Instant) -> Option<Refusal> {
        match self.state {
            State::Closed { .. } => None,
            State::Open { until, pause } => {
                let until = if self.failing.contains(reference) { until + pause } else { until };
                (now < until).then(|| Refusal::Open(until - now))
            }
            State::Testing { .. } => Some(Refusal::Testing),
        }
    }

    /// Whether it has opened, and no call has succeeded since.
    pub(crate) fn is_open(&self) -> bool {
        !matches!(self.state, State::Closed { .. })
    }

    /// Takes note of what became of an admitted call.
    pub(crate) fn settle(&mut self, admission: Admission, result: CallResult, now: Instant) {
        let is_first_failure = match result {
            CallResult::Answered => {
                self.failing.remove(&admission.reference);
                false
            }
            CallResult::Failed(_) => self.note_failing(admission.reference),
            CallResult::NothingLearnt => false,
        };
        if admission.phase != self.phase {
            return;
        }
        match (result, &mut self.state) {
            // No call is admitted in this phase.
            (_, State::Open { .. }) => {}
            (CallResult::Answered, State::Closed { failures }) => *failures = 0,
            (CallResult::Answered, State::Testing { .. }) => self.enter(State::Closed { failures: 0 }),
            (CallResult::Failed(Some(pause)), _) => self.open(now, pause.min(LONGEST_PAUSE)),
            // One failed test is enough.
            (CallResult::Failed(None), State::Testing { pause }) => {
                let pause = (*pause * 2).min(self.limits.open_for);
                self.open(now, pause);
            }
            (CallResult::Failed(None), State::Closed { failures }) => {
                *failures += u32::from(is_first_failure);
                if is_first_failure && *failures >= self.limits.failures_to_open {
                    self.open(now, FIRST_PAUSE.min(self.limits.open_for));
                }
            }
            (CallResult::NothingLearnt, State::Testing { pause }) => {
                let pause = *pause;
                self.enter(State::Open { until: now, pause });
            }
            (CallResult::NothingLearnt, State::Closed { .. }) => {}
        }
    }

    /// Whether this payment's call before did not fail.
    fn note_failing(&mut self, reference: String) -> bool {
        if self.failing.len() >= MOST_FAILING && !self.failing.contains(&reference) {
            self.failing.clear();
        }
        self.failing.insert(reference)
    }

    fn open(&mut self, now: Instant, pause: Duration) {
        self.enter(State::Open { until: now + pause, pause: pause.min(self.limits.open_for) });
    }

    fn enter(&mut self, state: State) {
        self.state = state;
        self.phase += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: BreakerLimits = BreakerLimits { failures_to_open: 3, open_for: Duration::from_secs(30) };

    fn settles(breaker: &mut Breaker, reference: &str, result: CallResult, now: Instant) {
        let admission = breaker.admit(reference, now).unwrap();
        breaker.settle(admission, result, now);
    }

    fn fails(breaker: &mut Breaker, reference: &str, now: Instant) {
        settles(breaker, reference, CallResult::Failed(None), now);
    }

    /// One that three payments have opened.
    fn opened(now: Instant) -> Breaker {
        let mut breaker = Breaker::new(LIMITS);
        ["a", "b", "c"].into_iter().for_each(|reference| fails(&mut breaker, reference, now));
        breaker
    }

    #[test]
    fn opens_after_failures_in_row() {
        let (mut breaker, now) = (Breaker::new(LIMITS), Instant::now());
        fails(&mut breaker, "a", now);
        fails(&mut breaker, "b", now);
        settles(&mut breaker, "c", CallResult::Answered, now);
        for reference in ["d", "e", "f"] {
            assert!(!breaker.is_open());
            fails(&mut breaker, reference, now);
        }
        assert_eq!(breaker.admit("g", now), Err(Refusal::Open(FIRST_PAUSE)));
        assert_eq!(breaker.refuses("g", now), Some(Refusal::Open(FIRST_PAUSE)));
    }

    #[test]
    fn one_payments_failures_count_once() {
        let (mut breaker, now) = (Breaker::new(LIMITS), Instant::now());
        for _ in 0..100 {
            fails(&mut breaker, "a", now);
            fails(&mut breaker, "b", now);
        }
        assert!(!breaker.is_open());
        settles(&mut breaker, "a", CallResult::Answered, now);
        for reference in ["a", "c", "d"] {
            fails(&mut breaker, reference, now);
        }
        assert!(breaker.is_open(), "it was answered since");
    }

    #[test]
    fn payment_that_has_not_failed_tests() {
        let now = Instant::now();
        let (mut breaker, later) = (opened(now), now + FIRST_PAUSE);
        assert_eq!(breaker.admit("a", later), Err(Refusal::Open(FIRST_PAUSE)));
        settles(&mut breaker, "g", CallResult::Answered, later);
        assert!(breaker.admit("a", later).is_ok());
        assert!(opened(now).admit("a", later + FIRST_PAUSE).is_ok(), "there may be no other");
    }

    #[test]
    fn one_call_tests_after_pause() {
        let mut now = Instant::now();
        let mut breaker = opened(now);
        for (number, pause_ms) in [250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000].into_iter().enumerate()
        {
            let pause = Duration::from_millis(pause_ms);
            assert_eq!(breaker.refuses("new", now), Some(Refusal::Open(pause)));
            now += pause;
            let test = breaker.admit(&format!("test {number}"), now).unwrap();
            assert_eq!(breaker.admit("new", now), Err(Refusal::Testing));
            breaker.settle(test, CallResult::Failed(None), now);
        }
        now += LIMITS.open_for;
        settles(&mut breaker, "new", CallResult::Answered, now);
        assert!(breaker.admit("new", now).is_ok() && breaker.admit("a", now).is_ok());
    }

    #[test]
    fn test_without_result_is_repeated() {
        let now = Instant::now();
        let (mut breaker, later) = (opened(now), now + FIRST_PAUSE);
        settles(&mut breaker, "g", CallResult::NothingLearnt, later);
        assert!(breaker.admit("g", later).is_ok());
    }

    #[test]
    fn keeps_pause_that_is_asked_for() {
        for (asked_for, kept) in [(Duration::from_secs(7), Duration::from_secs(7)), (Duration::MAX, LONGEST_PAUSE)] {
            let (mut breaker, now) = (Breaker::new(LIMITS), Instant::now());
            settles(&mut breaker, "a", CallResult::Failed(Some(asked_for)), now);
            assert_eq!(breaker.admit("b", now), Err(Refusal::Open(kept)));
        }
    }

    #[test]
    fn calls_of_earlier_phase_say_nothing() {
        let (mut breaker, now) = (Breaker::new(LIMITS), Instant::now());
        let slow = breaker.admit("slow", now).unwrap();
        ["a", "b", "c"].into_iter().for_each(|reference| fails(&mut breaker, reference, now));
        breaker.settle(slow, CallResult::Answered, now);
        assert!(breaker.admit("d", now).is_err());
    }

    proptest! {
        #[test]
        fn never_stays_shut(steps in prop::collection::vec((0u64..60, 0u8..4, 0u8..6), 1..200)) {
            let (mut breaker, mut now) = (Breaker::new(LIMITS), Instant::now());
            let mut admitted = Vec::new();
            for (seconds, step, reference) in steps {
                now += Duration::from_secs(seconds);
                if let Ok(admission) = breaker.admit(&reference.to_string(), now) {
                    admitted.push(admission);
                }
                let result = match step {
                    0 => CallResult::Answered,
                    1 => CallResult::Failed(None),
                    2 => CallResult::Failed(Some(Duration::from_secs(seconds))),
                    _ => CallResult::NothingLearnt,
                };
                if seconds % 3 != 0 && !admitted.is_empty() {
                    breaker.settle(admitted.remove(0), result, now);
                }
            }
            // After all calls have ended and the longest pause is over, a call is admitted again, whichever it is.
            for admission in admitted {
                breaker.settle(admission, CallResult::Failed(None), now);
            }
            prop_assert!(breaker.refuses("new", now + LONGEST_PAUSE).is_none());
            for reference in 0u8..6 {
                prop_assert!(breaker.refuses(&reference.to_string(), now + LONGEST_PAUSE + LIMITS.open_for).is_none());
            }
        }

        /// However often fewer payments fail than open it, and whatever succeeds between: it stays closed.
        #[test]
        fn few_failing_payments_never_open(calls in prop::collection::vec((0u8..8, any::<bool>()), 1..300)) {
            let (mut breaker, now) = (Breaker::new(LIMITS), Instant::now());
            for (reference, answers) in calls {
                let fails = reference < 2 && !answers;
                let result = if fails { CallResult::Failed(None) } else { CallResult::Answered };
                let reference = if fails { reference } else { reference.max(2) };
                settles(&mut breaker, &reference.to_string(), result, now);
                prop_assert!(!breaker.is_open());
            }
        }
    }
}
