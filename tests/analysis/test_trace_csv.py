"""`chiar trace --csv`: the trace's own numbers, a line a token and layer."""

import csv
import io

from chiar.analysis.trace_csv import COLUMNS, routing_csv
from chiar.analysis.trace_view import route_text
from commands import run

TEXT = 'dark, "light"\n\x1b'


def test_each_line_is_what_the_trace_says():
    routed = route_text("v3-tiny", TEXT, None, 0)
    rows = list(csv.DictReader(io.StringIO(routing_csv(routed))))
    layers = routed.trace.layers
    assert len(rows) == len(TEXT) * len(layers) and tuple(rows[0]) == COLUMNS
    for number, row in enumerate(rows):
        token, layer = divmod(number, len(layers))
        traced = layers[layer]
        assert (int(row["position"]), int(row["layer"])) == (token, layer + 1)
        assert int(row["token_id"]) == TEXT.encode()[token]
        assert row["operator"] == traced.operators[int(traced.choice_BT[0, token])]
        assert float(row["entropy"]) == float(traced.entropy_BT[0, token])
        assert float(row["attention_weight"]) == float(row["operator"] == "attention")
        assert bool(row["thresholds"]) == (traced.kind == "routed") and bool(row["gate"]) == (layer == 0)


def test_the_command_writes_or_prints_it(tmp_path):
    out = tmp_path / "routes.csv"
    code, said = run("trace", "v3-tiny", "--text", "ab", "--csv", out)
    assert code == 0 and f"wrote {out}" in said and "layer 1" in said
    code, printed = run("trace", "v3-tiny", "--text", "ab", "--csv", "-")
    assert code == 0 and printed.strip() == out.read_text().strip()
    assert "exists already" in run("trace", "v3-tiny", "--text", "ab", "--csv", out)[1]
    code, said = run("trace", "v3-tiny", "--text", "ab", "--csv", "-", "--json", "-")
    assert code == 2 and "would both print" in said
