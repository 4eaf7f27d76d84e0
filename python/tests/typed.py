"""Uses the package as its README says. mypy has to find nothing wrong, and to find wrong what is marked so. It is not run."""

from typing import Any, Iterable, List

import vramq
from vramq.celery import App


class Shout(vramq.Model):
    accepts = ["text"]

    def load(self, device: str) -> None:
        self.suffix = "!"

    def run(self, items: List[vramq.Item], params: "dict[str, Any]") -> Iterable[Any]:
        for item in items:
            self.progress(item, 0.5)
            yield item.text + self.suffix
            if not item.bytes:
                raise vramq.InvalidInput("no bytes", item)


def blocking(url: str) -> None:
    with vramq.Client(url, timeout=5) as client:
        print(client.embed("m", ["a"]).shape)
        job = client.submit("m", ["a", b"b", vramq.Uri("x"), vramq.Json(1)], on_progress=lambda item, fraction, note: print(item + 1))
        for done, total in job.progress():
            print(done + total)
        result: vramq.Result = job.result(timeout=3)
        print(result.queued_ms + 1, result.numpy().shape, "".join(result.model_revisions))
        client.publish("m", ["a"], app_id="shop", id=7)
        client.publish("m", ["a"], id=b"a")  # type: ignore[arg-type]
        client.run("m", [1])  # type: ignore[list-item]
        client.run("m", ["a"], tiemout=3)  # type: ignore[call-arg]
        client.run("m", ["a"], priority="high")  # type: ignore[arg-type]
    try:
        print(vramq.download(result.outputs[0], folder="/srv/out").decode())
    except vramq.JobFailed as failed:
        print(failed.reason.upper(), failed.outputs[0], failed.retryable)
    except vramq.VramqError as error:
        print(error.reason)  # type: ignore[attr-defined]


async def with_asyncio(url: str) -> None:
    async with vramq.AsyncClient(url, encoding="msgpack") as client:
        job = await client.submit("m", ["a"])
        async for done, _ in job.progress():
            print(done + 1)
        result = await job
        print(result.worker.upper())
    vramq.AsyncClient(url, encoding="pickle")  # type: ignore[arg-type]


app = App("amqp://localhost", timeout=3)
embed = app.task("m", priority=3)
print(embed.delay(["a"]).get(timeout=3), embed.apply_async((["a"],), task_id="x").state, app.send_task("m", ["a"]).id.upper())
embed.apply_async((["a"],), countdown=3)  # type: ignore[call-arg]
embed.s(["a"])  # type: ignore[attr-defined]
vramq.serve(Shout)
