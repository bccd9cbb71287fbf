//! What to do about a line of `/readyz`, in one sentence for the person on call.
//!
//! Pure. The lines themselves say what is wrong.

use super::words::capitalised;
use crate::observe::degraded::Cause;
use crate::operations::pause_closing::HOW_TO_RESUME;

const BROKER: &str = "Start the broker, or correct `amqp.url`. Until then workers read deadlines from the database, so orders are closed on time; events wait.";
pub(super) const DATABASE: &str = "Start the database, or correct `database.url`. No order is closed until then and none is lost: what is due is closed as soon as the database is back.";
const PROVIDER: &str = "Check that the payment provider answers, and its settings. It is asked again by itself; its orders stay unclosed until then, with their stock reserved.";

/// `None` if the line says it itself, or has no known remedy.
pub(super) fn remedy(line: &str) -> Option<String> {
    let of = |part: &str| line.starts_with(part) || line.contains(&format!(": {part}"));
    if let Some(cause) = Cause::WORDS.into_iter().find(|cause| of(&format!("degraded: {cause}: "))) {
        return Some(match cause {
            word if word == Cause::ProviderAway.as_str() => PROVIDER.to_owned(),
            word => format!("docs/operating/troubleshoot.md, \"Degraded\", says what to do about `{word}`."),
        });
    }
    let resume = capitalised(HOW_TO_RESUME) + ".";
    let known = [
        ("database: ", DATABASE),
        ("broker: ", BROKER),
        ("closing is paused", &resume),
        ("closing of the kind", &resume),
    ];
    known.into_iter().find(|(part, _)| of(part)).map(|(_, remedy)| remedy.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_problem_has_its_remedy() {
        for (line, part) in [
            ("broker: no consumer session is open: the broker cannot be reached", "Start the broker"),
            ("kind seat: database: its clock cannot be read", "Start the database"),
            ("degraded: provider_away: orders wait for card: its last calls failed", "payment provider answers"),
            ("degraded: topology: kind seat: a queue is missing", "about `topology`"),
            ("closing is paused since T by Mei: no callbacks", "order-timeout resume"),
        ] {
            assert!(remedy(line).is_some_and(|remedy| remedy.contains(part)), "{line}");
        }
        assert_eq!(remedy("worker: starting"), None);
    }
}
