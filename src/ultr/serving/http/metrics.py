"""The metrics that /metrics shows to Prometheus, next to those of the process."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, Info

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
MODEL_INFO = Info("ultr_model", "The served model.", MODEL)
MODEL_LOADED = Gauge("ultr_model_loaded_timestamp_seconds", "The time at which the served model was loaded.", MODEL)
