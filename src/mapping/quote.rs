//! Names and values as SQL writes them.
//!
//! Pure.

/// A name in double quotes, so that its case and its characters are kept.
#[must_use]
pub fn name(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A text as a literal. Without a type, so that it takes the type of the column that it is compared with or written to.
#[must_use]
pub fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if text.contains('\\') { format!("E'{}'", quoted.replace('\\', "\\\\")) } else { format!("'{quoted}'") }
}

/// The parts of a table's name as it is written in a setting: `public.orders`, `"My.Shop".orders`. Their case is kept,
/// with and without quotes. `None` if it has more than two parts, or an open quote.
#[must_use]
pub fn parts(written: &str) -> Option<(Option<String>, String)> {
    let (mut parts, mut rest) = (Vec::new(), written.trim());
    loop {
        let (part, behind) = match rest.strip_prefix('"') {
            Some(inner) => quoted_part(inner)?,
            None => {
                let end = rest.find('.').unwrap_or(rest.len());
                (rest[..end].trim().to_owned(), &rest[end..])
            }
        };
        if part.is_empty() {
            return None;
        }
        parts.push(part);
        match behind.strip_prefix('.') {
            Some(next) => rest = next,
            None if behind.is_empty() => break,
            None => return None,
        }
    }
    let mut parts = parts.into_iter();
    match (parts.next(), parts.next(), parts.next()) {
        (Some(table), None, None) => Some((None, table)),
        (Some(schema), Some(table), None) => Some((Some(schema), table)),
        _ => None,
    }
}

fn quoted_part(inner: &str) -> Option<(String, &str)> {
    let mut part = String::new();
    let mut characters = inner.char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        if character != '"' {
            part.push(character);
        } else if characters.peek().is_some_and(|(_, next)| *next == '"') {
            characters.next();
            part.push('"');
        } else {
            return Some((part, &inner[at + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_literals_are_escaped() {
        assert_eq!(name("Order\"s"), "\"Order\"\"s\"");
        assert_eq!(literal("it's"), "'it''s'");
        assert_eq!(literal("a\\'b"), "E'a\\\\''b'");
    }

    #[test]
    fn table_names_are_split() {
        let of = |written: &str| parts(written);
        assert_eq!(of("orders"), Some((None, "orders".into())));
        assert_eq!(of(" public.Orders "), Some((Some("public".into()), "Orders".into())));
        assert_eq!(of("\"My.Shop\".\"or\"\"ders\""), Some((Some("My.Shop".into()), "or\"ders".into())));
        for wrong in ["", ".", "a.", "a.b.c", "\"a", "\"a\"b"] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
    }
}
