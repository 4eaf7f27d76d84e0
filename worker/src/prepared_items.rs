//! The prepared items of a job that are in no pass yet.

use std::collections::VecDeque;

use crate::engine::Item;

/// Items by their index within the job. Takes memory only from the first item that is present on, which is little for a job whose items are
/// prepared a few at a time.
#[derive(Debug, Default)]
pub struct PreparedItems {
    /// Index of the first of `items`.
    first: u32,
    items: VecDeque<Option<Item>>,
}

impl PreparedItems {
    /// Items from the index `first` on.
    pub fn new(first: u32, items: Vec<Item>) -> Self {
        Self { first, items: items.into_iter().map(Some).collect() }
    }

    /// The items that follow.
    pub fn extend(&mut self, items: Vec<Item>) {
        self.items.extend(items.into_iter().map(Some));
    }

    /// Takes an item out for a pass.
    pub fn take(&mut self, index: u32) -> Option<Item> {
        let at = index.checked_sub(self.first)? as usize;
        let item = self.items.get_mut(at)?.take();
        while let Some(None) = self.items.front() {
            self.items.pop_front();
            self.first += 1;
        }
        item
    }

    /// Puts an item back that was taken out.
    pub fn put_back(&mut self, index: u32, item: Item) {
        while index < self.first {
            self.items.push_front(None);
            self.first -= 1;
        }
        let at = (index - self.first) as usize;
        if let Some(slot) = self.items.get_mut(at) {
            *slot = Some(item);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use vramq_schemas::Input;

    use super::*;

    fn item(index: u32) -> Item {
        Item::Plain(Input::Text(index.to_string()))
    }

    #[test]
    fn items_taken_by_passes_take_no_memory() {
        let mut items = PreparedItems::new(5, (5..105).map(item).collect());
        assert!((5..105).all(|index| items.take(index) == Some(item(index))));
        assert!(items.items.is_empty() && items.take(5).is_none());
        items.extend(vec![item(105)]);
        items.put_back(104, item(104));
        assert_eq!(items.items.len(), 2);
        assert_eq!((items.take(104), items.take(105)), (Some(item(104)), Some(item(105))));
    }

    proptest! {
        /// Compares with a map from index to item.
        #[test]
        fn items_are_found_by_their_index(first in 0u32..9, steps in prop::collection::vec((0u8..3, 0u32..60), 0..200)) {
            let mut items = PreparedItems::new(first, Vec::new());
            let (mut here, mut taken, mut next) = (BTreeMap::new(), BTreeMap::new(), first);
            for (step, index) in steps {
                match step {
                    0 => {
                        items.extend((next..next + index % 7).map(item).collect());
                        here.extend((next..next + index % 7).map(|index| (index, item(index))));
                        next += index % 7;
                    }
                    1 => {
                        let found = here.remove(&index);
                        prop_assert_eq!(&items.take(index), &found);
                        taken.extend(found.map(|item| (index, item)));
                    }
                    _ => if let Some(item) = taken.remove(&index) {
                        items.put_back(index, item.clone());
                        here.insert(index, item);
                    },
                }
            }
            prop_assert!(here.iter().all(|(index, item)| items.take(*index).as_ref() == Some(item)));
        }
    }
}
