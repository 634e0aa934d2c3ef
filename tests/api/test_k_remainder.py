"""B9: a question for a K that no block divides is answered by a config that can serve it, or refused with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kernels.config import config_from_dict
from kernels.devices import profile_named
from kernels.problem import GemmProblem
from kernels.rules import violation
from tests.api.conftest import SM90_CONFIG, SM100_CONFIG

if TYPE_CHECKING:
    from tests.api.conftest import Service

SHAPE: dict[str, Any] = {"m": 4096, "n": 4096, "dtype": "bf16"}


@pytest.mark.parametrize("k", [48, 40, 4104, 4160])
@pytest.mark.parametrize("device", ["h200", "b200"])
def test_b9_default_for_a_k_with_a_remainder_is_legal_for_that_very_shape(
    service: Service, device: str, k: int
) -> None:
    """B9: k = 48, the shape of the report, and others that blk_k does not divide."""
    response = service.http.get("/v1/best", params=SHAPE | {"k": k, "device": device, "allow_default": "true"})
    assert response.status_code == 200, response.text
    answer = response.json()
    profile = profile_named(device)
    config = config_from_dict(profile.arch.name, answer["config"])
    assert answer["match"] == "default"
    assert violation(GemmProblem(**SHAPE, k=k), config, profile.sm_count) is None


@pytest.mark.parametrize(
    ("device", "arch", "config"), [("h200", "sm_90a", SM90_CONFIG), ("b200", "sm_100a", SM100_CONFIG)]
)
def test_b9_neighbour_that_was_tuned_for_whole_blocks_answers_only_if_it_is_legal(
    service: Service, device: str, arch: str, config: dict[str, Any]
) -> None:
    """B9: k = 4104 between whole blocks is served by the config tuned for 4096, which the template pads with zeros."""
    profile = profile_named(device)
    service.add_result(config=config, arch=arch, device_name=profile.name)
    response = service.http.get("/v1/best", params=SHAPE | {"k": 4104, "device": device})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["match"], answer["tuned_for"]["k"], answer["problem"]["k"]) == ("nearest", 4096, 4104)
    assert 4104 % answer["config"]["blk_k"]
    served = config_from_dict(arch, answer["config"])
    assert violation(GemmProblem(**SHAPE, k=4104), served, profile.sm_count) is None


@pytest.mark.parametrize("k", [44, 4100])
def test_b9_k_that_the_template_cannot_read_is_refused_with_the_rule(service: Service, k: int) -> None:
    """B9: rows of 88 bytes are no TMA rows on sm_100a; the refusal says so, and what to pad to."""
    params = SHAPE | {"k": k, "device": "b200", "allow_default": "true"}
    response = service.http.get("/v1/best", params=params)
    assert response.status_code == 422, response.text
    text = response.text
    assert "multiple of 8" in text
    assert str((k + 7) // 8 * 8) in text
