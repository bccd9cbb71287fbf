//! What trips the brake, and what does not.

use proptest::prelude::*;

use super::*;

const BOUNDS: Bounds = Bounds { times_usual: 5, floor: 1_000 };

/// A shop that closes `closed` orders in each minute before `now`, of which alarms found `paid` more paid.
fn history(now: Minute, closed: u64, paid: u64) -> Vec<MinuteCounts> {
    let of = |minute| MinuteCounts { minute, closed, woken: Woken { closed, paid }, ..Default::default() };
    (now - 2_000..now - 120).map(of).collect()
}

fn usual(closed: u64, paid: u64) -> Usual {
    Usual::of(&history(10_000, closed, paid), 10_000)
}

fn judge(minutes: &[MinuteCounts], usual: &Usual) -> Result<Option<u64>, Trip> {
    Window { minutes, now: 10_000, resumed_in: None }.judge(usual, &BOUNDS)
}

#[test]
fn usual_needs_history() {
    let new = Usual::of(&[MinuteCounts { minute: 1, closed: 100_000, ..Default::default() }], 10_000);
    assert_eq!(new, Usual::default());
    assert_eq!(new.most_unforeseen(&BOUNDS), None, "a new shop has no limit");
    let known = usual(300, 700);
    assert_eq!((known.closes_per_minute, known.paid_share), (Some(300.0), Some(0.7)));
    assert_eq!(known.most_unforeseen(&BOUNDS), Some(1_500));
    assert_eq!(usual(1, 1).most_unforeseen(&BOUNDS), Some(1_000), "the floor");
    let share = |closed, paid| Woken { closed, paid }.usual_share();
    assert_eq!((share(60, 140), share(60, 139)), (Some(0.7), None), "two hundred orders tell it");
    assert_eq!((share(9_980, 20), share(9_981, 19)), (Some(0.002), None), "and twenty paid ones");
}

#[test]
fn unforeseen_closes_trip() {
    let due_at_once = MinuteCounts { minute: 10_000, closed: 1_501, unforeseen: 1_501, ..Default::default() };
    let trip = judge(&[due_at_once], &usual(300, 700)).unwrap_err();
    assert!(trip.0.contains("1501 orders") && trip.0.contains("usually 300"), "{trip:?}");
    assert_eq!(judge(&[due_at_once], &Usual::default()), Ok(None));
    let spread = [9_999, 10_000].map(|minute| MinuteCounts { minute, unforeseen: 751, ..Default::default() });
    assert!(judge(&spread, &usual(300, 700)).is_err(), "over the turn of a minute");
    let slower = [9_990, 10_000].map(|minute| MinuteCounts { minute, unforeseen: 1_499, ..Default::default() });
    assert_eq!(judge(&slower, &usual(300, 700)), Ok(Some(2)));
}

#[test]
fn foreseen_flash_sale_does_not_trip() {
    let foreseen = MinuteCounts { minute: 10_001, foreseen: Some(100_000), ..Default::default() };
    assert_eq!(judge(&[foreseen], &usual(300, 700)), Ok(Some(101_501)));
    assert_eq!(unforeseen(100_000, 100_000, Some(100_000)), 0);
    assert_eq!(unforeseen(10, 100_005, Some(100_000)), 5, "the last five");
    assert_eq!(unforeseen(10, 10, None), 10);
}

#[test]
fn resumed_window_is_not_judged_again() {
    let minutes = [MinuteCounts { minute: 9_999, unforeseen: 9_000, ..Default::default() }];
    let window = Window { minutes: &minutes, now: 10_000, resumed_in: Some(9_999) };
    assert_eq!(window.judge(&usual(300, 700), &BOUNDS), Ok(Some(1_501)));
    assert!(judge(&minutes, &usual(300, 700)).is_err());
}

#[test]
fn minutes_of_wrong_clock_are_not_judged() {
    let ahead = MinuteCounts {
        minute: 10_060,
        unforeseen: 9_000,
        answers: ProviderCounts { asked: 9_000, paid: 9_000, unknown: 0 },
        ..Default::default()
    };
    let usual = Usual { paid_at_provider: Some(0.1), ..usual(300, 700) };
    let judge = |now| Window { minutes: &[ahead], now, resumed_in: Some(9_999) }.judge(&usual, &BOUNDS);
    assert!(judge(10_060).is_err(), "while the clock was an hour ahead");
    assert_eq!(judge(10_000), Ok(Some(1_501)), "it was set back, and closing was resumed");
}

#[test]
fn gap_without_worker_is_foreseen() {
    let usual = usual(300, 700);
    assert_eq!(foreseen_of_gap(Some(9_998), 10_000, &usual, &BOUNDS), vec![], "a restart");
    let gap = foreseen_of_gap(Some(9_990), 10_000, &usual, &BOUNDS);
    assert_eq!((gap.len(), gap[0], gap[8]), (9, (9_991, 1_500), (9_999, 1_500)));
    assert_eq!(foreseen_of_gap(Some(0), 10_000, &usual, &BOUNDS).len(), 120, "not of a whole year");
}

#[test]
fn other_workers_counts_are_taken_once() {
    let woken = |closed, paid| Woken { closed, paid };
    let of = |minute, woken| MinuteCounts { minute, woken, ..Default::default() };
    // A clock that was ahead has counted in a minute that has not come.
    let mut minutes =
        [of(9_998, woken(9, 9)), of(9_999, woken(5, 1)), of(10_000, woken(7, 2)), of(10_060, woken(80, 0))];
    let mut others = OtherWorkers::default();
    let mut found =
        |minutes: &[MinuteCounts], now, own| others.found(&Window { minutes, now, resumed_in: Some(9_900) }, &own);
    assert_eq!(found(&minutes, 10_000, woken(3, 0)), woken(9, 3), "a restarted worker knows two minutes");
    minutes[2].woken = woken(17, 4);
    assert_eq!(found(&minutes, 10_000, woken(6, 2)), woken(4, 0));
    assert_eq!(found(&minutes, 10_001, woken(0, 0)), woken(0, 0), "a minute without orders");
    let resumed = Window { minutes: &minutes, now: 10_000, resumed_in: Some(10_000) };
    assert_eq!(OtherWorkers::default().found(&resumed, &woken(0, 0)), woken(0, 0), "closing was resumed since");
}

#[test]
fn providers_answers_trip() {
    let trips = |asked, paid, unknown| provider_trip(&ProviderCounts { asked, paid, unknown }, Some(0.02)).is_some();
    assert!(trips(100, 0, 67), "unknown for most");
    assert!(!trips(100, 0, 60), "one of two providers is dead");
    assert!(trips(100, 31, 0), "callbacks are missing");
    assert!(!trips(99, 0, 99), "too few");
    assert!(!trips(1_000, 250, 400), "a bad day");
}

fn answers(minutes: std::ops::RangeInclusive<Minute>, asked: u64, paid: u64, unknown: u64) -> Vec<MinuteCounts> {
    let answers = ProviderCounts { asked, paid, unknown };
    minutes.map(|minute| MinuteCounts { minute, answers, ..Default::default() }).collect()
}

#[test]
fn unknown_for_minutes_trips() {
    let judge = |minutes: &[MinuteCounts]| judge(minutes, &Usual::default());
    let trip = judge(&answers(9_998..=10_000, 40, 0, 35)).unwrap_err();
    assert!(trip.0.contains("of the last 120 orders") && trip.0.contains("about 105"), "{trip:?}");
    assert_eq!(judge(&answers(9_999..=10_000, 400, 0, 400)), Ok(None), "half a minute, over the turn of one");
    assert_eq!(judge(&answers(9_998..=10_000, 33, 0, 33)), Ok(None), "too few");
    let mut recovered = answers(9_998..=10_000, 400, 0, 400);
    recovered[2].answers.unknown = 100;
    assert_eq!(judge(&recovered), Ok(None));
}

#[test]
fn provider_that_says_paid_trips() {
    let usual = Usual::of(&answers(8_000..=9_900, 10, 1, 0), 10_000);
    assert_eq!(usual.paid_at_provider, Some(0.1));
    let missing = answers(9_999..=10_000, 60, 40, 10);
    let trip = judge(&missing, &usual).unwrap_err();
    assert!(trip.0.contains("80 are paid") && trip.0.contains("usually it is 10.0 %"), "{trip:?}");
    assert_eq!(judge(&missing, &Usual::default()), Ok(None), "it is not known what is usual");
    assert_eq!(judge(&answers(9_999..=10_000, 60, 25, 10), &usual), Ok(None), "up to five times as many");
    let resumed = Window { minutes: &missing, now: 10_000, resumed_in: Some(9_990) };
    assert_eq!(resumed.judge(&usual, &BOUNDS), Ok(None), "they were due when it was resumed");
}

proptest! {
    /// Closes are never counted as foreseen twice, in whatever parts they are reported.
    #[test]
    fn foreseen_is_used_up_once(parts in proptest::collection::vec(0..500_u64, 0..20), foreseen in 0..3_000_u64) {
        let (mut closed, mut not_foreseen) = (0, 0);
        for part in &parts {
            closed += part;
            not_foreseen += unforeseen(*part, closed, Some(foreseen));
        }
        prop_assert_eq!(not_foreseen, closed.saturating_sub(foreseen));
    }
}
