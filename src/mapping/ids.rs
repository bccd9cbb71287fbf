//! Ids of orders between the wire, where they are text, and the columns that identify a row.
//!
//! Pure. An id of one column is written as the table prints it. Of several columns each part is percent-encoded as far
//! as it must be (`%` and `/`), and the parts are joined by `/`. Reading accepts every percent-encoded printable ASCII
//! character. A text of another form is NULL, never an error.

use super::ColumnType;

/// The types that an id's column may have, by their names in `pg_type`.
pub const TYPES: [&str; 8] = ["int2", "int4", "int8", "uuid", "text", "varchar", "bpchar", "citext"];

/// An expression of the column's type for the text expression `text`; NULL if the text has another form.
#[must_use]
pub fn parse(column: &ColumnType, text: &str) -> String {
    let sql = &column.sql;
    match column.base.as_str() {
        "int8" => format!(
            "CASE WHEN {text} ~ '^(0|-?[1-9][0-9]{{0,18}})$' THEN CASE WHEN {text}::numeric BETWEEN -9223372036854775808 AND 9223372036854775807 THEN {text}::bigint END END"
        ),
        "int4" => whole_number(text, 9, "-2147483648 AND 2147483647", "integer"),
        "int2" => whole_number(text, 4, "-32768 AND 32767", "smallint"),
        // Three cheap checks: one regular expression takes longer.
        "uuid" => format!(
            "CASE WHEN {text} LIKE '________-____-____-____-____________' AND {text} NOT LIKE '%-%-%-%-%-%' AND {text} !~ '[^-0-9a-fA-F]' THEN {text}::uuid END"
        ),
        // Trailing blanks of a padded column are not printed, and count as none.
        "bpchar" => format!("{text}::bpchar"),
        "text" | "varchar" => format!("{text}::text"),
        _ => format!("{text}::{sql}"),
    }
}

fn whole_number(text: &str, more_digits: usize, between: &str, sql: &str) -> String {
    format!(
        "CASE WHEN {text} ~ '^(0|-?[1-9][0-9]{{0,{more_digits}}})$' THEN CASE WHEN {text}::bigint BETWEEN {between} THEN {text}::{sql} END END"
    )
}

/// The smallest value of the type.
#[must_use]
pub fn smallest(column: &ColumnType) -> String {
    match column.base.as_str() {
        "int8" => "'-9223372036854775808'::bigint".into(),
        "int4" => "'-2147483648'::integer".into(),
        "int2" => "'-32768'::smallint".into(),
        "uuid" => "'00000000-0000-0000-0000-000000000000'::uuid".into(),
        "bpchar" => "''::bpchar".into(),
        "text" | "varchar" => "''::text".into(),
        _ => format!("''::{}", column.sql),
    }
}

/// One part of an id of several columns, out of the text expression `text`.
#[must_use]
pub fn part(text: &str, number: usize, of: usize) -> String {
    if of == 1 {
        return text.to_owned();
    }
    let part = format!("split_part({text}, '/', {number})");
    let slashes = of - 1;
    // With another number of slashes the text has another number of parts.
    format!(
        "CASE WHEN length({text}) - length(replace({text}, '/', '')) = {slashes} THEN CASE WHEN strpos({part}, '%') = 0 THEN {part} ELSE (SELECT string_agg(CASE WHEN r.found[1] ~ '^%([2-6][0-9a-fA-F]|7[0-9a-eA-E])$' THEN chr(('x' || substr(r.found[1], 2))::bit(8)::integer) ELSE r.found[1] END, '' ORDER BY r.place) FROM regexp_matches({part}, '%[0-9a-fA-F]{{2}}|[^%]+|%', 'g') WITH ORDINALITY AS r (found, place)) END END"
    )
}

/// The text on the wire for these column expressions.
#[must_use]
pub fn print(columns: &[String]) -> String {
    match columns {
        [one] => format!("{one}::text"),
        several => {
            let parts = several.iter().map(|one| format!("replace(replace({one}::text, '%', '%25'), '/', '%2F')"));
            parts.collect::<Vec<_>>().join(" || '/' || ")
        }
    }
}
