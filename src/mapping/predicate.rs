//! Reads the operator's SQL as far as that is necessary: whether it has a subquery, a parameter or a second statement.
//!
//! Pure. Postgres checks everything else when the statements are prepared.

/// SQL without its literals, quoted names and comments, each replaced by a blank; in lower case. `None` if a literal, a
/// quoted name or a comment does not end.
#[must_use]
pub fn bare(sql: &str) -> Option<String> {
    without_literals(sql, QuotedNames::Dropped)
}

/// What becomes of a name in double quotes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum QuotedNames {
    Dropped,
    /// Without the quotes, in its own case.
    Kept,
}

fn without_literals(sql: &str, names: QuotedNames) -> Option<String> {
    let (mut bare, mut rest) = (String::with_capacity(sql.len()), sql);
    while let Some(first) = rest.chars().next() {
        let skipped = match first {
            '\'' => {
                let is_escaped = bare.ends_with(['e', 'E']) && !bare[..bare.len() - 1].ends_with(is_word);
                Some(end_of_literal(rest, is_escaped)?)
            }
            '"' => Some(end_of_literal(rest, false)?),
            '-' if rest.starts_with("--") => Some(rest.find('\n').unwrap_or(rest.len())),
            '/' if rest.starts_with("/*") => Some(rest.find("*/")? + 2),
            '$' => match tag(rest) {
                Some(tag) => Some(rest[tag.len()..].find(tag)? + 2 * tag.len()),
                None => None,
            },
            _ => None,
        };
        match skipped {
            Some(end) => {
                match first {
                    '"' if names == QuotedNames::Kept => bare.push_str(&rest[1..end - 1]),
                    _ => bare.push(' '),
                }
                rest = &rest[end..];
            }
            None => {
                bare.extend(first.to_lowercase());
                rest = &rest[first.len_utf8()..];
            }
        }
    }
    Some(bare)
}

/// The end of what begins with a quote; a doubled quote does not end it.
fn end_of_literal(text: &str, has_escapes: bool) -> Option<usize> {
    let quote = text.as_bytes()[0];
    let bytes = text.as_bytes();
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' if has_escapes => at += 2,
            byte if byte == quote && bytes.get(at + 1) == Some(&quote) => at += 2,
            byte if byte == quote => return Some(at + 1),
            _ => at += 1,
        }
    }
    None
}

/// `$$` or `$name$` at the beginning.
fn tag(text: &str) -> Option<&str> {
    let end = text[1..].find('$')? + 2;
    let name = &text[1..end - 1];
    (!name.starts_with(|first: char| first.is_ascii_digit()) && name.chars().all(is_word)).then(|| &text[..end])
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn has_word(bare: &str, word: &str) -> bool {
    bare.split(|character| !is_word(character)).any(|found| found == word)
}

/// Whether an expression has a subquery.
#[must_use]
pub fn has_subquery(expression: &str) -> bool {
    bare(expression).is_some_and(|bare| ["select", "values", "table"].iter().any(|word| has_word(&bare, word)))
}

/// Whether both conditions compare one column with a value, and these values differ.
#[must_use]
pub fn exclude_each_other(one: &str, other: &str) -> bool {
    let parts = |condition: &str| {
        let (column, value) = condition.split_once('=')?;
        let (column, value) = (column.trim(), value.trim());
        let literal = value.strip_prefix('\'')?.strip_suffix('\'')?;
        (column.chars().all(is_word) && literal.chars().all(is_word))
            .then(|| (column.to_lowercase(), literal.to_lowercase()))
    };
    parts(one).zip(parts(other)).is_some_and(|(one, other)| one.0 == other.0 && one.1 != other.1)
}

/// The names of the functions that an expression calls, with their schemas where they are written. A quoted name of
/// other characters than letters, digits and `_` is not found.
#[must_use]
pub fn called_functions(expression: &str) -> Vec<String> {
    let bare = without_literals(expression, QuotedNames::Kept).unwrap_or_default();
    let before = bare.match_indices('(').map(|(at, _)| bare[..at].trim_end());
    let names = before.filter_map(|text| {
        let name = text.rsplit(|character| !is_word(character) && character != '.').next().unwrap_or_default();
        (!name.is_empty()).then(|| name.to_owned())
    });
    names.collect()
}

/// Why a text cannot stand in a statement as an expression.
#[must_use]
pub fn why_no_expression(text: &str) -> Option<&'static str> {
    let Some(bare) = bare(text) else { return Some("has a quote or a comment that does not end; end it") };
    if bare.contains(';') {
        return Some("has a semicolon; write one expression and nothing else");
    }
    if has_parameter(&bare) {
        return Some("has a parameter such as $1; write a value instead");
    }
    let mut depth = 0_i32;
    for character in bare.chars() {
        depth += i32::from(character == '(') - i32::from(character == ')');
        if depth < 0 {
            break;
        }
    }
    (depth != 0).then_some("has brackets that do not match; close each one")
}

/// Why a text cannot be a part of the close statement.
#[must_use]
pub fn why_not_one_statement(text: &str) -> Option<&'static str> {
    let Some(bare) = bare(text) else { return Some("has a quote or a comment that does not end; end it") };
    let bare = bare.trim().trim_end_matches(';').trim_end();
    if bare.contains(';') {
        return Some("has more than one statement; write a table [[…also]] for each");
    }
    if has_parameter(bare) {
        return Some("has a parameter such as $1; the closed orders are in the table closed");
    }
    let first = bare.split(|character| !is_word(character)).next().unwrap_or_default();
    if !["insert", "update", "delete", "select"].contains(&first) {
        return Some("is no INSERT, UPDATE, DELETE or SELECT; write one of them");
    }
    if !has_word(bare, "closed") {
        return Some(
            "does not read the table closed, so it would not be about the closed orders; write a condition such as WHERE order_id IN (SELECT id FROM closed)",
        );
    }
    None
}

/// The name of the table that a statement changes, as [`super::quote::parts`] reads it; `None` for a SELECT.
#[must_use]
pub fn changed_table(statement: &str) -> Option<String> {
    let mut words = without_literals_but_names(statement)?;
    let first = words.next()?.to_lowercase();
    if !["insert", "update", "delete"].contains(&first.as_str()) {
        return None;
    }
    words.find(|word| !["into", "from", "only"].contains(&word.to_lowercase().as_str()))
}

/// The words of a statement. Quoted names keep their quotes, so that their case and their dots can be told; names
/// without quotes are in lower case, as Postgres reads them.
fn without_literals_but_names(statement: &str) -> Option<impl Iterator<Item = String>> {
    bare(statement)?;
    let mut words = Vec::new();
    let (mut word, mut is_quoted) = (String::new(), false);
    for character in statement.chars() {
        match character {
            '"' => {
                is_quoted = !is_quoted;
                word.push('"');
            }
            _ if is_quoted => word.push(character),
            _ if is_word(character) || character == '.' => word.extend(character.to_lowercase()),
            _ if !word.is_empty() => words.push(std::mem::take(&mut word)),
            _ => {}
        }
    }
    words.push(word);
    Some(words.into_iter())
}

/// Whether a statement returns rows by itself.
#[must_use]
pub fn returns_rows(statement: &str) -> bool {
    bare(statement).is_some_and(|bare| bare.trim_start().starts_with("select") || has_word(&bare, "returning"))
}

fn has_parameter(bare: &str) -> bool {
    bare.match_indices('$').any(|(at, _)| bare[at + 1..].starts_with(|next: char| next.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_and_comments_are_not_read() {
        assert_eq!(bare("A = 'sel''ect' -- select\n AND \"x;\"").unwrap(), "a =    \n and  ");
        assert_eq!(bare("E'\\'select' $$select$$ $a$ ; $a$ /* ; */").unwrap(), "e       ");
        for open in ["'a", "\"a", "/* a", "$$ a"] {
            assert_eq!(bare(open), None, "{open}");
        }
    }

    #[test]
    fn subqueries_are_found() {
        assert!(has_subquery("EXISTS (SELECT 1 FROM payments)") && has_subquery("x IN (VALUES (1))"));
        assert!(!has_subquery("status = 'select' AND is_paid(id) AND selected"));
    }

    #[test]
    fn expressions_are_one_expression() {
        for wrong in ["a; b", "a = $1", "(a", "a)", ")(", "'a"] {
            assert!(why_no_expression(wrong).is_some(), "{wrong}");
        }
        for right in ["a = ';'", "(a)", "price = '$1'"] {
            assert_eq!(why_no_expression(right), None, "{right}");
        }
    }

    #[test]
    fn statements_are_about_closed_orders() {
        for wrong in [
            "UPDATE c SET a = 1",
            "DROP TABLE closed",
            "DELETE FROM c; DELETE FROM closed",
            "DELETE FROM c WHERE id = $1",
        ] {
            assert!(why_not_one_statement(wrong).is_some(), "{wrong}");
        }
        assert_eq!(why_not_one_statement("DELETE FROM c WHERE o IN (SELECT id FROM closed);"), None);
    }

    #[test]
    fn values_of_one_column_exclude_each_other() {
        assert!(exclude_each_other("status = 'unpaid'", "Status='paid'"));
        for paid in ["status = 'Unpaid'", "state = 'paid'", "status = 'paid' OR is_paid", "status <> 'unpaid'", "true"]
        {
            assert!(!exclude_each_other("status = 'unpaid'", paid), "{paid}");
        }
    }

    #[test]
    fn called_functions_are_named() {
        assert_eq!(called_functions("public.is_paid(id) AND lower ( state ) = 'f(x)'"), ["public.is_paid", "lower"]);
        assert_eq!(called_functions("shop.\"IsPaid\"(\"Id\")"), ["shop.IsPaid"]);
    }

    #[test]
    fn changed_tables_are_named() {
        for (statement, table) in [
            ("UPDATE ONLY Shop.Stock SET a = 1 WHERE id IN (SELECT id FROM closed)", Some("shop.stock")),
            ("insert into \"My.Shop\".\"Notes\"(id) SELECT id FROM closed", Some("\"My.Shop\".\"Notes\"")),
            ("DELETE FROM holds WHERE id IN (SELECT id FROM closed)", Some("holds")),
            ("SELECT release(id) FROM closed", None),
        ] {
            assert_eq!(changed_table(statement).as_deref(), table, "{statement}");
        }
    }
}
