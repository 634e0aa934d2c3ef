"""Stored results, and bundles made of them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from api.services.vendor import verdict
from db import queries
from db.queries import NewMeasurement
from tests.api.conftest import job_body

if TYPE_CHECKING:
    from pathlib import Path

    from tests.api.conftest import Service


def finished_export(service: Service, bundle_path: str, data: bytes | None = b"PK zip") -> str:
    """An export that a tuner has finished, its file under the exports folder unless `data` is None."""
    body = {"results": [service.add_result()]}
    export = service.http.post("/v1/exports", json=body).json()
    if data is not None:
        (service.settings.exports_dir / "bundle.zip").write_bytes(data)
    with service.db.write() as session:
        queries.claim_next_export(session, "tuner-1")
        queries.finish_export(
            session,
            export["id"],
            state="DONE",
            bundle_path=bundle_path,
            bundle_sha256=hashlib.sha256(data or b"").hexdigest(),
            size_bytes=len(data or b""),
        )
    return str(export["id"])


def test_results_are_paged_and_filtered(service: Service) -> None:
    """Newest first; by device, and by whether they are published."""
    ids = [service.add_result(m=m, publish=m > 16) for m in (8, 16, 24, 32)]
    page = service.http.get("/v1/results", params={"limit": 3}).json()
    assert [item["id"] for item in page["items"]] == ids[:0:-1]
    rest = service.http.get("/v1/results", params={"limit": 3, "after": page["next"]}).json()
    assert ([item["id"] for item in rest["items"]], rest["next"]) == (ids[:1], None)
    published = service.http.get("/v1/results", params={"published": "true"}).json()
    assert [item["problem"]["m"] for item in published["items"]] == [32, 24]
    assert service.http.get("/v1/results", params={"device": "b200"}).json()["items"] == []
    assert service.http.get("/v1/results", params={"device": "T4"}).status_code == 422


def test_result_is_shown_with_its_times_and_evidence(service: Service) -> None:
    """The same members as in the list."""
    result_id = service.add_result(interval_us=(175.2, 176.0), baselines_us={"torch": 176.8}, trials=40)
    shown = service.http.get(f"/v1/results/{result_id}").json()
    assert (shown["id"], shown["revision"], shown["interval_us"]) == (result_id, 1, [175.2, 176.0])
    assert (shown["evidence"], shown["trials"]) == (["measured", "numeric", "checked"], 40)
    assert service.http.get(f"/v1/results/{'0' * 32}").status_code == 404


def test_export_is_queued_with_its_order(service: Service) -> None:
    """The same result twice is exported once."""
    result_id = service.add_result()
    response = service.http.post("/v1/exports", json={"results": [result_id, result_id]})
    assert response.status_code == 202
    export = response.json()
    assert (export["state"], export["results"], export["bundle"]) == ("QUEUED", [result_id], None)
    assert response.headers["Location"] == f"/v1/exports/{export['id']}"
    assert service.http.get(f"/v1/exports/{export['id']}").json() == export


def test_unverified_result_is_exported_only_when_allowed(service: Service) -> None:
    """The refusal names the missing evidence and the field that allows it."""
    result_id = service.add_result(publish=False, evidence=("modeled",))
    refused = service.http.post("/v1/exports", json={"results": [result_id]})
    assert refused.status_code == 409
    assert refused.json()["error"] == "UnverifiedResult"
    assert "lacks numeric and checked" in refused.json()["detail"]
    assert "allow_unverified" in refused.json()["hint"]
    allowed = service.http.post("/v1/exports", json={"results": [result_id], "allow_unverified": True})
    assert (allowed.status_code, allowed.json()["allow_unverified"]) == (202, True)


@pytest.mark.parametrize(
    ("change", "status", "detail"),
    [
        ({"results": []}, 422, "results: must not be empty"),
        ({"results": ["0" * 32]}, 404, "results[0]: no result"),
        ({"results": ["../../etc/passwd"]}, 404, "results[0]: no result '../../etc/passwd'"),
        ({"results": ["\x00"]}, 404, "results[0]: no result '\\x00'"),
        ({"results": ["0" * 32] * 257}, 422, "results: has more than the limit of 256"),
        ({"format": "tar"}, 422, "format: must be 'zip'"),
        ({"bundle_path": "/etc/passwd"}, 422, "bundle_path: is not a field of this request"),
        ({"allow_unverified": "yes"}, 422, "allow_unverified: must be true or false"),
    ],
)
def test_bad_order_is_refused(service: Service, change: dict[str, object], status: int, detail: str) -> None:
    """Nothing is queued."""
    body = {"results": [service.add_result()]} | change
    response = service.http.post("/v1/exports", json=body)
    assert response.status_code == status
    assert response.json()["detail"].startswith(detail)
    with service.db.write() as session:
        assert queries.claim_next_export(session, "tuner-1") is None


def test_finished_bundle_is_downloaded_as_a_zip(service: Service) -> None:
    """Bytes, type, name and hash; parts of it too."""
    export_id = finished_export(service, "bundle.zip", b"PK of a bundle")
    shown = service.http.get(f"/v1/exports/{export_id}").json()
    assert shown["state"] == "DONE"
    response = service.http.get(shown["bundle"])
    assert (response.status_code, response.content) == (200, b"PK of a bundle")
    assert response.headers["Content-Type"] == "application/zip"
    assert f'filename="gemms-{export_id[:8]}.zip"' in response.headers["Content-Disposition"]
    assert shown["file_name"] == f"gemms-{export_id[:8]}.zip"
    assert hashlib.sha256(response.content).hexdigest() == shown["bundle_sha256"]
    assert response.headers["ETag"] == f'"{shown["bundle_sha256"]}"'
    assert service.http.get(shown["bundle"], headers={"Range": "bytes=3-4"}).content == b"of"


def test_wheel_is_downloaded_under_its_own_name(service: Service) -> None:
    """pip reads a wheel's version and platform from the name."""
    name = "tuned_gemms-1.0.0+gabc-py3-none-linux_x86_64.whl"
    (service.settings.exports_dir / "0123").mkdir()
    (service.settings.exports_dir / "0123" / name).write_bytes(b"PK zip")
    export_id = finished_export(service, f"0123/{name}")
    assert service.http.get(f"/v1/exports/{export_id}").json()["file_name"] == name
    disposition = service.http.get(f"/v1/exports/{export_id}/bundle").headers["Content-Disposition"]
    assert name.replace("+", "%2B") in disposition or name in disposition


def test_absolute_path_inside_the_exports_folder_is_served(service: Service) -> None:
    """The tuner may store either."""
    export_id = finished_export(service, str(service.settings.exports_dir / "bundle.zip"))
    assert service.http.get(f"/v1/exports/{export_id}/bundle").status_code == 200


@pytest.mark.parametrize(
    "path", ["../secret.zip", "/etc/passwd", "sub/../../secret.zip", "link.zip", "", ".", "gone.zip"]
)
def test_path_outside_the_exports_folder_is_never_served(service: Service, tmp_path: Path, path: str) -> None:
    """Even when the database says so, and not through a link either."""
    (tmp_path / "secret.zip").write_bytes(b"secret")
    (service.settings.exports_dir / "link.zip").symlink_to(tmp_path / "secret.zip")
    export_id = finished_export(service, path)
    response = service.http.get(f"/v1/exports/{export_id}/bundle")
    assert response.status_code == 410
    assert response.json()["error"] == "BundleMissing"
    assert str(tmp_path) not in response.text


def test_bundle_of_an_unfinished_or_failed_export_is_a_conflict(service: Service) -> None:
    """The answer has the state, or the reason of the failure."""
    export = service.http.post("/v1/exports", json={"results": [service.add_result()]}).json()
    url = f"/v1/exports/{export['id']}/bundle"
    assert service.http.get(url).json()["detail"] == f"export {export['id']} is QUEUED"
    with service.db.write() as session:
        queries.claim_next_export(session, "tuner-1")
        queries.finish_export(session, export["id"], state="FAILED", reason="the artifact is gone")
    response = service.http.get(url)
    assert response.status_code == 409
    assert "the artifact is gone" in response.json()["detail"]
    assert service.http.get(f"/v1/exports/{'f' * 32}/bundle").status_code == 404


def measured_result(service: Service, *, low: float = 1.001, high: float = 1.003) -> str:
    """A result with the study, the trial and the samples that it came from."""
    submitted = service.http.post("/v1/jobs", json=job_body()).json()
    study_id = submitted["studies"][0]["id"]
    service.save_trials(study_id, 1)
    samples = {"samples_us": [99.0, 100.0, 101.0], "baselines_us": {"cublaslt_best": [100.0, 101.0, 102.0]}}
    with service.db.write() as session:
        for phase, shift in (("trial", 1.5), ("final", 1.0)):
            queries.save_measurement(
                session,
                study_id,
                0,
                NewMeasurement(
                    samples_us=[shift * sample for sample in samples["samples_us"]],
                    baselines_us=samples["baselines_us"],
                    protocol={"kind": "sustained"},
                    discarded=2,
                    states=[{"sm_clock_mhz": 1500.0, "power_w": 700.0}] * 3,
                    energy_mj={"ours": 143.0},
                ),
                phase=phase,
            )
        coverage = {"askable": 4000, "asked": 60, "rejected": 20, "compiled": 40, "timed": 39}
        queries.finish_study(session, study_id, state="DONE", best_trial=0, best_us=100.0, coverage=coverage)
    return service.add_result(
        study_id=study_id,
        trial_number=0,
        ratio={"cublaslt_best": {"median": 1.002, "low": low, "high": high}},
        noise=0.0012,
        aa_ratio={"median": 1.0, "low": 0.999, "high": 1.001},
    )


def test_result_comes_with_raw_samples_protocol_states_noise_and_coverage(service: Service) -> None:
    """Whoever doubts a number can work it out: the samples are those of the final, and the list has them too."""
    result_id = measured_result(service)
    shown = service.http.get(f"/v1/results/{result_id}").json()
    assert shown["measurement"] == {
        "phase": "final",
        "samples_us": [99.0, 100.0, 101.0],
        "baselines_us": {"cublaslt_best": [100.0, 101.0, 102.0]},
        "discarded": 2,
        "protocol": {"kind": "sustained"},
        "states": [{"sm_clock_mhz": 1500.0, "power_w": 700.0}] * 3,
        "energy_mj": {"ours": 143.0},
    }
    assert (shown["noise"], shown["aa_ratio"]["median"]) == (0.0012, 1.0)
    assert shown["coverage"] == {"askable": 4000, "asked": 60, "rejected": 20, "compiled": 40, "timed": 39}
    assert service.http.get("/v1/results").json()["items"] == [shown]
    study = service.http.get(f"/v1/studies/{shown['study_id']}").json()
    assert study["coverage"] == shown["coverage"]


def test_result_without_samples_says_so_with_null(service: Service) -> None:
    """Modeled and imported results have none."""
    shown = service.http.get(f"/v1/results/{service.add_result()}").json()
    assert (shown["measurement"], shown["noise"], shown["aa_ratio"], shown["coverage"]) == (None, None, None, None)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.001, 1.003, "faster than cublaslt_best: 1.002 of its speed (95 % interval 1.001 to 1.003)"),
        (0.999, 1.003, "as fast as cublaslt_best within the noise"),
        (0.961, 0.964, "slower than cublaslt_best"),
    ],
)
def test_answer_says_plainly_how_it_compares_with_the_vendor_library(
    service: Service, low: float, high: float, words: str
) -> None:
    """Nothing slower than the vendor library is handed out without saying so."""
    result_id = measured_result(service, low=low, high=high)
    assert service.http.get(f"/v1/results/{result_id}").json()["verdict"].startswith(words)
    query = {"m": 4096, "n": 4096, "k": 4096, "device": "h200"}
    assert service.http.get("/v1/best", params=query).json()["verdict"].startswith(words)


def test_verdict_of_other_ratios() -> None:
    """A bare number of an earlier version, torch alone, nothing at all."""
    assert verdict({"cublaslt_best": 0.97}).startswith("slower than cublaslt_best: 0.970")
    assert verdict({"torch": {"median": 1.1, "low": 1.0, "high": 1.2}}).startswith("as fast as torch within the noise")
    assert verdict({}) == verdict(None) == "not compared with the vendor library"
