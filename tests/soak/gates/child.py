"""One planted bug on the GPU, in a process that may be killed: `python -m tests.soak.gates.child`.

Says when it is ready, reads one job (a JSON line) from standard input, and says what it begins and what it found.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernels.problem import GemmProblem
from tuner.gpu.child import load_module
from tuner.gpu.context import make_referee
from tuner.gpu.device import LiveDevice, open_device
from tuner.gpu.referee import Kernel, Referee, compare, differing
from tuner.gpu.soak import MARK
from tuner.gpu.wire import describe, follow_parent

if TYPE_CHECKING:
    from tuner.gpu.inputs import Case

LAUNCHES = 100


def say(**message: Any) -> None:
    """One line for the parent."""
    print(MARK + json.dumps(message), flush=True)


def quiet(*_: object, **__: object) -> None:
    """Nobody watches the phases of the referee here."""


def load(module: dict[str, str]) -> Kernel:
    """A module of the job."""
    return load_module(Path(module["path"]), module["sha256"])


def output_of(kernel: Kernel, case: Case, referee: Referee) -> Any:
    """Bits of D after one launch on a poisoned output."""
    referee.output.poison()
    kernel(case.a, case.b, referee.output.d)
    return referee.output.bits.clone()


def counts(kernel: Kernel, referee: Referee, expected: Any) -> dict[str, int]:
    """How many of LAUNCHES launches differ from the healthy kernel, and how many from the first launch.

    The same knobs add in the same order, so a kernel without its bug gives the same bits.
    """
    case = referee.cases[0]
    first = output_of(kernel, case, referee)
    wrong, changing = [], []
    for _ in range(LAUNCHES):
        referee.output.poison()
        kernel(case.a, case.b, referee.output.d)
        wrong.append(differing(referee.output.bits, expected))
        changing.append(differing(referee.output.bits, first))
    found = {"wrong": torch.stack(wrong).tolist(), "changing": torch.stack(changing).tolist()}
    return {
        "launches": LAUNCHES,
        "wrong_launches": sum(count > 0 for count in found["wrong"]),
        "changing_launches": sum(count > 0 for count in found["changing"]),
        "most_wrong_elements": max(found["wrong"]),
    }


def wrong_elements(kernel: Kernel, referee: Referee) -> dict[str, int]:
    """Wrong elements for each pair of inputs."""
    found = {}
    for case in referee.cases:
        output_of(kernel, case, referee)
        found[case.name] = compare(case, referee.output.d, referee.problem.dtype).wrong
    return found


def try_build(build: dict[str, Any], referee: Referee, *, by_inputs: bool) -> dict[str, Any]:
    """What the referee says of one build, and how often it is wrong."""
    kernel, healthy = load(build["module"]), load(build["healthy"])
    expected = output_of(healthy, referee.cases[0], referee)
    torch.cuda.synchronize()
    since = time.monotonic()
    verdict = referee.verify(kernel, quiet, repeats=LAUNCHES)
    found: dict[str, Any] = {
        "outcome": verdict.outcome.value if verdict.outcome else "clean",
        "reason": verdict.reason,
        "verify_s": round(time.monotonic() - since, 4),
        **counts(kernel, referee, expected),
    }
    if by_inputs:
        found["wrong_elements"] = wrong_elements(kernel, referee)
        found["damage"] = referee.output.damage()
    return found


def run_builds(job: dict[str, Any], device: LiveDevice) -> None:
    """Each build on its own problem; inputs are made once a problem."""
    referees: dict[GemmProblem, Referee] = {}
    for build in job["builds"]:
        say(begin=build["label"])
        problem = GemmProblem(**build["problem"])
        if problem not in referees:
            referees[problem] = make_referee(problem, device, job["seed"])
        say(build=build["label"], **try_build(build, referees[problem], by_inputs=job["by_inputs"]))


def cost(job: dict[str, Any], device: LiveDevice) -> None:
    """What verifying costs at a size, and what the tensor cores do with subnormal float32 sums."""
    build = job["builds"][0]
    say(begin=build["label"])
    problem, kernel = GemmProblem(**build["problem"]), load(build["module"])
    torch.cuda.synchronize()
    since = time.monotonic()
    referee = make_referee(problem, device, job["seed"])
    torch.cuda.synchronize()
    inputs_s = time.monotonic() - since
    seconds = []
    for _ in range(4):
        since = time.monotonic()
        verdict = referee.verify(kernel, quiet, repeats=16)
        torch.cuda.synchronize()
        seconds.append(round(time.monotonic() - since, 4))
    say(
        build=build["label"],
        outcome=verdict.outcome.value if verdict.outcome else "clean",
        reason=verdict.reason,
        inputs_s=round(inputs_s, 4),
        verify_s=seconds,
        subnormal_sums=subnormal_sums(kernel, referee),
    )


def subnormal_sums(kernel: Kernel, referee: Referee) -> dict[str, float]:
    """Share of right elements where every product and sum is subnormal in float32: ours and torch.matmul. bf16 only.

    Integers times 2^-134; D is the reference rounded to a multiple of 2^-133, the least number of bf16.
    """
    case = referee.cases[1]
    a, b, d = case.a * 2.0**-67, case.b * 2.0**-67, referee.output.d
    steps = (case.reference.rows(slice(0, d.shape[0])).double() / 2).round()  # half to even
    found = {}
    for name, launch in (("ours", lambda: kernel(a, b, d)), ("torch.matmul", lambda: torch.matmul(a, b.t(), out=d))):
        referee.output.poison()
        launch()
        found[name] = float(((d.float().double() * 2.0**133) == steps).double().mean())
        found[f"{name}, zeros"] = float((d == 0).double().mean())
    return found


def main() -> int:
    """0 when the job ran to its end."""
    import tvm_ffi  # noqa: F401 (ahead of the clock: the first import may build a helper library)

    device = open_device()
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    say(ready=True, environment=device.environment().to_dict())
    line = sys.stdin.readline()
    if not line:
        return 0
    follow_parent()
    job = json.loads(line)
    try:
        (cost if job["stage"] == "cost" else run_builds)(job, device)
    except Exception as error:  # the boundary of the process: a planted bug may raise anything
        say(crashed=describe(error))
        return 3
    say(done=True)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # destructors hang on a lost context
