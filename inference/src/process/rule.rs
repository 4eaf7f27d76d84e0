//! Rules for unusual items: a condition such as `when = "pixels > 4e6"`, and what is done with items that match.

use std::fmt;
use std::str::FromStr;

use super::cost::{Costs, Unit};

/// A comparison, and the consequence for items for which it holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    pub when: Comparison,
    pub then: Consequence,
}

/// What happens to an item to which a rule applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Consequence {
    /// It runs with the device for itself.
    Exclusive,
    /// Its job is rejected, with this reason.
    Refuse(String),
    /// Its job goes to the workers that take jobs with this routing key.
    To(String),
}

/// `UNIT OPERATOR NUMBER`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    pub unit: Unit,
    pub operator: Operator,
    pub number: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    Less,
    AtMost,
    More,
    AtLeast,
}

impl Comparison {
    /// Whether it holds for an item. It does not where the item has no such cost.
    pub fn holds(&self, costs: &Costs) -> bool {
        costs.of(self.unit).is_some_and(|cost| match self.operator {
            Operator::Less => cost < self.number,
            Operator::AtMost => cost <= self.number,
            Operator::More => cost > self.number,
            Operator::AtLeast => cost >= self.number,
        })
    }
}

/// The consequence of the first rule that holds.
pub fn decide<'a>(rules: &'a [Rule], costs: &Costs) -> Option<&'a Consequence> {
    rules.iter().find(|rule| rule.when.holds(costs)).map(|rule| &rule.then)
}

impl FromStr for Comparison {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("is {text:?}; it must be one comparison such as \"pixels > 4e6\", of {}", Unit::names())
        };
        let words: Vec<&str> = text.split_ascii_whitespace().collect();
        let &[unit, operator, number] = &words[..] else { return Err(wrong()) };
        let operator = match operator {
            "<" => Operator::Less,
            "<=" => Operator::AtMost,
            ">" => Operator::More,
            ">=" => Operator::AtLeast,
            _ => return Err(wrong()),
        };
        let number: f64 = number.parse().map_err(|_| wrong())?;
        if !number.is_finite() || number < 0.0 {
            return Err(wrong());
        }
        Ok(Self { unit: unit.parse().map_err(|_| wrong())?, operator, number })
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operator = match self.operator {
            Operator::Less => "<",
            Operator::AtMost => "<=",
            Operator::More => ">",
            Operator::AtLeast => ">=",
        };
        write!(f, "{} {operator} {}", self.unit.as_str(), self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::item::Item;

    #[test]
    fn a_comparison_is_three_words() {
        let parsed: Comparison = "pixels > 4e6".parse().unwrap();
        assert_eq!(parsed, Comparison { unit: Unit::Pixels, operator: Operator::More, number: 4e6 });
        assert_eq!(parsed.to_string(), "pixels > 4000000");
        for text in [
            "",
            "pixels",
            "pixels>4",
            "pixels > 4 > 2",
            "pixels = 4",
            "tokens > 4",
            "pixels > x",
            "pixels > nan",
            "pixels > -1",
        ] {
            let error = text.parse::<Comparison>().unwrap_err();
            assert!(error.contains("one comparison"), "{error}");
        }
    }

    #[test]
    fn the_first_rule_that_holds_decides() {
        let rule = |when: &str, then| Rule { when: when.parse().unwrap(), then };
        let rules = [
            rule("characters >= 10", Consequence::Refuse("too long".to_owned())),
            rule("characters > 5", Consequence::Exclusive),
            // A text has no pixels.
            rule("pixels >= 0", Consequence::To("images".to_owned())),
        ];
        let decided = |text: &str| decide(&rules, &Costs::new(&Item::Text(text.to_owned()))).cloned();
        assert_eq!(decided("0123456789"), Some(Consequence::Refuse("too long".to_owned())));
        assert_eq!(decided("012345"), Some(Consequence::Exclusive));
        assert_eq!(decided("01234"), None);
    }
}
