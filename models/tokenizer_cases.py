#!/usr/bin/env python3
"""Make inference/tests/fixtures/tokenizer-cases.json: token ids of tiny models whose configuration files say something else.

    python models/tokenizer_cases.py
    python models/tokenizer_cases.py --random 400 --seed 1 FILE

The second line writes random folders into FILE, with parts of several cases at once. To compare them:

    VRAMQ_TEST_TOKENIZER_CASES=FILE cargo test -p vramq-inference --test encoder random_folders -- --ignored --nocapture

Needs `pip install transformers` and no weights. Each case is a fixture, what is
changed in its files, and the ids that transformers' AutoTokenizer makes of some
texts then; `null` where the model has no embedding of one of them. Which keys of sentence-transformers' files reach the tokenizer, and
its `do_lower_case`, are as in its `Transformer` (6.2): it is not imported,
because it needs PyTorch.
"""

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path

import tokenizers
import transformers
from tokenizers.normalizers import Lowercase, Sequence

FIXTURES = Path(__file__).resolve().parent.parent / "inference" / "tests" / "fixtures"

TEXTS = [
    "The Café City was part of the STATE",
    "the city",
    "中国 and 漢字かな",
    "A [SEP] b <MASK> the <mask> city </S>",
    "ΟΔΟΣ ΟΔΟΣ. İstanbul Straße ǅ",
    "",
    "  two  spaces\n",
    "the city was part of the state and of the war " * 3,
    " \t ",
    "[cls] xfoox  <Q> café [FOO] foo  <mask>  war 1x",
    "<q>A<doc> city [foo] <pad> [MASK]",
]

BERT = ["tiny-mean", "tiny-distilbert", "tiny-mpnet", "tiny-nomic"]
# transformers' classes of these put special tokens of their own around texts.
OWN_SPECIAL = ["tiny-mean", "tiny-distilbert", "tiny-mpnet", "tiny-roberta", "tiny-xlm-roberta", "tiny-camembert"]
# Of these it takes those of the file.
SPECIAL_OF_FILE = {"tiny-qwen3": "<|endoftext|>", "tiny-gemma": "<eos>", "tiny-modernbert": "[SEP]"}


def token(content, **flags):
    """As `added_tokens_decoder` has it."""
    return {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **flags}


def typed(content, **flags):
    """As other keys have it."""
    return {"__type": "AddedToken", "content": content, **flags}


def template(*parts):
    """A post-processor that puts tokens, each with its id, around a text."""
    pieces = [{"Sequence": {"id": part[1], "type_id": 0}} if isinstance(part, str) else {"SpecialToken": {"id": part[0], "type_id": 0}}
              for part in parts]
    special = {part[0]: {"id": part[0], "ids": [part[1]], "tokens": [part[0]]} for part in parts if not isinstance(part, str)}
    return {"type": "TemplateProcessing", "single": pieces, "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": special}


LETTERS = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
# HerBERT's: BPE of words that end in `</w>`.
HERBERT = {"type": "BPE", "unk_token": "<s>", "end_of_word_suffix": "</w>", "merges": [["t", "h"], ["th", "e</w>"], ["o", "f</w>"]],
           "vocab": {piece: at for at, piece in enumerate(
               ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *LETTERS, *[letter + "</w>" for letter in LETTERS], "th", "the</w>", "of</w>"])}}

# A fixture, a file, and what is changed in it. A key that becomes None is removed. A key may have one inside it behind a `/`.
CASES = (
    [(name, {"tokenizer_config.json": {"do_lower_case": False}}) for name in BERT]
    + [(name, {"tokenizer_config.json": {"strip_accents": False}}) for name in BERT]
    + [("tiny-mean", {"tokenizer_config.json": {"tokenize_chinese_chars": False}}),
       ("tiny-mean", {"tokenizer_config.json": {"do_lower_case": False, "strip_accents": True,
                                                "tokenizer_class": "BertTokenizerFast"}}),
       # A tokenizer.json of a cased model, and no word of it elsewhere: transformers' classes have lower case by default.
       ("tiny-mean", {"tokenizer.json": {"normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                                                        "strip_accents": False, "lowercase": False}},
                      "tokenizer_config.json": {"do_lower_case": None, "strip_accents": None, "tokenizer_class": None}}),
       ("tiny-mean", {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}}),
       ("tiny-roberta", {"tokenizer_config.json": {"add_prefix_space": True}}),
       ("tiny-roberta", {"tokenizer_config.json": {"add_prefix_space": True, "tokenizer_class": None}}),
       ("tiny-qwen3", {"tokenizer_config.json": {"add_prefix_space": True}}),
       ("tiny-modernbert", {"tokenizer_config.json": {"add_prefix_space": True, "tokenizer_class": "PreTrainedTokenizerFast"}}),
       ("tiny-xlm-roberta", {"tokenizer_config.json": {"add_prefix_space": False}}),
       ("tiny-camembert", {"tokenizer_config.json": {"add_prefix_space": False}}),
       ("tiny-gte", {"tokenizer_config.json": {"add_prefix_space": False, "tokenizer_class": "XLMRobertaTokenizerFast"}})]
    # As in the published files of these families: transformers' classes build the normalizer and the pre-tokenizer again.
    + [(name, {"tokenizer.json": {"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True}}})
       for name in ["tiny-xlm-roberta", "tiny-camembert", "tiny-gte"]]
    + [("tiny-xlm-roberta", {"tokenizer.json": {"normalizer": {"type": "Lowercase"}}}),
       ("tiny-xlm-roberta", {"tokenizer.json": {"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True}},
                             "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}})]
    + [(name, {"sentence_bert_config.json": {"do_lower_case": True}})
       for name in ["tiny-mean", "tiny-mpnet", "tiny-roberta", "tiny-xlm-roberta", "tiny-modernbert", "tiny-gemma"]]
    + [("tiny-mean", {"tokenizer_config.json": {"do_lower_case": False}, "sentence_bert_config.json": {"do_lower_case": True}}),
       ("tiny-roberta", {"sentence_bert_config.json": None, "sentence_roberta_config.json": {"max_seq_length": 9}}),
       ("tiny-distilbert", {"sentence_bert_config.json": {}, "sentence_distilbert_config.json": {"max_seq_length": 9}}),
       ("tiny-camembert", {"sentence_bert_config.json": None, "sentence_camembert_config.json": {"max_seq_length": 9}}),
       ("tiny-xlm-roberta", {"sentence_bert_config.json": None,
                             "sentence_xlm-roberta_config.json": {"max_seq_length": 9, "do_lower_case": True}}),
       ("tiny-mean", {"sentence_bert_config.json": {"max_seq_length": None, "tokenizer_args": {"model_max_length": 7}}}),
       ("tiny-mean", {"sentence_bert_config.json": {"max_seq_length": 12, "processor_kwargs": {"model_max_length": 7}}}),
       ("tiny-roberta", {"sentence_bert_config.json": {"processor_kwargs": {"add_prefix_space": True}}})]
    # What puts special tokens around texts.
    + [(name, {"tokenizer.json": {"post_processor": None}}) for name in OWN_SPECIAL]
    + [(name, {"tokenizer.json": {"post_processor": template("$A")}}) for name in OWN_SPECIAL]
    + [(name, {"tokenizer.json": {"post_processor": template("$A", (end, 0), (end, 0))}}) for name, end in SPECIAL_OF_FILE.items()]
    + [("tiny-mean", {"tokenizer.json": {"post_processor": None}, "tokenizer_config.json": {"tokenizer_class": "ElectraTokenizer"}}),
       ("tiny-nomic", {"tokenizer_config.json": {"sep_token": "the", "cls_token": typed("a")}}),
       ("tiny-roberta", {"tokenizer_config.json": {"sep_token": "<mask>"}}),
       ("tiny-xlm-roberta", {"tokenizer_config.json": {"eos_token": "<pad>", "sep_token": "<unk>"}})]
    # Flags of the model, normalizers and pre-tokenizers.
    + [(name, {"tokenizer.json": {"model/max_input_chars_per_word": 3, "model/unk_token": "the"}}) for name in BERT]
    + [("tiny-nomic", {"tokenizer_config.json": {"unk_token": "the"}}),
       ("tiny-roberta", {"tokenizer.json": {"model/ignore_merges": True, "model/unk_token": "<unk>", "model/fuse_unk": True}}),
       ("tiny-gemma", {"tokenizer.json": {"model/fuse_unk": False, "model/byte_fallback": False}}),
       ("tiny-xlm-roberta", {"tokenizer.json": {"model/unk_id": 0}}),
       ("tiny-camembert", {"tokenizer.json": {"model/unk_id": 0}}),
       ("tiny-camembert", {"tokenizer_config.json": {"unk_token": "<pad>"}})]
    + [(name, {"tokenizer.json": {"normalizer": {"type": "Lowercase"}}}) for name in ["tiny-roberta", "tiny-qwen3", "tiny-gemma", "tiny-modernbert"]]
    + [(name, {"tokenizer.json": {"pre_tokenizer": {"type": "Digits", "individual_digits": True}}}) for name in ["tiny-mean", "tiny-xlm-roberta", "tiny-gemma"]]
    + [(name, {"tokenizer.json": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}}})
       for name in ["tiny-roberta", "tiny-qwen3", "tiny-modernbert"]]
    # Classes of other families.
    + [("tiny-mean", {"tokenizer_config.json": {"tokenizer_class": "DPRContextEncoderTokenizer", "do_lower_case": False}}),
       ("tiny-mean", {"tokenizer_config.json": {"tokenizer_class": "MPNetTokenizer"}}),
       ("tiny-roberta", {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}}),
       ("tiny-roberta", {"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"}}),
       ("tiny-qwen3", {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizerFast"}}),
       ("tiny-xlm-roberta", {"tokenizer_config.json": {"tokenizer_class": "CamembertTokenizer"}}),
       ("tiny-roberta", {"tokenizer.json": {"model": HERBERT}, "tokenizer_config.json": {"tokenizer_class": "HerbertTokenizer"}})]
    # Tokens with flags, and tokens that only other files name.
    + [(name, {"tokenizer_config.json": {"added_tokens_decoder": {"0": token("[PAD]"), "1": token("[UNK]"), "2": token("[CLS]"), "3": token("[SEP]"),
                                                                  "4": token("[MASK]", rstrip=True), "80": token("[FOO]", special=False, normalized=True),
                                                                  "81": token("foo", special=False, single_word=True)},
                                         "tokenizer_class": kind}})
       for name, kind in [("tiny-mean", "BertTokenizer"), ("tiny-mean", "PreTrainedTokenizerFast"), ("tiny-nomic", "BertTokenizer")]]
    + [(name, {"tokenizer_config.json": {"added_tokens_decoder": {"4": token("<mask>", lstrip=True, normalized=True), "9": token("city", special=False)}}})
       for name in ["tiny-mpnet", "tiny-roberta", "tiny-xlm-roberta", "tiny-camembert", "tiny-qwen3", "tiny-gemma", "tiny-modernbert"]]
    + [("tiny-mean", {"tokenizer.json": {"added_tokens": []}, "tokenizer_config.json": {"added_tokens_decoder": {}, "mask_token": None}}),
       ("tiny-nomic", {"tokenizer.json": {"added_tokens": []}, "tokenizer_config.json": {"mask_token": "<q>"}}),
       ("tiny-nomic", {"tokenizer_config.json": {"mask_token": typed("city", rstrip=True, normalized=True)}}),
       ("tiny-mean", {"tokenizer_config.json": {"additional_special_tokens": ["war", typed("city", single_word=True, special=True)]}}),
       ("tiny-mean", {"tokenizer_config.json": {"extra_special_tokens": {"query": "<q>"}, "additional_special_tokens": ["war"]}}),
       ("tiny-mean", {"tokenizer_config.json": {"query_token": typed("A", normalized=True)}}),
       ("tiny-mean", {"special_tokens_map.json": {"mask_token": {"content": "the", "lstrip": True}, "additional_special_tokens": ["<q>"]}}),
       ("tiny-mean", {"special_tokens_map.json": {"mask_token": "the"}, "tokenizer_config.json": {"added_tokens_decoder": {"4": token("[MASK]")}}}),
       ("tiny-mean", {"added_tokens.json": {"[FOO]": 280, "war": 281}}),
       ("tiny-qwen3", {"added_tokens.json": {"war": 500}, "tokenizer_config.json": {"eos_token": typed("city", lstrip=True)}}),
       ("tiny-camembert", {"tokenizer_config.json": {"mask_token": "war", "extra_special_tokens": ["city"]}}),
       ("tiny-mpnet", {"tokenizer_config.json": {"mask_token": "city", "pad_token": typed("war", normalized=True)}})]
    # The normalized form of an added token is that of the last normalizer.
    + [(name, {"tokenizer_config.json": {"extra_special_tokens": [typed("[FOO]", normalized=True)]}, "sentence_bert_config.json": {"do_lower_case": True}})
       for name in ["tiny-xlm-roberta", "tiny-modernbert"]]
    + [("tiny-mean", {"tokenizer.json": {"truncation": {"direction": "Left", "max_length": 12, "strategy": "LongestFirst", "stride": 0}},
                      "tokenizer_config.json": {"truncation_side": "right"}})]
)


def change(folder, files):
    for name, keys in files.items():
        path = folder / name
        if keys is None:
            path.unlink()
            continue
        content = json.loads(path.read_text()) if path.exists() and keys else {}
        for key, value in keys.items():
            outer, _, inner = key.partition("/")
            if inner:
                content[outer][inner] = value
            else:
                content[key] = value
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def sentence_config(folder):
    """The first file that is there and not empty."""
    for family in ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"]:
        path = folder / f"sentence_{family}_config.json"
        if path.exists() and (content := json.loads(path.read_text())):
            return content
    return {}


def has_lowercase(normalizer):
    if isinstance(normalizer, Sequence):
        return any(isinstance(part, Lowercase) for part in normalizer)
    return isinstance(normalizer, Lowercase)


def ids(folder):
    sentence = sentence_config(folder)
    kwargs = dict(sentence.get("tokenizer_args", sentence.get("processor_kwargs", {})))
    if sentence.get("max_seq_length") is not None:
        kwargs.setdefault("model_max_length", sentence["max_seq_length"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **kwargs)
    if sentence.get("do_lower_case"):
        backend = tokenizer.backend_tokenizer
        if not has_lowercase(backend.normalizer):
            old = backend.normalizer
            parts = list(old) if isinstance(old, Sequence) else [old] if old is not None else []
            backend.normalizer = Sequence([Lowercase(), *parts])
    embeddings = json.loads((folder / "config.json").read_text())["vocab_size"]
    all_ids = tokenizer(TEXTS, truncation=True)["input_ids"]
    return [one if all(id < embeddings for id in one) else None for one in all_ids]


def changed(fixture, files, what):
    """What a function of the folder returns, for a fixture with changed files."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder) / fixture
        shutil.copytree(FIXTURES / fixture, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        change(folder, files)
        return what(folder)


def random_files(rng, fixture):
    """One to four keys, each with a value that some case gives it. Values for other fixtures count, too: their tokens are not in the vocabulary."""
    parts = [(name, key, value) for _, files in CASES for name, keys in files.items() for key, value in (keys or {}).items()]
    own = [(name, key, value) for other, files in CASES if other == fixture
           for name, keys in files.items() for key, value in (keys or {}).items()]
    files = {}
    for _ in range(rng.randint(1, 4)):
        name, key, value = rng.choice(own if rng.random() < 0.5 else parts)
        outer, _, inner = key.partition("/")
        content = json.loads((FIXTURES / fixture / name).read_text()) if (FIXTURES / fixture / name).exists() else {}
        # The inner key of another kind of tokenizer.
        if not inner or isinstance(content.get(outer), dict):
            files.setdefault(name, {})[key] = value
    return files


def random_case(rng):
    """`ids` is null where transformers cannot read the folder, or not all of the texts."""
    fixture = rng.choice(sorted({fixture for fixture, _ in CASES}))
    files = random_files(rng, fixture)
    try:
        found = changed(fixture, files, ids)
    except Exception:  # Whatever its libraries raise.
        found = None
    return {"fixture": fixture, "files": files, "ids": found}


def write(path, cases):
    versions = f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}"
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    texts = json.dumps(TEXTS, ensure_ascii=False)
    Path(path).write_text(f'{{"versions": "{versions}",\n"texts": {texts},\n"cases": [\n{lines}\n]}}\n')


def main():
    parser = argparse.ArgumentParser(description="Writes the token ids that transformers makes with changed configuration files.")
    parser.add_argument("--random", type=int, metavar="N", help="write N random folders instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("file", nargs="?", help="where to; only with --random")
    options = parser.parse_args()
    if (options.random is None) != (options.file is None):
        parser.error("--random and FILE go together")
    if options.random is None:
        write(FIXTURES / "tokenizer-cases.json",
              [{"fixture": fixture, "files": files, "ids": changed(fixture, files, ids)} for fixture, files in CASES])
    else:
        rng = random.Random(options.seed)
        write(options.file, [random_case(rng) for _ in range(options.random)])


if __name__ == "__main__":
    main()
