"""Prints the sentence that is nearest to the question. Knows nothing of Celery or vramq."""

from tasks import embed

QUESTION = "A man is eating food."
SENTENCES = ["The river is deep.", "Someone has a meal.", "She plays the violin."]

question = embed.delay([QUESTION])
batches = [embed.delay(SENTENCES[at:at + 2]) for at in range(0, len(SENTENCES), 2)]
[asked] = question.get(timeout=60)
vectors = [vector for batch in batches for vector in batch.get(timeout=60)]
scores = [sum(a * b for a, b in zip(asked, vector)) for vector in vectors]
print(SENTENCES[scores.index(max(scores))])
