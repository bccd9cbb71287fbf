//! An error together with its causes, as log lines and command lines print it.
//!
//! Errors name their cause only in `source()`, so that a report of the whole chain says nothing twice.

use std::error::Error;

/// The error and its causes, outermost first, joined by `: `.
#[must_use]
pub fn with_causes(error: &dyn Error) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(inner) = cause {
        // Some libraries repeat the cause in their own sentence.
        let inner_text = inner.to_string();
        if !text.ends_with(&inner_text) {
            text.push_str(": ");
            text.push_str(&inner_text);
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("not read")]
    struct Outer(#[source] std::fmt::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("not read: {0}")]
    struct Repeating(#[source] std::fmt::Error);

    #[test]
    fn causes_follow_their_error() {
        let inner = std::fmt::Error;
        assert_eq!(with_causes(&Outer(inner)), format!("not read: {inner}"));
        assert_eq!(with_causes(&inner), inner.to_string());
        assert_eq!(with_causes(&Repeating(inner)), format!("not read: {inner}"));
    }
}
