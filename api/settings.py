"""What the service is started with. Read once, in `api.__main__`, and passed down."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether nothing outside this machine can reach an address to listen on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # another name: who knows where it points


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiSettings:
    """Settings of one API process.

    database_url: SQLAlchemy URL of the database that the tuner writes
    exports_dir: folder under which every bundle that may be downloaded lies
    artifacts_dir: folder of the artifact store; read by nothing of a request
    host: address to listen on
    port: TCP port to listen on; 0 takes a free one
    allowed_hosts: names that requests may call the service by; empty: any, but on a loopback address its own names
    requests_per_s: requests of one client (token or address) that are answered, 0 for any number; more are 429
    max_body_bytes: largest request body; a larger one is 413
    nearest_limit_log2: how far a tuned shape may be from the asked one in each dimension, in powers of two
    events_poll_s: pause between two looks at the database for one event stream
    events_heartbeat_s: longest silence of an event stream, so that proxies keep it open
    shutdown_s: time that open requests get to finish when the service stops
    """

    database_url: str
    exports_dir: Path
    artifacts_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    requests_per_s: float = 0.0
    max_body_bytes: int = 1 << 20
    nearest_limit_log2: float = 1.0
    events_poll_s: float = 0.5
    events_heartbeat_s: float = 15.0
    shutdown_s: float = 5.0

    @property
    def needs_token(self) -> bool:
        """Whether requests must carry a bearer token: wherever others than this machine may reach the service."""
        return not is_loopback(self.host)

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names that a request may be sent to; empty for any."""
        if self.allowed_hosts or self.needs_token:
            return self.allowed_hosts
        return (*LOOPBACK_NAMES, self.host.strip("[]"))
