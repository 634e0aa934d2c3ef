"""What the OpenAPI document promises, checked with requests made from it; 20,000 of them are `make fuzz-api`."""

from __future__ import annotations

import pytest

from tests.soak import api_schema


@pytest.mark.slow
def test_500_requests_made_from_the_document_get_what_it_promises() -> None:
    """Right ones and wrong ones, on every route: no 5xx, no schema violation, every refusal in the one shape."""
    report = api_schema.run(500, seed=0)
    assert report["requests"] >= 500
    assert len(report["routes"]) >= 22
    assert {"200", "202", "404", "422"} <= set(report["statuses"])
    assert not [status for status in report["statuses"] if int(status) >= 500]
