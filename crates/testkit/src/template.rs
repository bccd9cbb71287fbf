//! A database with all migrations, which each environment copies: applying them takes several times as long as copying.
//!
//! One for each test process, and one with a clock that moves if a test needs it, dropped when no environment is left. Only on the
//! server that the environment variables name: a private server has one environment, for which a template saves nothing.

use order_timeout::Settings;
use order_timeout::config::DatabaseSettings;
use order_timeout::postgres::{self, DatabaseError, test_clock};
use tokio::sync::Mutex;
use uuid::Uuid;

use crate::{execute_on_server, is_on_private_database};

/// This process's templates.
static USERS: Mutex<Users> = Mutex::const_new(Users { count: 0, databases: [None, None] });

struct Users {
    /// How many environments there are. The templates stay while there are any: few tests have a clock, and making its template
    /// for each of them takes longer than most of them.
    count: usize,
    /// The database without the clock for tests, and the one with it.
    databases: [Option<String>; 2],
}

/// One environment's need of the template.
pub(crate) struct Template {
    /// `None` on a private server.
    database: Option<String>,
    /// Whether its clock can be moved.
    has_clock: bool,
}

impl Template {
    /// Creates the template for its first user. [`Self::release`] must follow.
    pub(crate) async fn acquire(settings: &Settings, has_clock: bool) -> Self {
        if is_on_private_database(settings) {
            return Self { database: None, has_clock };
        }
        let mut users = USERS.lock().await;
        let database = &mut users.databases[usize::from(has_clock)];
        if database.is_none() {
            *database = Some(create(settings, has_clock).await);
        }
        let database = database.clone();
        users.count += 1;
        Self { database, has_clock }
    }

    /// Creates the database that these settings name, with all migrations.
    pub(crate) async fn create_database(&self, name: &str, settings: &Settings) {
        match &self.database {
            Some(template) => {
                execute_on_server(settings, format!("CREATE DATABASE {name} TEMPLATE {template}")).await;
                if self.has_clock {
                    // Also a copy needs it, for the sessions of the test.
                    test_clock::create(&settings.database).await.unwrap();
                }
            }
            None => {
                execute_on_server(settings, format!("CREATE DATABASE {name}")).await;
                set_up(&settings.database, self.has_clock).await.unwrap();
            }
        }
    }

    /// Drops the templates after the last environment.
    pub(crate) async fn release(self, settings: Settings) {
        if self.database.is_none() {
            return;
        }
        let mut users = USERS.lock().await;
        users.count -= 1;
        if users.count == 0 {
            for template in users.databases.iter_mut().filter_map(Option::take) {
                execute_on_server(&settings, format!("DROP DATABASE {template} WITH (FORCE)")).await;
            }
        }
    }
}

/// Creates the template, or leaves nothing behind.
async fn create(settings: &Settings, has_clock: bool) -> String {
    let name = format!("order_timeout_template_{}", Uuid::now_v7().simple());
    execute_on_server(settings, format!("CREATE DATABASE {name}")).await;
    // Not the first test's timeouts.
    let mut database = Settings::load(None, &[]).unwrap().database;
    database.url = database.url_of(&name);
    if let Err(error) = set_up(&database, has_clock).await {
        execute_on_server(settings, format!("DROP DATABASE {name} WITH (FORCE)")).await;
        panic!("{error}");
    }
    name
}

async fn set_up(settings: &DatabaseSettings, has_clock: bool) -> Result<(), DatabaseError> {
    if has_clock {
        test_clock::create(settings).await?;
    }
    postgres::migrate(settings).await.map(drop)
}
