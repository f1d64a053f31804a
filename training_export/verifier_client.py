"""Asking a running verifier (`python -m verification serve`) for verdicts, from inside a trainer.

Standard library only, and safe under threads. A queue that is full or a verdict that is late is
waited for; a server that cannot be reached is tried a few times. Then it raises: a reward that was
not measured must not look like one.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from schemas.codec import from_json
from schemas.records import Verdict, VerdictStatus

URL_VARIABLE, TOKEN_VARIABLE = "OPS6K_VERIFIER_URL", "OPS6K_VERIFIER_TOKEN"
ATTEMPTS = 5
"""At a server that does not answer, or answers that it failed."""
PATIENCE_S = 1800.0
"""For a place in the queue and the work itself."""
REQUEST_S = 900.0
LONGEST_PAUSE_S = 30.0


class VerifierError(RuntimeError):
    """There is no verdict, which says nothing about the solution."""


class SolutionRefused(ValueError):
    """The verifier cannot read the solution: paths, sizes, no `model_new.py`."""


@dataclass(frozen=True, kw_only=True)
class Verifier:
    """A running verifier."""

    url: str
    token: str | None = None
    attempts: int = ATTEMPTS
    patience_s: float = PATIENCE_S

    @staticmethod
    def find(url: str | None = None) -> Verifier:
        """The one at `url`, else at $OPS6K_VERIFIER_URL. Raises VerifierError without either."""
        url = url or os.environ.get(URL_VARIABLE)
        if not url:
            raise VerifierError(
                f"expected the address of a verifier in the argument url or in ${URL_VARIABLE}, "
                "found none: start one with python -m verification serve"
            )
        return Verifier(url=url.rstrip("/"), token=os.environ.get(TOKEN_VARIABLE))

    def verify(self, code: str, files: dict[str, str], **more: Any) -> Verdict:
        """The verdict on `files` as a solution of the problem with text `code`.

        `more`: precision and target of the problem, where they are known. Raises SolutionRefused,
        and VerifierError when there is no verdict after all attempts or the problem is refused.
        """
        body = {"problem": {"code": code, **more}, "solution": {"files": files}}
        data = json.dumps(body).encode()
        deadline = time.monotonic() + self.patience_s
        failures, waits, last = 0, 0, ""
        while failures < self.attempts and time.monotonic() < deadline:
            status, reply, retry_after = self._post(data)
            if status == 200:
                verdict = _verdict(reply)
                if verdict.status is not VerdictStatus.REFERENCE_ERROR:
                    return verdict
                last, failures = f"reference_error: {verdict.reason}", failures + 1
            elif status in (429, 504):
                last, waits = str(reply.get("error")), waits + 1
                pause = retry_after if retry_after is not None else _backoff(waits)
                # Everybody who was turned away would else come back in the same instant.
                time.sleep(min(pause, LONGEST_PAUSE_S) * random.uniform(0.7, 1.3))
                continue
            elif status == 400 and reply.get("about") == "solution":
                raise SolutionRefused(str(reply.get("error")))
            elif status is not None and status < 500:
                raise VerifierError(f"{self.url} answers {status}: {reply.get('error')}")
            else:
                last, failures = str(reply.get("error")), failures + 1
            if failures < self.attempts:
                time.sleep(_backoff(failures) * random.uniform(0.7, 1.3))
        raise VerifierError(
            f"no verdict from {self.url} after {failures} failures and {waits} waits; "
            f"the last one: {last}"
        )

    def _post(self, data: bytes) -> tuple[int | None, dict[str, Any], float | None]:
        """Status, body and seconds of Retry-After; the status is None without a whole answer."""
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(f"{self.url}/verify", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as response:
                body = _object(response.read())
                return None if "verdict" not in body else response.status, body, None
        except urllib.error.HTTPError as error:
            after = error.headers.get("Retry-After", "")
            with error:
                body = _object(error.read())
            return error.code, body, float(after) if after.isdigit() else None
        except (OSError, http.client.HTTPException) as error:
            return None, {"error": f"{type(error).__name__}: {error}"}, None


def _backoff(attempt: int) -> float:
    return min(LONGEST_PAUSE_S, 0.5 * 2.0 ** (attempt - 1))


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"error": f"not a JSON object: {data[:200]!r}"}


def _verdict(reply: dict[str, Any]) -> Verdict:
    try:
        return from_json(Verdict, reply["verdict"])
    except (TypeError, ValueError) as error:
        raise VerifierError(
            f"expected a verdict as this version of ops6k knows it, got {error}: do client and "
            "server run the same version?"
        ) from error
