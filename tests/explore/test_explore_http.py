"""The page's server over real HTTP: what it answers, what it refuses, and that nothing makes it hang or fall."""

import json
import math
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import httpx
import pytest
import torch
from page_server import save_model, serving

from chiar.data.tokens import BROKEN, PART, Pieces, TextCodec
from chiar.explore.server import MOST_BYTES, SEATS
from chiar.routing.tables import route_text
from chiar.web import HEADERS, Connection
from commands import wait_until

FILES = ["/", "/style.css", "/theme.js", "/marks.js", "/view.js", "/app.js"]
GET_ALL = "".join(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n" for path in FILES).encode()
TEXT = "light and dark tokens, side by side"


def refused(response, status):
    assert response.status_code == status, response.text
    sentence = response.json()["error"]["message"]
    assert sentence and "Traceback" not in sentence and len(sentence) < 250
    return sentence


def test_files_come_with_strict_headers_and_name_no_outside_host(served):
    for path in FILES:
        response = served.get(path)
        assert response.status_code == 200
        assert {name: response.headers[name] for name in HEADERS} == HEADERS
        text = response.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text and 'src="//' not in text
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for path in ("/nothing", "/../../etc/passwd", "/static/..%2f..%2fserver.py", "/api/nope"):
        response = served.get(path)
        assert "Not Found" in refused(response, 404) and response.headers["x-content-type-options"] == "nosniff"


def test_models_are_described_and_a_view_is_what_trace_says_and_its_loss_the_models(served, folders):
    first, second = served.get("/api/models").json()["models"]
    assert [first["name"], second["name"]] == folders and first["steer"] == ["shift", "share"]
    assert first["trained"] == 64 and not any("unreliable" in note for note in first["notes"])
    assert second["steer"] == [] and "No layer" in second["unsteerable"]
    view = served.post("/api/route", {"model": 0, "text": TEXT}).json()
    trace = route_text(folders[0], TEXT, None, 0).trace
    assert "".join(token["piece"] for token in view["tokens"]) == TEXT
    for shown, layer in zip(view["layers"], trace.layers, strict=True):
        assert shown["choice"] == layer.choice_BT[0].tolist()
        assert shown["entropy"] == pytest.approx(layer.entropy_BT[0].tolist(), abs=1e-5)  # six digits are sent
    dark = torch.stack([trace.layers[i].choice_BT[0].float() for i in trace.routed_layers]).mean(0)
    assert [token["dark"] for token in view["tokens"]] == dark.tolist()
    assert 0 < dark.mean() < 1
    ids = torch.tensor([list(TEXT.encode())])
    with torch.no_grad():
        expected = float(served.explorer.models[0].model(ids, labels=ids).loss)
    assert view["loss"] == pytest.approx(expected, abs=1e-5)  # fp32, summed in another order
    assert view["perplexity"] == pytest.approx(math.exp(view["loss"]))
    histogram = view["histogram"]
    for density in (histogram["null"], *(layer["density"] for layer in histogram["layers"])):
        assert sum(density) / len(density) == pytest.approx(1.0, abs=1e-4)  # six digits each
    assert histogram["low"] < histogram["null_mean"] < histogram["high"]


def test_a_dark_stack_is_shown_once_by_the_entropy_it_cuts(tmp_path):
    with serving([str(save_model(tmp_path / "v5", "v5-tiny"))]) as server:
        view = server.post("/api/route", {"text": TEXT}).json()
        (about,) = server.get("/api/models").json()["models"]
        few, many = (
            server.post("/api/route", {"text": TEXT, "steer": {"kind": "share", "value": f}}).json() for f in (0.1, 0.9)
        )
    outer, stack, _ = view["layers"]
    assert [layer["number"] for layer in view["layers"]] == ["1", "2–3", "4"]
    assert stack["entropy_name"] == "rise of the predictive entropy" and "rise of the predictive" in about["router"]
    assert outer["entropy"] is None, "another H than that of the stack"
    assert [h > stack["thresholds"][0] for h in stack["entropy"]] == [bool(choice) for choice in stack["choice"]]
    histogram = view["histogram"]
    assert histogram["null"] is None and [layer["layer"] for layer in histogram["layers"]] == [1]
    shares = [moved["layers"][1]["use"]["attention"] for moved in (few, many)]
    assert shares == pytest.approx([0.1, 0.9], abs=1 / len(TEXT))
    assert few["layers"][1]["thresholds"] > many["layers"][1]["thresholds"]
    assert few["flops"]["model"] < many["flops"]["model"] and few["flops"]["baseline"] == view["flops"]["baseline"]


def test_steering_moves_routes_loss_and_flops(served):
    steers = [{"kind": "share", "value": share} for share in (0.0, 1.0)]
    light, dark = (served.post("/api/route", {"text": TEXT, "steer": steer}).json() for steer in steers)
    assert light["loss"] != dark["loss"] and light["flops"]["model"] < dark["flops"]["model"]
    baseline = served.post("/api/route", {"model": 1, "text": TEXT}).json()
    assert all(token["dark"] == 1.0 for token in baseline["tokens"])
    assert baseline["flops"]["saved"] == 0.0 and baseline["reach"] is None


def test_characters_of_several_tokens_are_whole():
    for text, expected in {
        "aé漢🎨".encode(): ["a", PART, "é", PART, PART, "漢", PART, PART, PART, "🎨"],
        b"\xf0\x9f\x8ea": [PART, PART, PART, BROKEN + "a"],
        b"\xff\xff\xffa": [PART, BROKEN, BROKEN, BROKEN + "a"],
        "\x1b\n\t\u202e".encode(): ["\\x1b", "\n", "\t", PART, PART, "\\u202e"],
    }.items():
        pieces = Pieces(TextCodec(None, None))
        assert [pieces.next(token) for token in text] == expected


def test_it_is_shown_and_harmless(served):
    hostile = ["<script>alert(1)</script>", "</textarea><img src=x onerror=alert(1)>", "\x00\x01\x1b[31mred\x07\x7f"]
    hostile += ["👩‍👩‍👧 emoji 🎨", "\u202eevil\u202c שלום مرحبا", "\u2028\u2029\ufeff", "ends badly \ufffd"]
    for text in (*hostile, " ", "\n\n"):
        response = served.post("/api/route", {"text": text})
        assert response.status_code == 200 and response.headers["content-type"] == "application/json"
        pieces = "".join(token["piece"] for token in response.json()["tokens"])
        assert not any((ord(c) < 32 and c not in "\n\t") or 0x202A <= ord(c) <= 0x202E for c in pieces)
        assert pieces == text or not (text.isascii() and text.isprintable())


def test_limits(served):
    assert "empty" in refused(served.post("/api/route", {"text": ""}), 400)
    for text in ("x" * 1_000_000, "漢" * (MOST_BYTES // 3 + 1)):  # bytes are counted, not characters
        assert f"{MOST_BYTES:,} bytes" in refused(served.post("/api/route", {"text": text}), 413)
    assert "257 tokens, and at most 256" in refused(served.post("/api/continue", {"text": "x" * 257}), 413)
    assert served.post("/api/route", {"text": "x" * 256}).status_code == 200


def test_wrong_fields(served):
    steers = [5, {"kind": "up", "value": 1}, {"kind": "share", "value": "x"}, {"kind": "share", "value": 2}]
    steers += [{"kind": "shift", "value": value} for value in (-1e300, 1e300)]
    wrong = {"text": [5, None], "model": [2, -1, "0", True], "steer": steers, "tokens": [0, 1000], "seed": [-1]}
    for name, values in {**wrong, "temperature": [-1, 10**400], "more": [1]}.items():
        for value in values:
            refused(served.post("/api/continue", {"text": TEXT, name: value}), 400)
    refused(served.post("/api/route", {"text": TEXT, "model": 1, "steer": {"kind": "share", "value": 0.5}}), 400)


def test_only_own_names_and_pages_are_answered(served):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::1"):
        for path in ("/", "/api/models"):
            refused(served.get(path, headers={"host": host}), 421)
    for host in ("localhost", "LOCALHOST:99", "127.0.0.1", "[::1]:80", "192.168.0.7"):
        assert served.get("/api/models", headers={"host": host}).status_code == 200
    for origin in ("http://evil.example", "null"):
        refused(served.post("/api/route", {"text": "a"}, headers={"origin": origin}), 403)
    assert served.post("/api/route", {"text": "a"}, headers={"origin": served.url}).status_code == 200


def continued(server, **wish):
    return [json.loads(line) for line in server.post("/api/continue", {"text": TEXT, **wish}).text.splitlines()]


@pytest.mark.parametrize("temperature", [0, 1e-45])
def test_greedy_tokens_are_those_of_generate(served, temperature):
    first, *tokens, last = continued(served, tokens=12, temperature=temperature)
    assert len(first["view"]["tokens"]) == len(TEXT) and last == {"end": True}
    loaded, ids = served.explorer.models[0], torch.tensor([list(TEXT.encode())])
    out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert tokens[-1]["text"] == loaded.codec.decode(out[0, len(TEXT) :].tolist())


@pytest.mark.parametrize("steer", [None, {"kind": "shift", "value": 0.02}], ids=["own", "moved"])
def test_routes_of_new_tokens_are_those_of_the_whole_text(served, steer):
    tokens = continued(served, tokens=20, temperature=1.0, seed=3, steer=steer)[1:-1]
    model, whole = served.explorer.models[0].model, [*TEXT.encode(), *(token["id"] for token in tokens)]
    model.model.set_thresholds(0.8 + (steer["value"] if steer else 0.0))
    try:
        with torch.no_grad():
            trace = model(torch.tensor([whole]), output_routing=True).routing
    finally:
        model.model.set_thresholds(0.8)
    expected = [[int(layer.choice_BT[0, t])] for t in range(len(TEXT), len(whole)) for layer in trace.layers]
    assert [layer["choice"] for token in tokens for layer in token["layers"]] == expected
    assert len(tokens) == 20


def test_sampling_is_seeded_and_stops_where_there_is_no_room(served):
    written = [continued(served, tokens=15, temperature=2.0, seed=seed)[-2] for seed in (1, 1, 2)]
    assert written[0] == written[1] != written[2]
    assert len(continued(served, text="x" * 250, tokens=40)) == 1 + 6 + 1
    assert "fills all" in refused(served.post("/api/continue", {"text": "x" * 256}), 400)


def test_a_client_that_leaves_at_any_moment_leaves_no_work(served):
    body = {"text": TEXT, "tokens": 200, "temperature": 1.0}
    for lines_read in (1, 3):
        with httpx.stream("POST", f"{served.url}/api/continue", json=body, timeout=30) as response:
            lines = response.iter_lines()
            assert all(next(lines) for _ in range(lines_read))
            assert len(served.explorer.streaming) == 1
        wait_until(lambda: not served.explorer.streaming)
    payload = json.dumps(body)
    head = "POST /api/continue HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    whole = f"{head}{len(payload)}\r\n\r\n{payload}".encode()
    for sent in (5, len(head), len(whole) - 10, len(whole)):
        with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1]))) as connection:
            connection.sendall(whole[:sent])
    wait_until(lambda: not served.explorer.seated)
    assert served.post("/api/route", {"text": TEXT}).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\nHost: local", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", GET_ALL * 400],
    ids=["idle", "slow", "kept", "unread"],
)
def test_clients_that_keep_it_waiting_are_dropped(served, monkeypatch, sent):
    dropped = Mock(side_effect=Connection.drop)
    monkeypatch.setattr(Connection, "drop", lambda connection: dropped(connection))
    monkeypatch.setattr("chiar.web.IDLE_SECONDS", 0.1)
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
        line.sendall(sent)
        wait_until(lambda: dropped.called)
        wait_until(lambda: not served.explorer.server_state.connections)


@pytest.fixture
def held(served):
    """The model's thread is held up, so that requests must wait."""
    hold = threading.Event()
    served.explorer.thread.submit(hold.wait, 60)
    yield hold
    hold.set()


def test_beyond_the_waiting_room_is_429(served, held, monkeypatch):
    seats, _ = SEATS
    with ThreadPoolExecutor(24) as crowd:
        answers = [crowd.submit(served.post, "/api/route", {"text": TEXT}) for _ in range(24)]
        wait_until(lambda: sum(answer.done() for answer in answers) == 24 - seats)
        assert served.get("/api/models").status_code == 200  # still answers the rest
        early = [answer.result() for answer in answers if answer.done()]
        held.set()
    assert all(answer.status_code == 429 and answer.headers["retry-after"] == "1" for answer in early)
    assert [answer.result().status_code for answer in answers].count(200) == seats
    monkeypatch.setattr(served.explorer, "streaming", set(range(4)))
    response = served.post("/api/continue", {"text": TEXT})
    assert "try again" in refused(response, 429) and response.headers["retry-after"] == "3"


def test_where_every_connection_is_busy_it_says_so(served, monkeypatch):
    monkeypatch.setattr(served.explorer, "most", 0)
    response = served.get("/api/models")
    assert "full" in refused(response, 503)
    assert (response.headers["retry-after"], response.headers["connection"]) == ("1", "close")


def test_who_stops_waiting_is_not_computed_for(served, held):
    begun = []
    handle = served.explorer.models[0].model.model.register_forward_pre_hook(lambda *_: begun.append(1))
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/api/route", json={"text": TEXT}, timeout=0.2)
    wait_until(lambda: not served.explorer.seated)
    held.set()
    assert served.post("/api/route", {"text": "b"}).status_code == 200
    handle.remove()
    assert len(begun) == 1


KINDS = {
    **{routing: {"router": "learned", "routing": routing} for routing in ("hard", "soft")},
    **{router: {"router": router} for router in ("random", "static")},
    **{preset: {"preset": preset} for preset in ("v1-tiny", "v2-tiny")},
    **{"target": {"target_fraction": 0.3}, "batch-gate": {"gate_pool": "batch"}},
    "temporal": {"operators": ["temporal", "attention"], "layer_types": ["temporal", "routed", "attention"]},
    **{f"v5-{router}": {"preset": "v5-tiny", "router": router} for router in ("rise", "predictive", "space", "random")},
    "sparse": {"norm_position": "pre", "keys": "routed", "execution": "sparse"},
}


def test_each_kind_of_model_is_routed_steered_or_explained_and_continued(tmp_path):
    with serving([str(save_model(tmp_path / name, **changes)) for name, changes in KINDS.items()], 64) as zoo:
        for number, about in enumerate(zoo.get("/api/models").json()["models"]):
            assert zoo.post("/api/route", {"model": number, "text": TEXT}).json()["loss"] > 0
            assert bool(about["steer"]) != bool(about["unsteerable"])
            for way in about["steer"]:
                steer = {"kind": way, "value": 0.5 if way == "share" else 0.01}
                assert zoo.post("/api/route", {"model": number, "text": TEXT, "steer": steer}).status_code == 200
            assert len(continued(zoo, model=number, tokens=5)) == 7
            assert "at most 64" in refused(zoo.post("/api/route", {"model": number, "text": "x" * 65}), 413)
            frozen = any("g keeps its value of the prompt" in note for note in about["notes"])
            assert frozen == about["name"].endswith("batch-gate")


def test_without_a_model_it_says_what_to_do_and_opens_the_demo_on_demand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving([]) as server:
        record = server.get("/api/models").json()
        assert record["models"] == [] and record["demo"] == []
        assert "<pre>make demo</pre>" in server.get("/").text
        refused(server.post("/api/route", {"text": TEXT}), 400)
        assert "no demo run" in refused(server.post("/api/demo", {}), 409)
        names = ["runs/demo/v5", "runs/demo/dense"]
        for name, preset in zip(names, ("v3-tiny", "baseline-tiny"), strict=True):
            save_model(tmp_path / name / "best", preset)
        assert server.get("/api/models").json()["demo"] == names and server.explorer.models == []
        assert [model["name"] for model in server.post("/api/demo", {}).json()["models"]] == names
        assert server.post("/api/route", {"model": 1, "text": TEXT}).status_code == 200
