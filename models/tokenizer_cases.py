#!/usr/bin/env python3
"""Make inference/tests/fixtures/tokenizer-cases.json: token ids of tiny models whose configuration files say something else.

    python models/tokenizer_cases.py

Needs `pip install transformers` and no weights. Each case is a fixture, what is
changed in its files, and the ids that transformers' AutoTokenizer makes of some
texts then. Which keys of sentence-transformers' files reach the tokenizer, and
its `do_lower_case`, are as in its `Transformer` (6.2): it is not imported,
because it needs PyTorch.
"""

import json
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
]

BERT = ["tiny-mean", "tiny-distilbert", "tiny-mpnet", "tiny-nomic"]

# A fixture, a file, and what is changed in it. A key that becomes None is removed.
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
)


def change(folder, files):
    for name, keys in files.items():
        path = folder / name
        if keys is None:
            path.unlink()
            continue
        content = json.loads(path.read_text()) if path.exists() and keys else {}
        content.update(keys)
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
    return tokenizer(TEXTS, truncation=True)["input_ids"]


def main():
    cases = []
    for fixture, files in CASES:
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder) / fixture
            shutil.copytree(FIXTURES / fixture, folder, ignore=shutil.ignore_patterns("*.safetensors"))
            change(folder, files)
            cases.append({"fixture": fixture, "files": files, "ids": ids(folder)})
    versions = f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}"
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    texts = json.dumps(TEXTS, ensure_ascii=False)
    (FIXTURES / "tokenizer-cases.json").write_text(
        f'{{"versions": "{versions}",\n"texts": {texts},\n"cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
