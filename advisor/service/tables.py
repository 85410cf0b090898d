"""The tables of the results database, of schema version `SCHEMA`."""

from __future__ import annotations

import sqlalchemy as sa

SCHEMA = 3

METADATA = sa.MetaData()
ADVICES = sa.Table(
    "advices",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("advice_id", sa.Text, nullable=False, unique=True),
    sa.Column("created", sa.Text, nullable=False),
    sa.Column("target", sa.Text, nullable=False, index=True),
    sa.Column("enable", sa.Boolean, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
    sqlite_autoincrement=True,
)
TRIALS = sa.Table(
    "trials",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("advice_id", sa.Text, nullable=False),
    sa.Column("trial_id", sa.Text, nullable=False),
    sa.Column("created", sa.Text, nullable=False),
    sa.Column("target", sa.Text, nullable=False, index=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
    sa.UniqueConstraint("advice_id", "trial_id"),
    sqlite_autoincrement=True,
)
# What compiling really brought: of trials here (`trial_id`), or reported (empty). Since version 2.
OUTCOMES = sa.Table(
    "outcomes",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("created", sa.Text, nullable=False),
    sa.Column("trial_id", sa.Text, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
    sqlite_autoincrement=True,
)
# Campaigns that were accepted, by their advice's name, and where they stand. Since version 3.
JOBS = sa.Table(
    "jobs",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("advice_id", sa.Text, nullable=False, unique=True),
    sa.Column("created", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False, index=True),
    # Name of the server whose lock tells whether it lives.
    sa.Column("owner", sa.Text, nullable=False),
    # How often a server has begun it: what an earlier one still has to say is refused.
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("request", sa.Text, nullable=False),
    # Why it failed; empty where it did not.
    sa.Column("failure", sa.Text, nullable=False),
    sqlite_autoincrement=True,
)
# Callers' own names of what they asked, and the campaign that answers it. Since version 3.
REQUESTS = sa.Table(
    "requests",
    METADATA,
    sa.Column("request_id", sa.Text, primary_key=True),
    sa.Column("advice_id", sa.Text, nullable=False, index=True),
    # SHA-256 of what was asked: the same name must ask for the same.
    sa.Column("content", sa.Text, nullable=False),
)
# What a campaign told, numbered from 1 without a gap. A trial and the advice stand in their tables.
EVENTS = sa.Table(
    "events",
    METADATA,
    sa.Column("advice_id", sa.Text, primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("elapsed_s", sa.Float, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
)
