"""Checks schemas/json and schemas/golden with validators of others: jsonschema-rs, and the schema that AsyncAPI publishes.

    python tests/foreign/schemas.py SCHEMAS NODE_MODULES

The first is the folder `schemas`, the second has @asyncapi/specs. Exits with 0 if all fit.
"""

import copy
import json
import pathlib
import sys

import jsonschema_rs

# The frozen files, and where AsyncAPI has what they are: a channel, its message, and what of the message.
GOLDEN = {
    "job-text.json": ("jobs", "job", "payload"),
    "job-bytes.json": ("jobs", "job", "payload"),
    "job-json.json": ("jobs", "job", "payload"),
    "job-uri.json": ("jobs", "job", "payload"),
    "job-params.json": ("jobs", "job", "payload"),
    "outputs.json": ("replies", "part", "payload"),
    "sparse.json": ("replies", "done", "payload"),
    "failure.json": ("replies", "failed", "payload"),
    "progress.json": ("replies", "progress", "payload"),
    "headers-job-published.json": ("jobs", "job", "headers"),
    "headers-job-requeued.json": ("deadLetters", "jobOfBroker", "headers"),
    "headers-dead-letter.json": ("deadLetters", "job", "headers"),
    "headers-reply.json": ("replies", "done", "headers"),
    "headers-failed.json": ("replies", "failed", "headers"),
    "headers-progress.json": ("replies", "progress", "headers"),
}

# What no worker would take, or no worker writes.
WRONG = [
    (("jobs", "job", "payload"), {"model": "m", "inputs": []}),
    (("jobs", "job", "payload"), {"model": "m", "inputs": ["a"] * 65_537}),
    (("jobs", "job", "payload"), {"model": "m", "inputs": ["a"], "unknown": 1}),
    (("jobs", "job", "payload"), {"model": "m", "inputs": [1]}),
    (("replies", "failed", "payload"), {"reason": "no such reason", "error": ""}),
    (("replies", "done", "payload"), {"model": "m"}),
    (("jobs", "job", "headers"), {"attempt": "2"}),
    (("deadLetters", "job", "headers"), {"attempt": 2}),
    (("deadLetters", "done", "headers"), {"offset": 0}),
]


def read(path):
    return json.loads(path.read_text())


def main(schemas, node_modules):
    folder = schemas / "json"
    by_name = {path.name: read(path) for path in folder.glob("*.json")}
    api = by_name.pop("asyncapi.json")
    check_asyncapi(api, read(node_modules / "@asyncapi/specs/schemas" / f"{api['asyncapi']}.json"))
    for name, schema in by_name.items():
        jsonschema_rs.meta.validate(schema)
        assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema", name
    registry = jsonschema_rs.Registry([(f"vramq:///{name}", schema) for name, schema in by_name.items()])

    def of_message(channel, message, part):
        return jsonschema_rs.Draft202012Validator(
            api["channels"][channel]["messages"][message][part], registry=registry, base_uri="vramq:///asyncapi.json"
        )

    frozen = {path.name: path for path in (schemas / "golden").glob("*.json")}
    assert frozen.keys() == GOLDEN.keys(), frozen.keys() ^ GOLDEN.keys()
    for name, place in GOLDEN.items():
        errors = [f"{error.instance_path}: {error.message}" for error in of_message(*place).iter_errors(read(frozen[name]))]
        assert not errors, (name, place, errors)
    results = read(frozen["headers-reply.json"]) | read(frozen["headers-dead-letter.json"])
    of_message("deadLetters", "part", "headers").validate(results)
    for place, wrong in WRONG:
        assert not of_message(*place).is_valid(wrong), (place, wrong)


def check_asyncapi(api, published):
    validator = jsonschema_rs.validator_for(published)
    errors = [f"{error.instance_path}: {error.message}" for error in validator.iter_errors(api)]
    assert not errors, errors
    # It can fail.
    for break_it in (
        lambda broken: broken["channels"]["replies"]["bindings"]["amqp"].pop("queue"),
        lambda broken: broken["operations"]["submit"].update(reply={"address": {"location": "$message.property#/reply_to"}}),
        lambda broken: broken.pop("info"),
    ):
        broken = copy.deepcopy(api)
        break_it(broken)
        assert not validator.is_valid(broken)
    for name, operation in api["operations"].items():
        for part in filter(None, (operation, operation.get("reply"))):
            channel = part["channel"]["$ref"]
            assert part["messages"], name
            for message in part["messages"]:
                assert message["$ref"].startswith(f"{channel}/messages/"), (name, message)


main(*map(pathlib.Path, sys.argv[1:]))
