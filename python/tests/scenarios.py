"""Uses the installed package against a real worker, as the tests of the workspace start it.

    python -I python/tests/scenarios.py SCENARIO ARGUMENT …      the first is the broker's URL, for most

Exits with 0 if all is as the package's documentation says. tests/tests/client/python.rs has the workers.
"""

import array
import asyncio
import contextlib
import datetime
import decimal
import functools
import gc
import importlib.util
import io
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse

import vramq

MODEL = "echo"
# How often the connections of `forced` are closed.
FORCED = 5


def raises(kind, call, *args, **options):
    try:
        call(*args, **options)
    except kind as error:
        return error
    raise AssertionError(f"no {kind}: {args} {options}")


async def raises_async(kind, work):
    try:
        await work
    except kind as error:
        return error
    raise AssertionError(f"no {kind}")


def results(url):
    """Outputs of every kind, in order; progress; several threads; a model without the extra."""
    with vramq.Client(url) as client:
        with_gaps = memoryview(b"a-b-c-")[::2]
        assert [output.data for output in client.run(MODEL, [with_gaps, bytearray(b"d")]).outputs] == [b"abc", b"d"]
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
        assert in_child(raises, vramq.ClientClosed, client.run, MODEL, ["x"]) == 0
        assert in_child(client.close) == 0 and client.run(MODEL, ["x"]).outputs == ["x"]
        ended, failed = client.submit(MODEL, ["x"]), client.submit(MODEL, ["x"], params={"unknown": 1})
        ended.result()
        raises(vramq.JobFailed, failed.result)
    raises(vramq.ClientClosed, client.run, MODEL, ["x"])
    # What has ended before has ended with that.
    assert ended.result().outputs == ["x"] and raises(vramq.JobFailed, failed.result).reason == "invalid-input"
    ended.forget()


def progress(url, folder):
    """What the model of tests/reports.py says of its items. It goes on when the files exist that the items name."""
    files, reports = [f"{folder}/first", f"{folder}/second"], []

    def report(item, fraction, note):
        reports.append((item, fraction, note))
        if note:
            open(files[item], "w").close()

    with vramq.Client(url) as client:
        assert client.run(MODEL, files, on_progress=report, timeout=120).outputs == ["seen", "seen"]
    # The first says that the job has begun.
    assert reports[0] == (0, 0.0, "") and set(reports[1:]) == {(0, 0.25, "a quarter, ñ"), (1, 0.25, "a quarter, ñ")}, reports


async def answering(url, key, answer, *more_keys):
    """Answers the jobs for `key` as a worker does: `answer` gives the replies of a job, as pairs of headers and outputs. Returns the
    connection."""
    import aio_pika

    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    exchange = await channel.declare_exchange("vramq.jobs", durable=True)
    queue = await channel.declare_queue(exclusive=True)
    for one in (key, *more_keys):
        await queue.bind(exchange, routing_key=one)

    async def consume(message):
        inputs = json.loads(message.body)["inputs"]
        for more, outputs in answer(message.message_id, inputs):
            headers = {"offset": 0, "items": len(outputs), "items-total": len(inputs), **more}
            kind = "done" if headers["offset"] + len(outputs) == len(inputs) else "part"
            body = json.dumps({"model": key, "outputs": outputs}).encode()
            reply = aio_pika.Message(body, headers=headers, type=kind, correlation_id=message.correlation_id)
            await channel.default_exchange.publish(reply, routing_key=message.reply_to)

    await queue.consume(consume, no_ack=True)
    return connection


def revisions(url):
    """A fleet was upgraded while it ran the job: workers with two revisions of the model computed the outputs. The last part was answered
    before, so that its revision made none of them."""
    replies = [(2, "new", "c"), (0, "old", "a"), (1, "new", "b"), (2, "other", "x"), (3, bytearray(b"old"), "d")]

    def answer(_, inputs):
        if len(inputs) == 1:
            return [({}, [{"json": "a"}])]
        return [({"offset": offset, "vramq-model-revision": revision}, [{"json": text}]) for offset, revision, text in replies]

    async def run():
        worker = await answering(url, "revised", answer)
        async with vramq.AsyncClient(url) as client:
            result = await client.run("revised", ["a", "b", "c", "d"])
            assert result.outputs == ["a", "b", "c", "d"] and result.model_revisions == ["new", "old"], result.model_revisions
            assert (await client.run("revised", ["a"])).model_revisions == []
        await worker.close()

    asyncio.run(run())


def given_ids(url):
    """Ids of the caller: those that workers take arrive as they are, others are refused."""
    import enum
    import uuid

    class Name(str, enum.Enum):
        A = "of an enumeration"

    class Number(int, enum.Enum):
        A = 8

    class Index:
        """As the integers of NumPy, which are no int."""

        def __index__(self):
            return 9

    known = uuid.UUID("0190c7a8-0000-7000-8000-000000000000")
    rights = [
        ("a", "a"), ("é" * 127 + "x", "é" * 127 + "x"), ("漢字, \x00\n😀", "漢字, \x00\n😀"), (7, "7"), (-(1 << 80), str(-(1 << 80))),
        (known, str(known)), (Name.A, "of an enumeration"), (Number.A, "8"), (Index(), "9"),
    ]
    wrongs = [
        (b"a", "a bytes"), (bytearray(b"a"), "a bytearray"), (memoryview(b"a"), "a memoryview"), (True, "a bool"), (1.5, "a float"),
        (object(), "an? object"), (["a"], "a list"), ("", "1 to 255 bytes"), ("x" * 256, "1 to 255 bytes"), ("é" * 128, "1 to 255 bytes"),
        ("a\ufffd", "FFFD"), ("\ud800", "not Unicode"), (10**300, "1 to 255 bytes"), (10**5000, "1 to 255 bytes"),
    ]
    seen = []

    def answer(job_id, _):
        seen.append(job_id)
        return [({}, [{"json": "a"}])]

    async def run():
        worker = await answering(url, "named", answer)
        async with vramq.AsyncClient(url) as client:
            for given, job_id in rights:
                job = await client.submit("named", ["a"], id=given)
                assert type(job.id) is str and job.id == job_id == (await job.result()).id, (given, job.id)
            for given, why in wrongs:
                for call in (client.submit, client.publish):
                    error = await raises_async(vramq.InvalidJob, call("named", ["a"], id=given))
                    assert re.search(why, str(error)), (given, error)
            # These are only repeated, and workers take them so.
            assert (await client.run("named", ["a"], app_id="a\ufffd", traceparent="a\ufffd")).outputs == ["a"]
        await worker.close()

    asyncio.run(run())
    assert seen[:len(rights)] == [job_id for _, job_id in rights], seen


def published(url):
    """A job of an application, within a trace; the test reads its reply."""
    trace = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "headers": {"tracestate": "vendor=value"}}
    with vramq.Client(url) as client:
        client.publish(MODEL, ["a"], id="python", reply_to="replies", app_id="shop, ñ", **trace)
        assert client.run(MODEL, ["a"], app_id="shop").outputs == ["a"]


def tls(url, folder):
    """A broker whose authority only `folder` has. After the line that is printed, the test looks for the client's certificate."""
    import ssl

    assert "certificate" in str(raises(vramq.ConnectError, vramq.Client, url))
    with vramq.Client(url, ca=f"{folder}/ca.pem") as client:
        assert client.run(MODEL, ["by its authority"]).outputs == ["by its authority"]
    context = ssl.create_default_context(cafile=f"{folder}/ca.pem")
    context.load_cert_chain(f"{folder}/client.pem", f"{folder}/client.key")
    with vramq.Client(url, ssl_context=context) as client:
        assert client.run(MODEL, ["with a certificate"]).outputs == ["with a certificate"]
        print("connected", flush=True)
        sys.stdin.read()


def in_child(function, *args):
    """The exit code of a forked process that only calls this."""
    child = multiprocessing.get_context("fork").Process(target=function, args=args)
    child.start()
    child.join()
    return child.exitcode


def callbacks(url):
    """What `on_progress` raises ends neither its job nor the client; nor does a thread that waits for a client whose thread has died."""
    handler, logged = logging.Handler(), []
    handler.emit = lambda record: logged.append(record.exc_info[1])
    logging.getLogger("asyncio").addHandler(handler)

    def failing(error):
        def report(*_):
            raise error

        return report

    async def coroutine(*_):
        pass

    class Coroutine:
        async def __call__(self, *_):
            pass

    with vramq.Client(url) as client:
        for error in (SystemExit("enough"), KeyboardInterrupt(), ValueError("wrong")):
            logged.clear()
            # A report may come after the result.
            while not logged:
                assert client.run(MODEL, ["a"], on_progress=failing(error), timeout=60).outputs == ["a"]
            assert repr(error) in repr(logged[0]), logged
        for unusable in (coroutine, Coroutine(), functools.partial(coroutine)):
            assert "plain function" in str(raises(TypeError, client.submit, MODEL, ["a"], on_progress=unusable))

    async def run():
        async with vramq.AsyncClient(url) as client:
            for unusable in (coroutine, Coroutine()):
                assert "plain function" in str(await raises_async(TypeError, client.submit(MODEL, ["a"], on_progress=unusable)))

    asyncio.run(run())
    # Whatever else ends the thread.
    client = vramq.Client(url)
    job, ends = client.submit("slow", ["a"]), []
    waits = threading.Thread(target=lambda: ends.append(raises(vramq.ClientClosed, job.result)), daemon=True)
    waits.start()
    client._loop.call_soon_threadsafe(failing(SystemExit()))
    waits.join(60)
    assert ends, "a thread waits for ever"
    raises(vramq.ClientClosed, client.run, MODEL, ["a"])
    client.close()


def signals(url):
    """Signal handlers use clients while the main thread is anywhere in them."""
    from vramq.celery import App

    client, app, used = vramq.Client(url), App(url), 0
    kept = client.submit("slow", ["a"])
    echo = app.task(MODEL)

    def use(*_):
        nonlocal used
        used += 1
        kept.forget()
        assert client.run(MODEL, ["in the handler"], timeout=60).outputs == ["in the handler"]
        if used % 4 == 0:
            assert echo("in the handler") == "in the handler"
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.005))

    signal.signal(signal.SIGALRM, use)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    while used < 500:
        assert client.run(MODEL, ["a"], timeout=60).outputs == ["a"]
        assert echo("b") == "b"
    signal.setitimer(signal.ITIMER_REAL, 0)
    app.close()
    client.close()
    # Closed by the handler, in the middle of whatever its thread does.
    for _ in range(30):
        client = vramq.Client(url)
        signal.signal(signal.SIGALRM, lambda *_: client.close())
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.02))

        def use_it():
            while True:
                client.submit(MODEL, ["a"]).forget()

        raises(vramq.ClientClosed, use_it)


def ids(url):
    """An id names one job: that of a forgotten one is free when its reply has come, that of a withdrawn one at once."""

    async def run():
        async with vramq.AsyncClient(url) as client:
            job = await client.submit("slow", ["earlier"], id="withdrawn")
            job.withdraw()
            again = await client.submit("slow", ["later"], id="withdrawn")
            # With the later job's id taken, whatever becomes of the earlier.
            await asyncio.sleep(0)
            await raises_async(vramq.DuplicateId, client.submit("slow", ["third"], id="withdrawn"))
            again.forget()
            await raises_async(vramq.DuplicateId, client.submit("slow", ["third"], id="withdrawn"))
            await asyncio.sleep(0)
            await raises_async(vramq.DuplicateId, client.submit("slow", ["third"], id="withdrawn"))
            # Until its time is over.
            late = await client.submit("slow", ["a"], id="late", timeout=10)
            late.forget()
            await raises_async(vramq.DuplicateId, client.submit("slow", ["a"], id="late"))
            for _ in range(600):
                try:
                    (await client.submit("slow", ["a"], id="late")).withdraw()
                    break
                except vramq.DuplicateId:
                    await asyncio.sleep(0.1)
            else:
                raise AssertionError("the id is not free after a minute")
            # Or its reply has come.
            texts = ["earlier"] * 500
            (await client.submit(MODEL, texts, id="forgotten")).forget()
            while True:
                try:
                    outputs = (await client.run(MODEL, ["later"] * 500, id="forgotten")).outputs
                    break
                except vramq.DuplicateId:
                    await asyncio.sleep(0.01)
            assert outputs == ["later"] * 500, outputs[0]

    asyncio.run(run())
    with vramq.Client(url) as client:
        job = client.submit("slow", ["earlier"], id="withdrawn")
        job.withdraw()
        client.submit("slow", ["later"], id="withdrawn").forget()
        raises(vramq.DuplicateId, client.submit, "slow", ["third"], id="withdrawn")


def closed_by_another_thread(url):
    """Whatever threads are doing when another closes the client: it ends for each of them, with a result or ClientClosed."""
    for _ in range(20):
        client, ends = vramq.Client(url), []

        def use(client=client, ends=ends):
            try:
                while True:
                    assert client.run(MODEL, ["x"]).outputs == ["x"]
            except BaseException as error:
                ends.append(error)

        users = [threading.Thread(target=use, daemon=True) for _ in range(8)]
        for thread in users:
            thread.start()
        closers = [threading.Thread(target=client.close, daemon=True) for _ in range(2)]
        for thread in closers:
            thread.start()
        for thread in closers + users:
            thread.join(60)
            assert not thread.is_alive(), "a thread waits for ever"
        assert [type(end) for end in ends] == [vramq.ClientClosed] * 8, ends


# Its destructors run while the interpreter ends: that of a program's own class, and that of a generator.
LEFT_OPEN = """
import sys
import vramq
from vramq.celery import App

class Service:
    client_of_app = property(lambda self: self.app.client)
    closed = vramq.ClientClosed

    def __init__(self):
        self.client, self.app = vramq.Client(sys.argv[1]), App(sys.argv[1])
        self.job = self.client.submit("slow", ["a"])

    def __del__(self):
        for use in (lambda: self.client.run("slow", ["a"]), lambda: self.client_of_app):
            try:
                use()
            except self.closed:
                print("closed")
        self.job.withdraw()
        self.client.close()
        print("destroyed")

def generator():
    with vramq.Client(sys.argv[1]) as client:
        while True:
            yield client.submit("slow", ["b"], id="b").id

service, generated = Service(), generator()
print(next(generated))
"""


# A thread that is stopped while it connects holds the app's lock. Not a lambda: it would keep the module, and so the destructor, alive.
LEFT_CONNECTING = """
import socket, sys, threading, time
from vramq import ClientClosed
from vramq.celery import App

class Service:
    closed = ClientClosed

    def __init__(self, silent):
        self.silent, self.app = silent, App("amqp://127.0.0.1:%d" % silent.getsockname()[1])

    def __del__(self):
        try:
            self.app.client
        except self.closed:
            print("closed")
        self.app.close()
        print("destroyed")

service = Service(socket.create_server(("127.0.0.1", 0)))
threading.Thread(target=getattr, args=(service.app, "client"), daemon=True).start()
service.silent.accept()
"""


def left_open(url):
    """A program ends although its destructors use clients, whose threads run no more then. Nobody serves "slow"."""

    def prints(program, text):
        command = [sys.executable, "-I", "-c", program, url]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
        assert (ended.returncode, ended.stdout) == (0, text), ended

    prints(LEFT_OPEN, b"b\nclosed\nclosed\ndestroyed\n")
    prints(LEFT_CONNECTING, b"closed\ndestroyed\n")


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
        for wrong in ("\ud800", vramq.Json(float("nan")), vramq.Json(b"x"), vramq.Json(1 << 64)):
            assert str(raises(vramq.InvalidJob, client.run, MODEL, ["a", wrong])).startswith("inputs[1] "), wrong
        raises(vramq.InvalidJob, client.run, MODEL, ["x" * (16 << 20)])
    raises(ValueError, vramq.Client, url, encoding="pickle")


def failures(url):
    """What cannot be published or run raises an error with what a caller needs to decide."""
    with vramq.Client(url) as client:
        failed = raises(vramq.JobFailed, client.run, MODEL, ["a", "b"], params={"unknown": 1})
        assert failed.reason == "invalid-input" and "unknown" in failed.error and failed.outputs == [None, None]
        missing = raises(vramq.Unroutable, client.run, "nobody", ["a"])
        assert missing.retryable and "nobody" in str(missing)
        # The key alone says where a job goes.
        assert f"model {MODEL!r} with key 'nobody':" in str(raises(vramq.Unroutable, client.run, MODEL, ["a"], key="nobody"))
        assert client.run(MODEL, ["a"], key=MODEL).outputs == ["a"]
        for wrong in ([], ["x" * (16 << 20)], ["x"] * 65_537, [1], [None], ["\ud800"], None, 7):
            raises(vramq.InvalidJob, client.run, MODEL, wrong)
        # Not split into characters.
        for single in ("text", b"bytes", bytearray(b"bytes"), vramq.Uri("s3://bucket/key"), {"text": 1}):
            for call in (client.run, client.submit, client.publish, client.embed):
                assert "a list" in str(raises(vramq.InvalidJob, call, MODEL, single))
        assert client.run(MODEL, (text for text in "ab")).outputs == ["a", "b"]
        # Without NumPy before a job is run, not after.
        numpy, sys.modules["numpy"] = sys.modules.get("numpy"), None
        assert "vramq[numpy]" in str(raises(ImportError, client.embed, "nobody", ["a"]))
        del sys.modules["numpy"]
        if numpy is not None:
            sys.modules["numpy"] = numpy
        if importlib.util.find_spec("numpy") is not None:
            assert isinstance(raises(vramq.NoEmbedding, client.run(MODEL, ["a"]).numpy), TypeError)
        for model in ("no such name", "", 7, None):
            raises(vramq.InvalidJob, client.run, model, ["a"])
        for half in ("a\ud800", vramq.Json({"x": ["\ud800"]}), vramq.Json({"\udc00": 1}), vramq.Uri("s3://\ud800"), vramq.Json("\ud83d\ude00")):
            assert "inputs[1] is not Unicode" in str(raises(vramq.InvalidJob, client.run, MODEL, ["a", half])), half
        assert "params is not Unicode" in str(raises(vramq.InvalidJob, client.run, MODEL, ["a"], params={"x": "\ud800"}))
        for wrong in (float("nan"), [float("inf")], {"x": -float("inf")}):
            refusal = str(raises(vramq.InvalidJob, client.run, MODEL, ["a", vramq.Json(wrong)]))
            assert refusal.startswith("inputs[1] ") and "not JSON compliant" in refusal, refusal
        itself = {}
        itself["itself"] = itself
        for name, values in {
            "id": ["", "x" * 256, "\ud800", "a\ufffd"],
            "key": ["", "no such name", "~bulk.x", 7],
            "batch_hint": [0, -1, 1 << 32, "4", 1.5],
            "priority": [300, -1, "high", 2.5],
            "expiration": [-1, float("nan"), float("inf"), 1 << 32, "soon", [], datetime.datetime.now() - datetime.timedelta(seconds=9)],
            "traceparent": [7, "\ud800"],
            "app_id": [7, "", "x" * 256, "\ud800"],
            "timeout": [-1, float("nan"), "60", True, datetime.timedelta(minutes=1)],
            "headers": [
                7, "ab", ["a"], {7: "a"}, {"": "a"}, {"\ud800": 1}, {"x" * 129: "a"}, {"x": object()}, {"x": 1 << 64}, {"x": "\ud800"},
                {"x": "y" * (121 << 10)}, {"x": {"y": object()}}, {"x": {7: 7}}, {"x": itself}, {"x": [[object()]]}, {"x": {"": 1}},
                {"vramq-model-revision": "é" * 1024 + "x"}, {"vramq-model-revision": bytearray(2049)},
            ],
            "params": [7, "ab", {"x": object()}, {"x": float("nan")}, {"x": itself}],
        }.items():
            for value in values:
                raises(vramq.InvalidJob, client.run, MODEL, ["a"], **{name: value})
                raises(vramq.InvalidJob, client.publish, MODEL, ["a"], **{name: value})
        for name, value, why in (
            ("key", "~bulk.x", "key is '~bulk.x'"), ("params", {"x": object()}, "params has no form in application/json"),
            ("headers", {"x": [{"y": object()}]}, "headers.x[0].y has no form in AMQP"),
            # The library would cut the name, and two such names would be one.
            ("headers", {"x": {"y" * 129: 1}}, f"the name '{'y' * 128}' in headers.x must have 1 to 128 bytes"),
        ):
            refusal = str(raises(vramq.InvalidJob, client.run, MODEL, ["a"], **{name: value}))
            assert refusal.startswith(why), refusal
        # The library would round these: a time by a minute.
        for value in (1790000000.123, 0.1, 2.0 ** 24 + 1, float("nan"), -float("inf"), 1e300):
            for headers, where in (({"x": value}, "headers.x"), ({"x": [{"y": value}]}, "headers.x[0].y")):
                refusal = str(raises(vramq.InvalidJob, client.run, MODEL, ["a"], headers=headers))
                assert refusal.startswith(f"{where} is {value!r}, ") and "32 bits" in refusal, refusal
        # It would send other numbers of some, and a time without its fraction.
        for value in (decimal.Decimal("1E-300"), datetime.datetime(2026, 1, 1, microsecond=1, tzinfo=datetime.timezone.utc)):
            refusal = str(raises(vramq.InvalidJob, client.run, MODEL, ["a"], headers={"x": value}))
            assert refusal.startswith("headers.x "), refusal
        raises(vramq.InvalidJob, client.run, MODEL, ["a"], on_progress=7)
        raises(ValueError, client.embed, MODEL, ["a"], job_items=0)
        for reply_to in ("", "x" * 256, 7):
            raises(vramq.InvalidJob, client.publish, MODEL, ["a"], reply_to=reply_to)
        in_an_hour = datetime.datetime.now() + datetime.timedelta(hours=1)
        headers = {"x": ["y", {"z": None, "w": -(2.0 ** 100)}], "ñ": 1.5}
        for expiration in (60, 60.5, datetime.timedelta(minutes=1), in_an_hour):
            client.run(MODEL, ["a"], priority=255, expiration=expiration, batch_hint=1, headers=headers)
        assert client.run(MODEL, ["still here"]).outputs == ["still here"]
        assert client.reconnects == 0, "what cannot be published has cost a connection"
    # Not one of them shows the password.
    for address, retryable in ((url.replace("guest:guest", "guest:hunter2"), False), ("amqp://guest:hunter2@127.0.0.1:1/%2f", True)):
        refused = raises(vramq.ConnectError, vramq.Client, address)
        assert refused.retryable == retryable and "hunter2" not in str(refused), refused
    raises(vramq.ConnectError, vramq.Client, "hunter2")
    # Behind the last slash is the virtual host. The broker says what it is.
    missing = raises(vramq.ConnectError, vramq.Client, url.rpartition("/")[0] + "/no-such-host")
    assert not missing.retryable and "vhost" in str(missing) and "no-such-host" in str(missing), missing


def refusals(url):
    """When the broker closes a connection, its code says whether it refuses the client, or goes away or is down in part."""
    refuses, goes_away = (403, "ACCESS_REFUSED - why"), (320, "CONNECTION_FORCED - why")
    is_down = 541, "INTERNAL_ERROR - access to vhost '/' refused for user 'guest': vhost '/' is down"

    async def run():
        for method, answer, retryable in (
            (ClosesAt.START_OK, refuses, False), (ClosesAt.START_OK, goes_away, True), (ClosesAt.OPEN, (530, "NOT_ALLOWED - why"), False),
            (ClosesAt.OPEN, is_down, True), (ClosesAt.OPEN, goes_away, True), (ClosesAt.CHANNEL_OPEN, is_down, True),
            (ClosesAt.CHANNEL_OPEN, goes_away, True), (ClosesAt.QUEUE_DECLARE, refuses, False),
            # The reply queue's node is down.
            (ClosesAt.QUEUE_DECLARE, (404, "NOT_FOUND - why"), True),
        ):
            way = ClosesAt(method, *answer)
            error = await raises_async(vramq.ConnectError, vramq.AsyncClient(await way.leads_to(url)).connect())
            assert error.retryable == retryable, (method, error)
            # aiormq 6 does not repeat what ends an open connection.
            assert method == ClosesAt.CHANNEL_OPEN or answer[1] in str(error), (method, error)
            assert ("refuses" in str(error).partition(": ")[0]) == (not retryable), error
        # A client that has ended says whether another one may succeed.
        for answer in (refuses, goes_away):
            way = ClosesAt(None, *answer)
            client = await vramq.AsyncClient(await way.leads_to(url), reconnect_for=0.5).connect()
            way.method = ClosesAt.START_OK
            way.cut()
            for _ in range(2):
                error = await raises_async(vramq.Disconnected, client.submit(MODEL, ["a"]))
                assert error.retryable == (answer is goes_away) and answer[1] in str(error), error
            await client.close()
        # Neither an operator nor a refused channel is the fault of the jobs in flight: none goes alone for that.
        worker = await answering(url, "served", lambda _, inputs: [({}, [{"json": text} for text in inputs])])
        for answer in (goes_away, (530, "NOT_ALLOWED - number of channels")):
            way = ClosesAt(None, *answer)
            async with vramq.AsyncClient(await way.leads_to(url)) as client:
                client._publisher._open_alone = None
                way.method = ClosesAt.PUBLISH
                job = asyncio.ensure_future(client.run("served", ["a"], timeout=60))
                while client.reconnects < 3 and not job.done():
                    await asyncio.sleep(0.05)
                way.method = None
                assert (await job).outputs == ["a"]
        await worker.close()

    asyncio.run(run())


class Way:
    """A way to the broker. Each kind leads connections in its own manner."""

    async def leads_to(self, url):
        """The URL of this way."""
        broker = urllib.parse.urlsplit(url)
        self.broker = broker.hostname, broker.port
        self.server = await asyncio.start_server(self.lead, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        return url.replace(f"{broker.hostname}:{broker.port}", f"127.0.0.1:{port}")


class ClosesAt(Way):
    """A way to the broker that answers a method of the client's itself: by closing the connection or the channel, with this code and text."""

    START_OK, OPEN, CHANNEL_OPEN, QUEUE_DECLARE = b"\0\x0a\0\x0b", b"\0\x0a\0\x28", b"\0\x14\0\x0a", b"\0\x32\0\x0a"
    CLOSE, CLOSE_OK, CHANNEL_CLOSE, PUBLISH = b"\0\x0a\0\x32", b"\0\x0a\0\x33", b"\0\x14\0\x28", b"\0\x3c\0\x28"

    def __init__(self, method, code, text):
        self.method, self.writers = method, []
        self.closing = code.to_bytes(2, "big") + bytes([len(text)]) + text.encode() + bytes(4)

    def cut(self):
        for writer in self.writers:
            writer.close()

    async def lead(self, reader, writer):
        self.writers.append(writer)
        from_broker, to_broker = await asyncio.open_connection(*self.broker)
        downwards = asyncio.ensure_future(CutAtDeclareOk.copy(from_broker, writer))
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            to_broker.write(await reader.readexactly(8))
            has_answered = False
            while True:
                head = await reader.readexactly(7)
                frame = head + await reader.readexactly(int.from_bytes(head[3:], "big") + 1)
                method = frame[7:11]
                if method == self.method:
                    has_answered = True
                    is_channels = method == self.QUEUE_DECLARE
                    closing = (self.CHANNEL_CLOSE if is_channels else self.CLOSE) + self.closing
                    self.answer(writer, head[1:3] if is_channels else b"\0\0", closing)
                elif has_answered and method == self.CLOSE:
                    self.answer(writer, b"\0\0", self.CLOSE_OK)
                elif not has_answered:
                    to_broker.write(frame)
        downwards.cancel()
        writer.close()
        to_broker.close()

    @staticmethod
    def answer(writer, channel, arguments):
        writer.write(b"\1" + channel + len(arguments).to_bytes(4, "big") + arguments + b"\xce")


def refused(url):
    """Jobs over which the broker ends a connection or a channel, as far as the checks before do not know them: each fails, with what the
    broker says, and no other job of the client does."""
    from vramq import _message

    async def run():
        async with vramq.AsyncClient(url) as client:
            goes_on, answered = True, 0

            async def lane():
                nonlocal answered
                while goes_on:
                    assert (await client.run(MODEL, ["a"], timeout=60)).outputs == ["a"]
                    answered += 1

            lanes = [asyncio.ensure_future(lane()) for _ in range(8)]
            unchecked = _message.HEADER_BYTES_MAX, _message._expiration
            _message.HEADER_BYTES_MAX, _message._expiration = 1 << 30, lambda value: value
            # More than a frame; and a time that ends the channel.
            for wrong in ({"headers": {"x": "y" * 200_000}}, {"expiration": -1}):
                before = client.reconnects
                await raises_async(vramq.PublishRefused, client.run(MODEL, ["a"], timeout=60, **wrong))
                assert client.reconnects - before <= 2, client.reconnects
                both = await asyncio.gather(*(client.run(MODEL, ["a"], timeout=60, **wrong) for _ in range(2)), return_exceptions=True)
                assert [type(error) for error in both] == [vramq.PublishRefused] * 2, both
                seen = answered
                while answered < seen + 100:
                    await asyncio.wait(lanes, timeout=0.1)
                    assert not any(lane.done() for lane in lanes), lanes
            _message.HEADER_BYTES_MAX, _message._expiration = unchecked
            goes_on = False
            await asyncio.gather(*lanes)

            # A connection for one job is closed also if the job ends, and with it the attempt, just when this begins.
            session = await client._connector.open_alone()
            dropping = asyncio.ensure_future(session.drop())
            await asyncio.sleep(0)
            dropping.cancel()
            await raises_async(asyncio.CancelledError, dropping)
            while not all(connection.is_closed for connection in session.connections):
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(run(), 240))


def forced(url):
    """The broker is short of memory, and an operator closes its connections again and again: no job is to blame, and none is lost. The
    test does so after each line that is printed; after the last it ends the shortage."""

    async def run():
        async with vramq.AsyncClient(url) as client:
            assert (await client.run(MODEL, ["before"])).outputs == ["before"]
            print("connected", flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
            jobs = [asyncio.ensure_future(client.run(MODEL, [f"{n}"], timeout=240)) for n in range(20)]
            for times in range(FORCED):
                # Also jobs that are published alone, after a second, wait for their confirm then.
                await asyncio.sleep(3)
                print("waiting", flush=True)
                while client.reconnects <= times:
                    await asyncio.sleep(0.1)
            print("enough", flush=True)
            assert [(await job).outputs for job in jobs] == [[f"{n}"] for n in range(20)]

    asyncio.run(run())


def slots(url):
    """Who stops waiting gives the job's slot back; and the time limit holds while a job waits for its slot. Nobody serves "slow"."""

    async def run():
        client = await vramq.AsyncClient(url, jobs_in_flight=2).connect()
        first = await client.submit("slow", ["a"])
        running = asyncio.ensure_future(client.run("slow", ["a"]))
        await asyncio.sleep(0)
        late = await raises_async(vramq.PublishTimeout, client.submit("slow", ["a"], timeout=0.3))
        assert "2 jobs are in flight, and this one had no slot" in str(late), late
        await raises_async(vramq.PublishTimeout, client.publish("slow", ["a"], timeout=0.3))
        running.cancel()
        await raises_async(asyncio.CancelledError, running)
        second = await client.submit("slow", ["a"], timeout=60)
        # One that is cancelled while it waits leaves its turn to the next.
        waiting = [asyncio.ensure_future(client.submit("slow", [f"{n}"])) for n in range(3)]
        await asyncio.wait(waiting, timeout=0.3)
        waiting[0].cancel()
        first.forget()
        await raises_async(vramq.Forgotten, first.result())
        third = await waiting[1]
        embedding = asyncio.ensure_future(client.embed("slow", ["a"] * 100))
        second.forget()
        fourth = await waiting[2]
        for job in (third, fourth):
            job.forget()
        await asyncio.wait({embedding}, timeout=0.3)
        embedding.cancel()
        await raises_async(asyncio.CancelledError, embedding)
        jobs = [await client.submit("slow", ["a"], timeout=60) for _ in range(2)]
        waiting = asyncio.ensure_future(client.submit("slow", ["a"]))
        await asyncio.wait({waiting}, timeout=0.3)
        await client.close()
        for ended in (waiting, jobs[0].result(), client.submit("slow", ["a"]), client.publish("slow", ["a"]), client.connect()):
            await raises_async(vramq.ClientClosed, ended)
        raises(ValueError, vramq.AsyncClient, url, jobs_in_flight=0)
        # Of a corpus only as many jobs are made as there are slots: the time limits of the others do not run yet.
        async with vramq.AsyncClient(url, jobs_in_flight=1) as client:
            embedding = asyncio.ensure_future(client.embed("slow", ["a"] * 3, job_items=1))
            while not client._pending:
                assert not embedding.done(), embedding
                await asyncio.sleep(0.02)
            await asyncio.wait({embedding}, timeout=0.3)
            assert len(client._pending) == 1, client._pending
            embedding.cancel()
            await raises_async(asyncio.CancelledError, embedding)
            assert not client._pending, client._pending

    asyncio.run(run())


def withdrawn(url):
    """Callers that give up: jobs without an answer are withdrawn. The worker answers the first job, and holds the others."""

    async def run():
        async with vramq.AsyncClient(url) as client:
            assert (await client.run(MODEL, ["answered"])).outputs == ["answered"]
            begun = asyncio.get_running_loop().create_future()
            unanswered = await client.submit(MODEL, ["closed"], on_progress=lambda *report: begun.done() or begun.set_result(report))
            # From here on its pass holds the device.
            assert await asyncio.wait_for(begun, 60) == (0, 0, "")
            waiting = asyncio.ensure_future(client.run(MODEL, ["cancelled"]))
            taken_back = await client.submit(MODEL, ["taken back"])
            await raises_async(TimeoutError, unanswered.result(timeout=0.1))
            await raises_async((vramq.JobTimeout, vramq.PublishTimeout), client.run(MODEL, ["late"], timeout=2))
            # It was published before the one that is late.
            waiting.cancel()
            await raises_async(asyncio.CancelledError, waiting)
            taken_back.withdraw()
            await raises_async(vramq.Withdrawn, taken_back.result())
            taken_back.withdraw()
            assert not unanswered.done
        await raises_async(vramq.ClientClosed, unanswered.result())

    asyncio.run(run())
    with vramq.Client(url) as client:
        closed, taken_back = client.submit(MODEL, ["closed"]), client.submit(MODEL, ["taken back"])
        taken_back.withdraw()
        assert taken_back.done and isinstance(raises(vramq.JobError, taken_back.result), vramq.Withdrawn)
    raises(vramq.ClientClosed, closed.result)
    closed.withdraw()


def withdrawn_once_permitted(url):
    """The broker refuses the withdrawal, until it does not. The worker answers the first job, and holds the others."""
    handler, warnings = logging.Handler(), []
    handler.emit = lambda record: warnings.append((record.levelname, record.getMessage()))
    logging.getLogger("vramq").addHandler(handler)

    async def run():
        async with vramq.AsyncClient(url) as client:
            assert (await client.run(MODEL, ["answered"])).outputs == ["answered"]
            begun = asyncio.get_running_loop().create_future()
            runs = await client.submit(MODEL, ["runs"], on_progress=lambda *report: begun.done() or begun.set_result(report))
            assert await asyncio.wait_for(begun, 60) == (0, 0, "")
            waits = await client.submit(MODEL, ["next"])
            (await client.submit(MODEL, ["withdrawn"])).withdraw()
            assert (await runs.result()).outputs == ["runs"] and (await waits.result()).outputs == ["next"]
            assert client.reconnects == 0

    asyncio.run(run())
    [(level, text)] = warnings
    assert level == "WARNING" and "vramq.withdrawals" in text and "ACCESS_REFUSED" in text, text


def unsent(url):
    """Jobs of callers that give up before the broker has them: there is nothing to withdraw. It is withdrawn if the broker has just
    confirmed it."""
    import aio_pika
    from vramq import _channels

    async def late(client):
        """Jobs whose time is over when their turn has come, or a little later. Returns those that were withdrawn or answered."""
        withdrawn, add = set(), client._withdrawals.add
        client._withdrawals.add = lambda job_id, secret: withdrawn.add(job_id) or add(job_id, secret)
        unconfirmed_max, _channels.UNCONFIRMED_MAX = _channels.UNCONFIRMED_MAX, 1
        for n in range(12):
            jobs = [asyncio.ensure_future(client.run(MODEL, ["a"], id=f"{name}-{n}")) for name in ("before", "late")]
            channel = client._session.jobs._by_key[MODEL]
            while not channel.waiting:
                await asyncio.sleep(0)
            pending = client._jobs[f"late-{n}"]
            while channel.waiting:
                await asyncio.sleep(0)
            for _ in range(n):
                await asyncio.sleep(0)
            pending._expire()
            assert (await jobs[0]).outputs == ["a"]
            await asyncio.wait(jobs)
            if jobs[1].exception() is None:
                withdrawn.add(pending.id)
        _channels.UNCONFIRMED_MAX, client._withdrawals.add = unconfirmed_max, add
        return withdrawn

    async def at_the_confirm(client, key):
        """Jobs whose callers are cancelled when the confirm has come, or a little later. Returns those that were not withdrawn."""
        publish, left = aio_pika.Exchange.publish, []
        confirmed = None

        async def publish_and_tell(*args, **options):
            await publish(*args, **options)
            if options["routing_key"] == key:
                confirmed.set_result(None)

        aio_pika.Exchange.publish = publish_and_tell
        for n in range(8):
            confirmed = asyncio.get_running_loop().create_future()
            cancelled = asyncio.ensure_future(client.run(MODEL, ["a"], key=key, id=f"confirmed-{n}"))
            await confirmed
            for _ in range(n):
                await asyncio.sleep(0)
            cancelled.cancel()
            await raises_async(asyncio.CancelledError, cancelled)
            if f"confirmed-{n}" not in client._withdrawals._open:
                left.append(n)
        aio_pika.Exchange.publish = publish
        return left

    async def run():
        seen = set()

        async def see(message):
            seen.add(message.message_id)

        connection = await aio_pika.connect(url)
        channel = await connection.channel()
        queue = await channel.declare_queue(exclusive=True)
        for key in (MODEL, "seen-only"):
            await queue.bind("vramq.jobs", routing_key=key)
        await queue.consume(see, no_ack=True)
        async with vramq.AsyncClient(url) as client:
            runs = [asyncio.ensure_future(client.run(MODEL, ["a"], id=f"{n}")) for n in range(500)]
            await asyncio.sleep(0)
            while not client._jobs["10"].may_have_sent():
                await asyncio.sleep(0)
            for one in runs:
                one.cancel()
            await asyncio.wait(runs)
            withdrawn = set(client._withdrawals._open)
            # The broker has it after all that were sent before.
            await client.run(MODEL, ["b"], id="the last")
            while "the last" not in seen:
                await asyncio.sleep(0.05)
            assert 10 < len(seen) < 500, f"{len(seen)} were sent, and this shows nothing"
            assert withdrawn <= seen, f"{len(withdrawn - seen)} of {len(withdrawn)} withdrawn jobs were not sent"
            withdrawn = await late(client)
            await client.run(MODEL, ["b"], id="after those")
            while "after those" not in seen:
                await asyncio.sleep(0.05)
            sent = {job_id for job_id in seen if job_id.startswith("late")}
            assert withdrawn == sent and 0 < len(sent) < 12, (withdrawn, sent)
            left = await at_the_confirm(client, "seen-only")
            assert not left, f"not withdrawn, cancelled so many steps after the confirm: {left}"
        await connection.close()

    asyncio.run(run())


def silent(url):
    """The queue of "slow" confirms nothing, until the line is printed: jobs for other models go on. Of 903 jobs for it 900 are sent."""
    from vramq import _session

    async def run():
        async with vramq.AsyncClient(url) as client:
            submitted = [asyncio.ensure_future(client.submit("slow", ["a"], id=f"{n}")) for n in range(900)]
            for job in submitted:
                # If this fails, asyncio is not to write a traceback for each.
                job.add_done_callback(lambda job: job.cancelled() or job.exception())
            # The client has sent all that it sends while this goes on: more would block its connection.
            for n in range(50):
                assert (await client.run(MODEL, [f"{n}"], timeout=30)).outputs == [f"{n}"]
            assert not any(job.done() for job in submitted)
            # Jobs whose turn has not come are not sent any more; one that was sent is withdrawn.
            await raises_async(vramq.PublishTimeout, client.submit("slow", ["a"], timeout=0.1))
            for job in (submitted[0], submitted[-1]):
                job.cancel()
                await raises_async(asyncio.CancelledError, job)
            withdrawn = dict(client._withdrawals._open)
            assert list(withdrawn) == ["0"], withdrawn
            # That a job of the same id was sent before is nothing to a job that waits.
            await raises_async(vramq.PublishTimeout, client.submit("slow", ["a"], id="0", timeout=0.1))
            assert client._withdrawals._open == withdrawn, "a job that was not sent was withdrawn"
            async with crowded() as waiting:
                assert not any(job.done() for job in submitted[1:-1])
                print("answered", flush=True)
                await asyncio.gather(*submitted[1:-1], waiting)
            assert client.reconnects == 0

    @contextlib.asynccontextmanager
    async def crowded():
        """With all channels busy a job waits for one, and is not sent if it ends before. Yields a job that is confirmed with the others."""
        channels_max, _session.CHANNELS_MAX = _session.CHANNELS_MAX, 1
        async with vramq.AsyncClient(url) as client:
            _session.CHANNELS_MAX = channels_max
            silent = asyncio.ensure_future(client.submit("slow", ["a"], id="silent"))
            await asyncio.sleep(0)
            while not client._jobs["silent"].may_have_sent():
                await asyncio.sleep(0.01)
            await raises_async(vramq.PublishTimeout, client.submit(MODEL, ["a"], timeout=0.1))
            waiting = [asyncio.ensure_future(client.run(MODEL, [f"{n}"])) for n in range(2)]
            await asyncio.wait(waiting, timeout=0.1)
            waiting[0].cancel()
            await raises_async(asyncio.CancelledError, waiting[0])
            assert not client._withdrawals._open, "jobs without a channel were sent"
            yield silent
            assert (await waiting[1]).outputs == ["1"] and client.reconnects == 0

    asyncio.run(run())


def many_models(url, limited, without):
    """More models than a client has channels; `limited` is the URL of a user who may have four channels, `without` that of one who may have
    one, which leaves none for jobs."""
    from vramq import _session

    models = [f"model-{n}" for n in range(70)]

    async def run():
        worker = await answering(url, models[0], lambda _, inputs: [({}, [{"json": text} for text in inputs])], *models[1:])
        async with vramq.AsyncClient(url) as client:
            for _ in range(2):
                jobs = [client.run(model, [model], timeout=60) for model in models for _ in range(10)]
                assert [result.outputs for result in await asyncio.gather(*jobs)] == [[model] for model in models for _ in range(10)]
            assert client.reconnects == 0 and client._session.jobs.count == 64
        async with vramq.AsyncClient(limited) as client:
            for model in models[:12] * 3:
                assert (await client.run(model, [model], timeout=60)).outputs == [model]
            # Each time the broker refuses a channel, half as many have to be enough.
            assert client.reconnects <= 6, client.reconnects
            # For ten minutes: then the client asks for more again, with its next session.
            client._connector._limited_until, before = 0, client.reconnects
            client._session.lose("test")
            for model in models[:12]:
                assert (await client.run(model, [model], timeout=60)).outputs == [model]
            assert client.reconnects > before + 1, (client.reconnects, before)
        refused = await raises_async(vramq.ConnectError, vramq.AsyncClient(without).connect())
        assert not refused.retryable and "number of channels" in str(refused), refused
        await broken()
        await worker.close()

    async def broken():
        """Whatever is raised when a channel is opened or closed, the session is lost, and the next one has the job."""
        async with vramq.AsyncClient(url) as client:
            assert (await client.run(models[0], ["a"], timeout=60)).outputs == ["a"]
            # A number that the first channel has.
            free_number, _session._free_number = _session._free_number, lambda _: 1
            assert (await client.run(models[1], ["a"], timeout=60)).outputs == ["a"] and client.reconnects == 1
            _session._free_number = free_number
            jobs = client._session.jobs
            jobs._channels_max, jobs._by_key[models[1]].opened._channel = 1, None
            assert (await client.run(models[2], ["a"], timeout=60)).outputs == ["a"] and client.reconnects == 2

    asyncio.run(run())


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
        late = await raises_async(vramq.JobTimeout, client.run(MODEL, ["a", "b"], timeout=20))
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

    # The program has no logging of its own, and sees nothing of what goes on by itself.
    with contextlib.redirect_stderr(io.StringIO()) as written:
        asyncio.run(asyncio.wait_for(run(), 240))
    assert written.getvalue() == "", written.getvalue()


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
        # Also if the connection is lost between the queue's new declaration and its confirmation: the next one finds the queue.
        cut = CutAtDeclareOk()
        async with vramq.AsyncClient(await cut.leads_to(url)) as client:
            job = await client.submit("slow", ["a"])
            cut.is_armed = True
            connection = await aio_pika.connect(url)
            await (await connection.channel()).queue_delete(client.reply_queue)
            await connection.close()
            await raises_async(vramq.ReplyQueueLost, job.result(timeout=60))
            assert not cut.is_armed, "it was not cut"

    asyncio.run(run())


class CutAtDeclareOk(Way):
    """A way to the broker that loses a connection when the broker confirms the declaration of a queue, once, when it is armed."""

    DECLARE_OK = b"\0\x32\0\x0b"

    def __init__(self):
        self.is_armed = False

    async def lead(self, reader, writer):
        from_broker, to_broker = await asyncio.open_connection(*self.broker)
        upwards = asyncio.ensure_future(self.copy(reader, to_broker))
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await from_broker.readexactly(7)
                frame = head + await from_broker.readexactly(int.from_bytes(head[3:], "big") + 1)
                if self.is_armed and head[0] == 1 and frame[7:11] == self.DECLARE_OK:
                    self.is_armed = False
                    break
                writer.write(frame)
        upwards.cancel()
        writer.close()
        to_broker.close()

    @staticmethod
    async def copy(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()


def gives_up(url):
    """With a limit for reconnecting, what is in flight fails when it has passed. The broker goes away after the printed line."""

    async def run():
        client = await vramq.AsyncClient(url, reconnect_for=0.5).connect()
        job = await client.submit("slow", ["a"])
        print("submitted", flush=True)
        for work in (job.result(timeout=60), client.submit(MODEL, ["a"])):
            assert (await raises_async(vramq.Disconnected, work)).retryable, "a new client may succeed"
        await client.close()

    asyncio.run(run())


def closed_while_away(url):
    """What waits for a broker that is away ends when the client is closed. The broker goes away after the printed line."""

    async def run():
        client = await vramq.AsyncClient(url).connect()
        job = await client.submit("slow", ["a"])
        session = client._session
        print("submitted", flush=True)
        await session.lost
        waiting = [asyncio.ensure_future(client.submit("slow", ["a"])), asyncio.ensure_future(client.publish("slow", ["a"]))]
        await raises_async(vramq.PublishTimeout, client.submit("slow", ["a"], timeout=0.3))
        await client.close()
        for ended in (job.result(), *waiting):
            await raises_async(vramq.ClientClosed, ended)

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
    assert echo.AsyncResult(result.id) is result and echo.AsyncResult(task_id=result.id) is result
    raises(LookupError, echo.AsyncResult, "of another process")
    # A caller may keep nothing but the id, until the result is taken.
    only_id = echo.delay(["a"]).id
    gc.collect()
    assert app.AsyncResult(only_id).get(timeout=60) == ["a"]
    gc.collect()
    raises(LookupError, app.AsyncResult, only_id)
    dropped = echo.delay(["a"]).id
    app.AsyncResult(dropped).forget()
    gc.collect()
    raises(LookupError, app.AsyncResult, dropped)
    untaken = [echo.delay(["a"]).id for _ in range(vramq.celery.RESULTS_MAX + 1)]
    gc.collect()
    raises(LookupError, app.AsyncResult, untaken[0])
    assert app.AsyncResult(untaken[1]).get(timeout=60) == ["a"]
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
    revoked = app.task("slow").delay("a")
    revoked.revoke(terminate=True)
    assert revoked.state == "REVOKED" and revoked.ready() and not revoked.failed()
    raises(vramq.Withdrawn, revoked.get)
    raises(LookupError, app.AsyncResult, "of another process")
    # A child of a fork begins with nothing of the parent's, and costs the parent nothing.
    assert in_child(celery_in_child, app, echo, slow.id) == 0
    assert app.client.reconnects == 0 and echo("alone") == "alone"
    raises(vramq.InvalidJob, app.task(MODEL, inputs=lambda text: text).delay, "text")
    raises(vramq.InvalidJob, echo.apply_async, (["x"],), expires=-1)
    # Without a zone a time is of UTC, wherever the program runs.
    zone = os.environ.get("TZ")
    for elsewhere in ("EAST-9", "WEST5"):
        os.environ["TZ"] = elsewhere
        time.tzset()
        now = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
        assert echo.apply_async((["x"],), expires=now + datetime.timedelta(seconds=300)).get(timeout=60) == ["x"]
        raises(vramq.InvalidJob, echo.apply_async, (["x"],), expires=now - datetime.timedelta(seconds=300))
    os.environ.pop("TZ") if zone is None else os.environ.update(TZ=zone)
    time.tzset()
    # Celery's own order of arguments, options that wrappers pass on as None, and tasks that are called by name.
    assert echo.apply_async((["x"],), None, "third", countdown=None, queue=None).id == "third"
    assert app.send_task(MODEL, [["x"]], priority=1).get(timeout=60, interval=0.1, disable_sync_subtasks=False) == ["x"]
    for option in ("countdown", "eta", "queue", "link", "ignore_result"):
        assert option in str(raises(TypeError, echo.apply_async, (["a"],), **{option: 5}))
    assert "callback" in str(raises(TypeError, echo.delay("a").get, callback=print))
    raises(TypeError, echo.delay, "a", "b")
    for arguments in ("text", {"a": 1}):
        raises(TypeError, echo.apply_async, arguments)
    raises(TypeError, echo.apply_async)
    assert "decorator" in str(raises(TypeError, app.task, celery))
    for name in ("s", "si", "signature", "map", "chunks", "retry", "apply"):
        assert "docs/celery.md" in str(raises(AttributeError, getattr, echo, name))
    for name, instead in (("conf", "options of App"), ("control", "revoke"), ("tasks", "app.task"), ("add_periodic_task", "beat")):
        said = str(raises(AttributeError, getattr, app, name))
        assert instead in said and "docs/celery.md" in said, said
    said = str(raises(TypeError, vramq.celery.AsyncResult, result.id, app=app))
    assert f"app.AsyncResult({result.id!r})" in said, said
    assert not hasattr(app, "unknown") and not hasattr(echo, "request") and result.info == ["a", "b"]
    app.close()


def celery_in_child(app, echo, of_the_parent):
    raises(LookupError, app.AsyncResult, of_the_parent)
    assert echo("alone") == "alone"
    app.close()


def processes(_):
    """Every error comes whole out of a pool of processes."""
    errors = [
        vramq.ConnectError("cannot reach it", True), vramq.Disconnected("refused", False), vramq.InvalidJob("no inputs"),
        vramq.JobFailed("expired", "too late", [None, "b"]),
        vramq.JobTimeout(2.5, 1, 3), vramq.DownloadError("store-unavailable", "busy"), vramq.QueueFull("full"),
        vramq.OutOfMemory("no room", asked=7), vramq.InvalidInput("no picture", 3),
    ]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        for error in errors:
            came = raises(type(error), pool.apply_async(_raise, (error,)).get, timeout=60)
            assert (type(came), str(came), vars(came)) == (type(error), str(error), vars(error)), came
    assert raises(vramq.JobTimeout, _raise, errors[4]).retryable is False


def _raise(error):
    raise error


def types(program):
    """What type checkers read is what there is. `program` uses the package as it is meant to be used."""
    import ast
    import subprocess
    import tempfile

    stub = os.path.join(os.path.dirname(vramq.__file__), "__init__.pyi")
    with open(stub) as file:
        classes = {node.name: node for node in ast.parse(file.read()).body if isinstance(node, ast.ClassDef)}

    def arguments(name):
        return {item.name: ast.unparse(item.args) for item in classes[name].body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}

    # The blocking client passes its options on, so what is there does not show them.
    for method in ("__init__", "submit", "run", "embed", "publish"):
        assert arguments("Client")[method] == arguments("AsyncClient")[method], method
    with tempfile.TemporaryDirectory() as folder:
        config = os.path.join(folder, "mypy.ini")
        with open(config, "w") as file:
            file.write("[mypy]\nignore_missing_imports = true\n")
        for words in (
            ["mypy.stubtest", "--mypy-config-file", config, "vramq"],
            ["mypy", "--config-file", config, "--cache-dir", os.path.join(folder, "cache"), "--strict", program],
        ):
            ended = subprocess.run([sys.executable, "-I", "-m", *words], capture_output=True, text=True, cwd=folder)
            assert ended.returncode == 0, ended.stdout + ended.stderr


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

    # A report that cannot be read is no reason to give its job up.
    for body in (b'{"item": null, "fraction": 0.5}', b'{"item": 0, "fraction": "half"}', b"[", b"7"):
        assert _wire.decode_reply("progress", "application/json", {}, body) is None, body

    headers = {"offset": 2, "items": 8, "items-total": 10}
    for content_type, extension in (("application/json", "json"), ("application/msgpack", "msgpack")):
        part = _wire.decode_reply("part", content_type, headers, frozen(f"outputs.{extension}"))
        numbers, as_bytes, halves, halves_as_bytes, none = part.outputs[:5]
        assert numbers.values == as_bytes.values and list(numbers.values)[:2] == [0.0, -1.5] and numbers.dtype == "f32"
        assert halves.values == halves_as_bytes.values and list(halves.values)[-1] == 65504.0 and halves.dtype == "f16"
        assert list(none.values) == [] and part.outputs[5] == {"label": "x", "scores": [0.25, None, "y", {}]}
        assert (part.outputs[6].data, part.outputs[6].media_type) == (b"\x89PNG\xff", "image/png")
        assert part.outputs[7].uri == "s3://bucket/key"
        part = _wire.decode_reply("done", content_type, {**headers, "items": 2}, frozen(f"sparse.{extension}"))
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
    for name in ("link", "way-out/got", "pipe", "folder", "%2e%2e/outside/got", "..%2foutside", "..;/outside/got"):
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
        "100.64.0.1", "192.0.2.1", "198.18.0.1", "168.63.129.16", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1",
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
    assert set(vramq.__all__) <= set(dir(vramq))
    assert "vramq[client]" in str(raises(ImportError, getattr, vramq, "Client"))
    from vramq import _wire

    sys.modules["msgpack"] = None
    assert "vramq[msgpack]" in str(raises(ImportError, _wire.check_encoding, "msgpack"))


if __name__ == "__main__":
    scenario, *arguments = sys.argv[1:]
    assert "site-packages" in vramq.__file__, f"not the installed package: {vramq.__file__}"
    globals()[scenario](*arguments)
