//! A map that knows which entry was not used for longest.

use std::collections::HashMap;
use std::hash::Hash;

const NONE: usize = usize::MAX;

/// Entries by key, in the order of their last use. The bound is the caller's: [`Lru::pop_oldest`].
#[derive(Debug)]
pub(crate) struct Lru<K, V> {
    places: HashMap<K, usize>,
    nodes: Vec<Option<Node<K, V>>>,
    free: Vec<usize>,
    newest: usize,
    oldest: usize,
}

#[derive(Debug)]
struct Node<K, V> {
    key: K,
    value: V,
    newer: usize,
    older: usize,
}

impl<K, V> Default for Lru<K, V> {
    fn default() -> Self {
        Self { places: HashMap::new(), nodes: Vec::new(), free: Vec::new(), newest: NONE, oldest: NONE }
    }
}

impl<K: Eq + Hash + Clone, V> Lru<K, V> {
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// The entry, which counts as used.
    pub(crate) fn get(&mut self, key: &K) -> Option<&mut V> {
        let place = *self.places.get(key)?;
        if self.newest != place {
            self.unlink(place);
            self.link_newest(place);
        }
        self.nodes[place].as_mut().map(|node| &mut node.value)
    }

    /// The value that the key had before.
    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        if let Some(old) = self.get(&key) {
            return Some(std::mem::replace(old, value));
        }
        let node = Some(Node { key: key.clone(), value, newer: NONE, older: NONE });
        let place = match self.free.pop() {
            Some(place) => {
                self.nodes[place] = node;
                place
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        self.places.insert(key, place);
        self.link_newest(place);
        None
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let place = self.places.remove(key)?;
        self.unlink(place);
        self.free.push(place);
        self.nodes[place].take().map(|node| node.value)
    }

    /// Removes the entry that was not used for longest.
    pub(crate) fn pop_oldest(&mut self) -> Option<(K, V)> {
        self.pop_oldest_if(|_| true)
    }

    /// Removes the entry that was not used for longest of those with these keys.
    pub(crate) fn pop_oldest_if(&mut self, goes: impl Fn(&K) -> bool) -> Option<(K, V)> {
        let mut place = self.oldest;
        let key = loop {
            let node = self.nodes.get(place)?.as_ref()?;
            if goes(&node.key) {
                break node.key.clone();
            }
            place = node.newer;
        };
        let value = self.remove(&key)?;
        Some((key, value))
    }

    /// Removes the entries that `goes` chooses.
    pub(crate) fn take_if(&mut self, mut goes: impl FnMut(&K, &mut V) -> bool) -> Vec<V> {
        let choose = |node: &mut Node<K, V>| goes(&node.key, &mut node.value).then(|| node.key.clone());
        let chosen = self.nodes.iter_mut().flatten().filter_map(choose);
        let chosen: Vec<K> = chosen.collect();
        chosen.iter().filter_map(|key| self.remove(key)).collect()
    }

    fn unlink(&mut self, place: usize) {
        let Some(node) = &self.nodes[place] else { return };
        let (newer, older) = (node.newer, node.older);
        match self.nodes.get_mut(newer).and_then(Option::as_mut) {
            Some(node) => node.older = older,
            None => self.newest = older,
        }
        match self.nodes.get_mut(older).and_then(Option::as_mut) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
    }

    fn link_newest(&mut self, place: usize) {
        let older = self.newest;
        if let Some(node) = &mut self.nodes[place] {
            (node.newer, node.older) = (NONE, older);
        }
        match self.nodes.get_mut(older).and_then(Option::as_mut) {
            Some(node) => node.newer = place,
            None => self.oldest = place,
        }
        self.newest = place;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The same as a list that is searched from its end.
        #[test]
        fn it_is_a_list_in_the_order_of_use(steps in proptest::collection::vec((0_u8..6, 0_u8..6, any::<u16>()), 0..200)) {
            let mut lru = Lru::default();
            let mut list: Vec<(u8, u16)> = Vec::new();
            for (what, key, value) in steps {
                let at = list.iter().position(|(known, _)| *known == key);
                let had = at.map(|at| list[at].1);
                match what {
                    0 => {
                        prop_assert_eq!(lru.insert(key, value), had);
                        list.retain(|(known, _)| *known != key);
                        list.push((key, value));
                    }
                    1 => {
                        prop_assert_eq!(lru.get(&key).copied(), had);
                        if let Some(at) = at {
                            let entry = list.remove(at);
                            list.push(entry);
                        }
                    }
                    2 => {
                        prop_assert_eq!(lru.remove(&key), had);
                        list.retain(|(known, _)| *known != key);
                    }
                    3 => {
                        let oldest = (!list.is_empty()).then(|| list.remove(0));
                        prop_assert_eq!(lru.pop_oldest(), oldest);
                    }
                    4 => {
                        let at = list.iter().position(|(known, _)| *known >= key);
                        let oldest = at.map(|at| list.remove(at));
                        prop_assert_eq!(lru.pop_oldest_if(|known| *known >= key), oldest);
                    }
                    _ => {
                        let mut gone = lru.take_if(|_, known| *known % 2 == value % 2);
                        let mut expected: Vec<u16> =
                            list.iter().map(|(_, known)| *known).filter(|known| known % 2 == value % 2).collect();
                        gone.sort_unstable();
                        expected.sort_unstable();
                        prop_assert_eq!(gone, expected);
                        list.retain(|(_, known)| known % 2 != value % 2);
                    }
                }
                prop_assert_eq!(lru.len(), list.len());
            }
            let rest: Vec<(u8, u16)> = std::iter::from_fn(|| lru.pop_oldest()).collect();
            prop_assert_eq!(rest, list);
        }
    }
}
