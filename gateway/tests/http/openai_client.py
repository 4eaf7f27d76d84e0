"""OpenAI's client against a gateway: `embed URL MODEL` checks results, `many URL MODEL` those of as many texts as OpenAI's API takes,
`error URL ASKED` prints what it makes of an error, `file URL ID` what it downloads, and `upload URL NAME` stores, reads and removes a file of
this name. A key may follow. ASKED is a model, or `typed:MODEL` for a body that claims to be a text, `job:MODEL`, `file:ID`, or
`upload:BYTES`. `serve` reads such commands, each a line with an array, and prints a line for each."""

import base64
import hashlib
import json
import sys

import openai


def embed(client, model):
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
    assert model in [found.id for found in client.models.list()]
    assert client.models.retrieve(model).id == model


def many(client, model):
    found = client.embeddings.create(model=model, input=[f"text {n}" for n in range(2048)])
    assert [item.index for item in found.data] == list(range(2048))
    assert len({tuple(item.embedding[:8]) for item in found.data}) == 2048


def ask(client, asked):
    kind, _, rest = asked.rpartition(":")
    if kind == "job":
        client.post("/jobs", body={"model": rest, "inputs": ["x"]}, cast_to=object)
    elif kind == "file":
        client.files.retrieve(rest)
    elif kind == "upload":
        client.files.create(file=("zeros", bytes(int(rest))), purpose="user_data")
    else:
        typed = {"content-type": "text/plain"} if kind == "typed" else {}
        client.embeddings.create(model=rest, input="x", extra_headers=typed)


def error(client, asked):
    try:
        ask(client, asked)
    except openai.APIStatusError as refused:
        assert refused.request_id and refused.body["message"], refused
        return {"class": type(refused).__name__, "status": refused.status_code, "code": refused.code}
    raise AssertionError("no error")


def file(client, name):
    found = client.files.retrieve(name)
    content = client.files.content(name).read()
    assert len(content) == found.bytes
    return {"id": found.id, "bytes": found.bytes, "sha256": hashlib.sha256(content).hexdigest()}


def upload(client, name):
    content = b"what was uploaded"
    stored = client.files.create(file=(name, content), purpose="user_data")
    assert (stored.object, stored.bytes, stored.filename) == ("file", len(content), name), stored
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


COMMANDS = {"embed": embed, "many": many, "error": error, "file": file, "upload": upload}


def run(command, url, what, key=""):
    # A client of its own, as in a program that was just started: it has no connection and no state.
    with openai.OpenAI(base_url=url + "/v1", api_key=key or "none", max_retries=2) as client:
        print(json.dumps(COMMANDS[command](client, what)), flush=True)


if sys.argv[1:] == ["serve"]:
    for line in sys.stdin:
        run(*json.loads(line))
else:
    run(*sys.argv[1:])
