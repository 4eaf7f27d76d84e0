#!/usr/bin/env python3
"""Embed the lines of a file with a reference library and print one JSON line of figures.

    encode.py sentence-transformers|onnxruntime|sgemm MODEL-FOLDER TEXT-FILE LINES THREADS

Tokenising is included, loading is not. Both get their best order (longest first) and the batch sizes that their
users run; the best of them counts. `sgemm` is no encoder but the ceiling of all that multiply in f32: the products of the
layers' linear maps by PyTorch's library, without padding, and nothing else.
"""

import json
import os
import resource
import sys
import time

engine, folder, path, lines, threads = sys.argv[1:6]
os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = threads
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
ROWS = 2048
texts = open(path, encoding="utf-8").read().splitlines()[: int(lines)]


def sentence_transformers():
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(int(threads))
    model = SentenceTransformer(folder, device="cpu")

    def run(batch):
        # Sorts by length itself.
        model.encode(texts, batch_size=batch, show_progress_bar=False)

    return run


def onnxruntime():
    import numpy as np
    import onnxruntime as ort
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    limit = json.load(open(f"{folder}/sentence_bert_config.json"))["max_seq_length"]
    tokenizer.enable_truncation(limit)
    tokenizer.enable_padding()
    options = ort.SessionOptions()
    options.intra_op_num_threads = int(threads)
    session = ort.InferenceSession(exported(), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]

    def run(batch):
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(order), batch):
            rows = tokenizer.encode_batch([texts[i] for i in order[start : start + batch]])
            feed = {
                "input_ids": np.array([r.ids for r in rows], dtype=np.int64),
                "attention_mask": np.array([r.attention_mask for r in rows], dtype=np.int64),
                "token_type_ids": np.array([r.type_ids for r in rows], dtype=np.int64),
            }
            hidden = session.run(None, {n: feed[n] for n in names})[0]
            mask = feed["attention_mask"][..., None].astype(np.float32)
            mean = (hidden * mask).sum(1) / np.maximum(mask.sum(1), 1e-9)
            mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)

    return run


def sgemm():
    import torch
    from tokenizers import Tokenizer

    torch.set_num_threads(int(threads))
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_truncation(json.load(open(f"{folder}/sentence_bert_config.json"))["max_seq_length"])
    tokenizer.no_padding()
    tokens = sum(len(row.ids) for row in tokenizer.encode_batch(texts))
    config = json.load(open(f"{folder}/config.json"))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    maps = [(hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden)]
    layers = [[torch.rand(shape) for shape in maps] for _ in range(config["num_hidden_layers"])]

    def run(batch):
        # As many rows as a pass of vramq's has.
        for start in range(0, tokens, ROWS):
            rows = min(ROWS, tokens - start)
            inputs = {size: torch.rand(rows, size) for size in (hidden, inner)}
            outputs = {size: torch.empty(rows, size) for _, size in maps}
            for layer in layers:
                for weights in layer:
                    torch.mm(inputs[weights.shape[0]], weights, out=outputs[weights.shape[1]])

    return run


def exported():
    """The model as ONNX, exported once with PyTorch's own exporter and optimised by ONNX Runtime at load."""
    target = os.path.join(os.path.dirname(path_of_cache()), "model.onnx")
    if os.path.exists(target):
        return target
    # In a process of its own, so that PyTorch does not count in the peak memory.
    if os.fork() == 0:
        import torch
        from transformers import AutoModel

        class Hidden(torch.nn.Module):
            """Names the inputs: the model's own order of arguments is not that of its inputs."""

            def __init__(self):
                super().__init__()
                self.model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

            def forward(self, ids, mask, types):
                return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

        model = Hidden()
        row = torch.ones(2, 8, dtype=torch.int64)
        dims = {0: "batch", 1: "tokens"}
        names = ["input_ids", "attention_mask", "token_type_ids"]
        torch.onnx.export(
            model,
            (row, row, row * 0),
            target + ".new",
            input_names=names,
            output_names=["hidden"],
            dynamic_axes={n: dims for n in [*names, "hidden"]},
            opset_version=17,
            dynamo=False,
        )
        os.rename(target + ".new", target)
        os._exit(0)
    if os.wait()[1] != 0:
        sys.exit("the export to ONNX failed")
    return target


def path_of_cache():
    cache = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), "..", "onnx", "x")
    os.makedirs(os.path.dirname(cache), exist_ok=True)
    return cache


run = {"sentence-transformers": sentence_transformers, "onnxruntime": onnxruntime, "sgemm": sgemm}[engine]()
run(32)
best = None
for batch in (8, 32, 64):
    started = time.perf_counter()
    run(batch)
    rate = len(texts) / (time.perf_counter() - started)
    if best is None or rate > best[0]:
        best = (rate, batch)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"sentences_per_s": best[0], "batch": best[1], "peak_mib": peak}))
