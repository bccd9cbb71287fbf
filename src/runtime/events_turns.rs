//! When events are announced while closers are busy: not in a burst, but at the latest after some seconds.
//!
//! Pure: told the load and the time.

use std::time::Duration;

use tokio::time::Instant;

use crate::give_way::Load;

/// How long events wait for busy closers: enough for 100 000 orders on a slow machine. After that both run side by side.
const TURN: Duration = Duration::from_secs(5);
/// The same while other kinds are idle: their events do not wait for a flood, or for a locked table, of one kind.
const TURN_BESIDE_IDLE_KINDS: Duration = Duration::from_millis(500);

/// Events wait for a burst of closes, but not forever: under a continuous load they get every other turn, or the outbox
/// would grow for as long as the load lasts. Alarms do not wait.
#[derive(Debug, Default)]
pub(super) struct EventsTurns {
    /// Since when events may be waiting.
    waiting_since: Option<Instant>,
    /// The events' turn: they are sent even if closers are busy.
    lasts_until: Option<Instant>,
}

impl EventsTurns {
    pub fn is_turn_of_events(&mut self, load: Load, now: Instant) -> bool {
        if self.lasts_until.is_some_and(|end| now < end) {
            return true;
        }
        let since = *self.waiting_since.get_or_insert(now);
        let longest = match load {
            Load::Idle => return true,
            Load::SomeKinds => TURN_BESIDE_IDLE_KINDS,
            Load::AllKinds => TURN,
        };
        if now - since < longest {
            return false;
        }
        *self = Self { waiting_since: None, lasts_until: Some(now + TURN) };
        true
    }

    /// The waiting events were sent, or they were refused and have a pause of their own.
    pub fn begin_anew(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At which of the polls, at this interval, it is the events' turn.
    fn found(looks: impl Iterator<Item = Load>, apart: Duration) -> Vec<bool> {
        let (mut turns, mut now) = (EventsTurns::default(), Instant::now());
        let look = |load| {
            now += apart;
            turns.is_turn_of_events(load, now)
        };
        looks.map(look).collect()
    }

    #[test]
    fn busy_closers_leave_every_other_turn() {
        let expected: Vec<bool> = (0..100).map(|tenth| tenth / 10 % 2 == 1).collect();
        assert_eq!(found(std::iter::repeat_n(Load::AllKinds, 100), TURN / 10), expected);
    }

    #[test]
    fn flood_of_one_kind_delays_briefly() {
        let apart = TURN_BESIDE_IDLE_KINDS / 5;
        let found = found(std::iter::repeat_n(Load::SomeKinds, 1_000), apart);
        let longest_wait = found.split(|is_turn| *is_turn).map(<[bool]>::len).max();
        assert_eq!(longest_wait, Some(5));
    }

    #[test]
    fn briefly_idle_closers_leave_as_much() {
        let found = found((0..1_000).map(|look| if look % 7 != 0 { Load::AllKinds } else { Load::Idle }), TURN / 10);
        let of_events = found.iter().filter(|is_turn| **is_turn).count();
        assert!(of_events >= 500, "{of_events} of 1000");
    }

    #[test]
    fn rare_polls_get_turns_as_often() {
        let found = found(std::iter::repeat_n(Load::AllKinds, 100), 2 * TURN);
        assert_eq!(found.iter().filter(|is_turn| **is_turn).count(), 50);
    }

    #[test]
    fn burst_passes_first_if_outbox_empty() {
        let (mut turns, begin) = (EventsTurns::default(), Instant::now());
        assert!(turns.is_turn_of_events(Load::Idle, begin));
        turns.begin_anew();
        assert!(!turns.is_turn_of_events(Load::AllKinds, begin + TURN));
        assert!(!turns.is_turn_of_events(Load::AllKinds, begin + 2 * TURN - TURN / 10));
        assert!(turns.is_turn_of_events(Load::AllKinds, begin + 2 * TURN));
    }
}
