"""Bearer tokens of the API. The token itself is shown once, when it is made; stored is its hash."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from sqlalchemy import select

from db.errors import DatabaseError
from db.models import SCOPES, Token, utc_now

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy.orm import Session

PREFIX = "gt_"  # lets people and scanners of secrets see what it is
_RANDOM_BYTES = 32


def token_hash(token: str) -> str:
    """What is stored of a token. It is 256 random bits, so there is nothing to guess and one round is enough."""
    return hashlib.sha256(token.encode()).hexdigest()


def create_token(session: Session, name: str, scope: str, *, expires_at: datetime | None = None) -> tuple[Token, str]:
    """Make a token; gives its row and the token, which nobody can find out again. Called by `gemm-tuner token create`.

    scope: read, submit or admin; anything else raises ValueError
    Raises DatabaseError for a name that is taken, by a revoked token too: logs name tokens.
    """
    if scope not in SCOPES:
        raise ValueError(f"unknown scope {scope!r}: use one of {', '.join(SCOPES)}")
    if session.scalar(select(Token.id).where(Token.name == name)) is not None:
        raise DatabaseError(f"there is a token named {name!r} already: choose another name")
    token = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    new = Token(name=name, token_hash=token_hash(token), scope=scope, expires_at=expires_at)
    session.add(new)
    session.flush()
    return new, token


def tokens(session: Session) -> Sequence[Token]:
    """All tokens ever made, oldest first. Called by `gemm-tuner token list`."""
    return session.scalars(select(Token).order_by(Token.created_at, Token.id)).all()


def revoke_token(session: Session, name: str) -> Token | None:
    """Make a token useless; gives its row, or None where there is none of this name. Called by `token revoke`."""
    found = session.scalar(select(Token).where(Token.name == name))
    if found is not None and found.revoked_at is None:
        found.revoked_at = utc_now()
        session.flush()
    return found


def token_by_hash(session: Session, digest: str) -> Token | None:
    """The token with this hash unless it was revoked or has expired. Called for requests that carry one."""
    found = session.scalar(select(Token).where(Token.token_hash == digest, Token.revoked_at.is_(None)))
    if found is None or (found.expires_at is not None and found.expires_at <= utc_now()):
        return None
    return found
