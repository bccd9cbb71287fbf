//! Who asks for a change on the command line, and why: for the record that is kept of it.

use std::os::unix::fs::MetadataExt;

use clap::Args;
use uuid::Uuid;

use crate::operations::name_or_reason;
use crate::postgres::Operator;

/// The operator of a command that changes orders or parked alarms.
#[derive(Debug, Args)]
pub struct OperatorArgs {
    /// Why, for the record that is kept; required for a change of all orders that a condition chooses
    #[arg(long, value_name = "TEXT", value_parser = name_or_reason)]
    why: Option<String>,
    /// Who asks for it, for the record that is kept; the user of the operating system if it is not given
    #[arg(long, value_name = "NAME", value_parser = name_or_reason)]
    who: Option<String>,
}

impl OperatorArgs {
    /// The operator of this run.
    pub fn operator(&self, run: Uuid) -> Operator {
        Operator { who: self.who.clone().unwrap_or_else(system_user), why: self.why.clone(), run }
    }
}

/// The name of the user that runs this process; under sudo, of the user that called it.
pub(super) fn system_user() -> String {
    let called_sudo = std::env::var("SUDO_USER").ok().filter(|name| !name.is_empty());
    called_sudo.unwrap_or_else(|| match std::fs::metadata("/proc/self") {
        Ok(process) => name_in_passwd(&std::fs::read_to_string("/etc/passwd").unwrap_or_default(), process.uid())
            .unwrap_or_else(|| format!("uid {}", process.uid())),
        Err(_) => std::env::var("USER").unwrap_or_else(|_| "unknown".to_owned()),
    })
}

/// The name of this user id (passwd(5): name, password, uid and so on, separated by colons).
fn name_in_passwd(passwd: &str, uid: u32) -> Option<String> {
    let uid = uid.to_string();
    let mut entries = passwd.lines().map(|line| line.split(':'));
    entries.find_map(|mut fields| {
        let name = fields.next()?;
        (fields.nth(1)? == uid).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_name_is_found_by_id() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nbroken\nshop:x:1000:100::/home/shop:/bin/sh\n";
        assert_eq!(name_in_passwd(passwd, 1_000).as_deref(), Some("shop"));
        assert_eq!(name_in_passwd(passwd, 100), None);
        assert!(!system_user().is_empty());
    }
}
