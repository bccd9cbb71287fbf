//! Logins of the page: a random cookie for each, and the name that the operator gave.
//!
//! In memory only: a restart ends them. No clock: time comes in as an argument.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The cookie's name.
pub(in crate::http) const COOKIE: &str = "order_timeout_session";
/// A working day.
pub(in crate::http) const LONGEST: Duration = Duration::from_secs(8 * 3_600);
/// Beyond it the oldest ends.
const MOST_SESSIONS: usize = 256;
/// 256 bits.
const KEY_BYTES: usize = 32;

/// A login.
#[derive(Debug, Clone)]
pub(in crate::http) struct Session {
    /// The operator's name.
    pub who: String,
    since: Instant,
}

/// The open logins.
#[derive(Debug, Default)]
pub(in crate::http) struct Sessions(Mutex<HashMap<String, Session>>);

impl Sessions {
    /// Begins a session; returns its key for the cookie. `None` if the system gives no random bytes.
    pub fn begin(&self, who: String, now: Instant) -> Option<String> {
        let mut bytes = [0; KEY_BYTES];
        rustls::crypto::ring::default_provider().secure_random.fill(&mut bytes).ok()?;
        let mut key = String::with_capacity(2 * KEY_BYTES);
        for byte in bytes {
            write!(key, "{byte:02x}").expect("writing to a String cannot fail");
        }
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, session| now.saturating_duration_since(session.since) < LONGEST);
        if sessions.len() >= MOST_SESSIONS {
            let oldest = sessions.iter().min_by_key(|(_, session)| session.since).map(|(key, _)| key.clone());
            oldest.map(|oldest| sessions.remove(&oldest));
        }
        sessions.insert(key.clone(), Session { who, since: now });
        Some(key)
    }

    /// The session with this key. A lookup by 256 random bits needs no constant time.
    pub fn find(&self, key: &str, now: Instant) -> Option<Session> {
        let sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.get(key).filter(|session| now.saturating_duration_since(session.since) < LONGEST).cloned()
    }

    /// Ends it.
    pub fn end(&self, key: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_end_after_working_day() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let (key, other) = (sessions.begin("day".into(), now).unwrap(), sessions.begin("night".into(), now).unwrap());
        assert!(key.len() == 64 && key != other);
        assert_eq!(sessions.find(&key, now).unwrap().who, "day");
        assert!(sessions.find(&key, now + LONGEST).is_none());
        sessions.end(&other);
        assert!(sessions.find(&other, now).is_none() && sessions.find("", now).is_none());
    }

    #[test]
    fn number_of_sessions_is_bounded() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let first = sessions.begin("first".into(), now).unwrap();
        for number in 1..=MOST_SESSIONS as u64 {
            sessions.begin("next".into(), now + Duration::from_millis(number)).unwrap();
        }
        assert!(sessions.find(&first, now).is_none());
        assert_eq!(sessions.0.lock().unwrap().len(), MOST_SESSIONS);
    }
}
