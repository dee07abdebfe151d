"""Messages are read as they were sent, or are an error; a malformed one never takes much memory."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.http.client import binary_body, json_body, rows, tensor
from ultr.serving.http.wire import DATATYPES, Limits, RequestError, read_request, write_answer

LIMITS = Limits(features=5, rows=500, missing=False)
SHAPES = st.lists(st.integers(0, 6), min_size=1, max_size=2)


@given(shape=SHAPES, datatype=st.sampled_from(sorted(DATATYPES)), seed=st.integers(0, 99))
def test_binary_data_is_read_as_it_was_sent(shape, datatype, seed):
    features = rows(*shape, seed=seed).astype(DATATYPES[datatype])
    text = orjson.dumps({"inputs": [tensor(features, datatype, parameters={"binary_data_size": features.nbytes})]})
    request = read_request(text + features.tobytes(), str(len(text)), LIMITS)
    assert request.shape == tuple(shape)
    assert request.features.dtype == np.float32
    assert request.features.flags.aligned
    np.testing.assert_array_equal(request.features, features.reshape(-1, 5).astype(np.float32))


@given(shape=SHAPES, nested=st.booleans(), seed=st.integers(0, 99))
def test_json_is_read_flat_or_nested(shape, nested, seed):
    features = rows(*shape, seed=seed)
    data = features.tolist() if nested else features.ravel().tolist()
    request = read_request(orjson.dumps({"inputs": [tensor(features, data=data)], "id": "7"}), None, LIMITS)
    assert (request.shape, request.id, request.binary) == (tuple(shape), "7", False)
    np.testing.assert_array_equal(request.features, features.reshape(-1, 5))


@given(shape=SHAPES, binary=st.booleans(), seed=st.integers(0, 99))
def test_an_answer_has_exactly_the_scores(shape, binary, seed):
    request = read_request(json_body(rows(*shape), parameters={"binary_data_output": binary}, id="q"), None, LIMITS)
    scores = np.random.default_rng(seed).normal(size=int(np.prod(shape))).astype(np.float32)
    body, length = write_answer(request, {"scores": scores}, name="m", version="v")
    about = orjson.loads(body if length is None else body[:length])
    assert (about["model_name"], about["model_version"], about["id"]) == ("m", "v", "q")
    (output,) = about["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("scores", "FP32", shape)
    assert (length is not None) == binary
    sent = np.frombuffer(body[length:], "<f4") if binary else np.array(output["data"], np.float32)
    np.testing.assert_array_equal(sent, scores)


def test_binary_data_of_the_output_takes_precedence_over_that_of_the_request():
    def wanted(**other):
        return read_request(json_body(rows(1), **other), None, LIMITS).binary

    both = {"binary_data_output": True}
    assert wanted(parameters=both)
    assert not wanted(outputs=[{"name": "scores"}])
    assert wanted(parameters=both, outputs=[{"name": "scores"}])
    assert not wanted(parameters=both, outputs=[{"name": "scores", "parameters": {"binary_data": False}}])
    assert wanted(outputs=[{"name": "scores", "parameters": {"binary_data": True}}])


def test_null_is_a_missing_value_only_if_the_model_has_them():
    body = orjson.dumps({"inputs": [{"name": "features", "shape": [1, 2], "datatype": "FP32", "data": [None, 1]}]})
    request = read_request(body, None, Limits(2, 5, missing=True))
    np.testing.assert_array_equal(request.features, [[np.nan, 1]])
    with pytest.raises(RequestError, match="data must be numbers, got None"):
        read_request(body, None, Limits(2, 5, missing=False))


def test_a_text_is_an_error_that_tells_of_codes():
    body = orjson.dumps({"inputs": [{"name": "features", "shape": [1, 2], "datatype": "FP32", "data": ["Linz", 1]}]})
    with pytest.raises(RequestError, match="got 'Linz'; send a category as its code"):
        read_request(body, None, Limits(2, 5, missing=True))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["name", "shape", "datatype", "data", "parameters"])


@given(field=FIELDS, value=JSON, top=st.booleans(), header=st.none() | st.text(max_size=6))
def test_any_value_of_a_field_is_read_or_is_an_error(field, value, top, header):
    content = orjson.loads(json_body(rows(2)))
    if top:
        content[{"name": "id", "shape": "inputs", "data": "outputs"}.get(field, field)] = value
    else:
        content["inputs"][0][field] = value
    with suppress(RequestError):
        request = read_request(orjson.dumps(content), header, LIMITS)
        assert request.features.shape == (int(np.prod(request.shape)), 5)


@given(body=st.binary(max_size=300), header=st.none() | st.integers(0, 400).map(str))
def test_random_bytes_are_an_error(body, header):
    with pytest.raises(RequestError):
        read_request(body, header, LIMITS)


@pytest.mark.parametrize(
    "body",
    [
        orjson.dumps({"inputs": [{"name": "features", "shape": [2**40, 5], "datatype": "FP32", "data": []}]}),
        orjson.dumps({"inputs": [{"name": "features", "shape": [2**31, 0, 5], "datatype": "FP32", "data": []}]}),
        b"[" + b"[]," * 1_000_000 + b"1]",
        b"[" + b'"ab",' * 1_000_000 + b"1]",
        b"[" + b"300," * 1_000_000 + b"1]",
        b"{" * 1_000_000,
    ],
    ids=["rows", "requests", "lists", "texts", "numbers", "deep"],
)
def test_a_request_that_is_too_large_takes_no_memory(body):
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            read_request(body, None, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [3, 4]}, r"the shape of 'features' does not fit the model, got \[3, 4\]; send \[items, 5\]"),
        ({"shape": [3, 5.0]}, "two or three whole numbers"),
        ({"shape": [501, 5]}, "too many rows in one request.*--max-rows"),
        ({"datatype": "INT64"}, "the datatype of 'features' is not supported, got 'INT64'; send FP32, FP64, FP16"),
        ({"name": "feature"}, "inputs has a tensor of another name, got 'feature'; send one tensor named 'features'"),
        ({"data": [1.0]}, "does not fill the shape of 15 numbers, got 1"),
        ({"parameters": {"classification": 3}}, "has unknown parameters.*send only 'binary_data_size'"),
    ],
)
def test_an_error_says_what_is_wrong_the_value_and_what_to_do(change, message):
    content = orjson.loads(json_body(rows(3)))
    content["inputs"][0].update(change)
    with pytest.raises(RequestError, match=message):
        read_request(orjson.dumps(content), None, LIMITS)


def test_the_binary_data_must_have_the_declared_length():
    body, headers = binary_body(rows(3))
    length = headers["Inference-Header-Content-Length"]
    for cut in (body[:-1], body + b"x"):
        with pytest.raises(RequestError, match="not the number of bytes after the JSON, got 60 for"):
            read_request(cut, length, LIMITS)
    with pytest.raises(RequestError, match="larger than the body"):
        read_request(body, str(len(body) + 1), LIMITS)
