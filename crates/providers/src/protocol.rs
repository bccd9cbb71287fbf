//! What a kind of provider implements: the two calls, and the steps that they share.
//!
//! Keeps no limits: [`limited`](crate::limited) puts them around every protocol, so that none is reachable without them.

use std::future::Future;

use order_timeout_core::payment::{Answer, Attempt};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

use crate::call_error::CallError;
use crate::table::{Call, Verdict};

/// The calls of one kind of provider. Each sends what one call needs, and repeats nothing.
pub(crate) trait Protocol: Send + Sync {
    /// A reference of the form that it demands, and of no payment: to try the keys with.
    const NO_PAYMENT: &'static str;

    /// Sends the requests of a call and looks the answer up.
    fn call(&self, call: Call, attempt: &Attempt) -> impl Future<Output = Result<Verdict, CallError>> + Send;
}

/// A whole call: a refusal to cancel because of the payment's state is followed by asking for that state.
pub(crate) async fn answer<P: Protocol>(protocol: &P, call: Call, attempt: &Attempt) -> Result<Answer, CallError> {
    match protocol.call(call, attempt).await? {
        Verdict::Answer(answer) => Ok(answer),
        Verdict::AskAgain => match protocol.call(Call::Ask, attempt).await? {
            Verdict::Answer(answer) => Ok(answer),
            Verdict::AskAgain => Err(CallError::Undecided("its answer to a question says only that it was refused")),
        },
    }
}

/// Checks that an answer is about the payment that was asked for. `named`: the reference in it.
///
/// # Errors
/// [`CallError`] if it is about another one, or names none.
pub(crate) fn require_reference(named: &Value, reference: &str, status: u16) -> Result<(), CallError> {
    match named.as_str() {
        Some(named) if named == reference => Ok(()),
        Some(_) => Err(CallError::OtherPayment),
        None => Err(CallError::Unreadable { status }),
    }
}

/// What RFC 3986, section 2.3, leaves unencoded.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A reference as one segment of a path.
///
/// # Errors
/// [`CallError::InvalidAttempt`] for a reference that a server would read as a step in the path.
pub(crate) fn path_segment(reference: &str) -> Result<String, CallError> {
    if matches!(reference, "" | "." | "..") {
        return Err(CallError::InvalidAttempt("the attempt's reference is none that it gives"));
    }
    Ok(utf8_percent_encode(reference, ENCODED).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_stay_one_segment() {
        assert_eq!(path_segment("T-1|a/b?c#d%").unwrap(), "T-1%7Ca%2Fb%3Fc%23d%25");
        assert!(["", ".", ".."].iter().all(|reference| path_segment(reference).is_err()));
    }
}
