//! What the engine wants done.
//!
//! Data only: nothing is decided here.

use super::Batch;
use super::closing::ClosingAction;
use crate::alarm::{DeadLetter, Rearm, Receipt, Settlement};
use crate::brake::Trip;
use crate::order::SweepPage;

/// What the engine wants done.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Close these orders, or claim those of which a payment provider must be asked, then report `Input::Closed`.
    Close(Batch),
    /// A step of the closing protocol.
    Closing(ClosingAction),
    /// Publish a new alarm for each, then report `Input::Rearmed` for those that are confirmed, and
    /// `Input::NotRearmed` or `Input::RearmRefused` for the rest.
    Rearm(Vec<Rearm>),
    /// Store these, then report `Input::Parked` once committed, and `Input::NotParked` or `Input::ParkRefused`
    /// for the rest. No other is handed out before all of these are reported.
    Park(Vec<(DeadLetter, Receipt)>),
    /// Acknowledge or requeue these deliveries. Nothing is reported: the broker redelivers what is not settled.
    Settle(Vec<(Receipt, Settlement)>),
    /// Write a pause of closing down, for this reason, then report `Input::ClosingPaused`. Nothing is closed meanwhile.
    PauseClosing(Trip),
    /// Share what was counted now, then report `Input::BrakeLimits` or `Input::BrakeNotJudged`. Nothing is closed meanwhile.
    ReportCounts,
    /// Look for overdue orders, then report `Input::Swept` or `Input::NotSwept`.
    Sweep(SweepPage),
}
