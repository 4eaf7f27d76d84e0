//! Builds a tokenizer as transformers' class builds it: from the vocabulary and merges of `tokenizer.json`, and its own normalizer,
//! pre-tokenizer, post-processor and flags of the model.

use std::io::ErrorKind;
use std::path::Path;

use serde::Deserialize;
use tokenizers::models::bpe::BPE;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::{BertNormalizer, NFC, Replace};
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::processors::bert::BertProcessing;
use tokenizers::processors::roberta::RobertaProcessing;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{
    ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, SplitDelimiterBehavior,
    Tokenizer,
};

use super::LoadError;
use super::class_tokens::ClassTokens;
use super::safe_split::QWEN;
use super::token_keys::FileToken;
use super::tokenizer_class::{Class, TokenizerConfig, normalizers};

/// What the library's tokenizer does not tell of its `tokenizer.json`.
#[derive(Debug, Deserialize)]
pub(super) struct FileParts {
    #[serde(default)]
    pub added_tokens: Vec<FileToken>,
    pub model: FileModel,
}

#[derive(Debug, Deserialize)]
pub(super) struct FileModel {
    unk_id: Option<usize>,
}

/// What to do with a folder that has the vocabulary in other files only, as those of older models have it.
const NO_FILE: &str = "there is no such file. transformers writes it: in Python, \
                       `AutoTokenizer.from_pretrained(\"FOLDER\").save_pretrained(\"FOLDER\")`";

/// The tokenizer of a file, and what the library does not tell of it.
pub(super) fn open(path: &Path) -> Result<(Tokenizer, FileParts), LoadError> {
    let text = std::fs::read(path).map_err(|source| match source.kind() {
        ErrorKind::NotFound => LoadError::Tokenizer { path: path.to_owned(), reason: NO_FILE.to_owned() },
        _ => LoadError::Read { path: path.to_owned(), source },
    })?;
    let parts =
        serde_json::from_slice(&text).map_err(|source| LoadError::Json { path: path.to_owned(), source })?;
    let tokenizer = Tokenizer::from_bytes(text)
        .map_err(|e| LoadError::Tokenizer { path: path.to_owned(), reason: e.to_string() })?;
    Ok((tokenizer, parts))
}

/// XLM-RoBERTa's class has it at this place, whatever the file says.
const XLM_ROBERTA_UNKNOWN: usize = 3;

/// Flags of BPE.
#[derive(Default)]
struct BpeFlags<'a> {
    unknown: Option<&'a str>,
    fuses_unknown: bool,
    has_bytes: bool,
    suffix: &'a str,
}

/// Makes the class's tokenizer of the file's. `embeddings`: how many tokens the model has embeddings of.
///
/// # Errors
/// The file does not fit the class, or the class needs a token that there is not.
pub(super) fn rebuild(
    tokenizer: &mut Tokenizer,
    config: &TokenizerConfig,
    tokens: &ClassTokens,
    model: &FileModel,
    embeddings: usize,
) -> Result<(), String> {
    let class = config.class;
    if class == Class::AsFile {
        return tokens.give_to(tokenizer, embeddings);
    }
    let (normalizer, words) = before_model(tokenizer, config)?;
    set_model(tokenizer, class, tokens, model)?;
    tokenizer.with_normalizer(normalizer).with_pre_tokenizer(Some(words));
    tokens.give_to(tokenizer, embeddings)?;
    if let Some(processor) = post_processor(tokenizer, class, tokens)? {
        tokenizer.with_post_processor(Some(processor));
    }
    Ok(())
}

/// The normalizer and the pre-tokenizer.
fn before_model(
    tokenizer: &Tokenizer,
    config: &TokenizerConfig,
) -> Result<(Option<NormalizerWrapper>, PreTokenizerWrapper), String> {
    let adds_space = config.add_prefix_space;
    let parts = match config.class {
        Class::AsFile => return Err("it is taken as it is".into()),
        Class::Bert | Class::DistilBert | Class::Dpr | Class::MpNet => {
            let ideographs = config.tokenize_chinese_chars.unwrap_or(true);
            // DPR's classes do not pass it on.
            let lowercase = config.class == Class::Dpr || config.do_lower_case.unwrap_or(true);
            let normalizer = BertNormalizer::new(true, ideographs, config.strip_accents, lowercase);
            (Some(normalizer.into()), BertPreTokenizer.into())
        }
        Class::Herbert => {
            (Some(BertNormalizer::new(true, true, Some(false), false).into()), BertPreTokenizer.into())
        }
        Class::Roberta | Class::Gpt2 => {
            (None, ByteLevel::new(adds_space.unwrap_or(false), true, true).into())
        }
        Class::Qwen2 => {
            let regex = SplitPattern::Regex(QWEN.to_owned());
            let split = Split::new(regex, SplitDelimiterBehavior::Isolated, false);
            let bytes = ByteLevel::new(adds_space.unwrap_or(false), true, false);
            let words = Sequence::new(vec![split.map_err(|error| error.to_string())?.into(), bytes.into()]);
            (Some(NFC.into()), words.into())
        }
        Class::Gemma => {
            let spaces = Replace::new(" ", "▁").map_err(|error| error.to_string())?;
            let split = Split::new(" ", SplitDelimiterBehavior::MergedWithPrevious, false);
            (Some(spaces.into()), split.map_err(|error| error.to_string())?.into())
        }
        Class::XlmRoberta | Class::Camembert => {
            // The normalizer of published files reduces several spaces to one, and they have no `WhitespaceSplit`. So a text of
            // spaces, and spaces at a text's end, would have a token.
            let all = normalizers(tokenizer).into_iter();
            let table = all.into_iter().find(|part| matches!(part, NormalizerWrapper::Precompiled(_)));
            let prepend =
                if adds_space.unwrap_or(true) { PrependScheme::Always } else { PrependScheme::Never };
            let spaces = Metaspace::new('▁', prepend, true);
            (table, Sequence::new(vec![WhitespaceSplit.into(), spaces.into()]).into())
        }
    };
    Ok(parts)
}

/// Gives the model the class's flags, if they are others.
fn set_model(
    tokenizer: &mut Tokenizer,
    class: Class,
    tokens: &ClassTokens,
    file: &FileModel,
) -> Result<(), String> {
    match class {
        Class::AsFile => Ok(()),
        Class::Bert | Class::DistilBert | Class::Dpr | Class::MpNet => {
            set_word_piece(tokenizer, class, tokens.needed("unk_token")?)
        }
        Class::Roberta | Class::Gpt2 | Class::Qwen2 => set_bpe(tokenizer, class, &BpeFlags::default()),
        Class::Gemma => {
            let unknown = Some(tokens.needed("unk_token")?);
            let flags = BpeFlags { unknown, fuses_unknown: true, has_bytes: true, suffix: "" };
            set_bpe(tokenizer, class, &flags)
        }
        Class::Herbert => {
            let unknown = Some(tokens.needed("unk_token")?);
            set_bpe(tokenizer, class, &BpeFlags { unknown, suffix: "</w>", ..BpeFlags::default() })
        }
        Class::XlmRoberta => set_unigram(tokenizer, class, file, |_| XLM_ROBERTA_UNKNOWN),
        Class::Camembert => {
            let unknown = tokens.needed("unk_token")?;
            set_unigram(tokenizer, class, file, |model| {
                model.iter().position(|(token, _)| token == unknown).unwrap_or(0)
            })
        }
    }
}

fn other_model(class: Class, needed: &str) -> String {
    format!(
        "its model is none of the kind {needed}, which the class {class} in tokenizer_config.json makes of it. If the file is right, set \
         `\"tokenizer_class\": \"PreTrainedTokenizerFast\"` there, with which transformers takes the file as it is"
    )
}

fn set_word_piece(tokenizer: &mut Tokenizer, class: Class, unknown: &str) -> Result<(), String> {
    const PREFIX: &str = "##";
    const CHARS_MAX: usize = 100;
    let ModelWrapper::WordPiece(model) = tokenizer.get_model() else {
        return Err(other_model(class, "WordPiece"));
    };
    let is_same = model.unk_token == unknown
        && model.continuing_subword_prefix == PREFIX
        && model.max_input_chars_per_word == CHARS_MAX;
    if !is_same {
        let mut model = model.clone();
        unknown.clone_into(&mut model.unk_token);
        PREFIX.clone_into(&mut model.continuing_subword_prefix);
        model.max_input_chars_per_word = CHARS_MAX;
        tokenizer.with_model(model);
    }
    Ok(())
}

fn set_bpe(tokenizer: &mut Tokenizer, class: Class, flags: &BpeFlags<'_>) -> Result<(), String> {
    let ModelWrapper::BPE(model) = tokenizer.get_model() else { return Err(other_model(class, "BPE")) };
    let of = |part: &Option<String>| part.clone().unwrap_or_default();
    // Merges were read with these.
    if !of(&model.continuing_subword_prefix).is_empty() || of(&model.end_of_word_suffix) != flags.suffix {
        let (prefix, suffix) = (of(&model.continuing_subword_prefix), of(&model.end_of_word_suffix));
        return Err(format!(
            "it has the prefix `{prefix}` and the suffix `{suffix}` of parts of words, but transformers' class {class} the prefix `` and the \
             suffix `{}`",
            flags.suffix
        ));
    }
    let is_same = |model: &BPE| {
        model.dropout.is_none()
            && model.unk_token.as_deref() == flags.unknown
            && model.fuse_unk == flags.fuses_unknown
            && model.byte_fallback == flags.has_bytes
            && !model.ignore_merges
    };
    if !is_same(model) {
        let mut model = model.clone();
        model.dropout = None;
        model.unk_token = flags.unknown.map(str::to_owned);
        (model.fuse_unk, model.byte_fallback, model.ignore_merges) =
            (flags.fuses_unknown, flags.has_bytes, false);
        tokenizer.with_model(model);
    }
    Ok(())
}

fn set_unigram(
    tokenizer: &mut Tokenizer,
    class: Class,
    file: &FileModel,
    unknown: impl Fn(&Unigram) -> usize,
) -> Result<(), String> {
    let ModelWrapper::Unigram(model) = tokenizer.get_model() else {
        return Err(other_model(class, "Unigram"));
    };
    let unknown = unknown(model);
    if file.unk_id != Some(unknown) || model.byte_fallback() {
        let vocabulary = model.iter().cloned().collect();
        let model = Unigram::from(vocabulary, Some(unknown), false).map_err(|error| error.to_string())?;
        tokenizer.with_model(model);
    }
    Ok(())
}

/// What puts special tokens around texts; `None`: that of the file.
fn post_processor(
    tokenizer: &Tokenizer,
    class: Class,
    tokens: &ClassTokens,
) -> Result<Option<PostProcessorWrapper>, String> {
    let token = |name: &str| {
        let token = tokens.needed(name)?;
        let id = tokenizer.token_to_id(token).ok_or_else(|| format!("it has no token `{token}`"))?;
        Ok::<_, String>((token.to_owned(), id))
    };
    Ok(match class {
        Class::AsFile | Class::Gpt2 | Class::Qwen2 | Class::Gemma => None,
        Class::Bert | Class::DistilBert | Class::Dpr => {
            let (first, last) = (token("cls_token")?, token("sep_token")?);
            let single = format!("{}:0 $A:0 {}:0", first.0, last.0);
            let pair = format!("{single} $B:1 {}:1", last.0);
            Some(template(single, pair, [first, last])?)
        }
        // The class has these ids as numbers.
        Class::Herbert => {
            Some(BertProcessing::new((token("sep_token")?.0, 2), (token("cls_token")?.0, 0)).into())
        }
        Class::MpNet | Class::Roberta => {
            Some(RobertaProcessing::new(token("sep_token")?, token("cls_token")?).into())
        }
        Class::XlmRoberta | Class::Camembert => {
            let (first, last) = (token("bos_token")?, token("eos_token")?);
            let single = format!("{} $A {}", first.0, last.0);
            let pair = format!("{single} {} $B {}", last.0, last.0);
            Some(template(single, pair, [first, last])?)
        }
    })
}

fn template(
    single: String,
    pair: String,
    special: [(String, u32); 2],
) -> Result<PostProcessorWrapper, String> {
    // The library takes it for the text, once more.
    if let Some((token, _)) = special.iter().find(|(token, _)| token.starts_with('$')) {
        return Err(format!(
            "its special token `{token}` begins with `$`, which means the text in a template"
        ));
    }
    let mut template = TemplateProcessing::builder();
    template.try_single(single)?.try_pair(pair)?.special_tokens(special.to_vec());
    template.build().map(Into::into).map_err(|error| error.to_string())
}
