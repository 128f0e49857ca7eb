"""The servers of the tests; a test that needs one that is not here is skipped, with what to install."""

from __future__ import annotations

import pytest

import _store_servers as real
from _store_servers import BUCKET, S3, s3_environment

__all__ = ["BUCKET", "redis_port", "s3", "s3_environment"]


def s3() -> S3:
    try:
        return real.s3()
    except real.NoServerError as error:
        pytest.skip(str(error))


def redis_port(*options: str) -> int:
    try:
        return real.redis_port(*options)
    except real.NoServerError as error:
        pytest.skip(str(error))
