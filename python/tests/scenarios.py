"""Uses the installed package against a real worker, as the tests of the workspace start it.

    python -I python/tests/scenarios.py SCENARIO ARGUMENT …      the first is the broker's URL, for most

Exits with 0 if all is as the package's documentation says. tests/tests/client/python.rs has the workers.
"""

import array
import asyncio
import functools
import json
import multiprocessing
import os
import sys
import threading
import time

import vramq

MODEL = "echo"


def raises(kind, call, *args, **options):
    try:
        call(*args, **options)
    except kind as error:
        return error
    raise AssertionError(f"no {kind}")


async def raises_async(kind, work):
    try:
        await work
    except kind as error:
        return error
    raise AssertionError(f"no {kind}")


def results(url):
    """Outputs of every kind, in order; progress; several threads; a model without the extra."""
    with vramq.Client(url) as client:
        result = client.run(MODEL, ["a", "ñ, 漢字 \x00\n", b"\0\1\xff", vramq.Uri("s3://bucket/key")])
        assert result.plain() == ["a", "ñ, 漢字 \x00\n", b"\0\1\xff", "s3://bucket/key"], result.plain()
        assert isinstance(result.outputs[2], vramq.Bytes) and isinstance(result.outputs[3], vramq.Uri)
        assert result.worker == "worker-0" and result.attempt == 0 and result.model == MODEL

        # 6 MiB come in several parts.
        job = client.submit(MODEL, [f"{n}" * 1024 for n in range(2000)], timeout=120)
        steps = list(job.progress())
        assert len(steps) > 1 and steps[-1] == (2000, 2000) and steps == sorted(steps), steps
        assert job.done and job.items_done == 2000
        assert job.result().outputs == [f"{n}" * 1024 for n in range(2000)]

        found = {}
        threads = [
            threading.Thread(target=lambda n=n: found.update({n: client.run(MODEL, [f"{n}"]).outputs})) for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {n: [f"{n}"] for n in range(20)}, found

        # A child of a fork has no thread of the client's: it gets an error instead of waiting for ever.
        child = multiprocessing.get_context("fork").Process(target=raises, args=(vramq.ClientClosed, client.run, MODEL, ["x"]))
        child.start()
        child.join()
        assert child.exitcode == 0
    raises(vramq.ClientClosed, client.run, MODEL, ["x"])


def msgpack(url):
    """The same results when jobs and replies are MessagePack, and the same refusals."""
    with vramq.Client(url, encoding="msgpack") as client:
        assert client.run(MODEL, ["a", "ñ, 漢字 \x00\n", b"\0\1\xff", b"", vramq.Uri("s3://bucket/key")]).plain() == [
            "a", "ñ, 漢字 \x00\n", b"\0\1\xff", b"", "s3://bucket/key",
        ]
        job = client.submit(MODEL, [bytes(range(256)) * 4 for _ in range(6000)], timeout=120)
        assert [output.data for output in job.result().outputs] == [bytes(range(256)) * 4] * 6000
        failed = raises(vramq.JobFailed, client.run, MODEL, ["a"], params={"unknown": 1})
        assert failed.reason == "invalid-input" and "unknown" in failed.error
        for wrong in (["\ud800"], [vramq.Json(float("nan"))], [vramq.Json(b"x")], [vramq.Json(1 << 64)], ["x" * (16 << 20)]):
            raises(vramq.InvalidJob, client.run, MODEL, wrong)
    raises(ValueError, vramq.Client, url, encoding="pickle")


def failures(url):
    """What cannot be published or run raises an error with what a caller needs to decide."""
    with vramq.Client(url) as client:
        failed = raises(vramq.JobFailed, client.run, MODEL, ["a", "b"], params={"unknown": 1})
        assert failed.reason == "invalid-input" and "unknown" in failed.error and failed.outputs == [None, None]
        missing = raises(vramq.Unroutable, client.run, "nobody", ["a"])
        assert missing.retryable and "nobody" in str(missing)
        for wrong in ([], ["x" * (16 << 20)], ["x"] * 65_537, [1], [None], ["\ud800"]):
            raises(vramq.InvalidJob, client.run, MODEL, wrong)
        raises(vramq.InvalidJob, client.run, "no such name", ["a"])
        raises(vramq.InvalidJob, client.run, MODEL, ["a"], id="x" * 256)
        raises(vramq.InvalidJob, client.run, MODEL, ["a"], batch_hint=0)
        assert client.run(MODEL, ["still here"]).outputs == ["still here"]
    # Not one of them shows the password.
    for address, retryable in ((url.replace("guest:guest", "guest:hunter2"), False), ("amqp://guest:hunter2@127.0.0.1:1/%2f", True)):
        refused = raises(vramq.ConnectError, vramq.Client, address)
        assert refused.retryable == retryable and "hunter2" not in str(refused), refused
    raises(vramq.ConnectError, vramq.Client, "hunter2")


def nothing_declared(url):
    """No worker was ever started: there is no exchange for jobs."""
    with vramq.Client(url) as client:
        for _ in range(2):
            missing = raises(vramq.Unroutable, client.run, MODEL, ["a"])
            assert missing.retryable and "vramq.jobs" in str(missing), missing


def unanswered(url):
    """Nobody consumes, and the queue takes three jobs: time limits, forgetting, a full queue, closing."""

    async def run():
        client = await vramq.AsyncClient(url).connect()
        late = await raises_async(vramq.JobTimeout, client.run(MODEL, ["a", "b"], timeout=0.2))
        assert (late.items_done, late.items) == (0, 2) and isinstance(late, TimeoutError)
        job = await client.submit(MODEL, ["a"], id="one")
        await raises_async(vramq.DuplicateId, client.submit(MODEL, ["a"], id="one"))
        await raises_async(TimeoutError, job.result(timeout=0.1))
        assert not job.done
        job.forget()
        await raises_async(vramq.Forgotten, job.result())
        waiting = await client.submit(MODEL, ["a"], id="two")

        async def fill():
            # A quorum queue notices its limit late.
            for _ in range(1000):
                await client.publish(MODEL, ["a"])

        full = await raises_async(vramq.QueueFull, fill())
        assert full.retryable
        await raises_async(vramq.QueueFull, client.submit(MODEL, ["a"]))
        await client.close()
        await raises_async(vramq.ClientClosed, waiting.result())
        await raises_async(vramq.ClientClosed, client.run(MODEL, ["a"]))

    asyncio.run(run())


def reconnect(url):
    """Jobs go on being published and answered while a proxy cuts the connections, after each line that is printed."""

    async def run():
        async with vramq.AsyncClient(url) as client:
            done = 0

            async def one():
                nonlocal done
                texts = [f"{done}", "x"]
                done += 1
                assert (await client.run(MODEL, texts)).outputs == texts
                if done % 50 == 0:
                    print(done, "jobs", flush=True)

            async def lane():
                while client.reconnects < 5:
                    await one()

            await asyncio.gather(*(lane() for _ in range(32)))

    asyncio.run(asyncio.wait_for(run(), 240))


def reply_queue_lost(url):
    """A deleted reply queue fails the jobs whose replies were in it, and comes back for the next."""

    async def run():
        import aio_pika

        async with vramq.AsyncClient(url) as client:
            job = await client.submit("slow", ["a"])
            connection = await aio_pika.connect(url)
            await (await connection.channel()).queue_delete(client.reply_queue)
            await connection.close()
            await raises_async(vramq.ReplyQueueLost, job.result(timeout=60))
            assert (await client.run(MODEL, ["after"])).outputs == ["after"]

    asyncio.run(run())


def gives_up(url):
    """With a limit for reconnecting, what is in flight fails when it has passed. The broker goes away after the printed line."""

    async def run():
        client = await vramq.AsyncClient(url, reconnect_for=0.5).connect()
        job = await client.submit("slow", ["a"])
        print("submitted", flush=True)
        await raises_async(vramq.Disconnected, job.result(timeout=60))
        await raises_async(vramq.Disconnected, client.submit(MODEL, ["a"]))
        await client.close()

    asyncio.run(run())


def embed(url):
    """Reads texts as JSON from standard input, and writes their vectors."""
    import numpy

    texts = json.load(sys.stdin)
    with vramq.Client(url) as client:
        vectors = client.embed("minilm", texts, job_items=7)
        assert vectors.dtype == numpy.float32 and vectors.shape == (len(texts), 384)
        halves = client.embed("minilm", texts[:3], dtype="f16")
        assert halves.dtype == numpy.float16 and numpy.allclose(halves, vectors[:3], atol=1e-3)
        numbers = client.run("minilm", texts[:3])
        assert isinstance(numbers.outputs[0].values, array.array) and numpy.array_equal(numbers.numpy(), vectors[:3])
    json.dump(vectors.tolist(), sys.stdout)


def celery(url):
    """The shim for call sites of Celery."""
    from vramq.celery import App

    app = App(url)
    echo = app.task(MODEL)
    result = echo.delay(["a", "b"])
    assert result.get(timeout=60) == ["a", "b"] and result.ready() and result.successful() and result.state == "SUCCESS"
    assert app.AsyncResult(result.id) is result and result.result == ["a", "b"]
    assert echo("alone") == "alone"
    assert echo.apply_async((["x"],), task_id="mine").id == "mine"
    failing = app.task(MODEL, params={"unknown": 1}).delay(["a"])
    assert raises(vramq.JobFailed, failing.get, timeout=60).reason == "invalid-input"
    assert failing.failed() and failing.state == "FAILURE" and isinstance(failing.result, vramq.JobFailed)
    shaped = app.task(MODEL, inputs=lambda title, body: [title, body], result=lambda result: "|".join(result.plain()))
    assert shaped.delay("title", body="text").get(timeout=60) == "title|text"
    slow = app.task("slow").delay("a")
    raises(TimeoutError, slow.get, timeout=0.1)
    assert slow.state == "PENDING" and not slow.ready() and slow.result is None
    slow.forget()
    raises(LookupError, app.AsyncResult, "of another process")
    raises(TypeError, echo.apply_async, (["a"],), countdown=5)
    raises(TypeError, echo.delay, "a", "b")
    app.close()


def golden(folder):
    """Reads and writes the frozen bodies of the contract; takes no reply that contradicts its job."""
    from vramq import _wire

    def frozen(name):
        with open(f"{folder}/{name}", "rb") as file:
            return file.read()

    for name, inputs in (
        ("job-text", ["a text", "", "ñ, 漢字, \"quoted\", \U0001f468\u200d\U0001f680, \0\n"]),
        ("job-bytes", [b"\0\1\2\xfe\xff", b""]),
        ("job-uri", [vramq.Uri("s3://bucket/key")]),
    ):
        written = json.loads(_wire.encode_job("minilm", inputs, None))
        assert written == {key: value for key, value in json.loads(frozen(f"{name}.json")).items() if value != {}}, name
        # The frozen body has empty params besides.
        packed = _wire.encode_job("minilm", inputs, {}, "msgpack")
        assert frozen(f"{name}.msgpack") == b"\x83" + packed[1:] + b"\xa6params\x80", name

    headers = {"offset": 2, "items": 8, "items-total": 10}
    for content_type, extension in (("application/json", "json"), ("application/msgpack", "msgpack")):
        part = _wire.decode_reply("part", content_type, headers, frozen(f"outputs.{extension}"))
        numbers, as_bytes, halves, halves_as_bytes, none = part.outputs[:5]
        assert numbers.values == as_bytes.values and list(numbers.values)[:2] == [0.0, -1.5] and numbers.dtype == "f32"
        assert halves.values == halves_as_bytes.values and list(halves.values)[-1] == 65504.0 and halves.dtype == "f16"
        assert list(none.values) == [] and part.outputs[5] == {"label": "x", "scores": [0.25, None, "y", {}]}
        assert (part.outputs[6].data, part.outputs[6].media_type) == (b"\x89PNG\xff", "image/png")
        assert part.outputs[7].uri == "s3://bucket/key"
        part = _wire.decode_reply("done", content_type, headers | {"items": 2}, frozen(f"sparse.{extension}"))
        some, empty = part.outputs
        assert isinstance(some, vramq.Sparse) and list(some.indices) == [0, 7, 300, 70000], some
        assert list(some.values)[:2] == [0.5, 1.25] and _wire.plain(some)[7] == 1.25 and _wire.plain(empty) == {}
        failure = _wire.decode_reply("failed", content_type, {}, frozen(f"failure.{extension}"))
        assert failure.reason == "out-of-memory" and "batch 1" in failure.error
    report = _wire.decode_reply("progress", None, {}, b'{"item": 7, "fraction": 0.25, "note": "step 5 of 20"}')
    assert (report.item, report.fraction, report.note) == (7, 0.25, "step 5 of 20")
    assert _wire.decode_reply("a later type", None, {}, b"anything") is None
    assert json.loads(_wire.encode_job("m", [vramq.Json({"a": [1, None]})], None))["inputs"] == [{"json": {"a": [1, None]}}]
    numbered = _wire.encode_job("m", [vramq.Json({1: (2, None)})], None, "msgpack")
    assert numbered == b"\x82\xa5model\xa1m\xa6inputs\x91\x81\xa4json\x81\xa11\x92\x02\xc0", numbered

    # Parts come in any order, overlap, and come twice; the first answer stands.
    def of(offset, *outputs, total=5):
        return _wire.Part(offset, total, list(outputs), "", 0, 0, 0, None, None)

    assembly = _wire.Assembly(5)
    for step in (of(3, "d", "e"), of(3, "x", "x"), of(0, "a")):
        assembly.add(step)
    assert not assembly.is_complete and assembly.outputs() == ["a", None, None, "d", "e"]
    for forged in (of(5, "x"), of(1 << 40, "x"), of(0, "x", total=6), of(4, "x", "x")):
        raises(ValueError, assembly.add, forged)
    assembly.add(of(0, "x", "b", None, "x"))
    assert assembly.is_complete and assembly.outputs() == ["a", "b", None, "d", "e"]
    for kind, bad, body in (
        ("part", {"items": 1}, frozen("outputs.json")),
        ("part", {"offset": -1}, frozen("outputs.json")),
        ("part", {"offset": "0"}, frozen("outputs.json")),
        ("part", {}, b"[]"),
        ("part", {"items": 1}, b'{"outputs": [{"embedding": "AAA=", "dtype": "f32"}]}'),
        ("part", {"items": 1}, b'{"outputs": [{"embedding": "AA==", "dtype": "f64"}]}'),
        ("part", {"items": 1}, b'{"outputs": [7]}'),
        ("part", {}, b"\xff"),
        ("progress", {}, b"{}"),
    ):
        raises((ValueError, TypeError), _wire.decode_reply, kind, None, {**headers, **bad}, body)
        raises((ValueError, TypeError), _wire.decode_reply, kind, "application/msgpack", {**headers, **bad}, body)
    whole = frozen("outputs.msgpack")
    for broken in (b"", whole[:-1], whole + b"\0", b"\xdd\xff\xff\xff\xff", b"\xc1"):
        raises(ValueError, _wire.decode_reply, "part", "application/msgpack", headers, broken)


def fails(reason, call, *args, **options):
    """The text of a DownloadError with this reason."""
    error = raises(vramq.DownloadError, call, *args, **options)
    assert error.reason == reason and error.retryable == (reason == "store-unavailable"), (error.reason, str(error))
    return str(error)


def references(url, folder, server):
    """A worker writes outputs of more than a KiB to `folder`, which has a link to a folder outside; `server` is a web server."""
    outside = f"{folder}/../outside"
    text = "ñ" * 1024
    with vramq.Client(url) as client:
        small, large = client.run(MODEL, ["small", text]).outputs
    assert small == "small" and isinstance(large, vramq.Uri), (small, large)
    expected = json.dumps(text, ensure_ascii=False).encode()
    assert vramq.download(large, folder=folder) == expected
    assert vramq.download(large.uri, folder=f"{folder}/../out/", bytes_max=len(expected)) == expected
    whole, _, _ = large.uri.partition("#")
    assert vramq.download(whole, folder="/") == expected, "without a digest there is nothing to compare"

    got = f"{outside}/got"
    assert vramq.download_file(large, got, folder=folder) == len(expected)
    with open(got, "rb") as file:
        assert file.read() == expected
    assert "too-large" == raises(vramq.DownloadError, vramq.download_file, large, got, folder=folder, bytes_max=1025).reason
    wrong = fails("reference-mismatch", vramq.download_file, f"{whole}#sha256={'0' * 64}", got, folder=folder)
    assert "0" * 64 in wrong, wrong
    with open(got, "rb") as file:
        assert file.read() == expected, "what failed has written over the file"
    assert os.listdir(outside) == ["got"], "what failed has left a file"
    raises(OSError, vramq.download_file, large, f"{outside}/no folder/got", folder=folder)

    assert "folder=" in fails("reference-denied", vramq.download, large)
    fails("reference-denied", vramq.download, large, folder=outside)
    fails("reference-denied", vramq.download, large, folder=folder[:-1])
    fails("reference-denied", vramq.download, f"file://{folder}", folder=folder)
    for name in ("link", "way-out/got", "pipe", "folder", "%2e%2e/outside/got", "..%2foutside"):
        fails("reference-denied", vramq.download, f"file://{folder}/{name}", folder=folder)
    fails("reference-missing", vramq.download, f"{whole}-gone", folder=folder)
    fails("store-unavailable", vramq.download, f"file://{folder}/unmounted/a", folder=f"{folder}/unmounted")

    at = f"{server}/a"
    assert "private address" in fails("reference-denied", vramq.download, f"{at}/object")
    read = functools.partial(vramq.download, private=True)
    assert read(f"{at}/object?signature=1#type=text/plain") == b"what the server has\0\xff"
    assert "redirect" in fails("reference-denied", read, f"{at}/redirect")
    # How the server answers is what stands behind the last slash.
    secret = fails("reference-denied", read, f"{at}/object?signature=hunter2/refused")
    assert "403" in secret and "hunter2" not in secret, secret
    fails("reference-missing", read, f"{at}/missing")
    fails("reference-mismatch", read, f"{at}/object#sha256={'0' * 64}")
    for name in ("large", "endless"):
        fails("too-large", read, f"{at}/{name}", bytes_max=1 << 20)
    # It answers the second time.
    for name in ("busy", "cut"):
        fails("store-unavailable", read, f"{at}/{name}")
        assert read(f"{at}/{name}") == b"what the server has\0\xff"
    assert "within 2 s" in fails("store-unavailable", read, f"{at}/slow", timeout=2)
    fails("store-unavailable", read, "http://127.0.0.1:1/a")


def https(folder):
    """Certificates are checked, and the name in them; a server that sends a byte now and then does not hold a client.

    `folder` has a certificate for 127.0.0.1, its key, and the certificate of its authority.
    """
    import http.server
    import ssl

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            if self.path == "/headers":
                self.flush_headers()
                while True:
                    self.drip(b"a: b\r\n")
            self.end_headers()
            while self.path == "/body":
                self.drip(b"a")
            self.wfile.write(self.headers["Host"].encode())

        def drip(self, data):
            self.wfile.write(data)
            time.sleep(0.1)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{folder}/certificate.pem", f"{folder}/key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    # A client that hangs up, as these do, is no fault of the server.
    server.handle_error = lambda *_: None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    trusting = ssl.create_default_context(cafile=f"{folder}/ca.pem")
    read = functools.partial(vramq.download, private=True, ssl_context=trusting)
    assert read(f"https://127.0.0.1:{port}/a") == f"127.0.0.1:{port}".encode()
    for wrong in (
        fails("store-unavailable", vramq.download, f"https://127.0.0.1:{port}/a", private=True),
        fails("store-unavailable", read, f"https://localhost:{port}/a"),
    ):
        assert "certificate" in wrong, wrong
    for part in ("headers", "body"):
        assert "within 2 s" in fails("store-unavailable", read, f"https://127.0.0.1:{port}/{part}", timeout=2)
    server.shutdown()
    server.server_close()


def what_references_may_be(_):
    """Texts that are no references, that lead elsewhere than they say, or to addresses inside; as the worker has it."""
    from vramq import _address, _download

    for text in (
        "", "a.png", "/srv/a", "file:a", "http:///a", "http://h:port/a", "http://[::1/a", "http://h/a b", "http://h\\@i/a", "http://ñ/a",
        "ftp://h/a", "http://h/a#sha256=0", "http://h/a#size=1", "http://h/a#type", "http://h/" + "a" * 8192,
    ):
        fails("invalid-reference", vramq.download, text, folder="/")
    for text in (
        "http://user@h/a", "http://h/a/../b", "http://h/a//b", "http://h/a%2Fb", "http://h/a%5cb", "http://h/a%00", "http://h/./a",
        "file://host/a", "file:///a?b", "s3://bucket/a?versionId=1",
    ):
        fails("reference-denied", vramq.download, text, folder="/")
    for scheme in ("s3", "gs", "az"):
        assert "vramq download" in fails("invalid-reference", vramq.download, f"{scheme}://bucket/key")
    raises(TypeError, vramq.download, b"http://h/a")
    digest = "9F86D081884C7D659A2FEAA0C55AD015A3BF4F1B2B0B822CD15D6C15B0F00A08"
    parsed = _download.Reference(f"https://h/x%20y/?a=1#type=image/png&sha256={digest}")
    assert (parsed.shown, parsed.segments, parsed.sha256) == ("https://h/x%20y/", [b"x y"], digest.lower()), vars(parsed)

    for public in ("1.1.1.1", "8.8.8.8", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::808:808", "2002:808:808::"):
        assert _address.is_public(public), public
    for special in (
        "0.0.0.0", "10.1.2.3", "127.0.0.1", "127.9.9.9", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.168.1.1",
        "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1",
        "fe80::1%lo", "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1",
        "2002:7f00:1::", "2001::1", "2001:db8::1", "3fff::1", "::127.0.0.1",
    ):
        assert not _address.is_public(special), special


def without_the_extra(_):
    """A program that only serves a model needs no aio-pika."""
    for name in ("aio_pika", "aiormq", "numpy"):
        assert name not in sys.modules, f"{name} is loaded by `import vramq`"
        sys.modules[name] = None
    assert vramq.Model and vramq.serve and vramq.JobFailed and vramq.download
    assert "vramq[client]" in str(raises(ImportError, getattr, vramq, "Client"))
    from vramq import _wire

    sys.modules["msgpack"] = None
    assert "vramq[msgpack]" in str(raises(ImportError, _wire.check_encoding, "msgpack"))


if __name__ == "__main__":
    scenario, *arguments = sys.argv[1:]
    assert "site-packages" in vramq.__file__, f"not the installed package: {vramq.__file__}"
    globals()[scenario](*arguments)
