"""What the tests of deploy/, of the compose file and of upgrades share: how they run their checks, wait, and give jobs to workers."""

import json
import subprocess
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "minilm"
WIDTH = 384
PASSAGES = (ROOT / "models/corpus/passages.txt").read_text().splitlines()
WAIT_S = 300


class Failed(Exception):
    """Something is not as the documents say."""


def run(checks, deployed):
    """Runs the checks in their order, and prints what each is about and how long it took."""
    for check in checks:
        begun = time.monotonic()
        print(f"-- {check.__doc__}", flush=True)
        check(deployed)
        print(f"   {time.monotonic() - begun:.0f} s", flush=True)


def tell(error):
    """Prints why a check failed, and what the program printed that failed in it."""
    print(f"FAILED: {error}", flush=True)
    for text in (getattr(error, "stdout", None), getattr(error, "stderr", None)):
        print((text or "")[-4000:], flush=True)


def ensure(right, what):
    if not right:
        raise Failed(what)


def until(what, look, seconds=WAIT_S):
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {seconds} s")
        time.sleep(1)


def heartbeats(status):
    """What the workers' heartbeats say, by what `vramq status --json` prints; none if no worker sends one."""
    found = json.loads(status)["workers"] if status.strip() else []
    return [one["heartbeat"] for one in found if one["heartbeat"]["state"] != "gone"]


def opened(request):
    """The answer to a request to this machine. It goes through no proxy that the environment names."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60)


class Submission:
    """Texts given to a `vramq submit` that runs elsewhere, and their vectors awaited."""

    def __init__(self, command, texts, patience, **options):
        self.count = len(texts)
        self.patience = patience
        self.process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        self.process.stdin.write("\n".join(texts) + "\n")
        self.process.stdin.close()
        self.process.stdin = None

    def check(self):
        out, err = self.process.communicate(timeout=self.patience)
        lines = [json.loads(line) for line in out.splitlines()]
        ensure(self.process.returncode == 0, f"vramq submit exits with {self.process.returncode}: {err[-2000:]}")
        indices = [line["index"] for line in lines]
        right = next((at for at, index in enumerate(indices) if index != at), len(indices))
        ensure(indices == list(range(self.count)), f"of {self.count} outputs {len(indices)} came, the first {right} of them in order: {err[-2000:]}")
        ensure(all(len(line["embedding"]) == WIDTH for line in lines), "a vector has another width")

    def ensure_runs(self, what):
        """What was done meanwhile shows nothing if all jobs were answered before it."""
        ensure(self.process.poll() is None, f"the jobs had ended before {what}")
