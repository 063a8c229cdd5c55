"""Download from a real local server, and from a port without one."""

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import _openml

from opusim.training.data import load_dataset
from opusim.training.data.catalogue import OpenmlSource, download_labelled_images
from opusim.training.errors import DataError

ARFF = b"""@RELATION tiny
@ATTRIBUTE pixel1 REAL
@ATTRIBUTE pixel2 REAL
@ATTRIBUTE class {0,1,2}
@DATA
0,255,2
3,4,0
5,6,1
"""
QUIET = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # of retries
SOURCE = OpenmlSource(data_id=7, name="tiny", n_train=2, n_test=1)


def _answers(address: str, checksum: str) -> dict[str, bytes]:
    """What openml.org's interface answers for a data set of three records."""
    columns = [("pixel1", "numeric", "false"), ("pixel2", "numeric", "false"), ("class", "nominal", "true")]
    features = [
        {
            "index": str(i), "name": name, "data_type": kind, "is_target": target, "is_ignore": "false",
            "is_row_identifier": "false", "number_of_missing_values": "0",
        }
        for i, (name, kind, target) in enumerate(columns)
    ]  # fmt: skip
    description = {
        "id": "7", "name": "tiny", "version": "1", "status": "active", "format": "ARFF",
        "description": "three records", "url": f"{address}/tiny.arff", "md5_checksum": checksum,
    }  # fmt: skip
    qualities = [{"name": "NumberOfInstances", "value": "3"}]
    return {
        "/data/7": json.dumps({"data_set_description": description}).encode(),
        "/features/7": json.dumps({"data_features": {"feature": features}}).encode(),
        "/qualities/7": json.dumps({"data_qualities": {"quality": qualities}}).encode(),
        "/tiny.arff": ARFF,
    }


def _point_scikit_learn_at(address: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCIKIT_LEARN_DATA", str(cache))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(_openml.time, "sleep", lambda _: None)  # between its retries
    paths = {"_DATA_INFO": "data", "_DATA_FEATURES": "features", "_DATA_QUALITIES": "qualities"}
    for name, path in paths.items():
        monkeypatch.setattr(_openml, name, f"{address}/{path}/{{}}")


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The answers of a running server, to be changed by a test."""
    served: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = served.get(self.path)
            self.send_response(500 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        served.update(_answers(address, hashlib.md5(ARFF).hexdigest()))
        _point_scikit_learn_at(address, tmp_path, monkeypatch)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        server.shutdown()
        thread.join()


def test_downloads_and_divides_in_the_published_order(answers: dict[str, bytes]) -> None:
    parts = download_labelled_images(SOURCE)
    assert parts["train"][0].dtype == np.float32
    assert parts["train"][0].tolist() == [[0, 255], [3, 4]]
    assert parts["train"][1].tolist() == [2, 0]
    assert parts["train"][1].dtype == np.int64
    assert parts["test"][0].tolist() == [[5, 6]]
    assert parts["test"][1].tolist() == [1]


@QUIET
@pytest.mark.parametrize("broken", ["/data/7", "/tiny.arff"])
def test_a_server_that_fails_gives_one_clear_line(answers: dict[str, bytes], broken: str) -> None:
    del answers[broken]
    with pytest.raises(DataError, match=r"tiny could not be downloaded from openml\.org \(HTTP") as caught:
        download_labelled_images(SOURCE)
    assert "OPUSIM_DATA" in str(caught.value)
    assert "\n" not in str(caught.value)


@QUIET
def test_a_changed_file_is_refused(answers: dict[str, bytes]) -> None:
    answers["/tiny.arff"] = ARFF.replace(b"255", b"254")
    with pytest.raises(DataError, match=r"could not be downloaded.*md5 checksum"):
        download_labelled_images(SOURCE)


def test_another_number_of_records_is_refused(answers: dict[str, bytes]) -> None:
    source = OpenmlSource(data_id=7, name="tiny", n_train=3, n_test=1)
    with pytest.raises(DataError, match=r"holds 3 records, not 4.*get_data_home"):
        download_labelled_images(source)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "there"), [("mnist", "mnist_784"), ("fashion-mnist", "Fashion-MNIST")])
def test_without_a_network_load_dataset_says_what_to_do(
    name: str, there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:  # bound and not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        _point_scikit_learn_at(address, tmp_path, monkeypatch)
        monkeypatch.delenv("OPUSIM_DATA", raising=False)
        with pytest.raises(DataError, match=f"{there} could not be downloaded .*refused.*set OPUSIM_DATA"):
            load_dataset(name, split_seed=0)
