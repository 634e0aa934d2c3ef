"""Who chooses the configs of a study: named by its page, chosen in the form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from search_space.samplers import DEFAULT_SAMPLER, SAMPLERS
from tests.api.conftest import job_body
from tests.api.test_pages import FORM, page, plain, post

if TYPE_CHECKING:
    from tests.api.conftest import Service


def test_study_names_its_sampler(service: Service) -> None:
    """The usual one too: how a winner was found belongs to what is known of it."""
    usual = service.http.post("/v1/jobs", json=job_body()).json()["studies"][0]["id"]
    other = service.http.post("/v1/jobs", json=job_body(sampler="random")).json()["studies"][0]["id"]
    assert f"Sampler {DEFAULT_SAMPLER}" in plain(page(service, f"/studies/{usual}"))
    assert "Sampler random" in plain(page(service, f"/studies/{other}"))


def test_form_offers_every_sampler_and_the_job_gets_the_chosen_one(service: Service) -> None:
    """The usual one is selected; what is not usual is shown open when the form comes back."""
    form = page(service, "/submit")
    for name in SAMPLERS:
        assert f"<option{' selected' if name == DEFAULT_SAMPLER else ''}>{name}</option>" in form
    assert "<details><summary>Seldom needed" in form
    reply = post(service, "/submit", **FORM, sampler="brute")
    study = service.http.get("/v1" + reply.headers["location"]).json()["studies"][0]["id"]
    assert service.study(study).request["sampler"] == "brute"
    wrong = post(service, "/submit", **FORM, sampler="magic")
    assert wrong.status_code == 422
    assert "sampler" in wrong.text
    assert "<details open><summary>Seldom needed" in wrong.text
