//! What may happen in a history, and in how many histories it did. Only what took effect is counted, not what was
//! drawn: a payment for no order, or a crash of a worker that does not run, is nothing.

use std::collections::{BTreeMap, BTreeSet};

/// One list of each, so that none can be left out of [`Event::ALL`] or [`Event::WITH_PROVIDER`].
macro_rules! events {
    (always { $($name:ident),* $(,)? } with_provider { $($more:ident),* $(,)? }) => {
        /// Something that took effect.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Event {
            $($name,)*
            $($more),*
        }

        impl Event {
            /// Every event of a world without a payment provider; a test requires that each occurs.
            pub const ALL: &[Self] = &[$(Self::$name),*];
            /// What only happens in a world with a provider; the same.
            pub const WITH_PROVIDER: &[Self] = &[$(Self::$more),*];
        }
    };
}

events! { always {
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
    ClosingPaused,
    ClosingResumed,
    StartedWhilePaused,
    BrakeTripped,
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
    ReadAheadInCalm,
    MissingAlarmsSeen,
} with_provider {
    // Customers and the provider.
    AttemptBegun,
    FurtherAttemptBegun,
    CustomerIsPaying,
    CustomerPaid,
    CustomerPaidWhileClosing,
    CustomerPaidOtherAmount,
    CustomerGotRefund,
    PaymentBegunWhileClosing,
    ProviderWentAway,
    CallFoundProviderAway,
    Asked,
    CancelCalled,
    PaidBeforeCancel,
    AnswerLost,
    // The protocol.
    Claimed,
    FoundClosing,
    TakenOver,
    TakenOverAfterLease,
    QueueWasFull,
    LeaseLost,
    GivenBack,
    WaitedForCustomer,
    AskedAgainLater,
    EndAnswerLost,
    // How orders ended.
    ClosedWithProof,
    ClosedWithoutAttempts,
    PaymentBeatSettlement,
    SettledAsPaid,
    UnresolvedWithoutAnswer,
    UnresolvedAmount,
    UnresolvedForOtherReason,
} }

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

    /// Those of these events that occur in less than this percentage of the histories.
    pub fn rarer_than(&self, events: &[Event], percent: u64) -> Vec<Event> {
        let is_rare = |event: &Event| self.seen_in(*event) * 100 < self.histories * percent;
        events.iter().copied().filter(is_rare).collect()
    }

    pub fn print(&self, events: &[Event]) {
        println!("{} histories, {} steps; histories with", self.histories, self.steps);
        for event in events {
            println!("  {:<26} {:>9}", format!("{event:?}"), self.seen_in(*event));
        }
    }

    fn seen_in(&self, event: Event) -> u64 {
        self.by_event.get(&event).copied().unwrap_or_default()
    }
}
