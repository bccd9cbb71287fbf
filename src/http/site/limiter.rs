//! How often a client may give a wrong token.
//!
//! No I/O and no clock: time comes in as an argument. Bounded in memory, whatever clients do.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Wrong tokens in [`WINDOW`]; the next try is refused unread.
const MOST_FAILURES: u32 = 10;
const WINDOW: Duration = Duration::from_secs(60);
/// Addresses that are remembered. Beyond it, the one whose window began first is forgotten.
const MOST_ADDRESSES: usize = 1_024;

/// Counts failures by address.
#[derive(Debug, Default)]
pub(in crate::http) struct Limiter(Mutex<HashMap<IpAddr, Failures>>);

#[derive(Debug, Clone, Copy)]
struct Failures {
    since: Instant,
    count: u32,
}

impl Limiter {
    /// Whether this address may try now; if not, after how long.
    ///
    /// # Errors
    /// The time until then.
    pub fn may_try(&self, address: IpAddr, now: Instant) -> Result<(), Duration> {
        let failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match failures.get(&address) {
            Some(one) if one.count >= MOST_FAILURES => {
                match WINDOW.checked_sub(now.saturating_duration_since(one.since)) {
                    Some(wait) if !wait.is_zero() => Err(wait),
                    _ => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// This address gave a wrong token.
    pub fn failed(&self, address: IpAddr, now: Instant) {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        failures.retain(|_, one| now.saturating_duration_since(one.since) < WINDOW);
        if failures.len() >= MOST_ADDRESSES && !failures.contains_key(&address) {
            let oldest = failures.iter().min_by_key(|(_, one)| one.since).map(|(address, _)| *address);
            oldest.map(|oldest| failures.remove(&oldest));
        }
        failures.entry(address).or_insert(Failures { since: now, count: 0 }).count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenth_failure_closes_door_for_minute() {
        let (limiter, now) = (Limiter::default(), Instant::now());
        let (one, other) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        for _ in 0..MOST_FAILURES {
            assert_eq!(limiter.may_try(one, now), Ok(()));
            limiter.failed(one, now);
        }
        assert_eq!(limiter.may_try(one, now + WINDOW / 4), Err(WINDOW * 3 / 4));
        assert_eq!(limiter.may_try(other, now), Ok(()), "each address for itself");
        assert_eq!(limiter.may_try(one, now + WINDOW), Ok(()));
    }

    #[test]
    fn memory_for_addresses_is_bounded() {
        let (limiter, now) = (Limiter::default(), Instant::now());
        for number in 0..5_000_u32 {
            limiter.failed(IpAddr::from(number.to_be_bytes()), now + Duration::from_micros(number.into()));
        }
        assert_eq!(limiter.0.lock().unwrap().len(), MOST_ADDRESSES);
    }
}
