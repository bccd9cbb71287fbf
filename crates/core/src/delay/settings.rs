//! The section `delay` of the settings: strategy, lanes and rings, and the rules for them.
//!
//! Has no defaults: the worker's are in `config/default.toml`, a publisher's in the client's builder. Pure.

use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;

use super::Strategy;
use super::lanes::LANE_TOLERANCE;
use super::wheel::{Ring, Wheel, WheelError};
use crate::duration;
use crate::message::LONGEST_TTL;
use crate::setting::{InvalidSetting, one_of_its_words};

/// In all rings together. Each slot that is in use is a queue, which takes three file descriptors of the broker. Seventy
/// slots cover every delay.
const MAX_SLOTS: usize = 2_000;
/// RabbitMQ closes the channel of a consumer that has not acknowledged for 30 minutes.
const LONGEST_HOLD: Duration = Duration::from_secs(20 * 60);

/// How alarms are delayed.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DelaySettings {
    /// What makes an alarm wait.
    #[serde(deserialize_with = "one_of_its_words")]
    pub strategy: Strategy,
    /// The delays that have queues of their own.
    pub lanes: Vec<Lane>,
    /// Queues for each lane.
    pub lane_shards: u8,
    /// How long before its deadline an alarm is to reach a worker.
    #[serde(deserialize_with = "duration::read")]
    pub lead: Duration,
    /// The furthest deadline that is accepted.
    #[serde(deserialize_with = "duration::read")]
    pub max_delay: Duration,
    /// The rings of the wheel, finest first. A publisher, which does not write into the wheel, has none.
    pub rings: Vec<RingSettings>,
}

/// One ring of the wheel.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RingSettings {
    /// The span of one slot.
    #[serde(deserialize_with = "duration::read")]
    pub unit: Duration,
    /// How many slots there are.
    pub slots: u16,
    /// How long before its unit, and the lead, a slot releases its alarms; a sixth of the unit if absent.
    #[serde(default, deserialize_with = "duration::read_if_given")]
    pub early: Option<Duration>,
}

impl RingSettings {
    /// The ring's name in queue names and routing keys, such as `5s-22`. The number of slots is part of it, because it
    /// decides the queues' TTL, which cannot be changed: a ring of another size has queues of its own, and those of the
    /// former size run empty.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}-{}", duration_name(self.unit), self.slots)
    }
}

/// A standard delay: its length, and its name in queue names and routing keys (`30m`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Lane {
    /// The delay as its largest whole unit.
    pub name: String,
    /// From the order's creation to its deadline.
    pub delay: Duration,
}

/// Why a text names no lane.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{text:?} is not a duration such as 30m ({why})")]
pub struct LaneError {
    text: String,
    why: humantime::DurationError,
}

impl From<Duration> for Lane {
    /// Normalised, so that `1800s` and `30m` name the same queue.
    fn from(delay: Duration) -> Self {
        Self { name: duration_name(delay), delay }
    }
}

impl FromStr for Lane {
    type Err = LaneError;

    fn from_str(text: &str) -> Result<Self, LaneError> {
        let delay = duration::parse(text.trim()).map_err(|why| LaneError { text: text.to_owned(), why })?;
        Ok(delay.into())
    }
}

impl TryFrom<String> for Lane {
    type Error = LaneError;

    fn try_from(text: String) -> Result<Self, LaneError> {
        text.parse()
    }
}

impl Lane {
    /// The longest TTL of an alarm in this lane. A TTL is the delay plus at most the tolerance minus the lead, and a
    /// tolerance above its minimum never exceeds the lead: so this bound holds for every lead, and the lead can be
    /// changed without changing a queue argument.
    #[must_use]
    pub fn longest_ttl(&self) -> Duration {
        self.delay.saturating_add(*LANE_TOLERANCE.start())
    }
}

impl DelaySettings {
    /// Every rule for this section.
    ///
    /// # Errors
    /// [`InvalidSetting`] for the first rule that is broken.
    pub fn validate(&self) -> Result<(), InvalidSetting> {
        self.validate_lanes()?;
        self.validate_rings()
    }

    fn validate_rings(&self) -> Result<(), InvalidSetting> {
        let key = "delay.rings";
        for ring in &self.rings {
            InvalidSetting::within(key, ring.unit, Duration::from_millis(1), LONGEST_TTL)?;
            whole_millis(key, ring.unit)?;
            // A slot's queue expires its messages after at most a whole round.
            InvalidSetting::within(key, ring.unit * u32::from(ring.slots), Duration::ZERO, LONGEST_TTL)?;
            InvalidSetting::within(key, ring.early.unwrap_or_default(), Duration::ZERO, LONGEST_TTL)?;
        }
        let slots: usize = self.rings.iter().map(|ring| usize::from(ring.slots)).sum();
        if slots > MAX_SLOTS {
            let why = format!(
                "{slots} slots are more than {MAX_SLOTS}, and each is a queue; give the rings fewer, the coarser ones with longer units"
            );
            return Err(InvalidSetting::new(key, why));
        }
        self.wheel().map_err(|fault| InvalidSetting::new(key, fault))?;
        if self.rings[0].early.is_some() {
            let why = "the finest ring has an early, which would be ignored, because that ring's slots expire delay.lead before their unit; leave it out";
            return Err(InvalidSetting::new(key, why));
        }
        Ok(())
    }

    /// Checks that alarms from the finest ring can be held until their deadline.
    ///
    /// # Errors
    /// [`InvalidSetting`] says how much time there must be.
    ///
    /// # Panics
    /// If there is no ring, which [`DelaySettings::validate`] refuses.
    pub fn validate_hold(&self, hold_max: Duration) -> Result<(), InvalidSetting> {
        // An alarm from the finest ring is due at most lead + one unit later; two seconds are for its delivery.
        let finest = self.rings[0].unit;
        let least_hold = self.lead + finest + Duration::from_secs(2);
        if least_hold > LONGEST_HOLD {
            let [finest, longest] = [finest, LONGEST_HOLD].map(humantime::format_duration);
            let why = format!(
                "the finest ring's unit {finest} would make alarms wait in the worker for over {longest}; begin with a finer ring"
            );
            return Err(InvalidSetting::new("delay.rings", why));
        }
        if hold_max < least_hold {
            let [hold_max, least_hold] = [hold_max, least_hold].map(humantime::format_duration);
            let why = format!(
                "{hold_max} is shorter than delay.lead + the finest ring's unit + 2s = {least_hold}; alarms would circulate through the wheel instead of waiting in the worker"
            );
            return Err(InvalidSetting::new("worker.hold_max", why));
        }
        InvalidSetting::within("worker.hold_max", hold_max, Duration::ZERO, LONGEST_HOLD)
    }

    /// Checks that no retry waits longer than the wheel's furthest slot: it would come back early, and fail again
    /// early.
    ///
    /// # Errors
    /// [`InvalidSetting`] says how long the rings can keep an alarm.
    pub fn validate_longest_retry(&self, longest_retry: Duration) -> Result<(), InvalidSetting> {
        let key = "delay.rings";
        let kept = self.wheel().map_err(|fault| InvalidSetting::new(key, fault))?.longest_wait();
        if longest_retry <= kept {
            return Ok(());
        }
        let [wanted, kept] = [longest_retry, kept].map(humantime::format_duration);
        let why = format!(
            "the rings can keep an alarm waiting for {kept} at most (5/6 · slots · unit, less one unit), but a retry waits for up to 32 times retry.longest = {wanted}; add a coarser ring, give the last one more slots, or make retry.longest shorter"
        );
        Err(InvalidSetting::new(key, why))
    }

    /// The wheel that the rings form.
    ///
    /// # Errors
    /// [`WheelError`] if they do not mesh.
    pub fn wheel(&self) -> Result<Wheel, WheelError> {
        let rings = self.rings.iter().enumerate().map(|(index, ring)| Ring {
            name: ring.name(),
            unit: ring.unit,
            slots: ring.slots,
            // The finest ring hands over to the worker's hold; each coarser ring to the next finer one, which must have
            // received everything before its own slot expires.
            early: if index == 0 { self.lead } else { self.lead.saturating_add(ring.early.unwrap_or(ring.unit / 6)) },
        });
        Wheel::new(rings.collect())
    }
}

/// The broker counts in milliseconds, and so do queue names: two durations that differ by less would be the same queue.
pub(super) fn whole_millis(key: &str, value: Duration) -> Result<(), InvalidSetting> {
    if value.subsec_nanos().is_multiple_of(1_000_000) {
        return Ok(());
    }
    let value = humantime::format_duration(value);
    Err(InvalidSetting::new(key, format!("{value} is not a whole number of milliseconds")))
}

/// The name of a duration in queue names and routing keys: its largest whole unit, such as `90s`, `30m`, `2h`.
#[must_use]
pub fn duration_name(duration: Duration) -> String {
    let millis = duration.as_millis();
    for (unit, in_millis) in [("h", 3_600_000), ("m", 60_000), ("s", 1_000)] {
        if millis >= in_millis && millis.is_multiple_of(in_millis) {
            return format!("{}{unit}", millis / in_millis);
        }
    }
    format!("{millis}ms")
}
