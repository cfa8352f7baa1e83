"""The remote reward: one POST for each sample to `--rm-url`, which may be any server that judges responses.

The request's body is the JSON object {"prompt": text, "response": text, "label": text, "metadata": object of the row's
other columns}. The answer is a JSON number, or an object with a number as "reward" or "score".

Connection errors and the status codes 429 and 5xx are tried again, after waiting 0.25, 0.5, 1 ... seconds, as often as
`--rm-retries` says and as the sample's time allows. Anything else but 200 is an error at once, a redirect too:
responses go to the address in the flag and to no other. The environment's settings for proxies and `.netrc` have no
effect.
A user and password in the URL are sent as basic authentication; no message holds more of the URL than its host.
"""

import json
import math
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import requests

from moebius.rewards.specs import OutOfTime

FIRST_WAIT_SECONDS = 0.25
ANSWER_BYTES = 1 << 20


def make_remote_reward(url: str, seconds: float, retries: int) -> Callable[..., float]:
    """The reward with its limit for each sample, retries included. Connections are kept open between samples."""
    session = requests.Session()
    session.trust_env = False

    def reward(prompt: str, response: str, label: str, **metadata: object) -> float:
        body = {"prompt": prompt, "response": response, "label": label, "metadata": metadata}
        return read_reward(_post(session, url, json.dumps(body).encode(), time.monotonic() + seconds, retries))

    return reward


def read_reward(answer: bytes) -> float:
    """The number in a server's answer.

    Raises:
        ValueError: it is not JSON, or holds no finite number.
    """
    try:
        value = json.loads(answer)
    except ValueError:
        raise ValueError(f"the server's answer {answer[:200]!r} is not JSON") from None
    if isinstance(value, dict):
        value = value.get("reward", value.get("score"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the server's answer {answer[:200]!r} is neither a number nor an object with reward or score")
    return float(value)


def _post(session: requests.Session, url: str, body: bytes, deadline: float, retries: int) -> bytes:
    """The body of the server's answer.

    Raises:
        OutOfTime: the sample's time ended while a server that could be reached did not answer.
        RuntimeError: no retry is left, or the answer is of a kind that no retry would change.
    """
    host = urlsplit(url).hostname
    for attempt in range(retries + 1):
        fault, again = "", True
        try:
            return _answer(session, url, body, deadline)
        except requests.Timeout:
            raise OutOfTime(f"no answer from {host} in time") from None
        except _Refused as refused:
            fault, again = str(refused), refused.again
        except requests.RequestException as error:  # its text holds the URL
            fault = type(error).__name__
        if time.monotonic() >= deadline:
            raise OutOfTime(f"no answer from {host} in time: {fault}")
        wait = FIRST_WAIT_SECONDS * 2**attempt
        if not again or attempt == retries or time.monotonic() + wait >= deadline:
            raise RuntimeError(f"{host}: {fault} (attempt {attempt + 1} of {retries + 1})")
        time.sleep(wait)
    raise AssertionError


class _Refused(Exception):
    """A status code that brings no reward; `again` where a later attempt may."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.again = status == 429 or status >= 500


def _answer(session: requests.Session, url: str, body: bytes, deadline: float) -> bytes:
    left = max(deadline - time.monotonic(), 0.001)
    headers = {"Content-Type": "application/json"}
    with session.post(url, body, headers=headers, timeout=left, allow_redirects=False, stream=True) as response:
        if response.status_code != 200:
            raise _Refused(response.status_code)
        received = bytearray()
        # A server that sends a little now and then never meets the limit of a single read.
        for part in response.iter_content(1 << 14):
            received += part
            if len(received) > ANSWER_BYTES:
                raise ValueError(f"the server's answer has more than {ANSWER_BYTES} bytes")
            if time.monotonic() >= deadline:
                raise requests.Timeout
        return bytes(received)
