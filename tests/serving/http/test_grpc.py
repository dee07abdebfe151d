"""The Open Inference Protocol over gRPC: tritonclient gets the scores of torch, and wrong requests get errors."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from serving.http.client import FEATURES, MAX_ROWS, rows
from serving.http.running import Server
from ultr.rankers.model import load_model
from ultr.serving.http import ServerOptions
from ultr.serving.http.app import App
from ultr.serving.http.grpc_server import MESSAGES, SERVICE, GrpcServer


@contextmanager
def running(app: App):
    """A gRPC server in another thread; yield its address."""
    loop = asyncio.new_event_loop()

    async def start() -> GrpcServer:
        started = GrpcServer(app, "127.0.0.1:0")
        await started.start()
        return started

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(1), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def address(network):
    with running(network) as place:
        yield place


@pytest.fixture
def call(address):
    """A function that sends fields, or bytes, to a method, and returns the answer."""
    with grpc.insecure_channel(address) as channel:

        def send(method: str, content: bytes | None = None, **fields):
            request = MESSAGES[f"{method}Request"](**fields).SerializeToString() if content is None else content
            answer = channel.unary_unary(f"/{SERVICE}/{method}")(request, timeout=20)
            return MESSAGES[f"{method}Response"].FromString(answer)

        yield send


def tensor(features: np.ndarray, datatype: str = "FP32", **other) -> dict:
    return {"name": "features", "datatype": datatype, "shape": features.shape, **other}


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16"])
@pytest.mark.parametrize("shape", [(30,), (4, 5)])
def test_tritonclient_gets_the_scores_of_torch(shape, datatype, address, folders):
    features = rows(*shape).astype({"FP32": np.float32, "FP64": np.float64, "FP16": np.float16}[datatype])
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("ranker")
        assert client.get_server_metadata().name == "ultr"
        about = client.get_model_metadata("ranker")
        assert list(about.inputs[0].shape) == [-1, FEATURES]
        sent = triton.InferInput("features", features.shape, datatype).set_data_from_numpy(features)
        answer = client.infer("ranker", [sent], request_id="r1", outputs=[triton.InferRequestedOutput("scores")])
        assert answer.get_response().id == "r1"
        assert answer.get_response().model_version == about.versions[0]
    scores = load_model(folders.network).score_features(features.astype(np.float32).reshape(-1, FEATURES))
    np.testing.assert_allclose(answer.as_numpy("scores"), scores.reshape(shape), atol=1e-5)


@pytest.mark.parametrize(("datatype", "field"), [("FP32", "fp32_contents"), ("FP64", "fp64_contents")])
def test_typed_contents_get_typed_scores(datatype, field, call, network):
    features = rows(2, 3)
    inputs = [tensor(features, datatype, contents={field: features.ravel()})]
    answer = call("ModelInfer", model_name="ranker", inputs=inputs)
    assert list(answer.outputs[0].shape) == [2, 3]
    assert not answer.raw_output_contents
    expected = network.served.scorer(features.reshape(-1, FEATURES))
    np.testing.assert_allclose(answer.outputs[0].contents.fp32_contents, expected, atol=1e-6)


@pytest.mark.parametrize("value", [{"string_param": "2"}, {"int64_param": 2}])
def test_a_parameter_asks_for_expected_feedback_too(value, call, network):
    features = rows(4)
    parameters, scorer = [{"key": "expected_at", "value": value}], network.served.scorer
    inputs = [tensor(features, contents={"fp32_contents": features.ravel()})]
    _, expected = call("ModelInfer", model_name="ranker", inputs=inputs, parameters=parameters).outputs
    np.testing.assert_allclose(expected.contents.fp64_contents, scorer.expected(scorer(features), "2"), rtol=1e-5)
    raw = call(
        "ModelInfer",
        model_name="ranker",
        inputs=[tensor(features)],
        raw_input_contents=[features.tobytes()],
        parameters=parameters,
    )
    assert [len(part) for part in raw.raw_output_contents] == [4 * 4, 8 * 4]


def test_the_metadata_names_the_features(call, network):
    about = call("ModelMetadata", name="ranker")
    properties = {entry.key: entry.value for entry in about.properties}
    assert all(f'"{name}"' in properties["feature_names"] for name in network.served.scorer.feature_names)


RAW = [rows(2).tobytes()]
INVALID, ABSENT = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"model_name": "other"}, ABSENT, "the model is unknown, got 'other'; use 'ranker'"),
        ({"model_version": "1"}, ABSENT, "the version is not served"),
        ({"inputs": []}, INVALID, "inputs must have one tensor, got []; send one tensor named 'features'"),
        ({"outputs": [{"name": "x"}]}, INVALID, "outputs has an unknown tensor"),
        ({"inputs": [tensor(np.zeros((1, 9)))]}, INVALID, "the shape of 'features' does not fit the model"),
        ({"inputs": [tensor(np.zeros((MAX_ROWS + 1, FEATURES)))]}, INVALID, "there are too many rows"),
        ({"inputs": [tensor(rows(2), "INT8")]}, INVALID, "the datatype of 'features' is not supported"),
        ({"raw_input_contents": []}, INVALID, "the data does not fill the shape of 10 numbers, got 0"),
        ({"raw_input_contents": [b"x"]}, INVALID, "the data does not fill the shape, which needs 40 bytes, got 1"),
        ({"raw_input_contents": RAW * 2}, INVALID, "the input has data more than once"),
        (
            {"inputs": [tensor(rows(2), "FP16")], "raw_input_contents": []},
            INVALID,
            "numbers of FP16 have no typed contents; send them in raw_input_contents",
        ),
        (
            {"inputs": [tensor(rows(2), contents={"fp32_contents": [1.0]})], "raw_input_contents": []},
            INVALID,
            "the data does not fill the shape of 10 numbers, got 1",
        ),
        ({"raw_input_contents": [np.full((2, 5), np.inf, "<f4").tobytes()]}, INVALID, "is not finite"),
        ({"id": "x" * 2000}, INVALID, "the id must be a short string"),
    ],
)
def test_an_error_has_its_code_and_says_why(fields, code, message, call):
    right = {"model_name": "ranker", "inputs": [tensor(rows(2))], "raw_input_contents": RAW}
    with pytest.raises(grpc.RpcError) as raised:
        call("ModelInfer", **{**right, **fields})
    assert raised.value.code() == code
    assert message in raised.value.details()


def test_random_bytes_are_errors_and_the_next_request_gets_scores(call, network):
    rng = np.random.default_rng(0)
    right = MESSAGES["ModelInferRequest"](model_name="ranker", inputs=[tensor(rows(2))], raw_input_contents=RAW)
    valid = right.SerializeToString()
    before, codes = network._seconds._sum.get(), set()
    for number in range(200):
        content = bytearray(valid if number % 2 else rng.bytes(50))
        content[rng.integers(len(content))] ^= int(rng.integers(1, 256))
        try:
            call("ModelInfer", bytes(content))
        except grpc.RpcError as error:
            codes.add(error.code())
    assert codes == {INVALID, ABSENT}
    assert call("ModelInfer", valid).raw_output_contents[0] == network.served.scorer(rows(2)).tobytes()
    assert network._seconds._sum.get() > before


def test_without_the_token_only_probes_are_answered(network):
    app = App(network.served, ServerOptions("ranker", token="s3cret"))  # noqa: S106
    with running(app) as place, triton.InferenceServerClient(place) as client:
        sent = triton.InferInput("features", [2, FEATURES], "FP32").set_data_from_numpy(rows(2))
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("ranker")
        for ask in (client.get_server_metadata, lambda: client.infer("ranker", [sent])):
            with pytest.raises(triton.InferenceServerException, match="the token is missing or wrong"):
                ask()
        headers = {"authorization": "Bearer s3cret"}
        answer = client.infer("ranker", [sent], headers=headers)
        np.testing.assert_array_equal(answer.as_numpy("scores"), network.served.scorer(rows(2)))
    app.close()


def test_the_command_serves_http_and_grpc_with_all_workers(folders):
    with Server(folders.exported, "--workers", "2", "--grpc-port", "0") as server:
        for _ in range(3):
            with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
                sent = triton.InferInput("features", [2, FEATURES], "FP32").set_data_from_numpy(rows(2))
                scores = client.infer("ranker", [sent]).as_numpy("scores")
        server.process.terminate()
        assert server.process.wait(30) == 0
    expected = load_model(folders.network).score_features(rows(2))
    np.testing.assert_allclose(scores, expected, atol=1e-5)
