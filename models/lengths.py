#!/usr/bin/env python3
"""Make reference vectors of token ids, for the lengths and the shapes that no fixture's text has.

    python models/lengths.py            # inference/tests/fixtures/lengths

Needs `pip install sentence-transformers` and the models of models/tiny_bert.py and models/tiny_families.py, which have to be
made first. The BERTs of other shapes are those of tests/src/bert.rs: `weights` below draws the same numbers. transformers and
sentence-transformers make each vector alone, in f32, on the CPU. inference/tests/fixtures/README.md describes the files.
"""

import sys

from reference import FIXTURES, ROOT, versions, write_lines

LENGTHS = FIXTURES / "lengths"


def around(*numbers):
    return [near for number in numbers for near in (number - 1, number, number + 1)]


# Texts of several tiles of keys, which have 64; windows that begin and end within one.
TILES = [1, 8, 9, 64, 65, 130, 300]

# A tiny model's folder, and the lengths that tests need of it.
TINY = {
    "tiny-mean": [1, 3, 9],
    "tiny-cls-normalize": [1],
    "tiny-long": sorted({*around(2, 16, 32, 64, 128, 256), 5, 9, 100, 511, 512}),
    "tiny-mpnet": TILES,
    "tiny-modernbert": TILES,
    "tiny-qwen3": TILES,
    "tiny-nomic": TILES,
    "tiny-gte": TILES,
    "tiny-gemma": TILES,
    # As long as their texts may be. So that a GPU, which sees token ids only (tests/gpu/run), meets every family.
    "tiny-roberta": [1, 24],
    "tiny-xlm-roberta": [1, 24],
    "tiny-camembert": [1, 24],
    "tiny-distilbert": [1, 24],
    "tiny-splade": [1, 3, 24],
    "tiny-splade-distilbert": [1, 3, 24],
}

# Layers, width, heads and feed-forward of a BERT with random weights, and the lengths that tests need of it.
SHAPES = {
    # Heads of 128, 256 and 200 elements.
    (1, 256, 2, 96): [1, 31, 33, 100],
    (1, 256, 1, 96): [1, 31, 33, 100],
    (1, 200, 1, 96): [1, 31, 33, 100],
    # Of 32, 64 and 40.
    (2, 96, 3, 200): [1, 7, 64, 65, 130, 200],
    (2, 192, 3, 320): [1, 7, 64, 65, 130, 200],
    (1, 160, 4, 136): [1, 7, 64, 65, 130, 200],
    # As wide as the large models.
    (1, 1024, 16, 4096): [5, 70],
    # Rows that cuBLASLt takes, and some that it does not.
    (2, 64, 2, 256): [1, 7, 64, 65, 130],
    (1, 96, 3, 200): [1, 7, 64, 65, 130],
    (1, 60, 3, 100): [3, 70],
    # For the waits of a failed pass.
    (2, 64, 2, 128): [9, 50],
}

# What tests/src/bert.rs has for all shapes.
VOCABULARY = 273
POSITIONS = 256


def main():
    try:
        import numpy as np
        import torch
        from sentence_transformers import SentenceTransformer, SparseEncoder
    except ImportError:
        sys.exit("models/lengths.py: needs sentence-transformers: pip install sentence-transformers")
    torch.set_num_threads(1)
    LENGTHS.mkdir(exist_ok=True)
    generator = np.random.default_rng(17)
    for name, lengths in TINY.items():
        kind = SparseEncoder if "splade" in name else SentenceTransformer
        model = kind(str(FIXTURES / name), device="cpu", local_files_only=True, model_kwargs={"dtype": "float32"}).eval()
        vocabulary = model[0].auto_model.config.vocab_size

        def vector(ids):
            features = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
            made = model(features)["sentence_embedding"][0]
            return made.to_dense() if made.is_sparse else made

        write(name, generator, vocabulary, lengths, vector)
    for shape, lengths in SHAPES.items():
        network = bert(*shape)
        # Pooled as the folder, which has no modules.json, asks for.
        write("bert-" + "x".join(map(str, shape)), generator, VOCABULARY, lengths,
              lambda ids: network(torch.tensor([ids])).last_hidden_state[0].mean(0))
    (LENGTHS / "versions.txt").write_text(versions() + "\n")


def write(name, generator, vocabulary, lengths, vector):
    """Any ids of these lengths, of any of the vocabulary's tokens, and their vectors."""
    import numpy as np
    import torch

    items = [generator.integers(vocabulary, size=length).tolist() for length in lengths]
    with torch.inference_mode():
        vectors = np.stack([vector(ids).numpy() for ids in items]).astype("<f4")
    assert np.isfinite(vectors).all()
    write_lines(LENGTHS / f"{name}.json", items)
    (LENGTHS / f"{name}.f32").write_bytes(vectors.tobytes())
    print(f"{(LENGTHS / name).relative_to(ROOT)}: {vectors.shape[0]} x {vectors.shape[1]}, up to {abs(vectors).max():.2f}")


def bert(layers, hidden, heads, feed_forward):
    """transformers' BERT, with the weights that tests/src/bert.rs draws."""
    from transformers import BertConfig, BertModel

    network = BertModel(BertConfig(
        vocab_size=VOCABULARY, num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        intermediate_size=feed_forward, max_position_embeddings=POSITIONS, type_vocab_size=2, hidden_act="gelu",
        layer_norm_eps=1e-12,
    ), add_pooling_layer=False)
    network.load_state_dict(weights(layers, hidden, feed_forward))
    return network.eval()


def weights(layers, hidden, feed_forward):
    """The tensors of tests/src/bert.rs, in its order, from the same sequence and with the same roundings."""
    import numpy as np
    import torch

    shapes = {
        "embeddings.word_embeddings.weight": [VOCABULARY, hidden],
        "embeddings.position_embeddings.weight": [POSITIONS, hidden],
        "embeddings.token_type_embeddings.weight": [2, hidden],
    }

    def pair(name, *shape):
        shapes[f"{name}.bias"] = shape[:1]
        shapes[f"{name}.weight"] = shape

    pair("embeddings.LayerNorm", hidden)
    for layer in (f"encoder.layer.{layer}" for layer in range(layers)):
        for which in ("query", "key", "value"):
            pair(f"{layer}.attention.self.{which}", hidden, hidden)
        pair(f"{layer}.attention.output.dense", hidden, hidden)
        pair(f"{layer}.attention.output.LayerNorm", hidden)
        pair(f"{layer}.intermediate.dense", feed_forward, hidden)
        pair(f"{layer}.output.dense", hidden, feed_forward)
        pair(f"{layer}.output.LayerNorm", hidden)

    one = np.float32(1)
    states = states_of(sum(int(np.prod(shape)) for shape in shapes.values()))
    uniform = (states >> np.uint32(8)).astype(np.float32) / np.float32(1 << 23) - one
    tensors, start = {}, 0
    for name, shape in shapes.items():
        end = start + int(np.prod(shape))
        mean, size = np.float32(0), np.float32(0.2)
        if len(shape) == 2:
            size = np.sqrt(np.float32(3) / np.float32(shape[1]))
        elif name.endswith("LayerNorm.weight"):
            mean = one
        tensors[name] = torch.from_numpy((mean + size * uniform[start:end]).reshape(shape))
        start = end
    return tensors


def states_of(count):
    """The first states of the generator of tests/src/bert.rs after its seed, 7: s := 1664525 s + 1013904223, modulo 2^32."""
    import numpy as np

    powers = np.multiply.accumulate(np.full(count, 1664525, np.uint32), dtype=np.uint32)
    sums = np.add.accumulate(np.concatenate([np.ones(1, np.uint32), powers[:-1]]), dtype=np.uint32)
    return powers * np.uint32(7) + sums * np.uint32(1013904223)


if __name__ == "__main__":
    main()
