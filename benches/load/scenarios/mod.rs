//! One scenario per file: what happens in it, and which figures it prints.

pub mod burst;
pub mod flash_sale;
pub mod flood;
pub mod kinds;
pub mod mixed;
pub mod moved;
pub mod outage;
pub mod pending;
pub mod provider;
pub mod publish;
pub mod shards;
pub mod steady;
