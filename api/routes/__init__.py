"""Routes, one module a noun. A route parses, opens one transaction and calls a service function."""
