"""The remote reward against real servers on this machine: right, overloaded, hanging, talking nonsense."""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from reward_pools import item, pool

from moebius.rewards import RewardResult
from moebius.rewards.remote import read_reward

Answer = tuple[int, bytes]
SECRET = "hunter2"


@contextmanager
def server(answer: Callable[[int, dict[str, Any], Any], Answer]) -> Iterator[str]:
    """The host and port of a server that answers the n-th request (from 0) with status and body."""
    lock, numbers = threading.Lock(), iter(range(10_000))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = next(numbers)
            status, text = answer(number, body, self)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            if status in (301, 302, 307):
                self.send_header("Location", body["metadata"]["location"])
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    thread = threading.Thread(target=made.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"127.0.0.1:{made.server_port}"
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


def score(url: str, *responses: str, timeout: float = 20.0, retries: int = 3, **metadata: object) -> RewardResult:
    with pool("remote_rm", None, 2, timeout, url=url, retries=retries) as rewards:
        rewards.wait_until_ready()
        return rewards.score([item(response, "7", "seven?", **metadata) for response in responses])


def test_right_answers() -> None:
    """What is sent, both forms of answers, and the order of the items."""
    bodies: dict[str, Any] = {}

    def answer(number: int, body: dict[str, Any], request: Any) -> Answer:
        bodies[body["response"]] = (body, request.headers["Content-Type"], request.headers["Authorization"])
        value = int(body["response"]) / 2
        return 200, json.dumps([value, {"reward": value}, {"score": value, "more": "x"}][number % 3]).encode()

    with server(answer) as host:
        result = score(f"http://user:{SECRET}@{host}/rm?key={SECRET}", *map(str, range(30)), level=["é", 2])
    assert result.rewards == [number / 2 for number in range(30)]
    assert (result.timeouts, result.errors) == (0, 0)
    sent = {"prompt": "seven?", "response": "5", "label": "7", "metadata": {"level": ["é", 2]}}
    basic = "Basic " + base64.b64encode(f"user:{SECRET}".encode()).decode()
    assert bodies["5"] == (sent, "application/json", basic)


@pytest.mark.parametrize(("retries", "reward"), [(3, 1.0), (1, 0.0)])
def test_overload_is_tried_again(retries: int, reward: float) -> None:
    """503, then 429, then right."""
    with server(lambda number, body, request: ((503, 429, 200)[number], b"1.0")) as host:
        result = score(f"http://{host}", "x", retries=retries)
    assert (result.rewards, result.errors) == ([reward], int(reward == 0))
    assert (result.seconds > 0.75) == (reward == 1.0)


@pytest.mark.parametrize(
    ("status", "text", "attempts", "message"),
    [
        (500, b"1.0", 2, "127.0.0.1: status 500 (attempt 2 of 2)"),
        (404, b"1.0", 1, "127.0.0.1: status 404 (attempt 1 of 2)"),
        (307, b"", 1, "127.0.0.1: status 307"),
        (204, b"", 1, "127.0.0.1: status 204"),
        (200, b"<html>", 1, "answer b'<html>' is not JSON"),
        (200, b'{"points": 1}', 1, "neither a number nor an object"),
        (200, b" " * (2 << 20) + b"1", 1, "more than 1048576 bytes"),
    ],
)
def test_failing_servers_are_errors(status: int, text: bytes, attempts: int, message: str) -> None:
    """No error shows the URL's secrets; a redirect is not followed."""
    seen: list[int] = []
    with server(lambda number, body, request: (200, b"1.0")) as other:

        def answer(number: int, body: dict[str, Any], request: Any) -> Answer:
            seen.append(number)
            return status, text

        with server(answer) as host:
            url = f"http://user:{SECRET}@{host}/{SECRET}?key={SECRET}"
            result = score(url, "x", retries=1, location=f"http://{other}/")
    assert (result.rewards, result.errors, result.timeouts, len(seen)) == ([0.0], 1, 0, attempts)
    assert result.first_error is not None and SECRET not in result.first_error
    assert message in result.first_error


def test_nobody_listens() -> None:
    with server(lambda number, body, request: (200, b"1.0")) as host:
        pass
    result = score(f"http://user:{SECRET}@{host}/{SECRET}", "x", retries=1)
    assert (result.rewards, result.errors) == ([0.0], 1)
    assert result.first_error is not None and SECRET not in result.first_error
    assert "127.0.0.1: ConnectionError (attempt 2 of 2)" in result.first_error


@pytest.mark.parametrize("way", ["silent", "slow", "dripping"])
def test_hanging_servers_cost_their_limit_only(way: str) -> None:
    """Silent, at the end of its retries' time, or sending a little for ever: a time-out, and the others are scored."""
    ended = threading.Event()

    def answer(number: int, body: dict[str, Any], request: Any) -> Answer:
        if body["response"] == "good":
            return 200, b"1.0"
        if way == "slow":
            ended.wait(0.5)
            return 503, b""
        if way == "dripping":
            request.send_response(200)
            request.send_header("Content-Length", "100000")
            request.end_headers()
            while not ended.wait(0.02):
                request.wfile.write(b" ")
        ended.wait(30)
        return 200, b"1.0"

    with server(answer) as host:
        result = score(f"http://{host}", "good", "bad", "good", "good", timeout=1.5, retries=100)
        ended.set()
    assert result.rewards == [1.0, 0.0, 1.0, 1.0]
    assert result.timeouts + result.errors == 1 and result.timeouts == (way != "slow")
    assert result.seconds < 3.0


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with server(lambda number, body, request: (200, b"1.0")) as host:
        assert score(f"http://{host}", "x").rewards == [1.0]


@pytest.mark.parametrize(
    "text", [b"true", b"null", b"[1]", b'"1"', b"NaN", b'{"reward": null}', b'{"reward": "1"}', b""]
)
def test_answers_that_are_no_reward(text: bytes) -> None:
    with pytest.raises(ValueError, match="the server's answer"):
        read_reward(text)
