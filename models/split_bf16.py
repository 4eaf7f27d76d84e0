#!/usr/bin/env python3
"""How far split bf16 is off by itself: a GTE model or a SPLADE model in f64, whose linear maps are three products of bf16 halves with exact sums.

What is left to the encoder's own code is the difference between this and what the encoder gives.
Needs numpy, scipy and safetensors:

    python models/split_bf16.py inference/tests/fixtures/tiny-gte-no-types
    python models/split_bf16.py inference/tests/fixtures/tiny-splade
    python models/split_bf16.py models/splade-tiny inference/tests/fixtures/splade

The reference is in the model's folder, or in the second one.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from scipy.special import erf


def bf16(x):
    """The nearest bf16 of each f32, ties to even, as f64."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def exact(rows, weights):
    return rows @ weights.T


def split(rows, weights):
    """high x high + high x low + low x high; low x low is left out."""
    rows = rows.astype(np.float32).astype(np.float64)
    rows_high, weights_high = bf16(rows), bf16(weights)
    rows_low, weights_low = bf16(rows - rows_high), bf16(weights - weights_high)
    return rows_high @ weights_high.T + rows_high @ weights_low.T + rows_low @ weights_high.T


def norm(x, weight, bias, eps):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * weight + bias


def gelu(x):
    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def attention(qkv, heads, theta=None):
    """With rotary positions of this theta, or with none."""
    tokens, hidden = qkv.shape[0], qkv.shape[1] // 3
    size = hidden // heads
    angles = np.outer(np.arange(tokens), (theta or 1) ** (-np.arange(0, size, 2) / size))
    cos, sin = np.tile(np.cos(angles), 2), np.tile(np.sin(angles), 2)

    def rotated(x):
        if theta is None:
            return x
        half = size // 2
        return x * cos + np.concatenate([-x[:, half:], x[:, :half]], 1) * sin

    out = np.zeros((tokens, hidden))
    for head in range(heads):
        query, key, value = (qkv[:, part * hidden + head * size :][:, :size] for part in range(3))
        scores = rotated(query) @ rotated(key).T / np.sqrt(size)
        shares = np.exp(scores - scores.max(1, keepdims=True))
        out[:, head * size :][:, :size] = shares / shares.sum(1, keepdims=True) @ value
    return out


def vector(ids, config, tensors, linear):
    eps, theta = config["layer_norm_eps"], config["rope_parameters"]["rope_theta"]

    def tensor(name):
        return tensors[name].astype(np.float64)

    def norm_of(name, x):
        return norm(x, tensor(name + ".weight"), tensor(name + ".bias"), eps)

    x = tensor("embeddings.word_embeddings.weight")[ids]
    x = norm_of("embeddings.LayerNorm", x)
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."

        def map_of(name, rows, has_bias=True, at=at):
            made = linear(rows, tensor(at + name + ".weight"))
            return made + tensor(at + name + ".bias") if has_bias else made

        seen = attention(map_of("attention.qkv_proj", x), config["num_attention_heads"], theta)
        x = norm_of(at + "attn_ln", x + map_of("attention.o_proj", seen))
        up, gate = np.split(map_of("mlp.up_gate_proj", x, has_bias=False), 2, axis=1)
        gated = up * gelu(gate)
        x = norm_of(at + "mlp_ln", x + map_of("mlp.down_proj", gated))
    return x[0]


def sparse_vector(ids, config, tensors, linear):
    """As SPLADE makes it with BERT's layers and head."""
    def tensor(name):
        return tensors[name].astype(np.float64)

    def norm_of(name, x):
        return norm(x, tensor(name + ".weight"), tensor(name + ".bias"), config["layer_norm_eps"])

    def map_of(name, rows):
        return linear(rows, tensor(name + ".weight")) + tensor(name + ".bias")

    embeddings = "bert.embeddings."
    words = tensor(embeddings + "word_embeddings.weight")
    x = words[ids] + tensor(embeddings + "position_embeddings.weight")[: len(ids)]
    x = norm_of(embeddings + "LayerNorm", x + tensor(embeddings + "token_type_embeddings.weight")[0])
    for layer in range(config["num_hidden_layers"]):
        at = f"bert.encoder.layer.{layer}."
        qkv = np.concatenate([map_of(f"{at}attention.self.{part}", x) for part in ("query", "key", "value")], 1)
        seen = attention(qkv, config["num_attention_heads"])
        x = norm_of(at + "attention.output.LayerNorm", x + map_of(at + "attention.output.dense", seen))
        inner = gelu(map_of(at + "intermediate.dense", x))
        x = norm_of(at + "output.LayerNorm", x + map_of(at + "output.dense", inner))
    head = "cls.predictions.transform."
    x = norm_of(head + "LayerNorm", gelu(map_of(head + "dense", x)))
    scores = linear(x, words) + tensor("cls.predictions.bias")
    return np.log1p(np.maximum(scores, 0).max(0))


def vectors(folder, vocabulary, texts):
    """As models/reference.py has written them."""
    if (folder / "vectors.f32").exists():
        return np.fromfile(folder / "vectors.f32", np.float32).reshape(texts, -1)
    made = np.zeros((texts, vocabulary), np.float32)
    values = np.fromfile(folder / "values.f32", np.float32)
    for row, indices in zip(made, json.loads((folder / "indices.json").read_text())):
        row[indices], values = values[: len(indices)], values[len(indices) :]
    return made


def main():
    folder, expected = Path(sys.argv[1]), Path(sys.argv[-1])
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    # Older names of norms.
    for name in list(tensors):
        tensors[name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")] = tensors[name]
    tokens = json.loads((expected / "tokens.json").read_text())
    reference = vectors(expected, config["vocab_size"], len(tokens))
    largest = np.maximum(1, abs(reference).max(1))
    make = sparse_vector if "BertForMaskedLM" in config["architectures"] else vector
    for name, linear in [("exact", exact), ("split bf16", split)]:
        made = np.array([make(ids, config, tensors, linear) for ids in tokens])
        off = abs(made - reference).max(1)
        print(f"{name}: off by {off.max():.2e}, of the largest element {(off / largest).max():.2e}")


if __name__ == "__main__":
    main()
