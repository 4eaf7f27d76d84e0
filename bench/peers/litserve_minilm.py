"""MiniLM on PyTorch behind LitServe, batches of up to 64 requests: POST /embed {"input": [TEXT, ...]} answers {"data": [VECTOR, ...]}.

    python litserve_minilm.py PORT      MODEL and THREADS are in the environment
"""

import os
import sys

import litserve

# PyTorch encodes so many texts at a time, sorted by length: larger batches only pad more on a CPU.
BATCH = 8


class Minilm(litserve.LitAPI):
    def setup(self, device):
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(int(os.environ["THREADS"]))
        self.model = SentenceTransformer(os.environ["MODEL"], device="cpu")

    def decode_request(self, request):
        return request["input"]

    def predict(self, requests):
        texts = [text for request in requests for text in request]
        vectors = iter(self.model.encode(texts, batch_size=BATCH, show_progress_bar=False).tolist())
        return [[next(vectors) for _ in request] for request in requests]

    def encode_response(self, vectors):
        return {"data": [{"embedding": vector} for vector in vectors]}


if __name__ == "__main__":
    api = Minilm(max_batch_size=64, batch_timeout=0.01, api_path="/v1/embeddings")
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=300)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error")
