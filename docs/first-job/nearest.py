"""Prints the sentence that is nearest to the question: `python docs/first-job/nearest.py amqp://…`."""

import sys

import vramq

QUESTION = "A man is eating food."
SENTENCES = ["The river is deep.", "Someone has a meal.", "She plays the violin."]

try:
    with vramq.Client(sys.argv[1]) as client:
        question, *vectors = client.embed("minilm", [QUESTION, *SENTENCES])  # rows of a NumPy array, of length 1
except vramq.VramqError as error:
    sys.exit(f"no vectors: {error}")
nearest = max(range(len(SENTENCES)), key=lambda at: float(question @ vectors[at]))
print(SENTENCES[nearest])
