//! Which delivery tags of a channel are still open, and with how few frames the rest can be settled.
//!
//! Pure bookkeeping. `multiple` settles every open tag up to and including the one named, so it may be used only where
//! nothing below that tag is still in somebody's hands.

use std::collections::BTreeSet;

/// The open deliveries of one channel.
#[derive(Debug, Default)]
pub struct Ledger {
    open: BTreeSet<u64>,
}

/// The frames that settle some tags.
#[derive(Debug, PartialEq, Eq, Default)]
pub struct Frames {
    /// One frame for this tag and all below it.
    pub up_to: Option<u64>,
    /// A frame each.
    pub single: Vec<u64>,
}

impl Ledger {
    /// Notes a delivery. Tags come in ascending order.
    pub fn open(&mut self, tag: u64) {
        self.open.insert(tag);
    }

    /// Closes these tags and says with which frames. A tag that is not open is left out: settling it twice would be
    /// 406 and close the channel.
    pub fn close(&mut self, tags: impl IntoIterator<Item = u64>) -> Frames {
        let mut closing: Vec<u64> = tags.into_iter().filter(|tag| self.open.remove(tag)).collect();
        closing.sort_unstable();
        let first_open = self.open.first().copied().unwrap_or(u64::MAX);
        let single = closing.split_off(closing.partition_point(|tag| *tag < first_open));
        match closing.len() {
            0 | 1 => Frames { up_to: None, single: closing.into_iter().chain(single).collect() },
            _ => Frames { up_to: closing.last().copied(), single },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_gap_stops_the_multiple_acknowledgement() {
        let mut ledger = Ledger::default();
        (1..=6).for_each(|tag| ledger.open(tag));
        assert_eq!(ledger.close([1, 2, 4, 6]), Frames { up_to: Some(2), single: vec![4, 6] });
        assert_eq!(ledger.close([3, 5]), Frames { up_to: Some(5), single: vec![] });
        assert_eq!(ledger.close([3]), Frames::default());
    }

    proptest! {
        /// A broker that takes `multiple` literally never settles what was not asked for.
        #[test]
        fn exactly_what_was_closed_is_settled(order in Just((1_u64..60).collect::<Vec<_>>()).prop_shuffle(), size in 1_usize..20) {
            let mut ledger = Ledger::default();
            let mut at_broker: BTreeSet<u64> = (1..60).collect();
            at_broker.iter().for_each(|tag| ledger.open(*tag));
            let mut settled = BTreeSet::new();
            for tags in order.chunks(size) {
                let frames = ledger.close(tags.iter().copied());
                if let Some(up_to) = frames.up_to {
                    prop_assert!(at_broker.contains(&up_to));
                    let rest = at_broker.split_off(&(up_to + 1));
                    settled.extend(std::mem::replace(&mut at_broker, rest));
                }
                for tag in frames.single {
                    prop_assert!(at_broker.remove(&tag), "settled {tag} twice");
                    settled.insert(tag);
                }
                prop_assert_eq!(&at_broker, &ledger.open);
            }
            prop_assert_eq!(settled.len(), 59);
        }
    }
}
