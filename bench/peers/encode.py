#!/usr/bin/env python3
"""Embed the lines of a file with a reference library and print one JSON line of figures.

    encode.py ENGINE MODEL-FOLDER TEXT-FILE LINES THREADS VECTORS

The engines are sentence-transformers, sentence-transformers-bf16, onnxruntime, onnxruntime-int8, openvino, openvino-bf16 and sgemm.
Tokenising is included, loading is not. All get their best order (longest first) and the batch sizes that their users run; the best
of them counts. The vectors go to the file VECTORS: f32, the texts' order. `sgemm` is no encoder and writes none. It is the ceiling of
all that multiply in f32: the products of the layers' linear maps by PyTorch's library, without padding, and nothing else.
"""

import json
import os
import resource
import sys
import time

engine, folder, path, lines, threads, vectors = sys.argv[1:7]
os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = threads
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
ROWS = 2048
texts = open(path, encoding="utf-8").read().splitlines()[: int(lines)]


def sentence_transformers(dtype="float32"):
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(int(threads))
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})

    def run(batch):
        # Sorts by length itself.
        return model.encode(texts, batch_size=batch, show_progress_bar=False, convert_to_tensor=True).float().numpy()

    return run


def onnxruntime(weights="f32"):
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = int(threads)
    model = exported() if weights == "f32" else quantised(exported())
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return padded(lambda feed: session.run(None, {n: feed[n] for n in names})[0])


def openvino(precision="f32"):
    import openvino as ov

    core = ov.Core()
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": int(threads), "PERFORMANCE_HINT": "LATENCY"}
    model = core.compile_model(core.read_model(exported()), "CPU", settings)
    names = [i.get_any_name() for i in model.inputs]
    return padded(lambda feed: model({n: feed[n] for n in names})[0])


def padded(forward):
    """Batches of texts of about one length, padded to the longest; their means, normalised."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    limit = json.load(open(f"{folder}/sentence_bert_config.json"))["max_seq_length"]
    tokenizer.enable_truncation(limit)
    tokenizer.enable_padding()

    def run(batch):
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found = [None] * len(texts)
        for start in range(0, len(order), batch):
            picked = order[start : start + batch]
            rows = tokenizer.encode_batch([texts[i] for i in picked])
            feed = {
                "input_ids": np.array([r.ids for r in rows], dtype=np.int64),
                "attention_mask": np.array([r.attention_mask for r in rows], dtype=np.int64),
                "token_type_ids": np.array([r.type_ids for r in rows], dtype=np.int64),
            }
            hidden = forward(feed)
            mask = feed["attention_mask"][..., None].astype(np.float32)
            mean = (hidden * mask).sum(1) / np.maximum(mask.sum(1), 1e-9)
            mean /= np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)
            for i, vector in zip(picked, mean):
                found[i] = vector
        return np.array(found, dtype=np.float32)

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


def quantised(model):
    """The exported model with int8 weights and activations, as ONNX Runtime's documentation advises for encoders: dynamic."""
    target = model.replace("model.onnx", "model-int8.onnx")
    if not os.path.exists(target):
        # In a process of its own, so that the quantiser does not count in the peak memory.
        if os.fork() == 0:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            quantize_dynamic(model, target + ".new", weight_type=QuantType.QInt8, per_channel=True)
            os.rename(target + ".new", target)
            os._exit(0)
        if os.wait()[1] != 0:
            sys.exit("the quantising failed")
    return target


def path_of_cache():
    cache = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), "..", "onnx", "x")
    os.makedirs(os.path.dirname(cache), exist_ok=True)
    return cache


engines = {
    "sentence-transformers": sentence_transformers,
    "sentence-transformers-bf16": lambda: sentence_transformers("bfloat16"),
    "onnxruntime": onnxruntime,
    "onnxruntime-int8": lambda: onnxruntime("int8"),
    "openvino": openvino,
    "openvino-bf16": lambda: openvino("bf16"),
    "sgemm": sgemm,
}
run = engines[engine]()
run(32)
best = None
for batch in (8, 32, 64):
    started = time.perf_counter()
    found = run(batch)
    rate = len(texts) / (time.perf_counter() - started)
    if best is None or rate > best[0]:
        best = (rate, batch)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
if found is not None:
    with open(vectors, "wb") as file:
        file.write(found.tobytes())
print(json.dumps({"sentences_per_s": best[0], "batch": best[1], "peak_mib": peak}))
