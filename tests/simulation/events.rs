//! What may happen in a history, and in how many histories it did. Only what took effect is counted, not what was
//! drawn: a payment for no order, or a crash of a worker that does not run, is nothing.

use std::collections::{BTreeMap, BTreeSet};

/// One list, so that none can be left out of [`Event::ALL`].
macro_rules! events {
    ($($name:ident),* $(,)?) => {
        /// Something that took effect.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Event {
            $($name),*
        }

        impl Event {
            /// Every event; a test requires that each occurs.
            pub const ALL: &[Self] = &[$(Self::$name),*];
        }
    };
}

events! {
    // The shop.
    AlarmPublished,
    AlarmInTransaction,
    AlarmForgotten,
    AlarmNotPublished,
    AlarmForNoOrder,
    PaymentBegun,
    PaymentBegunLate,
    PaymentFoundOrderClosed,
    PaymentCommitted,
    PaymentRolledBack,
    DeadlineMovedLater,
    DeadlineMovedEarlier,
    RefusalBegun,
    RefusalEnded,
    // Clocks.
    WorkerClockSkewed,
    ClockSetForward,
    ClockSetBack,
    // The broker.
    BrokerWentAway,
    BrokerCameBack,
    BrokerBeganRefusing,
    BrokerStoppedConfirming,
    ReleasedByFineSlot,
    ReleasedByCoarseSlot,
    Duplicated,
    DeliveredAgain,
    // The database.
    DatabaseWentAway,
    DatabaseCameBack,
    Relayed,
    RelayedTwice,
    LeftToSweep,
    RelayMarked,
    RelayCrashedBeforeMarking,
    RelayMarkedAfterCrash,
    SweptFurtherPage,
    SweepFoundDatabaseAway,
    // Workers.
    Restarted,
    CrashedAtWork,
    StoppedAtWork,
    ShutDownCleanly,
    SessionLost,
    SessionClosedByWorker,
    DeliveredEarly,
    DeliveredLate,
    RedeliveredWhileInFlight,
    DuplicateWhileInFlight,
    Requeued,
    // How alarms and orders ended.
    ClosedByAlarm,
    ClosedBySweep,
    ClosedInBatch,
    FoundPaid,
    FoundClosed,
    FoundNotDue,
    FoundBusy,
    FoundUnknown,
    CloseRefused,
    CloseDeadlocked,
    CloseFoundDatabaseAway,
    CommitAnswerLost,
    RearmedFromInbox,
    Rearmed,
    RetriedThroughBroker,
    RearmUnconfirmed,
    RearmRefused,
    ConfirmLost,
    Parked,
    // Calm periods.
    ClosedOnTimeInCalm,
    ClosedBySweepInCalm,
}

/// In how many histories each kind of event occurred.
#[derive(Debug, Default)]
pub struct Counts {
    pub histories: u64,
    pub steps: u64,
    by_event: BTreeMap<Event, u64>,
}

impl Counts {
    pub fn add(&mut self, steps: usize, seen: &BTreeSet<Event>) {
        self.histories += 1;
        self.steps += steps as u64;
        for event in seen {
            *self.by_event.entry(*event).or_default() += 1;
        }
    }

    /// The events that occur in less than this percentage of the histories.
    pub fn rarer_than(&self, percent: u64) -> Vec<Event> {
        let is_rare = |event: &Event| self.seen_in(*event) * 100 < self.histories * percent;
        Event::ALL.iter().copied().filter(is_rare).collect()
    }

    pub fn print(&self) {
        println!("{} histories, {} steps; histories with", self.histories, self.steps);
        for event in Event::ALL {
            println!("  {:<26} {:>9}", format!("{event:?}"), self.seen_in(*event));
        }
    }

    fn seen_in(&self, event: Event) -> u64 {
        self.by_event.get(&event).copied().unwrap_or_default()
    }
}
