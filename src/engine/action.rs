//! What the engine wants done.
//!
//! Data only: nothing is decided here.

use super::Batch;
use crate::alarm::{DeadLetter, Rearm, Receipt, Settlement};
use crate::order::SweepPage;

/// What the engine wants done.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Then report [`Input::Closed`].
    Close(Batch),
    /// Publish a fresh alarm each, then report [`Input::Rearmed`] for what is confirmed, and [`Input::NotRearmed`] or
    /// [`Input::RearmRefused`] for the rest.
    Rearm(Vec<Rearm>),
    /// Then report [`Input::Parked`] once committed, and [`Input::NotParked`] or [`Input::ParkRefused`] for the rest. No
    /// other is given out before all of it is reported.
    Park(Vec<(DeadLetter, Receipt)>),
    Settle(Vec<(Receipt, Settlement)>),
    /// Then report [`Input::Swept`] or [`Input::NotSwept`].
    Sweep(SweepPage),
}
