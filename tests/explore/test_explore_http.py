"""The page's server over real HTTP: what it answers, what it refuses, and that nothing makes it hang or fall."""

import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from page_server import save_model, serving

from chiar.analysis.trace_view import route_text
from chiar.data.tokenizers import Tokenizer
from chiar.data.tokens import TextCodec
from chiar.explore.server import MOST_BYTES
from chiar.explore.view import PART, Pieces
from chiar.generation.writer import BROKEN
from chiar.web import HEADERS

FILES = ["/", *(f"/{name}" for name in ("style.css", "theme.js", "marks.js", "view.js", "app.js"))]
TEXT = "light and dark tokens, side by side"


def refused(response, status):
    assert response.status_code == status, response.text
    sentence = response.json()["error"]["message"]
    assert sentence and "Traceback" not in sentence and len(sentence) < 250
    return sentence


def wait_until(idle, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not idle():
        assert time.monotonic() < deadline, "work went on"
        time.sleep(0.01)


class TestFiles:
    @pytest.mark.parametrize("path", FILES)
    def test_files_come_with_strict_headers(self, served, path):
        response = served.get(path)
        assert response.status_code == 200
        for name, value in HEADERS.items():
            assert response.headers[name] == value
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy

    def test_errors_have_the_headers_too(self, served):
        assert served.get("/nothing").headers["x-content-type-options"] == "nosniff"
        assert served.get("/../../etc/passwd").status_code == 404
        assert "Not Found" in served.get("/api/nope").json()["error"]["message"]
        assert served.get("/static/..%2f..%2fserver.py").status_code == 404

    def test_no_outside_host_is_named(self, served):
        for path in FILES:
            text = served.get(path).text.replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text and "https://" not in text and 'src="//' not in text

    def test_models_are_described(self, served, folders):
        record = served.get("/api/models").json()
        assert [model["name"] for model in record["models"]] == folders
        assert record["models"][0]["steer"] == ["shift", "share"]
        assert record["models"][1]["steer"] == [] and "No layer" in record["models"][1]["unsteerable"]


class TestRouting:
    def test_a_view_is_what_trace_says(self, served, folders):
        view = served.post("/api/route", {"model": 0, "text": TEXT}).json()
        trace = route_text(folders[0], TEXT, None, 0).trace
        assert "".join(token["piece"] for token in view["tokens"]) == TEXT
        for shown, layer in zip(view["layers"], trace.layers, strict=True):
            assert shown["choice"] == layer.choice_BT[0].tolist()
            # Six digits are sent.
            assert shown["entropy"] == pytest.approx(layer.entropy_BT[0].tolist(), abs=1e-5)
        dark = torch.stack([trace.layers[i].choice_BT[0].float() for i in trace.routed_layers]).mean(0)
        assert [token["dark"] for token in view["tokens"]] == dark.tolist()
        assert 0 < dark.mean() < 1

    def test_the_loss_is_the_models(self, served):
        view = served.post("/api/route", {"text": TEXT}).json()
        model = served.explorer.models[0].model
        ids = torch.tensor([list(TEXT.encode())])
        with torch.no_grad():
            expected = float(model(ids, labels=ids).loss)
        assert view["loss"] == pytest.approx(expected, abs=1e-5)
        assert view["perplexity"] == pytest.approx(math.exp(view["loss"]))

    def test_steering_moves_routes_loss_and_flops(self, served):
        views = [
            served.post("/api/route", {"text": TEXT, "steer": {"kind": "share", "value": share}}).json()
            for share in (0.0, 1.0)
        ]
        shares = [
            [layer["use"]["attention"] for layer in view["layers"] if layer["kind"] == "routed"] for view in views
        ]
        assert shares == [[0.0, 0.0], [1.0, 1.0]]
        assert views[0]["loss"] != views[1]["loss"]
        assert views[0]["flops"]["model"] < views[1]["flops"]["model"]
        plain = served.post("/api/route", {"text": TEXT}).json()
        assert 0 < sum(layer["use"]["attention"] for layer in plain["layers"] if layer["kind"] == "routed") < 2

    def test_the_histogram_holds_every_token_and_the_null(self, served):
        histogram = served.post("/api/route", {"text": TEXT}).json()["histogram"]
        for density in (histogram["null"], *(layer["density"] for layer in histogram["layers"])):
            assert sum(density) / len(density) == pytest.approx(1.0, abs=1e-4)
        assert histogram["low"] < histogram["null_mean"] < histogram["high"]

    def test_a_baseline_has_no_routes(self, served):
        view = served.post("/api/route", {"model": 1, "text": TEXT}).json()
        assert all(token["dark"] == 1.0 for token in view["tokens"])
        assert view["flops"]["saved"] == 0.0 and view["reach"] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"ab", ["a", "b"]),
        ("é漢🎨".encode(), [PART, "é", PART, PART, "漢", PART, PART, PART, "🎨"]),
        (b"\xe6a", [PART, BROKEN + "a"]),
        (b"\xf0\x9f\x8ea", [PART, PART, PART, BROKEN + "a"]),
        (b"\xff\xff\xffa", [PART, BROKEN, BROKEN, BROKEN + "a"]),
        ("\x1b\n\t\u202e".encode(), ["\\x1b", "\n", "\t", PART, PART, "\\u202e"]),
    ],
    ids=["plain", "whole", "broken", "cut", "never", "controls"],
)
def test_characters_of_several_tokens_are_whole(text, expected):
    pieces = Pieces(TextCodec(None, None))
    assert [pieces.next(token) for token in text] == expected


def test_pieces_of_a_trained_vocabulary_add_up_to_the_text(tmp_path):
    text = "light 漢 and naïve tokens 🎨 漢漢"
    Tokenizer.train(["light and dark 漢 naïve tokens " * 20], 300).save(tmp_path)
    codec = TextCodec.open(None, tmp_path)
    pieces = Pieces(codec)
    assert "".join(pieces.next(token) for token in codec.encode(text)).replace(PART, "") == text


class TestHostileText:
    @pytest.mark.parametrize(
        "text",
        [
            *("<script>alert(1)</script>", "</textarea><img src=x onerror=alert(1)>", "\x00\x01\x1b[31mred\x07\x7f"),
            *(
                "👩‍👩‍👧 emoji 🎨",
                "\u202eevil\u202c שלום مرحبا",
                "\u2028\u2029\ufeff",
                "ends badly \ufffd",
                " ",
                "\n\n\n",
            ),
        ],
        ids=ascii,
    )
    def test_it_is_shown_and_harmless(self, served, text):
        response = served.post("/api/route", {"text": text})
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        pieces = "".join(token["piece"] for token in response.json()["tokens"])
        assert not any((ord(c) < 32 and c not in "\n\t") or 0x202A <= ord(c) <= 0x202E for c in pieces)
        if text.isascii() and text.isprintable():
            assert pieces == text

    @pytest.mark.parametrize("path", ["/api/route", "/api/continue"])
    def test_limits(self, served, path):
        assert "empty" in refused(served.post(path, {"text": ""}), 400)
        for text in ("x" * 1_000_000, "漢" * (MOST_BYTES // 3 + 1)):  # bytes are counted, not characters
            assert f"{MOST_BYTES:,} bytes" in refused(served.post(path, {"text": text}), 413)
        assert "257 tokens and 256 are the most" in refused(served.post(path, {"text": "x" * 257}), 413)
        assert served.post("/api/route", {"text": "x" * 256}).status_code == 200

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            *((body, "JSON") for body in (b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 20_000)),
            (b'{"text": "a", "steer": {"kind": "shift", "value": NaN}}', "JSON"),
            (b'{"text": "\\ud800"}', "surrogate"),
        ],
        ids=range(8),
    )
    def test_bodies(self, served, body, message):
        response = httpx.post(f"{served.url}/api/route", content=body, headers={"content-type": "application/json"})
        assert message in refused(response, 400)

    def test_another_content_type(self, served):
        response = httpx.post(f"{served.url}/api/route", content=b"{}", headers={"content-type": "text/plain"})
        assert "application/json" in refused(response, 415)

    @pytest.mark.parametrize(
        "fields",
        [
            *({"text": 5}, {"text": None}, {"model": 2}, {"model": -1}, {"model": "0"}, {"model": True}, {"steer": 5}),
            {"steer": {"kind": "up", "value": 1}},
            {"steer": {"kind": "share", "value": "x"}},
            {"steer": {"kind": "share", "value": 2}},
            {"model": 1, "steer": {"kind": "share", "value": 0.5}},
            *(
                {"tokens": 0},
                {"tokens": 1000},
                {"temperature": -1},
                {"temperature": 10**400},
                {"seed": -1},
                {"more": 1},
            ),
        ],
        ids=str,
    )
    def test_wrong_fields(self, served, fields):
        refused(served.post("/api/continue", {"text": TEXT, **fields}), 400)


class TestOtherSites:
    def test_other_names_are_not_answered(self, served):
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[bad"):
            for path in ("/", "/api/models"):
                refused(served.get(path, headers={"host": host}), 421)
        for host in ("localhost", "localhost:99", "127.0.0.1", "[::1]:80", "192.168.0.7"):
            assert served.get("/api/models", headers={"host": host}).status_code == 200

    def test_another_sites_page_may_not_ask(self, served):
        refused(served.post("/api/route", {"text": "a"}, headers={"origin": "http://evil.example"}), 403)
        refused(served.post("/api/route", {"text": "a"}, headers={"origin": "null"}), 403)
        assert served.post("/api/route", {"text": "a"}, headers={"origin": served.url}).status_code == 200


def lines_of(response):
    return [json.loads(line) for line in response.text.splitlines()]


class TestContinuing:
    @pytest.mark.parametrize("temperature", [0, 1e-45])
    def test_greedy_tokens_are_those_of_generate(self, served, temperature):
        wish = {"text": TEXT, "tokens": 12, "temperature": temperature}
        first, *tokens, last = lines_of(served.post("/api/continue", wish))
        assert len(first["view"]["tokens"]) == len(TEXT) and last == {"end": True}
        loaded = served.explorer.models[0]
        ids = torch.tensor([list(TEXT.encode())])
        out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert tokens[-1]["text"] == loaded.codec.decode(out[0, len(TEXT) :].tolist())

    @pytest.mark.parametrize("steer", [None, {"kind": "shift", "value": 0.02}], ids=["own", "moved"])
    def test_routes_of_new_tokens_are_those_of_the_whole_text(self, served, steer):
        wish = {"text": TEXT, "tokens": 20, "temperature": 1.0, "seed": 3, "steer": steer}
        tokens = lines_of(served.post("/api/continue", wish))[1:-1]
        model = served.explorer.models[0].model
        chosen = [layer["choice"] for token in tokens for layer in token["layers"]]
        continuation = TEXT.encode() + bytes(token["id"] for token in tokens)
        cut = 0.8 + (steer["value"] if steer else 0.0)
        model.model.set_thresholds(cut)
        try:
            with torch.no_grad():
                trace = model(torch.tensor([list(continuation)]), output_routing=True).routing
        finally:
            model.model.set_thresholds(0.8)
        expected = [[int(layer.choice_BT[0, len(TEXT) + t])] for t in range(len(tokens)) for layer in trace.layers]
        assert chosen == expected
        assert len(tokens) == 20

    def test_sampling_is_seeded(self, served):
        written = [
            lines_of(served.post("/api/continue", {"text": TEXT, "tokens": 15, "temperature": 2.0, "seed": seed}))[-2]
            for seed in (1, 1, 2)
        ]
        assert written[0] == written[1] != written[2]

    def test_it_stops_where_there_is_no_room(self, served):
        assert len(lines_of(served.post("/api/continue", {"text": "x" * 250, "tokens": 40}))) == 1 + 6 + 1
        assert "fills all" in refused(served.post("/api/continue", {"text": "x" * 256}), 400)

    def test_a_client_that_leaves_leaves_no_work(self, served):
        body = {"text": TEXT, "tokens": 200, "temperature": 1.0}
        steps = len(served.room.thread._threads)
        for lines_read in (1, 3):
            with httpx.stream("POST", f"{served.url}/api/continue", json=body, timeout=30) as response:
                reader = response.iter_lines()
                for _ in range(lines_read):
                    next(reader)
                assert served.room.streaming == 1
            wait_until(lambda: served.room.streaming == 0)
        assert len(served.room.thread._threads) == steps <= 1
        assert served.get("/api/health").json() == {"waiting": 0, "streaming": 0}

    def test_a_connection_cut_at_any_moment(self, served):
        payload = json.dumps({"text": TEXT, "tokens": 200}).encode()
        head = "POST /api/continue HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        whole = head.encode() + f"{len(payload)}\r\n\r\n".encode() + payload
        for sent in (5, len(head), len(whole) - 10, len(whole)):
            with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1]))) as connection:
                connection.sendall(whole[:sent])
        wait_until(lambda: served.room.streaming == 0 and served.room.waiting == 0)
        assert served.post("/api/route", {"text": TEXT}).status_code == 200

    def test_a_server_ends_while_it_streams(self, folders):
        """`serving` waits for its end and fails without it."""
        with httpx.Client(timeout=30) as client, serving(folders[:1], most_tokens=4000) as server:
            body = {"text": TEXT, "tokens": 256, "temperature": 1.0}
            request = client.build_request("POST", f"{server.url}/api/continue", json=body)
            lines = client.send(request, stream=True).iter_lines()
            next(lines)
            assert server.room.streaming == 1


class TestCrowds:
    def test_fifty_clients_are_served_or_told_to_wait(self, served):
        def ask(number):
            text = f"client {number} " * 12
            path = "/api/continue" if number % 5 == 0 else "/api/route"
            return served.post(path, {"text": text, "tokens": 8})

        with ThreadPoolExecutor(50) as crowd:
            answers = list(crowd.map(ask, range(50)))
        codes = {answer.status_code for answer in answers}
        assert codes <= {200, 429} and 200 in codes
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert "try again" in answer.json()["error"]["message"]
        wait_until(lambda: served.room.waiting == served.room.streaming == 0)
        assert served.post("/api/route", {"text": TEXT}).status_code == 200

    def test_beyond_the_waiting_room_is_429(self, served):
        """The model's thread is held up, so that requests must wait."""
        hold = threading.Event()
        served.room.thread.submit(hold.wait, 20)
        try:
            with ThreadPoolExecutor(24) as crowd:
                answers = [crowd.submit(served.post, "/api/route", {"text": TEXT}) for _ in range(24)]
                wait_until(lambda: served.room.waiting == served.room.seats)
                wait_until(lambda: sum(answer.done() for answer in answers) == 24 - served.room.seats)
                early = [answer.result() for answer in answers if answer.done()]
                assert served.get("/api/health").json()["waiting"] == served.room.seats  # still answers the rest
                hold.set()
                codes = [answer.result().status_code for answer in answers]
        finally:
            hold.set()
        assert codes.count(200) == served.room.seats and codes.count(429) == 24 - served.room.seats
        assert all(answer.headers["retry-after"] == "1" for answer in early)

    def test_streams_are_few(self, served):
        for _ in range(served.room.streams):
            served.room.stream(1)
        try:
            response = served.post("/api/continue", {"text": TEXT})
            assert "try again" in refused(response, 429) and response.headers["retry-after"] == "3"
        finally:
            for _ in range(served.room.streams):
                served.room.stream(-1)

    def test_who_stops_waiting_is_not_computed_for(self, served):
        hold, begun = threading.Event(), []
        model = served.explorer.models[0].model.model
        handle = model.register_forward_pre_hook(lambda *_: begun.append(1))
        served.room.thread.submit(hold.wait, 20)
        try:
            for _ in range(3):
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(f"{served.url}/api/route", json={"text": TEXT}, timeout=0.2)
            wait_until(lambda: served.room.waiting == 0)
            hold.set()
            assert served.post("/api/route", {"text": "b"}).status_code == 200
        finally:
            hold.set()
            handle.remove()
        assert len(begun) == 1


KINDS = {
    "hard": {"router": "learned", "routing": "hard"},
    "soft": {"router": "learned", "routing": "soft"},
    "random": {"router": "random"},
    "static": {"router": "static"},
    "target": {"target_fraction": 0.3},
    "v1": {"preset": "v1-tiny"},
    "v2": {"preset": "v2-tiny"},
    "batch-gate": {"gate_pool": "batch"},
    "temporal": {"operators": ["temporal", "attention"], "layer_types": ["temporal", "routed", "attention"]},
    "sparse": {"norm_position": "pre", "keys": "routed", "execution": "sparse"},
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """One server with a model of each kind."""
    place = tmp_path_factory.mktemp("zoo")
    with serving([str(save_model(place / name, **changes)) for name, changes in KINDS.items()], 64) as server:
        yield server


class TestKindsOfModels:
    @pytest.mark.parametrize("kind", KINDS)
    def test_each_is_routed_steered_or_explained_and_continued(self, zoo, kind):
        number = list(KINDS).index(kind)
        about = zoo.get("/api/models").json()["models"][number]
        plain = zoo.post("/api/route", {"model": number, "text": TEXT})
        assert plain.status_code == 200
        assert plain.json()["loss"] > 0
        assert bool(about["steer"]) != bool(about["unsteerable"])
        for way in about["steer"]:
            steer = {"kind": way, "value": 0.5 if way == "share" else 0.01}
            assert zoo.post("/api/route", {"model": number, "text": TEXT, "steer": steer}).status_code == 200
        lines = lines_of(zoo.post("/api/continue", {"model": number, "text": TEXT, "tokens": 5}))
        assert len(lines) == 7
        assert "64 are the most" in refused(zoo.post("/api/route", {"model": number, "text": "x" * 65}), 413)

    def test_a_gate_that_sees_the_future_is_explained(self, zoo):
        notes = zoo.get("/api/models").json()["models"][list(KINDS).index("batch-gate")]["notes"]
        assert any("it stays as the prompt set it" in note for note in notes)


class TestWithoutARun:
    def test_it_says_what_to_do_and_loads_nothing(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with serving([]) as server:
            record = server.get("/api/models").json()
            assert record["models"] == [] and record["demo"] == []
            assert "<pre>make demo</pre>" in server.get("/").text
            refused(server.post("/api/route", {"text": TEXT}), 400)
            assert "no demo run" in refused(server.post("/api/demo", {}), 409)

    def test_the_demo_run_is_offered_and_opened_on_demand(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name, preset in (("v3", "v3-tiny"), ("baseline", "baseline-tiny")):
            save_model(tmp_path / "runs" / "demo" / name / "best", preset)
        with serving([]) as server:
            assert server.get("/api/models").json()["demo"] == ["runs/demo/v3", "runs/demo/baseline"]
            assert server.explorer.models == []
            opened = server.post("/api/demo", {}).json()
            assert [model["name"] for model in opened["models"]] == ["runs/demo/v3", "runs/demo/baseline"]
            assert server.post("/api/route", {"model": 1, "text": TEXT}).status_code == 200
