//! The circuit breaker: after some failures in a row a provider is left alone for a while, then one call tests it.
//!
//! Pure: no clock, no task. It is told the time and what became of each call it admitted.

use std::time::{Duration, Instant};

/// A pause that a provider asks for is kept, up to this long: a mistaken `Retry-After` must not stop it for a day.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// When it opens, and for how long.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BreakerLimits {
    /// So many failures in a row open it; at least 1.
    pub(crate) failures_to_open: u32,
    /// How long no call is admitted then.
    pub(crate) open_for: Duration,
}

/// A call that was admitted; [`Breaker::settle`] takes it back.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Admission {
    /// In which phase it was admitted: what an earlier phase's call finds out is no news.
    phase: u64,
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
    /// None is admitted until then; afterwards one.
    Open { until: Instant },
    /// One call is testing the provider.
    Testing,
}

/// The breaker of one provider.
#[derive(Debug)]
pub(crate) struct Breaker {
    limits: BreakerLimits,
    state: State,
    phase: u64,
}

impl Breaker {
    pub(crate) fn new(limits: BreakerLimits) -> Self {
        Self { limits, state: State::Closed { failures: 0 }, phase: 0 }
    }

    /// Admits a call, or says how long to wait before the next try.
    pub(crate) fn admit(&mut self, now: Instant) -> Result<Admission, Duration> {
        match self.state {
            State::Closed { .. } => {}
            State::Open { until } if now >= until => self.enter(State::Testing),
            State::Open { until } => return Err(until - now),
            // The test ends within the call's own timeout.
            State::Testing => return Err(self.limits.open_for),
        }
        Ok(Admission { phase: self.phase })
    }

    /// Whether [`admit`](Self::admit) would refuse, and for how long.
    pub(crate) fn refuses(&self, now: Instant) -> Option<Duration> {
        match self.state {
            State::Open { until } if now < until => Some(until - now),
            State::Testing => Some(self.limits.open_for),
            _ => None,
        }
    }

    /// Whether it has opened, and no call has succeeded since.
    pub(crate) fn is_open(&self) -> bool {
        !matches!(self.state, State::Closed { .. })
    }

    /// Takes note of what became of an admitted call.
    pub(crate) fn settle(&mut self, admission: Admission, result: CallResult, now: Instant) {
        if admission.phase != self.phase {
            return;
        }
        let failures = match self.state {
            State::Closed { failures } => failures + 1,
            // One failed test is enough.
            State::Testing => self.limits.failures_to_open,
            // No call is admitted in this phase.
            State::Open { .. } => return,
        };
        match (result, &mut self.state) {
            (CallResult::Answered, State::Closed { failures }) => *failures = 0,
            (CallResult::Answered, _) => self.enter(State::Closed { failures: 0 }),
            (CallResult::Failed(Some(pause)), _) => self.open(now, pause.min(LONGEST_PAUSE)),
            (CallResult::Failed(None), _) if failures >= self.limits.failures_to_open => {
                self.open(now, self.limits.open_for);
            }
            (CallResult::Failed(None), _) => self.state = State::Closed { failures },
            (CallResult::NothingLearnt, State::Testing) => self.enter(State::Open { until: now }),
            (CallResult::NothingLearnt, _) => {}
        }
    }

    fn open(&mut self, now: Instant, pause: Duration) {
        self.enter(State::Open { until: now + pause });
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

    fn fails(breaker: &mut Breaker, now: Instant) {
        let admission = breaker.admit(now).unwrap();
        breaker.settle(admission, CallResult::Failed(None), now);
    }

    #[test]
    fn opens_after_failures_in_row() {
        let (mut breaker, now) = (Breaker::new(LIMITS), Instant::now());
        fails(&mut breaker, now);
        fails(&mut breaker, now);
        let admission = breaker.admit(now).unwrap();
        breaker.settle(admission, CallResult::Answered, now);
        for _ in 0..3 {
            fails(&mut breaker, now);
        }
        assert_eq!(breaker.admit(now), Err(LIMITS.open_for));
        assert_eq!(breaker.refuses(now), Some(LIMITS.open_for));
    }

    #[test]
    fn one_call_tests_after_pause() {
        let (mut breaker, now) = (Breaker::new(LIMITS), Instant::now());
        for _ in 0..3 {
            fails(&mut breaker, now);
        }
        let later = now + LIMITS.open_for;
        let test = breaker.admit(later).unwrap();
        assert_eq!(breaker.admit(later), Err(LIMITS.open_for));
        breaker.settle(test, CallResult::Failed(None), later);
        assert_eq!(breaker.admit(later), Err(LIMITS.open_for));
        let latest = later + LIMITS.open_for;
        let test = breaker.admit(latest).unwrap();
        breaker.settle(test, CallResult::Answered, latest);
        assert!(breaker.admit(latest).is_ok() && breaker.admit(latest).is_ok());
    }

    #[test]
    fn test_without_result_is_repeated() {
        let (mut breaker, now) = (Breaker::new(LIMITS), Instant::now());
        for _ in 0..3 {
            fails(&mut breaker, now);
        }
        let later = now + LIMITS.open_for;
        let test = breaker.admit(later).unwrap();
        breaker.settle(test, CallResult::NothingLearnt, later);
        assert!(breaker.admit(later).is_ok());
    }

    #[test]
    fn keeps_pause_that_is_asked_for() {
        let (mut breaker, now) = (Breaker::new(LIMITS), Instant::now());
        let admission = breaker.admit(now).unwrap();
        breaker.settle(admission, CallResult::Failed(Some(Duration::from_secs(7))), now);
        assert_eq!(breaker.admit(now), Err(Duration::from_secs(7)));
        let (mut breaker, now) = (Breaker::new(LIMITS), Instant::now());
        let admission = breaker.admit(now).unwrap();
        breaker.settle(admission, CallResult::Failed(Some(Duration::MAX)), now);
        assert_eq!(breaker.admit(now), Err(LONGEST_PAUSE));
    }

    #[test]
    fn calls_of_earlier_phase_say_nothing() {
        let (mut breaker, now) = (Breaker::new(LIMITS), Instant::now());
        let slow = breaker.admit(now).unwrap();
        for _ in 0..3 {
            fails(&mut breaker, now);
        }
        breaker.settle(slow, CallResult::Answered, now);
        assert!(breaker.admit(now).is_err());
    }

    proptest! {
        #[test]
        fn never_stays_shut(steps in prop::collection::vec((0u64..60, 0u8..4), 1..200)) {
            let (mut breaker, mut now) = (Breaker::new(LIMITS), Instant::now());
            let mut admitted = Vec::new();
            for (seconds, step) in steps {
                now += Duration::from_secs(seconds);
                if let Ok(admission) = breaker.admit(now) {
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
            // After all calls have ended and the longest pause is over, a call is admitted again.
            for admission in admitted {
                breaker.settle(admission, CallResult::Failed(None), now);
            }
            prop_assert!(breaker.admit(now + LONGEST_PAUSE).is_ok());
        }
    }
}
