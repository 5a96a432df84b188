//! Documents of other processes, whose strings a terminal must not act on.

pub(crate) use ksf_load::report::escape::{escape, escape_json};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The document of another process with all of its strings escaped, to be shown as text.
pub(crate) fn escaped<T: Serialize + DeserializeOwned>(document: &T) -> T {
    fn walk(value: &mut Value) {
        match value {
            Value::String(text) => *text = escape(text),
            Value::Array(values) => values.iter_mut().for_each(walk),
            Value::Object(fields) => fields.values_mut().for_each(walk),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
    let mut value = serde_json::to_value(document).expect("maps have names for keys");
    walk(&mut value);
    serde_json::from_value(value).expect("it was a document")
}
