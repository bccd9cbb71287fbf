//! What Postgres alone and the broker alone can do, measured in the same run: nobody who closes orders with alarms can
//! be faster than either.

pub mod broker;
pub mod postgres;
