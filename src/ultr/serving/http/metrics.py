"""The metrics that /metrics shows to Prometheus, next to those of the process; the sums over all workers.

Workers write their metrics to files of one folder, in the multiprocess mode of prometheus_client. This mode is on if
the environment variable FOLDER is set before this module is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
SUMMED = (  # metrics of a process that have a meaning for all of them together
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_cpu_seconds",
    "process_open_fds",
)

BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds
MODEL = ("model_name",)

REQUESTS = Counter("ultr_requests", "Requests for scores, by the status of the answer.", (*MODEL, "code"))
ROWS = Counter("ultr_rows", "Rows scored.", MODEL)
REQUEST_SECONDS = Histogram(
    "ultr_request_seconds", "Seconds from a request's head to its answer.", MODEL, buckets=BUCKETS
)
PREDICT_SECONDS = Histogram(
    "request_predict_seconds", "Seconds in the model; named as in KServe.", MODEL, buckets=BUCKETS
)
RELOADS = Counter(
    "ultr_reloads", "Newer models, by outcome: taken (loaded) or broken (not loaded).", (*MODEL, "outcome")
)
MODEL_INFO = Gauge(
    "ultr_model_info", "1 for the served model.", (*MODEL, "version", "platform"), multiprocess_mode="livemax"
)
MODEL_LOADED = Gauge(
    "ultr_model_loaded_timestamp_seconds",
    "The time at which the served model was loaded.",
    MODEL,
    multiprocess_mode="livemax",
)
_shown: dict[str, Gauge] = {}  # name of a model -> its MODEL_INFO


def show_model(name: str, version: str, platform: str) -> None:
    """Show the version of the model that is served from now on."""
    if (older := _shown.get(name)) is not None:
        older.set(0)
    _shown[name] = MODEL_INFO.labels(name, version, platform)
    _shown[name].set(1)
    MODEL_LOADED.labels(name).set(time.time())


def count_reload(name: str, loaded: bool) -> None:
    RELOADS.labels(name, "taken" if loaded else "broken").inc()


def text() -> bytes:
    """Return all metrics in the format of Prometheus, summed over the workers if there are several."""
    if FOLDER not in os.environ:
        return generate_latest()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    registry.register(_Processes(Path(os.environ[FOLDER])))
    return generate_latest(registry)


class _Processes:
    """The memory, time and open files of all processes that write metrics to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        """Yield the sums; a process that has ended has no values."""
        sums: dict[str, Metric] = {}
        for pid in {path.stem.rpartition("_")[2] for path in self._folder.glob("*.db")}:
            for metric in ProcessCollector(registry=None, pid=partial(str, pid)).collect():
                if metric.name in SUMMED and metric.name in sums:
                    before, now = sums[metric.name].samples[0], metric.samples[0]
                    sums[metric.name].samples[0] = before._replace(value=before.value + now.value)
                elif metric.name in SUMMED:
                    sums[metric.name] = metric
        yield from sums.values()
