//! Tests of long texts: the tokens of the pieces are those that the library finds in the whole text.

use std::path::Path;

use proptest::prelude::*;

use super::*;

fn tokenizer() -> Tokenizer {
    tokenizer_of("tiny-mean")
}

pub fn tokenizer_of(fixture: &str) -> Tokenizer {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let file = fixtures.join(fixture).join("tokenizer.json");
    let mut tokenizer = Tokenizer::from_file(file).unwrap();
    tokenizer.with_truncation(None).unwrap().with_padding(None);
    tokenizer
}

/// BERT's normalizer with some of its options, and what sentence-transformers may put before it.
#[derive(Clone, Copy, Debug)]
pub struct Normalization {
    bert: BertNormalizer,
    lowercase_first: bool,
}

impl Normalization {
    pub fn apply(self, tokenizer: &mut Tokenizer) {
        tokenizer.with_normalizer(Some(self.bert));
        if self.lowercase_first {
            super::super::tokenizer_class::lowercase_first(tokenizer);
        }
    }
}

pub fn normalization() -> impl Strategy<Value = Normalization> {
    let options = any::<(bool, bool, Option<bool>, bool, bool)>();
    options.prop_map(|(clean, ideographs, accents, lowercase, lowercase_first)| {
        let bert = BertNormalizer::new(clean, ideographs, accents, lowercase);
        Normalization { bert, lowercase_first }
    })
}

/// The tokenizer of a fixture with another normalizer.
pub fn tokenizer_with(normalization: Normalization, fixture: &str) -> Tokenizer {
    let mut tokenizer = tokenizer_of(fixture);
    normalization.apply(&mut tokenizer);
    tokenizer
}

pub fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
}

fn of_pieces(tokenizer: &Tokenizer, text: &str, bytes: usize) -> Vec<u32> {
    let long = LongText::of(tokenizer).unwrap();
    long.pieces(text, bytes).flat_map(|piece| tokens(tokenizer, &piece)).collect()
}

/// Bytes that are tokenised of a text.
fn bytes_left(text: &str) -> usize {
    let tokenizer = tokenizer();
    let long = LongText::of(&tokenizer).unwrap();
    long.pieces(text, 4096).map(|piece| piece.len()).sum()
}

#[test]
fn characters_that_change_no_token_are_left_out() {
    const MIB: usize = 1 << 20;
    for flood in [
        "x",
        "é",
        "ß",
        "한",
        "\u{200b}",
        "\u{301}",
        "\u{301}\u{327}",
        " ",
        "\u{3000}",
        " \u{200b}",
        "😀",
        "a\u{301}",
    ] {
        assert!(bytes_left(&flood.repeat(MIB / flood.len())) < 1024, "a flood of {flood:?}");
    }
    let endless = format!("the {} cat", "x".repeat(MIB / 16));
    assert!(bytes_left(&endless) < 200);
    assert_eq!(of_pieces(&tokenizer(), &endless, 4096), tokens(&tokenizer(), &endless));
    // Words of every length around the longest that is looked up, and the unknown token from there on.
    for chars in 95..105 {
        for letter in ["x", "é", "한", "\u{200b}x", "x\u{301}"] {
            let text = format!("the {}. cat", letter.repeat(chars));
            assert_eq!(of_pieces(&tokenizer(), &text, 64), tokens(&tokenizer(), &text), "{chars} x {letter}");
        }
    }
}

#[test]
fn a_cut_is_only_made_where_the_text_before_has_ended() {
    for (clean, ideographs, accents, lowercase) in
        [(true, true, None, true), (false, false, Some(false), false), (true, true, Some(true), false)]
    {
        let bert = BertNormalizer::new(clean, ideographs, accents, lowercase);
        let normalizer = Normalizer { lowercase_first: false, bert };
        for c in ('\0'..='\u{ffff}').chain('\u{1f000}'..='\u{20000}') {
            if kind_of(normalizer, c) == Kind::Boundary {
                let words = words(&format!("x{}x", normalizer.normalized(c)));
                assert_eq!(words[0], "x", "{c:?} continues the word before it");
            }
        }
    }
}

#[test]
fn other_tokenizers_get_their_texts_whole() {
    let mut tokenizer = tokenizer();
    tokenizer.add_tokens(&[AddedToken::from("word", false)]);
    assert!(LongText::of(&tokenizer).is_none(), "an added token without punctuation around it");
    let mut tokenizer = self::tokenizer();
    tokenizer.with_normalizer(Some(Lowercase));
    assert!(LongText::of(&tokenizer).is_none());
}

/// Short runs of whatever the rules tell apart, and some of what they do not.
pub fn text() -> impl Strategy<Value = String> {
    let char = prop_oneof![
        3 => prop::sample::select(vec!['a', 'Z', '7', 'é', 'İ', 'Σ', 'ß', '한', 'क', 'ा', '्', '漢', '豈', 'ｱ', '😀', '≠', 'Ω']),
        2 => prop::sample::select(vec!['.', '[', ']', '。', '—', '\u{37e}', '\u{1fef}', '`', '$', '+']),
        2 => prop::sample::select(vec![' ', '\t', '\n', '\r', '\u{a0}', '\u{3000}', '\u{2028}', '\u{85}']),
        2 => prop::sample::select(vec!['\0', '\u{200b}', '\u{ad}', '\u{fffd}', '\u{e000}', '\u{1b}', '\u{378}']),
        2 => prop::sample::select(vec!['\u{301}', '\u{327}', '\u{345}', '\u{334}', '\u{302e}', '\u{16ff0}', '\u{20dd}', '\u{93f}']),
        1 => any::<char>(),
    ];
    let run =
        (char, prop_oneof![8 => 1usize..4, 1 => 90usize..120]).prop_map(|(c, n)| c.to_string().repeat(n));
    let word = prop::sample::select(vec![
        "the",
        "cat",
        "[SEP]",
        "[CLS]",
        "[SE",
        "P]",
        "[\u{200b}SEP]",
        "##s",
        "sat on the mat",
        "<mask>",
        "</s>",
    ]);
    let piece = prop_oneof![6 => run, 2 => word.prop_map(str::to_owned)];
    prop::collection::vec(piece, 0..60).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_pieces_have_the_tokens_of_the_whole(
        text in text(),
        bytes in 1usize..200,
        normalization in normalization(),
    ) {
        // MPNet's `<mask>` takes the spaces before it.
        for fixture in ["tiny-mean", "tiny-mpnet"] {
            let tokenizer = tokenizer_with(normalization, fixture);
            prop_assert_eq!(of_pieces(&tokenizer, &text, bytes), tokens(&tokenizer, &text), "{}", fixture);
        }
    }
}
