//! Loads settings from defaults, a file, the environment and the command line, and explains errors in them.
//!
//! Reads, never checks what a value means (`Settings::validate` does), and never repeats a secret.

use std::io::Read;
use std::path::Path;

use config::builder::DefaultState;
use config::{Config, ConfigBuilder, ConfigError, File, FileFormat, Format, Map, Source, Value, ValueKind};
use order_timeout_core::kind::Kind;
use secrecy::SecretString;

use super::secret_files::is_secret_file;
use super::validate::NOT_UTF8;
use super::{DEFAULTS, POSTGRES_FORM, Settings, SettingsError, is_a_key};

const ENV_PREFIX: &str = "ORDER_TIMEOUT__";
/// A frequent misspelling of the prefix.
const ENV_PREFIX_CUT_SHORT: &str = "ORDER_TIMEOUT_";
const DATABASE_URL_NAME: &str = "ORDER_TIMEOUT__DATABASE__URL";
/// The name that many programs use for the database's address.
const DATABASE_URL: &str = "DATABASE_URL";
const ENVIRONMENT: &str = "the environment";
const COMMAND_LINE: &str = "--set";
/// Settings that are lists, which are separated by commas outside a file.
const LISTS: [&str; 4] = ["delay.lanes", "worker.kinds", "worker.take_shards", "http.hosts"];
/// How a list is written in a file.
const LIST_FORM: &str = "lanes = [\"15m\"]";
/// Lists of a kind, behind its name.
const LISTS_OF_KIND: [&str; 4] = ["lanes", "remind", "providers", "table.id"];

/// The least similarity of a key and the one suggested for it, from 0 to 1: two letters in five may differ.
const LEAST_SIMILARITY: f64 = 0.6;

/// Larger than any address.
const LARGEST_SECRET_BYTES: u64 = 64 * 1024;

/// A key and where its value came from; `None` for the defaults.
type Origins = Vec<(String, Option<String>)>;

/// What a program does with the database's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DatabaseUse {
    /// Nothing, such as a publisher, which may have a `DATABASE_URL` of another kind.
    Ignored,
    /// Uses the database if one is given: otherwise, and for an address of another kind, `database.url` is empty
    /// ([`DatabaseSettings::is_given`](super::DatabaseSettings::is_given)).
    IfGiven,
    /// Needs it, such as a worker.
    Needed,
    /// Writes tables into it: a missing address is an error, because the default one is rarely meant.
    Named,
}

impl Settings {
    /// Loads defaults, then `file`, then the environment, then `overrides` (`KEY=VALUE`), and checks the result.
    /// Sufficient for a publisher: the database's address is not checked.
    ///
    /// # Errors
    /// [`SettingsError`]: an unknown key, a value of the wrong form, a missing file, or values that do not fit
    /// together; with key and origin.
    pub fn load(file: Option<&Path>, overrides: &[String]) -> Result<Self, SettingsError> {
        Self::load_for(DatabaseUse::Ignored, file, overrides)
    }

    /// [`Settings::load`] for a program that needs the database, such as a worker.
    ///
    /// # Errors
    /// As [`Settings::load`], or if `database.url` is not the address of a Postgres.
    pub fn load_with_database(file: Option<&Path>, overrides: &[String]) -> Result<Self, SettingsError> {
        Self::load_for(DatabaseUse::Needed, file, overrides)
    }

    /// [`Settings::load`] for a program with this use of the database.
    ///
    /// # Errors
    /// As [`Settings::load`], or if `database.url` is not what the use asks for.
    pub fn load_for(used: DatabaseUse, file: Option<&Path>, overrides: &[String]) -> Result<Self, SettingsError> {
        load(used, merge(file, environment(), overrides)?)
    }

    /// The defaults only, for a program that sets its own addresses.
    ///
    /// # Panics
    /// Never: a test holds the defaults valid.
    #[must_use]
    pub fn defaults() -> Self {
        Self::load_with_environment(None, Map::new(), &[]).expect("config/default.toml is tested to be valid")
    }

    /// [`Settings::load`] with the environment as an argument.
    ///
    /// # Errors
    /// As [`Settings::load`].
    pub fn load_with_environment(
        file: Option<&Path>,
        environment: Map<String, String>,
        overrides: &[String],
    ) -> Result<Self, SettingsError> {
        load(DatabaseUse::Ignored, merge(file, environment, overrides)?)
    }
}

pub(super) fn load(used: DatabaseUse, merged: Config) -> Result<Settings, SettingsError> {
    let (mut settings, mut origins) = check(merged)?;
    if used == DatabaseUse::Ignored {
        return Ok(settings);
    }
    let database = &mut settings.database;
    let read = read_secret("database.url", &mut database.url, &database.url_file, &mut origins);
    let checked = read.and_then(|()| settings.validate_database().map_err(|fault| fault.with_origin(&origins)));
    // The default address is only for trying out.
    let is_given = origins.iter().any(|(key, origin)| key == "database.url" && origin.is_some());
    match used {
        DatabaseUse::IfGiven if !is_given || checked.is_err() => settings.database.url = SecretString::default(),
        _ => checked?,
    }
    if used == DatabaseUse::Named && !is_given {
        let default = "127.0.0.1:5432, database \"postgres\"";
        let why = format!(
            "is not given, and setup does not write tables to the default address ({default}); set {DATABASE_URL_NAME} to {POSTGRES_FORM}"
        );
        return Err(SettingsError::of("database.url", why));
    }
    Ok(settings)
}

/// This process' environment, with a replacement character for what is not UTF-8. Only our own variables need be.
pub(super) fn environment() -> Map<String, String> {
    let variables = std::env::vars_os();
    variables.map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())).collect()
}

/// Reads merged values as settings, and checks them.
pub(super) fn check(merged: Config) -> Result<(Settings, Origins), SettingsError> {
    let mut origins = leaf_keys(&merged.cache);
    refuse_unknown_keys(&origins)?;
    refuse_kinds_of_no_setting(&merged.cache)?;
    refuse_names_of_no_kind(&merged.cache, &origins)?;
    let secret_files = secret_files(&merged.cache);
    let mut settings: Settings = merged.try_deserialize().map_err(|fault| explain(&fault).with_origin(&origins))?;
    settings.secret_files = secret_files;
    read_secret("amqp.url", &mut settings.amqp.url, &settings.amqp.url_file, &mut origins)?;
    for (name, kind) in &mut settings.kinds {
        let table = format!("kinds.{name}.table.table");
        kind.origin = origins.iter().find(|(key, _)| *key == table).and_then(|(_, origin)| origin.clone());
    }
    settings.validate().map_err(|fault| fault.with_origin(&origins))?;
    Ok((settings, origins))
}

fn secret_files(all: &Value) -> Vec<(String, String)> {
    let named = |(key, value): (String, &Value)| match &value.kind {
        ValueKind::String(path) if is_secret_file(&key) && !path.is_empty() => Some((key, path.clone())),
        _ => None,
    };
    leaves("", all).into_iter().filter_map(named).collect()
}

/// Reads the address from the file named for it, if one is named: Docker and Kubernetes provide secrets as files.
fn read_secret(key: &str, secret: &mut SecretString, path: &str, origins: &mut Origins) -> Result<(), SettingsError> {
    if path.is_empty() {
        return Ok(());
    }
    let file_key = format!("{key}_file");
    let fault =
        |why: String, origins: &Origins| SettingsError::new(Some(file_key.clone()), None, why).with_origin(origins);
    let given = origins.iter_mut().find(|(known, _)| known == key).map(|(_, origin)| origin);
    let origin = given.expect("config/default.toml has an address beside every file for one");
    if let Some(origin) = origin {
        let why = format!("is given, and so is {key} (from {origin}); drop one of the two");
        return Err(fault(why, origins));
    }
    match secret_in(path) {
        Ok(text) => {
            *origin = Some(format!("the file {path}"));
            *secret = text.into();
            Ok(())
        }
        Err(why) => Err(fault(format!("the file {path} {why}"), origins)),
    }
}

/// The only line of a secret's file, without its line break, which editors and `echo` add.
fn secret_in(path: &str) -> Result<String, String> {
    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(LARGEST_SECRET_BYTES).read_to_string(&mut text));
    read.map_err(|error| format!("cannot be read: {error}; mount the secret there, or name the file that holds it"))?;
    let line = text.trim_end_matches(['\r', '\n']);
    if line.is_empty() {
        return Err("is empty; write the whole address into it".to_owned());
    }
    if line.contains(['\r', '\n']) {
        return Err("has more than one line; write the address into it and nothing else".to_owned());
    }
    Ok(line.to_owned())
}

impl SettingsError {
    fn plain(why: String) -> Self {
        Self::new(None, None, why)
    }

    /// Adds the origin of the key's value, if it is not known yet.
    fn with_origin(mut self, origins: &Origins) -> Self {
        // An element of a list has the origin of the list.
        let name = self.key.as_deref().and_then(|key| key.split('[').next());
        let known = origins.iter().find(|(key, _)| name == Some(key));
        // A table has no value, and so no origin of its own; nor has a setting that is missing.
        let section =
            name.filter(|name| is_of_shop(name)).map(|name| name.split('.').take(2).collect::<Vec<_>>().join("."));
        let beside =
            || section.and_then(|section| origins.iter().find(|(key, _)| key.starts_with(&format!("{section}."))));
        let known = known.or_else(beside);
        self.origin = self.origin.or_else(|| known.and_then(|(_, origin)| origin.clone()));
        self
    }
}

pub(super) fn merge(
    file: Option<&Path>,
    environment: Map<String, String>,
    overrides: &[String],
) -> Result<Config, SettingsError> {
    let mut builder = defaults();
    if let Some(path) = file {
        builder = builder.add_source(SettingsFile::read(path)?);
    }
    refuse_names_cut_short(&environment)?;
    refuse_names_of_nothing(&environment)?;
    for (key, value) in keys_in(environment) {
        // The database's address may be the shop's own `DATABASE_URL`, and is checked when it is used.
        if value.contains(char::REPLACEMENT_CHARACTER) && key != "database.url" {
            return Err(SettingsError::new(Some(key), Some(ENVIRONMENT.to_owned()), NOT_UTF8.to_owned()));
        }
        builder =
            builder.set_override(&key, value_from(ENVIRONMENT, &key, &value)?).map_err(|fault| explain(&fault))?;
    }
    for (index, text) in overrides.iter().enumerate() {
        // The text is not repeated: it may be an address, and its "=" part of the address.
        let (key, value) = text.split_once('=').filter(|(key, _)| is_a_key(key.trim())).ok_or_else(|| {
            let (ordinal, count) = (index + 1, overrides.len());
            SettingsError::plain(format!(
                "{COMMAND_LINE} ({ordinal} of {count}) is no KEY=VALUE; write it as --set delay.lead=3s"
            ))
        })?;
        let key = key.trim();
        let value = value_from(COMMAND_LINE, key, value)?;
        builder = builder.set_override(key, value).map_err(|fault| explain(&fault))?;
    }
    builder.build().map_err(|fault| explain(&fault))
}

/// A settings file that has been read. The config crate's own source shows a different path in its errors than the one
/// given.
#[derive(Debug, Clone)]
struct SettingsFile {
    path: String,
    text: String,
}

impl SettingsFile {
    fn read(path: &Path) -> Result<Self, SettingsError> {
        let text = std::fs::read_to_string(path);
        let path = path.display().to_string();
        match text {
            Ok(text) => Ok(Self { path, text }),
            Err(error) => {
                let shown = if path.contains("://") { "of that name" } else { &path };
                let why = format!("the file {shown} cannot be read: {error}; correct --config or leave it out");
                Err(SettingsError { key: None, origin: None, why })
            }
        }
    }
}

impl Source for SettingsFile {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, ConfigError> {
        let parsed = FileFormat::Toml.parse(Some(&self.path), &self.text);
        parsed.map_err(|cause| ConfigError::FileParse { uri: Some(self.path.clone()), cause })
    }
}

/// The settings among the environment's variables. `DATABASE_URL` counts only if neither long name is set.
fn keys_in(environment: Map<String, String>) -> Vec<(String, String)> {
    let database_url = environment.get(DATABASE_URL).map(|url| ("database.url".to_owned(), url.clone()));
    let database_url = database_url.filter(|_| !environment.contains_key("ORDER_TIMEOUT__DATABASE__URL_FILE"));
    let ours = environment.into_iter().filter_map(|(name, value)| {
        let key = name.strip_prefix(ENV_PREFIX)?;
        Some((key.to_lowercase().replace("__", "."), value))
    });
    database_url.into_iter().chain(ours).collect()
}

/// Refuses names that differ from ours only by a missing underscore: they would be ignored, and the program would use
/// the default servers. Other names that begin like ours belong to our scripts, or to Kubernetes, which creates some
/// for every service.
fn refuse_names_cut_short(environment: &Map<String, String>) -> Result<(), SettingsError> {
    let known = every_key();
    let meant = environment.keys().filter_map(|name| Some((name, name_meant_by(name, &known)?)));
    // The first by name, so that the same environment always gives the same error.
    let Some((name, meant)) = meant.min() else { return Ok(()) };
    let why = format!("it is not read; did you mean {meant}?");
    Err(SettingsError::new(Some(name.clone()), Some(ENVIRONMENT.to_owned()), why))
}

/// Refuses names with our prefix and no valid key: the config crate would only report an invalid identifier.
fn refuse_names_of_nothing(environment: &Map<String, String>) -> Result<(), SettingsError> {
    let is_a_name =
        |rest: &str| rest.split("__").all(|part| part.starts_with(|first: char| first.is_ascii_alphabetic()));
    let names_nothing = |name: &&String| name.strip_prefix(ENV_PREFIX).is_some_and(|rest| !is_a_name(rest));
    let Some(name) = environment.keys().filter(names_nothing).min() else { return Ok(()) };
    let why = format!("it names no setting; write it as {ENV_PREFIX}DELAY__LEAD");
    Err(SettingsError::new(Some(name.clone()), Some(ENVIRONMENT.to_owned()), why))
}

/// The right name for `ORDER_TIMEOUT_DATABASE__ANYTHING` if there is such a section, and for
/// `ORDER_TIMEOUT_DATABASE_URL` if there is such a key.
fn name_meant_by(name: &str, known: &[String]) -> Option<String> {
    let rest = name.strip_prefix(ENV_PREFIX_CUT_SHORT).filter(|rest| !rest.starts_with('_'))?;
    let written = rest.to_lowercase();
    let section = written.split_once("__").map(|(section, _)| format!("{section}."));
    if section.is_some_and(|section| known.iter().any(|key| key.starts_with(&section))) {
        return Some(format!("{ENV_PREFIX}{rest}"));
    }
    let key = known.iter().find(|key| key.replace('.', "_") == written)?;
    Some(format!("{ENV_PREFIX}{}", key.replace('.', "__").to_uppercase()))
}

/// The text unchanged; its setting defines what it must be. A list or a table may also be written as in a file.
fn value_from(origin: &str, key: &str, text: &str) -> Result<Value, SettingsError> {
    let origin = origin.to_owned();
    let is_list = LISTS.contains(&key) || is_list_of_kind(key);
    let may_be_nested = is_list || key == "delay.rings" || is_of_shop(key);
    if may_be_nested && text.trim_start().starts_with(['[', '{']) {
        let parsed = FileFormat::Toml.parse(Some(&origin), &format!("value = {}", text.trim()));
        return parsed.ok().and_then(|mut parsed| parsed.remove("value").filter(|_| parsed.is_empty())).ok_or_else(
            || {
                let why =
                    format!("it is no list or table as a file has it; write it like {LIST_FORM}, without the name");
                SettingsError::new(Some(key.to_owned()), Some(origin), why)
            },
        );
    }
    if is_list {
        let parts: Vec<String> = match text.trim() {
            "" => Vec::new(),
            text => text.split(',').map(|part| part.trim().to_owned()).collect(),
        };
        return Ok(Value::new(Some(&origin), parts));
    }
    Ok(Value::new(Some(&origin), text))
}

fn is_list_of_kind(key: &str) -> bool {
    key.strip_prefix("kinds.")
        .and_then(|rest| rest.split_once('.'))
        .is_some_and(|(_, name)| LISTS_OF_KIND.contains(&name))
}

/// What a kind or a provider has is checked when it is read: its name, and those of its columns, are the shop's.
fn is_of_shop(key: &str) -> bool {
    key.starts_with("kinds.") || key.starts_with("providers.")
}

/// A value for a column of the shop's, of whatever type the column has.
fn is_of_column(key: &str) -> bool {
    key.starts_with("kinds.") && key.split_once(".table.").is_some_and(|(_, name)| name.contains('.'))
}

/// Refuses keys that the defaults do not have. Done here rather than by serde so that the sentence can name
/// the key's origin and the key that was probably meant.
fn refuse_unknown_keys(origins: &Origins) -> Result<(), SettingsError> {
    let known = every_key();
    let Some((key, origin)) = origins.iter().find(|(key, _)| !known.contains(key) && !is_of_shop(key)) else {
        return Ok(());
    };
    let similarity = |name: &str| strsim::normalized_damerau_levenshtein(name, key);
    let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    // The same section alone is not enough.
    let is_like = |name: &&String| strsim::normalized_damerau_levenshtein(&last(name), &last(key)) >= LEAST_SIMILARITY;
    let meant = known.iter().filter(is_like).max_by(|a, b| similarity(a).total_cmp(&similarity(b)));
    let meant = meant.map_or_else(String::new, |name| format!("; did you mean {name}?"));
    let why = format!("there is no such setting{meant}");
    Err(SettingsError::new(Some(key.clone()), origin.clone(), why))
}

/// Refuses sections that no kind can have. Done here because serde's error would name no key.
fn refuse_names_of_no_kind(root: &Value, origins: &Origins) -> Result<(), SettingsError> {
    let of = |value: &Value, name: &str| match &value.kind {
        ValueKind::Table(table) => table.get(name).cloned(),
        _ => None,
    };
    let Some(ValueKind::Table(kinds)) = of(root, "kinds").map(|kinds| kinds.kind) else { return Ok(()) };
    let wrong = kinds.keys().filter_map(|name| Some((name, Kind::new(name).err()?)));
    match wrong.min_by_key(|(name, _)| *name) {
        Some((name, fault)) => Err(SettingsError::of(&format!("kinds.{name}"), fault).with_origin(origins)),
        None => Ok(()),
    }
}

/// Refuses fractions, which no setting has, and a truth value for a setting that is none: the config crate would round the
/// former and convert the latter to a number or a word. And refuses a number for a truth value.
fn refuse_kinds_of_no_setting(root: &Value) -> Result<(), SettingsError> {
    let leaves = elements("", root);
    let truths = truth_keys();
    if let Some((key, value)) = leaves.iter().find(|(key, value)| {
        truths.contains(key) && !matches!(value.kind, ValueKind::Boolean(_) | ValueKind::String(_))
    }) {
        let why = format!("{value} is no truth value; write true or false");
        return Err(SettingsError::new(Some(key.clone()), value.origin().map(str::to_owned), why));
    }
    // The truth values of a provider are known to its type.
    let is_truth = |key: &String| truths.contains(key) || key.starts_with("providers.");
    let mut found = leaves.iter().filter(|(key, _)| !is_of_column(key)).filter_map(|(key, value)| match &value.kind {
        ValueKind::Float(fraction) => Some((key, value, format!("{fraction} is a fraction"))),
        ValueKind::Boolean(truth) if !is_truth(key) => Some((key, value, format!("{truth} is a truth value"))),
        _ => None,
    });
    let Some((key, value, found)) = found.next() else { return Ok(()) };
    let why = format!("{found}; write a whole number, or a text in quotes, as config/default.toml has it");
    Err(SettingsError::new(Some(key.clone()), value.origin().map(str::to_owned), why))
}

/// The keys that the defaults have.
pub(super) fn every_key() -> Vec<String> {
    leaf_keys(&default_values().cache).into_iter().map(|(key, _)| key).collect()
}

/// The keys whose value in `config/default.toml` is true or false.
fn truth_keys() -> Vec<String> {
    let defaults = default_values();
    let is_truth = |(_, value): &(String, &Value)| matches!(value.kind, ValueKind::Boolean(_));
    leaves("", &defaults.cache).into_iter().filter(is_truth).map(|(key, _)| key).collect()
}

fn default_values() -> Config {
    defaults().build().expect("config/default.toml is tested to be valid")
}

fn defaults() -> ConfigBuilder<DefaultState> {
    let sources = DEFAULTS.map(|text| File::from_str(text, FileFormat::Toml));
    sources.into_iter().fold(Config::builder(), |builder, source| builder.add_source(source))
}

/// Every key that holds a value rather than a section, with the origin of its value.
fn leaf_keys(root: &Value) -> Origins {
    leaves("", root).into_iter().map(|(key, value)| (key, value.origin().map(str::to_owned))).collect()
}

/// The values beneath `key` that are not sections, with their keys, sorted by key; a list counts as one value.
pub(super) fn leaves<'a>(key: &str, value: &'a Value) -> Vec<(String, &'a Value)> {
    let ValueKind::Table(table) = &value.kind else { return vec![(key.to_owned(), value)] };
    let dot = if key.is_empty() { "" } else { "." };
    let mut leaves: Vec<_> =
        table.iter().flat_map(|(name, value)| leaves(&format!("{key}{dot}{name}"), value)).collect();
    leaves.sort_by(|(a, _), (b, _)| a.cmp(b));
    leaves
}

/// The same, with the elements of lists by their numbers.
fn elements<'a>(key: &str, value: &'a Value) -> Vec<(String, &'a Value)> {
    let of_leaf = |(key, value): (String, &'a Value)| match &value.kind {
        ValueKind::Array(list) => {
            (0..).zip(list).flat_map(|(number, value)| elements(&format!("{key}[{number}]"), value)).collect()
        }
        _ => vec![(key, value)],
    };
    leaves(key, value).into_iter().flat_map(of_leaf).collect()
}

fn explain(error: &ConfigError) -> SettingsError {
    match error {
        ConfigError::Type { origin, unexpected, expected, key } => {
            // An address may contain a password, so its value is never repeated.
            let secret = key.as_deref().is_some_and(|key| key.ends_with("url"));
            let found = if secret { "another kind of value".to_owned() } else { unexpected.to_string() };
            let why = format!("expected {expected}, found {found}");
            SettingsError::new(key.as_deref().map(written_key), origin.clone(), why)
        }
        ConfigError::At { error, origin, key } => {
            let inner = explain(error);
            let key = key.as_deref().map(written_key).or(inner.key);
            SettingsError::new(key, origin.clone().or(inner.origin), inner.why)
        }
        ConfigError::FileParse { uri, cause } => {
            // Between its first and its last line the parser quotes the wrong line, which may contain a password.
            let text = cause.to_string();
            let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
            let place = lines.first().copied().unwrap_or_default();
            let what = lines.last().copied().filter(|_| lines.len() > 1).unwrap_or_default();
            SettingsError::new(None, uri.clone(), format!("the file is not valid: {place}: {what}"))
        }
        ConfigError::NotFound(key) => SettingsError::new(Some(written_key(key)), None, "is missing; add it".to_owned()),
        other => SettingsError::plain(with_fix(other.to_string())),
    }
}

/// serde's message about a value of the wrong form, with what to write instead.
fn with_fix(text: String) -> String {
    if text.ends_with("expected a duration") {
        return text + "; write a number and its unit, such as 3s or 250ms";
    }
    if let Some(found) = text.strip_suffix("expected a sequence") {
        return format!("{found}expected a list; write it in brackets, such as {LIST_FORM}");
    }
    match text.strip_prefix("unknown variant ").and_then(|rest| rest.split_once(", expected ")) {
        Some((word, words)) => format!("{word} is none of its words; write {words}").replace('`', "\""),
        None => text,
    }
}

/// The key with the dot after an index, which the config crate leaves out.
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
