#!/usr/bin/env python3
"""Run deploy/kubernetes and the Helm chart on a cluster, and use what they start.

    tests/cluster/run.py WORKER GATEWAY RABBITMQ

Each is an image that the cluster can start. The cluster is that of kubectl's context. Everything is in the namespace vramq-test, and is
gone at the end; the model's files lie on one of the nodes meanwhile. The Helm chart is rendered by Helm's code as a Python package.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from helm_python import Chart, values_from_yaml

# tests/deployed.py
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from deployed import MODEL, PASSAGES, ROOT, WAIT_S, WIDTH, Failed, Submission, ensure, heartbeats, opened, run, tell, until

NAMESPACE = "vramq-test"
# Small jobs, so that every worker holds some.
JOB_ITEMS = 4
# On the node: what the claim of deploy/kubernetes/state is bound to.
HOST_PATH = {"path": "/var/lib/vramq-test", "type": "DirectoryOrCreate"}
# Of Kubernetes itself; the others need definitions that a cluster may lack.
OWN_GROUPS = ("v1", "apps/v1", "policy/v1", "networking.k8s.io/v1")
# Of the worker's pod: 40 s to drain, and some for the kubelet.
GRACE_S = 60


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        cluster = Cluster(Path(scratch), *sys.argv[1:])
        # One that is there already is another's, and is left alone.
        cluster.kubectl("create", "namespace", NAMESPACE)
        try:
            run(CHECKS, cluster)
        except (Failed, subprocess.SubprocessError) as error:
            tell(error)
            print(cluster.kubectl("get", "pods", "--output=wide", check=False), flush=True)
            print(cluster.kubectl("get", "events", "--field-selector=type=Warning", check=False), flush=True)
            print(cluster.kubectl("logs", "--selector=app.kubernetes.io/name=vramq-worker", "--tail=40", check=False), flush=True)
            sys.exit(1)
        finally:
            cluster.remove()


class Cluster:
    """A namespace, and in it what the files in deploy/ make, with images and a broker of this test."""

    def __init__(self, scratch, worker, gateway, rabbitmq):
        self.worker, self.gateway, self.rabbitmq = worker, gateway, rabbitmq
        self.folder = scratch / "kubernetes"
        shutil.copytree(ROOT / "deploy/kubernetes", self.folder)
        self.written = (self.folder / "kustomization.yaml").read_text()
        # The one that has the volume.
        self.node = self.get("nodes")["items"][0]["metadata"]["labels"]["kubernetes.io/hostname"]

    def kubectl(self, *arguments, check=True, text=None, timeout=WAIT_S):
        command = ["kubectl", "--namespace", NAMESPACE, *arguments]
        ran = subprocess.run(command, check=check, input=text, capture_output=True, text=True, timeout=timeout)
        return ran.stdout

    def get(self, *arguments):
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def apply(self, *things):
        self.kubectl("apply", "--filename=-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": things}))

    def compose(self, components, extra=""):
        """Writes deploy/kubernetes' own file again: with these components, this namespace and these images."""
        text = re.sub(r"^components:\n(  .*\n)*", "", self.written, flags=re.M)
        text = text.replace("namespace: vramq\n", f"namespace: {NAMESPACE}\n")
        repository, _, tag = self.worker.rpartition(":")
        text = re.sub(r"^    newName: .*\n    newTag: .*\n", f"    newName: {repository}\n    newTag: {tag!r}\n", text, flags=re.M)
        if components:
            text += "components:\n" + "".join(f"  - {name}\n" for name in components)
        (self.folder / "kustomization.yaml").write_text(text + extra)

    def workers(self):
        """The pods of workers that are not on their way out."""
        pods = self.get("pods", "--selector=app.kubernetes.io/name=vramq-worker")["items"]
        return {pod["metadata"]["name"]: pod for pod in pods if "deletionTimestamp" not in pod["metadata"]}

    def rolled_out(self, name="vramq-worker"):
        self.kubectl("rollout", "status", f"deployment/{name}", f"--timeout={WAIT_S}s")

    def in_pod(self, pod, *command, **options):
        return self.kubectl("exec", "--stdin", pod, "--", *command, **options)

    def remove(self):
        self.in_pod("files", "find", "/volume", "-mindepth", "1", "-delete", check=False)
        self.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", check=False)
        self.kubectl("delete", "persistentvolume", f"--selector=app={NAMESPACE}", check=False)


def submit(count):
    """Passages given to `vramq submit` in a pod of its own."""
    command = ["kubectl", "--namespace", NAMESPACE, "exec", "--stdin", "caller", "--", "vramq", "submit", "--model", MODEL,
               "--job-items", str(JOB_ITEMS), "--timeout", f"{WAIT_S}s", "-"]
    return Submission(command, [PASSAGES[at % len(PASSAGES)] for at in range(count)], patience=2 * WAIT_S)


def pod(name, image, command=None, **spec):
    container = {"name": name, "image": image, "imagePullPolicy": "IfNotPresent"}
    if command:
        container["command"] = command
    container |= spec.pop("container", {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 1, **spec}}


def accepted(cluster):
    """the API server takes deploy/kubernetes, with and without each component"""
    known = {line.split()[-3] for line in cluster.kubectl("api-resources", "--no-headers").splitlines()}
    folders = sorted(path.parent.name for path in cluster.folder.glob("*/kustomization.yaml"))
    for component in ["", *(name for name in folders if name != "base")]:
        cluster.compose([component] if component else [])
        made = cluster.kubectl("kustomize", str(cluster.folder))
        groups = set(re.findall(r"^apiVersion: (.*)$", made, re.M))
        if groups <= known:
            cluster.kubectl("apply", "--dry-run=server", "--filename=-", text=made)
        else:
            ensure(not groups - known <= set(OWN_GROUPS), f"the cluster does not know {groups - known}")
            print(f"   {component} not read: the cluster lacks {', '.join(sorted(groups - known))}")


def broker(cluster):
    """a broker, the secrets of docs/deploying.md, and a volume with the model's files"""
    cluster.apply(
        pod("rabbitmq", cluster.rabbitmq, hostname="rabbitmq", volumes=[{"name": "data", "emptyDir": {}}], container={
            "env": [{"name": "RABBITMQ_DEFAULT_USER", "value": "vramq"}, {"name": "RABBITMQ_DEFAULT_PASS", "value": "vramq"}],
            "readinessProbe": {"exec": {"command": ["rabbitmq-diagnostics", "--quiet", "check_port_connectivity"]}, "timeoutSeconds": 15},
            "volumeMounts": [{"name": "data", "mountPath": "/var/lib/rabbitmq"}]}),
        volume(cluster, NAMESPACE)[0],
        # As root: the kubelet gives no group to a folder of its host, as it does to volumes.
        pod("files", cluster.worker, ["sleep", "infinity"], nodeName=cluster.node, securityContext={"runAsUser": 0},
            volumes=[{"name": "volume", "hostPath": HOST_PATH}],
            container={"volumeMounts": [{"name": "volume", "mountPath": "/volume"}]}))
    cluster.kubectl("wait", "--for=condition=Ready", "pod/rabbitmq", "pod/files", f"--timeout={WAIT_S}s")
    put_model(cluster)
    address = cluster.get("pod/rabbitmq")["status"]["podIP"]
    cluster.kubectl("create", "secret", "generic", "vramq-broker", f"--from-literal=url=amqp://vramq:vramq@{address}:5672/%2f",
                    f"--from-literal=management-url=http://vramq:vramq@{address}:15672/%2f")
    url = {"name": "VRAMQ_BROKER_URL", "valueFrom": {"secretKeyRef": {"name": "vramq-broker", "key": "url"}}}
    cluster.apply(pod("caller", cluster.worker, ["sleep", "infinity"], container={"env": [url]}))
    cluster.kubectl("wait", "--for=condition=Ready", "pod/caller", f"--timeout={WAIT_S}s")


def volume(cluster, name):
    """A volume on the first node, and a claim to it."""
    affinity = {"key": "kubernetes.io/hostname", "operator": "In", "values": [cluster.node]}
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    made = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name, "labels": {"app": NAMESPACE}},
            "spec": common | {"capacity": {"storage": "4Gi"}, "persistentVolumeReclaimPolicy": "Retain", "hostPath": HOST_PATH,
                              "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [affinity]}]}}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
             "spec": common | {"volumeName": name, "resources": {"requests": {"storage": "4Gi"}}}}
    return made, claim


def put_model(cluster):
    """The hub's cache, as a worker that has downloaded the model leaves it: the test needs no hub."""
    config = (ROOT / "deploy/kubernetes/base/worker.toml").read_text()
    hub, revision = (re.search(rf'^{key} = "(.*)"', config, re.M)[1] for key in ("hub", "revision"))
    folder = "/volume/models/hub/models--" + hub.replace("/", "--")
    snapshot = f"{folder}/snapshots/{revision}"
    cluster.in_pod("files", "mkdir", "-p", snapshot, f"{folder}/refs")
    cluster.in_pod("files", "bash", "-c", f"printf %s {revision} >{folder}/refs/{revision}")
    packed = subprocess.run(["tar", "--create", "--directory", ROOT / "models/all-MiniLM-L6-v2", "."], check=True, capture_output=True)
    unpack = ["kubectl", "--namespace", NAMESPACE, "exec", "--stdin", "files", "--", "tar", "--extract", "--no-same-owner", "--directory", snapshot]
    subprocess.run(unpack, input=packed.stdout, check=True, capture_output=True)
    cluster.in_pod("files", "chown", "--recursive", "10001:10001", "/volume")


# A small cluster has no four processors for two workers, and its default storage class is for one pod at a time.
SMALL = f"""
replicas:
  - name: vramq-worker
    count: 2
patches:
  - patch: |-
      apiVersion: apps/v1
      kind: Deployment
      metadata: {{name: vramq-worker}}
      spec:
        template:
          spec:
            containers:
              - name: worker
                resources: {{requests: {{cpu: 100m, memory: 512Mi}}}}
  - patch: |-
      apiVersion: v1
      kind: PersistentVolumeClaim
      metadata: {{name: vramq-worker}}
      spec: {{storageClassName: "", volumeName: {NAMESPACE}}}
"""


def starts(cluster):
    """two workers become ready, with the configuration that is shipped, and a volume that they share"""
    cluster.compose(["state"], SMALL)
    cluster.kubectl("apply", "--kustomize", str(cluster.folder))
    cluster.rolled_out()
    ensure(len(cluster.workers()) == 2, f"there are not two workers: {list(cluster.workers())}")
    submit(64).check()


def unprivileged(cluster):
    """they run as a user of their own, without capabilities, and write only to their volumes"""
    for name in cluster.workers():
        status = cluster.in_pod(name, "cat", "/proc/1/status")
        ensure("Uid:\t10001\t10001" in status, f"{name} does not run as 10001: {status}")
        ensure(re.search(r"CapBnd:\t0+\n", status), f"{name} has capabilities: {status}")
        ensure("NoNewPrivs:\t1" in status and "Seccomp:\t2" in status, f"{name} may gain privileges: {status}")
        writes = f"touch /tmp/x /var/lib/vramq/{name} && ! touch /etc/vramq/x 2>/dev/null && ! touch /x 2>/dev/null"
        cluster.in_pod(name, "bash", "-c", writes)
        cluster.in_pod("files", "rm", f"/volume/{name}")


# A program of what the image has. Its files are in the scratch folder.
SHOUT = """
[model.shout]
engine = "process"
mode = "once"
command = ["/bin/sh", "-c", '(printf \\"; tr a-z A-Z <"$1"; printf \\") >"$2"', "shout", "{input}", "{output}"]
once = { media_type = "application/json" }
"""


def rolls(cluster):
    """a configuration that changes rolls the workers, and no job is lost meanwhile; it adds a program, which runs"""
    before = set(cluster.workers())
    settings = cluster.folder / "base/worker.toml"
    settings.write_text(settings.read_text() + SHOUT)
    job = submit(3000)
    until_held(cluster)
    cluster.kubectl("apply", "--kustomize", str(cluster.folder))
    cluster.rolled_out()
    job.check()
    ensure(not before & set(cluster.workers()), "a worker of before the change is still there")
    answer = cluster.in_pod("caller", "vramq", "submit", "--model", "shout", "hello")
    ensure(json.loads(answer)["json"] == "HELLO", f"the program answers {answer}")


def status(cluster):
    """What the workers' heartbeats say."""
    return heartbeats(cluster.in_pod("caller", "vramq", "status", "--json", check=False))


def until_held(cluster):
    """The name of a worker, and so of its pod, that holds jobs."""
    def holds():
        return [one["worker"] for one in status(cluster) if any(model["in_hand"] for model in one["models"])]
    return until("a worker that holds jobs", holds)[0]


def deleted(cluster):
    """a pod that is deleted drains: it is gone in time, and its jobs are answered"""
    job = submit(3000)
    name = until_held(cluster)
    logs = subprocess.Popen(["kubectl", "--namespace", NAMESPACE, "logs", "--follow", name], stdout=subprocess.PIPE, text=True)
    begun = time.monotonic()
    cluster.kubectl("delete", "pod", name)
    ensure(time.monotonic() - begun < GRACE_S, "the pod was killed, not drained")
    job.ensure_runs("the pod was gone")
    job.check()
    out, _ = logs.communicate(timeout=WAIT_S)
    # What a worker logs last, when its jobs are settled.
    ensure('"totals"' in out, f"its last words: {out.splitlines()[-3:]}")
    cluster.rolled_out()


def killed(cluster):
    """a pod that is killed while it holds jobs costs none of them"""
    job = submit(3000)
    name = until_held(cluster)
    cluster.kubectl("delete", "pod", name, "--force", "--grace-period=0")
    job.ensure_runs("the pod was killed")
    job.check()
    cluster.rolled_out()


def evicted(cluster):
    """of two workers a drain of nodes may take one, and the other only when there are two again"""
    cluster.rolled_out()
    first, second = sorted(cluster.workers())
    ensure(evict(first) == "", "the first worker cannot be evicted")
    refused = evict(second)
    ensure("disruption budget" in refused, f"the second worker: {refused or 'evicted'}")
    cluster.rolled_out()


def evict(name):
    """Empty, or why not."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    asked = subprocess.run(["kubectl", "create", "--raw", path, "--filename=-"], input=json.dumps(eviction), capture_output=True, text=True)
    return asked.stderr


def broker_restarts(cluster):
    """workers wait for a broker that restarts: they are not ready, are not restarted, and go on"""
    until("two workers", lambda: len(cluster.workers()) == 2)
    before = restarts(cluster)
    cluster.in_pod("rabbitmq", "rabbitmqctl", "stop_app")
    until("workers that are not ready", lambda: not any(ready(worker) for worker in cluster.workers().values()))
    # Longer than the liveness probe's patience.
    time.sleep(70)
    ensure(restarts(cluster) == before, "a worker was restarted because it has no broker")
    cluster.in_pod("rabbitmq", "rabbitmqctl", "start_app")
    cluster.rolled_out()
    submit(64).check()
    ensure(restarts(cluster) == before, "a worker was restarted when the broker came back")


def restarts(cluster):
    return {name: one["status"]["containerStatuses"][0]["restartCount"] for name, one in cluster.workers().items()}


def ready(one):
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in one["status"]["conditions"])


def removed(cluster):
    """deleted, all of it is gone in time"""
    begun = time.monotonic()
    cluster.kubectl("delete", "--kustomize", str(cluster.folder))
    until("no pod of a worker", lambda: not cluster.get("pods", "--selector=app.kubernetes.io/name=vramq-worker")["items"])
    ensure(time.monotonic() - begun < GRACE_S, "the workers did not end by themselves")


def chart(cluster):
    """the Helm chart's workers and gateway answer over HTTP, and a restart of both ends"""
    cluster.apply(*volume(cluster, f"{NAMESPACE}-chart"), pod("keys", cluster.gateway, ["vramq-gateway", "new-key", "test"], restartPolicy="Never"))
    cluster.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/keys", f"--timeout={WAIT_S}s")
    # Both streams of the container: the entry is on standard output, the key on standard error.
    said = cluster.kubectl("logs", "keys")
    key = re.search(r"vramq-[0-9a-f]{64}", said)[0]
    entry = "".join(line for line in said.splitlines(keepends=True) if key not in line)
    cluster.kubectl("create", "secret", "generic", "vramq-gateway-keys", f"--from-literal=keys.toml={entry}")
    things = rendered(cluster)
    cluster.kubectl("apply", "--filename=-", text=things)
    names = ("demo-worker", "demo-gateway")
    for name in names:
        cluster.rolled_out(name)
    with forwarded("service/demo-gateway", 80) as port:
        body = {"model": MODEL, "input": "A man is eating food."}
        code, found = ask(port, body, key)
        ensure(code == 200 and len(found["data"][0]["embedding"]) == WIDTH, f"the gateway answers {code}: {found}")
        code, _ = ask(port, body, "wrong")
        ensure(code == 401, f"a wrong key is answered with {code}")
    for name in names:
        cluster.kubectl("rollout", "restart", f"deployment/{name}")
    for name in names:
        cluster.rolled_out(name)
    cluster.kubectl("delete", "--filename=-", text=things)


def rendered(cluster):
    """What `helm install demo` would apply, with these images."""
    images = [(image.rpartition(":")[0], image.rpartition(":")[2]) for image in (cluster.worker, cluster.gateway)]
    values = {part: {"image": {"repository": repository, "tag": tag}} for part, (repository, tag) in zip(("worker", "gateway"), images)}
    values["worker"] |= {"state": {"existingClaim": f"{NAMESPACE}-chart"}, "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}}}
    with Chart.load(str(ROOT / "deploy/helm/vramq")) as loaded:
        made = loaded.render(values_from_yaml(json.dumps(values)), name="demo", namespace=NAMESPACE)
    return "\n---\n".join(text for path, text in sorted(made.items()) if path.endswith(".yaml"))


@contextmanager
def forwarded(to, port):
    """The port of this machine by which one of the cluster is reached."""
    command = ["kubectl", "--namespace", NAMESPACE, "port-forward", to, f":{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forwarder:
        try:
            yield int(re.search(r"127\.0\.0\.1:(\d+)", forwarder.stdout.readline())[1])
        finally:
            forwarder.terminate()


def ask(port, body, key):
    """The gateway's status and its JSON, if that is 200."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/embeddings", json.dumps(body).encode(), headers)
    try:
        with opened(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, None


CHECKS = [accepted, broker, starts, unprivileged, rolls, deleted, killed, evicted, broker_restarts, removed, chart]

if __name__ == "__main__":
    main()
