#!/usr/bin/env python3
"""Run what docker-compose.yml ships, and use it as its readers do.

    tests/compose/run.py IMAGES LOGS

IMAGES is what scripts/stand-ins wrote: an image a line, and how the engine came to it. LOGS is the file for the containers' logs.
Python's standard library is enough. Everything that it starts is in a project of its own, and is gone at the end.
"""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

# tests/deployed.py
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from deployed import MODEL, PASSAGES, ROOT, WIDTH, Failed, Submission, ensure, heartbeats, opened, run, tell, until
from page import Page

PROJECT = "vramq-test-compose"
FILES = ["docker-compose.yml", "tests/compose/small-passes.yml"]
# An image that is missing takes its service with it; compose starts the others.
OPTIONAL = {"grafana": "grafana/grafana"}
KEY = "vramq-local-demo"
# What scripts/test-compose makes of reader.Dockerfile.
READER_IMAGE = "vramq-test-reader"
# The README's way to the command.
STATUS = "docker compose exec worker vramq status"
# Small jobs, so that every worker holds some.
JOB_ITEMS = 8

# A start with the model's download; everything else is seconds, on a machine that does nothing else.
START_S = 900
# An alert waits two minutes, and Prometheus looks every 15 s.
ALERT_S = 420


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    images = dict(line.split() for line in Path(sys.argv[1]).read_text().splitlines())
    logs = Path(sys.argv[2])
    stack = Stack(images)
    try:
        run(CHECKS, stack)
    except (Failed, subprocess.CalledProcessError) as error:
        tell(error)
        sys.exit(1)
    finally:
        logs.write_text(stack.compose("logs", "--no-color", "--timestamps", check=False).stdout)
        stack.compose("down", "--volumes", "--timeout", "40", check=False)


class Stack:
    """The containers of docker-compose.yml."""

    def __init__(self, images):
        self.ports = {name: free_port() for name in ("AMQP", "MANAGEMENT", "HTTP", "PROMETHEUS", "GRAFANA")}
        self.environment = os.environ | {f"VRAMQ_{name}_PORT": str(port) for name, port in self.ports.items()}
        missing = [image for image, how in images.items() if how == "missing"]
        self.left_out = {service for service, image in OPTIONAL.items() for lacks in missing if lacks.startswith(image)}
        if len(self.left_out) < len(missing):
            raise Failed(f"images are missing: {missing}")

    def compose(self, *arguments, check=True, **options):
        files = [part for file in FILES for part in ("--file", file)]
        command = ["docker", "compose", "--project-name", PROJECT, *files, *arguments]
        return subprocess.run(command, cwd=ROOT, env=self.environment, check=check, capture_output=True, text=True, **options)

    def up(self, workers, *arguments):
        self.compose("up", "--detach", "--no-build", "--scale", f"worker={workers}", *arguments, *self.services())

    def services(self):
        return sorted(set(self.compose("config", "--services").stdout.split()) - self.left_out)

    def vramq(self, *arguments, **options):
        """The command of the workers' image, in a container of its own on their network."""
        tool = ["run", "--rm", "--no-TTY", "--no-deps", "--entrypoint", "vramq", "worker"]
        return self.compose(*tool, *arguments, **options).stdout

    def containers(self, service):
        """Those that run, by their names, as `docker inspect` describes them."""
        names = self.compose("ps", "--all", "--quiet", service).stdout.split()
        if not names:
            return {}
        found = json.loads(subprocess.run(["docker", "inspect", *names], check=True, capture_output=True, text=True).stdout)
        return {one["Name"].lstrip("/"): one for one in found}

    def state(self, name):
        return self.inspect(name)["State"]

    def inspect(self, name):
        found = subprocess.run(["docker", "inspect", name], check=True, capture_output=True, text=True)
        return json.loads(found.stdout)[0]

    def workers(self):
        """What the workers' heartbeats say; none if no worker sends one."""
        return heartbeats(self.vramq("status", "--json", check=False))

    def http(self, path, body=None, key=KEY):
        """The gateway's status and answer."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports['HTTP']}{path}")
        request.add_header("authorization", f"Bearer {key}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("content-type", "application/json")
        return answer(request)

    def prometheus(self, path):
        status, found = answer(urllib.request.Request(f"http://127.0.0.1:{self.ports['PROMETHEUS']}/api/v1/{path}"))
        return found["data"] if status == 200 else None


def answer(request):
    """The status, 0 for none, and the JSON."""
    try:
        with opened(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, None
    except (OSError, ValueError):
        return 0, None


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def starts(stack):
    """the README's first command: with three workers, the gateway, RabbitMQ and Prometheus it ends when all are healthy"""
    words = Page("README.md").command("docker compose up").split()[2:]
    stack.compose(*words, "--wait-timeout", str(START_S), "--scale", "worker=3", *stack.services())
    ensure(len(stack.containers("worker")) == 3, "there are not three workers")
    until("three workers that consume", lambda: [one["state"] for one in stack.workers()] == ["consuming"] * 3)


def unprivileged(stack):
    """workers and gateway run as a user of their own, without capabilities, and write nowhere but in their folder"""
    for service in ("worker", "gateway"):
        for name, one in stack.containers(service).items():
            status = run_in(name, "cat /proc/self/status")
            ensure("Uid:\t10001\t10001" in status, f"{name} does not run as 10001: {status}")
            ensure(re.search(r"CapBnd:\t0+\n", status), f"{name} has capabilities: {status}")
            ensure("NoNewPrivs:\t1" in status, f"{name} may gain privileges")
            ensure(one["State"]["Health"]["Status"] == "healthy", f"{name} is not healthy")
            run_in(name, "touch /var/lib/vramq/writable && rm /var/lib/vramq/writable && ! touch /etc/vramq/x 2>/dev/null")


def run_in(name, script):
    found = subprocess.run(["docker", "exec", name, "bash", "-c", script], check=True, capture_output=True, text=True)
    return found.stdout


def licensed(stack):
    """the images have the licences of everything that is in their programs"""
    for service in ("worker", "gateway"):
        for name in list(stack.containers(service))[:1]:
            notices = run_in(name, "cat /usr/share/doc/vramq/LICENSE /usr/share/doc/vramq/THIRD-PARTY.txt")
            ensure("Apache License" in notices and "c_src/mimalloc" in notices, f"{name} has no licences")
            ensure("=== lapin " in notices and "=== Rust standard library" in notices, f"{name} lacks the licences of crates or of Rust")


def over_http(stack):
    """a job over HTTP is answered, and one without a key is not"""
    body = {"model": MODEL, "input": "A man is eating food."}
    status, found = stack.http("/v1/embeddings", body)
    ensure(status == 200 and len(found["data"][0]["embedding"]) == WIDTH, f"the gateway answers {status}: {found}")
    status, _ = stack.http("/v1/embeddings", body, key="wrong")
    ensure(status == 401, f"a wrong key is answered with {status}")


def first_screen(stack):
    """the README's first request and its first program, as they are written, where the gateway is at localhost:8080"""
    [gateway] = stack.containers("gateway")
    readme = Page("README.md")
    found = json.loads(read(gateway, "bash", "-c", readme.command("curl localhost:8080/v1/embeddings -H 'authorization")))
    ensure(len(found["data"][0]["embedding"]) == WIDTH, f"the gateway answers {found}")
    *lines, last = readme.program("py").splitlines()
    printed = read(gateway, "python", "-c", "\n".join([*lines, f"print(len({last}))"]))
    ensure(printed == f"{WIDTH}\n", f"OpenAI's client gets a vector of {printed}")
    ensure(STATUS in (ROOT / "README.md").read_text(), f"the README does not name `{STATUS}`")
    # Without a terminal, which a reader has.
    shown = stack.compose("exec", "--no-TTY", *STATUS.split()[3:]).stdout
    ensure("QUEUE" in shown and MODEL in shown, f"`{STATUS}` shows {shown}")


def read(name, *command):
    """What a command prints in a reader's container that shares a container's network."""
    reader = ["docker", "run", "--rm", "--network", f"container:{name}", READER_IMAGE]
    return subprocess.run([*reader, *command], check=True, capture_output=True, text=True).stdout


def over_amqp(stack):
    """jobs from the command are answered in their order, and all workers share them"""
    submit(stack, 600).check()
    passes = {one["worker"]: sum(model["counters"]["passes"] for model in one["models"]) for one in stack.workers()}
    ensure(len(passes) == 3 and all(passes.values()), f"passes of each worker: {passes}")


def submit(stack, count):
    """Passages given to `vramq submit` in a container of its own."""
    files = [part for file in FILES for part in ("--file", file)]
    command = ["docker", "compose", "--project-name", PROJECT, *files, "run", "--rm", "--no-TTY", "--no-deps", "--entrypoint", "vramq",
               "worker", "submit", "--model", MODEL, "--job-items", str(JOB_ITEMS), "-"]
    return Submission(command, PASSAGES[:count], patience=START_S, cwd=ROOT, env=stack.environment)


def killed(stack):
    """a worker that is killed while it holds jobs costs none of them, and is started again"""
    job = submit(stack, 2000)
    # One of those that hold jobs, so that there is something to lose.
    holds = until("a worker that holds jobs", lambda: [one for one in stack.workers() if one["models"][0]["in_hand"] > 0])
    victim = next(name for name, one in stack.containers("worker").items() if one["Config"]["Hostname"] == holds[0]["host"])
    begun = stack.state(victim)["StartedAt"]
    # By its own user: `docker kill` would count as an operator's wish, after which Docker starts nothing again.
    run_in(victim, "kill -9 $(cat /proc/1/task/1/children)")
    job.check()
    until("the killed worker to run again", lambda: running_since(stack, victim, begun))
    until("three workers that consume", lambda: [one["state"] for one in stack.workers()] == ["consuming"] * 3)


def running_since(stack, name, before):
    state = stack.state(name)
    return state["Running"] and state["StartedAt"] != before


def drained(stack):
    """a worker that is stopped drains: it exits with 0, its jobs are answered, and it stays down"""
    job = submit(stack, 1000)
    until("a worker that holds jobs", lambda: [one for one in stack.workers() if one["models"][0]["in_hand"] > 0])
    name = sorted(stack.containers("worker"))[0]
    subprocess.run(["docker", "stop", "--time", "40", name], check=True, capture_output=True)
    job.check()
    state = stack.state(name)
    ensure(state["ExitCode"] == 0 and not state["Running"], f"the drained worker: {state}")


def scaled(stack):
    """--scale starts another worker and ends the rest by draining them"""
    stack.up(4)
    until("four workers that consume", lambda: [one["state"] for one in stack.workers()] == ["consuming"] * 4)
    job = submit(stack, 600)
    stack.up(1)
    job.check()
    until("one worker", lambda: len(stack.workers()) == 1)


def learns(stack):
    """what the workers learned of the device's memory is known to a new container before its first job"""
    # Of jobs that do not fit in one pass.
    stack.vramq("submit", "--model", MODEL, "--job-items", "64", *PASSAGES[:64])
    known = until("a learned limit", lambda: limits(stack))
    stack.up(1, "--force-recreate")
    [new] = until("a new worker", lambda: [one for one in stack.workers() if one["state"] == "consuming"])
    passes = sum(model["counters"]["passes"] for model in new["models"])
    ensure(passes == 0, f"the new container has run {passes} passes")
    ensure(limits(stack) == known, f"it knew {known}, and now {limits(stack)}")


def limits(stack):
    """For which models and lengths a limit is known. The limits themselves grow with every pass near them."""
    return sorted({(one["model"], one["longest_max"]) for worker in stack.workers() for one in worker["ceilings"]})


def scraped(stack):
    """Prometheus reaches every target of deploy/prometheus/prometheus.yml, and its rules are in force"""
    jobs = {"vramq-worker", "rabbitmq", "rabbitmq-queues"}
    # Prometheus asks for the addresses of new containers every 30 s.
    until(f"a target of each of {jobs}", lambda: (found := targets(stack)) and jobs == {job for job, _ in found})
    until("all targets", lambda: (found := targets(stack)) and all(health == "up" for health in found.values()))
    groups = stack.prometheus("rules")["groups"]
    unwell = [rule["name"] for group in groups for rule in group["rules"] if rule["health"] == "err"]
    ensure(groups and not unwell, f"rules that cannot be evaluated: {unwell}")


def targets(stack):
    found = stack.prometheus("targets?state=active")
    return found and {(one["labels"]["job"], one["labels"]["instance"]): one["health"] for one in found["activeTargets"]}


def alerts(stack):
    """without workers VramqNoWorkers and VramqNoConsumers fire, and go when there are workers again"""
    stack.compose("stop", "worker")
    wanted = {"VramqNoWorkers", "VramqNoConsumers"}
    stack.vramq("submit", "--model", MODEL, "--no-wait", "somebody waits for this")
    until(f"{wanted} to fire", lambda: wanted <= firing(stack), ALERT_S)
    stack.compose("start", "worker")
    until(f"{wanted} to go", lambda: not wanted & firing(stack), ALERT_S)


def firing(stack):
    found = stack.prometheus("alerts")
    return {one["labels"]["alertname"] for one in found["alerts"] if one["state"] == "firing"} if found else set()


def broker_restarts(stack):
    """RabbitMQ's data outlives its container, and workers and gateway come back to it by themselves"""
    stack.compose("stop", "worker")
    stack.vramq("submit", "--model", MODEL, "--no-wait", "this survives the broker")
    stack.up(0, "--force-recreate", "--wait", "--wait-timeout", str(START_S))
    stack.up(1)
    until("the job that was published before", lambda: waiting(stack) == 0)
    status, _ = until("the gateway", lambda: (found := stack.http("/v1/embeddings", {"model": MODEL, "input": "x"}))[0] == 200 and found)
    ensure(status == 200, "the gateway does not come back")


def waiting(stack):
    queues = json.loads(stack.vramq("status", "--json"))["queues"]
    [queue] = [queue for queue in queues if queue["key"] == MODEL]
    return queue["ready"]


def stops(stack):
    """`docker compose stop` ends everything in time: no process is killed"""
    stack.compose("stop")
    for service in ("worker", "gateway", "rabbitmq", "prometheus"):
        for name, one in stack.containers(service).items():
            ensure(one["State"]["ExitCode"] == 0, f"{name} exits with {one['State']['ExitCode']}")


CHECKS = [starts, unprivileged, licensed, over_http, first_screen, over_amqp, killed, drained, scaled, learns, scraped, alerts, broker_restarts, stops]

if __name__ == "__main__":
    main()
