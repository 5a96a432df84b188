//! A checker for the part of JSON Schema that our schemas use. A keyword it does not know is an error, so that a
//! schema cannot say something that is silently not checked.

use serde_json::{Map, Value};

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
