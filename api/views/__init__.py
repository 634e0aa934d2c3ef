"""Response bodies, one module for each group of routes."""
