"""Machine instructions of a built kernel, counted by mnemonic: what the compilers made of the template's promises."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.errors import ToolchainError

if TYPE_CHECKING:
    from kernels.toolchain import Toolchain

_ELF_MAGIC = b"\x7fELF"
_EM_CUDA = 190
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_LIMIT_S = 60
# Mnemonics that show which hardware path was taken, and what each of them is.
TELLING: dict[str, str] = {
    "UTCHMMA": "tensor-core MMA on tensor memory (.2CTA: of a CTA pair)",
    "HGMMA": "warpgroup MMA on registers",
    "UTMALDG": "TMA load",
    "UTMASTG": "TMA store",
    "UTCBAR": "commit of MMAs to an mbarrier (.MULTICAST: in every CTA of the pair)",
    "LDTM": "tensor memory to registers",
    "STSM": "registers to shared memory as matrices",
    "STS": "registers to shared memory",
    "LDG": "global memory to registers",
    "STG": "registers to global memory",
    "SYNCS": "mbarrier operation",
    "UCGABAR": "cluster barrier",
    "USETMAXREG": "registers moved between warpgroups",
    "LDL": "spilled registers read",
    "STL": "spilled registers written",
}


def embedded_cubin(module: bytes) -> bytes:
    """The cubin inside a module. Raises ValueError when there is none."""
    start = module.find(_ELF_MAGIC, 1)
    while start > 0:
        header = module[start : start + 64]
        if len(header) == 64 and struct.unpack_from("<H", header, 18)[0] == _EM_CUDA:
            program_at, section_at = struct.unpack_from("<QQ", header, 32)
            program_size, programs, section_size, sections = struct.unpack_from("<HHHH", header, 54)
            end = max(program_at + program_size * programs, section_at + section_size * sections)
            return module[start : start + end]
        start = module.find(_ELF_MAGIC, start + 1)
    raise ValueError("the module holds no cubin")


def find_nvdisasm(toolchain: Toolchain) -> Path:
    """The disassembler, beside nvcc or on the path. Raises ToolchainError saying how to get it."""
    beside = toolchain.nvcc.parent / "nvdisasm"
    found = str(beside) if beside.is_file() else shutil.which("nvdisasm")
    if found is None:
        raise ToolchainError("no nvdisasm found: pip install nvidia-cuda-nvdisasm brings it")
    return Path(found)


def instruction_counts(cubin: bytes, nvdisasm: Path) -> dict[str, int]:
    """How often each mnemonic, with its modifiers, stands in the code. Raises ToolchainError when it cannot be read."""
    with tempfile.NamedTemporaryFile(prefix="gemm-tuner-", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run(
                [nvdisasm, "-c", file.name], capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolchainError(f"{nvdisasm} cannot be run: {error}") from error
    if done.returncode != 0:
        raise ToolchainError(f"nvdisasm failed: {' '.join(done.stderr.split())[:300]}")
    return dict(sorted(Counter(_INSTRUCTION.findall(done.stdout)).items()))


def telling(counts: dict[str, int]) -> dict[str, int]:
    """The counts of mnemonics that are listed in TELLING, in that order."""
    found = {}
    for family in TELLING:
        for name, number in counts.items():
            if name.partition(".")[0].partition("_")[0] == family:
                found[name] = number
    return found
