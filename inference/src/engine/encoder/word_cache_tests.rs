//! Tests of remembered words: the tokens are those that the library finds in the whole text, when words are new and when they are not.

use std::cell::Cell;
use std::path::Path;

use proptest::prelude::*;
use tokenizers::AddedToken;

use super::super::long_text::LongText;
use super::super::long_text::tests::{normalization, text, tokenizer_of, tokenizer_with, tokens};
use super::*;

/// All tokens of a text. `encode` makes those of a word.
fn of_words_by(cache: &WordCache, text: &str, encode: impl Fn(&str) -> Vec<u32>) -> Vec<u32> {
    let mut content = Vec::new();
    for word in cache.words(text) {
        cache.add_tokens(word, &mut content, |word| Ok(encode(word))).unwrap();
    }
    content
}

fn of_words(cache: &WordCache, tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    of_words_by(cache, text, |word| tokens(tokenizer, word))
}

/// Real sentences, with names of programs, numbers and addresses.
#[test]
fn passages_have_the_tokens_of_the_whole() {
    let passages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/corpus/passages.txt");
    let passages = std::fs::read_to_string(passages).unwrap();
    for fixture in ["tiny-mean", "tiny-mpnet"] {
        let tokenizer = tokenizer_of(fixture);
        let cache = WordCache::of(&tokenizer);
        for passage in passages.lines().take(500) {
            let whole = tokens(&tokenizer, passage);
            assert_eq!(of_words(&cache, &tokenizer, passage), whole, "{fixture}: {passage}");
            assert_eq!(of_words(&cache, &tokenizer, passage), whole, "{fixture}, again: {passage}");
        }
        assert!(cache.len() > 1000, "{fixture}: {}", cache.len());
    }
}

#[test]
fn a_word_is_tokenised_once() {
    let tokenizer = tokenizer_of("tiny-mean");
    let cache = WordCache::of(&tokenizer);
    let count = Cell::new(0);
    let add = |text: &str| {
        of_words_by(&cache, text, |word| {
            count.set(count.get() + 1);
            tokens(&tokenizer, word)
        });
        count.take()
    };
    assert_eq!(add("the cat, the\tcat; and\nthe (cat)."), 8, "the cat , ; and ( ) .");
    assert_eq!(add(".cat the)"), 0);
    let long = "x".repeat(WORD_BYTES_MAX + 1);
    assert_eq!((add(&long), add(&long)), (1, 1), "a long word is not remembered");
}

#[test]
fn there_are_no_more_words_than_the_limit() {
    let tokenizer = tokenizer_of("tiny-mean");
    let cache = WordCache::of(&tokenizer);
    let mut content = Vec::new();
    for first in 0..2 * WORDS_MAX / 64 {
        let text = (0..64).map(|n| format!("{} ", first * 64 + n)).collect::<String>();
        content.extend(of_words_by(&cache, &text, |word| vec![word.parse().unwrap()]));
        assert!(cache.len() <= WORDS_MAX);
    }
    let expected: Vec<u32> = (0..2 * WORDS_MAX as u32).collect();
    assert_eq!(content, expected);
}

#[test]
fn a_word_without_tokens_is_an_error_and_not_remembered() {
    let cache = WordCache::of(&tokenizer_of("tiny-mean"));
    let mut content = vec![7];
    let failed = cache.add_tokens("e", &mut content, |word| Err(format!("no {word}")));
    assert_eq!(failed.unwrap_err(), "no e");
    cache.add_tokens("e", &mut content, |_| Ok(vec![8, 9])).unwrap();
    cache.add_tokens("e", &mut content, |_| panic!("it is remembered")).unwrap();
    assert_eq!(content, [7, 8, 9, 8, 9]);
}

#[test]
fn a_mark_that_is_in_an_added_token_cuts_nothing() {
    let mut tokenizer = tokenizer_of("tiny-mean");
    tokenizer.add_special_tokens(&[AddedToken::from("[a.b]", true)]);
    assert!(LongText::of(&tokenizer).is_some(), "the rules hold for such a token");
    let cache = WordCache::of(&tokenizer);
    assert!(
        !cache.marks[usize::from(b'.')] && !cache.marks[usize::from(b'[')] && cache.marks[usize::from(b',')]
    );
    for text in ["the[a.b]cat", "a.b", "[a.b", "[a.b]]. cat,[a.b]", "[ a.b]"] {
        assert_eq!(of_words(&cache, &tokenizer, text), tokens(&tokenizer, text), "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_words_have_the_tokens_of_the_whole(text in text(), normalization in normalization()) {
        for fixture in ["tiny-mean", "tiny-mpnet"] {
            let tokenizer = tokenizer_with(normalization, fixture);
            let cache = WordCache::of(&tokenizer);
            let whole = tokens(&tokenizer, &text);
            prop_assert_eq!(&of_words(&cache, &tokenizer, &text), &whole, "{}", fixture);
            prop_assert_eq!(&of_words(&cache, &tokenizer, &text), &whole, "{}, again", fixture);
        }
    }
}
