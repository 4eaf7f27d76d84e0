"""A program that gives its items back, for tests in which any program will do. It finds the SDK by itself."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))

import vramq


class Echo(vramq.Model):
    def run(self, items, params):
        return [item.text for item in items]


vramq.serve(Echo)
