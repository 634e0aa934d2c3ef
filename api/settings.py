"""What the service is started with. Read once, in `api.__main__`, and passed down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiSettings:
    """Settings of one API process.

    database_url: SQLAlchemy URL of the database that the tuner writes
    exports_dir: folder under which every bundle that may be downloaded lies
    artifacts_dir: folder of the artifact store; read by nothing of a request
    host: address to listen on
    port: TCP port to listen on; 0 takes a free one
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
    max_body_bytes: int = 1 << 20
    nearest_limit_log2: float = 1.0
    events_poll_s: float = 0.5
    events_heartbeat_s: float = 15.0
    shutdown_s: float = 5.0
