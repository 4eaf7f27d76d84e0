#!/usr/bin/env python3
"""Upgrade from the version before this one as docs/upgrading.md says, while a foreign client publishes jobs.

    tests/upgrade/run.py OLD NEW SOURCE QUEUE_TYPE FOLDER

OLD and NEW are folders with vramq-worker, vramq and vramq-gateway. SOURCE is the old version's tree. QUEUE_TYPE is quorum or classic.
FOLDER gets the logs, and is emptied first. The broker is that of scripts/with-rabbitmq. Needs pika.
"""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

# tests/deployed.py
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from deployed import MODEL, ROOT, Failed, ensure, opened, run, tell, until
from programs import FOLDERS, Broker, Version
from publisher import VECTORS, Publisher

# A pass takes about 1 KiB a token: four of the short texts fit, eight of them do not, and neither does a long one.
ABOVE = 384 << 10
SHORT, LONG = "the " * 60, "the " * 500
GONE = "vramq.replies.client.gone"
# Keys of the documentation's example that exclude one another, or name files.
LEFT_OUT = {"ca", "hub", "uuid", "keys", "tls_certificate", "tls_key"}
WIDTH = len(VECTORS[MODEL]["a"])
PROGRAM = """
import sys
sys.path.insert(0, {sdk!r})
import vramq

class Echo(vramq.Model):
    def run(self, items, params):
        return [item.text for item in items]

vramq.serve(Echo)
"""


def main():
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    upgrade = Upgrade(*sys.argv[1:])
    try:
        run(CHECKS, upgrade)
    except (Failed, subprocess.SubprocessError, OSError) as error:
        tell(error)
        sys.exit(1)
    finally:
        upgrade.old.end()
        upgrade.new.end()


class Upgrade:
    """Both versions, the broker, and the client that publishes all the time."""

    def __init__(self, old, new, source, queue_type, folder):
        self.source, self.scratch = Path(source), Path(folder).resolve()
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        self.broker = Broker()
        settings = [f"broker.queue_type={queue_type}"]
        self.old = Version("old", old, self.scratch, settings)
        self.new = Version("new", new, self.scratch, settings)
        self.state = self.scratch / "state"
        # A pass of a worker with `hangs` hangs for as long as there is this file.
        self.hang = self.scratch / "hang"
        self.hangs = f"worker.drill=pass=hang,while={self.hang}"
        self.workers = []

    def drain(self):
        """SIGTERM to the workers that serve MODEL, and their end with 0."""
        for worker in self.workers:
            worker.stop()
        for worker in self.workers:
            worker.drained()
        self.workers = []

    def small_worker(self, version, name, *settings):
        """A worker on whose device four short texts have room."""
        return version.worker(name, ["small"], f"device.cpu.fault=above={ABOVE}", *settings)


def served(upgrade):
    """old workers answer jobs of the old command, and of a foreign client that publishes from here to the end"""
    upgrade.workers = [upgrade.old.worker(f"old-{place}", [MODEL]) for place in (1, 2)]
    upgrade.publisher = Publisher(upgrade.old.environment["VRAMQ_BROKER_URL"])
    upgrade.publisher.start()
    submit(upgrade.old, MODEL)
    upgrade.publisher.settled()


def submit(version, model):
    lines = [json.loads(line) for line in version.vramq("submit", "--model", model, "--quiet", "a", ".").splitlines()]
    ensure([line["index"] for line in lines] == [0, 1], f"vramq submit writes {lines}")
    return lines


def mixed(upgrade):
    """with broker.declare = false a new worker takes the queues as they are, and shares them with old workers"""
    worker = upgrade.new.worker("new-guest", [MODEL], "broker.declare=false")
    before = answered(upgrade)
    until("all three workers answer more jobs", lambda: all(more > less for less, more in zip(before, answered(upgrade), strict=True)))
    worker.drain()
    upgrade.publisher.settled()


def answered(upgrade):
    """How many jobs each of the three workers answered."""
    workers = [upgrade.new.heartbeat(name) for name in ("new-guest", "old-1", "old-2")]
    return [worker["models"][0]["counters"]["answered"] for worker in workers]


def refused(upgrade):
    """a new worker beside them exits with 2, and names queue and argument; they lose no session and no job"""
    _, log = upgrade.new.run("vramq-worker", *upgrade.new.worker_command("early", [MODEL]), code=2)
    ensure(f"vramq.bulk.{MODEL}" in log and "x-overflow" in log, f"it does not name them: {log}")
    for worker in upgrade.old.heartbeats().values():
        ensure(worker["sessions_lost"] == 0, f"{worker['worker']} lost a session")
    upgrade.publisher.settled()


def configured(upgrade):
    """the new check-config takes every key of the old documentation, and the old files of deploy/"""
    deploy = upgrade.source / "deploy"
    worker, gateway = every_key(upgrade, "configuration.md"), every_key(upgrade, "http.md")
    files = [("vramq-worker", file) for file in (worker, deploy / "worker.toml", deploy / "kubernetes/base/worker.toml")]
    for program, file in [*files, ("vramq-gateway", gateway)]:
        for version in (upgrade.old, upgrade.new):
            version.run(program, "check-config", "--config", file)


def every_key(upgrade, page):
    """A file with what the old page has as its example, the keys in comments included."""
    text = (upgrade.source / "docs" / page).read_text()
    example = re.search(r"```toml\n(\[broker\].*?)```", text, re.S)[1]
    every = re.sub(r"^# (\w+)(?= = )", lambda found: found[found[1] not in LEFT_OUT], example, flags=re.M)
    ensure(every.count("\n# ") < example.count("\n# "), f"the example of {page} has another form")
    file = upgrade.scratch / f"{page}.toml"
    file.write_text(every)
    return file


def newer(upgrade):
    """the new command, gateway and Python client work with old workers"""
    command_and_gateway(upgrade.new, "old-1")
    program = "import sys, vramq; print(len(vramq.Client(sys.argv[1]).run(sys.argv[2], ['a']).numpy()[0]))"
    command = [ROOT / ".cache/package/bin/python", "-c", program, upgrade.new.environment["VRAMQ_BROKER_URL"], MODEL]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    ensure(int(ran.stdout) == WIDTH, f"the client's vector has {ran.stdout} elements")


def command_and_gateway(version, worker):
    submit(version, MODEL)
    for command, state in (("pause", "paused"), ("resume", "consuming")):
        version.vramq("control", command, "--worker", worker)
        until(state, lambda state=state: version.heartbeat(worker)["state"] == state)
    gateway, address = version.gateway()
    body = json.dumps({"model": MODEL, "input": "a"})
    answer = json.loads(http(f"http://{address}/v1/embeddings", body, "application/json"))
    ensure(len(answer["data"][0]["embedding"]) == WIDTH, "the gateway's vector has another width")
    gateway.drain()


def http(url, body=None, media_type=None):
    request = urllib.request.Request(url, body and body.encode(), {"content-type": media_type} if body else {})
    with opened(request) as response:
        return response.read()


def renamed(upgrade):
    """of the new command's flags those with new names still work by the old ones, with a warning, or name the new one"""
    for name, new, code, arguments in (
        ("--timeout", "--wait", 0, ("control", "resume", "--all", "--timeout", "5s")),
        ("-w", "--worker", 2, ("control", "resume", "-w", "old-1")),
        ("--log", "--action-log", 2, ("dlq", "list", "--model", MODEL, "--log", "actions.jsonl")),
    ):
        _, said = upgrade.new.run("vramq", *arguments, code=code)
        ensure(new in said, f"with {name} it does not name {new}: {said}")


def uploaded(upgrade):
    """a new gateway has the uploads of an old one"""
    setting = f"files.folder={upgrade.scratch / 'uploads'}"
    gateway, address = upgrade.old.gateway("--set", setting)
    parts = (('name="purpose"', "user_data"), ('name="file"; filename="a.txt"', "an upload"))
    body = "".join(f"--X\r\ncontent-disposition: form-data; {about}\r\n\r\n{text}\r\n" for about, text in parts) + "--X--\r\n"
    file = json.loads(http(f"http://{address}/v1/files", body, "multipart/form-data; boundary=X"))["id"]
    gateway.drain()
    gateway, address = upgrade.new.gateway("--set", setting)
    ensure(http(f"http://{address}/v1/files/{file}/content") == b"an upload", "the upload is another one")
    gateway.drain()


def programs(upgrade):
    """a program with the old SDK is a model of a new worker, and one with the new SDK a model of an old worker"""
    for version, tree in ((upgrade.new, upgrade.source), (upgrade.old, ROOT)):
        model = f"program-{version.name}"
        program = upgrade.scratch / f"{model}.py"
        program.write_text(PROGRAM.format(sdk=str(tree / "python")))
        settings = (f"model.{model}.engine=process", f"model.{model}.command={json.dumps([sys.executable, str(program)])}")
        worker = version.worker(model, [], *settings)
        ensure([line["json"] for line in submit(version, model)] == ["a", "."], "the program's answers are others")
        worker.drain()


def dead_letters(upgrade):
    """an old worker writes dead letters: out of memory, malformed, invalid, unroutable with results; the broker an expired one"""
    submit = upgrade.publisher.submit
    upgrade.small = upgrade.small_worker(upgrade.old, "old-small", f"worker.state={upgrade.state}", upgrade.hangs)
    submit("too-long", "small", ["a", LONG, "a"]).wanted_reasons = ["out-of-memory"]
    for name, reason, body in (("broken", "malformed", "{"), ("bytes", "invalid-input", '{"model": "small", "inputs": [{"bytes": "AAAA"}]}')):
        job = submit(name, "small", [], body=body)
        job.wants_answer, job.wanted_reasons = False, [reason]
    submit("unroutable", "small", ["a"], reply_to=GONE)
    until("five dead letters", lambda: upgrade.broker.ready("vramq.dead.small") == 5)
    upgrade.old.vramq("control", "pause", "--worker", "old-small")
    submit("late", "small", ["a"], expiration="1")
    until("a sixth one", lambda: upgrade.broker.ready("vramq.dead.small") == 6)
    upgrade.old.vramq("control", "resume", "--worker", "old-small")
    upgrade.old.vramq("dlq", "export", "--model", "small", "--reason", "malformed", "--output", upgrade.scratch / "malformed.jsonl")


def halved(upgrade):
    """an old worker runs out of memory, requeues the job with half of its texts as the hint, and keeps what it learned"""
    halve(upgrade, upgrade.old, upgrade.small, "hinted")
    ensure(list(upgrade.state.iterdir()), "worker.state is empty")


def halve(upgrade, version, worker, name):
    """Leaves the job in its queue, because its worker pauses while the pass hangs."""
    upgrade.hang.touch()
    upgrade.publisher.submit(name, "small", [SHORT] * 8)
    until("the job is held", lambda: version.heartbeat(worker.name)["models"][0]["in_hand"] == 1)
    version.vramq("control", "pause", "--worker", worker.name)
    upgrade.hang.unlink()
    until("the job is back", lambda: upgrade.broker.ready("vramq.jobs.small") == 1)
    headers = upgrade.broker.headers("vramq.jobs.small")
    ensure((headers["batch-hint"], headers["attempt"]) == (4, 1), f"its headers are {headers}")
    worker.drain()


def delayed(upgrade):
    """an old worker delays a job for which there is no memory, and ends"""
    late = upgrade.old.worker("old-late", ["late"], "device.cpu.fault=random=1,seed=1")
    upgrade.publisher.submit("delayed", "late", ["a"])
    queues = [f"vramq.delay.late.{wait}" for wait in (1000, 5000, 30000)]
    until("the job is delayed", lambda: upgrade.broker.ready(*queues) == 1)
    late.drain()


def quarantined(upgrade):
    """old workers crash over a job, which goes to quarantine"""
    for crash in range(3):
        worker = upgrade.old.worker(f"old-risky-{crash}", ["risky"], "worker.drill=pass=crash,job=killer")
        if crash == 0:
            upgrade.publisher.submit("killer", "risky", ["a"])
        ensure(worker.ended() != 0, "it did not crash")
    until("the job is in quarantine", lambda: upgrade.broker.ready("vramq.suspects.risky") == 1)


def drained(upgrade):
    """old workers drain, exit with 0, and put what is left of a large job back into vramq.bulk, which was empty"""
    drain(upgrade, upgrade.old)


def drain(upgrade, version):
    bulk = "vramq.bulk.large"
    worker = version.worker(f"{version.name}-large", ["large"], upgrade.hangs)
    upgrade.hang.touch()
    upgrade.publisher.submit(f"large-{version.name}", "large", list(VECTORS["large"]) * 4)

    def is_held():
        model = version.heartbeat(worker.name)["models"][0]
        # Requeued from the queue of jobs to that of large jobs.
        return (model["counters"]["requeued"], model["in_hand"], upgrade.broker.ready(bulk)) == (1, 1, 0)

    until("the large job is held", is_held)
    worker.stop()
    upgrade.hang.unlink()
    worker.drained()
    upgrade.drain()
    # It exits with 1, because there is no worker.
    [queue] = json.loads(upgrade.new.vramq("status", "--model", "large", "--json", "--for", "1s", code=1))["queues"]
    ensure(queue["bulk"] == 1, f"nothing is left of the large job: {queue}")


def replaced(upgrade):
    """a shovel moves what the two queues hold, they are deleted, new workers declare them and answer every job, with its hint"""
    replace_queues(upgrade.broker)
    upgrade.workers = [upgrade.new.worker(f"new-{place}", [MODEL]) for place in (1, 2)]
    others = upgrade.new.worker("new-others", ["large", "late", "risky"])
    for name in ("large-old", "delayed", "killer"):
        upgrade.publisher.until(f"the job {name} is answered", upgrade.publisher.jobs[name].is_answered)
    others.drain()
    small = upgrade.small_worker(upgrade.new, "new-small")
    run_halved(upgrade, upgrade.new, small, "hinted")
    small.drain()


def replace_queues(broker):
    """As docs/upgrading.md says, when no worker runs."""
    for model in FOLDERS:
        for queue in (f"vramq.bulk.{model}", f"vramq.suspects.{model}"):
            if broker.ready(queue) > 0:
                move(broker, queue, model)
            broker.ctl("delete_queue", queue)


def move(broker, queue, model):
    page = (ROOT / "docs/upgrading.md").read_text()
    shovel = re.search(r"set_parameter shovel \S+ '(\{.*?\})'", page, re.S)[1]
    shovel = shovel.replace(f'"vramq.bulk.{MODEL}"', f'"{queue}"').replace(f'"{MODEL}"', f'"{model}"')
    broker.ctl("set_parameter", "shovel", queue, shovel)
    until(f"{queue} is empty", lambda: queue not in broker.ctl("list_parameters") and broker.ready(queue) == 0)


def run_halved(upgrade, version, worker, name):
    """The worker of the other version believes the hint, and would run out of memory without it."""
    job = upgrade.publisher.jobs[name]
    upgrade.publisher.until(f"the job {name} is answered", job.is_answered)
    ensure(job.attempt == 1, f"attempts of before are not counted: {job.attempt}")
    ensure(out_of_memory(version, worker) == 0, "it did not run with its hint")
    upgrade.publisher.answered(f"{name}-not", "small", [SHORT] * 8)
    ensure(out_of_memory(version, worker) > 0, "without a hint it should have run out of memory")


def out_of_memory(version, worker):
    """How many passes of the worker ran out of memory."""
    counters = version.heartbeat(worker.name)["models"][0]["counters"]
    return counters["out_of_memory_alone"] + counters["out_of_memory_shared"]


def retried(upgrade):
    """the new vramq dlq lists, shows, retries, drops and restores old dead letters"""
    vramq, jobs = upgrade.new.vramq, upgrade.publisher.jobs
    lines = [json.loads(line) for line in vramq("dlq", "list", "--model", "small", "--json").splitlines()]
    letters = {line["fingerprint"]: line["reason"] for line in lines if "fingerprint" in line}
    wanted = ["expired", "invalid-input", "malformed", "out-of-memory", "unroutable", "unroutable"]
    ensure(sorted(letters.values()) == wanted, f"it lists {lines}")
    for fingerprint, reason in letters.items():
        ensure(reason in vramq("dlq", "show", "--model", "small", fingerprint), f"it does not show why: {reason}")
    worker = upgrade.new.worker("new-roomy", ["small"])
    for reason, name in (("out-of-memory", "too-long"), ("expired", "late")):
        # The old name of --change.
        vramq("dlq", "retry", "--model", "small", "--reason", reason, "--set", "batch-hint=1", "--yes")
        upgrade.publisher.until(f"{name} is answered", jobs[name].is_answered)
    upgrade.broker.declare(GONE)
    vramq("dlq", "retry", "--model", "small", "--reason", "unroutable", "--yes")
    properties, body = upgrade.broker.take(GONE)
    jobs["unroutable"].note(properties.type, properties.headers, json.loads(body))
    ensure(properties.headers["worker"] == "old-small", "its results were computed again")
    worker.drain()
    vramq("dlq", "drop", "--model", "small", "--reason", "malformed", "--yes-drop", "1", "--archive", upgrade.scratch / "dropped.jsonl")
    vramq("dlq", "import", upgrade.scratch / "malformed.jsonl")
    left = vramq("dlq", "list", "--model", "small", "--fingerprints").split()
    ensure(sorted(letters[one] for one in left) == ["invalid-input", "malformed"], f"{left} of {letters} are left")


def remembered(upgrade):
    """a new worker with an old worker.state knows the learned limits, and runs no pass out of memory"""
    worker = upgrade.small_worker(upgrade.new, "new-learned", f"worker.state={upgrade.state}")
    ensure(upgrade.new.heartbeat("new-learned")["ceilings"], "it knows no limit")
    upgrade.publisher.answered("remembered", "small", [SHORT] * 8)
    ensure(out_of_memory(upgrade.new, worker) == 0, "it ran out of memory")
    worker.drain()


def older(upgrade):
    """the old command and gateway work with new workers"""
    command_and_gateway(upgrade.old, "new-1")


def back(upgrade):
    """back in the same way: new workers drain, the queues are moved and deleted, old workers answer every job, with its hint"""
    worker = upgrade.small_worker(upgrade.new, "new-small-again", upgrade.hangs)
    halve(upgrade, upgrade.new, worker, "hinted-back")
    drain(upgrade, upgrade.new)
    replace_queues(upgrade.broker)
    upgrade.workers = [upgrade.old.worker("old-again", [MODEL, "large", "late", "risky"])]
    small = upgrade.small_worker(upgrade.old, "old-small-again")
    run_halved(upgrade, upgrade.old, small, "hinted-back")
    small.drain()
    upgrade.publisher.settled()
    submit(upgrade.old, MODEL)


def ledger(upgrade):
    """the client has every reply once, and no job is left"""
    publisher = upgrade.publisher
    publisher.publishes = False
    publisher.settled()
    upgrade.drain()
    faults = publisher.faults(upgrade.broker)
    ensure(not faults, f"{len(faults)} of {len(publisher.jobs)} jobs: {faults[:5]}")
    left = upgrade.broker.ready(*(f"vramq.{kind}.{model}" for kind in ("jobs", "bulk", "suspects") for model in FOLDERS))
    ensure(left == 0, f"{left} jobs are left")
    print(f"   {len(publisher.jobs)} jobs", flush=True)


CHECKS = [served, mixed, refused, configured, newer, renamed, uploaded, programs, dead_letters, halved, delayed, quarantined]
CHECKS += [drained, replaced, retried, remembered, older, back, ledger]

if __name__ == "__main__":
    main()
