//! Where settings come from: defaults, a file, the environment, the command line; and how a fault in one of them is
//! explained.
//!
//! Reads, never checks what a value means (that is `Settings::validate`), and never repeats a secret.

use std::path::Path;

use config::{Config, ConfigError, File, FileFormat, Map, Value, ValueKind};

use super::{BadSettings, DEFAULTS, Settings};

const ENV_PREFIX: &str = "ORDER_TIMEOUT__";
const ENVIRONMENT: &str = "the environment";
const COMMAND_LINE: &str = "--set";
/// Settings that are lists and may be written with commas outside a file.
const LISTS: [&str; 1] = ["delay.lanes"];

/// A key and where its value came from; `None` for the defaults.
type Origins = Vec<(String, Option<String>)>;

impl Settings {
    /// Loads defaults, then `file`, then the environment, then `overrides` (`KEY=VALUE`), and checks the result.
    ///
    /// # Errors
    /// [`BadSettings`]: an unknown key, a value of the wrong form, a file that is not there, or values that do not
    /// fit together; with key and origin.
    pub fn load(file: Option<&Path>, overrides: &[String]) -> Result<Self, BadSettings> {
        // A variable that is not text is somebody else's.
        let text =
            std::env::vars_os().filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)));
        Self::load_with_environment(file, text.collect(), overrides)
    }

    /// The defaults alone, for a program that fills in its own addresses.
    ///
    /// # Panics
    /// Never: a test holds the defaults valid.
    #[must_use]
    pub fn defaults() -> Self {
        Self::load_with_environment(None, Map::new(), &[]).expect("config/default.toml is tested to be valid")
    }

    /// [`Settings::load`] with the environment given.
    ///
    /// # Errors
    /// As [`Settings::load`].
    pub fn load_with_environment(
        file: Option<&Path>,
        environment: Map<String, String>,
        overrides: &[String],
    ) -> Result<Self, BadSettings> {
        let merged = merge(file, environment, overrides)?;
        let origins = leaf_keys(&merged.cache);
        refuse_unknown_keys(&origins)?;
        let settings: Self = merged.try_deserialize().map_err(|fault| explain(&fault).with_origin(&origins))?;
        settings.validate().map_err(|fault| fault.with_origin(&origins))?;
        Ok(settings)
    }
}

impl BadSettings {
    fn plain(why: String) -> Self {
        Self { key: None, origin: None, why }
    }

    /// Fills in where the key's value came from, if that is not known yet.
    fn with_origin(mut self, origins: &Origins) -> Self {
        // An element of a list has the origin of the list.
        let name = self.key.as_deref().and_then(|key| key.split('[').next());
        let known = origins.iter().find(|(key, _)| name == Some(key));
        self.origin = self.origin.or_else(|| known.and_then(|(_, origin)| origin.clone()));
        self
    }
}

fn merge(file: Option<&Path>, environment: Map<String, String>, overrides: &[String]) -> Result<Config, BadSettings> {
    let mut builder = Config::builder().add_source(File::from_str(DEFAULTS, FileFormat::Toml));
    if let Some(path) = file {
        if !path.is_file() {
            let path = path.display();
            return Err(BadSettings::plain(format!(
                "there is no settings file {path}; correct --config or leave it out"
            )));
        }
        builder = builder.add_source(File::from(path).format(FileFormat::Toml));
    }
    for (key, value) in keys_in(environment) {
        builder = builder.set_override(&key, value_from(ENVIRONMENT, &key, &value)).map_err(|fault| explain(&fault))?;
    }
    for text in overrides {
        let (key, value) = text.split_once('=').filter(|(key, _)| !key.trim().is_empty()).ok_or_else(|| {
            BadSettings::plain(format!(
                "{COMMAND_LINE} {text:?} has no key before its \"=\"; write it as --set delay.lead=3s"
            ))
        })?;
        let key = key.trim();
        let value = value_from(COMMAND_LINE, key, value);
        builder = builder.set_override(key, value).map_err(|fault| explain(&fault))?;
    }
    builder.build().map_err(|fault| explain(&fault))
}

/// The settings among the environment's variables. `DATABASE_URL` counts where the longer name is not set.
fn keys_in(environment: Map<String, String>) -> Vec<(String, String)> {
    let database_url = environment.get("DATABASE_URL").map(|url| ("database.url".to_owned(), url.clone()));
    let ours = environment.into_iter().filter_map(|(name, value)| {
        let key = name.strip_prefix(ENV_PREFIX)?;
        Some((key.to_lowercase().replace("__", "."), value))
    });
    database_url.into_iter().chain(ours).collect()
}

/// Text as it was written; what it must be is said by the setting it is for.
fn value_from(origin: &str, key: &str, text: &str) -> Value {
    let origin = origin.to_owned();
    if LISTS.contains(&key) {
        let parts: Vec<String> = text.split(',').map(|part| part.trim().to_owned()).collect();
        return Value::new(Some(&origin), parts);
    }
    Value::new(Some(&origin), text)
}

/// Refuses keys that `config/default.toml` does not have. Done here rather than by serde so that the sentence can say
/// where the key stands and what was probably meant.
fn refuse_unknown_keys(origins: &Origins) -> Result<(), BadSettings> {
    let defaults = Config::builder().add_source(File::from_str(DEFAULTS, FileFormat::Toml)).build();
    let known = leaf_keys(&defaults.map_err(|fault| explain(&fault))?.cache);
    let Some((key, origin)) = origins.iter().find(|(key, _)| !known.iter().any(|(name, _)| name == key)) else {
        return Ok(());
    };
    let likeness = |name: &str| strsim::normalized_damerau_levenshtein(name, key);
    let meant = known.iter().max_by(|(a, _), (b, _)| likeness(a).total_cmp(&likeness(b)));
    let meant = meant.map_or_else(String::new, |(name, _)| format!("; did you mean {name}?"));
    let why = format!("there is no such setting{meant}");
    Err(BadSettings { key: Some(key.clone()), origin: origin.clone(), why })
}

/// Every key that holds a value rather than a section, with the origin of its value.
fn leaf_keys(root: &Value) -> Origins {
    fn walk(prefix: &str, value: &Value, into: &mut Origins) {
        match &value.kind {
            ValueKind::Table(table) => {
                for (key, value) in table {
                    let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                    walk(&key, value, into);
                }
            }
            _ => into.push((prefix.to_owned(), value.origin().map(str::to_owned))),
        }
    }
    let mut keys = Vec::new();
    walk("", root, &mut keys);
    keys.sort();
    keys
}

fn explain(error: &ConfigError) -> BadSettings {
    match error {
        ConfigError::Type { origin, unexpected, expected, key } => {
            // An address may hold a password, so its value is never repeated.
            let secret = key.as_deref().is_some_and(|key| key.ends_with("url"));
            let found = if secret { "another kind of value".to_owned() } else { unexpected.to_string() };
            let why = format!("expected {expected}, found {found}");
            BadSettings { key: key.as_deref().map(written_key), origin: origin.clone(), why }
        }
        ConfigError::At { error, origin, key } => {
            let inner = explain(error);
            BadSettings {
                key: key.as_deref().map(written_key).or(inner.key),
                origin: origin.clone().or(inner.origin),
                why: inner.why,
            }
        }
        ConfigError::FileParse { uri, cause } => {
            // Between its first and its last line the parser quotes the line that is wrong, password and all.
            let text = cause.to_string();
            let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
            let place = lines.first().copied().unwrap_or_default();
            let what = lines.last().copied().filter(|_| lines.len() > 1).unwrap_or_default();
            BadSettings { key: None, origin: uri.clone(), why: format!("the file is not valid: {place}: {what}") }
        }
        other => BadSettings::plain(other.to_string()),
    }
}

/// The config crate leaves out the dot behind an index.
fn written_key(key: &str) -> String {
    let mut written = String::new();
    for (index, character) in key.char_indices() {
        if index > 0 && key[..index].ends_with(']') && character.is_alphanumeric() {
            written.push('.');
        }
        written.push(character);
    }
    written
}
