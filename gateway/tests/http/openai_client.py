"""OpenAI's client against a gateway: `embed URL MODEL` checks results, `error URL ASKED` prints what it makes of an error,
`file URL ID` what it downloads, and `upload URL NAME` stores, reads and removes a file of this name. A key may follow. ASKED is a model,
or `typed:MODEL` for a body that claims to be a text, `job:MODEL`, `file:ID`, or `upload:BYTES`."""

import base64
import hashlib
import json
import sys

import openai

command, url, model, *key = sys.argv[1:]
client = openai.OpenAI(base_url=url + "/v1", api_key="".join(key) or "none", max_retries=2)


def embed():
    texts = ["A man is eating food.", "Someone has a meal."]
    # The client asks for base64 by itself, and decodes it.
    default = client.embeddings.create(model=model, input=texts)
    numbers = client.embeddings.create(model=model, input=texts, encoding_format="float")
    encoded = client.embeddings.create(model=model, input=texts, encoding_format="base64")
    assert [item.index for item in default.data] == [0, 1]
    assert len(default.data[0].embedding) == 384
    for a, b, c in zip(default.data, numbers.data, encoded.data):
        assert all(abs(x - y) < 1e-6 for x, y in zip(a.embedding, b.embedding))
        assert len(base64.b64decode(c.embedding)) == 384 * 4
    one = client.embeddings.create(model=model, input=texts[1])
    assert one.data[0].embedding == default.data[1].embedding
    assert one.usage.total_tokens >= 0 and one.model == model
    many = client.embeddings.create(model=model, input=[f"text {n}" for n in range(2048)])
    assert [item.index for item in many.data] == list(range(2048))
    assert len({tuple(item.embedding[:8]) for item in many.data}) == 2048
    assert model in [found.id for found in client.models.list()]
    assert client.models.retrieve(model).id == model


def ask():
    kind, _, rest = model.rpartition(":")
    if kind == "job":
        client.post("/jobs", body={"model": rest, "inputs": ["x"]}, cast_to=object)
    elif kind == "file":
        client.files.retrieve(rest)
    elif kind == "upload":
        client.files.create(file=("zeros", bytes(int(rest))), purpose="user_data")
    else:
        typed = {"content-type": "text/plain"} if kind == "typed" else {}
        client.embeddings.create(model=rest, input="x", extra_headers=typed)


def error():
    try:
        ask()
    except openai.APIStatusError as refused:
        assert refused.request_id and refused.body["message"], refused
        print(json.dumps({"class": type(refused).__name__, "status": refused.status_code, "code": refused.code}))


def file():
    found = client.files.retrieve(model)
    content = client.files.content(model).read()
    assert len(content) == found.bytes
    print(json.dumps({"id": found.id, "bytes": found.bytes, "sha256": hashlib.sha256(content).hexdigest()}))


def upload():
    content = b"what was uploaded"
    stored = client.files.create(file=(model, content), purpose="user_data")
    assert (stored.object, stored.bytes, stored.filename) == ("file", len(content), model), stored
    assert client.files.wait_for_processing(stored.id).id == stored.id
    assert client.files.content(stored.id).read() == content
    part = client.files.content(stored.id, extra_headers={"range": "bytes=5-7"})
    assert (part.response.status_code, part.read()) == (206, content[5:8])
    assert client.files.delete(stored.id).deleted
    try:
        client.files.retrieve(stored.id)
    except openai.NotFoundError as missing:
        assert missing.body["code"] == "not_found", missing
    else:
        raise AssertionError("the file is still there")


{"embed": embed, "error": error, "file": file, "upload": upload}[command]()
