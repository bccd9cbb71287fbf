//! Whether orders are closed without their alarms although a consumer session is open, whatever the reason.
//!
//! Pure: it is told which orders were closed, and reads no clock.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Closes of this time are looked at: a shop may close one order a minute.
const LATELY: Duration = Duration::from_secs(600);
/// Fewer show nothing: an alarm may be parked, or was never scheduled.
const FEW_SWEPT: u64 = 3;
/// One close in so many may be without an alarm.
const SWEPT_OF: u64 = 20;
/// After this long without such a close it is over, if an alarm has closed an order since.
const OVER_AFTER: Duration = Duration::from_secs(8);
/// After this long it is over in any case: longer than from one order to the next where there is one a minute.
const OVER_AFTER_SILENCE: Duration = Duration::from_secs(90);

/// Closes of one second.
#[derive(Debug, Clone, Copy)]
struct Second {
    began: Instant,
    swept: u64,
    closed: u64,
}

/// What was closed lately, and by what.
#[derive(Debug, Default)]
pub struct SweepWatch {
    seconds: VecDeque<Second>,
    last_swept: Option<Instant>,
    last_by_alarm: Option<Instant>,
}

impl SweepWatch {
    /// `swept` orders were closed without their alarms, by the sweep or read ahead, and `by_alarm` by them: the engine's counts.
    pub fn closed(&mut self, swept: u64, by_alarm: u64, now: Instant) {
        if swept > 0 {
            self.last_swept = Some(now);
        }
        if by_alarm > 0 {
            self.last_by_alarm = Some(now);
        }
        let closed = swept + by_alarm;
        match self.seconds.back_mut().filter(|last| now.duration_since(last.began) < Duration::from_secs(1)) {
            Some(last) => (last.swept, last.closed) = (last.swept + swept, last.closed + closed),
            None => self.seconds.push_back(Second { began: now, swept, closed }),
        }
    }

    /// What is wrong; `None` if alarms close the orders.
    pub fn why(&mut self, now: Instant) -> Option<String> {
        while self.seconds.front().is_some_and(|first| now.duration_since(first.began) > LATELY) {
            self.seconds.pop_front();
        }
        let last_swept = self.last_swept?;
        let arrives_again = self.last_by_alarm.is_some_and(|by_alarm| by_alarm > last_swept);
        let longest_silence = if arrives_again { OVER_AFTER } else { OVER_AFTER_SILENCE };
        if now.duration_since(last_swept) > longest_silence {
            // What is over must not count again with the next order whose alarm was parked.
            self.seconds
                .iter_mut()
                .for_each(|second| (second.closed, second.swept) = (second.closed - second.swept, 0));
            self.last_swept = None;
            return None;
        }
        let sum = |of: fn(&Second) -> u64| self.seconds.iter().map(of).sum::<u64>();
        let (swept, closed) = (sum(|second| second.swept), sum(|second| second.closed));
        (swept >= FEW_SWEPT && swept * SWEPT_OF > closed).then(|| {
            format!(
                "{swept} of {closed} orders in the last ten minutes were closed without their alarms although a consumer session is open, as they were read from the database; schedule an alarm for every order, find out whether a publisher floods the inbox or the processing queue (`rabbitmqctl list_queues -p` and the virtual host), and run `order-timeout doctor --management URL`, which looks for what keeps alarms from arriving"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(began: Instant, seconds: u64) -> Instant {
        began + Duration::from_secs(seconds)
    }

    #[test]
    fn few_swept_orders_are_usual() {
        let (mut watch, began) = (SweepWatch::default(), Instant::now());
        watch.closed(2, 0, began);
        assert_eq!(watch.why(began), None);
        watch.closed(1, 0, after(began, 2));
        assert!(watch.why(after(began, 2)).is_some_and(|why| why.contains("3 of 3 orders")));
        watch.closed(0, 57, after(began, 3));
        assert_eq!(watch.why(after(began, 3)), None, "one in twenty");
    }

    #[test]
    fn arriving_alarms_end_it_within_seconds() {
        let (mut watch, began) = (SweepWatch::default(), Instant::now());
        watch.closed(9, 0, began);
        watch.closed(0, 1, after(began, 1));
        assert!(watch.why(after(began, 7)).is_some());
        assert_eq!(watch.why(after(began, 9)), None);
    }

    #[test]
    fn without_orders_it_ends_by_itself() {
        let (mut watch, began) = (SweepWatch::default(), Instant::now());
        watch.closed(9, 0, began);
        assert!(watch.why(after(began, 89)).is_some());
        assert_eq!(watch.why(after(began, 91)), None);
    }

    #[test]
    fn one_order_a_minute_is_enough() {
        let (mut watch, began) = (SweepWatch::default(), Instant::now());
        (0..3).for_each(|minute| watch.closed(1, 0, after(began, 60 * minute)));
        assert!(watch.why(after(began, 120)).is_some());
    }

    #[test]
    fn closes_by_alarm_count_after_it_is_over() {
        let (mut watch, began) = (SweepWatch::default(), Instant::now());
        watch.closed(9, 0, began);
        watch.closed(0, 100, after(began, 1));
        (9..60).for_each(|second| assert_eq!(watch.why(after(began, second)), None));
        watch.closed(3, 0, after(began, 60));
        assert_eq!(watch.why(after(began, 60)), None, "3 of 103");
        watch.closed(3, 0, after(began, 61));
        assert!(watch.why(after(began, 61)).is_some_and(|why| why.contains("6 of 106")));
    }

    #[test]
    fn what_is_over_counts_no_more() {
        let (mut watch, began) = (SweepWatch::default(), Instant::now());
        watch.closed(9, 0, began);
        watch.closed(0, 1, after(began, 1));
        assert_eq!(watch.why(after(began, 9)), None);
        watch.closed(1, 0, after(began, 10));
        assert_eq!(watch.why(after(began, 10)), None);
    }
}
