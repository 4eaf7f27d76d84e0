#!/usr/bin/env python3
"""Make reference vectors of the models of models/fetch with sentence-transformers, the independent library.

    python models/reference.py            # minilm, splade and xlm-roberta in inference/tests/fixtures
    python models/reference.py splade     # one of them

Needs `pip install sentence-transformers` (any PyTorch, CPU is enough) and the
models that models/fetch gets. Each text is encoded alone, in f32, on the CPU, so
that no padding and no neighbour has a part in the numbers.
inference/tests/fixtures/README.md describes the files.
"""

import json
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "inference" / "tests" / "fixtures"

LOREM = (
    "The worker takes as many jobs as its memory has room for, runs them, and publishes the results; "
    "a job that does not fit goes back to the queue with half the batch and keeps what it already has. "
)

# Texts that break encoders: each line says what it is meant to break.
TEXTS = [
    # Ordinary ones, so that a failure below has something to be compared with.
    "This is an example sentence.",
    "Each sentence is converted into a vector of 384 numbers.",
    "A man is eating food, and a woman is playing the violin on the balcony of a small hotel in Lisbon.",
    # Nothing at all, in all its forms: two special tokens remain.
    "",
    " ",
    "     ",
    "\t\r\n",
    "\u00a0\u2003\u3000",  # spaces that are not ASCII
    "\u200b\u200c\u200d\ufeff",  # zero width: format characters, removed
    "\x00",
    "a",
    "A",
    ".",
    "\u4e2d",
    # Lengths around the limit of 256 tokens, two of them special.
    "hello " * 253,
    "hello " * 254,
    "hello " * 255,
    "hello " * 256,
    " ".join((LOREM * 20).split()[:600]),  # 600 words
    # One word that is longer than WordPiece looks at (100 characters): unknown.
    "a" * 100,
    "a" * 101,
    "a" * 3000,
    "z" * 3000 + " end",
    "donaudampfschifffahrtselektrizitaetenhauptbetriebswerkbauunterbeamtengesellschaft",
    "pneumonoultramicroscopicsilicovolcanoconiosis!" * 12,
    "https://example.org/a/very/long/path?with=query&and=more#and-a-fragment-" + "x1" * 60,
    "!?!?...;;;---___***" * 30,  # every character a token
    # Emoji: joiners, skin tones, flags, keycaps, variation selectors.
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 a family on holiday \U0001f3d6\ufe0f",
    "\U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea 3\ufe0f\u20e3 \u2764\ufe0f\u200d\U0001f525",
    "I \u2764\ufe0f NY \U0001f600\U0001f600\U0001f600",
    # Scripts.
    "\u6211\u7231\u5317\u4eac\u5929\u5b89\u95e8\uff0c\u5929\u5b89\u95e8\u4e0a\u592a\u9633\u5347\u3002",
    "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u3001\u30c6\u30b9\u30c8\u3067\u3059",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c \u0643\u064a\u0641 \u062d\u0627\u0644\u0643\u061f",
    "\u0627\u0644\u0652\u062d\u064e\u0645\u0652\u062f\u064f \u0644\u0650\u0644\u0651\u064e\u0647\u0650",  # with vowel marks
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01 \u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22\u0e44\u0e21\u0e48\u0e21\u0e35\u0e27\u0e23\u0e23\u0e04",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0401\u043b\u043a\u0430 \u0438 \u0439\u043e\u0433",
    "\u039f \u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2 \u039f\u0394\u03a5\u03a3\u03a3\u0395\u03a5\u03a3",  # final sigma
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "na\u00efve caf\u00e9 \u4e2d\u6587 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0639\u0631\u0628\u064a 123 \u00bd \u2168 \u33a5 mixed",
    # Accents: composed, decomposed, stacked; case that changes length.
    "caf\u00e9 r\u00e9sum\u00e9 \u00fcber \u00c5ngstr\u00f6m",
    "cafe\u0301 re\u0301sume\u0301 u\u0308ber A\u030angstro\u0308m",
    "Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324\u031e\u0349\u035a\u032f\u031e\u0320\u034dA\u036b\u0357\u0334\u0362\u0335\u031c\u0330\u0354L\u0368\u0367\u0369\u0358\u0320G\u0311\u0357\u030e\u0305\u035b\u0341\u0334\u033b\u0348\u034d\u0354\u0339O",
    "\u0130stanbul I\u0307 \u0131 STRASSE stra\u00dfe \u1e9e \ufb01ne \ufb03",
    "\uff21\uff22\uff23\u3000\uff11\uff12\uff13 \U0001d400\U0001d401\U0001d402 \u24b6\u24b7",  # full width, mathematical, circled
    # Control characters, in words and between them.
    "be\x00fore\x01after\x7f \x1b[31mred\x1b[0m \x08back",
    "line one\nline two\r\nline three\tand a tab\x0bvertical\x0cform feed\x85next line",
    "soft\u00adhyphen zero\u200bwidth word\u2060joiner \ufeffbom",
    "left\u200fright \u202eoverride\u202c \u2066isolate\u2069 \u061c mark",
    "\ufffd \ufffe \uffff \ue000 \U0010ffff \U000e0041",  # replacement, non-characters, private use, tags
    # Texts that look like the tokenizer's own tokens.
    "[CLS] [SEP] [MASK] [PAD] [UNK] <s> </s> <pad> <mask> <unk>",
    "[CLS][SEP]",
    "[SEP] " * 300,
    "[cls] [ CLS ] [CLS]word ##ing ## #",
    # Text from machines.
    '{"model": "minilm", "inputs": ["a \\u0000 b"], "n": -1.5e-308}',
    "SELECT * FROM jobs WHERE id = 'x'; DROP TABLE jobs; -- \\ \\\\ % _",
    "3.14159 1,000,000 0x7fffffff 1e309 -0 NaN 2026-11-20T19:13:00Z 192.168.0.1",
    "C++ C# .NET Node.js a_b snake_case camelCase HTTPServer e-mail o'clock rock'n'roll don't",
    "\u201cQuotes\u201d \u2018single\u2019 \u2013 en \u2014 em \u2026 \u00a9 \u00ae \u2122 \u20ac \u00a3 \u00a5 \u00b0 \u00b1 \u00d7 \u00f7",
    "   leading and trailing   ",
]

# Longer than what the encoder looks at first (8 KiB), so that its beginning alone is tokenised: every script and every kind of space,
# and words without one.
LONG_TEXTS = [" ".join(TEXTS), "".join(text for text in TEXTS if "hello" not in text and "SEP" not in text)]


def write(model, folder, texts):
    """Encodes each text alone; writes texts.json, tokens.json, vectors.f32 there."""
    vectors, tokens, difference = encode(model, texts, lambda batch: model.encode(
        batch, batch_size=len(batch), convert_to_numpy=True, show_progress_bar=False))
    write_tokens(folder, texts, tokens)
    (folder / "vectors.f32").write_bytes(vectors.tobytes())
    print(f"{folder.relative_to(ROOT)}: {vectors.shape[0]} x {vectors.shape[1]}, "
          f"tokens {min(map(len, tokens))} to {max(map(len, tokens))}; {difference}")


def encode(model, texts, vectors_of):
    """The vectors of texts, each encoded alone; their token ids; and how much the vectors differ if all are encoded together."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    model.eval()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with torch.inference_mode():
        vectors = np.stack([vectors_of([text])[0] for text in texts]).astype("<f4")
        together = vectors_of(texts)
    assert np.isfinite(vectors).all()
    tokens = [model.preprocess([text])["input_ids"][0].tolist() for text in texts]
    difference = f"the library's own difference between alone and padded together: {abs(together - vectors).max():.1e}"
    return vectors, tokens, difference


def write_tokens(folder, texts, tokens):
    """Writes texts.json and tokens.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "texts.json", texts)
    write_lines(folder / "tokens.json", tokens)


def write_lines(path, rows):
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    path.write_text(f"[\n{lines}\n]\n")


def write_sparse(model, folder, texts):
    """As `write`, but of a SparseEncoder with a large vocabulary: elements that are not zero, in indices.json and values.f32."""
    import numpy as np

    vectors, tokens, difference = encode(model, texts, lambda batch: model.encode(
        batch, batch_size=len(batch), convert_to_sparse_tensor=False, show_progress_bar=False).numpy())
    write_tokens(folder, texts, tokens)
    write_lines(folder / "indices.json", [np.flatnonzero(row).tolist() for row in vectors])
    (folder / "values.f32").write_bytes(vectors[vectors != 0].tobytes())
    elements = (vectors != 0).sum(1)
    print(f"{folder.relative_to(ROOT)}: {len(texts)} texts, {elements.min()} to {elements.max()} elements up to {vectors.max():.2f}; {difference}")


def versions():
    import numpy
    import safetensors
    import sentence_transformers
    import tokenizers
    import torch
    import transformers

    libraries = [sentence_transformers, transformers, tokenizers, torch, safetensors, numpy]
    named = [f"{library.__name__.replace('_', '-')} {library.__version__}" for library in libraries]
    return ", ".join([*named, f"Python {platform.python_version()}", platform.machine()])


def minilm(source, folder):
    from sentence_transformers import SentenceTransformer

    write(SentenceTransformer(str(source), device="cpu", local_files_only=True), folder, TEXTS)


def splade(source, folder):
    from sentence_transformers import SparseEncoder

    write_sparse(SparseEncoder(str(source), device="cpu", local_files_only=True), folder, TEXTS)


def xlm_roberta(source, folder):
    """Token ids alone: there are no weights."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    texts = [*TEXTS, *LONG_TEXTS]
    write_tokens(folder, texts, [tokenizer(text, truncation=True)["input_ids"] for text in texts])
    print(f"{folder.relative_to(ROOT)}: {len(texts)} texts, ids by {type(tokenizer).__name__}")


# The folder of the fixture; the model of models/fetch; what writes it.
REFERENCES = {
    "minilm": ("all-MiniLM-L6-v2", minilm),
    "splade": ("splade-tiny", splade),
    "xlm-roberta": ("xlm-roberta", xlm_roberta),
}


def main():
    assert len(set(TEXTS)) == len(TEXTS)
    for name in sys.argv[1:] or REFERENCES:
        model, make = REFERENCES[name]
        source, folder = ROOT / "models" / model, FIXTURES / name
        if not source.is_dir():
            sys.exit(f"models/reference.py: {source} is missing: run models/fetch --model {model}")
        try:
            make(source, folder)
        except ImportError:
            sys.exit("models/reference.py: needs sentence-transformers: pip install sentence-transformers")
        (folder / "versions.txt").write_text(versions() + "\n")


if __name__ == "__main__":
    main()
