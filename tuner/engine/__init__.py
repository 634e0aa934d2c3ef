"""Engines: where candidates are compiled and evaluated. `base` says what an engine is."""
