"""Helpers for arguments, files, devices and processes, without anything about ranking."""
