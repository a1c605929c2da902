"""A language model as judge of a run's answers, at an OpenAI-compatible address: base against federated.

Prompts, references and answers leave the machine for that address. Each pair is judged in both orders, and a model wins
that is preferred in both; else it is a tie (Zheng et al. 2023, arXiv:2306.05685, section 3.4). An answer of the judge
without exactly one verdict makes the pair unclear.
"""

import json
import os
import re
from http.client import HTTPException
from typing import Any, Literal, TypeAlias, get_args
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from atlas_fl.errors import ConfigError, one_line
from atlas_fl.frozen import Frozen

KEY = "ATLAS_JUDGE_KEY"
"""Environment variable with the key that the address asks for."""
SECONDS = 120.0
MOST_BYTES = 1 << 20
"""Most bytes of an answer of the judge that are read."""
Verdict: TypeAlias = Literal["base", "federated", "tie", "unclear"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
_ASKED = """\
Which of two answers to a prompt is closer to the reference in content, language and form? Neither their order nor their
length matters. End with your verdict: [[A]] if answer A is better, [[B]] if answer B is better, [[C]] for a tie.

[Prompt]
{prompt}

[Reference]
{reference}

[Answer A]
{a}

[Answer B]
{b}
"""


class _NoRedirect(HTTPRedirectHandler):
    """No following of redirects, which would take the key to another address."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Judge(Frozen):
    """A judge model; `url` is what OpenAI's clients call the base URL, such as http://localhost:8000/v1."""

    url: str
    model: str

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        secrets = parts.username or parts.password or parts.query or parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or secrets:
            raise ConfigError(
                "--judge takes an http or https address without a password or a question mark, such as"
                f" http://localhost:8000/v1; a key goes into the environment variable {KEY}"
            )
        if not self.model:
            raise ConfigError("--judge needs the name of its model; add --judge-model NAME")

    def compare(self, prompt: str, reference: str, *, base: str, federated: str) -> Verdict:
        """Return which of two answers the judge prefers in both orders.

        Raises:
            ConfigError: the address does not answer, or not as such an address does.
        """
        first = self._ask(_ASKED.format(prompt=prompt, reference=reference, a=base, b=federated))
        second = self._ask(_ASKED.format(prompt=prompt, reference=reference, a=federated, b=base))
        if not first or not second:
            return "unclear"
        return {"AB": VERDICTS[0], "BA": VERDICTS[1]}.get(first + second, "tie")

    def _ask(self, text: str) -> str:
        """The letter of the judge's verdict; empty where it gives none, or several."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0}
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        request = Request(f"{self.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with build_opener(_NoRedirect).open(request, timeout=SECONDS) as response:
                said = json.loads(response.read(MOST_BYTES))["choices"][0]["message"]["content"]
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            if isinstance(error, HTTPError):
                error.close()
            raise ConfigError(
                f"the judge at {self.url} does not answer as OpenAI's do ({one_line(error)}); check --judge,"
                f" --judge-model and {KEY}; scores, answers and verdicts of before are written"
            ) from None
        letters = set(re.findall(r"\[\[([ABC])\]\]", str(said)))
        return letters.pop() if len(letters) == 1 else ""
