//! Tests of tokenising.

use std::path::Path;

use super::*;

fn tokens() -> Tokens {
    tokens_of("tiny-mean")
}

fn tokens_of(fixture: &str) -> Tokens {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
    Tokens::load(&ModelConfig::read(&folder).unwrap(), 2).unwrap()
}

/// Words, lines, ideographs without a space, emoji and accents, each for more than what is looked at of a text.
#[test]
fn a_prefix_has_the_tokens_of_the_whole() {
    for fixture in
        ["tiny-camembert", "tiny-gemma", "tiny-modernbert", "tiny-qwen3", "tiny-roberta", "tiny-xlm-roberta"]
    {
        let tokens = tokens_of(fixture);
        assert!(matches!(tokens.long, LongTexts::Prefix(_)), "{fixture}");
        let pieces = [
            "the city was part of the state. ",
            "the\ncity\n",
            "中国的首都是北京市。",
            "😀🎉👍🏽",
            "e\u{301}te\u{301} ",
        ];
        let block = |piece: &&str| piece.repeat((10 << 10) / piece.len());
        let text = pieces.iter().map(block).collect::<String>().repeat(20);
        assert!(text.len() > 1_000_000, "a megabyte");
        let whole = tokens.tokenizer.encode_fast(text.as_str(), false).unwrap();
        for room in [8, 500, 5000, 12_000] {
            let content = tokens.content(&text, room).unwrap();
            assert!(
                (room..whole.len() / 2).contains(&content.len()),
                "{fixture}: {room} of {}",
                content.len()
            );
            assert_eq!(content, whole.get_ids()[..content.len()], "{fixture}: {room}");
        }
    }
}

/// The vocabulary of 250,002 pieces that XLM-RoBERTa's descendants share. `make test` fetches it, a bare `cargo test` does without.
#[test]
fn ids_of_the_published_vocabulary_of_xlm_roberta_are_those_of_transformers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let needed =
        std::env::var_os("VRAMQ_TEST_MODEL").map(|minilm| Path::new(&minilm).with_file_name("xlm-roberta"));
    let is_needed = needed.is_some();
    let folder = needed.unwrap_or_else(|| root.join("../models/xlm-roberta"));
    if !folder.join("tokenizer.json").exists() {
        let missing = format!("{} is not there: run models/fetch --model xlm-roberta", folder.display());
        assert!(!is_needed, "{missing}");
        vramq_testkit::not_run::not_run(missing);
        return;
    }
    let tokens = Tokens::load(&ModelConfig::read(&folder).unwrap(), 2).unwrap();
    let read = |file| std::fs::read(root.join("tests/fixtures/xlm-roberta").join(file)).unwrap();
    let texts: Vec<String> = serde_json::from_slice(&read("texts.json")).unwrap();
    let expected: Vec<Vec<u32>> = serde_json::from_slice(&read("tokens.json")).unwrap();
    assert!(texts.iter().any(|text| text.len() > PREFIX_BYTES_MIN), "no text of which a part is tokenised");
    assert_eq!(texts.len(), expected.len());
    for (text, expected) in texts.iter().zip(expected) {
        assert_eq!(*tokens.ids("", text).unwrap(), *expected, "{text:?}");
    }
}

#[test]
fn a_cut_text_has_the_tokens_of_the_whole() {
    let tokens = tokens();
    let room = tokens.tokens_max - 2;
    let mut pieces = ["the cat sat ", "[SEP]", "漢字", "e\u{301}\u{327} ", "\u{200b}\t", "x", "![CLS] ", "ß"]
        .iter()
        .cycle();
    for first in 1..40 {
        let text: String = pieces.by_ref().take(300 + first * 7).copied().collect();
        let whole = tokens.tokenizer.encode_fast(text.as_str(), false).unwrap();
        let content = tokens.content(&text, room).unwrap();
        assert!(content.len() < whole.len(), "was not cut");
        assert_eq!(content[..room], whole.get_ids()[..room]);
    }
}

#[test]
fn a_flood_of_one_character_is_cut() {
    let tokens = tokens();
    for flood in [".", "]", "[SEP]", "漢"] {
        let text = flood.repeat(1 << 20);
        assert_eq!(tokens.ids("", &text).unwrap().len(), tokens.tokens_max, "a flood of {flood}");
        assert!(tokens.content(&text, 8).unwrap().len() < 1000, "a flood of {flood} is tokenised whole");
    }
}

#[test]
fn words_are_read_until_there_are_enough_tokens() {
    let tokens = tokens();
    assert_eq!(tokens.content("the the the the", 9).unwrap().len(), 4, "a word is one token");
    for room in 1..5 {
        assert_eq!(tokens.content("the the the the", room).unwrap().len(), room);
    }
}

#[test]
fn plain_words_are_not_left_to_the_library() {
    for fixture in ["tiny-mean", "tiny-mpnet", "tiny-distilbert", "tiny-nomic", "tiny-gte-no-types"] {
        let tokens = tokens_of(fixture);
        assert!(matches!(&tokens.long, LongTexts::Words(words) if words.plain.is_some()), "{fixture}");
        let passages = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/corpus/passages.txt");
        for passage in std::fs::read_to_string(passages).unwrap().lines().take(300) {
            let whole = tokens.tokenizer.encode_fast(passage, false).unwrap();
            assert_eq!(tokens.content(passage, usize::MAX).unwrap(), whole.get_ids(), "{fixture}: {passage}");
        }
        let LongTexts::Words(words) = &tokens.long else { unreachable!() };
        let before = words.cache.len();
        tokens.content("Words that are plain, 77 of them.", usize::MAX).unwrap();
        assert_eq!(words.cache.len(), before, "{fixture}: the library has made tokens of plain words");
        tokens.content("naïveté", usize::MAX).unwrap();
        assert_eq!(words.cache.len(), before + 1, "{fixture}");
    }
}

#[test]
fn a_text_of_one_word_is_one_token() {
    let tokens = tokens();
    assert_eq!(tokens.ids("", &"x".repeat(100_000)).unwrap().len(), 3);
    assert_eq!(tokens.ids("", "").unwrap().len(), 2);
}

#[test]
fn inputs_that_are_no_text_are_named() {
    let inputs = [Input::Text("a".into()), Input::Uri("s3://x".into())];
    let refused = tokens().items(&inputs, &Params::default()).unwrap_err();
    assert_eq!(refused.0, "inputs[1] is uri; this model takes text");
    let mut params = Params::default();
    params.0.insert("dtype".into(), "f64".into());
    assert!(tokens().items(&inputs[..1], &params).unwrap_err().0.contains("params.dtype"));
}
