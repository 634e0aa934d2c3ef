"""Opening the database, and the two ways to use it: `read()` and `write()`.

All that is particular to SQLite or to PostgreSQL stays in this file and in `sqlite_file`; the queries are common.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, NullPool, QueuePool, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session, sessionmaker

from db import schema, sqlite_file
from db.driver_errors import translated
from db.errors import (
    DatabaseError,
    NotOurDatabase,
    OutdatedDatabase,
    ReadOnlyDatabase,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Select

BUSY_TIMEOUT_S = 10.0

ANSWERS = "answers"  # topic of results, pins and devices: all that GET /v1/best reads

_CHANGED = "gemm_tuner_changed"  # member of Session.info: topics of this transaction
_BEGIN = "gemm_tuner_begin"  # execution option: which BEGIN a transaction on SQLite starts with
_PG_MIGRATION_LOCK = 0x47544E52  # key of the advisory lock under which one process creates or upgrades the schema

# NaN and infinity are not JSON, and PostgreSQL refuses them: fail on every database alike.
_to_json = partial(json.dumps, allow_nan=False, separators=(",", ":"))
_raw_decode = json.JSONDecoder().raw_decode


def _from_json(text: str) -> Any:
    """What `_to_json` wrote. Raises json.JSONDecodeError.

    Looking for white space around the value is most of what json.loads does with documents as small as ours.
    """
    value, end = _raw_decode(text)
    return value if end == len(text) else json.loads(text)


class Database:
    """An open database. Safe to share between threads; each process opens its own.

    path: the SQLite file, or None
    """

    def __init__(
        self, engine: Engine, *, where: str, path: Path | None, read_only: bool, busy_timeout_s: float
    ) -> None:
        self.path = path
        self._engine = engine
        self._where = where
        self._read_only = read_only
        self._busy_timeout_s = busy_timeout_s
        self._file = None if path is None else sqlite_file.note_open(path)
        self._direct = None if path is None else _Direct(path, engine, busy_timeout_s)
        # One snapshot for the whole block: PostgreSQL would take a new one for each statement.
        snapshot = engine.execution_options(isolation_level="REPEATABLE READ") if path is None else engine
        self._readers = sessionmaker(snapshot, expire_on_commit=False)
        # IMMEDIATE: a transaction that reads before it writes would otherwise fail at once, without waiting, when
        # another writer came in between (measured with SQLite 3.40 in WAL mode).
        self._writers = sessionmaker(engine.execution_options(**{_BEGIN: "IMMEDIATE"}), expire_on_commit=False)
        event.listen(self._writers, "before_commit", _count_changes)

    @classmethod
    def open(
        cls,
        url: str,
        *,
        create: bool = True,
        migrate: bool = True,
        read_only: bool = False,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> Database:
        """Open the database at `url`, creating or upgrading its schema where needed and allowed.

        `sqlite:///relative.db`, `sqlite:////absolute.db`, or `postgresql+psycopg://...`. A database that is refused is
        left byte for byte as it was. Raises NotOurDatabase, NotLocalDatabase, NewerDatabase, OutdatedDatabase,
        MissingDatabase, ReadOnlyDatabase, DatabaseBusy, or DatabaseError for the rest.
        """
        parsed = _parse(url)
        if parsed.get_backend_name() == "postgresql":
            return cls._open_postgresql(
                parsed, create=create, migrate=migrate, read_only=read_only, busy_timeout_s=busy_timeout_s
            )
        path = sqlite_path(parsed)
        with translated(str(path), busy_timeout_s), sqlite_file.opening:
            sqlite_file.require_local(path)
            found = sqlite_file.look_at(path)
            if read_only:
                return cls._open_for_reading(path, found, busy_timeout_s)
            _prepare_sqlite(path, found, create=create, migrate=migrate, busy_timeout_s=busy_timeout_s)
            engine = _sqlite_engine(f"{path.absolute().as_uri()}?mode=rw", busy_timeout_s)
            return cls(engine, where=str(path), path=path, read_only=False, busy_timeout_s=busy_timeout_s)

    @classmethod
    def _open_for_reading(cls, path: Path, found: sqlite_file.Found, busy_timeout_s: float) -> Database:
        sqlite_file.require_present(path, found)
        _require_head(sqlite_file.peek_revision(path), str(path))
        engine = _sqlite_engine(sqlite_file.reading_uri(path), busy_timeout_s, read_only=True)
        return cls(engine, where=str(path), path=path, read_only=True, busy_timeout_s=busy_timeout_s)

    @classmethod
    def _open_postgresql(
        cls, url: URL, *, create: bool, migrate: bool, read_only: bool, busy_timeout_s: float
    ) -> Database:
        where = url.render_as_string(hide_password=True)
        options = f"-c lock_timeout={int(busy_timeout_s * 1000)}"
        if read_only:
            options += " -c default_transaction_read_only=on"
        try:
            engine = create_engine(url, pool_pre_ping=True, json_serializer=_to_json, connect_args={"options": options})
        except ModuleNotFoundError as error:
            raise DatabaseError(
                f"no driver for {where}: install the extra 'postgres' ({error.name} is missing)"
            ) from error
        try:
            with translated(where, busy_timeout_s), engine.begin() as connection:
                if read_only:
                    _require_head(schema.current_revision(connection), where)
                else:
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _PG_MIGRATION_LOCK})
                    _prepare_schema(connection, where, create=create, migrate=migrate)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine, where=where, path=None, read_only=read_only, busy_timeout_s=busy_timeout_s)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one consistent state. Nothing done in it is kept. Raises DatabaseError.

        What it loaded stays usable after the block.
        """
        with translated(self._where, self._busy_timeout_s), self._readers() as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session whose changes are committed at the end of the block, or undone when the block raises.

        On SQLite it waits here, before the first statement, until no other writer is left. Keep the block short.
        Raises ReadOnlyDatabase, DatabaseBusy, DatabaseError.
        """
        if self._read_only:
            raise ReadOnlyDatabase(f"{self._where} was opened for reading only: open it for writing")
        with translated(self._where, self._busy_timeout_s), self._writers.begin() as session:
            session.connection()
            yield session

    @property
    def is_quick(self) -> bool:
        """Whether `rows` and `change_number` cost microseconds (SQLite), or a way to a server and back."""
        return self._direct is not None

    @property
    def dialect_name(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._engine.dialect.name

    def rows(self, statement: Select[*tuple[Any, ...]], values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """All rows of one question, outside any transaction, as the driver gives them. Raises DatabaseError.

        For questions that are asked hundreds of times a second: on SQLite a session costs ten times what this does. The
        statement must be one that is kept, without expanding parameters.
        """
        with translated(self._where, self._busy_timeout_s):
            if self._direct is not None:
                return self._direct.rows(statement, values)
            with self._engine.connect() as connection:
                return connection.execute(statement, values).all()

    def change_number(self, topic: str) -> int:
        """A number that differs once a transaction that changed this topic was committed, by any process.

        topic: ANSWERS
        Read it before what shall be kept in memory: at worst that is read again although it is new. Raises
        DatabaseError.
        """
        with translated(self._where, self._busy_timeout_s):
            if self._direct is not None:
                return self._direct.change_number(topic)
            with self._engine.connect() as connection:
                return int(connection.execute(_CHANGE_NUMBER, {"topic": topic}).scalar_one())

    def close(self) -> None:
        """Close all connections. The last process to close a SQLite database folds its log into the file."""
        if self._direct is not None:
            self._direct.close()
        self._engine.dispose()
        if self._file is not None:
            sqlite_file.note_closed(self._file)
            self._file = None

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(slots=True)
class _Look:
    """One thread's connection, and what it saw last.

    data_version: SQLite's own number, which differs after others wrote
    numbers: changes by topic
    """

    connection: sqlite3.Connection
    data_version: object = None
    numbers: dict[str, int] = field(default_factory=dict)


class _Direct:
    """Reads a SQLite file over one connection a thread, past SQLAlchemy. Each statement is a transaction of its own."""

    def __init__(self, path: Path, engine: Engine, busy_timeout_s: float) -> None:
        self._path, self._engine, self._busy_timeout_s = path, engine, busy_timeout_s
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._looks: list[_Look] = []
        self._compiled: dict[Select[*tuple[Any, ...]], tuple[str, tuple[tuple[str, Any], ...]]] = {}

    def rows(self, statement: Select[*tuple[Any, ...]], values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Raises sqlite3.Error."""
        found = self._compiled.get(statement)
        if found is None:
            compiled = statement.compile(self._engine)
            names = tuple((name, compiled.params[name]) for name in compiled.positiontup or ())
            found = self._compiled[statement] = (str(compiled), names)
        text, names = found
        given = [values.get(name, constant) for name, constant in names]
        return self._look().connection.execute(text, given).fetchall()

    def change_number(self, topic: str) -> int:
        """Raises sqlite3.Error. SQLite tells for free whether others wrote; only then are the numbers read again."""
        look = self._look()
        seen = look.connection.execute("PRAGMA data_version").fetchall()
        if seen != look.data_version:
            look.numbers = dict(look.connection.execute("SELECT topic, number FROM changes").fetchall())
            look.data_version = seen
        return look.numbers[topic]

    def _look(self) -> _Look:
        look: _Look | None = getattr(self._mine, "look", None)
        if look is None:
            uri = sqlite_file.reading_uri(self._path)
            connection = sqlite3.connect(
                uri, uri=True, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
            )
            look = self._mine.look = _Look(connection)
            with self._lock:
                self._looks.append(look)
        return look

    def close(self) -> None:
        """Close what all threads opened. None of them may be in the middle of a question."""
        with self._lock:
            looks, self._looks = self._looks, []
            self._mine = threading.local()
        for look in looks:
            look.connection.close()


def note_change(session: Session, topic: str) -> None:
    """What readers keep of this topic is out of date once the transaction is committed."""
    session.info.setdefault(_CHANGED, set()).add(topic)


def _count_changes(session: Session) -> None:
    """At the end of the transaction, so that the row is locked for no longer than the commit takes."""
    for topic in sorted(session.info.get(_CHANGED, ())):
        session.execute(_COUNT_CHANGE, {"topic": topic})


_COUNT_CHANGE = text("UPDATE changes SET number = number + 1 WHERE topic = :topic")
_CHANGE_NUMBER = text("SELECT number FROM changes WHERE topic = :topic")


def hold(session: Session, name: str) -> None:
    """Until the transaction ends, make others that hold the same name wait. SQLite has one writer at a time anyway.

    On PostgreSQL row locks alone are not enough where a decision reads many rows: writers would pass one another by, or
    stop one another by locking in different orders.
    """
    if session.get_bind().dialect.name == "postgresql":
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})


def sqlite_path(url: URL | str) -> Path:
    """File of a SQLite URL. Raises DatabaseError for one in memory, which its connections could not share."""
    parsed = _parse(url) if isinstance(url, str) else url
    name = parsed.database or ""
    if parsed.get_backend_name() != "sqlite" or not name or ":memory:" in name or name.startswith("file:"):
        raise DatabaseError(f"{parsed.render_as_string()} names no SQLite file: write sqlite:///FILE")
    return Path(name)


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
    except ArgumentError as error:
        raise DatabaseError(
            f"{url!r} is not a database URL: write sqlite:///FILE or postgresql+psycopg://..."
        ) from error
    if backend not in ("sqlite", "postgresql"):
        raise DatabaseError(f"unsupported database {backend!r}: use sqlite or postgresql")
    return parsed


def _sqlite_engine(
    uri: str, busy_timeout_s: float, *, read_only: bool = False, foreign_keys: bool = True, pooled: bool = True
) -> Engine:
    def connect() -> sqlite3.Connection:
        # isolation_level=None: the sqlite3 module must not open transactions of its own, the `begin` event does.
        connection = sqlite3.connect(
            uri, uri=True, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
        )
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        # NORMAL: a killed process loses nothing that it committed; a power cut may lose the last commits, and never
        # the consistency. FULL costs an fsync for each trial.
        connection.execute("PRAGMA synchronous = NORMAL")
        if read_only:
            connection.execute("PRAGMA query_only = ON")
        return connection

    pool: dict[str, Any] = {"poolclass": NullPool}
    if pooled:
        # A web server's thread pool has 40 threads, and a connection costs little.
        pool = {"poolclass": QueuePool, "pool_size": 16, "max_overflow": 48, "pool_timeout": busy_timeout_s}
    engine = create_engine(
        "sqlite+pysqlite://", creator=connect, json_serializer=_to_json, json_deserializer=_from_json, **pool
    )

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get(_BEGIN, 'DEFERRED')}")

    return engine


def _prepare_sqlite(
    path: Path, found: sqlite_file.Found, *, create: bool, migrate: bool, busy_timeout_s: float
) -> None:
    if not create:
        sqlite_file.require_present(path, found)
    sqlite_file.require_writable(path)
    revision = None
    if not found.empty:
        revision = sqlite_file.peek_revision(path)
        schema.require_known(revision, str(path))
    if found.wal and revision == schema.HEAD:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Foreign keys off: a batch migration drops and rebuilds tables, and the pragma has no effect in a transaction.
    engine = _sqlite_engine(f"{path.absolute().as_uri()}?mode=rwc", busy_timeout_s, foreign_keys=False, pooled=False)
    with engine.connect().execution_options(**{_BEGIN: "EXCLUSIVE"}) as connection:
        with connection.begin():
            _claim_sqlite_file(connection, path)
            _prepare_schema(connection, str(path), create=create, migrate=migrate)
            if connection.exec_driver_sql("PRAGMA foreign_key_check").first() is not None:
                raise DatabaseError(f"{path} has rows that refer to missing rows: restore a backup")
        _switch_to_wal(connection, busy_timeout_s)


def _claim_sqlite_file(connection: Connection, path: Path) -> None:
    """Mark an empty file as ours; refuse one that another program filled since its header was read."""
    if connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one() == 0:
        connection.exec_driver_sql(f"PRAGMA application_id = {sqlite_file.APPLICATION_ID}")
    elif connection.exec_driver_sql("PRAGMA application_id").scalar_one() != sqlite_file.APPLICATION_ID:
        raise NotOurDatabase(f"{path} is a SQLite database of another program: name another file")


def _prepare_schema(connection: Connection, where: str, *, create: bool, migrate: bool) -> None:
    """Create or upgrade the schema in the caller's transaction, which must exclude every other creator."""
    revision = schema.current_revision(connection)
    schema.require_known(revision, where)
    if revision is None:
        tables = inspect(connection).get_table_names()
        if tables:
            raise NotOurDatabase(f"{where} holds tables of another program ({tables[0]}, ...): name another database")
        if not create:
            raise DatabaseError(f"{where} has no tables yet: let the schema be created")
        schema.upgrade(connection)
    elif revision != schema.HEAD:
        if not migrate:
            _require_head(revision, where)
        schema.upgrade(connection)


def _require_head(revision: str | None, where: str) -> None:
    schema.require_known(revision, where)
    if revision is None:
        raise DatabaseError(f"{where} has no readable schema: restore a backup, or create it anew")
    if revision != schema.HEAD:
        raise OutdatedDatabase(
            f"{where} has schema revision {revision!r}, this version needs {schema.HEAD!r}: "
            "make a backup, then run `gemm-tuner db upgrade`"
        )


def _switch_to_wal(connection: Connection, busy_timeout_s: float) -> None:
    """Turn the write-ahead log on. SQLite does not always call the busy handler for this, so waiting is done here."""
    raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    deadline = time.monotonic() + busy_timeout_s
    while True:
        try:
            raw.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
