//! Streams of orders with a fixed seed: a healthy shop never trips the brake, and how many orders of customers who have paid
//! are closed until it trips in one whose callbacks stop. `docs/operating/change.md` has these figures.
//!
//! Tests only. Workers share as `src/effects/brake.rs` does, without its delay.

use super::{Evidence, PaidShare, Woken};

/// Of the figures.
const ORDERS_A_SECOND: u32 = 30;
const DAY_S: u32 = 24 * 3_600;

/// A generator of numbers from 0 to 1 (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn woken(&mut self, orders: u64, share: f64) -> Woken {
        let paid = (0..orders).filter(|_| self.next() < share).count() as u64;
        Woken { closed: orders - paid, paid }
    }
}

/// The most evidence in a week of three orders a second, whose share of paid ones is `swing` of the usual one at noon.
fn strongest_evidence(usual: f64, swing: f64, has_bursts: bool) -> f64 {
    let (share, mut random) = (PaidShare::new(usual), Random(1));
    let (mut evidence, mut strongest) = (Evidence::default(), 0.0_f64);
    for second in 0..7 * DAY_S {
        let by_day = f64::from(second % DAY_S) / f64::from(DAY_S) * std::f64::consts::TAU;
        let paid = (usual * (1.0 + swing * by_day.sin())).min(1.0);
        for _ in 0..3 {
            assert_eq!(evidence.add(&share, &random.woken(1, paid)), None, "{usual} at second {second}");
            strongest = strongest.max(evidence.sum);
        }
        if has_bursts && second % 3_600 == 0 {
            for _ in 0..20 {
                assert_eq!(evidence.add(&share, &random.woken(50, usual / 2.0)), None, "a burst at second {second}");
            }
        }
    }
    strongest
}

#[test]
fn healthy_shops_never_trip() {
    for usual in [0.7, 0.5, 0.3] {
        for (swing, has_bursts) in [(0.0, false), (0.3, false), (0.3, true)] {
            let strongest = strongest_evidence(usual, swing, has_bursts);
            assert!(strongest < 8.0, "{strongest} of 15, usual {usual}, swing {swing}, bursts {has_bursts}");
        }
    }
}

/// Orders of customers who have paid that are closed until all workers have stopped, if this share of the callbacks arrives;
/// `None` if none trips within two hours. `usual`: what is known of the share at the begin.
fn wrong_closes(workers: usize, usual: Option<f64>, paid: f64, arrive: impl Fn(f64) -> f64) -> Option<u64> {
    let (mut random, mut all, mut wrong) = (Random(2), Woken::default(), 0);
    let mut known = usual.map(PaidShare::new);
    // Each worker's evidence, what it has not shared, and what it has not been told of the others.
    let mut running = vec![(Evidence::default(), Woken::default(), Woken::default()); workers];
    running.iter_mut().for_each(|(evidence, ..)| evidence.note_shared());
    for order in 0..7_200 * ORDERS_A_SECOND {
        let second = f64::from(order) / f64::from(ORDERS_A_SECOND);
        let customer_paid = random.next() < paid;
        let found = u64::from(customer_paid && random.next() < arrive(second));
        wrong += u64::from(customer_paid) - found;
        let woken = Woken { closed: 1 - found, paid: found };
        all.add(&woken);
        if order % ORDERS_A_SECOND == 0 {
            known = known.or_else(|| all.usual_share().map(PaidShare::new));
        }
        let Some(share) = &known else { continue };
        // Of a worker that has stopped the others get the alarms.
        let at = order as usize % running.len();
        running[at].1.add(&woken);
        let mut has_tripped = running[at].0.add(share, &woken).is_some();
        // Once a second at different moments, and as soon as there is enough to share.
        let is_due = order % ORDERS_A_SECOND == at as u32 * 11 % ORDERS_A_SECOND;
        if has_tripped || is_due || running[at].0.room(share) == 0 {
            let own = std::mem::take(&mut running[at].1);
            running.iter_mut().enumerate().filter(|(other, _)| *other != at).for_each(|(_, of)| of.2.add(&own));
            let others = std::mem::take(&mut running[at].2);
            has_tripped |= running[at].0.add(share, &others).is_some();
            running[at].0.note_shared();
        }
        if has_tripped {
            running.swap_remove(at);
        }
        if running.is_empty() {
            return Some(wrong);
        }
    }
    None
}

#[test]
fn sudden_stop_closes_at_most_fifty_wrongly() {
    for (usual, by_one_two_three) in
        [(0.9, [29, 34, 38]), (0.7, [34, 39, 44]), (0.5, [33, 38, 38]), (0.3, [24, 29, 32]), (0.1, [34, 35, 37])]
    {
        let wrong = [1, 2, 3].map(|workers| wrong_closes(workers, Some(usual), usual, |_| 0.0).expect("it trips"));
        assert_eq!(wrong, by_one_two_three, "usual {usual}");
    }
}

#[test]
fn slow_drying_trips_below_a_quarter() {
    for (seconds, closed) in [(1.0, 37), (10.0, 94), (60.0, 407), (240.0, 1_505), (600.0, 3_455)] {
        let wrong = wrong_closes(1, Some(0.7), 0.7, |at| 1.0 - (at / seconds).min(1.0));
        assert_eq!(wrong, Some(closed), "no callback after {seconds} s, fewer and fewer until then");
    }
    assert_eq!(wrong_closes(1, Some(0.7), 0.7, |_| 0.5), None, "half of them is a bad day");
    assert!(wrong_closes(1, Some(0.7), 0.7, |_| 0.2).is_some());
}

#[test]
fn new_shop_is_protected_after_its_first_orders() {
    for (healthy_s, closed) in [(8.0, 24), (60.0, 23), (3_600.0, 29)] {
        let wrong = wrong_closes(1, None, 0.7, |at| f64::from(u8::from(at < healthy_s)));
        assert_eq!(wrong, Some(closed), "callbacks stop after {healthy_s} s");
    }
    assert_eq!(wrong_closes(1, None, 0.7, |_| 0.0), None, "callbacks that never arrived are not missed");
}
