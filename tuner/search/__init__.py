"""Choosing which config to try next. The only package that imports Optuna."""
