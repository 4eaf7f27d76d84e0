//! Tests of plain words: the tokens are those that the library finds, and other words are left to it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::json;

use super::super::long_text::tests::{normalization, tokenizer_of, tokenizer_with, tokens};
use super::*;

/// A fixture's tokenizer with another model.
fn with_model(mut tokenizer: Tokenizer, model: &Model) -> Tokenizer {
    let vocab: HashMap<&String, usize> = model.vocabulary.iter().zip(0..).collect();
    let model: WordPiece = serde_json::from_value(json!({
        "vocab": vocab,
        "unk_token": model.unknown,
        "continuing_subword_prefix": model.prefix,
        "max_input_chars_per_word": model.word_chars_max,
    }))
    .unwrap();
    tokenizer.with_model(model);
    tokenizer
}

#[derive(Clone, Debug)]
struct Model {
    vocabulary: Vec<String>,
    unknown: &'static str,
    prefix: &'static str,
    word_chars_max: usize,
}

/// Vocabularies of short tokens of few letters, so that many begin alike, with prefixes that are also letters or no ASCII.
fn model() -> impl Strategy<Value = Model> {
    let token = (prop::bool::ANY, "[abA7]{1,3}|[.é#]");
    let prefix = prop::sample::select(vec!["##", "##", "", "a", "7b", "é", "."]);
    let unknown = prop::sample::select(vec!["[UNK]", "ab", "##a", "."]);
    let word_chars_max = prop::sample::select(vec![0, 1, 4, 100, 100]);
    let tokens = prop::collection::hash_set(token, 1..60);
    (tokens, prefix, unknown, prop::bool::weighted(0.9), word_chars_max).prop_map(
        |(tokens, prefix, unknown, has_unknown, word_chars_max)| {
            let key = |(is_continued, text)| if is_continued { format!("{prefix}{text}") } else { text };
            let keys = tokens.into_iter().map(key).chain(has_unknown.then(|| unknown.to_owned()));
            let mut vocabulary: Vec<String> = keys.collect();
            vocabulary.sort();
            vocabulary.dedup();
            Model { vocabulary, unknown, prefix, word_chars_max }
        },
    )
}

/// Mostly plain words. No word has a space in it.
fn word() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => "[abA7]{1,9}",
        2 => "[a-zA-Z0-9]{1,12}",
        1 => "[a-cA]{95,105}",
        1 => "[!-/:-@\\[-`{-~]",
        1 => "[abA7]{0,3}[!-~\u{0}-\u{8}\u{e}-\u{1f}\u{7f}éß\u{301}\u{200b}漢][abA7]{0,3}",
    ]
}

/// Compares the tokens of a word with the library's.
fn check(plain: &PlainWords, tokenizer: &Tokenizer, word: &str) {
    let mut content = vec![77];
    let is_plain = plain.add_tokens(tokenizer, word, &mut content);
    let is_mark = word.len() == 1 && word.starts_with(|c: char| c.is_ascii_punctuation());
    assert_eq!(is_plain, is_mark || word.chars().all(|c| c.is_ascii_alphanumeric()), "{word:?}");
    let expected = if is_plain { tokens(tokenizer, word) } else { Vec::new() };
    assert_eq!(content[1..], expected, "{word:?}");
    assert_eq!(content[0], 77, "{word:?}");
}

/// MiniLM's tokenizer, with its 30,522 tokens. `make test` fetches it, a bare `cargo test` does without.
fn minilm() -> Option<Tokenizer> {
    let needed = std::env::var_os("VRAMQ_TEST_MODEL").map(PathBuf::from);
    let is_needed = needed.is_some();
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/all-MiniLM-L6-v2");
    let file = needed.unwrap_or_else(default).join("tokenizer.json");
    if !file.exists() {
        let missing = format!("{} is not there: run models/fetch --model all-MiniLM-L6-v2", file.display());
        assert!(!is_needed, "{missing}");
        vramq_testkit::not_run::not_run(missing);
        return None;
    }
    let mut tokenizer = Tokenizer::from_file(file).unwrap();
    tokenizer.with_truncation(None).unwrap().with_padding(None);
    Some(tokenizer)
}

#[test]
fn a_word_is_made_of_the_longest_tokens_or_is_unknown() {
    let vocabulary = ["[UNK]", "a", "ab", "##b", "##c", "##bc", "c", "##ab", "."];
    let mut model = Model {
        vocabulary: vocabulary.map(str::to_owned).to_vec(),
        unknown: "[UNK]",
        prefix: "##",
        word_chars_max: 5,
    };
    let ids = |model: &Model, word: &str| {
        let tokenizer = with_model(tokenizer_of("tiny-mean"), model);
        let plain = PlainWords::of(&tokenizer).unwrap();
        check(&plain, &tokenizer, word);
        let mut content = Vec::new();
        assert!(plain.add_tokens(&tokenizer, word, &mut content), "{word}");
        content
    };
    assert_eq!(ids(&model, "ab"), [2]);
    assert_eq!(ids(&model, "ABBC"), [2, 5]);
    assert_eq!(ids(&model, "ababc"), [2, 7, 4]);
    assert_eq!(ids(&model, "abxb"), [0], "the token before the rest that is none goes too");
    assert_eq!(ids(&model, "b"), [0], "a token of rests begins no word");
    assert_eq!(ids(&model, "ababab"), [0], "too long");
    assert_eq!(ids(&model, "."), [8]);
    assert_eq!(ids(&model, "!"), [0]);
    model.vocabulary.remove(0);
    let tokenizer = with_model(tokenizer_of("tiny-mean"), &model);
    assert!(PlainWords::of(&tokenizer).is_none(), "the library says that the unknown token is missing");
}

#[test]
fn words_have_the_tokens_of_the_library_in_a_large_vocabulary() {
    let Some(tokenizer) = minilm() else { return };
    let passages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/corpus/passages.txt");
    let passages = std::fs::read_to_string(passages).unwrap();
    let words: Vec<&str> = passages.lines().take(500).flat_map(str::split_ascii_whitespace).collect();
    let plain = PlainWords::of(&tokenizer).unwrap();
    let is_plain = |word: &&&str| plain.add_tokens(&tokenizer, word, &mut Vec::new());
    assert!(words.iter().filter(is_plain).count() > words.len() / 2);
    for word in words {
        // Without its first letter a word is seldom in the vocabulary.
        for word in [word, &word.to_uppercase(), word.get(1..).unwrap_or("x")] {
            if !word.is_empty() {
                check(&plain, &tokenizer, word);
            }
        }
    }
}

#[test]
fn random_words_have_the_tokens_of_the_library_in_a_large_vocabulary() {
    let Some(tokenizer) = minilm() else { return };
    let mut runner = TestRunner::new(ProptestConfig::with_cases(20));
    let strategy = (prop::collection::vec(word(), 400), normalization());
    let tested = runner.run(&strategy, |(words, normalization)| {
        let mut tokenizer = tokenizer.clone();
        normalization.apply(&mut tokenizer);
        let plain = PlainWords::of(&tokenizer).unwrap();
        words.iter().for_each(|word| check(&plain, &tokenizer, word));
        Ok(())
    });
    tested.unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn words_have_the_tokens_of_the_library_in_any_vocabulary(
        words in prop::collection::vec(word(), 1..20),
        model in model(),
        normalization in normalization(),
    ) {
        let tokenizer = with_model(tokenizer_with(normalization, "tiny-mean"), &model);
        let has_unknown = model.vocabulary.iter().any(|token| token == model.unknown);
        let plain = PlainWords::of(&tokenizer);
        prop_assert_eq!(plain.is_some(), has_unknown);
        if let Some(plain) = plain {
            words.iter().for_each(|word| check(&plain, &tokenizer, word));
        }
    }

    #[test]
    fn words_have_the_tokens_of_the_library_in_the_fixtures(
        words in prop::collection::vec(word(), 1..20),
        normalization in normalization(),
    ) {
        for fixture in ["tiny-mean", "tiny-mpnet"] {
            let tokenizer = tokenizer_with(normalization, fixture);
            let plain = PlainWords::of(&tokenizer).unwrap();
            words.iter().for_each(|word| check(&plain, &tokenizer, word));
        }
    }
}
