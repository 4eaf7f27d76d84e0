"""The programs of one version, the processes that they become, and the broker that all of them share."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pika

from deployed import MODEL, ROOT, Failed, ensure, heartbeats, until

FIXTURES = ROOT / "inference/tests/fixtures"
# At most 24 tokens of a text count, with tiny-long 512.
FOLDERS = {MODEL: "tiny-mean", "large": "tiny-mean", "small": "tiny-long", "late": "tiny-mean", "risky": "tiny-mean"}
# So few that jobs of some 40 texts are large: they take more than four passes.
PASS_TOKENS = {MODEL: 64, "large": 64}
# A worker that drains has 25 s, and is alone on a machine that may be busy.
END_S = 60


class Version:
    """The programs of a version, in a folder. Whatever they start is killed by `end`."""

    def __init__(self, name, folder, scratch, settings):
        self.name, self.folder, self.scratch, self.settings = name, Path(folder), scratch, settings
        # Action logs of `vramq dlq`, kernels and uploads go to folders of the user.
        self.environment = os.environ | {"HOME": str(scratch), "VRAMQ_BROKER_URL": os.environ["VRAMQ_TEST_AMQP_URL"]}
        self.processes = []

    def run(self, program, *arguments, code=0, **options):
        """Standard output and error of a program that ends by itself, with this exit code."""
        command = [self.folder / program, *arguments]
        ran = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=END_S, **options)
        if ran.returncode != code:
            raise subprocess.CalledProcessError(ran.returncode, command, ran.stdout, ran.stderr)
        return ran.stdout, ran.stderr

    def vramq(self, *arguments, **options):
        return self.run("vramq", *arguments, **options)[0]

    def heartbeats(self):
        """What each worker says of itself, by its name."""
        found = heartbeats(self.vramq("status", "--json", "--for", "3s"))
        return {one["worker"]: one for one in found}

    def heartbeat(self, worker):
        """What one worker says of itself. On a busy machine it may come later than `vramq status` waits."""
        return until(f"a heartbeat of {worker}", lambda: self.heartbeats().get(worker))

    def worker_command(self, name, models, *settings):
        passes = [f"model.{model}.pass_tokens={tokens}" for model, tokens in PASS_TOKENS.items() if model in models]
        settings = ["worker.heartbeat_s=1", "device.cpu.threads=1", *passes, *self.settings, *settings]
        flags = [("--model", f"{model}={FIXTURES / FOLDERS[model]}") for model in models] + [("--set", one) for one in settings]
        return ["run", "--name", name, "--http-listen", "off", *(word for flag in flags for word in flag)]

    def worker(self, name, models, *settings):
        """A worker that consumes."""
        started = self.start("vramq-worker", name, *self.worker_command(name, models, *settings))
        started.wait_for("consuming")
        return started

    def gateway(self, *arguments):
        """A gateway, and its address."""
        command = ["run", "--log-format", "text", "--listen", "127.0.0.1:0", *arguments]
        started = self.start("vramq-gateway", f"gateway-{self.name}", *command)
        line = started.wait_for(" address=")
        return started, line.split(" address=")[1].split()[0]

    def start(self, program, name, *arguments):
        started = Process(name, [self.folder / program, *arguments], self.environment, self.scratch / f"{name}.log")
        self.processes.append(started)
        return started

    def end(self):
        for process in self.processes:
            process.kill()


class Process:
    """A program that runs until it is stopped, with its log in a file."""

    def __init__(self, name, command, environment, log):
        self.name, self.log = name, log
        with log.open("w") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def wait_for(self, words):
        """The first line of the log that has these words."""

        def look():
            ended = self.process.poll()
            lines = [line for line in self.log.read_text().splitlines() if words in line]
            ensure(lines or ended is None, f"{self.name} ended with {ended}: {self.log.read_text()[-2000:]}")
            return lines

        return until(f"{self.name} says '{words}'", look)[0]

    def ended(self):
        """Its exit code, as soon as it has one."""
        try:
            return self.process.wait(timeout=END_S)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{self.name} does not end: {self.log.read_text()[-2000:]}") from error

    def stop(self):
        self.process.terminate()

    def drain(self):
        self.stop()
        self.drained()

    def drained(self):
        code = self.ended()
        ensure(code == 0, f"{self.name} drained, and ended with {code}: {self.log.read_text()[-2000:]}")

    def kill(self):
        self.process.kill()
        self.process.wait()


class Broker:
    """The private RabbitMQ, as an operator sees it."""

    def __init__(self):
        self.connection = pika.BlockingConnection(pika.URLParameters(os.environ["VRAMQ_TEST_AMQP_URL"] + "?heartbeat=0"))
        # What `rabbitmq-plugins enable rabbitmq_shovel` does.
        plugins = "[rabbitmq_management, rabbitmq_prometheus, rabbitmq_shovel]."
        self.ctl(
            "eval",
            "{ok, File} = application:get_env(rabbit, enabled_plugins_file),"
            f' ok = file:write_file(File, "{plugins}"), {{ok, _, _}} = rabbit_plugins:ensure(File).',
        )

    def ctl(self, *arguments):
        """`rabbitmqctl`."""
        command = [ROOT / "scripts/rabbitmq", "ctl", os.environ["VRAMQ_TEST_RABBITMQ"], *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=END_S).stdout

    @contextmanager
    def channel(self):
        """Of its own for each use, because the broker closes one on which a queue is asked for that is not there."""
        channel = self.connection.channel()
        try:
            yield channel
        finally:
            if channel.is_open:
                channel.close()

    def ready(self, *queues):
        """How many messages wait in these queues together."""
        with self.channel() as channel:
            return sum(channel.queue_declare(queue, passive=True).method.message_count for queue in queues)

    def declare(self, queue):
        with self.channel() as channel:
            channel.queue_declare(queue, durable=True)

    def send(self, queue, kind):
        with self.channel() as channel:
            channel.basic_publish("", queue, b"", pika.BasicProperties(type=kind))

    def take(self, queue):
        """The properties and the body of the oldest message, which is then gone."""
        with self.channel() as channel:
            return channel.basic_get(queue, auto_ack=True)[1:]

    def headers(self, queue):
        """Those of the oldest message, which stays."""
        with self.channel() as channel:
            method, properties, _ = channel.basic_get(queue)
            channel.basic_nack(method.delivery_tag, requeue=True)
            return properties.headers
