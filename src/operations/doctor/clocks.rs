//! Compares the clocks of the servers with this machine's.
//!
//! The only part that reads this machine's wall clock: deadlines are compared by the database's, alarms expire by the
//! broker's, and publishers count by their own.

use std::time::Duration;

use order_timeout_core::order::Timestamp;

use super::check::{CheckName, Checks, Finding};

/// An alarm by a clock that is wrong by more arrives outside of what `delay.lead` and the hold make up for.
const MOST: Duration = Duration::from_secs(1);
/// The resolution of a header `Date`, in addition.
const RESOLUTION_OF_DATE: Duration = Duration::from_secs(1);

/// Asks a clock, and returns how far it is ahead of this machine's, as far as that is certain.
pub(super) async fn difference<E>(ask: impl Future<Output = Result<Timestamp, E>>) -> Result<i64, E> {
    let before = Timestamp::now_by_local_clock();
    let theirs = ask.await?;
    Ok(outside(theirs, before, Timestamp::now_by_local_clock()))
}

/// Microseconds by which a time is after `after`, or (negative) before `before`.
fn outside(time: Timestamp, before: Timestamp, after: Timestamp) -> i64 {
    let (time, before, after) = (time.unix_micros(), before.unix_micros(), after.unix_micros());
    if time > after { time - after } else { (time - before).min(0) }
}

pub(super) fn judge_database(ahead_us: i64, checks: &mut Checks) {
    judge(CheckName::DatabaseClock, "database", ahead_us, Duration::ZERO, checks);
}

pub(super) fn judge_broker(ahead_us: i64, checks: &mut Checks) {
    judge(CheckName::BrokerClock, "broker", ahead_us, RESOLUTION_OF_DATE, checks);
}

fn judge(name: CheckName, server: &str, ahead_us: i64, resolution: Duration, checks: &mut Checks) {
    let by = Duration::from_micros(ahead_us.unsigned_abs());
    if by <= MOST + resolution {
        return;
    }
    let side = if ahead_us > 0 { "ahead of" } else { "behind" };
    checks.warning(
        name,
        Finding::new(
            format!("the {server}'s clock is {:.1} s {side} this machine's", by.as_secs_f64()),
            "orders are closed by the database's clock and alarms expire by the broker's; where they differ, alarms come late, or early and circulate",
            "synchronise the clocks of all machines (timedatectl set-ntp true; chronyc tracking shows the offset)",
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_counts_outside_of_answer() {
        let at = |seconds: i64| Timestamp::from_unix_micros(seconds * 1_000_000);
        assert_eq!(outside(at(5), at(4), at(6)), 0);
        assert_eq!(outside(at(9), at(4), at(6)), 3_000_000);
        assert_eq!(outside(at(1), at(4), at(6)), -3_000_000);
    }

    #[test]
    fn clock_off_by_seconds_is_found() {
        let found = |ahead_us| {
            let mut checks = Checks::default();
            judge_database(ahead_us, &mut checks);
            judge_broker(ahead_us, &mut checks);
            checks.report(&[]).findings().map(|(name, finding)| (name, finding.what.clone())).collect::<Vec<_>>()
        };
        assert_eq!(found(900_000), []);
        let one = found(-1_500_000);
        assert_eq!(one, [(CheckName::DatabaseClock, "the database's clock is 1.5 s behind this machine's".into())]);
        assert_eq!(found(3_000_000).len(), 2);
    }
}
