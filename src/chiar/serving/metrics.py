"""Counts and seconds, as text that Prometheus reads."""

import math
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

COMPLETIONS = "/v1/completions"
COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were answered.",
    "completion_tokens": "Tokens written.",
    "generation_seconds": "Seconds the model was at work.",
    "request_seconds": "Seconds from the first byte of a request to the last of its answer, all requests added up.",
    "clients_gone": "Requests whose client left before the end.",
}


class Metrics:
    """Several threads count."""

    def __init__(self, operators: list[str]) -> None:
        self.operators = operators
        self.lock = threading.Lock()
        self.sums = dict.fromkeys(COUNTERS, 0.0)
        self.statuses: Counter[int] = Counter()
        self.routed: Counter[str] = Counter()
        self.completions, self.completion_seconds = 0, 0.0
        """Completions that were answered, and how long they took."""

    def add(self, name: str, amount: float = 1.0) -> None:
        with self.lock:
            self.sums[name] += amount

    def count_request(self, path: str, status: int, seconds: float) -> None:
        with self.lock:
            self.statuses[status] += 1
            self.sums["request_seconds"] += seconds
            if path == COMPLETIONS and status == 200:
                self.completions += 1
                self.completion_seconds += seconds

    def count_routes(self, routes: Any) -> None:
        """Which operators the routed layers sent the tokens of a prompt to."""
        for route in routes:
            for name, count in zip(
                self.operators, route.choice_BT.flatten().bincount(minlength=len(self.operators)).tolist(), strict=True
            ):
                with self.lock:
                    self.routed[name] += count

    def typical_seconds(self) -> int:
        """What a completion takes on average, for clients that are sent away: from one second to a minute."""
        with self.lock:
            return min(60, max(1, math.ceil(self.completion_seconds / max(1, self.completions))))

    def text(self, gauges: Mapping[str, tuple[float, str]]) -> str:
        """`gauges`: what is now, with its meaning."""
        with self.lock:
            lines = describe("requests_total", "counter", "Requests to /v1 by the status of their answer.")
            lines += [f'chiar_requests_total{{status="{code}"}} {n}' for code, n in sorted(self.statuses.items())]
            for name, meaning in COUNTERS.items():
                lines += [*describe(f"{name}_total", "counter", meaning), f"chiar_{name}_total {self.sums[name]:.10g}"]
            if self.routed:
                lines += describe(
                    "routed_tokens_total",
                    "counter",
                    "Prompt tokens that routed layers sent to each operator, by layer.",
                )
                lines += [f'chiar_routed_tokens_total{{operator="{name}"}} {n}' for name, n in self.routed.items()]
                share = self.routed["attention"] / max(1, self.routed.total())
                gauges = {**gauges, "attention_fraction": (share, "f: the share of these that went to attention.")}
        for name, (value, meaning) in gauges.items():
            lines += [*describe(name, "gauge", meaning), f"chiar_{name} {value:.10g}"]
        return "\n".join(lines) + "\n"


def describe(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP chiar_{name} {meaning}", f"# TYPE chiar_{name} {kind}"]
