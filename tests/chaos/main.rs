//! A shop under faults: servers are killed, halted and cut off at random while orders are created, paid, extended and
//! closed; at the end every invariant must hold.
//!
//! The short run is part of the normal suite. The long ones are run by name: `scripts/chaos`.

mod cases;
mod environment;
mod event_listener;
mod faults;
mod history;
mod ledger;
mod own_tables;
mod plan;
mod provider_ledger;
mod run;
mod shop;
mod workers;
