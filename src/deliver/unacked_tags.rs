//! Which delivery tags of a channel are still open, and the fewest frames that settle the rest.
//!
//! Pure bookkeeping. `multiple` settles every open tag up to and including the one named, so it may be used only where
//! no lower tag is still open.

use std::collections::BTreeSet;

/// The open deliveries of one channel.
#[derive(Debug, Default)]
pub struct UnackedTags {
    open: BTreeSet<u64>,
}

/// The frames that settle some tags.
#[derive(Debug, PartialEq, Eq, Default)]
pub struct AckPlan {
    /// One frame for this tag and all below it.
    pub up_to: Option<u64>,
    /// A frame each.
    pub single: Vec<u64>,
}

impl UnackedTags {
    /// Notes a delivery. Tags come in ascending order.
    pub fn open(&mut self, tag: u64) {
        self.open.insert(tag);
    }

    /// Closes these tags and returns the frames for it. A tag that is not open is omitted: settling it twice is an
    /// error 406 that closes the channel.
    pub fn close(&mut self, tags: impl IntoIterator<Item = u64>) -> AckPlan {
        let mut closing: Vec<u64> = tags.into_iter().filter(|tag| self.open.remove(tag)).collect();
        closing.sort_unstable();
        let first_open = self.open.first().copied().unwrap_or(u64::MAX);
        let single = closing.split_off(closing.partition_point(|tag| *tag < first_open));
        match closing.len() {
            0 | 1 => AckPlan { up_to: None, single: closing.into_iter().chain(single).collect() },
            _ => AckPlan { up_to: closing.last().copied(), single },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn gap_stops_multiple_acknowledgement() {
        let mut unacked = UnackedTags::default();
        (1..=6).for_each(|tag| unacked.open(tag));
        assert_eq!(unacked.close([1, 2, 4, 6]), AckPlan { up_to: Some(2), single: vec![4, 6] });
        assert_eq!(unacked.close([3, 5]), AckPlan { up_to: Some(5), single: vec![] });
        assert_eq!(unacked.close([3]), AckPlan::default());
    }

    proptest! {
        /// A broker that applies `multiple` literally settles only the requested tags.
        #[test]
        fn exactly_what_was_closed_is_settled(order in Just((1_u64..60).collect::<Vec<_>>()).prop_shuffle(), size in 1_usize..20) {
            let mut unacked = UnackedTags::default();
            let mut at_broker: BTreeSet<u64> = (1..60).collect();
            at_broker.iter().for_each(|tag| unacked.open(*tag));
            let mut settled = BTreeSet::new();
            for tags in order.chunks(size) {
                let plan = unacked.close(tags.iter().copied());
                if let Some(up_to) = plan.up_to {
                    prop_assert!(at_broker.contains(&up_to));
                    let rest = at_broker.split_off(&(up_to + 1));
                    settled.extend(std::mem::replace(&mut at_broker, rest));
                }
                for tag in plan.single {
                    prop_assert!(at_broker.remove(&tag), "settled {tag} twice");
                    settled.insert(tag);
                }
                prop_assert_eq!(&at_broker, &unacked.open);
            }
            prop_assert_eq!(settled.len(), 59);
        }
    }
}
