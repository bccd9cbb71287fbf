//! This worker's row in `order_timeout_workers`, and the comparison with the rows of other workers.
//!
//! Writes and deletes only its own row and those of workers that have been gone for a minute.

use std::collections::{BTreeMap, BTreeSet};

use order_timeout_core::engine::Share;
use order_timeout_core::kind::Kind;
use order_timeout_core::problem::{Cause, Problem};
use serde::Deserialize;
use serde_json::Value;
use sqlx::types::Json;
use uuid::Uuid;

use super::listed;
use crate::config::Settings;
use crate::config::kinds::OrdersOf;
use crate::postgres::Database;

/// Registers this worker and deletes those that are long gone. `$1` id, `$2` host, `$3` pid, `$4` version, `$5` namespace,
/// `$6` delays, `$7` kinds, `$8` problems. Whether a worker lives is a matter of Postgres' own clock, which no test moves.
const REGISTER: &str = "
WITH gone AS (
    DELETE FROM order_timeout_workers WHERE id IN (
        SELECT id FROM order_timeout_workers
        WHERE last_seen < pg_catalog.clock_timestamp() - interval '1 minute' AND id <> $1 FOR UPDATE SKIP LOCKED)
)
INSERT INTO order_timeout_workers (id, host, pid, version, namespace, delays, kinds, problems)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (id) DO UPDATE SET last_seen = pg_catalog.clock_timestamp(), kinds = $7, problems = $8";

/// The live ones. `$1` is the id of this one. A worker that has not been seen for ten seconds, three of its heartbeats, has
/// ended.
const OTHERS: &str = "
SELECT to_jsonb(w) FROM order_timeout_workers AS w
WHERE id <> $1 AND last_seen > pg_catalog.clock_timestamp() - interval '10 s' ORDER BY started_at, id";

/// What only a running worker can find.
pub const FOUND_BY_WORKERS: [Cause; 6] = [
    Cause::TimeZone,
    Cause::KindNotStarted,
    Cause::Reminders,
    Cause::AlarmsNotArriving,
    Cause::AlarmsCirculate,
    Cause::UnreadableMessage,
];

/// The settings of a worker that must agree, by name.
type Delays = BTreeMap<String, String>;

/// A registered worker.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Entry {
    id: Uuid,
    host: String,
    pid: i32,
    namespace: String,
    delays: Delays,
    /// The kinds whose engines run there.
    kinds: Vec<String>,
    /// What it has found that only a worker can find. Another version may know other causes.
    problems: Vec<Value>,
}

impl Entry {
    fn serves(&self, kind: &Kind) -> bool {
        self.kinds.iter().any(|served| served == kind.as_str())
    }
}

/// This worker's registration, or the doctor's look at those of others.
#[derive(Debug)]
pub struct Registration {
    database: Database,
    own: Entry,
    /// Those of the settings.
    kinds: BTreeSet<Kind>,
    /// Those that this worker is to serve.
    expected: BTreeSet<Kind>,
}

/// The live workers of a schema besides this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registered {
    own: Entry,
    others: Vec<Entry>,
    kinds: BTreeSet<Kind>,
    expected: BTreeSet<Kind>,
}

impl Registered {
    /// Those of its namespace.
    fn peers(&self) -> impl Iterator<Item = &Entry> {
        self.others.iter().filter(|other| other.namespace == self.own.namespace)
    }

    /// How many of its namespace there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.peers().count()
    }

    /// How many of them serve this kind.
    #[must_use]
    pub fn serving(&self, kind: &Kind) -> usize {
        self.peers().filter(|peer| peer.serves(kind)).count()
    }

    /// How other workers on this schema differ, if they do.
    #[must_use]
    pub fn disagreement(&self) -> Option<Problem> {
        disagreement(&self.own, &self.others)
    }

    /// The orders of this kind that this worker reads ahead, among the live workers of its namespace that serve the kind.
    /// Their ids are an order on which all of them agree.
    #[must_use]
    pub fn share_of(&self, kind: &Kind) -> Share {
        let peers = self.peers().filter(|peer| peer.serves(kind));
        let (before, behind): (Vec<&Entry>, Vec<&Entry>) = peers.partition(|other| other.id < self.own.id);
        let count = |entries: Vec<&Entry>| u32::try_from(entries.len()).unwrap_or(0);
        let (index, behind) = (count(before), count(behind));
        Share::new(index, index + 1 + behind)
    }

    /// The kinds of the settings that no live worker of the namespace serves. A kind that this worker is to serve and cannot
    /// start is reported as that.
    #[must_use]
    pub fn unserved(&self) -> BTreeSet<Kind> {
        let is_unserved = |kind: &&Kind| !self.expected.contains(kind) && self.serving(kind) == 0;
        self.kinds.iter().filter(is_unserved).cloned().collect()
    }

    /// What those of its namespace have found, each problem once.
    #[must_use]
    pub fn found(&self) -> Vec<Problem> {
        let mut found = BTreeMap::new();
        for Entry { host, pid, problems, .. } in self.peers() {
            for problem in problems.iter().filter_map(|value| serde_json::from_value::<Problem>(value.clone()).ok()) {
                let what = format!("{} (host {host}, pid {pid})", problem.what);
                found.entry((problem.cause, problem.kind.clone())).or_insert(Problem { what, ..problem });
            }
        }
        found.into_values().collect()
    }
}

/// The problem of a kind that no worker serves.
#[must_use]
pub fn not_served(kind: &Kind) -> Problem {
    Problem::new(
        Cause::KindNotServed,
        format!("no worker serves the kind {kind}, which is in the settings"),
        format!(
            "start a worker that has its orders (kinds.{kind}.table, or its close_sql and overdue_sql) and names it in worker.kinds if that is set, or remove [kinds.{kind}]"
        ),
    )
}

impl Registration {
    /// A worker with these settings. Writes nothing yet.
    #[must_use]
    pub fn new(database: Database, settings: &Settings) -> Self {
        let own = Entry {
            id: Uuid::now_v7(),
            host: host(),
            pid: i32::try_from(std::process::id()).unwrap_or_default(),
            namespace: settings.namespace.clone(),
            delays: delays(settings),
            kinds: Vec::new(),
            problems: Vec::new(),
        };
        Self { database, own, kinds: settings.all_kinds(), expected: settings.served_kinds() }
    }

    /// Registers this worker, or renews its registration. `active`: the kinds whose engines run now. Of `problems`, those
    /// that only a worker can find are written.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn register(
        &self,
        active: &BTreeSet<Kind>,
        mut problems: Vec<Problem>,
    ) -> Result<Registered, sqlx::Error> {
        problems.retain(|problem| FOUND_BY_WORKERS.contains(&problem.cause));
        let register = sqlx::query(REGISTER)
            .bind(self.own.id)
            .bind(&self.own.host)
            .bind(self.own.pid)
            .bind(env!("CARGO_PKG_VERSION"))
            .bind(&self.own.namespace)
            .bind(Json(&self.own.delays))
            .bind(active.iter().map(Kind::to_string).collect::<Vec<_>>())
            .bind(Json(problems));
        self.database.run(async |connection| register.execute(connection).await).await?;
        Ok(Registered { expected: self.expected.clone(), ..self.look().await? })
    }

    /// The live workers, as one sees them that serves no kind. Writes nothing.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn look(&self) -> Result<Registered, sqlx::Error> {
        let select = sqlx::query_scalar(OTHERS).bind(self.own.id);
        let others: Vec<Json<Entry>> = self.database.run(async |connection| select.fetch_all(connection).await).await?;
        let others = others.into_iter().map(|Json(entry)| entry).collect();
        Ok(Registered { own: self.own.clone(), others, kinds: self.kinds.clone(), expected: BTreeSet::new() })
    }

    /// Removes the registration of a worker that stops.
    ///
    /// # Errors
    /// sqlx's; the row then counts as gone a few seconds later.
    pub async fn leave(&self) -> Result<(), sqlx::Error> {
        let leave = sqlx::query("DELETE FROM order_timeout_workers WHERE id = $1").bind(self.own.id);
        self.database.run(async |connection| leave.execute(connection).await).await.map(drop)
    }
}

/// The settings that must be the same for all workers.
fn delays(settings: &Settings) -> Delays {
    let delay = &settings.delay;
    let lanes: Vec<&str> = delay.lanes.iter().map(|lane| lane.name.as_str()).collect();
    let rings: Vec<String> = delay
        .rings
        .iter()
        .map(|ring| {
            let early = ring.early.map_or_else(String::new, |early| format!(", {early:?} early"));
            format!("{} of {:?}{early}", ring.slots, ring.unit)
        })
        .collect();
    let of_kinds = settings
        .lanes()
        .iter()
        .filter(|(kind, _)| !kind.is_default())
        .map(|(kind, lanes)| {
            let lanes: Vec<&str> = lanes.lanes.iter().map(|lane| lane.name.as_str()).collect();
            (format!("kinds.{kind}.lanes"), lanes.join(", "))
        })
        .collect::<Vec<_>>();
    let of_all = [
        ("delay.strategy", delay.strategy.as_str().to_owned()),
        ("delay.lanes", lanes.join(", ")),
        ("delay.lane_shards", delay.lane_shards.to_string()),
        ("delay.lead", format!("{:?}", delay.lead)),
        ("delay.rings", rings.join("; ")),
        ("worker.shards", settings.worker.shards.to_string()),
        ("kinds", settings.all_kinds().iter().map(Kind::to_string).collect::<Vec<_>>().join(", ")),
    ]
    .map(|(name, value)| (name.to_owned(), value));
    // Two workers that close a kind in different tables: each would close orders that the other one's alarms name.
    let orders = settings.served_kinds().into_iter().map(|kind| {
        let place = match settings.orders_of(&kind) {
            Some(OrdersOf::Table(table)) if table.is_built_in => "the default tables".to_owned(),
            Some(OrdersOf::Table(table)) => format!("the table {}", table.table),
            Some(OrdersOf::Statements { .. }) => "statements of its own".to_owned(),
            Some(OrdersOf::Handler) => "a handler of its own".to_owned(),
            None => "none".to_owned(),
        };
        (format!("orders of the kind {kind} in"), place)
    });
    // Orders that are claimed wait for a worker that can ask their provider.
    let asking = settings.served_kinds().into_iter().filter(|kind| settings.claims_orders(kind));
    let providers = asking.flat_map(|kind| {
        let providers = settings.provider_settings_of(&kind).0;
        let names = providers.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let urls =
            providers.iter().map(|(name, settings)| (format!("providers.{name}.url"), settings.url().to_owned()));
        [(format!("kinds.{kind}.providers"), names)].into_iter().chain(urls).collect::<Vec<_>>()
    });
    of_all.into_iter().chain(of_kinds).chain(orders).chain(providers).collect()
}

pub(crate) fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "(unknown)".to_owned() } else { name.to_owned() }
}

fn disagreement(own: &Entry, others: &[Entry]) -> Option<Problem> {
    let differing: Vec<String> = others
        .iter()
        .filter_map(|other| {
            let differences = differences(own, other);
            let Entry { host, pid, .. } = other;
            (!differences.is_empty())
                .then(|| format!("the worker on host {host} (pid {pid}) has {}", differences.join(", ")))
        })
        .collect();
    (!differing.is_empty()).then(|| {
        Problem::new(
            Cause::WorkersDisagree,
            listed(&differing),
            "give all workers on this schema the same settings, or use a separate database for the other namespace",
        )
    })
}

/// The differing settings. With another namespace everything else may differ.
fn differences(own: &Entry, other: &Entry) -> Vec<String> {
    if own.namespace != other.namespace {
        let (theirs, ours) = (&other.namespace, &own.namespace);
        return vec![format!(
            "namespace {theirs:?}, this one {ours:?}, and events go to the exchange of one of them only"
        )];
    }
    // A newer or an older version may know other settings.
    let both = other.delays.iter().filter_map(|(name, theirs)| Some((name, theirs, own.delays.get(name)?)));
    both.filter(|(_, theirs, ours)| theirs != ours)
        .map(|(name, theirs, ours)| format!("{name} {theirs:?}, this one {ours:?}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use order_timeout_core::delay::Strategy;

    use super::*;

    fn entry(change: impl FnOnce(&mut Settings)) -> Entry {
        let mut settings = Settings::defaults();
        change(&mut settings);
        Entry {
            id: Uuid::now_v7(),
            host: "shop-2".into(),
            pid: 7,
            namespace: settings.namespace.clone(),
            delays: delays(&settings),
            kinds: settings.served_kinds().iter().map(Kind::to_string).collect(),
            problems: Vec::new(),
        }
    }

    fn registered(own: &Entry, others: &[Entry]) -> Registered {
        let kind = |name: &str| Kind::new(name).unwrap();
        Registered {
            own: own.clone(),
            others: others.to_vec(),
            kinds: [kind("order"), kind("acceptance"), kind("trial")].into(),
            expected: [kind("order")].into(),
        }
    }

    #[test]
    fn equal_workers_agree() {
        let own = entry(|_| {});
        let mut newer = own.clone();
        newer.delays.insert("delay.of_a_later_version".into(), "1".into());
        assert_eq!(disagreement(&own, &[own.clone(), newer]), None);
    }

    #[test]
    fn workers_share_by_their_ids() {
        let [first, second] = [entry(|_| {}), entry(|_| {})];
        let stranger = entry(|settings| settings.namespace = "other".into());
        let share = |own: &Entry, others: &[Entry]| registered(own, others).share_of(&Kind::ORDER);
        assert_eq!(share(&first, &[]), Share::ALL);
        assert_eq!(share(&first, &[stranger.clone(), second.clone()]), Share::new(0, 2));
        assert_eq!(share(&second, &[first.clone(), stranger]), Share::new(1, 2));
        let of_another_kind = Entry { kinds: vec!["acceptance".into()], ..second };
        assert_eq!(share(&first, &[of_another_kind]), Share::ALL);
    }

    fn sentence(own: &Entry, others: &[Entry]) -> String {
        disagreement(own, others).unwrap().sentence()
    }

    #[test]
    fn difference_names_setting_host_and_pid() {
        let own = entry(|_| {});
        let said = sentence(&own, &[entry(|settings| settings.delay.lead *= 2)]);
        assert!(said.contains("host shop-2 (pid 7) has delay.lead \"40s\", this one \"20s\""), "{said}");
        let said = sentence(&own, &[entry(|settings| settings.namespace = "other".into())]);
        assert!(said.contains("namespace \"other\", this one \"order\""), "{said}");
        for change in [
            |settings: &mut Settings| settings.delay.lane_shards += 1,
            |settings: &mut Settings| settings.worker.shards += 1,
            |settings: &mut Settings| settings.delay.strategy = Strategy::DelayedExchange,
            |settings: &mut Settings| settings.delay.lanes.clear(),
            |settings: &mut Settings| settings.delay.rings.truncate(1),
        ] {
            assert!(disagreement(&own, &[entry(change)]).is_some());
        }
        let with_lane = |lane: &str| {
            entry(|settings| {
                let kind = settings.kinds.entry(Kind::new("acceptance").unwrap()).or_default();
                kind.lanes = vec![lane.parse().unwrap()];
            })
        };
        // It would park the alarms of a kind that it does not know.
        let said = sentence(&own, &[with_lane("5m")]);
        assert!(said.contains("kinds \"order, acceptance\", this one \"order\""), "{said}");
        let said = sentence(&with_lane("5m"), &[with_lane("10m")]);
        assert!(said.contains("kinds.acceptance.lanes \"10m\", this one \"5m\""), "{said}");
        let with_statements = entry(|settings| settings.orders.close_sql = "close.sql".into());
        let said = disagreement(&entry(|_| {}), &[with_statements]).unwrap().sentence();
        let difference = "orders of the kind order in \"statements of its own\", this one \"the default tables\"";
        assert!(said.contains(difference), "{said}");
    }

    #[test]
    fn unserved_kinds_are_those_without_worker() {
        let kind = |name: &str| Kind::new(name).unwrap();
        let (own, other) = (entry(|_| {}), Entry { kinds: vec!["acceptance".into()], ..entry(|_| {}) });
        let stranger = Entry { kinds: vec!["trial".into()], ..entry(|settings| settings.namespace = "other".into()) };
        assert_eq!(registered(&own, &[other, stranger]).unserved(), [kind("trial")].into());
        assert_eq!(registered(&own, &[]).unserved(), [kind("acceptance"), kind("trial")].into());
    }
}
