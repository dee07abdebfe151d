"""The command line `ultr`, but runs save a checkpoint after each evaluation."""

from __future__ import annotations

from functools import partial

import ultr.training.run  # noqa: F401 - it checks its arguments by the class
from ultr.cli import main
from ultr.training import loop

if __name__ == "__main__":
    loop.Listeners = partial(loop.Listeners, checkpoint_seconds=0)
    main()
