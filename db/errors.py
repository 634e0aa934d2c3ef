"""Errors of the store. Each message says what is wrong and what to do.

RuntimeError
  x DatabaseError             the database cannot be used as asked
    x MissingDatabase         there is none at that place, and it was not to be created
    x NotOurDatabase          the file or schema belongs to something else
    x NotLocalDatabase        the file lies on a network file system
    x NewerDatabase           a newer version of the program wrote it
    x OutdatedDatabase        an older version wrote it, and it was not to be upgraded
    x ReadOnlyDatabase        it cannot be written
    x DatabaseBusy            another writer held it for longer than the busy timeout
    x IdempotencyConflict     the idempotency key was used before, with another request
    x NotPublishable          the result lacks the evidence that a published revision needs
"""


class DatabaseError(RuntimeError):
    """The database cannot be used as asked."""


class MissingDatabase(DatabaseError):
    """There is no database at that place, and the caller did not ask to create one."""


class NotOurDatabase(DatabaseError):
    """The file is not SQLite, or the database belongs to another program. It was left as it was."""


class NotLocalDatabase(DatabaseError):
    """The file lies on a network file system, where SQLite is not safe."""


class NewerDatabase(DatabaseError):
    """The schema revision is not known to this version. The database was left as it was."""


class OutdatedDatabase(DatabaseError):
    """The schema is older than this version needs, and the caller did not ask to upgrade it."""


class ReadOnlyDatabase(DatabaseError):
    """The database, or the folder that holds it, cannot be written, or it was opened for reading only."""


class DatabaseBusy(DatabaseError):
    """Another writer held the database for longer than the busy timeout. The call may be tried again."""


class IdempotencyConflict(DatabaseError):
    """The idempotency key belongs to a job with another request."""


class NotPublishable(DatabaseError):
    """The result lacks `numeric` or `checked` evidence, so it stays a candidate."""
