//! Detects that alarms and rows use different time zones, by comparing their deadlines for the same order.
//!
//! Uses only what a batch has read anyway: no query, no decision about orders.

use std::time::Duration;

use order_timeout_core::order::{OrderId, Timestamp};

const QUARTER_HOUR: Duration = Duration::from_secs(15 * 60);
/// The largest difference between two time zones: 12 hours west and 14 hours east of Greenwich.
const MOST_QUARTERS: i64 = 26 * 4;
/// Two deadlines that differ by less are the same: publisher and database have separate clocks.
const SAME: Duration = Duration::from_secs(60);
/// How far a difference of zones may be from whole quarter hours, for the same reason.
const TOLERANCE: Duration = Duration::from_secs(1);
/// How many consecutive orders have a row earlier than their alarm. A shop does not move a deadline to before its alarm
/// without another alarm.
const EARLIER_ORDERS: u32 = 3;
/// What comes twice when a clock is set back, with its tolerance.
const LONGEST_REPEATED: Duration = Duration::from_secs(3_600 + 2);
/// How many consecutive orders have a row later by the same time. More, because an extended deadline looks the same.
const LATER_ORDERS: u32 = 10;

/// The comparison of the last orders.
#[derive(Debug, Default)]
pub(super) struct ZoneComparison {
    /// By how many quarter hours the rows are later; negative: earlier.
    quarters: i64,
    orders: u32,
    last: Option<OrderId>,
    /// The earliest and the latest deadline of their rows.
    span: Option<(Timestamp, Timestamp)>,
}

impl ZoneComparison {
    /// An order's deadline by its alarm and by its row.
    pub fn note(&mut self, order_id: &OrderId, by_alarm: Timestamp, by_row: Timestamp) {
        let difference = by_row.unix_micros().saturating_sub(by_alarm.unix_micros());
        if difference.unsigned_abs() <= micros(SAME).unsigned_abs() {
            *self = Self::default();
            return;
        }
        let quarters = (difference.saturating_add(difference.signum() * micros(TOLERANCE))) / micros(QUARTER_HOUR);
        let rest = difference.saturating_sub(quarters.saturating_mul(micros(QUARTER_HOUR)));
        let is_of_zones = rest.unsigned_abs() <= micros(TOLERANCE).unsigned_abs()
            && (1..=MOST_QUARTERS).contains(&quarters.saturating_abs());
        // A deadline that was extended by another time proves nothing; an order that returns adds nothing new.
        if !is_of_zones || self.last.as_ref() == Some(order_id) {
            return;
        }
        let (first, last) = self.span.filter(|_| quarters == self.quarters).unwrap_or((by_row, by_row));
        self.span = Some((first.min(by_row), last.max(by_row)));
        self.orders = if quarters == self.quarters { self.orders.saturating_add(1) } else { 1 };
        self.quarters = quarters;
        self.last = Some(order_id.clone());
    }

    /// Whether all of it may be the hour that comes twice when summer time ends: a column without a zone has one text for
    /// two moments, so rows of that hour differ from their alarms by the length of the change.
    fn may_be_one_hour(&self) -> bool {
        let longest_change = 4;
        let spans = self.span.map_or(Duration::ZERO, |(first, last)| last.since(first));
        self.quarters.abs() <= longest_change && spans <= LONGEST_REPEATED
    }

    /// Why the zones must differ, if enough orders show it.
    pub fn why(&self) -> Option<String> {
        let enough = if self.quarters < 0 { EARLIER_ORDERS } else { LATER_ORDERS };
        if self.orders < enough || self.may_be_one_hour() {
            return None;
        }
        let (hours, minutes) = (self.quarters.abs() / 4, self.quarters.abs() % 4 * 15);
        let side = if self.quarters < 0 { "earlier" } else { "later" };
        Some(format!(
            "order after order has a deadline in its row that is {hours} h {minutes:02} min {side} than in its alarm; a column of type timestamp is most likely read in another time zone than it is written in: write AT TIME ZONE 'the zone that the column is written in' behind it in orders.close_sql and orders.overdue_sql, or correct database.time_zone or the publisher; deadlines that were all moved by the same whole quarter hours look like this as well, and are no fault"
        ))
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).expect("a constant of hours at most")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600_000_000;

    fn after(orders: u32, difference: i64) -> ZoneComparison {
        let mut zones = ZoneComparison::default();
        for order in 0..orders {
            note(&mut zones, order, difference);
        }
        zones
    }

    fn note(zones: &mut ZoneComparison, order: u32, difference: i64) {
        let by_alarm = Timestamp::from_unix_micros(1_800_000_000_000_000);
        let by_row = Timestamp::from_unix_micros(by_alarm.unix_micros() + difference);
        zones.note(&OrderId::new(order.to_string()).unwrap(), by_alarm, by_row);
    }

    #[test]
    fn rows_earlier_by_hours_are_named() {
        assert_eq!(after(2, -5 * HOUR).why(), None);
        let why = after(3, -5 * HOUR - 700_000).why().unwrap();
        assert!(why.contains("5 h 00 min earlier") && why.contains("AT TIME ZONE"), "{why}");
    }

    #[test]
    fn hour_that_comes_twice_is_no_fault() {
        let mut zones = ZoneComparison::default();
        let mut at = |minutes: i64, order: u32| {
            let by_alarm = Timestamp::from_unix_micros(1_800_000_000_000_000 + minutes * HOUR / 60);
            let by_row = Timestamp::from_unix_micros(by_alarm.unix_micros() + HOUR);
            zones.note(&OrderId::new(order.to_string()).unwrap(), by_alarm, by_row);
            zones.why()
        };
        assert!((0..60).all(|minute| at(i64::from(minute), minute).is_none()));
        assert!(at(65, 65).is_some_and(|why| why.contains("1 h 00 min later")), "it goes on after that hour");
    }

    #[test]
    fn rows_later_need_more_orders() {
        assert_eq!(after(9, 8 * HOUR).why(), None);
        assert!(after(10, 8 * HOUR).why().unwrap().contains("8 h 00 min later"));
        assert!(after(10, 5 * HOUR + 45 * HOUR / 60).why().unwrap().contains("5 h 45 min later"));
    }

    #[test]
    fn other_differences_say_nothing() {
        for difference in [0, 59_000_000, 7 * 60_000_000, -20 * 60_000_000, 27 * HOUR, -27 * HOUR, i64::MAX / 2] {
            assert_eq!(after(50, difference).why(), None, "{difference}");
        }
        assert!(after(50, 26 * HOUR).why().is_some());
    }

    #[test]
    fn one_agreeing_order_clears_it() {
        let mut zones = after(10, 8 * HOUR);
        note(&mut zones, 100, 7 * 60_000_000);
        assert!(zones.why().is_some(), "an extension by seven minutes says nothing");
        note(&mut zones, 101, 3_000);
        assert_eq!(zones.why(), None);
    }

    #[test]
    fn extensions_of_several_lengths_say_nothing() {
        let mut zones = ZoneComparison::default();
        for order in 0..100 {
            note(&mut zones, order, i64::from(1 + order % 2) * HOUR / 4);
        }
        assert_eq!(zones.why(), None);
    }

    #[test]
    fn same_order_counts_once() {
        let mut zones = ZoneComparison::default();
        (0..50).for_each(|_| note(&mut zones, 1, -HOUR));
        assert_eq!(zones.why(), None);
    }
}
