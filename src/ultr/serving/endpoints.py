"""What kserve's model server has to say of a model, and what Prometheus hears of it."""

from __future__ import annotations

import sys
import time
from functools import cache
from typing import Any, NamedTuple

from ultr.errors import MissingExtraError
from ultr.exported import INPUT, OUTPUT
from ultr.serving.served import Served

FINE = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


def kserve_package() -> Any:
    """The package kserve, which reads the arguments of the process when it is imported: it is shown none."""
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        import kserve
        import kserve.metrics
        import kserve.protocol.dataplane
        import kserve.protocol.rest.v2_endpoints
    except ImportError as error:
        raise MissingExtraError("ultr serve", package=error.name or "kserve", extra="serve") from error
    finally:
        sys.argv = arguments
    return kserve


def v2_endpoints(served: Served, name: str) -> Any:
    """The handlers that kserve has of the protocol for one model: server and model metadata, live and ready."""
    kserve = kserve_package()
    from ultr import __version__

    class Ranker(kserve.Model):  # type: ignore[misc,name-defined]
        def get_input_types(self) -> list[dict[str, Any]]:
            return [{"name": INPUT, "datatype": "FP32", "shape": [-1, len(served.scorer.feature_names)]}]

        def get_output_types(self) -> list[dict[str, Any]]:
            return [{"name": OUTPUT, "datatype": "FP32", "shape": [-1]}]

    class DataPlane(kserve.protocol.dataplane.DataPlane):  # type: ignore[misc,name-defined]
        def metadata(self) -> dict[str, Any]:
            return {"name": "ultr", "version": __version__, "extensions": ["binary_tensor_data"]}

        async def model_metadata(self, model_name: str) -> dict[str, Any]:
            about: dict[str, Any] = await super().model_metadata(model_name)
            return {**about, "versions": [served.scorer.version], "platform": served.scorer.platform}

    ranker = Ranker(name)
    ranker.load()
    models = kserve.ModelRepository()
    models.update(ranker)
    return kserve.protocol.rest.v2_endpoints.V2Endpoints(DataPlane(models))


class Metrics(NamedTuple):
    requests: Any
    rows: Any
    seconds: Any
    predict_seconds: Any  # kserve's own
    reloads: Any
    model: Any
    loaded: Any


@cache
def metrics() -> Metrics:
    """The figures that /metrics shows beside those of the process, one set of them as Prometheus' registry has it."""
    kserve = kserve_package()
    from prometheus_client import Counter, Gauge, Histogram, Info

    model = ("model_name",)
    return Metrics(
        Counter("ultr_requests", "Requests to score, by the status of their answer.", (*model, "code")),
        Counter("ultr_rows", "Rows scored.", model),
        Histogram("ultr_request_seconds", "From the head of a request to its answer.", model, buckets=FINE),
        kserve.metrics.PREDICT_HIST_TIME,
        Counter("ultr_reloads", "Newer models found, by whether they were taken or broken.", (*model, "outcome")),
        Info("ultr_model", "The model that serves.", model),
        Gauge("ultr_model_loaded_timestamp_seconds", "When the model that serves was loaded.", model),
    )


def show_model(served: Served, name: str) -> None:
    """Tell Prometheus which model serves."""
    metrics().model.labels(name).info({"version": served.scorer.version, "platform": served.scorer.platform})
    metrics().loaded.labels(name).set(time.time())


def exposition() -> tuple[bytes, bytes]:
    """All figures as Prometheus reads them, and their content type."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return generate_latest(), CONTENT_TYPE_LATEST.encode()
