//! The arguments of one-shot programs: templates with places for files and parameters.

use std::path::Path;

use serde_json::{Map, Value};

/// An argument with places to fill in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template(Vec<Piece>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Literal(String),
    /// The path of a file with the item.
    Input,
    /// The path of the file that the program writes.
    Output,
    /// A parameter of the job.
    Param(String),
}

impl Template {
    /// Reads `{input}`, `{output}`, `{params.NAME}`; `{{` and `}}` are braces.
    ///
    /// # Errors
    /// The template names an unknown placeholder.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| {
            Err(format!(
                "{text:?} has {what}; there are {{input}}, {{output}}, {{params.NAME}}, and {{{{ for a brace"
            ))
        };
        let mut pieces = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            literal.push_str(&rest[..at]);
            let (brace, after) = rest[at..].split_at(1);
            if after.starts_with(brace) {
                literal.push_str(brace);
                rest = &after[1..];
                continue;
            }
            let (true, Some(end)) = (brace == "{", after.find('}')) else {
                return wrong("a brace that stands alone");
            };
            let piece = match &after[..end] {
                "input" => Piece::Input,
                "output" => Piece::Output,
                place => match place.strip_prefix("params.") {
                    Some(name) if !name.is_empty() => Piece::Param(name.to_owned()),
                    _ => return wrong(&format!("the place {{{place}}}")),
                },
            };
            if !literal.is_empty() {
                pieces.push(Piece::Literal(std::mem::take(&mut literal)));
            }
            pieces.push(piece);
            rest = &after[end + 1..];
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            pieces.push(Piece::Literal(literal));
        }
        Ok(Self(pieces))
    }

    /// Whether it has parameters of the job.
    pub fn has_params(&self) -> bool {
        self.0.iter().any(|piece| matches!(piece, Piece::Param(_)))
    }

    pub fn has_output(&self) -> bool {
        self.0.contains(&Piece::Output)
    }

    /// The argument for an item, with its places filled in.
    ///
    /// # Errors
    /// A parameter is missing, or cannot be an argument. A value at the start of an argument must not begin with `-`, so that no
    /// job can add an option.
    pub fn fill(&self, input: &Path, output: &Path, params: &Map<String, Value>) -> Result<String, String> {
        let mut argument = String::new();
        for piece in &self.0 {
            match piece {
                Piece::Literal(text) => argument.push_str(text),
                Piece::Input => argument.push_str(&input.display().to_string()),
                Piece::Output => argument.push_str(&output.display().to_string()),
                Piece::Param(name) => {
                    let value = param(name, params)?;
                    // An earlier parameter may be empty, so this value may be the start of the argument.
                    if argument.is_empty() && value.starts_with('-') {
                        return Err(format!("params.{name} begins with '-'"));
                    }
                    argument.push_str(&value);
                }
            }
        }
        if argument.len() >= ARGUMENT_BYTES_MAX {
            return Err(format!(
                "the parameters make an argument of {} bytes, at most {ARGUMENT_BYTES_MAX} are passed",
                argument.len()
            ));
        }
        Ok(argument)
    }
}

/// What Linux takes as one argument (`MAX_ARG_STRLEN`).
const ARGUMENT_BYTES_MAX: usize = 128 << 10;

fn param(name: &str, params: &Map<String, Value>) -> Result<String, String> {
    let value = match params.get(name) {
        None => return Err(format!("params.{name} is missing")),
        Some(Value::String(text)) => text.clone(),
        Some(value @ (Value::Number(_) | Value::Bool(_))) => value.to_string(),
        Some(_) => return Err(format!("params.{name} is not a text, number or boolean")),
    };
    if value.contains('\0') { Err(format!("params.{name} has a NUL character")) } else { Ok(value) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fill(template: &str, params: Value) -> Result<String, String> {
        let Value::Object(params) = params else { panic!("no object") };
        Template::parse(template)?.fill(Path::new("/s/input.png"), Path::new("/s/output.jpg"), &params)
    }

    #[test]
    fn places_are_filled_in() {
        assert_eq!(fill("{input}", json!({})), Ok("/s/input.png".to_owned()));
        assert_eq!(fill("jpg:{output}", json!({})), Ok("jpg:/s/output.jpg".to_owned()));
        assert_eq!(
            fill("--size={params.w}x{params.h}", json!({"w": 64, "h": "48"})),
            Ok("--size=64x48".to_owned())
        );
        assert_eq!(fill("{{{params.a}}}", json!({"a": true})), Ok("{true}".to_owned()));
        assert_eq!(fill("plain", json!({})), Ok("plain".to_owned()));
    }

    #[test]
    fn a_parameter_is_never_an_option_and_never_a_shell() {
        for (template, params) in [
            ("{params.name}", json!({"name": "-delete"})),
            ("{params.folder}{params.name}", json!({"folder": "", "name": "-delete"})),
            ("{params.name}", json!({"name": -1})),
        ] {
            let error = fill(template, params).unwrap_err();
            assert!(error.contains("params.name begins with '-'"), "{error}");
        }
        assert_eq!(fill("{params.a}{params.b}", json!({"a": "x", "b": "-y"})), Ok("x-y".to_owned()));
        assert_eq!(fill("{params.name}", json!({"name": "$(reboot); `x`"})), Ok("$(reboot); `x`".to_owned()));
        assert_eq!(fill("-n{params.name}", json!({"name": "-1"})), Ok("-n-1".to_owned()));
        for params in [json!({}), json!({"name": [1]}), json!({"name": null}), json!({"name": "a\0b"})] {
            assert!(fill("{params.name}", params.clone()).is_err(), "{params}");
        }
    }

    #[test]
    fn unknown_places_are_faults() {
        for text in ["{", "}", "{x}", "{params.}", "a{b", "{}"] {
            assert!(Template::parse(text).is_err(), "{text}");
        }
    }
}
