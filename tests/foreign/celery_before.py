#!/usr/bin/env python3
"""Run docs/celery/before.py and its call site with real Celery, PyTorch and RabbitMQ: `make test-pytorch`.

    scripts/with-rabbitmq .cache/peers/bin/python tests/foreign/celery_before.py MODELS

MODELS is the folder that has all-MiniLM-L6-v2. Exits with 0 if the call site prints what docs/celery.md says.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs/celery"
EXPECTED = "Someone has a meal.\n"
# PyTorch and the model are loaded within that, on a machine that does other things, too.
WAIT_S = 300


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    model = Path(sys.argv[1]).resolve() / "all-MiniLM-L6-v2"
    environment = os.environ | {"BROKER_URL": os.environ["VRAMQ_TEST_AMQP_URL"]}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(PAGE / "before.py", Path(folder, "tasks.py"))
        shutil.copy(PAGE / "search.py", folder)
        # sentence-transformers takes a folder of this name before it asks the hub.
        Path(folder, model.name).symlink_to(model)

        def python(*arguments):
            return [sys.executable, *arguments]

        log = Path(folder, "log").open("w")
        worker = subprocess.Popen(python("-m", "celery", "-A", "tasks", "worker", "--pool", "solo"), cwd=folder, env=environment,
                                  stdout=log, stderr=log)
        try:
            # The first call loads the model, so it may take longer than the call site waits.
            warm = "from tasks import embed; embed.delay(['x']).get(timeout=%d)" % WAIT_S
            subprocess.run(python("-c", warm), cwd=folder, env=environment, check=True)
            printed = subprocess.run(python("search.py"), cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
        except subprocess.CalledProcessError as error:
            sys.exit(f"{error}\n{error.stderr or ''}\nCelery's worker:\n{Path(folder, 'log').read_text()[-4000:]}")
        finally:
            worker.terminate()
            worker.wait(timeout=WAIT_S)
        if printed != EXPECTED:
            sys.exit(f"search.py prints {printed!r}")
        print(f"docs/celery/before.py: search.py prints {printed.strip()!r}")


if __name__ == "__main__":
    main()
