#!/usr/bin/env python3
"""Make the tiny BERTs of the fast tests: random weights, real everything else.

    python models/tiny_bert.py            # inference/tests/fixtures/tiny-*

Needs `pip install sentence-transformers` and the model of models/fetch, whose
tokenizer is cut down to a few hundred entries. Seeds are fixed, so the files
change only when the libraries' random numbers do. The reference vectors come
from models/reference.py's `write`. inference/tests/fixtures/README.md describes the
files.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from reference import FIXTURES, ROOT, versions, write

LAYERS = 2
# Tokens at most, and positions: more of these, so that a truncation to the wrong one of the two shows.
SHORT = {"tokens": 24, "positions": 40}
# As long as BERT's own, for passes of very different sizes.
LONG = {"tokens": 512, "positions": 514}
WORDS = 160

SQUARE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
# Nothing here is a power of two, a multiple of 8, or four times another.
CROOKED = {"hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 100}

# What differs between the folders; one seed each. "layout" is how
# Sentence-Transformers wrote the folder: "classic" as on the hub since 2021,
# "v6" as its release 6 saves (other class paths in modules.json, pooling_mode as
# a word, and the maximal length in tokenizer_config.json alone).
VARIANTS = {
    "tiny-mean": {"shape": SQUARE, "pooling": "mean", "normalize": False, "layout": "classic"},
    "tiny-cls-normalize": {"shape": CROOKED, "pooling": "cls", "normalize": True, "layout": "classic"},
    "tiny-max": {"shape": SQUARE, "pooling": "max", "normalize": False, "layout": "classic"},
    "tiny-mean-normalize-v6-f16": {"shape": CROOKED, "pooling": "mean", "normalize": True, "layout": "v6"},
    "tiny-long": {"shape": SQUARE, "pooling": "mean", "normalize": True, "layout": "classic", "lengths": LONG},
}

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "The Quick BROWN fox",
    "",
    "   ",
    "a",
    ".",
    "in the first year of the war, the city was part of the state",
    "he said that it was not the same as the other one",
    "caf\u00e9 cafe\u0301 na\u00efve",
    "\u4e2d\u6587 and \U0001f600",
    "one\ttwo\nthree\x00four\u200bfive",
    "[CLS] [SEP] [MASK] [PAD]",
    "x" * 101,
    "the " * 21,
    "the " * 22,  # exactly the limit, two special tokens included
    "the " * 23,
    "of and to in " * 30,
    "y" * 3000,
    "abcdefghijklmnopqrstuvwxyz" * 3,
    "1 2 3, 2026: (a) [b] {c} <d> \"e\" 'f' #g $h %i &j *k +l -m /n =o ?p @q \\r ^s _t `u |v ~w!",
]


def main():
    try:
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers import BertConfig, BertModel
    except ImportError:
        sys.exit("models/tiny_bert.py: needs sentence-transformers: pip install sentence-transformers")

    source = ROOT / "models" / "all-MiniLM-L6-v2"
    if not source.is_dir():
        sys.exit(f"models/tiny_bert.py: {source} is missing: run models/fetch")
    for seed, (name, variant) in enumerate(VARIANTS.items()):
        lengths = variant.setdefault("lengths", SHORT)
        vocabulary, tokenizer = small_tokenizer(source, lengths)
        config = BertConfig(
            vocab_size=len(vocabulary), num_hidden_layers=LAYERS, max_position_embeddings=lengths["positions"],
            hidden_act="gelu", layer_norm_eps=1e-12, **variant["shape"],
        )
        model = BertModel(config).eval()
        randomize(model, torch.Generator().manual_seed(seed))
        folder = FIXTURES / name
        shutil.rmtree(folder, ignore_errors=True)
        if variant["layout"] == "classic":
            classic(folder, model, vocabulary, tokenizer, variant)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                classic(Path(scratch) / name, model.half(), vocabulary, tokenizer, variant)
                saved = SentenceTransformer(scratch + "/" + name, device="cpu", local_files_only=True)
                saved.save(str(folder), create_model_card=False)
        # f16 weights are widened: every sum is taken in f32, as the worker does.
        loaded = SentenceTransformer(str(folder), device="cpu", local_files_only=True).float()
        write(loaded, folder, TEXTS)
        (folder / "versions.txt").write_text(versions() + "\n")


def small_tokenizer(source, lengths):
    """MiniLM's tokenizer.json with a short vocabulary: everything else stays.

    The entries are the five special tokens, printable ASCII alone and as
    continuations, and the first WORDS whole words of the original, which is
    ordered by frequency.
    """
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    characters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    continuations = ["##" + c for c in characters if c.isalnum()] + ["##s", "##ing", "##ed", "##er", "##ly"]
    common = [word for word in words if len(word) > 1 and word.isascii() and word.isalpha()][:WORDS]
    vocabulary = list(dict.fromkeys(specials + characters + continuations + common))

    ids = {word: id for id, word in enumerate(vocabulary)}
    tokenizer["model"]["vocab"] = ids
    for token in tokenizer["added_tokens"]:
        token["id"] = ids[token["content"]]
    for token in tokenizer["post_processor"]["special_tokens"].values():
        token["ids"] = [ids[token["id"]]]
    # As in the original, these two are left over from training and must not be
    # believed: the maximal length is sentence_bert_config.json's.
    tokenizer["truncation"]["max_length"] = lengths["tokens"] // 2
    tokenizer["padding"]["strategy"] = {"Fixed": lengths["tokens"] // 2}
    return vocabulary, tokenizer


def randomize(model, generator):
    """Weights wide enough for GELU, softmax and LayerNorm to bend the values."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias"):
                weight.copy_(0.1 * noise)
            elif weight.ndim == 1:
                # A norm's.
                weight.copy_(1 + 0.2 * noise)
            elif "embed" in name:
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)


def classic(folder, model, vocabulary, tokenizer, variant):
    """The layout of the hub's models, the same keys as all-MiniLM-L6-v2's."""
    model.save_pretrained(folder)
    for stray in set(folder.iterdir()) - {folder / "config.json", folder / "model.safetensors"}:
        stray.unlink()
    put(folder / "tokenizer.json", tokenizer, indent=None)
    put(folder / "tokenizer_config.json", {
        "do_lower_case": True, "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]",
        "cls_token": "[CLS]", "mask_token": "[MASK]", "tokenize_chinese_chars": True, "strip_accents": None,
        "tokenizer_class": "BertTokenizer", "model_max_length": variant["lengths"]["positions"],
    })
    put(folder / "special_tokens_map.json", {
        f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "sep", "pad", "cls", "mask")
    })
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    put(folder / "sentence_bert_config.json", {"max_seq_length": variant["lengths"]["tokens"], "do_lower_case": False})
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * variant["normalize"]
    put(folder / "modules.json", [
        {"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "", "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ])
    put(folder / "1_Pooling" / "config.json", {
        "word_embedding_dimension": model.config.hidden_size,
        "pooling_mode_cls_token": variant["pooling"] == "cls",
        "pooling_mode_mean_tokens": variant["pooling"] == "mean",
        "pooling_mode_max_tokens": variant["pooling"] == "max",
        "pooling_mode_mean_sqrt_len_tokens": False,
    })


def put(path, value, indent=2):
    path.parent.mkdir(exist_ok=True)
    separators = (",", ":") if indent is None else None
    path.write_text(json.dumps(value, indent=indent, separators=separators) + "\n")


if __name__ == "__main__":
    main()
