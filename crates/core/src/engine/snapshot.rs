//! The read side of the engine: what it works on and what it has found out, for metrics, health and operators.
//!
//! Data only. Reading it changes nothing and decides nothing.

use super::Unavailable;
use crate::order::Deadline;

/// The state of the engine at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot<'a> {
    /// Alarms that wait for their deadline.
    pub held: usize,
    /// Orders of this worker that a payment provider is asked about, or that wait for their statement after it.
    pub asked_about: usize,
    /// How often the broker has returned an alarm early so far.
    pub early_returns: u64,
    /// Overdue orders that could not be closed and are backed off.
    pub backed_off: usize,
    /// The deadline of the oldest overdue order, as the last sweep found it; `None` if it found none.
    pub oldest_overdue: Option<Deadline>,
    /// Whether the last query for overdue orders succeeded, so that `oldest_overdue` is known. An unavailable database
    /// is not queried.
    pub overdue_is_known: bool,
    /// Whether closing is paused, so that nothing is closed, swept or consumed.
    pub closing_is_paused: bool,
    /// Whether a consumer session is open, so that alarms can be delivered.
    pub is_consuming: bool,
    /// Orders closed so far without their alarms although a session was open, and for some seconds already when they fell
    /// due. While there are more, orders are read ahead.
    pub closed_without_alarm: u64,
    /// The same for orders that their alarms closed in time.
    pub closed_in_time: u64,
    /// Whether no closer is working.
    pub closers_are_idle: bool,
    /// Why the database is not usable; `None` if it is.
    pub unavailable: Option<Unavailable<'a>>,
    /// Why the broker returns alarms early again and again; `None` if it does not.
    pub circulation: Option<&'static str>,
}
