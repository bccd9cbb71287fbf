//! Orders that are due and that payment providers are asked about: how many wait, and how many without an answer.
//!
//! Renders what was read.

use maud::{Markup, html};

use super::words::{age, count, number, shown};
use crate::operations::unresolved::WaitingAtProvider;

/// On the first page, while orders wait.
pub(super) fn section(waiting: Option<&[WaitingAtProvider]>) -> Markup {
    let Some(waiting @ [_, ..]) = waiting else { return html! {} };
    html! {
        section #at-providers {
            h2 { "Waiting for a payment provider" }
            p { "These orders are due, and their payment providers are asked before they are closed. They keep their stock until then." }
            table {
                thead { tr {
                    th scope="col" { "provider" } th.number scope="col" { "orders" }
                    th.number scope="col" { "without an answer" } th.number scope="col" { "the oldest for" }
                } }
                tbody { @for at in waiting { tr {
                    th scope="row" { (if at.provider.is_empty() { "none".into() } else { shown(&at.provider) }) }
                    td.number { (number(at.orders)) }
                    td.number { (number(at.without_answer)) }
                    td.number { (if at.without_answer > 0 { age(at.oldest_s) } else { "–".to_owned() }) }
                } } }
            }
        }
    }
}

/// The first page's sentence while a provider does not answer.
pub(super) fn sentence(orders: u64, oldest_s: f64) -> String {
    let (waits, is) = if orders == 1 { ("waits", "its") } else { ("wait", "their") };
    format!(
        "{} {waits} because {is} payment provider gives no answer, the oldest for {}; all others are closed on time.",
        count(orders, "order"),
        age(oldest_s)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unanswered_orders_are_named() {
        let at = WaitingAtProvider { provider: "card<b>".into(), orders: 9, without_answer: 0, oldest_s: 0.0 };
        let text = section(Some(&[at])).into_string();
        assert!(text.contains("card&lt;b&gt;") && text.contains("–"), "{text}");
        assert!(section(Some(&[])).into_string().is_empty() && section(None).into_string().is_empty());
        let said = sentence(1, 65.0);
        assert!(said.starts_with("1 order waits because its payment provider gives no answer, the oldest for 1m 5s;"));
    }
}
