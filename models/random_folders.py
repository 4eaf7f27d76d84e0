#!/usr/bin/env python3
"""Make folders of tiny models with random configurations, and what transformers and sentence-transformers compute with them.

    python models/random_folders.py --seed 1 400 FOLDER

FOLDER then has 400 model folders, and beside each a JSON file of the same name: its inputs, and what the libraries make of each, in f32
and in f64, or null where they refuse it. To compare them:

    VRAMQ_TEST_RANDOM_FOLDERS=FOLDER cargo test -p vramq-inference --test encoder random_folders -- --ignored --nocapture

Needs `pip install sentence-transformers`. Weights are random; tokenizers are those of inference/tests/fixtures. The libraries save each
folder. Then some keys of its files are changed, removed or set to null, as older versions and other tools leave them, or its configuration
is rewritten as transformers 4 writes it. The libraries read what is left.
"""

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
from pathlib import Path

from reference import FIXTURES
from tiny_bert import put, randomize

# The name of a family in transformers, and the fixtures that have its tokenizers.
FAMILIES = {
    "bert": ("Bert", ["tiny-mean"]),
    "camembert": ("Camembert", ["tiny-camembert"]),
    "distilbert": ("DistilBert", ["tiny-distilbert"]),
    "gemma3_text": ("Gemma3Text", ["tiny-gemma"]),
    "gte": ("Gte", ["tiny-gte", "tiny-gte-no-types", "tiny-gte-reranker"]),
    "modernbert": ("ModernBert", ["tiny-modernbert", "tiny-modernbert-reranker"]),
    "mpnet": ("MPNet", ["tiny-mpnet"]),
    "nomic_bert": ("NomicBert", ["tiny-nomic"]),
    "qwen3": ("Qwen3", ["tiny-qwen3", "tiny-qwen3-reranker", "tiny-qwen3-classifier"]),
    "roberta": ("Roberta", ["tiny-roberta"]),
    "xlm-roberta": ("XLMRoberta", ["tiny-xlm-roberta", "tiny-xlm-roberta-reranker"]),
}
WITH_TABLES = ["bert", "camembert", "distilbert", "mpnet", "roberta", "xlm-roberta"]
PADDED_POSITIONS = ["camembert", "mpnet", "roberta", "xlm-roberta"]
WITHOUT_HEADS = ["gemma3_text", "nomic_bert"]
# Of layers.
KINDS = ["full_attention", "sliding_attention"]

SENTENCE = "in the first year of the war, the city was part of the state. "
TEXTS = [
    "the quick brown fox jumps over the lazy dog", "", "a", SENTENCE * 9, "of and to in " * 30,
    "\U0001f600 caf\u00e9 cafe\u0301 \u4e2d\u6587 \U0001f468\u200d\U0001f469\u200d\U0001f467", "y" * 300,
    "the <pad> city [PAD] was <|endoftext|> part</s>", "  Two  SPACES  \n and a line ", "not the same as the other one<|endoftext|>",
]
PAIRS = [
    ["a cat", "the cat sat"], ["", "the city"], ["the city", ""], ["the first year of the war", SENTENCE * 9],
    ["of and to in " * 30, "the \U0001f600"], ["the " * 90, "of " * 91], ["caf\u00e9 \u4e2d\u6587", "<pad> b [SEP] </s>"],
]

# What files say besides, or instead: keys that change nothing, keys of other versions and families, and keys that are refused.
CHANGES = {
    "architectures": [None, [], ["Other"]], "attention_bias": [True, False], "auto_map": [{}, {"AutoModel": "a.B"}], "causal": [False],
    "chunk_size_feed_forward": [0, 3], "classifier_activation": ["relu", "tanh"], "classifier_bias": [True],
    "classifier_dropout": [None, 0.1], "classifier_pooling": ["mean", "cls"], "dtype": ["float16", "bfloat16", None],
    "global_attn_every_n_layers": [1, 2, 3], "global_rope_theta": [1e4], "gradient_checkpointing": [False], "head_dim": [None, 8, 12],
    "hidden_act": ["gelu_new", "gelu_python"], "hidden_activation": ["gelu", "silu"], "id2label": [None, {"0": "yes", "1": "no"}],
    "is_causal": [True, False, None], "is_decoder": [False, True], "layer_norm_eps": [1e-5, 1e-12], "layer_types": [None],
    "local_attention": [2, 5, 128], "local_rope_theta": [5e3, None], "max_position_embeddings": [2000], "max_window_layers": [0, 1, 28],
    "mlp_bias": [True], "model_max_length": [16], "norm_bias": [True], "norm_eps": [1e-3], "num_hidden_layers": [1, 2],
    "num_labels": [1, 2, 3], "output_attentions": [True], "output_hidden_states": [True], "pad_token_id": [None, 0, 1, 3, -1],
    "position_embedding_type": ["absolute", "relative_key", "rope", None], "problem_type": [None, "regression"],
    "pruned_heads": [{}], "quantization_config": [None], "query_pre_attn_scalar": [16], "return_dict": [False], "rms_norm_eps": [1e-3],
    "rope_scaling": [None, {}, {"type": "default"}, {"rope_type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}],
    "rope_theta": [10000, 500.5, None], "sbert_ce_default_activation_function": ["torch.nn.modules.linear.Identity", None],
    "sentence_transformers": [{"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "4.0.1"}, {"version": "4.1.0"}],
    "sliding_window": [4, 5, None, 128], "sliding_window_pattern": [1, 2], "tie_word_embeddings": [True, False],
    "torch_dtype": ["float16", "bfloat16"], "transformers_version": ["4.6.0.dev0"], "type_vocab_size": [1, 2],
    "use_bidirectional_attention": [True, False, None], "use_cache": [True, False], "use_sliding_window": [True, False],
}


def config(rng, family, vocabulary):
    """The sizes and features of a model."""
    is_rotary = family not in WITH_TABLES
    heads, head = rng.choice([1, 2, 3, 4, 5, 6]), rng.choice([2, 6, 8, 10, 12, 20, 34] if is_rotary else [3, 5, 8, 11, 16, 21, 33])
    if rng.random() < 0.1:
        heads, head = rng.choice([1, 2]), rng.choice([64, 128, 150, 200, 256, 300])
    wide, layers, eps = rng.choice([1, 7, 33, 50, 64, 100, 131]), rng.randint(1, 3), rng.choice([1e-12, 1e-7, 1e-6, 1e-5, 1e-3])
    odd = rng.choice(["gelu_new", "relu", "silu", "gelu_python", "mish"]) if rng.random() < 0.03 else None
    theta, window = rng.choice([100.0, 10000.0, 160000.0, 1e6]), rng.choice([2, 3, 5, 6, 18, 19, 128])
    kinds = [rng.choice(KINDS) for _ in range(layers)]
    ropes = {kind: {"rope_type": "default", "rope_theta": rng.choice([100.0, 1e4, 1e6])} for kind in KINDS}
    shared = rng.choice([count for count in range(1, heads + 1) if heads % count == 0])
    gate = rng.choice(["gelu", "silu", "gelu_pytorch_tanh"])
    has = {name: rng.random() < 0.5 for name in ("attention_bias", "mlp_bias", "norm_bias")}
    keys = {"vocab_size": vocabulary, "max_position_embeddings": rng.choice([12, 24, 41, 70, 130, 300])}
    if family == "distilbert":
        return keys | {"dim": heads * head, "n_heads": heads, "hidden_dim": wide, "n_layers": layers, "activation": odd or "gelu"}
    keys |= {"hidden_size": heads * head, "num_attention_heads": heads, "intermediate_size": wide, "num_hidden_layers": layers}
    if family in WITH_TABLES:
        types = {} if family == "mpnet" else {"type_vocab_size": rng.choice([1, 2, 2, 3])}
        return keys | types | {"hidden_act": odd or "gelu", "layer_norm_eps": eps, "pad_token_id": rng.choice([0, 1, 1, 1, 2])}
    keys |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    if family == "modernbert":
        keys |= has | {"norm_eps": eps, "hidden_activation": odd or gate, "local_attention": window, "classifier_bias": rng.random() < 0.5,
                       "classifier_pooling": rng.choice(["cls", "mean"]), "classifier_activation": rng.choice(["gelu", "relu", "tanh"])}
        every = {"global_attn_every_n_layers": rng.choice([1, 2, 3])}
        return keys | rng.choice([{}, {"layer_types": kinds, "rope_parameters": ropes}, every])
    if family == "gemma3_text":
        keys |= {"hidden_activation": odd or gate, "rms_norm_eps": eps, "use_bidirectional_attention": True, "num_key_value_heads": shared,
                 "head_dim": rng.choice([2, 6, 12, 34]), "attention_bias": has["attention_bias"], "sliding_window": window,
                 "query_pre_attn_scalar": rng.choice([12, 20, 256])}
        return keys | rng.choice([{}, {"layer_types": kinds, "rope_parameters": ropes}, {"sliding_window_pattern": rng.choice([1, 2])}])
    keys |= {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    if family == "qwen3":
        keys["attention_bias"] = has["attention_bias"]
        return keys | {"hidden_act": odd or "silu", "rms_norm_eps": eps, "num_key_value_heads": shared,
                       "head_dim": rng.choice([2, 6, 12, 34]), "hidden_size": rng.choice([heads * head, 21, 50])}
    types = {"type_vocab_size": rng.choice([0, 1, 2] if family == "gte" else [1, 2, 3])}
    return keys | types | {"hidden_act": odd or rng.choice(["gelu", "silu"]), "layer_norm_eps": eps}


def labels(rng):
    count = rng.choice([1, 1, 2, 3, 5])
    kinds = [None, None, "regression", "multi_label_classification"] + ["single_label_classification"] * (count > 1)
    return {"num_labels": count, "problem_type": rng.choice(kinds)}


def make(rng, folder, family, task):
    """A folder as the libraries save it; returns what it is."""
    import torch
    import transformers

    prefix, fixtures = FAMILIES[family]
    fixture = FIXTURES / rng.choice(fixtures)
    # Tables of words are often larger than the tokenizer's vocabulary.
    vocabulary = json.loads((fixture / "config.json").read_text())["vocab_size"] + rng.choice([0, 0, 7])
    keys = config(rng, family, vocabulary) | (labels(rng) if task == "score" else {})
    layout = rng.choice({"embed": ["classic", "nested", "v6", "v6", "none"], "score": ["none", "v6"], "sparse": ["v5", "v6"]}[task])
    suffix = {"score": "ForSequenceClassification", "sparse": "ForMaskedLM"}.get(task) or rng.choice(["Model", "Model", "ForMaskedLM"])
    if not hasattr(transformers, prefix + suffix):
        suffix = "Model"
    network = getattr(transformers, prefix + suffix)(getattr(transformers, prefix + "Config")(**keys)).eval()
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    randomize(network, generator)
    with torch.no_grad():
        if family == "gemma3_text":
            # Its norms multiply with one more than their weights.
            for weight in network.parameters():
                weight.sub_(1 if weight.ndim == 1 else 0)
        if task == "sparse":
            network.get_output_embeddings().bias.sub_(4.5)
    dtype, shards = rng.choice(["float32", "float32", "float16", "bfloat16"]), rng.choice(["1GB", "1GB", "40KB"])
    inner = folder / "0_Transformer" if layout == "nested" else folder
    network.to(getattr(torch, dtype)).save_pretrained(inner, max_shard_size=shards)
    older = older_tensors(rng, inner, network.base_model_prefix, suffix)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        if (fixture / name).exists():
            shutil.copy(fixture / name, inner)
    room = keys["max_position_embeddings"] - (max(1, keys["pad_token_id"]) + 1 if family in PADDED_POSITIONS else 0)
    length = rng.choice([room, room, min(room, 24), max(5, room // 2), 5])
    tokenizer = json.loads((inner / "tokenizer_config.json").read_text())
    put(inner / "tokenizer_config.json", tokenizer | {"model_max_length": length})
    what = {"family": family, "task": task, "class": prefix + suffix, "fixture": fixture.name, "layout": layout, "dtype": dtype,
            "shards": shards, "tensors": older, "keys": keys}
    return what | {"embed": embeddings, "sparse": sparse, "score": scores}[task](rng, folder, inner, layout, network.config, generator)


def older_tensors(rng, folder, prefix, suffix):
    """Renames tensors as older versions and other tools wrote them, and adds those that they wrote besides."""
    import torch
    from safetensors.torch import load_file, save_file

    how, files = rng.choice(["as saved"] * 4 + ["gamma", "prefix", "positions", "mixed"]), sorted(folder.glob("*.safetensors"))
    if how == "as saved" or len(files) > 1:
        return "as saved"
    tensors = load_file(files[0])
    if how == "gamma":
        for now, then in (("weight", "gamma"), ("bias", "beta")):
            tensors = {name.replace(f"LayerNorm.{now}", f"LayerNorm.{then}"): one for name, one in tensors.items()}
    elif how == "prefix":
        tensors = {f"{prefix}.{name}" if suffix == "Model" else name.removeprefix(f"{prefix}."): one for name, one in tensors.items()}
    elif how == "positions":
        tensors |= {"embeddings.position_ids": torch.arange(12).unsqueeze(0), "lm_head.bias": torch.zeros(3)}
    else:
        tensors = {name: one.to(rng.choice([torch.float32, torch.float16, torch.bfloat16])) for name, one in tensors.items()}
    save_file(tensors, files[0], metadata={"format": "pt"})
    return how


def embeddings(rng, folder, inner, layout, network, generator):
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    if layout == "none":
        return {}
    modes = rng.choice([["mean"], ["cls"], ["max"], ["lasttoken"]] * 6 + [["mean", "cls"], ["weightedmean"], []])
    layers, width = [], network.hidden_size * max(1, len(modes))
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        outputs, activation = rng.choice([1, 7, 20, 33]), rng.choice(["Identity", "Tanh", "ReLU"] * 6 + ["GELU"])
        layers.append(Dense(width, outputs, bias=rng.random() < 0.5, activation_function=getattr(torch.nn, activation)(),
                            use_residual=rng.random() < 0.03))
        randomize(layers[-1], generator)
        width = outputs
    layers += [Normalize()] * (rng.random() < 0.5)
    prompts = rng.choice([{}, {"prompts": {"query": "query: ", "passage": ""}, "default_prompt_name": rng.choice([None, "query"])}])
    what = {"modes": modes, "modules": [str(layer) for layer in layers], "prompts": prompts}
    if layout == "v6":
        with tempfile.TemporaryDirectory() as scratch:
            shutil.move(folder, scratch + "/model")
            transformer = Transformer(scratch + "/model")
            pooling = Pooling(network.hidden_size, pooling_mode=tuple(modes) or "mean", include_prompt=rng.random() < 0.95)
            modules, kept = [transformer, pooling, *layers], rng.choice([None, None, 5])
            model = SentenceTransformer(modules=modules, device="cpu", truncate_dim=kept, **prompts)
            model.save(str(folder), create_model_card=False)
        return what
    kinds = ["Transformer", "Pooling"] + [type(layer).__name__ for layer in layers]
    paths = [str(inner.relative_to(folder))] + [f"{at}_{kind}" for at, kind in enumerate(kinds)][1:]
    put(folder / "modules.json", [
        {"idx": at, "name": str(at), "path": "" if path == "." else path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(zip(paths, kinds))])
    put(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": network.hidden_size, **{
        f"pooling_mode_{older}": any(older.startswith(mode + "_") or older == mode for mode in modes)
        for older in ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")}})
    for path, layer in zip(paths[2:], layers):
        (folder / path).mkdir()
        layer.save(str(folder / path))
    name = rng.choice(["bert", "bert", "roberta", "xlm-roberta"])
    put(inner / f"sentence_{name}_config.json", {"max_seq_length": rng.choice([None, 9]), "do_lower_case": rng.random() < 0.2})
    put(folder / "config_sentence_transformers.json", {"__version__": {"sentence_transformers": "2.0.0"}, **prompts})
    return what


def sparse(rng, folder, inner, layout, network, generator):
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer

    activation, most = rng.choice(["relu", "log1p_relu"]), rng.choice([None, 20])
    if layout == "v6":
        with tempfile.TemporaryDirectory() as scratch:
            shutil.move(folder, scratch + "/model")
            modules = [Transformer(scratch + "/model", transformer_task="fill-mask"),
                       SpladePooling(activation_function=activation, embedding_dimension=network.vocab_size)]
            SparseEncoder(modules=modules, device="cpu", max_active_dims=most).save(str(folder), create_model_card=False)
        return {"activation": activation, "most": most}
    put(folder / "modules.json", [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.sparse_encoder.models.{kind}"}
        for at, (kind, path) in enumerate([("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling")])])
    put(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder", "max_active_dims": most})
    put(folder / "1_SpladePooling" / "config.json", {
        "pooling_strategy": "max", "activation_function": activation, "word_embedding_dimension": network.vocab_size})
    return {"activation": activation, "most": most}


def scores(rng, folder, inner, layout, network, generator):
    from sentence_transformers import CrossEncoder

    if layout == "v6":
        with tempfile.TemporaryDirectory() as scratch:
            shutil.move(folder, scratch + "/model")
            prompts = {"prompts": {"query": "the "}, "default_prompt_name": "query"} if rng.random() < 0.3 else {}
            model = CrossEncoder(scratch + "/model", device="cpu", local_files_only=True, **prompts)
            model.save_pretrained(str(folder), create_model_card=False)
    return {}


def config_of(folder):
    return next(path for path in folder.rglob("config.json") if (path.parent / "tokenizer.json").exists())


def change(rng, folder):
    """Changes, removes or nulls keys."""
    changes = []
    whole = ("tokenizer.json", "modules.json", "model.safetensors.index.json")
    files = [path for path in sorted(folder.rglob("*.json")) if path.name not in whole]
    own = config_of(folder)
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        path = rng.choice(files) if rng.random() < 0.3 else own
        content = json.loads(path.read_text())
        key = rng.choice(sorted(content) or ["none"])
        how = rng.random()
        if path == own and how < 0.7:
            key = rng.choice(sorted(CHANGES.keys() & content.keys() if how < 0.35 else CHANGES))
            content[key] = rng.choice(CHANGES[key])
        elif how < 0.9:
            content.pop(key, None)
        else:
            content[key] = None
        changes.append([str(path.relative_to(folder)), key, content.get(key, "(removed)")])
        put(path, content)
    return changes


def older_config(folder, family):
    """Rewrites a configuration as versions before transformers 5 and the published models have it."""
    path = config_of(folder)
    keys = json.loads(path.read_text())
    rope = keys.pop("rope_parameters", {})
    theta = {kind: (rope.get(kind) or {}).get("rope_theta") for kind in KINDS}
    if family == "nomic_bert":
        names = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
                 "hidden_act": "activation_function", "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon"}
        keys = {names.get(key, key): value for key, value in keys.items() if key != "head_dim"} | {"rotary_emb_base": rope["rope_theta"]}
    elif family in ("gte", "qwen3"):
        keys |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    elif family == "gemma3_text":
        keys |= {"rope_theta": theta["full_attention"], "rope_local_base_freq": theta["sliding_attention"], "rope_scaling": None}
    elif family == "modernbert":
        keys |= {"global_rope_theta": theta["full_attention"], "local_rope_theta": theta["sliding_attention"]}
    keys["torch_dtype"] = keys.pop("dtype", None)
    put(path, keys)


def outputs(folder, task, inputs, dtype):
    """What the libraries make of each input alone; null where they refuse it. Of pairs and lone texts to score the logits."""
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder

    kind = {"embed": SentenceTransformer, "score": CrossEncoder, "sparse": SparseEncoder}[task]
    model = kind(str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": "float32"}).eval().to(getattr(torch, dtype))

    def output(one):
        if task == "embed":
            return model.encode([one], show_progress_bar=False)[0].tolist()
        if task == "sparse":
            return model.encode([one], convert_to_sparse_tensor=False, show_progress_bar=False)[0].tolist()
        if isinstance(one, list):
            return model.predict([tuple(one)], activation_fn=torch.nn.Identity(), show_progress_bar=False)[0].reshape(-1).tolist()
        # CrossEncoder takes pairs only.
        prompt = model.prompts.get(model.default_prompt_name, "")
        encoded = model.tokenizer([prompt + one], truncation=True, max_length=model.max_seq_length, return_tensors="pt")
        return model[0].auto_model(**encoded).logits[0].tolist()

    def attempt(one):
        try:
            row = output(one)
            return row if all(map(math.isfinite, row)) else None
        except Exception:  # Whatever they raise.
            return None

    with torch.inference_mode():
        return [attempt(one) for one in inputs]


def reference(folder, what):
    """Adds the outputs. A library that fills what it misses with random weights gives others with another seed."""
    import torch

    try:
        runs = []
        for seed, dtype in [(0, "float32"), (0, "float64"), (1, "float32")]:
            torch.manual_seed(seed)
            runs.append(outputs(folder, what["task"], what["inputs"], dtype))
        is_random = runs[0] != runs[2]
        what |= {"error": "random weights" if is_random else None, "outputs": None if is_random else runs[0], "exact": runs[1]}
    except Exception as error:  # Whatever they raise.
        what |= {"error": f"{type(error).__name__}: {error}", "outputs": None, "exact": None}


def make_one(seed, folder):
    rng = random.Random(seed)
    family = rng.choice(sorted(FAMILIES))
    tasks = ["embed"] * 6 + ["score"] * (0 if family in WITHOUT_HEADS else 3) + ["sparse"] * (3 if family in ("bert", "distilbert") else 0)
    task = rng.choice(tasks)
    what = {"seed": seed} | make(rng, folder, family, task)
    what["inputs"] = PAIRS + TEXTS[:4] if task == "score" else TEXTS
    what["changes"] = "older configuration" if rng.random() < 0.2 else change(rng, folder)
    reference(folder, what)
    if what["changes"] == "older configuration":
        # transformers does not read all of these keys, so it has read its own.
        older_config(folder, family)
    return what


def main():
    parser = argparse.ArgumentParser(description="Makes folders of tiny models with random configurations, and their outputs.")
    parser.add_argument("--seed", type=int, default=1, help="of the first folder; each one has the next seed")
    parser.add_argument("count", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        import torch
        import transformers
    except ImportError:
        sys.exit("models/random_folders.py: needs sentence-transformers: pip install sentence-transformers")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for seed in range(options.seed, options.seed + options.count):
        folder = options.folder / f"{seed:06}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        what = make_one(seed, folder)
        folder.with_suffix(".json").write_text(json.dumps(what))


if __name__ == "__main__":
    main()
