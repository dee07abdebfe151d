"""`ultr version`: print the version."""

from __future__ import annotations

import json

from ultr._version import __version__
from ultr.cli.options import Json


def version(as_json: Json = False) -> None:
    """Print the version of ultr."""
    print(json.dumps({"version": __version__}) if as_json else __version__)
