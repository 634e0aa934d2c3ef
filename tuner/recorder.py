"""Where the loop saves what it learns, as the loop sees it; and one that keeps it in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kernels.compile import CompiledKernel
    from kernels.config import GemmConfig
    from tuner.records import Measurement, Trial


class Recorder(Protocol):
    """Saves the trials of one study. What a call saved is durable when it returns."""

    def save_trial(self, trial: Trial, kernel: CompiledKernel | None) -> None:
        """A trial ended. Called once a number by the loop; a second call for a number changes nothing."""

    def save_final(self, number: int, measurement: Measurement) -> None:
        """A finalist was timed again."""

    def save_rebuilt(self, trial: Trial, kernel: CompiledKernel) -> None:
        """The module of a finalist was gone and was built again; the trial names the new one."""

    def save_failed_final(self, trial: Trial) -> None:
        """A finalist failed in the final by its own fault, as the trial now says: from now on it is known to be bad."""

    def save_failed_check(self, trial: Trial, reason: str) -> None:
        """A finalist failed a check beyond its own product: from now on it is known to be bad."""

    def known_bad(self, config: GemmConfig, kernel: CompiledKernel | None) -> str | None:
        """Why this config need not be tried on this device with this toolchain: it failed before. None when it may run.

        Asked before compiling, with no kernel, and after it, when the generated source is known.
        """


class MemoryRecorder:
    """Keeps everything in lists; `bad` maps a config key to the reason why it is known to be bad."""

    def __init__(self, bad: dict[str, str] | None = None) -> None:
        self.trials: list[Trial] = []
        self.finals: list[tuple[int, Measurement]] = []
        self.bad = bad or {}

    def save_trial(self, trial: Trial, kernel: CompiledKernel | None) -> None:
        """See Recorder."""
        if all(saved.number != trial.number for saved in self.trials):
            self.trials.append(trial)

    def save_final(self, number: int, measurement: Measurement) -> None:
        """See Recorder."""
        self.finals.append((number, measurement))

    def save_rebuilt(self, trial: Trial, kernel: CompiledKernel) -> None:
        """See Recorder."""
        self.trials = [trial if saved.number == trial.number else saved for saved in self.trials]

    def save_failed_final(self, trial: Trial) -> None:
        """See Recorder."""
        self.trials = [trial if saved.number == trial.number else saved for saved in self.trials]
        self.bad[trial.config.key] = trial.reason

    def save_failed_check(self, trial: Trial, reason: str) -> None:
        """See Recorder."""
        self.bad[trial.config.key] = reason

    def known_bad(self, config: GemmConfig, kernel: CompiledKernel | None) -> str | None:
        """See Recorder."""
        return self.bad.get(config.key)
