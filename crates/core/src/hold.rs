//! A sorted map of alarms that came early: each waits in the worker's memory until its deadline, or until a retry.
//!
//! No I/O, no clock (the caller passes the time), no decision. The engine puts in only alarms that are still
//! unacknowledged at the broker, so that none is lost if the process dies.

use std::collections::{BTreeMap, HashMap};

use crate::order::{Deadline, OrderId, Timestamp};

/// The identity of an alarm: its order and its deadline.
pub type AlarmKey = (OrderId, Deadline);

/// When an entry wakes; the number keeps entries of the same time in order of arrival.
type WakeKey = (Timestamp, u64);

/// The held alarms. `T` is what the caller must remember with an alarm; the engine's is a work item.
#[derive(Debug)]
pub struct Hold<T> {
    waiting: BTreeMap<WakeKey, (AlarmKey, T)>,
    by_alarm: HashMap<AlarmKey, WakeKey>,
    arrivals: u64,
}

impl<T> Default for Hold<T> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), by_alarm: HashMap::new(), arrivals: 0 }
    }
}

impl<T> Hold<T> {
    /// Holds an alarm until `wake_at`. If the same alarm is held already, the new one is returned and the held one
    /// stays as it is.
    ///
    /// # Errors
    /// The new value, if the same alarm is held already.
    pub fn wait(&mut self, alarm: AlarmKey, wake_at: Timestamp, value: T) -> Result<(), T> {
        if self.by_alarm.contains_key(&alarm) {
            return Err(value);
        }
        self.arrivals += 1;
        let wake = (wake_at, self.arrivals);
        self.by_alarm.insert(alarm.clone(), wake);
        self.waiting.insert(wake, (alarm, value));
        Ok(())
    }

    /// Whether this alarm is held.
    #[must_use]
    pub fn contains(&self, alarm: &AlarmKey) -> bool {
        self.by_alarm.contains_key(alarm)
    }

    /// The value that is held for this alarm.
    pub fn get_mut(&mut self, alarm: &AlarmKey) -> Option<&mut T> {
        let wake = self.by_alarm.get(alarm)?;
        self.waiting.get_mut(wake).map(|(_, value)| value)
    }

    /// The earliest wake time of all held alarms.
    #[must_use]
    pub fn next_wake(&self) -> Option<Timestamp> {
        self.waiting.first_key_value().map(|((wake_at, _), _)| *wake_at)
    }

    /// The last wake time up to `moment`, or among the first `enough` alarms up to it.
    #[must_use]
    pub fn last_wake_by(&self, moment: Timestamp, enough: usize) -> Option<Timestamp> {
        self.waiting.range(..=(moment, u64::MAX)).take(enough).last().map(|((wake_at, _), _)| *wake_at)
    }

    /// Takes out the alarms whose time has come, earliest first, and at most `at_most`.
    pub fn wake(&mut self, now: Timestamp, at_most: usize) -> Vec<T> {
        let next = || {
            let first = self.waiting.first_entry().filter(|first| first.key().0 <= now)?;
            let (alarm, value) = first.remove();
            self.by_alarm.remove(&alarm);
            Some(value)
        };
        std::iter::from_fn(next).take(at_most).collect()
    }

    /// Takes out all alarms.
    pub fn drain(&mut self) -> Vec<T> {
        self.by_alarm.clear();
        std::mem::take(&mut self.waiting).into_values().map(|(_, value)| value).collect()
    }

    /// How many alarms are held, due ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether no alarm is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(n: u8, deadline: i64) -> AlarmKey {
        (OrderId::new(format!("order-{n}")).unwrap(), Timestamp::from_unix_micros(deadline))
    }

    #[test]
    fn alarms_of_same_time_wake_in_order() {
        let mut hold = Hold::default();
        for n in [3, 1, 2] {
            hold.wait(key(n, 10), Timestamp::from_unix_micros(10), n).unwrap();
        }
        assert_eq!(hold.wake(Timestamp::from_unix_micros(9), 9), Vec::<u8>::new());
        assert_eq!(hold.wake(Timestamp::from_unix_micros(10), 9), vec![3, 1, 2]);
        assert!(hold.is_empty());
    }

    proptest! {
        /// Compared with the simplest model: a list that is searched.
        #[test]
        fn behaves_like_sorted_list_without_duplicates(
            steps in proptest::collection::vec((any::<bool>(), 0_u8..6, 0_i64..3, 0_i64..40), 1..80),
            at_most in 1_usize..8,
        ) {
            let mut hold = Hold::default();
            let mut model: Vec<(AlarmKey, i64, usize)> = Vec::new();
            for (step, (waits, n, deadline, time)) in steps.into_iter().enumerate() {
                if waits {
                    let known = model.iter().any(|(k, ..)| *k == key(n, deadline));
                    let answer = hold.wait(key(n, deadline), Timestamp::from_unix_micros(time), step);
                    prop_assert_eq!(answer.is_err(), known);
                    if !known {
                        model.push((key(n, deadline), time, step));
                    }
                } else {
                    let mut due: Vec<_> = model.iter().filter(|(_, t, _)| *t <= time).map(|(_, t, s)| (*t, *s)).collect();
                    due.sort_unstable();
                    due.truncate(at_most);
                    model.retain(|(_, _, s)| due.iter().all(|(_, woken)| woken != s));
                    let woken = hold.wake(Timestamp::from_unix_micros(time), at_most);
                    prop_assert_eq!(woken, due.into_iter().map(|(_, s)| s).collect::<Vec<_>>());
                }
                prop_assert_eq!(hold.len(), model.len());
                let next = model.iter().map(|(_, t, _)| *t).min();
                prop_assert_eq!(hold.next_wake().map(Timestamp::unix_micros), next);
                let mut wakes: Vec<i64> = model.iter().map(|(_, t, _)| *t).filter(|t| *t <= time).collect();
                wakes.sort_unstable();
                let last = wakes.iter().take(at_most).next_back().copied();
                prop_assert_eq!(hold.last_wake_by(Timestamp::from_unix_micros(time), at_most).map(Timestamp::unix_micros), last);
                for (k, ..) in &model {
                    prop_assert!(hold.get_mut(k).is_some());
                }
            }
        }
    }
}
