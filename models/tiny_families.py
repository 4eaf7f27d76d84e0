#!/usr/bin/env python3
"""Make the tiny models of every family but BERT: random weights, real everything else.

    python models/tiny_families.py            # all of inference/tests/fixtures/tiny-FAMILY*
    python models/tiny_families.py mpnet      # those with `mpnet` in their names

Needs `pip install sentence-transformers sentencepiece protobuf` and the model of
models/fetch, whose words the WordPiece tokenizers take. The other tokenizers are
trained on models/corpus/passages.txt. Folders are saved by transformers itself,
so that names of tensors and files are its own. Vectors come from
models/reference.py's `write`, scores from transformers' own heads.
inference/tests/fixtures/README.md describes the files.
"""

import io
import json
import shutil
import sys

from reference import FIXTURES, ROOT, versions, write
from tiny_bert import CROOKED, LAYERS, SQUARE, TEXTS, put, randomize, small_tokenizer

CORPUS = ROOT / "models" / "corpus" / "passages.txt"
SOURCE = ROOT / "models" / "all-MiniLM-L6-v2"

# Tokens at most. Positions are more, so that a truncation to the wrong one of the two shows; RoBERTa's count from 2.
SHORT = {"tokens": 24, "positions": 42}
# More than the distance from which MPNet has one bucket for all.
LONG = {"tokens": 300, "positions": 514}

PIECES = 300
MERGES = 160
# For CamemBERT and XLM-RoBERTa's reranker, in sentencepiece's own format: code points from, code points to. XLM-RoBERTa
# itself has the published models' rule, which takes 300 KB.
RULES = "\n".join(["FF21\t41", "FF22\t42", "BD\t31 2F 32", "65 301\tE9", "3000\t20", "200B\t20"])

FAMILY_TEXTS = TEXTS + [
    # The padding token has a position of its own, wherever it stands.
    "<pad>",
    "the <pad> city <pad><pad> was [PAD] part",
    "<s> </s> <mask> <unk>",
    "the<mask>city   <mask>  war",
    "  two spaces before and after  ",
    "\n\nlines\n",
    "\uff21\uff22 \u00bd e\u0301 \ufb01ne \u2168",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0645\u0631\u062d\u0628\u0627",
    "in the first year of the war, the city was part of the state. " * 40,
]

PAIRS = [
    ["a cat", "the cat sat"],
    ["the first year of the war", "in the first year of the war, the city was part of the state"],
    ["", ""],
    ["", "the city"],
    ["the city", ""],
    ["[SEP] a [CLS]", "<pad> b </s>"],
    ["caf\u00e9 \u4e2d\u6587", "\U0001f600 x" * 3],
    ["the " * 8, "of " * 100],
    ["of " * 100, "the " * 8],
    ["the " * 100, "of " * 99],
    ["the " * 99, "of " * 100],
    ["the " * 11, "of " * 11],
    ["the " * 10, "of " * 11],
    ["y" * 3000, "z" * 3000],
    ["a\nb\tc", "  d  "],
]

# For models whose vector is that of the last token that is not padding.
PADDED = [
    ["the city", "was part of<|endoftext|>"],
    ["the city", "<|endoftext|><|endoftext|>"],
    ["<|endoftext|> the", "<|endoftext|> city"],
    ["<|endoftext|>", "<|endoftext|>"],
]

# Families without a table of positions: what their configurations share.
ROTARY = ("ModernBert", "Qwen3", "NomicBert", "Gte", "Gemma3Text")

# `names` is which class saves the folder: with a head, names of tensors have a prefix.
MODELS = {
    "tiny-roberta": {"family": "Roberta", "shape": SQUARE, "pooling": "mean"},
    "tiny-xlm-roberta": {"family": "XLMRoberta", "shape": CROOKED, "pooling": "cls", "normalize": True, "names": "ForMaskedLM"},
    "tiny-camembert": {"family": "Camembert", "shape": SQUARE, "pooling": "mean"},
    "tiny-distilbert": {"family": "DistilBert", "shape": CROOKED, "pooling": "mean", "names": "ForMaskedLM"},
    "tiny-mpnet": {"family": "MPNet", "shape": SQUARE, "pooling": "mean", "normalize": True, "lengths": LONG},
    "tiny-bert-reranker": {"family": "Bert", "shape": SQUARE, "labels": 1},
    "tiny-roberta-reranker": {"family": "Roberta", "shape": CROOKED, "labels": 1},
    "tiny-mpnet-reranker": {"family": "MPNet", "shape": CROOKED, "labels": 1},
    "tiny-distilbert-classifier": {"family": "DistilBert", "shape": SQUARE, "labels": 3},
    "tiny-camembert-classifier": {"family": "Camembert", "shape": SQUARE, "labels": 4, "multi": True},
    # Layers that see all and layers that do not, and windows that end within a text.
    "tiny-modernbert": {"family": "ModernBert", "shape": SQUARE, "pooling": "mean", "lengths": LONG, "names": "ForMaskedLM",
                        "layers": 4, "more": {"local_attention": 18, "norm_eps": 1e-6}},
    "tiny-modernbert-bias": {"family": "ModernBert", "shape": CROOKED, "pooling": "cls", "normalize": True,
                             "more": {"local_attention": 6, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
                                      "layer_types": ["sliding_attention", "full_attention"]}},
    # Heads that are wider than their share of the width, two of them for each of keys and values.
    "tiny-qwen3": {"family": "Qwen3", "shape": {"hidden_size": 36, "num_attention_heads": 4, "intermediate_size": 100},
                   "pooling": "lasttoken", "normalize": True, "lengths": LONG, "bf16": True,
                   "more": {"num_key_value_heads": 2, "head_dim": 10,
                            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}},
    "tiny-nomic": {"family": "NomicBert", "shape": SQUARE, "pooling": "mean", "lengths": LONG},
    "tiny-gte": {"family": "Gte", "shape": CROOKED, "pooling": "cls", "normalize": True, "lengths": LONG},
    "tiny-gte-ntk": {"family": "Gte", "shape": CROOKED, "pooling": "mean", "lengths": LONG, "stretch": 2.0},
    "tiny-gte-no-types": {"family": "Gte", "tokenizer": "Bert", "shape": SQUARE, "pooling": "cls", "more": {"type_vocab_size": 0}},
    # As EmbeddingGemma: both kinds of layers, a token without an embedding, layers behind pooling, weights in two files.
    "tiny-gemma": {"family": "Gemma3Text", "shape": {"hidden_size": 36, "num_attention_heads": 4, "intermediate_size": 100},
                   "pooling": "mean", "normalize": True, "lengths": LONG, "layers": 3, "shards": "140KB", "beyond": 1,
                   "dense": [(52, False, "Identity"), (28, True, "Tanh")],
                   "more": {"num_key_value_heads": 1, "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 18,
                            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                            "use_bidirectional_attention": True,
                            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                                                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}},
    "tiny-dense": {"family": "MPNet", "shape": SQUARE, "pooling": "cls", "dense": [(20, True, "ReLU")]},
    # Sparse vectors: a folder as sentence-transformers 5 saved it, and one as its version 6 saves it.
    "tiny-splade": {"family": "Bert", "shape": SQUARE, "names": "ForMaskedLM", "sparse": "relu", "layout": "v5"},
    "tiny-splade-distilbert": {"family": "DistilBert", "shape": CROOKED, "names": "ForMaskedLM", "sparse": "log1p_relu",
                               "layout": "v6"},
    # Heads of the families without a table of positions.
    "tiny-modernbert-reranker": {"family": "ModernBert", "tokenizer": "ModernBertPairs", "shape": SQUARE, "labels": 1, "layers": 3,
                                 "more": {"local_attention": 6, "classifier_pooling": "mean"}},
    "tiny-modernbert-classifier": {"family": "ModernBert", "tokenizer": "ModernBertPairs", "shape": CROOKED, "labels": 3,
                                   "more": {"local_attention": 6, "norm_bias": True, "classifier_bias": True, "norm_eps": 1e-3}},
    "tiny-gte-reranker": {"family": "Gte", "tokenizer": "Bert", "shape": CROOKED, "labels": 1, "more": {"type_vocab_size": 2}},
    # As Qwen3-Reranker, whose tokenizer puts nothing around texts; and one whose tokenizer ends them with the padding token.
    "tiny-qwen3-reranker": {"family": "Qwen3", "tokenizer": "Qwen3Bare", "shape": SQUARE, "labels": 1, "bf16": True,
                            "more": {"num_key_value_heads": 2, "head_dim": 10}, "pairs": PADDED},
    "tiny-qwen3-classifier": {"family": "Qwen3", "tokenizer": "Qwen3Pairs", "shape": CROOKED, "labels": 3,
                              "more": {"num_key_value_heads": 1, "head_dim": 12}, "pairs": PADDED},
    # As bge-reranker-v2-m3. The published models' normalizer is in tiny-xlm-roberta.
    "tiny-xlm-roberta-reranker": {"family": "XLMRoberta", "tokenizer": "XLMRobertaSmall", "shape": CROOKED, "labels": 1},
}

# Subtracted from the bias of the map to the vocabulary, so that most of its scores are below zero, as a trained model's are.
SPARSITY = 4.5



def main():
    import torch
    import transformers

    for seed, (name, model) in enumerate(MODELS.items(), start=100):
        if not all(word in name for word in sys.argv[1:]):
            continue
        lengths = model.get("lengths", SHORT)
        family, folder = model["family"], FIXTURES / name
        tokenizer = TOKENIZERS[model.get("tokenizer", family)](lengths["tokens"])
        is_head = "labels" in model
        suffix = "ForSequenceClassification" if is_head else model.get("names", "Model")
        network = getattr(transformers, family + suffix)(config(family, model, lengths, len(tokenizer) - model.get("beyond", 0))).eval()
        generator = torch.Generator().manual_seed(seed)
        randomize(network, generator)
        if family == "Gemma3Text":
            # Its norms multiply with one more than their weights.
            with torch.no_grad():
                for weight in network.parameters():
                    if weight.ndim == 1:
                        weight.sub_(1)
        if "sparse" in model:
            with torch.no_grad():
                network.get_output_embeddings().bias.sub_(SPARSITY)
        if model.get("bf16"):
            network = network.bfloat16()
        shutil.rmtree(folder, ignore_errors=True)
        network.save_pretrained(folder, max_shard_size=model.get("shards", "1GB"))
        tokenizer.save_pretrained(folder)
        if is_head:
            heads(tokenizer, folder, lengths["tokens"], PAIRS + model.get("pairs", []))
        elif "sparse" in model:
            sparse(folder, model, lengths["tokens"], network.config.vocab_size)
        else:
            embeddings(folder, model, lengths["tokens"], generator)
        (folder / "versions.txt").write_text(versions() + "\n")


def config(family, model, lengths, vocabulary):
    import transformers

    labels = {"num_labels": model["labels"]} if "labels" in model else {}
    if model.get("multi"):
        labels["problem_type"] = "multi_label_classification"
    if family in ROTARY:
        return getattr(transformers, family + "Config")(
            vocab_size=vocabulary, max_position_embeddings=lengths["positions"], num_hidden_layers=model.get("layers", LAYERS),
            pad_token_id=0, bos_token_id=None, eos_token_id=None, **labels, **model["shape"], **model.get("more", {}))
    special = {"pad_token_id": 0} if family in ("Bert", "DistilBert") else {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    shape = dict(model["shape"])
    if family == "DistilBert":
        shape = {"dim": shape["hidden_size"], "n_heads": shape["num_attention_heads"],
                 "hidden_dim": shape["intermediate_size"], "n_layers": LAYERS}
    else:
        # One that is not the class's default, so that it is in the file.
        shape |= {"num_hidden_layers": LAYERS, "layer_norm_eps": 1e-6 if family == "Camembert" else 1e-5}
        if family not in ("Bert", "MPNet"):
            shape["type_vocab_size"] = 1
    return getattr(transformers, family + "Config")(
        vocab_size=vocabulary, max_position_embeddings=lengths["positions"], **special, **shape, **labels)


def embeddings(folder, model, tokens, generator):
    """The rest of a Sentence-Transformers folder, and its vectors."""
    from sentence_transformers import SentenceTransformer

    put(folder / "sentence_bert_config.json", {"max_seq_length": tokens, "do_lower_case": False})
    dense = model.get("dense", [])
    kinds = ["Transformer", "Pooling"] + ["Dense"] * len(dense) + ["Normalize"] * model.get("normalize", False)
    width = model["shape"]["hidden_size"]
    for at, (outputs, bias, activation) in enumerate(dense, start=2):
        behind_pooling(folder / f"{at}_Dense", width, outputs, bias, activation, generator)
        width = outputs
    put(folder / "modules.json", [
        {"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "", "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ])
    put(folder / "1_Pooling" / "config.json", {
        "word_embedding_dimension": model["shape"]["hidden_size"],
        **{f"pooling_mode_{kind}": kind.startswith(model["pooling"]) for kind in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")},
    })
    loaded = SentenceTransformer(str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": "float32"})
    if "stretch" in model:
        stretch(loaded[0].auto_model, folder, model["stretch"])
    write(loaded, folder, FAMILY_TEXTS)


def sparse(folder, model, tokens, vocabulary):
    """The rest of a SparseEncoder's folder, and its vectors with all their zeros."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer

    put(folder / "sentence_bert_config.json", {"max_seq_length": tokens, "do_lower_case": False})
    if model["layout"] == "v5":
        put(folder / "modules.json", [
            {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.sparse_encoder.models.{kind}"}
            for at, (kind, path) in enumerate([("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling")])
        ])
        put(folder / "config_sentence_transformers.json", {
            "model_type": "SparseEncoder", "__version__": {"sentence_transformers": "5.0.0"},
            "prompts": {"query": "", "document": ""}, "default_prompt_name": None, "similarity_fn_name": "dot",
        })
        put(folder / "1_SpladePooling" / "config.json", {
            "pooling_strategy": "max", "activation_function": model["sparse"], "word_embedding_dimension": vocabulary,
        })
    else:
        transformer = Transformer(str(folder), transformer_task="fill-mask")
        pooling = SpladePooling(activation_function=model["sparse"], embedding_dimension=vocabulary)
        shutil.rmtree(folder)
        SparseEncoder(modules=[transformer, pooling], device="cpu").save(str(folder), create_model_card=False)
    write(WithZeros(SparseEncoder(str(folder), device="cpu", local_files_only=True)), folder, FAMILY_TEXTS)


class WithZeros:
    """A SparseEncoder whose vectors are rows of all elements, as `write` takes them."""

    def __init__(self, encoder):
        self.encoder = encoder

    def __getattr__(self, name):
        return getattr(self.encoder, name)

    def encode(self, texts, batch_size, **_):
        rows = self.encoder.encode(texts, batch_size=batch_size, convert_to_sparse_tensor=False, show_progress_bar=False)
        if len(texts) > 1:
            print(f"of {rows.shape[1]} elements {(rows > 0).sum(1).min()} to {(rows > 0).sum(1).max()} are not zero")
        return rows.numpy()


def behind_pooling(folder, inputs, outputs, bias, activation, generator):
    """A layer of random weights that takes a text's vector, saved by sentence-transformers."""
    import torch
    from sentence_transformers.models import Dense

    layer = Dense(inputs, outputs, bias=bias, activation_function=getattr(torch.nn, activation)())
    randomize(layer, generator)
    folder.mkdir()
    layer.save(str(folder))


def stretch(network, folder, factor):
    """Rotary positions as the published GTE models have them, of the type `ntk`, which transformers' own GTE does not know.

    The frequencies are those of GTE's own code and of vLLM's NTKScalingRotaryEmbedding: of a theta `factor` times as large,
    divided by factor^(2 / elements of a head). The configuration becomes that of GTE's own code.
    """
    import torch

    path = folder / "config.json"
    config = json.loads(path.read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    theta = config.pop("rope_parameters")["rope_theta"]
    powers = torch.arange(0, head, 2, dtype=torch.float) / head
    network.rotary_emb.inv_freq.copy_(1 / (theta * factor) ** powers / factor ** (2 / head))
    put(path, config | {
        "model_type": "new", "position_embedding_type": "rope", "pack_qkv": True, "layer_norm_type": "layer_norm",
        "logn_attention_scale": False, "rope_theta": theta, "rope_scaling": {"type": "ntk", "factor": factor},
    })


def heads(tokenizer, folder, tokens, pairs):
    """Logits of pairs and of lone texts, each alone: pairs.json, pair-tokens.json, logits.f32; and the scores that
    CrossEncoder makes of the pairs, scores.f32."""
    import numpy as np
    import torch
    from sentence_transformers import CrossEncoder
    from transformers import AutoModelForSequenceClassification

    # In f32, whatever the file has.
    network = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    inputs, rows, ids = [], [], []
    with torch.inference_mode():
        for texts in pairs + [[text] for text in FAMILY_TEXTS]:
            # As batches of one: an empty second text given by itself would be no second text.
            batch = [[text] for text in texts]
            encoded = tokenizer(*batch, truncation="longest_first", max_length=tokens, return_tensors="pt")
            # transformers computes nothing of no tokens.
            if encoded["input_ids"].numel() == 0:
                continue
            inputs.append(texts)
            rows.append(network(**encoded).logits[0].numpy())
            ids.append(scored(network, encoded["input_ids"][0].tolist()))
    crossing = CrossEncoder(str(folder), device="cpu", max_length=tokens, local_files_only=True, model_kwargs={"dtype": "float32"})
    scores = [crossing.predict([texts], show_progress_bar=False)[0] for texts in inputs if len(texts) == 2]
    lines = ",\n".join(json.dumps(texts) for texts in inputs)
    (folder / "pairs.json").write_text(f"[\n{lines}\n]\n")
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in ids)
    (folder / "pair-tokens.json").write_text(f"[\n{lines}\n]\n")
    (folder / "logits.f32").write_bytes(np.stack(rows).astype("<f4").tobytes())
    (folder / "scores.f32").write_bytes(np.stack(scores).astype("<f4").tobytes())
    print(f"{folder.relative_to(ROOT)}: {len(rows)} inputs, logits {np.min(rows):.2f} to {np.max(rows):.2f}")


def scored(network, ids):
    """The tokens that have a part in the logits: those behind the last one that is not padding have none where a token sees
    those before it alone."""
    if not type(network).__name__.startswith("Qwen3"):
        return ids
    kept = [at for at, token in enumerate(ids) if token != network.config.pad_token_id]
    return ids[:kept[-1] + 1 if kept else 1]


def wordpiece(name, rename):
    """MiniLM's words, cut down, under a family's own special tokens."""
    def make(tokens):
        import transformers

        words, _ = small_tokenizer(SOURCE, {"tokens": tokens})
        words = [rename.get(word, word) for word in words]
        if rename:
            # As in the published models, which put these four first.
            first = ["<s>", "<pad>", "</s>", "[UNK]"]
            words = first + [word for word in words if word not in first]
        return getattr(transformers, name)(vocab={word: at for at, word in enumerate(words)}, model_max_length=tokens)
    return make


def byte_pairs(tokens):
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train([str(CORPUS)], vocab_size=256 + len(special) + MERGES, special_tokens=special, show_progress=False)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    return transformers.RobertaTokenizer(vocab=model["vocab"], merges=merges, model_max_length=tokens)


def byte_pairs_between(name, special, before, after, pairs=None):
    """Byte-level BPE as GPT-2's, normalized to NFC, with a token before each text and one after it, or none; and `pairs` of
    texts with tokens of their own."""
    def make(tokens):
        import transformers
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

        trained = Tokenizer(models.BPE())
        trained.normalizer = normalizers.NFC()
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trained.train([str(CORPUS)], trainers.BpeTrainer(
            vocab_size=len(special) + len(alphabet) + MERGES, special_tokens=special, initial_alphabet=alphabet, show_progress=False))
        template = [token for token in (before, "$A", after) if token]
        own = {"pair": pairs} if pairs else {}
        trained.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
            single=template, special_tokens=[(token, trained.token_to_id(token)) for token in special], **own)])
        return getattr(transformers, name)(tokenizer_object=trained, pad_token=special[0], model_max_length=tokens)
    return make


def pieces(name, first, last, **rule):
    """A Unigram tokenizer with a family's special tokens around the pieces."""
    def make(tokens):
        import sentencepiece
        import transformers
        from sentencepiece import sentencepiece_model_pb2

        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS.read_text().splitlines()), model_writer=written, vocab_size=PIECES,
            model_type="unigram", character_coverage=0.999, minloglevel=2, **rule)
        model = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
        vocabulary = [(word, 0.0) for word in first]
        # The trainer's own first three are <unk>, <s>, </s>.
        vocabulary += [(piece.piece, piece.score) for piece in model.pieces[3:]]
        vocabulary += [(word, 0.0) for word in last]
        return getattr(transformers, name)(
            vocab=vocabulary, _spm_precompiled_charsmap=model.normalizer_spec.precompiled_charsmap, model_max_length=tokens)
    return make


def pieces_by_rules(name, first, last):
    """The same with RULES as its normalizer."""
    def make(tokens):
        import tempfile

        with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
            rules.write(RULES + "\n")
            rules.flush()
            return pieces(name, first, last, normalization_rule_tsv=rules.name)(tokens)
    return make


def byte_fallback(tokens):
    """BPE as Gemma's: spaces are a letter, what has no token becomes bytes, and a token for images has no embedding."""
    import transformers
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    spaces = normalizers.Replace(" ", "\u2581")
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = spaces
    # For training alone: no merges across words.
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581"), "merged_with_next")
    trained.train([str(CORPUS)], trainers.BpeTrainer(
        vocab_size=len(special) + 100 + MERGES, special_tokens=special, limit_alphabet=100, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocabulary = model["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in model["merges"]]
    whole = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    whole.normalizer = spaces
    whole.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    whole.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[(token, vocabulary[token]) for token in ("<bos>", "<eos>")])
    whole.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special + ["<image_soft_token>"]])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", model_max_length=tokens)


RENAMED = {"[CLS]": "<s>", "[PAD]": "<pad>", "[SEP]": "</s>", "[MASK]": "<mask>"}
XLM_ROBERTA = ["<s>", "<pad>", "</s>", "<unk>"]
CAMEMBERT = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"]
MODERNBERT = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
QWEN3 = ["<|endoftext|>", "<|im_start|>"]
TOKENIZERS = {
    "Bert": wordpiece("BertTokenizer", {}),
    "DistilBert": wordpiece("DistilBertTokenizer", {}),
    "MPNet": wordpiece("MPNetTokenizer", RENAMED),
    "Roberta": byte_pairs,
    "XLMRoberta": pieces("XLMRobertaTokenizer", XLM_ROBERTA, ["<mask>"], normalization_rule_name="nmt_nfkc"),
    "XLMRobertaSmall": pieces_by_rules("XLMRobertaTokenizer", XLM_ROBERTA, ["<mask>"]),
    "Camembert": pieces_by_rules("CamembertTokenizer", CAMEMBERT, ["<mask>"]),
    "ModernBert": byte_pairs_between("PreTrainedTokenizerFast", MODERNBERT, "[CLS]", "[SEP]"),
    "ModernBertPairs": byte_pairs_between("PreTrainedTokenizerFast", MODERNBERT, "[CLS]", "[SEP]",
                                          "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "Qwen3": byte_pairs_between("PreTrainedTokenizerFast", QWEN3, None, "<|endoftext|>"),
    "Qwen3Bare": byte_pairs_between("PreTrainedTokenizerFast", QWEN3, None, None),
    "Qwen3Pairs": byte_pairs_between("PreTrainedTokenizerFast", QWEN3, None, "<|endoftext|>", "$A $B <|endoftext|>"),
    "NomicBert": wordpiece("BertTokenizer", {}),
    "Gemma3Text": byte_fallback,
    "Gte": pieces("XLMRobertaTokenizer", XLM_ROBERTA, ["<mask>"], normalization_rule_name="nmt_nfkc"),
}


if __name__ == "__main__":
    main()
