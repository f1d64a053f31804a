"""What would be sent to Dataflow, with no network and no credentials.

Covered: the worker pool, hints, stage isolation, the request to the service, and that the staged
graph runs. Not covered, because only the service decides it: its own fusion, quotas, image pulls,
driver installation, and whether it accepts the hint strings.
"""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.dataflow.internal import apiclient
from apache_beam.runners.pipeline_context import PipelineContext
from apache_beam.runners.portability.fn_api_runner import fn_runner
from apache_beam.transforms import environments

from pipelines import ops6k, options, runner, transforms
from pipelines.options import RunConfig
from runtime.store import Store

ACCELERATOR = "beam:resources:accelerator:v1"
ACTIVE_BUNDLES = "beam:resources:max_active_bundles_per_worker:v1"
IMAGE = "us-docker.pkg.dev/fake/ops6k/gpu-worker:1"
DEVICE_STEPS = {"Admit/Run/ParDo(StageFn)", "Rollout/Run/ParDo(StageFn)"}


def flags(temp: str, *more: str) -> list[str]:
    """The launch command of docs/dataflow.md, with a fake project."""
    return [
        "--runner=DataflowRunner",
        "--target=cuda",
        "--num_problems=12",
        "--output=memory://dataflow",
        "--project=fake",
        "--region=us-central1",
        "--job_name=ops6k",
        f"--temp_location={temp}",
        f"--staging_location={temp}",
        f"--sdk_container_image={IMAGE}",
        "--sdk_location=container",
        "--machine_type=n1-standard-8",
        "--max_num_workers=4",
        "--number_of_worker_harness_threads=1",
        "--experiments=no_use_multiple_sdk_containers",
        *more,
    ]


def submit(argv: list[str]) -> Any:
    """Build the graph and start it. Returns Beam's result without waiting for it."""
    config, beam_flags = options.parse(argv)
    pipeline = runner.prepare(config, beam_flags)
    ops6k.build(pipeline, config)
    return pipeline.run()


@pytest.fixture(autouse=True)
def tiny_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "STAGES", "tests.tiny_stages")


@pytest.fixture
def job(tmp_path: Path) -> tuple[dict[str, Any], beam_runner_api_pb2.Pipeline]:
    """The job request and the graph, as the runner writes them instead of sending them."""
    template = tmp_path / "job.json"
    offline = ("--no_auth", "--dataflow_endpoint=http://localhost:1")
    submit(flags(str(tmp_path), *offline, f"--template_location={template}"))
    graph = beam_runner_api_pb2.Pipeline()
    graph.ParseFromString((tmp_path / "pipeline.pb").read_bytes())
    return json.loads(template.read_text()), graph


def test_the_worker_pool_and_the_hints(
    job: tuple[dict[str, Any], beam_runner_api_pb2.Pipeline],
) -> None:
    request, graph = job
    pool = request["environment"]["workerPools"][0]
    assert pool["machineType"] == "n1-standard-8"
    assert pool["numThreadsPerWorker"] == 1
    images = [image["containerImage"] for image in pool["sdkHarnessContainerImages"]]
    assert images == [IMAGE, IMAGE]  # the same image for CPU stages and device stages
    assert "no_use_multiple_sdk_containers" in request["environment"]["experiments"]

    hinted = set()
    for step in graph.components.transforms.values():
        if step.environment_id:
            hints = graph.components.environments[step.environment_id].resource_hints
            if ACCELERATOR in hints:
                hinted.add(step.unique_name)
                assert hints[ACCELERATOR].decode() == RunConfig().accelerator
                assert hints[ACTIVE_BUNDLES] == b"1"  # Beam adds nested ones up
    assert hinted == DEVICE_STEPS


def test_device_stages_share_an_environment_and_hold_nothing_else(
    job: tuple[dict[str, Any], beam_runner_api_pb2.Pipeline],
) -> None:
    _, graph = job
    local = fn_runner.FnApiRunner()
    _, stages = local.create_stages(local.resolve_any_environments(graph))
    held = [{step.unique_name for step in stage.transforms} for stage in stages]
    for step in DEVICE_STEPS:
        (names,) = (names for names in held if step in names)
        ours = {name for name in names if not re.search(r"DeviceI*/|/Read|/Write|ToDevice", name)}
        assert ours == {step}
    device = {
        step.environment_id
        for step in graph.components.transforms.values()
        if step.unique_name in DEVICE_STEPS
    }
    assert len(device) == 1


def test_the_staged_graph_runs(
    job: tuple[dict[str, Any], beam_runner_api_pb2.Pipeline],
) -> None:
    """The bytes that were staged, in this process instead of in containers."""
    _, graph = job
    here = environments.EmbeddedPythonEnvironment.default().to_runner_api(PipelineContext())
    for environment in graph.components.environments.values():
        environment.urn, environment.payload = here.urn, here.payload
        del environment.dependencies[:]
    fn_runner.FnApiRunner().run_via_runner_api(graph, PipelineOptions([])).wait_until_finish()
    store = Store("memory://dataflow/.store")
    counts = [store.count(kind) for kind in ("candidates", "admissions", "trajectories")]
    assert counts == [11, 10, 9]  # 12, less 3 at compose, 5 at admit, 7 at dedup


def test_production_flags_build_a_job_without_sending_it() -> None:
    """gs:// and the real endpoint; only `--dry_run` keeps it off the network."""
    result = submit(flags("gs://fake-bucket/temp", "--dry_run", "--no_auth"))
    environment = apiclient.Environment(
        [], result.job.options, "8", "gs://fake-bucket/graph.pb", result.job.proto_pipeline
    )
    (pool,) = environment.proto.worker_pools
    assert pool.kind == "harness"
    assert (pool.machine_type, pool.num_threads_per_worker) == ("n1-standard-8", 1)


class FakeDataflow(http.server.BaseHTTPRequestHandler):
    """The two calls a submission makes: create a job, ask how it is."""

    requests: ClassVar[list[tuple[str, str, Any]]] = []
    job: ClassVar[dict[str, str]] = {"id": "job-1", "projectId": "fake", "location": "us-central1"}

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.requests.append(("POST", self.path, body))
        echoed = {k: body[k] for k in ("name", "clientRequestId", "type") if k in body}
        self._answer(echoed | self.job | {"currentState": "JOB_STATE_PENDING"})

    def do_GET(self) -> None:
        self.requests.append(("GET", self.path, None))
        empty = "messages" in self.path or "metrics" in self.path
        self._answer({} if empty else self.job | {"currentState": "JOB_STATE_DONE"})

    def _answer(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[int]:
    FakeDataflow.requests.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeDataflow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


def test_a_whole_submission(service: int, tmp_path: Path) -> None:
    endpoint = f"--dataflow_endpoint=http://localhost:{service}"
    result = submit(flags(str(tmp_path), "--no_auth", endpoint))
    assert result.wait_until_finish() == "DONE"
    (post,) = [request for request in FakeDataflow.requests if request[0] == "POST"]
    assert post[1].startswith("/v1b3/projects/fake/locations/us-central1/jobs")
    assert post[2]["environment"]["workerPools"][0]["machineType"] == "n1-standard-8"
    assert not (list(tmp_path.rglob("*main_session*")))


def test_on_cpu_there_are_no_hints() -> None:
    pipeline = beam.Pipeline(runner=fn_runner.FnApiRunner())
    ops6k.build(pipeline, RunConfig(target="cpu"))
    graph = pipeline.to_runner_api()
    assert len(graph.components.environments) == 1
