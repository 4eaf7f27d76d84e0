#!/usr/bin/env python3
"""Run the README's commands as they are written, in a fresh container, as a user without privileges.

    tests/compose/readme.py LOG

Needs the images of RabbitMQ and of the reader, which scripts/test-compose makes. The reader's container shares the network of RabbitMQ's,
so that `localhost:5672` is a broker, as the README has it. LOG is the file for what the commands print. Both containers are gone at the
end. The release that `cargo install` builds takes half an hour on two cores.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

# tests/deployed.py
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from deployed import MODEL, ROOT, WIDTH, Failed, ensure, run, until
from page import Page

BROKER, READER = "vramq-test-readme-broker", "vramq-test-readme"
# As docker-compose.yml has it.
BROKER_IMAGE = re.search(r"^    image: (rabbitmq:.*)$", (ROOT / "docker-compose.yml").read_text(), re.M)[1]
READER_IMAGE = "vramq-test-reader"
TEXTS = ["one", "two", "three"]

# Commands of the README that are not run here, and why.
ELSEWHERE = {
    "docker compose up": "tests/compose/run.py runs it",
    "curl localhost:8080/v1/embeddings -H 'authorization": "tests/compose/run.py runs it",
    "make ": "it installs packages, as root; `make test` is what the continuous integration runs",
    "sudo apt install": "scripts/check-deb installs the packages",
    "tar -xzf target/dist": "scripts/check-deb runs it, as a user without privileges",
    "install -D": "scripts/check-deb runs it, as a user without privileges",
    "cargo test": "the continuous integration runs it",
    "vramq dlq show": "there is no dead letter; docs/first-job.md has one, and its own test",
    "vramq dlq retry": "there is no dead letter",
}


class Reader:
    """The container of somebody who types."""

    def __init__(self, log):
        self.page = Page("README.md")
        self.log = log
        self.typed = set()

    def type(self, start):
        """Runs the command of the README that begins like this; what it prints."""
        command = self.page.command(start)
        self.typed.add(command)
        return self.shell(command)

    def shell(self, script, **options):
        """Runs a script in the clone; what it prints."""
        options = options or {"stdin": subprocess.DEVNULL}
        ended = subprocess.run(["docker", "exec", "--interactive", READER, "bash", "-c", script], capture_output=True, text=True, **options)
        self.log.write(f"$ {script}\n{ended.stdout[:2000]}{ended.stderr}\n")
        self.log.flush()
        ensure(ended.returncode == 0, f"`{script}` exits with {ended.returncode}: {ended.stderr[-2000:]}")
        return ended.stdout

    def start(self, start, name):
        """Starts a command that goes on; its log, number and exit code are files of the home folder."""
        command = self.page.command(start)
        self.typed.add(command)
        script = f"{command} 2>~/{name}.log & echo $! >~/{name}.pid; wait $!; echo $? >~/{name}.code"
        subprocess.run(["docker", "exec", "--detach", READER, "bash", "-c", script], check=True)

    def has(self, script):
        return subprocess.run(["docker", "exec", READER, "bash", "-c", script], capture_output=True).returncode == 0

    def drains(self, name):
        """Ends a command by SIGTERM, as a supervisor would."""
        self.shell(f"kill -TERM $(cat ~/{name}.pid)")
        until(f"{name} to end", lambda: self.has(f"test -s ~/{name}.code"))
        code = self.shell(f"cat ~/{name}.code").strip()
        ensure(code == "0", f"{name} exits with {code}: {self.shell(f'tail ~/{name}.log')}")


def sits_down(reader):
    """a broker, and a fresh container with a clone, whose user has no privileges"""
    subprocess.run(["docker", "run", "--detach", "--name", BROKER, BROKER_IMAGE], check=True, capture_output=True)
    ready = ["docker", "exec", BROKER, "rabbitmq-diagnostics", "--quiet", "check_port_connectivity"]
    until("the broker", lambda: subprocess.run(ready, capture_output=True).returncode == 0)
    options = ["--init", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", f"container:{BROKER}"]
    subprocess.run(["docker", "run", "--detach", "--name", READER, *options, READER_IMAGE], check=True, capture_output=True)
    copy_clone()
    status = reader.shell("cat /proc/self/status")
    ensure("Uid:\t10002\t10002" in status and "CapEff:\t0000000000000000" in status, f"the reader has privileges: {status}")


def copy_clone():
    """What a clone of the working tree would have."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout.split(b"\0")
    there = b"\0".join(name for name in names if name and os.path.lexists(ROOT / os.fsdecode(name)))
    made = subprocess.run(["tar", "--create", "--null", "--files-from", "-"], cwd=ROOT, input=there, check=True, capture_output=True).stdout
    subprocess.run(["docker", "exec", "--interactive", READER, "tar", "--extract"], input=made, check=True)


def installs(reader):
    """the model is fetched, and the programs are built and installed"""
    reader.type("models/fetch")
    reader.type("for program in")
    for program in ("vramq", "vramq-worker", "vramq-gateway"):
        reader.shell(f"{program} --version")


def works(reader):
    """a worker answers jobs from the package for Python and from the shell"""
    reader.start("vramq-worker run", "worker")
    until("a worker that consumes", lambda: reader.has("grep -q consuming ~/worker.log"))
    reader.type("pip install")
    printed = reader.shell("python -", input=reader.page.program("python"))
    ensure(printed == f"(2, {WIDTH})\n", f"the README's program prints {printed}")
    lines = reader.type(f"vramq submit --model {MODEL} \"A man").splitlines()
    ensure(len(lines) == 2 and all('"embedding":[' in line for line in lines), f"vramq submit prints {lines}")
    reader.shell("cat >texts.txt", input="".join(f"{text}\n" for text in TEXTS))
    reader.type(f"vramq submit --model {MODEL} --file")
    shape = reader.shell("python -c \"import numpy; print(numpy.load('vectors.npy').shape)\"")
    ensure(shape == f"({len(TEXTS)}, {WIDTH})\n", f"vectors.npy has the shape {shape}")
    listed = reader.type("vramq dlq list")
    ensure(listed == "no dead letters\n", f"vramq dlq list prints {listed}")


def serves(reader):
    """the gateway answers over HTTP; worker and gateway drain"""
    reader.start("vramq-gateway run", "gateway")
    # Until it listens, and knows a worker of the model, there is no vector.
    curl = "curl localhost:8080/v1/embeddings -H 'content-type"
    until("the gateway's answer", lambda: reader.has("curl --fail --silent localhost:8080/readyz"))
    until("a vector over HTTP", lambda: '"embedding":[' in reader.type(curl))
    reader.drains("gateway")
    reader.drains("worker")


def complete(reader):
    """every command of the README was run, here or elsewhere"""
    left = [one for one in reader.page.commands() if one not in reader.typed and not any(one.startswith(start) for start in ELSEWHERE)]
    ensure(not left, f"not run: {left}")
    gone = [start for start in ELSEWHERE if not any(one.startswith(start) for one in reader.page.commands())]
    ensure(not gone, f"no command of the README any more: {gone}")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with Path(sys.argv[1]).open("w") as log:
        reader = Reader(log)
        try:
            run((sits_down, installs, works, serves, complete), reader)
        except (Failed, subprocess.CalledProcessError) as error:
            sys.exit(f"FAILED: {error}")
        finally:
            subprocess.run(["docker", "rm", "--force", "--volumes", READER, BROKER], capture_output=True)


if __name__ == "__main__":
    main()
