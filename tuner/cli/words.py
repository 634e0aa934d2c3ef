"""What the service says about its routes, in the words of the command line.

Embedded commands and --url get the same refusals from the same routes; whoever typed a command wants to hear of
commands.
"""

from __future__ import annotations

import re

# In this order: the first that fits a piece of text takes it.
_WORDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"POST `submit` to /v1/jobs to tune (it|the shape)", r"tune \1: gemm-tuner tune MxNxK"),
        (r"GET /v1/jobs/\{id\} lists the studies of a job", "gemm-tuner show JOB lists the studies of a job"),
        (r"GET /v1/jobs lists the jobs", "gemm-tuner jobs lists the jobs"),
        (
            r"GET /v1/results(\?published=true)? lists (the results|them)",
            "gemm-tuner results export - lists the results",
        ),
        (r"POST /v1/exports gives the id of a new one", "gemm-tuner export writes a new one"),
        (r"(a name that )?GET /v1/devices( lists)?", "a name that gemm-tuner devices lists"),
        (r'add "allow_unverified": true', "add --allow-unverified"),
        (r'add "arch": ', "add --arch: "),
        (r'"device": ', "--device: "),
        (r"ask without allow_default first", "ask without --allow-default first"),
        (r"allow_(stale|default)=true", r"--allow-\1"),
        (r"ask with evidence=(\w+)", r"ask with --evidence \1"),
        (r"ask without environment\b", "ask without --environment"),
        (r"leave revision out", "leave --revision out"),
        (r"see /openapi\.json for (types and ranges|the routes)", "see gemm-tuner COMMAND --help"),
        (r"/openapi\.json lists the fields", "gemm-tuner COMMAND --help lists the options"),
    )
)


def in_commands(text: str) -> str:
    """The text with each mention of a route or of a parameter turned into one of a command or option."""
    for pattern, words in _WORDS:
        text = pattern.sub(words, text)
    return text
