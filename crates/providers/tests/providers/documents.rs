//! The documents say what the code does: the tables of `docs/PROVIDERS.md` are those that the code decides by, and the
//! contract for payment services has the same states.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use order_timeout_providers::table::{Call, Field, Is, Meaning, NotKnown, Row, Table};
use order_timeout_providers::tables;

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().parent().unwrap().to_owned()
}

/// Set `UPDATE_DOCUMENTS=1` to write the tables into the document.
#[test]
fn document_shows_outcome_tables() {
    let path = root().join("docs/PROVIDERS.md");
    let document = std::fs::read_to_string(&path).unwrap();
    let mut expected = document.clone();
    for table in tables() {
        let kind = table.kind;
        let (begin, end) = (format!("<!-- answers of {kind} -->\n"), format!("<!-- end of {kind} -->"));
        let (before, rest) = expected.split_once(&begin).unwrap_or_else(|| panic!("no {begin}"));
        let (_, after) = rest.split_once(&end).unwrap_or_else(|| panic!("no {end}"));
        expected = format!("{before}{begin}\n{}\n{end}{after}", markdown(table));
    }
    if std::env::var_os("UPDATE_DOCUMENTS").is_some() {
        std::fs::write(&path, &expected).unwrap();
    }
    assert!(
        document == expected,
        "run UPDATE_DOCUMENTS=1 cargo test -p order-timeout-providers, and commit the document"
    );
}

#[test]
fn contract_has_states_of_table() {
    let contract = std::fs::read_to_string(root().join("docs/provider-contract.openapi.yaml")).unwrap();
    let list = contract.lines().find_map(|line| line.trim().strip_prefix("enum: [")).unwrap();
    let listed: Vec<_> = list.trim_end_matches(']').split(", ").collect();
    let states = tables()[0].rows.iter().map(|row| match row.fields[0].is {
        Is::Text(state) => state,
        other => panic!("{other:?}"),
    });
    assert_eq!(listed, states.collect::<Vec<_>>());
    for name in ["Order-Timeout-Timestamp", "Order-Timeout-Signature", "/ask:", "/cancel:", "openapi: 3.1"] {
        assert!(contract.contains(name), "{name}");
    }
}

/// A table as Markdown. Neighbouring rows that differ in one text alone are one line. An error that proves nothing has none: the
/// document says that what is not in its tables is unknown.
fn markdown(table: &Table) -> String {
    let mut text = String::from("| call | HTTP | answer | means | source |\n| --- | --- | --- | --- | --- |\n");
    let mut rows = table.rows;
    while let [row, others @ ..] = rows {
        let call = match row.calls {
            [Call::Ask] => "ask",
            [Call::Cancel] => "cancel",
            _ => "both",
        };
        let mut fields: Vec<_> = row.fields.iter().map(shown_field).collect();
        rows = add_alike(&mut fields, row, others);
        if row.http_status >= 400 && matches!(row.meaning, Meaning::Unknown(_)) {
            continue;
        }
        let said = match (row.resource, fields.is_empty()) {
            (resource, true) => resource.to_owned(),
            ("", false) => fields.join(", "),
            (resource, false) => format!("{resource}: {}", fields.join(", ")),
        };
        let Row { http_status, source, .. } = row;
        let meaning = shown_meaning(row.meaning, table.not_known);
        writeln!(text, "| {call} | {http_status} | {said} | {meaning} | {source} |").unwrap();
    }
    text
}

fn shown_field(field: &Field) -> String {
    // `/latest_charge/amount_refunded` as `latest_charge.amount_refunded`.
    let name = field.pointer.trim_start_matches('/').replace('/', ".");
    match field.is {
        Is::Text(text) => format!("`{name}` `{text}`"),
        Is::True => format!("`{name}` `true`"),
        Is::Positive => format!("`{name}` above 0"),
        Is::Zero => format!("`{name}` 0"),
        Is::Missing => format!("no `{name}`"),
        Is::Given => format!("a `{name}`"),
    }
}

fn shown_meaning(meaning: Meaning, not_known: NotKnown) -> String {
    match meaning {
        Meaning::Paid => "paid".into(),
        Meaning::Open => "open".into(),
        Meaning::InProgress => "in progress".into(),
        Meaning::Pending => "pending".into(),
        Meaning::Closed => "closed".into(),
        Meaning::Refunded => "refunded".into(),
        Meaning::NotKnown => match not_known {
            NotKnown::NotBegun => "absent".into(),
            NotKnown::OtherAccount => "unknown: a key of another mode or account".into(),
            NotKnown::Forgotten { after } => format!(
                "closed, if the attempt is more than {} hours old; before that unknown: a key of another account",
                after.as_secs() / 3_600
            ),
        },
        // The worker says why where it is met.
        Meaning::Unknown(_) => "unknown".into(),
        Meaning::AskAgain => "what `ask` then says".into(),
    }
}

/// Adds the texts in which the next rows alone differ from this one, and returns the rows after those.
fn add_alike<'a>(fields: &mut [String], row: &Row, others: &'a [Row]) -> &'a [Row] {
    let Some(varying) = others.first().and_then(|other| varying_text(row, other)) else { return others };
    let alike = others.iter().take_while(|other| varying_text(row, other) == Some(varying)).count();
    let (alike, rest) = others.split_at(alike);
    for other in alike {
        if let Is::Text(value) = other.fields[varying].is {
            write!(fields[varying], " or `{value}`").unwrap();
        }
    }
    rest
}

/// The index of the field in whose text alone the rows differ.
fn varying_text(one: &Row, other: &Row) -> Option<usize> {
    if one.fields.len() != other.fields.len() || *one != (Row { fields: one.fields, ..*other }) {
        return None;
    }
    let mut varying = (0..one.fields.len()).filter(|&index| one.fields[index] != other.fields[index]);
    let index = varying.next().filter(|_| varying.next().is_none())?;
    match (one.fields[index], other.fields[index]) {
        (Field { pointer, is: Is::Text(_) }, Field { pointer: same, is: Is::Text(_) }) if pointer == same => {
            Some(index)
        }
        _ => None,
    }
}
