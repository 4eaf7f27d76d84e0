"""Programs of one's own for vramq: MiniLM on PyTorch, a model that does nothing, one that keeps a device busy."""

import os
import sys
import time

import vramq

# PyTorch encodes so many texts at a time, sorted by length: larger batches only pad more on a CPU.
BATCH = 8


class Nothing(vramq.Model):
    accepts = ["text"]

    def run(self, items, params):
        return [item.text for item in items]


class Steady(vramq.Model):
    """Takes the same time for each text and leaves the CPU alone, as a model on a GPU does."""

    accepts = ["text"]
    SECONDS = 0.0025

    def run(self, items, params):
        time.sleep(self.SECONDS * len(items))
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


vramq.serve({"nothing": Nothing, "steady": Steady, "minilm": Minilm}[sys.argv[1]])
