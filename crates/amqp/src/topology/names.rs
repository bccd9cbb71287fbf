//! The names of exchanges, queues and routing keys. No I/O; `topology.rs` has the arguments of the objects.

use order_timeout_core::InvalidSetting;
use order_timeout_core::kind::Kind;

/// Routing key of a message for the processing queues of the default kind.
pub const DUE_KEY: &str = "due";

const DEFAULT_VHOST: &str = "/";

/// A word that a shell passes on as it is.
#[must_use]
pub fn in_shell(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Names on the broker, all beginning with the namespace, and the virtual host that they are on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    namespace: String,
    vhost: String,
}

impl Names {
    /// Takes any text; [`Names::validate`] checks it.
    #[must_use]
    pub fn new(namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), vhost: DEFAULT_VHOST.to_owned() }
    }

    /// The same names on this virtual host.
    #[must_use]
    pub fn on_vhost(self, vhost: &str) -> Self {
        Self { vhost: vhost.to_owned(), ..self }
    }

    /// The command that gives a user the rights of a worker.
    #[must_use]
    pub fn grant(&self, user: &str) -> String {
        let (vhost, user, namespace) = (self.vhost_option(), in_shell(user), &self.namespace);
        let pattern = format!(r"'^{namespace}\.'");
        format!("rabbitmqctl set_permissions{vhost} {user} {pattern} {pattern} {pattern}")
    }

    /// The option that a command of `rabbitmqctl` needs to find these names, with a space before it: ` -p orders`. Empty for
    /// the default virtual host.
    #[must_use]
    pub fn vhost_option(&self) -> String {
        if self.vhost == DEFAULT_VHOST { String::new() } else { format!(" -p {}", in_shell(&self.vhost)) }
    }

    /// Checks that this can be the prefix of every name: 1 to 60 ASCII letters, digits, `-` or `_`, and not `amq`.
    ///
    /// # Errors
    /// [`InvalidSetting`] says which characters are allowed.
    pub fn validate(namespace: &str) -> Result<(), InvalidSetting> {
        let fits = (1..=60).contains(&namespace.len())
            && namespace.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        if namespace == "amq" {
            let why =
                "\"amq\" is reserved: the broker refuses to declare names that begin with \"amq.\"; choose another";
            return Err(InvalidSetting::new("namespace", why));
        }
        if fits {
            return Ok(());
        }
        let why = format!(
            "{namespace:?} must be 1 to 60 letters, digits, \"-\" or \"_\", because it is the prefix of every queue name"
        );
        Err(InvalidSetting::new("namespace", why))
    }

    /// The prefix.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    fn name(&self, what: &str) -> String {
        format!("{}.{what}", self.namespace)
    }

    /// The name of something that each kind has; that of the default kind is the bare one.
    fn of_kind(what: &str, kind: &Kind) -> String {
        if kind.is_default() { what.to_owned() } else { format!("{what}.{kind}") }
    }

    /// Exchange: publishers write alarms for a standard delay here, under a [`Names::lane_key`].
    #[must_use]
    pub fn delay(&self) -> String {
        self.name("delay")
    }

    /// Exchange of the `delayed-exchange` strategy.
    #[must_use]
    pub fn delayed(&self) -> String {
        self.name("delayed")
    }

    /// Exchange and queue: the inbox for any other delay, and for services in other languages.
    #[must_use]
    pub fn schedule(&self) -> String {
        self.name("schedule")
    }

    /// Exchange: only the worker publishes into the wheel's slots.
    #[must_use]
    pub fn wheel(&self) -> String {
        self.name("wheel")
    }

    /// Exchange: alarms whose delay is over.
    #[must_use]
    pub fn due(&self) -> String {
        self.name("due")
    }

    /// Exchange: distributes due alarms over several processing queues.
    #[must_use]
    pub fn shards(&self) -> String {
        self.name("shards")
    }

    /// Queue: the processing queue of the default kind, or the first of several, so that nothing has to move when there are
    /// more.
    #[must_use]
    pub fn timeout(&self) -> String {
        self.timeout_of(&Kind::ORDER)
    }

    /// Queue: the processing queue of a kind.
    #[must_use]
    pub fn timeout_of(&self, kind: &Kind) -> String {
        self.name(&Self::of_kind("timeout", kind))
    }

    /// Queue: one of the processing queues of the default kind, counted from 0.
    #[must_use]
    pub fn shard(&self, shard: u8) -> String {
        if shard == 0 { self.timeout() } else { self.name(&format!("timeout.{shard}")) }
    }

    /// Routing key of a message for the processing queues of this kind.
    #[must_use]
    pub fn due_key(kind: &Kind) -> String {
        Self::of_kind(DUE_KEY, kind)
    }

    /// Exchange and queue: messages that the broker dead-lettered from the inbox or the processing queue.
    #[must_use]
    pub fn parked(&self) -> String {
        self.name("parked")
    }

    /// Exchange: events for the rest of the shop.
    #[must_use]
    pub fn events(&self) -> String {
        self.name("events")
    }

    /// Routing key on [`Names::delay`] of a lane, for publishers that do not shard.
    #[must_use]
    pub fn whole_lane_key(kind: &Kind, lane: &str) -> String {
        if kind.is_default() { lane.to_owned() } else { format!("{kind}.{lane}") }
    }

    /// Routing key on [`Names::delay`] of one shard of a lane.
    #[must_use]
    pub fn lane_key(kind: &Kind, lane: &str, shard: u8) -> String {
        format!("{}.{shard}", Self::whole_lane_key(kind, lane))
    }

    /// Routing key of a wheel slot on [`Names::wheel`].
    #[must_use]
    pub fn slot_key(ring: &str, slot: u16) -> String {
        format!("{ring}.{slot:02}")
    }

    /// Queue: one shard of a lane.
    #[must_use]
    pub fn lane_queue(&self, kind: &Kind, lane: &str, shard: u8) -> String {
        self.name(&format!("delay.{}", Self::lane_key(kind, lane, shard)))
    }

    /// Queue: one slot of a ring.
    #[must_use]
    pub fn slot_queue(&self, ring: &str, slot: u16) -> String {
        format!("{}.{}", self.wheel(), Self::slot_key(ring, slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vhost_is_quoted_for_the_shell() {
        let option = |vhost| Names::new("order").on_vhost(vhost).vhost_option();
        assert_eq!(option("/"), "");
        assert_eq!(option("orders"), " -p orders");
        assert_eq!(option("a b's"), r" -p 'a b'\''s'");
        assert_eq!(option(""), " -p ''");
    }
}
