"""Build the site from documents that also read well in the repository.

Links to files outside of docs/ (recorded results, the change log) work there and would be dead on the site: the site
names the file instead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    folder = (DOCS / page.file.src_path).parent

    def named(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if target.is_relative_to(DOCS):
            return found[0]
        return f"{found[1]} (`{target.relative_to(DOCS.parent)}`)"

    return LINK.sub(named, markdown)
