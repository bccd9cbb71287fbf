"""Fixtures for a shop's tests with pytest: its database, and the clock that the worker reads. DATABASE_URL says where."""

import os
from datetime import timedelta

import psycopg
import pytest
from order_timeout.testing import advance


@pytest.fixture
def database():
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        yield connection


@pytest.fixture
def clock(database):
    return lambda **step: advance(database, timedelta(**step).total_seconds())
