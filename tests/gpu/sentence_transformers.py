#!/usr/bin/env python3
"""Embed the lines of a file with sentence-transformers on the GPU, in f16, at its best batch size; print one JSON line.

    sentence_transformers.py MODEL-FOLDER TEXT-FILE

Tokenising is included, loading is not; it sorts by length itself. Ends with 3 and a reason where it cannot run.
"""

import json
import os
import sys
import time

BATCHES = (32, 64, 128, 256, 512, 1024)

folder, path = sys.argv[1:]
# The peer's own name is this file's.
sys.path = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
try:
    import torch
    from sentence_transformers import SentenceTransformer
except ImportError as error:
    print(f"{error}", file=sys.stderr)
    sys.exit(3)
if not torch.cuda.is_available():
    print("PyTorch sees no GPU", file=sys.stderr)
    sys.exit(3)

with open(path, encoding="utf-8") as file:
    texts = file.read().splitlines()
model = SentenceTransformer(folder, device="cuda", model_kwargs={"dtype": torch.float16})
best = {"texts_per_second": 0.0}
for batch in BATCHES:
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            model.encode(texts, batch_size=batch, show_progress_bar=False)
        except torch.cuda.OutOfMemoryError:
            break
        torch.cuda.synchronize()
        rate = len(texts) / (time.perf_counter() - start)
        if rate > best["texts_per_second"]:
            best = {"texts_per_second": rate, "batch": batch}
name = os.path.basename(os.path.normpath(folder))
print(json.dumps({"figure": "texts", "engine": "sentence-transformers", "model": name, **best}))
