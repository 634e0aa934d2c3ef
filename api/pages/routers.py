"""All routes of the pages."""

from __future__ import annotations

from api.pages import compare, jobs, login, overview, results, shapes, static_files, studies, submit

PAGES = (overview, submit, jobs, studies, results, shapes, compare, login, static_files)
