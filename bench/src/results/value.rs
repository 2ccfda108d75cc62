//! JSON whose objects keep the order of their fields, which becomes the order of columns.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// A JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// The value `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number without a fraction.
    Integer(i64),
    /// A number with a fraction, or an integer beyond 64 bits.
    Float(f64),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<Value>),
    /// An object, its fields in the order of the file.
    Object(Object),
}

/// Names and values of an object's fields.
pub type Object = Vec<(String, Value)>;

impl Value {
    /// The number, if it is one.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Integer(number) => Some(*number as f64),
            Self::Float(number) => Some(*number),
            _ => None,
        }
    }

    /// The text, if it is one.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The fields, if it is an object.
    pub fn object(&self) -> Option<&Object> {
        match self {
            Self::Object(object) => Some(object),
            _ => None,
        }
    }

    /// The objects of a list that has nothing else and is not empty.
    pub fn objects(&self) -> Option<Vec<&Object>> {
        match self {
            Self::List(list) if !list.is_empty() => list.iter().map(Self::object).collect(),
            _ => None,
        }
    }
}

/// The field of that name.
pub fn field<'a>(object: &'a Object, name: &str) -> Option<&'a Value> {
    let mut fields = object.iter();
    fields.find(|(own, _)| own == name).map(|(_, value)| value)
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Integer(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(i64::try_from(value).map_or(Value::Float(value as f64), Value::Integer))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = from.next_element()? {
            list.push(value);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut object = Vec::new();
        while let Some(field) = from.next_entry()? {
            object.push(field);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_keep_the_order_of_the_file() {
        let value: Value =
            serde_json::from_str(r#"{"z": [1, 2.5, null], "a": "t", "m": {"y": true}}"#).unwrap();
        let object = value.object().unwrap();
        let names: Vec<&str> = object.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["z", "a", "m"]);
        let list = [Value::Integer(1), Value::Float(2.5), Value::Null];
        assert_eq!(field(object, "z"), Some(&Value::List(list.into())));
        assert_eq!(field(object, "a").and_then(Value::text), Some("t"));
    }
}
