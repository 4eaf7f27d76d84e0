"""Sentence vectors by sentence-transformers on PyTorch."""

import os

import vramq
from sentence_transformers import SentenceTransformer


class Minilm(vramq.Model):
    accepts = ["text"]

    def load(self, device):
        self.model = SentenceTransformer(os.environ.get("MODEL", "all-MiniLM-L6-v2"), device=device)

    def run(self, items, params):
        return self.model.encode([item.text for item in items], batch_size=len(items))


vramq.serve(Minilm)
