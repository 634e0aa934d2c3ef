"""Client of the tuning service: httpx and the standard library only, so a laptop without CUDA or torch can use it.

Bodies are plain JSON with their types written down as TypedDicts. Everything that goes wrong is a ClientError.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tuner.answers import Best, Devices, Export, Health, Job, JobSubmitted, JobSummary, Json, Study, Trial

FINAL_STATES = frozenset({"DONE", "PARTIAL", "CANCELLED", "FAILED"})
STREAM_SILENCE_S = 60.0  # the service writes a heartbeat every 15 s
RECONNECT_S = 30.0  # how long a stream may stay broken before waiting gives up
RECONNECT_PAUSE_S = 0.5
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
PAGE = 500  # most that the service puts on one page


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One server-sent event of a job.

    name: "trial", "job" or "end"
    id: where to resume, given back as Last-Event-ID
    data: a trial with the id of its study, or the job
    """

    name: str
    id: str
    data: Json


class ClientError(Exception):
    """The service refused, or could not be reached (status 0).

    status: HTTP status, 0 without an answer
    error: name of the error
    detail: what is wrong
    hint: what to do about it, may be empty
    body: the whole answer, for members beyond these three
    """

    def __init__(self, *, status: int, error: str, detail: str, hint: str = "", body: Json | None = None) -> None:
        super().__init__(f"{detail} ({hint})" if hint else detail)
        self.status = status
        self.error = error
        self.detail = detail
        self.hint = hint
        self.body = body or {}


class Client:
    """Talks to one service. Use it as a context manager, or close it. Every method raises ClientError."""

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        timeout_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """timeout_s bounds each request; transport replaces the network in tests."""
        self.base_url = base_url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            scheme = httpx.URL(self.base_url).scheme
        except httpx.InvalidURL as error:
            raise _bad_address(base_url, str(error)) from error
        if scheme not in ("http", "https"):
            raise _bad_address(base_url, "it must begin with http:// or https://")
        self._http = httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout_s, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # ------------------------------------------------------------------ jobs

    def submit_job(self, body: Mapping[str, Any], *, idempotency_key: str | None = None) -> JobSubmitted:
        """Post a job; `body` as design and /openapi.json give it. The same key with the same body is one job."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return cast("JobSubmitted", self._post("/v1/jobs", dict(body), headers))

    def job(self, job_id: str) -> Job:
        """The job as it is now."""
        return cast("Job", self._json("GET", f"/v1/jobs/{_segment(job_id)}"))

    def jobs(self, *, state: str | None = None, limit: int = 50, after: str | None = None) -> list[JobSummary]:
        """One page of jobs, newest first; `after` is the id of the last job of the page before."""
        params = _given(state=state, limit=limit, after=after)
        return cast("list[JobSummary]", self._json("GET", "/v1/jobs", params=params)["items"])

    def cancel(self, job_id: str) -> Job:
        """Ask the job to stop; what is measured is kept."""
        return cast("Job", self._json("DELETE", f"/v1/jobs/{_segment(job_id)}"))

    def events(self, job_id: str, last_event_id: str | None = None) -> Iterator[Event]:
        """Events of one connection. It ends when the job ends or the service stops; resume with the last id."""
        headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
        timeout = httpx.Timeout(self._http.timeout.connect, read=STREAM_SILENCE_S)
        url = f"/v1/jobs/{_segment(job_id)}/events"
        with self._reached(), self._http.stream("GET", url, headers=headers, timeout=timeout) as response:
            _check(response)
            yield from _parse_events(response.iter_lines())

    def wait(
        self, job_id: str, on_event: Callable[[Event], None] | None = None, *, timeout_s: float | None = None
    ) -> Job:
        """Follow the job to its end, reconnecting where needed. Raises ClientError `WaitTimeout` after timeout_s."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        last_id: str | None = None
        reached_at = time.monotonic()
        while True:
            try:
                for event in self.events(job_id, last_id):
                    last_id, reached_at = event.id or last_id, time.monotonic()
                    if on_event is not None:
                        on_event(event)
                    _check_deadline(deadline, job_id)
                if (job := self.job(job_id))["state"] in FINAL_STATES:
                    return job
            except ClientError as error:
                if error.status != 0 or error.error == "WaitTimeout" or time.monotonic() - reached_at > RECONNECT_S:
                    raise
            _check_deadline(deadline, job_id)
            time.sleep(RECONNECT_PAUSE_S)

    # ------------------------------------------------------------------ questions

    def best(
        self,
        *,
        m: int,
        n: int,
        k: int,
        device: str,
        dtype: str = "bf16",
        layout: str = "NT",
        evidence: str | None = None,
        protocol: str | None = None,
        environment: str | None = None,
        allow_stale: bool = False,
        allow_default: bool = False,
        revision: int | None = None,
    ) -> Best:
        """Best config for a shape; `device` is a device or an architecture. A 404 carries `body["submit"]`."""
        params = _given(m=m, n=n, k=k, dtype=dtype, layout=layout, device=device, evidence=evidence, revision=revision)
        params |= _given(environment=environment, allow_stale=allow_stale or None, allow_default=allow_default or None)
        params |= _given(protocol=protocol)
        return cast("Best", self._json("GET", "/v1/best", params=params))

    def best_many(self, problems: Sequence[Mapping[str, Any]], *, device: str, **options: Any) -> Json:
        """Up to 4096 shapes at once; `options` are the other parameters of `best`."""
        return self._post("/v1/best", {"problems": list(problems), "device": device, **options})

    def dispatch(
        self,
        *,
        n: int,
        k: int,
        device: str,
        dtype: str = "bf16",
        layout: str = "NT",
        m_min: int = 1,
        m_max: int | None = None,
        evidence: str | None = None,
        protocol: str | None = None,
        environment: str | None = None,
        allow_stale: bool = False,
    ) -> Json:
        """Ranges of M with their answers, N and K fixed, and the gaps between them."""
        params = _given(n=n, k=k, dtype=dtype, layout=layout, device=device, m_min=m_min, m_max=m_max)
        params |= _given(evidence=evidence, environment=environment, allow_stale=allow_stale or None)
        params |= _given(protocol=protocol)
        return self._json("GET", "/v1/dispatch", params=params)

    def study(self, study_id: str) -> Study:
        """One study with its best trial."""
        return cast("Study", self._json("GET", f"/v1/studies/{_segment(study_id)}"))

    def trials(self, study_id: str, *, outcome: str | None = None) -> list[Trial]:
        """All trials of a study in number order, page by page."""
        return cast("list[Trial]", self._pages(f"/v1/studies/{_segment(study_id)}/trials", outcome=outcome))

    def results(self, **filters: Any) -> list[Json]:
        """One page of results, newest first; filters: device, study, published, limit, after."""
        return cast("list[Json]", self._json("GET", "/v1/results", params=_given(**filters))["items"])

    def result(self, result_id: str) -> Json:
        """One result."""
        return self._json("GET", f"/v1/results/{_segment(result_id)}")

    def revisions(self, result_id: str) -> list[Json]:
        """What was published for the problem and device of a result, newest first, page by page."""
        return self._pages(f"/v1/results/{_segment(result_id)}/revisions")

    def pin(self, result_id: str, *, pinned: bool = True) -> Json:
        """Let a published result stay the answer for its problem and device, or let the newest one answer again."""
        return self._send("PUT", "/v1/pins", {"result": result_id, "pinned": pinned})

    def pins(self) -> list[Json]:
        """Every pinned result."""
        return cast("list[Json]", self._json("GET", "/v1/pins")["items"])

    def regressions(self, *, device: str | None = None, verdict: str | None = None) -> Json:
        """Answers beside the environment before theirs: `items` of all pages, `stale` and `submit`."""
        items: list[Json] = []
        after: str | None = None
        while True:
            params = _given(device=device, verdict=verdict, limit=PAGE, after=after)
            page = self._json("GET", "/v1/regressions", params=params)
            items += page["items"]
            if (after := page["next"]) is None:
                return {"items": items, "stale": page["stale"], "submit": page["submit"]}

    # ------------------------------------------------------------------ exports

    def create_export(self, results: Sequence[str], *, format: str = "zip", allow_unverified: bool = False) -> Export:
        """Order a bundle of these results."""
        body = {"results": list(results), "format": format, "allow_unverified": allow_unverified}
        return cast("Export", self._post("/v1/exports", body))

    def export(self, export_id: str) -> Export:
        """The export as it is now."""
        return cast("Export", self._json("GET", f"/v1/exports/{_segment(export_id)}"))

    def wait_export(self, export_id: str, *, timeout_s: float = 120.0, poll_s: float = 0.25) -> Export:
        """Poll until the bundle is there. Raises ClientError `ExportFailed` with the reason, or `WaitTimeout`."""
        deadline = time.monotonic() + timeout_s
        while (export := self.export(export_id))["state"] not in FINAL_STATES:
            _check_deadline(deadline, export_id)
            time.sleep(poll_s)
        if export["state"] != "DONE":
            raise ClientError(status=0, error="ExportFailed", detail=f"export {export_id}: {export['reason']}")
        return export

    def download_bundle(self, export_id: str, path: Path) -> Path:
        """Write the bundle to `path`, whole or not at all. Raises ClientError `BundleCorrupt` for changed bytes."""
        expected = self.export(export_id)["bundle_sha256"]
        part, digest = path.with_name(f".{path.name}.part"), hashlib.sha256()
        try:
            url = f"/v1/exports/{_segment(export_id)}/bundle"
            with self._reached(), self._http.stream("GET", url) as response, part.open("wb") as file:
                _check(response)
                for block in response.iter_bytes():
                    digest.update(block)
                    file.write(block)
            if expected and digest.hexdigest() != expected:
                detail = (
                    f"bundle of export {export_id} has sha256 {digest.hexdigest()}, the service recorded {expected}"
                )
                raise ClientError(status=0, error="BundleCorrupt", detail=detail, hint="download it again")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path

    # ------------------------------------------------------------------ the service

    def devices(self) -> Devices:
        """Live devices and known profiles."""
        return cast("Devices", self._json("GET", "/v1/devices"))

    def health(self) -> Health:
        """Whether the service answers and reaches its database."""
        return cast("Health", self._json("GET", "/healthz"))

    def _pages(self, url: str, **filters: Any) -> list[Json]:
        """The entries of all pages of a list."""
        items: list[Json] = []
        after: Any = None
        while True:
            page = self._json("GET", url, params=_given(**filters, limit=PAGE, after=after))
            items += page["items"]
            if (after := page["next"]) is None:
                return items

    def _post(self, url: str, body: Json, headers: Mapping[str, str] | None = None) -> Json:
        return self._send("POST", url, body, headers)

    def _send(self, method: str, url: str, body: Json, headers: Mapping[str, str] | None = None) -> Json:
        # Encoded here, as ASCII: httpx raises for text that UTF-8 cannot carry, the service answers with the field.
        content = json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        return self._json(method, url, content=content, headers=sent)

    def _json(self, method: str, url: str, **options: Any) -> Json:
        with self._reached():
            response = self._http.request(method, url, **options)
        _check(response)
        try:
            return cast("Json", response.json())
        except ValueError:
            raise _not_ours(response) from None

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn every failure of the network into a ClientError with status 0."""
        try:
            yield
        except httpx.TimeoutException as error:
            detail = f"{self.base_url} did not answer in time: {error or type(error).__name__}"
            raise ClientError(status=0, error="Timeout", detail=detail, hint="try again, or allow more time") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            hint = "start it with `gemm-tuner serve`, or give its address with --url"
            detail = f"cannot reach {self.base_url}: {error}"
            raise ClientError(status=0, error="Unreachable", detail=detail, hint=hint) from error


def _bad_address(address: str, why: str) -> ClientError:
    detail = f"{address!r} is no address of a service: {why}"
    return ClientError(status=0, error="InvalidAddress", detail=detail, hint="such as http://127.0.0.1:8000")


def _given(**values: Any) -> dict[str, Any]:
    """Query parameters that were given a value."""
    return {name: value for name, value in values.items() if value is not None}


def _segment(identity: str) -> str:
    """An id as one path segment. Raises ClientError for text that is none and might lead to another route."""
    if _ID.fullmatch(identity) is None:
        hint = "an id is 32 hexadecimal digits, as `gemm-tuner jobs` and `gemm-tuner show` print it"
        raise ClientError(status=404, error="NotFound", detail=f"nothing has the id {identity!a}", hint=hint)
    return identity


def _check(response: httpx.Response) -> None:
    """Raise ClientError unless the service did what was asked."""
    if response.is_success:
        return
    response.read()
    try:
        body = response.json()
        raise ClientError(
            status=response.status_code, error=body["error"], detail=body["detail"], hint=body["hint"], body=body
        )
    except (ValueError, KeyError, TypeError):
        raise _not_ours(response) from None


def _not_ours(response: httpx.Response) -> ClientError:
    detail = f"{response.url} answered {response.status_code}, not as the tuning service does"
    return ClientError(status=response.status_code, error="NotOurService", detail=detail, hint="check the address")


def _check_deadline(deadline: float | None, identity: str) -> None:
    if deadline is not None and time.monotonic() > deadline:
        detail = f"{identity} did not finish in the time that was allowed"
        raise ClientError(status=0, error="WaitTimeout", detail=detail, hint="it goes on; wait again, or cancel it")


def _parse_events(lines: Iterator[str]) -> Iterator[Event]:
    """Read the event-stream format; comments are heartbeats, an event without its blank line is dropped."""
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            fields[name] = f"{fields['data']}\n{value}" if name == "data" and "data" in fields else value
        elif "data" in fields:
            yield Event(name=fields.get("event", "message"), id=fields.get("id", ""), data=json.loads(fields["data"]))
            fields = {}
