"""Bodies of /v1/devices and /healthz.

No postponed annotations in this module: pydantic reads them when the classes are made.
"""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel

from api.examples import WHEN_EXAMPLE
from api.views.base import Json, example


class DeviceView(BaseModel):
    """A GPU that a tuner has announced."""

    uuid: str
    name: str
    arch: str
    sm_count: int
    state: str
    reason: str
    environment: Json | None
    last_seen_at: datetime | None


class ProfileView(BaseModel):
    """A GPU model that mode `model` can estimate without one at hand."""

    name: str
    arch: str
    aliases: list[str]
    sm_count: int
    memory_bytes: int


class DeviceList(BaseModel):
    """Live devices and known profiles."""

    model_config = example(
        {
            "devices": [
                {
                    "uuid": "GPU-7d9b1a52",
                    "name": "NVIDIA H200",
                    "arch": "sm_90a",
                    "sm_count": 132,
                    "state": "READY",
                    "reason": "",
                    "environment": {"driver": "580.95"},
                    "last_seen_at": WHEN_EXAMPLE,
                }
            ],
            "profiles": [
                {
                    "name": "NVIDIA B200",
                    "arch": "sm_100a",
                    "aliases": ["b200"],
                    "sm_count": 148,
                    "memory_bytes": 180_000_000_000,
                }
            ],
        }
    )

    devices: list[DeviceView]
    profiles: list[ProfileView]


class Health(BaseModel):
    """The service answers and reaches its database."""

    model_config = example({"status": "ok", "version": "0.1.0", "database": "ok"})

    status: Literal["ok"]
    version: str
    database: Literal["ok"]
