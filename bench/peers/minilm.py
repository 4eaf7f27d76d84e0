"""MiniLM on PyTorch as a program of one's own for vramq, and a model that does nothing."""

import os
import sys

import vramq

# PyTorch encodes so many texts at a time, sorted by length: larger batches only pad more on a CPU.
BATCH = 8


class Nothing(vramq.Model):
    accepts = ["text"]

    def run(self, items, params):
        return [item.text for item in items]


class Minilm(vramq.Model):
    accepts = ["text"]

    def load(self, device):
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(int(os.environ["THREADS"]))
        self.model = SentenceTransformer(os.environ["MODEL"], device="cpu")

    def run(self, items, params):
        return self.model.encode([item.text for item in items], batch_size=BATCH, show_progress_bar=False)


vramq.serve({"nothing": Nothing, "minilm": Minilm}[sys.argv[1]])
