//! Which fault happens when: a plan drawn from a seed, and which late closes each fault excuses.
//!
//! Pure: the same seed gives the same plan on every machine. `faults.rs` carries the faults out.

use std::time::Duration;

use fastrand::Rng;

/// The pause between two faults, in which the system may recover.
const CALM_MS: std::ops::Range<u64> = 800..2_800;
/// One step of this many has two overlapping faults.
const OVERLAP_ONE_IN: u32 = 4;

/// Everything that is done to the servers, the network, the workers and the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// kill -9, then started again.
    BrokerKilled,
    /// Shut down cleanly, then started again.
    BrokerStopped,
    /// SIGSTOP: its connections stay open, without answers.
    BrokerHalted,
    /// Its memory alarm blocks publishers.
    BrokerOutOfMemory,
    /// `rabbitmqctl close_all_connections`
    BrokerClosesConnections,
    /// Every existing and every new connection is reset.
    BrokerCutOff,
    /// Nothing arrives at the broker, but its own output arrives.
    BrokerDeaf,
    /// Nothing from the broker arrives, but it receives everything.
    BrokerMute,
    /// Everything arrives late, in both directions.
    BrokerFarAway,
    /// Clients read the end of the stream, but what they write still arrives.
    BrokerHalfClosed,
    /// kill -9 and crash recovery.
    DatabaseKilled,
    /// A fast shutdown, which ends every session, and a start.
    DatabaseRestarted,
    /// SIGSTOP.
    DatabaseHalted,
    /// It answers but refuses every write, like the old primary after a failover.
    DatabaseReadOnly,
    /// `pg_terminate_backend` for every session of a worker, repeatedly, even during a commit.
    DatabaseEndsSessions,
    DatabaseCutOff,
    /// Nothing passes in either direction, and no connection is closed.
    DatabaseStalled,
    /// A connection is cut when the answer to a close returns: committed, but unknown to the worker.
    DatabaseAnswersLost,
    /// Everything arrives slightly late, in both directions.
    DatabaseFarAway,
    /// Another session locks the rows of orders that fall due.
    OrdersLocked,
    /// Another session locks an article's stock row, which its payments and closes need.
    StockLocked,
    /// kill -9 for one of the workers.
    WorkerKilled,
    /// SIGSTOP for one of the workers, with everything it holds.
    WorkerHalted,
    /// SIGTERM for one of the workers, and a replacement at the same moment.
    WorkerReplaced,
    /// kill -9 for all of them: until one is started again, nothing can be closed.
    EveryWorkerKilled,
    /// Waiting alarms are purged from their queues.
    QueuePurged,
    /// The processing queue is deleted under its consumers.
    QueueDeleted,
    /// A delay queue is deleted with its alarms; `setup` declares it again.
    DelayQueueDeleted,
    /// The alarm of every unpaid order is sent two more times.
    AlarmsDoubled,
    /// Invalid messages, and alarms for no order or for orders paid or closed long ago.
    GarbageSent,
    /// The payment provider is gone: its connections end, and new ones are refused.
    ProviderStopped,
    /// The payment provider accepts requests, and carries them out only at the end of the fault, without an answer in time.
    ProviderHalted,
    /// The payment provider answers HTTP 500.
    ProviderFailing,
    /// Something in front of the payment provider answers with a page of HTML.
    ProviderHtml,
    /// The payment provider answers slowly, but in time.
    ProviderFarAway,
    /// The payment provider carries requests out, and its answers are lost.
    ProviderAnswersLost,
}

/// What a fault affects. Two overlapping faults have different targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Broker,
    Database,
    Rows,
    Workers,
    Messages,
    Provider,
}

/// Which closes may be late, until one second after the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Excuses {
    /// Whatever happens to the broker, to messages, or to one of two workers: the sweep closes within a second.
    None,
    /// Without a database or without any worker, nothing can be closed.
    All,
    /// The orders with a row, or an article's row, locked by another session.
    Locked,
    /// The orders with an attempt at the payment provider; no other order waits for it.
    AtProvider,
}

impl Kind {
    pub const ALL: [Self; 36] = [
        Self::BrokerKilled,
        Self::BrokerStopped,
        Self::BrokerHalted,
        Self::BrokerOutOfMemory,
        Self::BrokerClosesConnections,
        Self::BrokerCutOff,
        Self::BrokerDeaf,
        Self::BrokerMute,
        Self::BrokerFarAway,
        Self::BrokerHalfClosed,
        Self::DatabaseKilled,
        Self::DatabaseRestarted,
        Self::DatabaseHalted,
        Self::DatabaseReadOnly,
        Self::DatabaseEndsSessions,
        Self::DatabaseCutOff,
        Self::DatabaseStalled,
        Self::DatabaseAnswersLost,
        Self::DatabaseFarAway,
        Self::OrdersLocked,
        Self::StockLocked,
        Self::WorkerKilled,
        Self::WorkerHalted,
        Self::WorkerReplaced,
        Self::EveryWorkerKilled,
        Self::QueuePurged,
        Self::QueueDeleted,
        Self::DelayQueueDeleted,
        Self::AlarmsDoubled,
        Self::GarbageSent,
        Self::ProviderStopped,
        Self::ProviderHalted,
        Self::ProviderFailing,
        Self::ProviderHtml,
        Self::ProviderFarAway,
        Self::ProviderAnswersLost,
    ];

    /// Those of a run with or without a payment provider.
    fn deck(has_provider: bool) -> Vec<Self> {
        Self::ALL.into_iter().filter(|kind| has_provider || kind.target() != Target::Provider).collect()
    }

    pub fn target(self) -> Target {
        match self {
            Self::BrokerKilled
            | Self::BrokerStopped
            | Self::BrokerHalted
            | Self::BrokerOutOfMemory
            | Self::BrokerClosesConnections
            | Self::BrokerCutOff
            | Self::BrokerDeaf
            | Self::BrokerMute
            | Self::BrokerFarAway
            | Self::BrokerHalfClosed => Target::Broker,
            Self::DatabaseKilled
            | Self::DatabaseRestarted
            | Self::DatabaseHalted
            | Self::DatabaseReadOnly
            | Self::DatabaseEndsSessions
            | Self::DatabaseCutOff
            | Self::DatabaseStalled
            | Self::DatabaseAnswersLost
            | Self::DatabaseFarAway => Target::Database,
            Self::OrdersLocked | Self::StockLocked => Target::Rows,
            Self::WorkerKilled | Self::WorkerHalted | Self::WorkerReplaced | Self::EveryWorkerKilled => Target::Workers,
            Self::QueuePurged
            | Self::QueueDeleted
            | Self::DelayQueueDeleted
            | Self::AlarmsDoubled
            | Self::GarbageSent => Target::Messages,
            Self::ProviderStopped
            | Self::ProviderHalted
            | Self::ProviderFailing
            | Self::ProviderHtml
            | Self::ProviderFarAway
            | Self::ProviderAnswersLost => Target::Provider,
        }
    }

    /// Strict on purpose. A database that is slow or loses one answer is available: it excuses nothing. Nor does a payment
    /// provider that is slow.
    pub fn excuses(self) -> Excuses {
        match self {
            Self::DatabaseKilled
            | Self::DatabaseRestarted
            | Self::DatabaseHalted
            | Self::DatabaseReadOnly
            | Self::DatabaseEndsSessions
            | Self::DatabaseCutOff
            | Self::DatabaseStalled
            | Self::EveryWorkerKilled => Excuses::All,
            Self::OrdersLocked | Self::StockLocked => Excuses::Locked,
            Self::ProviderStopped
            | Self::ProviderHalted
            | Self::ProviderFailing
            | Self::ProviderHtml
            | Self::ProviderAnswersLost => Excuses::AtProvider,
            Self::ProviderFarAway => Excuses::None,
            Self::DatabaseAnswersLost | Self::DatabaseFarAway => Excuses::None,
            Self::WorkerKilled | Self::WorkerHalted | Self::WorkerReplaced => Excuses::None,
            Self::BrokerKilled
            | Self::BrokerStopped
            | Self::BrokerHalted
            | Self::BrokerOutOfMemory
            | Self::BrokerClosesConnections
            | Self::BrokerCutOff
            | Self::BrokerDeaf
            | Self::BrokerMute
            | Self::BrokerFarAway
            | Self::BrokerHalfClosed => Excuses::None,
            Self::QueuePurged
            | Self::QueueDeleted
            | Self::DelayQueueDeleted
            | Self::AlarmsDoubled
            | Self::GarbageSent => Excuses::None,
        }
    }

    /// Whether it may discard alarms that were safe.
    pub fn discards_alarms(self) -> bool {
        matches!(self, Self::QueuePurged | Self::QueueDeleted | Self::DelayQueueDeleted)
    }

    /// Whether a worker may lose leases: it, or the answer to the statement that took orders over, is gone. Such orders wait
    /// until their leases are over (docs/decisions/0072-ask-before-closing.md).
    pub fn loses_leases(self) -> bool {
        match self.target() {
            Target::Database => !matches!(self, Self::DatabaseAnswersLost | Self::DatabaseFarAway),
            Target::Workers => self != Self::WorkerReplaced,
            Target::Broker | Target::Rows | Target::Messages | Target::Provider => false,
        }
    }

    /// The name in the report: `broker_killed`.
    pub fn name(self) -> String {
        let mut name = String::new();
        for letter in format!("{self:?}").chars() {
            if letter.is_uppercase() && !name.is_empty() {
                name.push('_');
            }
            name.push(letter.to_ascii_lowercase());
        }
        name
    }

    /// The longest duration, without the time to undo it.
    fn longest(self) -> Duration {
        match self {
            // Long enough for both workers to give up their sessions and retry several times.
            Self::BrokerHalted | Self::BrokerDeaf | Self::BrokerMute => Duration::from_secs(7),
            // Longer than a worker's timeout for one statement.
            Self::DatabaseHalted | Self::DatabaseStalled => Duration::from_secs(7),
            _ => Duration::from_secs(4),
        }
    }

    fn may_overlap(self, other: Self) -> bool {
        let targets = [self.target(), other.target()];
        let touches = |target| targets.contains(&target);
        // Without any worker, the effect of the other fault would not be observed.
        let leaves_a_worker = self != Self::EveryWorkerKilled && other != Self::EveryWorkerKilled;
        let needs = |what, affected| touches(what) && touches(affected);
        leaves_a_worker
            && self.target() != other.target()
            && !needs(Target::Rows, Target::Database)
            && !needs(Target::Messages, Target::Broker)
            && !needs(Target::Messages, Target::Database)
    }
}

/// One fault of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    pub kind: Kind,
    /// The delay after the start of the step.
    pub after: Duration,
    /// How long it lasts before it is undone.
    pub hold: Duration,
    /// Selects the worker, article or queue, modulo their number.
    pub choice: usize,
}

/// A calm period, followed by one fault or two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub calm: Duration,
    pub faults: Vec<Fault>,
}

/// Steps without end. Kinds are dealt like cards, so that each occurs once before any repeats.
#[derive(Debug)]
pub struct Plan {
    rng: Rng,
    has_provider: bool,
    deck: Vec<Kind>,
}

impl Plan {
    /// `has_provider`: whether the run has a payment provider.
    pub fn of(seed: u64, has_provider: bool) -> Self {
        Self { rng: Rng::with_seed(seed), has_provider, deck: Vec::new() }
    }

    fn deal(&mut self) -> Kind {
        if self.deck.is_empty() {
            self.deck = Kind::deck(self.has_provider);
            self.rng.shuffle(&mut self.deck);
        }
        self.deck.pop().expect("a deck just filled")
    }

    /// The next card that may overlap with this one, if the deck still has one.
    fn deal_beside(&mut self, first: Kind) -> Option<Kind> {
        let place = self.deck.iter().rposition(|kind| first.may_overlap(*kind))?;
        Some(self.deck.remove(place))
    }

    fn fault(&mut self, kind: Kind, after: Duration) -> Fault {
        let longest_ms = u64::try_from(kind.longest().as_millis()).expect("some seconds");
        let hold = Duration::from_millis(self.rng.u64(300..longest_ms));
        Fault { kind, after, hold, choice: self.rng.usize(0..1 << 16) }
    }
}

impl Iterator for Plan {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let calm = Duration::from_millis(self.rng.u64(CALM_MS));
        let kind = self.deal();
        let first = self.fault(kind, Duration::ZERO);
        let mut faults = vec![first];
        if self.rng.u32(0..OVERLAP_ONE_IN) == 0
            && let Some(kind) = self.deal_beside(kind)
        {
            let after = first.hold.mul_f64(self.rng.f64());
            faults.push(self.fault(kind, after));
        }
        Some(Step { calm, faults })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn first(seed: u64, steps: usize) -> Vec<Step> {
        Plan::of(seed, false).take(steps).collect()
    }

    fn first_with_provider(seed: u64, steps: usize) -> Vec<Step> {
        Plan::of(seed, true).take(steps).collect()
    }

    #[test]
    fn seed_determines_plan() {
        assert_eq!(first(7, 200), first(7, 200));
        assert_ne!(first(7, 200), first(8, 200));
        // Recorded, so that an old seed keeps its meaning.
        let kinds: Vec<String> =
            first(1, 4).iter().flat_map(|step| &step.faults).map(|fault| fault.kind.name()).collect();
        assert_eq!(kinds, FIRST_OF_SEED_1);
    }

    const FIRST_OF_SEED_1: [&str; 5] =
        ["orders_locked", "queue_deleted", "broker_out_of_memory", "database_read_only", "broker_killed"];

    #[test]
    fn every_kind_occurs_before_any_repeats() {
        for (seed, has_provider) in (0..50).flat_map(|seed| [(seed, false), (seed, true)]) {
            let steps = Plan::of(seed, has_provider).take(200);
            let faults: Vec<Kind> = steps.flat_map(|step| step.faults).map(|fault| fault.kind).collect();
            let kinds = Kind::deck(has_provider).len();
            for round in faults.chunks_exact(kinds) {
                assert_eq!(round.iter().collect::<BTreeSet<_>>().len(), kinds, "seed {seed}");
            }
        }
        assert_eq!((Kind::deck(true).len(), Kind::deck(false).len()), (Kind::ALL.len(), 30));
    }

    #[test]
    fn kinds_are_listed_once_with_distinct_names() {
        assert_eq!(Kind::ALL.iter().collect::<BTreeSet<_>>().len(), Kind::ALL.len());
        assert_eq!(Kind::ALL.map(Kind::name).iter().collect::<BTreeSet<_>>().len(), Kind::ALL.len());
        assert_eq!(Kind::BrokerOutOfMemory.name(), "broker_out_of_memory");
    }

    #[test]
    fn simultaneous_faults_have_different_targets() {
        let steps: Vec<Step> = (0..50).flat_map(|seed| first_with_provider(seed, 100)).collect();
        let pairs: Vec<&Step> = steps.iter().filter(|step| step.faults.len() == 2).collect();
        assert!(pairs.len() * 10 > steps.len(), "{} of {} steps", pairs.len(), steps.len());
        for pair in pairs {
            let [one, other] = [pair.faults[0], pair.faults[1]];
            assert_ne!(one.kind.target(), other.kind.target());
            assert!(other.after <= one.hold);
        }
    }

    #[test]
    fn faults_excuse_orders_of_their_target() {
        for kind in Kind::ALL {
            if matches!(kind.target(), Target::Broker | Target::Messages) {
                assert_eq!(kind.excuses(), Excuses::None, "{kind:?}");
                assert!(!kind.loses_leases(), "{kind:?}");
            }
            if kind.target() == Target::Provider {
                assert!(matches!(kind.excuses(), Excuses::None | Excuses::AtProvider), "{kind:?}");
            }
        }
    }

    #[test]
    fn twenty_minutes_contain_hundred_faults() {
        for seed in 0..20 {
            let steps = first(seed, 100);
            let planned: Duration = steps.iter().map(|step| step.calm + step.faults[0].hold).sum();
            // The remaining time is for restarting servers.
            assert!(planned < Duration::from_secs(10 * 60), "{planned:?}");
        }
    }
}
