//! The documents say what the code does: the tables of `docs/PROVIDERS.md` are those that the code decides by, and the
//! contract for payment services has the same states.

use std::path::{Path, PathBuf};

use order_timeout_providers::table::{Is, markdown};
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
