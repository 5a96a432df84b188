//! A checker for the part of JSON Schema that our schemas use. A keyword it does not know is an error, so that a
//! schema cannot say something that is silently not checked.

use std::fmt::Debug;
use std::path::Path;

use ksf_load::report::document::Document;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::Ran;

/// A file of docs/formats.
pub fn documented(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/formats").join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A schema of docs/formats.
pub fn schema(file: &str) -> Value {
    serde_json::from_str(&documented(file)).unwrap()
}

/// Asserts that stdout is one document, as the schema says, and that it reads back as what was measured.
#[track_caller]
pub fn assert_documented<B>(schema: &Value, ran: &Ran<B>)
where
    B: Serialize + DeserializeOwned + PartialEq + Debug,
{
    let document: Value = serde_json::from_str(&ran.stdout).expect("stdout is one document");
    check(schema, &document).unwrap();
    let report: Document<B> = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!((&report, report.ok), (ran.document(), ran.code == 0));
}

/// Asserts that the schema notices a member of this object that is taken away, and one that is added.
#[track_caller]
pub fn assert_strict(schema: &Value, document: &Value, place: &str) {
    for name in document.pointer(place).unwrap().as_object().unwrap().keys() {
        let mut cut = document.clone();
        cut.pointer_mut(place).unwrap().as_object_mut().unwrap().remove(name);
        assert!(check(schema, &cut).is_err(), "without {place}/{name}");
    }
    let mut grown = document.clone();
    grown.pointer_mut(place).unwrap()["surplus_member"] = Value::from(1);
    assert!(check(schema, &grown).is_err(), "with {place}/surplus_member");
}

/// Asserts that a description has each of these members and codes of a schema, but for those that say what they are.
#[track_caller]
pub fn assert_described(file: &str, schema: &Value, pointers: &[&str], plain: &[&str]) {
    let text = documented(file);
    for pointer in pointers {
        let names: Vec<&str> = match schema.pointer(pointer).unwrap() {
            Value::Object(members) => members.keys().map(String::as_str).collect(),
            list => list.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect(),
        };
        for name in names {
            let is_mentioned = text.contains(&format!("`{name}`")) || text.contains(&format!("`{name}[]`"));
            assert!(is_mentioned || plain.contains(&name), "{pointer}: {name} is not described");
        }
    }
}

/// Checks `value` against `schema`; the first violation is returned with its place.
pub fn check(schema: &Value, value: &Value) -> Result<(), String> {
    check_at(schema, schema, value, "$")
}

fn check_at(root: &Value, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    let rules = schema.as_object().ok_or_else(|| format!("{at}: the schema is no object"))?;
    for (keyword, rule) in rules {
        let holds = match keyword.as_str() {
            "$schema" | "$id" | "$defs" | "title" | "description" | "properties" => Ok(()),
            "$ref" => check_at(root, resolve(root, rule)?, value, at),
            "type" => check_type(rule, value),
            "const" => require(value == rule, || format!("is not {rule}")),
            "enum" => require(list(rule).contains(value), || format!("is none of {rule}")),
            "minimum" => require(!value.is_number() || number(value) >= number(rule), || format!("is below {rule}")),
            "maximum" => require(!value.is_number() || number(value) <= number(rule), || format!("is above {rule}")),
            "minItems" => {
                require(list(value).len() >= number(rule) as usize, || format!("has fewer than {rule} items"))
            }
            "required" => check_required(rule, value),
            "additionalProperties" => check_additional(root, rules, rule, value, at),
            "items" => list(value)
                .iter()
                .enumerate()
                .try_for_each(|(i, item)| check_at(root, rule, item, &format!("{at}[{i}]"))),
            "anyOf" => require(list(rule).iter().any(|schema| check_at(root, schema, value, at).is_ok()), || {
                "matches no alternative".into()
            }),
            other => Err(format!("keyword `{other}` is not known to the checker")),
        };
        holds.map_err(|error| if error.starts_with('$') { error } else { format!("{at}: {value} {error}") })?;
    }
    for (name, rule) in object(rules.get("properties").unwrap_or(&Value::Null)) {
        if let Some(member) = value.get(name) {
            check_at(root, rule, member, &format!("{at}.{name}"))?;
        }
    }
    Ok(())
}

fn resolve<'a>(root: &'a Value, reference: &Value) -> Result<&'a Value, String> {
    let path = reference.as_str().and_then(|text| text.strip_prefix('#'));
    path.and_then(|path| root.pointer(path)).ok_or_else(|| format!("reference {reference} leads nowhere"))
}

fn check_type(rule: &Value, value: &Value) -> Result<(), String> {
    let is = |name: &Value| match name.as_str() {
        Some("null") => value.is_null(),
        Some("boolean") => value.is_boolean(),
        Some("string") => value.is_string(),
        Some("number") => value.is_number(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => false,
    };
    let holds = match rule.as_array() {
        Some(names) => names.iter().any(is),
        None => is(rule),
    };
    require(holds, || format!("is not of type {rule}"))
}

fn check_required(rule: &Value, value: &Value) -> Result<(), String> {
    let missing = list(rule).iter().find(|name| value.get(name.as_str().unwrap_or_default()).is_none());
    require(missing.is_none(), || format!("lacks {}", missing.unwrap_or(&Value::Null)))
}

fn check_additional(
    root: &Value,
    rules: &Map<String, Value>,
    rule: &Value,
    value: &Value,
    at: &str,
) -> Result<(), String> {
    let known = object(rules.get("properties").unwrap_or(&Value::Null));
    for (name, member) in object(value) {
        if known.iter().all(|(have, _)| *have != name) {
            match rule {
                Value::Bool(true) => {}
                Value::Bool(false) => return Err(format!("$: {at} has the undocumented member {name}")),
                schema => check_at(root, schema, member, &format!("{at}.{name}"))?,
            }
        }
    }
    Ok(())
}

fn require(holds: bool, explain: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(explain()) }
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::NAN)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn object(value: &Value) -> Vec<(&String, &Value)> {
    value.as_object().map_or_else(Vec::new, |map| map.iter().collect())
}
