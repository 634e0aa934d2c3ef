"""Where the command line keeps its state: what the tuner's settings say, and a log of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.cli.errors import UsageError
from tuner.settings import Settings as TunerSettings
from tuner.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a command is run with.

    tuner: settings of the tuner, read from the environment
    """

    tuner: TunerSettings

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Raises UsageError for a variable with an impossible value and for a home that is not a folder."""
        try:
            settings = cls(tuner=TunerSettings.from_env(environ))
        except SettingsError as error:
            raise UsageError(str(error)) from error
        if settings.home.exists() and not settings.home.is_dir():
            raise UsageError(f"GEMM_TUNER_HOME = {settings.home} is not a folder", hint="name a folder, or a new one")
        return settings

    @property
    def home(self) -> Path:
        """Folder that holds everything."""
        return self.tuner.artifacts_dir.parent

    @property
    def database_url(self) -> str:
        """SQLAlchemy URL."""
        return self.tuner.database_url

    @property
    def artifacts_dir(self) -> Path:
        """Compiled modules by content hash."""
        return self.tuner.artifacts_dir

    @property
    def exports_dir(self) -> Path:
        """Bundles."""
        return self.tuner.exports_dir

    @property
    def log_path(self) -> Path:
        """Tracebacks of the command line."""
        return self.home / "logs" / "gemm-tuner.log"

    def create(self) -> None:
        """Make the folders. Raises UsageError when that is not allowed."""
        for folder in (self.home, self.artifacts_dir, self.exports_dir, self.log_path.parent):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"cannot create {folder}: {error.strerror}", hint="point GEMM_TUNER_HOME at a folder you may write"
                ) from error
