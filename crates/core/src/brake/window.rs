//! How many orders are closed, beside the usual number and what was known to fall due. More than both means a wrong clock,
//! or a deploy or migration that made orders due.
//!
//! Pure. Judges what all workers have counted together.

use std::ops::RangeBounds;

use super::provider::LEAST_ANSWERS;
use super::{Bounds, Minute, MinuteCounts, ProviderCounts, Trip, Woken, provider_trip};

/// How many minutes with closes make known what is usual.
const LEAST_MINUTES: usize = 60;
/// How many orders, that providers were asked about, make known which share they usually say is paid.
const LEAST_ASKED: u64 = 1_000;
/// A provider that is dead for a minute is none of the brake's business: in each of so many minutes most must be unknown.
const UNKNOWN_FOR: Minute = 3;
/// So many minutes after closing was resumed a provider may still say that orders are paid that were due by then.
const ANSWERED_LATER: Minute = 10;
/// The last minutes do not say what number is usual: they are judged by it.
const NOT_USUAL_YET: Minute = 10;
/// The busiest twentieth of the minutes with closes is averaged.
const BUSIEST_PART: usize = 20;
/// Unforeseen closes of so many minutes are added up, so that the begin of a minute hides none.
const ADDED_UP: Minute = 2;
/// What was foreseen so long ago may still be closed, as after an outage of the broker and the sweep.
const FORESEEN_FOR: Minute = 120;

/// What is usual in this shop.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usual {
    /// Closes in a busy minute; `None` in a shop that has closed in few minutes so far.
    pub closes_per_minute: Option<f64>,
    /// The share of paid orders among those that alarms wake; `None` if it is not known.
    pub paid_share: Option<f64>,
    /// The share of orders that payment providers say are paid; `None` if it is not known.
    pub paid_at_provider: Option<f64>,
}

impl Usual {
    /// What follows from the minutes that were kept.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // far fewer orders than would lose precision
    pub fn of(minutes: &[MinuteCounts], now: Minute) -> Self {
        let earlier = || minutes.iter().filter(move |one| one.minute < now - NOT_USUAL_YET);
        let mut closes: Vec<u64> = earlier().map(|one| one.closed).filter(|closed| *closed > 0).collect();
        closes.sort_unstable_by(|one, other| other.cmp(one));
        let closes_per_minute = (closes.len() >= LEAST_MINUTES).then(|| {
            let busiest = &closes[..(closes.len() / BUSIEST_PART).max(1)];
            busiest.iter().sum::<u64>() as f64 / busiest.len() as f64
        });
        let woken: Woken = minutes.iter().filter(|one| one.minute <= now).sum();
        let mut asked = ProviderCounts::default();
        earlier().for_each(|one| asked.add(&one.answers));
        let paid_at_provider = (asked.asked >= LEAST_ASKED).then(|| asked.paid as f64 / asked.asked as f64);
        Self { closes_per_minute, paid_share: woken.usual_share(), paid_at_provider }
    }

    /// The most closes in a minute that need not have been foreseen; `None` while the usual number is not known.
    #[must_use]
    pub fn most_unforeseen(&self, bounds: &Bounds) -> Option<u64> {
        // Saturates.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let times = |usual: f64| (usual * f64::from(bounds.times_usual)).ceil() as u64;
        self.closes_per_minute.map(|usual| times(usual).max(u64::from(bounds.floor)))
    }
}

/// How many of `added` closes were not foreseen, of orders that fall due in a minute of which `closed_of_due` orders are
/// closed now.
#[must_use]
pub fn unforeseen(added: u64, closed_of_due: u64, foreseen: Option<u64>) -> u64 {
    let left = foreseen.unwrap_or(0).saturating_sub(closed_of_due.saturating_sub(added));
    added.saturating_sub(left)
}

/// The last two hours, as all workers have counted them.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    /// Any order.
    pub minutes: &'a [MinuteCounts],
    /// The present minute.
    pub now: Minute,
    /// The minute in which closing was last resumed; it and what is before it are not judged.
    pub resumed_in: Option<Minute>,
}

impl Window<'_> {
    /// Judges the window. Returns how many orders may be closed before the next judgement; `None`: any number.
    ///
    /// # Errors
    /// [`Trip`] if closing must pause.
    pub fn judge(&self, usual: &Usual, bounds: &Bounds) -> Result<Option<u64>, Trip> {
        self.judge_unknown().map_or(Ok(()), Err)?;
        self.judge_paid_at_provider(usual).map_or(Ok(()), Err)?;
        let Some(most) = usual.most_unforeseen(bounds) else { return Ok(None) };
        let recent = self.judged().filter(|one| one.minute > self.now - ADDED_UP);
        let unforeseen: u64 = recent.map(|one| one.unforeseen).sum();
        if unforeseen > most {
            let usual = usual.closes_per_minute.unwrap_or_default();
            return Err(Trip(format!(
                "{unforeseen} orders were closed within two minutes that were not known to fall due; in a busy minute it is usually {usual:.0}, and {most} are allowed: is the database's clock right, and were deadlines changed?"
            )));
        }
        // Of orders that fall due in this minute or the next, too: the next judgement may come a second later.
        let due = self.minutes.iter().filter(|one| (self.now - FORESEEN_FOR..=self.now + 1).contains(&one.minute));
        let foreseen: u64 = due.map(|one| one.foreseen.unwrap_or(0).saturating_sub(one.closed_of_due)).sum();
        // One more than allowed, so that the brake trips and closing does not stop without a word.
        Ok(Some(foreseen + (most - unforeseen) + 1))
    }

    fn judged(&self) -> impl Iterator<Item = &MinuteCounts> {
        self.known().filter(|one| self.resumed_in.is_none_or(|resumed| one.minute > resumed))
    }

    /// Without minutes that have not come: a clock that was ahead counted in them, and has been set back. Otherwise what
    /// tripped the brake then would trip it again after each resume, until those minutes are over.
    fn known(&self) -> impl Iterator<Item = &MinuteCounts> {
        self.minutes.iter().filter(|one| one.minute <= self.now)
    }

    /// The last minutes, if there was no answer for most orders in any of them.
    fn judge_unknown(&self) -> Option<Trip> {
        let last = self.now - UNKNOWN_FOR + 1..=self.now;
        let mut all = ProviderCounts::default();
        let mut unknown = 0;
        for one in self.judged().filter(|one| last.contains(&one.minute) && one.answers.most_are_unknown()) {
            all.add(&one.answers);
            unknown += 1;
        }
        if unknown == UNKNOWN_FOR { provider_trip(&all, None) } else { None }
    }

    /// The newest minutes that have enough orders together about which something is known.
    fn judge_paid_at_provider(&self, usual: &Usual) -> Option<Trip> {
        let mut newest: Vec<&MinuteCounts> = self
            .known()
            .filter(|one| self.resumed_in.is_none_or(|resumed| one.minute > resumed + ANSWERED_LATER))
            .collect();
        newest.sort_unstable_by_key(|one| std::cmp::Reverse(one.minute));
        let mut answered = ProviderCounts::default();
        for one in newest {
            answered.add(&ProviderCounts {
                asked: one.answers.asked.saturating_sub(one.answers.unknown),
                unknown: 0,
                ..one.answers
            });
            if answered.asked >= LEAST_ANSWERS {
                break;
            }
        }
        provider_trip(&answered, usual.paid_at_provider)
    }

    /// The orders that alarms woke in these minutes.
    pub(super) fn woken_in(&self, minutes: impl RangeBounds<Minute>) -> Woken {
        self.minutes.iter().filter(|one| minutes.contains(&one.minute)).sum()
    }
}

/// What was foreseen of minutes in which no worker ran: those between `last`, in which one did, and `now`. Otherwise the
/// orders of an outage would look like orders that were made due. `None` of each while the usual number is not known.
#[must_use]
pub fn foreseen_of_gap(last: Option<Minute>, now: Minute, usual: &Usual, bounds: &Bounds) -> Vec<(Minute, u64)> {
    let (Some(last), Some(most)) = (last, usual.most_unforeseen(bounds)) else { return Vec::new() };
    let first = (last + 1).max(now - FORESEEN_FOR);
    if now - last < FORESEEN_GAP { Vec::new() } else { (first..now).map(|minute| (minute, most)).collect() }
}

/// A shorter gap is the restart of a worker.
const FORESEEN_GAP: Minute = 3;
