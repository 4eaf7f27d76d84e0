//! Items for classifiers and rerankers: a text, or a query and a document as one sequence.

use serde::Deserialize;
use tokenizers::{EncodeInput, Tokenizer};
use vramq_schemas::{Input, Params};

use crate::engine::{InvalidInput, Item, ScoredItem};

use super::tokens::{PROMPT_NAME, Tokens};

/// The growth of what is read of two texts while neither has ended. Each time reads from the start, which costs a third more in
/// all.
const LEAST_GROWTH: usize = 4;

/// What a tokenizer puts around and between the two texts of a pair.
pub(super) struct PairTemplate {
    before: Vec<u32>,
    between: Vec<u32>,
    after: Vec<u32>,
    /// How many of `between` are of the first text's token type; `None` if the model has no types to tell the texts apart.
    between_of_first: Option<usize>,
}

/// A query, and a document to score for it.
#[derive(Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct Pair {
    query: String,
    document: String,
}

impl PairTemplate {
    /// Reads the template from the tokenizer's post-processor, which is run on a pair. `typed`: the model has a second token type.
    pub fn of(tokenizer: &Tokenizer, typed: bool) -> Result<Self, String> {
        let encode =
            |text: EncodeInput<'static>, special| tokenizer.encode(text, special).map_err(|e| e.to_string());
        let (first, second) = (encode("a".into(), false)?, encode("b".into(), false)?);
        let (first, second) = (first.get_ids(), second.get_ids());
        let whole = encode(("a", "b").into(), true)?;
        let (ids, types) = (whole.get_ids(), whole.get_type_ids());
        let odd =
            || "its post-processor does more than put special tokens around and between two texts".to_owned();
        let mask = whole.get_special_tokens_mask();
        // One of the special tokens may be that of a text.
        let starts = |from: usize, part: &[u32]| {
            (from..ids.len()).find(|at| mask[*at] == 0).filter(|at| ids[*at..].starts_with(part))
        };
        if first.is_empty() || second.is_empty() {
            return Err(odd());
        }
        let at_first = starts(0, first).ok_or_else(odd)?;
        let end_first = at_first + first.len();
        let at_second = starts(end_first, second).ok_or_else(odd)?;
        let end_second = at_second + second.len();
        if mask[end_second..].contains(&0) {
            return Err(odd());
        }
        let of_first = types.iter().take_while(|kind| **kind == 0).count();
        let between_of_first = match types[of_first..].iter().all(|kind| *kind == 1) {
            _ if !typed || of_first == ids.len() => None,
            true if (end_first..=at_second).contains(&of_first) => Some(of_first - end_first),
            _ => {
                return Err(
                    "its token types are not 0 for the first text of a pair and 1 for the second".into()
                );
            }
        };
        Ok(Self {
            before: ids[..at_first].to_vec(),
            between: ids[end_first..at_second].to_vec(),
            after: ids[end_second..].to_vec(),
            between_of_first,
        })
    }

    /// Special tokens of a pair.
    pub fn len(&self) -> usize {
        self.before.len() + self.between.len() + self.after.len()
    }

    /// The pair's ids, and the first of them that is of the second token type.
    fn join(&self, first: &[u32], second: &[u32]) -> (Box<[u32]>, usize) {
        let ids = [&self.before, first, &self.between, second, &self.after].concat();
        let of_first = self.between_of_first.map(|between| self.before.len() + first.len() + between);
        let second_from = of_first.unwrap_or(ids.len());
        (ids.into(), second_from)
    }
}

impl Tokens {
    /// Whether inputs are texts or pairs, and parameters known.
    ///
    /// # Errors
    /// Names the first input that is neither.
    pub fn check_scored(&self, inputs: &[Input], params: &Params) -> Result<(), InvalidInput> {
        self.scored_as(params)?;
        inputs.iter().enumerate().try_for_each(|(at, input)| match input {
            Input::Text(_) => Ok(()),
            input => self.pair_of(at, input).map(drop),
        })
    }

    /// Texts, and pairs as JSON values `{"query": …, "document": …}`, as items to score, in order.
    ///
    /// # Errors
    /// Names the first input that is neither.
    pub fn scored(&self, inputs: &[Input], params: &Params) -> Result<Vec<Item>, InvalidInput> {
        let (prompt, raw) = self.scored_as(params)?;
        let item = |(at, input): (usize, &Input)| {
            let wrong = |reason| InvalidInput(format!("inputs[{at}]: {reason}"));
            let (ids, second_from) = match input {
                Input::Text(text) => {
                    let ids = self.ids(prompt, text).map_err(wrong)?;
                    let second_from = ids.len();
                    (ids, second_from)
                }
                input => {
                    let pair = self.pair_of(at, input)?;
                    self.pair(&format!("{prompt}{}", pair.query), &pair.document).map_err(wrong)?
                }
            };
            let ids = self.that_count(ids).map_err(wrong)?;
            let second_from = second_from.min(ids.len());
            Ok(Item::Scored(ScoredItem { ids, second_from, raw }))
        };
        inputs.iter().enumerate().map(item).collect()
    }

    /// The prompt that goes before a text, or before the first text of a pair, as sentence-transformers puts it there; and whether
    /// logits are wanted rather than scores.
    fn scored_as(&self, params: &Params) -> Result<(&str, bool), InvalidInput> {
        let raw = raw_scores(params)?;
        Ok((self.prompts.of(params.0.get(PROMPT_NAME))?, raw))
    }

    /// Removes the padding at the end of a text to score, so that the last token is the one before it. Of a text that is all
    /// padding the first token remains, as in transformers.
    fn that_count(&self, ids: Box<[u32]>) -> Result<Box<[u32]>, String> {
        if ids.is_empty() {
            return Err("there are no tokens to score".into());
        }
        let Some(padding) = self.padding else { return Ok(ids) };
        let end = ids.iter().rposition(|id| *id != padding).map_or(1, |last| last + 1);
        Ok(if end < ids.len() { ids[..end].into() } else { ids })
    }

    fn pair_of(&self, at: usize, input: &Input) -> Result<Pair, InvalidInput> {
        const TAKES: &str =
            r#"this model takes texts, and pairs as {"json": {"query": "…", "document": "…"}}"#;
        let pair = match input {
            Input::Json(value) => serde_json::from_str(value.as_str()),
            other => return Err(InvalidInput(format!("inputs[{at}] is {}; {TAKES}", other.kind()))),
        };
        let pair = pair.map_err(|e| InvalidInput(format!("inputs[{at}]: {e}; {TAKES}")))?;
        match self.pair_template {
            Some(_) => Ok(pair),
            None => Err(InvalidInput(format!("inputs[{at}] is a pair of texts; this model takes no pairs"))),
        }
    }

    /// A pair's ids, special tokens included, and the index of the first one with the second token type. A pair that is too long is
    /// cut as the tokenizers library cuts it: the longer text first, and both to halves if neither is short. If neither text can be
    /// read to its end, the odd token may go to the wrong one.
    fn pair(&self, first: &str, second: &str) -> Result<(Box<[u32]>, usize), String> {
        let Some(template) = &self.pair_template else { return Err("this model takes no pairs".into()) };
        let room = self.tokens_max - template.len();
        // One token more than there is room for shows that a text is too long. If both are, and the room is odd, the longer text
        // gets the odd token: so more is read of both until one has ended.
        let mut least = room + 1;
        let (mut a, mut b) = (self.content(first, least)?, self.content(second, least)?);
        while !room.is_multiple_of(2) && a.len() >= least && b.len() >= least {
            least *= LEAST_GROWTH;
            // A text cannot be read to its end, so it is unknown which is longer. Only one token depends on that.
            let (Ok(more_a), Ok(more_b)) = (self.content(first, least), self.content(second, least)) else {
                break;
            };
            (a, b) = (more_a, more_b);
        }
        let (keep_a, keep_b) = longest_first(a.len(), b.len(), room);
        let (a, b) = (&a[..keep_a], &b[..keep_b]);
        [a, b].into_iter().try_for_each(|kept| self.check_embeddings(kept))?;
        Ok(template.join(a, b))
    }
}

/// How many tokens of each text of a pair remain where there is room for so many.
fn longest_first(a: usize, b: usize, room: usize) -> (usize, usize) {
    if a + b <= room {
        return (a, b);
    }
    let short = a.min(b);
    let (short, long) = if 2 * short <= room { (short, room - short) } else { (room / 2, room - room / 2) };
    if a <= b { (short, long) } else { (long, short) }
}

/// Whether a job wants logits rather than scores: its only parameter besides the prompt's name.
fn raw_scores(params: &Params) -> Result<bool, InvalidInput> {
    let mut raw = false;
    for (key, value) in &params.0 {
        raw = match (key.as_str(), value.as_bool()) {
            (PROMPT_NAME, _) => raw,
            ("raw_scores", Some(raw)) => raw,
            ("raw_scores", None) => {
                return Err(InvalidInput(format!("params.raw_scores is {value}; use true or false")));
            }
            _ => {
                let known = format!("`{PROMPT_NAME}` and `raw_scores`");
                return Err(InvalidInput(format!("params.{key} is unknown; there are {known}")));
            }
        };
    }
    Ok(raw)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokenizers::Encoding;
    use tokenizers::utils::truncation::{TruncationParams, truncate_encodings};

    use super::*;

    proptest! {
        #[test]
        fn pairs_are_cut_as_the_library_cuts_them(a in 0_usize..60, b in 0_usize..60, room in 1_usize..50) {
            let of_length = |count: usize| {
                let ids = vec![7; count];
                Encoding::new(
                    ids.clone(), ids.clone(), vec![String::new(); count], vec![None; count], vec![(0, 0); count],
                    vec![0; count], vec![1; count], vec![], Default::default(),
                )
            };
            let limit = TruncationParams { max_length: room, ..TruncationParams::default() };
            let (first, second) = truncate_encodings(of_length(a), Some(of_length(b)), &limit).unwrap();
            let kept = (first.len(), second.unwrap().len());
            prop_assert_eq!(longest_first(a, b, room), kept);
        }
    }

    #[test]
    fn an_invalid_pair_is_named() {
        let pair = |text: &str| serde_json::from_str::<Pair>(text).map_err(|e| e.to_string());
        assert!(pair(r#"{"query": "a", "document": "b"}"#).is_ok());
        assert!(pair(r#"{"query": "a"}"#).unwrap_err().contains("document"));
        assert!(pair(r#"{"query": "a", "document": "b", "title": "c"}"#).is_err());
    }
}
