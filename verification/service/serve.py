"""`python -m verification serve`: verdicts over HTTP.

    POST /verify   {"problem": {"code", "precision"?, "target"?},
                    "solution": {"files": {path: text}, "form"?}, "effort"?, "deadline_s"?}
                   200  {"verdict": a Verdict, "doubt": what screening holds against the problem}
                   400  malformed, with expected and got; `about`: request, problem or solution
                   401  wrong token
                   413  too large
                   422  the problem is refused: a verdict would say nothing
                   429  the queue is full; Retry-After
                   500  two workers died over it, or a failure of ours
                   503  starting or shutting down
                   504  not ready within the deadline; the work goes on, ask again
    GET /health    200 once a worker is ready, with device and isolation
    GET /stats     queue, verdicts a minute, by status, workers

Whoever may post may run code in the verifier's sandbox: other machines are served with a token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import signal
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from schemas.records import Precision, Target
from verification.folder import MAX_TOTAL_BYTES, FolderError, SettingsError, problem_of, solution_of
from verification.machine import MachineSettings, start_zygote
from verification.service import pool as pools
from verification.service.pool import Closing, Pool, QueueFull
from verification.service.pool_process import Job, WorkerSettings

MAX_REQUEST_BYTES = 2 * MAX_TOTAL_BYTES
"""As JSON, where a newline or a quote takes two bytes."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
FINISH_S = 600.0
EFFORTS = ("reward", "publish")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Malformed(Exception):
    """A request that cannot be read: what was expected, what came."""


class Server:
    """The routes over a pool."""

    def __init__(self, pool: Pool, target: Target, deadline_s: float, token: str | None) -> None:
        self._pool = pool
        self._target = target
        self._deadline_s = deadline_s
        self._token = token

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[_as_json])
        app.router.add_post("/verify", self.verify)
        app.router.add_get("/health", self.health)
        app.router.add_get("/stats", self.stats)
        return app

    async def verify(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return _error(401, "expected the header 'Authorization: Bearer TOKEN'")
        try:
            job, deadline_s = parse_request(await request.read(), self._target)
        except Malformed as error:
            return _error(400, str(error), about="request")
        except FolderError as error:
            return _error(400, str(error), about=error.about)
        deadline_s = min(deadline_s or self._deadline_s, self._deadline_s)
        try:
            # Shielded: others may wait for the same answer, and the work is worth finishing.
            coming = asyncio.shield(self._pool.submit(job))
            answer = await asyncio.wait_for(coming, deadline_s)
        except QueueFull as error:
            return _error(429, str(error), headers={"Retry-After": str(error.retry_s)})
        except Closing as error:
            return _error(503, str(error))
        except TimeoutError:
            late = f"no verdict within {deadline_s:g} s; the work goes on, ask again for its result"
            return _error(504, late)
        return web.json_response(answer.body, status=answer.status)

    async def health(self, request: web.Request) -> web.Response:
        ready = self._pool.ready
        body = {"status": "ok" if ready else "starting", "target": str(self._target)}
        return web.json_response({**body, **self._pool.about()}, status=200 if ready else 503)

    async def stats(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return _error(401, "expected the header 'Authorization: Bearer TOKEN'")
        return web.json_response(self._pool.stats())

    def _allowed(self, request: web.Request) -> bool:
        if self._token is None:
            return True
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode())


def parse_request(body: bytes, target: Target) -> tuple[Job, float | None]:
    """The job and the deadline in a body. Raises Malformed or FolderError."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"body: expected JSON, got {str(error)[:200]}") from error
    problem, solution = _get(request, "problem", dict), _get(request, "solution", dict)
    asked = _get(problem, "target", str, str(target))
    if asked != target:
        raise Malformed(f"problem.target: expected {target}, which is served here, got {asked!r}")
    precision = _one_of(problem, "precision", list(map(str, Precision)), "fp32")
    deadline_s = _get(request, "deadline_s", int | float, 0)
    if not 0 <= deadline_s < float("inf"):
        raise Malformed(f"deadline_s: expected seconds, got {deadline_s!r}")
    job = Job(
        problem=problem_of(_get(problem, "code", str), target, Precision(precision)),
        solution=solution_of(_files(solution), _get(solution, "form", str, "auto")),
        effort=_one_of(request, "effort", EFFORTS, "reward"),
        accept_problem=_get(request, "accept_problem", bool, False),
    )
    return job, float(deadline_s) or None


def _files(solution: dict[str, Any]) -> dict[str, str]:
    """{path: text}, or a list of {"path", "text"} as in the dataset's `solution` column."""
    found = _get(solution, "files", dict | list)
    if isinstance(found, list):
        pairs = [(_get(file, "path", str), _get(file, "text", str)) for file in found]
        if len(dict(pairs)) != len(pairs):
            raise Malformed("solution.files: expected each path once, got one twice")
        return dict(pairs)
    for path in found:
        _get(found, path, str)
    return found


def _get(source: Any, name: str, kind: Any, default: Any = None) -> Any:
    """A member of a JSON object. `default`: when it is left out; without one it must be there."""
    if not isinstance(source, dict):
        raise Malformed(f"{name}: expected to find it in an object, got {type(source).__name__}")
    value = source.get(name, default)
    numeric_bool = isinstance(value, bool) and kind is not bool
    if value is None or numeric_bool or not isinstance(value, kind):
        wanted = getattr(kind, "__name__", str(kind))
        raise Malformed(f"{name[:60]}: expected {wanted}, got {type(value).__name__}")
    return value


def _one_of(source: dict[str, Any], name: str, choices: Any, default: str) -> str:
    value = _get(source, name, str, default)
    if value not in choices:
        raise Malformed(f"{name}: expected {', '.join(choices)}, got {value[:60]!r}")
    return value


def _error(status: int, text: str, headers: Any = None, **more: str) -> web.Response:
    return web.json_response({"error": text, **more}, status=status, headers=headers)


@web.middleware
async def _as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """aiohttp's own refusals (404, 405, 413) in the form of ours."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error(error.status, error.text or error.reason)


def serve(options: Namespace) -> int:
    """Carry out the command: serve until SIGINT or SIGTERM, then finish what runs.

    Raises SettingsError, and RuntimeError when no worker can be started.
    """
    token = _token(options)
    target = Target(options.target)
    root = Path(options.store).expanduser()
    (root / "cache").mkdir(parents=True, exist_ok=True)
    devices = pools.devices(options.target, options.devices, options.workers_per_device)
    if not devices:
        raise SettingsError(f"expected a device for --target={target}, found none")
    zygote = start_zygote(root / "cache", target)
    try:
        settings = MachineSettings(
            target=target,
            device=devices[0],
            store=str(root),
            cache=str(root / "cache"),
            memory_limit_gib=options.memory_limit_gib,
            device_memory_gib=options.device_memory_gib,
            problem_timeout_s=options.problem_timeout_s,
            lease_log=str(root / "lease.log"),
            zygote=zygote.address,
        )
        workers = [
            WorkerSettings(
                machine=replace(settings, device=device),
                libraries=options.libraries,
                partial_isolation=options.partial_isolation,
            )
            for device in devices
        ]
        hidden = (options.token_env,) if options.token_env else ()
        pool = Pool(workers, options.queue, hidden)
        server = Server(pool, target, options.deadline_s, token)
        asyncio.run(_run(server.application(), pool, options.host, options.port))
    finally:
        zygote.close()
    return 0


def _token(options: Namespace) -> str | None:
    if options.token_env is None:
        if options.host not in LOOPBACK and not options.without_token:
            raise SettingsError(
                f"expected --token_env=NAME for --host={options.host}, because whoever may post "
                "may run code here; --without_token serves everybody"
            )
        return None
    token = os.environ.get(options.token_env)
    if not token:
        raise SettingsError(f"expected a token in ${options.token_env}, found none")
    return token


async def _run(app: web.Application, pool: Pool, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pool.start()
    runner = web.AppRunner(app, shutdown_timeout=FINISH_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        print(f"serving at http://{host}:{runner.addresses[0][1]}", flush=True)
        while not stop.is_set():
            if (why := pool.hopeless) is not None:
                raise RuntimeError(f"no worker starts: {why}")
            await _wait(stop, 1.0)
        print("finishing what runs", flush=True)
        await pool.drain()
    finally:
        await runner.cleanup()
        await pool.close()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
