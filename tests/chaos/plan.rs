//! Which fault comes when: a plan drawn from a seed, and for how long each fault excuses a late close.
//!
//! Pure: the same seed gives the same plan on every machine. Carrying a fault out is `faults.rs`'s.

use std::time::Duration;

use fastrand::Rng;

/// Between two faults everybody may come to rest, for at least and at most so long.
const CALM_MS: std::ops::Range<u64> = 800..2_800;
/// One step in so many has two faults that overlap.
const OVERLAP_ONE_IN: u32 = 4;

/// Everything that is done to the servers, the network between, the workers, and the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// kill -9, then started again.
    BrokerKilled,
    /// Shut down in order, then started again.
    BrokerStopped,
    /// SIGSTOP: its connections stand, and nobody answers.
    BrokerHalted,
    /// Its memory alarm blocks whoever publishes.
    BrokerOutOfMemory,
    /// `rabbitmqctl close_all_connections`
    BrokerClosesConnections,
    /// Every connection is reset, and every further one.
    BrokerCutOff,
    /// Nothing arrives at the broker; what it says does.
    BrokerDeaf,
    /// Nothing that the broker says arrives; what it is told does.
    BrokerMute,
    /// Everything arrives late, both ways.
    BrokerFarAway,
    /// Clients read the end of the stream, while what they write still arrives.
    BrokerHalfClosed,
    /// kill -9 and crash recovery.
    DatabaseKilled,
    /// A fast shutdown, which ends every session, and a start.
    DatabaseRestarted,
    /// SIGSTOP.
    DatabaseHalted,
    /// It answers and refuses every write, as after a fail-over that left us with the old primary.
    DatabaseReadOnly,
    /// `pg_terminate_backend` for every session of a worker, again and again, whatever it was committing.
    DatabaseEndsSessions,
    DatabaseCutOff,
    /// Nothing goes through in either direction, and nobody is told.
    DatabaseStalled,
    /// A connection is cut when the answer to a close comes back: committed, and nobody knows.
    DatabaseAnswersLost,
    /// Everything arrives a little late, both ways.
    DatabaseFarAway,
    /// Somebody holds the rows of orders that fall due.
    OrdersLocked,
    /// Somebody holds an article's stock row, which their payments and closes need.
    StockLocked,
    /// kill -9 for one of the workers.
    WorkerKilled,
    /// SIGSTOP for one of the workers, with everything it holds.
    WorkerHalted,
    /// SIGTERM for one of the workers, and another in its place at the same moment.
    WorkerReplaced,
    /// kill -9 for all of them: until one is started again there is nobody to close anything.
    EveryWorkerKilled,
    /// Alarms are thrown away where they wait.
    QueuePurged,
    /// The processing queue is deleted under its consumers.
    QueueDeleted,
    /// A delay queue is deleted with its alarms; `setup` declares it again.
    DelayQueueDeleted,
    /// Every alarm that waits is sent a second and a third time.
    AlarmsDoubled,
    /// What is no alarm, or one for no order, or for an order paid or closed long ago.
    GarbageSent,
}

/// What a fault touches. Two that overlap touch different things.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    Broker,
    Database,
    Rows,
    Workers,
    Messages,
}

/// Whose close may be late, until one second after the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Excuses {
    /// Whatever happens to the broker, to messages, or to one worker of two: the sweep closes within a second.
    Nobody,
    /// Without a database, or without any worker, nothing can be closed.
    Everybody,
    /// The orders whose rows, or whose article's row, somebody holds.
    TheLocked,
}

impl Kind {
    pub const ALL: [Self; 30] = [
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
    ];

    pub fn subject(self) -> Subject {
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
            | Self::BrokerHalfClosed => Subject::Broker,
            Self::DatabaseKilled
            | Self::DatabaseRestarted
            | Self::DatabaseHalted
            | Self::DatabaseReadOnly
            | Self::DatabaseEndsSessions
            | Self::DatabaseCutOff
            | Self::DatabaseStalled
            | Self::DatabaseAnswersLost
            | Self::DatabaseFarAway => Subject::Database,
            Self::OrdersLocked | Self::StockLocked => Subject::Rows,
            Self::WorkerKilled | Self::WorkerHalted | Self::WorkerReplaced | Self::EveryWorkerKilled => {
                Subject::Workers
            }
            Self::QueuePurged
            | Self::QueueDeleted
            | Self::DelayQueueDeleted
            | Self::AlarmsDoubled
            | Self::GarbageSent => Subject::Messages,
        }
    }

    /// Strict on purpose. A database that is slow, or that loses one answer, is there: it excuses nobody.
    pub fn excuses(self) -> Excuses {
        match self {
            Self::DatabaseKilled
            | Self::DatabaseRestarted
            | Self::DatabaseHalted
            | Self::DatabaseReadOnly
            | Self::DatabaseEndsSessions
            | Self::DatabaseCutOff
            | Self::DatabaseStalled
            | Self::EveryWorkerKilled => Excuses::Everybody,
            Self::OrdersLocked | Self::StockLocked => Excuses::TheLocked,
            Self::DatabaseAnswersLost | Self::DatabaseFarAway => Excuses::Nobody,
            Self::WorkerKilled | Self::WorkerHalted | Self::WorkerReplaced => Excuses::Nobody,
            Self::BrokerKilled
            | Self::BrokerStopped
            | Self::BrokerHalted
            | Self::BrokerOutOfMemory
            | Self::BrokerClosesConnections
            | Self::BrokerCutOff
            | Self::BrokerDeaf
            | Self::BrokerMute
            | Self::BrokerFarAway
            | Self::BrokerHalfClosed => Excuses::Nobody,
            Self::QueuePurged
            | Self::QueueDeleted
            | Self::DelayQueueDeleted
            | Self::AlarmsDoubled
            | Self::GarbageSent => Excuses::Nobody,
        }
    }

    /// Whether alarms may be gone with it that were safe.
    pub fn throws_alarms_away(self) -> bool {
        matches!(self, Self::QueuePurged | Self::QueueDeleted | Self::DelayQueueDeleted)
    }

    /// As it stands in the report: `broker_killed`.
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

    /// How long it lasts at most, its undoing not counted.
    fn longest(self) -> Duration {
        match self {
            // Long enough for both workers to give up their sessions and try several times.
            Self::BrokerHalted | Self::BrokerDeaf | Self::BrokerMute => Duration::from_secs(7),
            // Longer than a worker's timeout with one statement.
            Self::DatabaseHalted | Self::DatabaseStalled => Duration::from_secs(7),
            _ => Duration::from_secs(4),
        }
    }

    fn may_overlap(self, other: Self) -> bool {
        let subjects = [self.subject(), other.subject()];
        let touches = |subject| subjects.contains(&subject);
        // Without any worker everything else would go unseen.
        let leaves_a_worker = self != Self::EveryWorkerKilled && other != Self::EveryWorkerKilled;
        let needs = |what, whom| touches(what) && touches(whom);
        leaves_a_worker
            && self.subject() != other.subject()
            && !needs(Subject::Rows, Subject::Database)
            && !needs(Subject::Messages, Subject::Broker)
            && !needs(Subject::Messages, Subject::Database)
    }
}

/// One fault of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    pub kind: Kind,
    /// How long after the step begins.
    pub after: Duration,
    /// How long it lasts before it is undone.
    pub hold: Duration,
    /// Which worker, article, queue: reduced by whoever has so many of them.
    pub choice: usize,
}

/// A calm, and then one fault or two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub calm: Duration,
    pub faults: Vec<Fault>,
}

/// Effects without end. Kinds are dealt like cards, so that each comes once before any comes again.
#[derive(Debug)]
pub struct Plan {
    rng: Rng,
    deck: Vec<Kind>,
}

impl Plan {
    pub fn of(seed: u64) -> Self {
        Self { rng: Rng::with_seed(seed), deck: Vec::new() }
    }

    fn deal(&mut self) -> Kind {
        if self.deck.is_empty() {
            self.deck = Kind::ALL.to_vec();
            self.rng.shuffle(&mut self.deck);
        }
        self.deck.pop().expect("a deck just filled")
    }

    /// The next card that goes with this one, if the deck still has one.
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
        Plan::of(seed).take(steps).collect()
    }

    #[test]
    fn seed_determines_plan() {
        assert_eq!(first(7, 200), first(7, 200));
        assert_ne!(first(7, 200), first(8, 200));
        // Written down, so that a seed of last year still means what it meant.
        let kinds: Vec<String> =
            first(1, 4).iter().flat_map(|step| &step.faults).map(|fault| fault.kind.name()).collect();
        assert_eq!(kinds, FIRST_OF_SEED_1);
    }

    const FIRST_OF_SEED_1: [&str; 5] =
        ["orders_locked", "queue_deleted", "broker_out_of_memory", "database_read_only", "broker_killed"];

    #[test]
    fn every_kind_occurs_before_any_repeats() {
        for seed in 0..50 {
            let faults: Vec<Kind> =
                first(seed, 200).iter().flat_map(|step| &step.faults).map(|fault| fault.kind).collect();
            for round in faults.chunks_exact(Kind::ALL.len()) {
                assert_eq!(round.iter().collect::<BTreeSet<_>>().len(), Kind::ALL.len(), "seed {seed}");
            }
        }
    }

    #[test]
    fn kinds_are_listed_once_with_distinct_names() {
        assert_eq!(Kind::ALL.iter().collect::<BTreeSet<_>>().len(), Kind::ALL.len());
        assert_eq!(Kind::ALL.map(Kind::name).iter().collect::<BTreeSet<_>>().len(), Kind::ALL.len());
        assert_eq!(Kind::BrokerOutOfMemory.name(), "broker_out_of_memory");
    }

    #[test]
    fn simultaneous_faults_have_different_targets() {
        let steps: Vec<Step> = (0..50).flat_map(|seed| first(seed, 100)).collect();
        let pairs: Vec<&Step> = steps.iter().filter(|step| step.faults.len() == 2).collect();
        assert!(pairs.len() * 10 > steps.len(), "{} of {} steps", pairs.len(), steps.len());
        for pair in pairs {
            let [one, other] = [pair.faults[0], pair.faults[1]];
            assert_ne!(one.kind.subject(), other.kind.subject());
            assert!(other.after <= one.hold);
        }
    }

    #[test]
    fn broker_faults_excuse_no_late_close() {
        for kind in Kind::ALL {
            if matches!(kind.subject(), Subject::Broker | Subject::Messages) {
                assert_eq!(kind.excuses(), Excuses::Nobody, "{kind:?}");
            }
        }
    }

    #[test]
    fn twenty_minutes_contain_hundred_faults() {
        for seed in 0..20 {
            let steps = first(seed, 100);
            let planned: Duration = steps.iter().map(|step| step.calm + step.faults[0].hold).sum();
            // What is left goes to starting servers again.
            assert!(planned < Duration::from_secs(10 * 60), "{planned:?}");
        }
    }
}
