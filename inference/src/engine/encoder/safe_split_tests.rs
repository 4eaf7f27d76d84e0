//! Tests of safe splits: the tokens before a place that is called safe are those that the library finds in the whole text.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const FIXTURES: [&str; 7] = [
    "tiny-camembert",
    "tiny-gemma",
    "tiny-gte",
    "tiny-modernbert",
    "tiny-qwen3",
    "tiny-roberta",
    "tiny-xlm-roberta",
];

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name).join("tokenizer.json")
}

fn tokenizer(name: &str) -> Tokenizer {
    bare(Tokenizer::from_file(file(name)).unwrap())
}

fn bare(mut tokenizer: Tokenizer) -> Tokenizer {
    tokenizer.with_truncation(None).unwrap().with_padding(None);
    tokenizer
}

/// A fixture's tokenizer with other parts, as its file has them.
fn with(name: &str, parts: &[(&str, Value)]) -> Tokenizer {
    let mut all: Value = serde_json::from_slice(&std::fs::read(file(name)).unwrap()).unwrap();
    for (key, part) in parts {
        all[*key] = part.clone();
    }
    bare(Tokenizer::from_bytes(all.to_string()).unwrap())
}

/// A tokenizer of bytes whose words are those of a regular expression; `spaces`: with a space before each of them.
fn by_regex(regex: &str, spaces: bool) -> Tokenizer {
    let split =
        json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": spaces, "trim_offsets": true, "use_regex": false});
    let words = json!({"type": "Sequence", "pretokenizers": [split, bytes]});
    with("tiny-qwen3", &[("pre_tokenizer", words)])
}

#[test]
fn spaces_before_every_word_are_not_known() {
    assert!(SafeSplit::of(&by_regex(REGEXES[0], true)).is_none());
    assert!(SafeSplit::of(&by_regex(REGEXES[0], false)).is_some());
}

/// The fixtures' tokenizers, and variants that published models have.
fn tokenizers() -> Vec<(String, Tokenizer)> {
    let mut all: Vec<_> = FIXTURES.map(|name| (name.to_owned(), tokenizer(name))).into();
    all.extend(
        REGEXES.into_iter().enumerate().map(|(at, regex)| (format!("regex {at}"), by_regex(regex, false))),
    );
    let spaces =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    all.push(("a space in front".into(), with("tiny-roberta", &[("pre_tokenizer", spaces)])));
    let strip = json!({"type": "Strip", "strip_left": false, "strip_right": true});
    let collapse = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"});
    let normalizer = json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}, strip, collapse]});
    let first = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
    let parts = [("normalizer", normalizer), ("pre_tokenizer", first)];
    all.push(("collapsed spaces".into(), with("tiny-xlm-roberta", &parts)));
    let mut normalized = tokenizer("tiny-modernbert");
    let runs = ["  ", "   ", "\n\n", "the city"].map(|content| AddedToken::from(content, false));
    normalized.add_tokens(&runs);
    normalized.add_tokens(&[AddedToken::from("war", false).single_word(true)]);
    all.push(("runs of spaces are tokens".into(), normalized));
    all
}

fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
}

/// `whole`: the tokens of the text.
fn is_exact_at(tokenizer: &Tokenizer, split: &SafeSplit, text: &str, whole: &[u32], at: usize) -> bool {
    !split.is_safe(tokenizer, text, at) || whole.starts_with(&tokens(tokenizer, &text[..at]))
}

/// Runs of the kinds of text that the rules distinguish.
fn text() -> impl Strategy<Value = String> {
    let char = prop_oneof![
        4 => prop::sample::select(vec!['a', 'Z', '7', '3', 'é', 'ß', 'Σ', '한', 'ᄒ', 'ᅡ', 'क', 'ा', '漢', '字', 'の', 'ﬁ', '½', 'Ⅷ']),
        2 => prop::sample::select(vec!['.', '\'', '!', '。', '<', '>', '▁', '😀', '🏽', '\u{200d}', '🇩', '🇪', '℃']),
        3 => prop::sample::select(vec![' ', '\n', '\r', '\t', '\u{a0}', '\u{3000}', '\u{2028}', '\u{85}']),
        2 => prop::sample::select(vec!['\u{301}', '\u{327}', '\u{334}', '\u{3099}', '\u{200b}', '\u{ad}', '\u{600}', '\0']),
        1 => any::<char>(),
    ];
    let run =
        (char, prop_oneof![8 => 1usize..4, 1 => 10usize..40]).prop_map(|(c, n)| c.to_string().repeat(n));
    let word = prop::sample::select(vec![
        "the city was part of the state",
        "the",
        " the",
        "'re",
        "'ll",
        "'s",
        "<mask>",
        "</s>",
        "[SEP]",
        "<|endoftext|>",
        "war",
        "  ",
        "the city",
        "</",
        "s>",
        "<unk>",
    ]);
    let piece = prop_oneof![3 => run, 2 => word.prop_map(str::to_owned)];
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_text_before_a_safe_split_has_the_tokens_of_the_whole_text(texts in prop::collection::vec(text(), 4)) {
        static ALL: std::sync::LazyLock<Vec<(String, Tokenizer, SafeSplit)>> = std::sync::LazyLock::new(|| {
            let known = |(name, tokenizer): (String, Tokenizer)| {
                let split = SafeSplit::of(&tokenizer).unwrap_or_else(|| panic!("{name} is not known"));
                (name, tokenizer, split)
            };
            tokenizers().into_iter().map(known).collect()
        });
        for (name, tokenizer, split) in ALL.iter() {
            for text in &texts {
                let whole = tokens(tokenizer, text);
                for at in (1..text.len()).filter(|at| text.is_char_boundary(*at)) {
                    prop_assert!(
                        is_exact_at(tokenizer, split, text, &whole, at),
                        "{name}: {:?} before {:?}", &text[..at], &text[at..]
                    );
                }
            }
        }
    }
}

/// Texts as people write them have places to cut.
#[test]
fn places_are_found() {
    let texts = [
        ("words", "the city was part of the state. "),
        ("lines", "the\ncity\nwas\n"),
        ("ideographs without a space", "中国的首都是北京市。日本の首都は東京です。"),
        ("emoji", "😀🎉👍🏽🇩🇪"),
        ("accents", "e\u{301}te\u{301} "),
    ];
    for (name, tokenizer) in tokenizers() {
        let split = SafeSplit::of(&tokenizer).unwrap();
        for (what, piece) in texts {
            let text = piece.repeat((16 << 10) / piece.len());
            let at = split.find(&tokenizer, &text, 8 << 10);
            let at = at.unwrap_or_else(|| panic!("{name}: {what} are not cut"));
            assert!((4 << 10..=8 << 10).contains(&at), "{name}: {what} at {at}");
            assert!(
                tokens(&tokenizer, &text).starts_with(&tokens(&tokenizer, &text[..at])),
                "{name}: {what}"
            );
        }
    }
}

#[test]
fn other_tokenizers_are_not_known() {
    let words =
        json!({"type": "Split", "pattern": {"Regex": "a|b"}, "behavior": "Isolated", "invert": false});
    assert!(SafeSplit::of(&with("tiny-qwen3", &[("pre_tokenizer", words)])).is_none());
    let normalizer = json!({"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"});
    assert!(SafeSplit::of(&with("tiny-qwen3", &[("normalizer", normalizer)])).is_none());
    assert!(SafeSplit::of(&tokenizer("tiny-mean")).is_none());
}
