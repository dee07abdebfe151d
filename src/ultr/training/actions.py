"""Actions as they would be if users had been observed for longer: a part of the stage `read`.

Delayed actions are counted by what has arrived, and watch times that were cut are continued, before a label is
computed. So every method, tree, metric and update sees the same actions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ultr.log import Log
from ultr.log.delays import Arrival, arrivals, parse_pairs, parse_time, with_arrived
from ultr.log.watch import WatchModel
from ultr.training.config import DataOptions


@dataclass(frozen=True)
class ActionModel:
    """The estimates that transform the actions of logs: how they arrive, and how watch times are distributed."""

    time: str | None = None  # column
    arrivals: tuple[Arrival, ...] = ()
    watch: WatchModel | None = None

    @staticmethod
    def of(options: DataOptions, known: ActionModel | None = None) -> ActionModel:
        """Return the model of these options, not fitted except for the parts that `known` has by the same options."""
        known = known or ActionModel()
        times = parse_pairs(options.action_times, "action_times", "purchase=bought_at")
        wanted = arrivals(options.delays, times)
        same = {(each.action, each.delay, each.column): each for each in known.arrivals}
        fitted = tuple(same.get((each.action, each.delay, each.column), each) for each in wanted)
        watch = None
        if options.watch is not None:
            columns = (options.duration, options.censored)
            watch = WatchModel(options.watch, *columns, options.capped, options.remove_duration)
            watch = known.watch if known.watch is not None and known.watch.like(watch) else watch
        return ActionModel(options.time if wanted else None, fitted, watch)

    def __bool__(self) -> bool:
        return bool(self.arrivals) or self.watch is not None

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments of `read_log` for a log to transform."""
        times = [each.column for each in self.arrivals if each.column is not None]
        extra = list(dict.fromkeys([*times, *(() if self.watch is None else self.watch.columns)]))
        return {**({"time": self.time} if self.time else {}), **({"extra": extra} if extra else {})}

    def arrived(self, log: Log, until: str | None = None) -> tuple[Log, ActionModel]:
        """Return a log by what has arrived of delayed actions, and the model with the curves of these."""
        if not self.arrivals:
            return log, self
        log, fitted = with_arrived(log, self.arrivals, None if until is None else parse_time(until))
        return log, replace(self, arrivals=fitted)

    def continued(self, log: Log, trained: np.ndarray) -> tuple[Log, ActionModel]:
        """Return a log with transformed watch times, and the model of them, fitted to its `trained` requests."""
        if self.watch is None:
            return log, self
        watch = self.watch if self.watch.groups else self.watch.fit(log.select(trained))
        log = replace(watch(log), notes=(*log.notes, watch.describe(log)))
        return log, replace(self, watch=watch)

    def __call__(self, log: Log, until: str | None = None) -> Log:
        """Return a log with transformed actions, by a model that is fitted."""
        log, _ = self.arrived(log, until)
        return log if self.watch is None else self.watch(log)
