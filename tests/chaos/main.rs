//! A shop in the middle of trouble: servers that are killed, halted and cut off at random while orders are taken, paid,
//! extended and closed; and in the end the books must be right.
//!
//! The short run is part of the normal suite. The long ones are run by name: `scripts/chaos`.

mod cases;
mod crew;
mod ear;
mod fate;
mod faults;
mod ledger;
mod plan;
mod premises;
mod run;
mod shop;

#[path = "../it/support/mod.rs"]
#[allow(dead_code)] // the tests of one promise each need more of it
mod support;
