//! Which templates of warm starts are removed when they take more space than they may.

/// A template as the decision sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateUse {
    /// Bytes of the disk that it takes.
    pub bytes: u64,
    /// Time of its last start, seconds since 1970.
    pub used_s: u64,
    /// Whether it may not be removed: it was just made, or a start reads it.
    pub is_kept: bool,
}

/// Returns the templates to remove, by their places in the list, so that the rest takes `limit` bytes at
/// most: the least recently used first. Those that are kept stay, even beyond the limit.
pub fn to_remove(templates: &[TemplateUse], limit: u64) -> Vec<usize> {
    let sum = |bytes: u64, template: &TemplateUse| bytes.saturating_add(template.bytes);
    let mut left = templates.iter().fold(0, sum);
    let mut oldest: Vec<usize> = (0..templates.len())
        .filter(|index| !templates[*index].is_kept)
        .collect();
    oldest.sort_by_key(|index| templates[*index].used_s);
    let mut removed = Vec::new();
    for index in oldest {
        if left <= limit {
            break;
        }
        removed.push(index);
        // A saturated sum is computed again.
        let stays = |other: &usize| !removed.contains(other);
        left = (0..templates.len())
            .filter(stays)
            .fold(0, |bytes, other| sum(bytes, &templates[other]));
    }
    removed
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn template(bytes: u64, used_s: u64) -> TemplateUse {
        TemplateUse {
            bytes,
            used_s,
            is_kept: false,
        }
    }

    #[test]
    fn least_recently_used_templates_go_first_and_kept_ones_stay() {
        let mut templates = [template(30, 5), template(30, 1), template(30, 3)];
        assert_eq!(to_remove(&templates, 90), []);
        assert_eq!(to_remove(&templates, 89), [1]);
        assert_eq!(to_remove(&templates, 59), [1, 2]);
        assert_eq!(to_remove(&templates, 0), [1, 2, 0]);
        templates[1].is_kept = true;
        assert_eq!(to_remove(&templates, 60), [2]);
        assert_eq!(to_remove(&templates, 0), [2, 0]);
        assert_eq!(to_remove(&[], 0), []);
        let huge = [template(u64::MAX, 1), template(u64::MAX, 2)];
        assert_eq!(to_remove(&huge, 10), [0, 1]);
    }

    fn any_template() -> impl Strategy<Value = TemplateUse> {
        let bytes = prop_oneof![0..100_u64, Just(u64::MAX)];
        (bytes, 0..10_u64, any::<bool>()).prop_map(|(bytes, used_s, is_kept)| TemplateUse {
            bytes,
            used_s,
            is_kept,
        })
    }

    proptest! {
        /// The rest fits or is kept, none is removed without need, and each that stays was used as recently
        /// as each that goes.
        #[test]
        fn templates_that_stay_fit_or_are_kept_and_were_used_last(
            templates in proptest::collection::vec(any_template(), 0..12),
            limit in 0..600_u64,
        ) {
            let removed = to_remove(&templates, limit);
            let bytes = |without: &[usize]| {
                let stay = templates.iter().enumerate().filter(|(index, _)| !without.contains(index));
                stay.fold(0_u64, |sum, (_, template)| sum.saturating_add(template.bytes))
            };
            let stay: Vec<_> = (0..templates.len()).filter(|index| !removed.contains(index)).collect();
            prop_assert!(removed.iter().all(|index| !templates[*index].is_kept));
            prop_assert!(bytes(&removed) <= limit || stay.iter().all(|index| templates[*index].is_kept));
            if let Some((_, but_last)) = removed.split_last() {
                prop_assert!(bytes(but_last) > limit);
            }
            for gone in &removed {
                for other in stay.iter().filter(|other| !templates[**other].is_kept) {
                    prop_assert!(templates[*gone].used_s <= templates[*other].used_s);
                }
            }
        }
    }
}
