"""Checks of logs: what can be wrong with a log, and what to do about it."""
