//! `Retry-After`: how long a provider asks to be left alone, as seconds or as a date (RFC 9110, section 10.2.3).
//!
//! Pure: it is told the time.

use std::time::{Duration, SystemTime};

/// A longer pause is taken for a mistake and shortened to this.
const LONGEST: Duration = Duration::from_secs(3_600);

/// The pause that the header's value means. A date is compared with the server's own `Date`, so that a wrong clock here
/// does not matter; only without that header with `now`. `None` if the value is neither form.
pub(crate) fn pause(value: &str, server_date: Option<&str>, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // A number that does not fit is a long time.
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)).min(LONGEST));
    }
    let until = httpdate::parse_http_date(value).ok()?;
    let now = server_date.and_then(|date| httpdate::parse_http_date(date).ok()).unwrap_or(now);
    Some(until.duration_since(now).unwrap_or_default().min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_seconds_and_dates() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        let later = "Sun, 06 Nov 1994 08:50:07 GMT";
        for (value, seconds) in [
            ("0", Some(0)),
            (" 120 ", Some(120)),
            ("99999999999999999999", Some(3_600)),
            (later, Some(30)),
            ("Sun, 06 Nov 1994 08:00:00 GMT", Some(0)),
            ("Fri, 31 Dec 2500 23:59:59 GMT", Some(3_600)),
            ("-1", None),
            ("1.5", None),
            ("", None),
            ("soon", None),
        ] {
            assert_eq!(pause(value, None, now), seconds.map(Duration::from_secs), "{value}");
        }
        let servers_own = "Sun, 06 Nov 1994 08:50:00 GMT";
        assert_eq!(pause(later, Some(servers_own), now), Some(Duration::from_secs(7)));
    }
}
