//! The functions of a kind that are rendered from its mapping: creates them, and says which are not as the mapping says.
//!
//! Calls none of them.

use order_timeout_core::kind::Kind;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::Database;
use crate::mapping::KindFunction;

/// Creates or replaces them in the schema of our own tables. Only their owner may call them: the functions of
/// `sql/functions/` do, which belong to the same role.
///
/// # Errors
/// sqlx's.
pub async fn install(database: &Database, functions: &[KindFunction]) -> Result<(), sqlx::Error> {
    let work = async |connection: &mut PgConnection| {
        let mut transaction = connection.begin().await?;
        // They run with the owner's rights: last, so that no temporary object of a caller takes the place of another.
        sqlx::raw_sql("SELECT set_config('search_path', current_setting('search_path') || ', pg_temp', true)")
            .execute(&mut *transaction)
            .await?;
        // Rendered from the operator's configuration.
        sqlx::raw_sql(AssertSqlSafe(creates(functions))).execute(&mut *transaction).await?;
        transaction.commit().await
    };
    database.run(work).await
}

/// The statements that create or replace them, each with a semicolon.
pub(super) fn creates(functions: &[KindFunction]) -> String {
    let create = |function: &KindFunction| {
        format!("{};\nREVOKE ALL ON FUNCTION {} FROM PUBLIC;\n", function.create(), function.name)
    };
    functions.iter().map(create).collect()
}

/// Whether a kind has the function that does this, of whatever mapping.
///
/// # Errors
/// sqlx's.
pub async fn is_there(database: &Database, kind: &Kind, what: &str) -> Result<bool, sqlx::Error> {
    let query = sqlx::query_scalar("SELECT to_regproc($1) IS NOT NULL").bind(KindFunction::name_of(kind, what));
    database.run(async |connection| query.fetch_one(connection).await).await
}

/// The names of those that the schema has not, or has with another body.
///
/// # Errors
/// sqlx's.
pub async fn not_installed(database: &Database, functions: &[KindFunction]) -> Result<Vec<String>, sqlx::Error> {
    let (names, bodies): (Vec<&str>, Vec<&str>) =
        functions.iter().map(|function| (function.name.as_str(), function.body.as_str())).unzip();
    let query = sqlx::query_scalar(
        "SELECT f.name FROM unnest($1::text[], $2::text[]) AS f (name, body)
         WHERE NOT EXISTS (SELECT FROM pg_proc p WHERE p.oid = to_regproc(f.name) AND p.prosrc = f.body
                           AND p.proconfig::text LIKE '%pg\\_temp%')",
    );
    let query = query.bind(names).bind(bodies);
    database.run(async |connection| query.fetch_all(connection).await).await
}
