import vramq
from sentence_transformers import SentenceTransformer


class Embed(vramq.Model):
    accepts = ["text"]

    def load(self, device):
        self.model = SentenceTransformer("all-MiniLM-L6-v2", device=device)

    def run(self, items, params):
        return self.model.encode([item.text for item in items], batch_size=len(items))


vramq.serve(Embed)
