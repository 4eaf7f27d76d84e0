"""A program on PyTorch whose items take a fifth of the GPU each, for the stage `program` of tests/gpu/run: passes of eight cannot fit."""

import os

import torch
import vramq

WEIGHTS = 256 << 20


class Fifths(vramq.Model):
    def load(self, device):
        self.device = device
        self.weights = torch.zeros(WEIGHTS, dtype=torch.uint8, device=device)

    def run(self, items, params):
        _, total = torch.cuda.mem_get_info()
        torch.empty(total // 5 * len(items), dtype=torch.uint8, device=self.device)
        return [{"pid": os.getpid(), "items": len(items)} for item in items]


vramq.serve(Fifths)
