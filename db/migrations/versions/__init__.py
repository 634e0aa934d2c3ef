"""One module a revision. A new one is also listed in `db.schema.KNOWN_REVISIONS`."""
