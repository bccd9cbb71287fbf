//! What the engine is told.
//!
//! Data only: nothing is decided here.

use super::{Batch, BatchResult};
use crate::alarm::{DeadLetter, Delivered, Rearm, Receipt};
use crate::order::SweptPage;

/// What the engine hears.
#[derive(Debug)]
pub enum Input {
    Delivered(Delivered),
    /// A batch came back from a closer.
    Closed(Batch, BatchResult),
    /// These alarms stand confirmed in the broker under a new message.
    Rearmed(Vec<Receipt>),
    /// These do not, and no other would: the broker is away, or does not answer.
    NotRearmed(Vec<Rearm>),
    /// These do not, for a reason of their own: their queue is not there, or takes nothing.
    RearmRefused(Vec<Rearm>),
    /// These stand committed in `parked_alarms`.
    Parked(Vec<Receipt>),
    /// These do not, and no other would: the database is away.
    NotParked(Vec<(DeadLetter, Receipt)>),
    /// These do not, for a reason of their own: the database refuses their row.
    ParkRefused(Vec<(DeadLetter, Receipt)>),
    Swept(SweptPage),
    /// The database could not be asked for overdue orders.
    NotSwept,
    /// The consumer session of this number is open.
    SessionOpened(u64),
    /// No consumer session is open: no alarm can come.
    SessionEnded,
}
