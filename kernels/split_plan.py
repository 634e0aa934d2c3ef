"""How K is cut among the CTAs of a cluster: the same numbers in both templates. Imports no tvm."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.config import Sm90GemmConfig, Sm100GemmConfig
    from kernels.problem import GemmProblem


class PartsOfK:
    """What a plan says of the parts of K; each template's plan is one."""

    problem: GemmProblem
    config: Sm90GemmConfig | Sm100GemmConfig

    @property
    def k_share(self) -> tuple[int, int]:
        """Blocks of K of each part, and how many of the first parts have one more."""
        return divmod(self.config.k_blocks(self.problem), self.config.split_k)

    @property
    def owners(self) -> int:
        """CTAs of the cluster that sum and store a chunk or more: chunk c belongs to CTA c % split_k."""
        return min(self.config.split_k, self.config.chunks)

    @property
    def owned_chunks(self) -> int:
        """Chunks of one consumer that the CTA with most of them owns."""
        return ceil(self.config.chunks / self.config.split_k)
