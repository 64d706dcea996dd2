"""Checks the results of a GPU: against the author's numbers; outputs and gradients against the CPU, in fp32 with the
same routes; captured decoding steps against full passes.

    python benchmarks/gpu_parity.py

Needs a CUDA device and no test framework; exits with 1 if a comparison fails.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.utils import logging

from chiar import ChiarForCausalLM, presets
from chiar.model.author_checkpoint import import_checkpoint
from timing import forbid_sync, relative_error

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
# fp32 against fp32: sums of a few hundred terms in another order, over four layers.
LOGITS, GRADIENTS = 2e-5, 1e-4
CASES: list[tuple[str, dict[str, Any]]] = [
    ("baseline-tiny", {}),
    ("v1-tiny", {}),
    ("v1-tiny", {"routing": "soft"}),
    ("v1-tiny", {"router": "entropy", "keys": "routed"}),
    ("v2-tiny", {"spectral_form": "equation"}),
    ("v3-tiny", {}),
    ("v3-tiny", {"gate_pool": "causal", "keys": "routed", "light_ffn": False}),
    ("v3-tiny", {"norm": "rmsnorm", "norm_position": "pre"}),
    ("v3-tiny", {"routing": "hard", "hard_estimator": "selected"}),
    ("v3-tiny", {"router": "random"}),
    ("v3-tiny", {"router": "random", "random_key": "position"}),
    ("v3-tiny", {"router": "static"}),
    *(("v5-tiny", {"router": router}) for router in ("rise", "forecast", "learned", "boundary", "space")),
    ("v5-tiny", {"window": 7, "inner_size": 64, "carry": "smoothed"}),
]
# The largest of 1,200 decided routes lies further from its threshold than rounding.
DECODING = 1e-4
ROUTED = {"gate_pool": "causal", "keys": "routed", "norm": "rmsnorm", "norm_position": "pre", "basis": "identity"}
OWN = ("v5-tiny", {"router": "rise"})  # routes are not forced: they depend on the router's memory
DECODED: list[tuple[str, dict[str, Any]]] = [
    ("baseline-tiny", {}),
    ("v2-tiny", {"max_position_embeddings": 512}),
    ("v3-tiny", {"gate_pool": "causal"}),
    ("v3-tiny", ROUTED),
    ("v5-tiny", {}),
    OWN,
    ("v5-tiny", {"window": 16, "layer_types": ["attention", "dark", "dark", "attention", "dark", "attention"]}),
]
# Packed products round differently in bf16, by as much as the definition itself with sums in another order.
PACKED = 2e-2
STACKS: list[dict[str, Any]] = [{}, {"window": 100}, {"inner_size": 512}, {"router": "space"}, {"router": "learned"}]


def golden(name: str) -> tuple[float, int]:
    """The largest difference in logits, and how many routes differ from the author's."""
    with tempfile.TemporaryDirectory() as folder:
        import_checkpoint(GOLDEN / f"{name}.pt", Path(folder) / "model", tau=0.79)
        model = ChiarForCausalLM.from_pretrained(Path(folder) / "model").cuda().eval()
    expected = np.load(GOLDEN / f"{name}.npz")
    with torch.no_grad():
        output = model(torch.tensor(expected["ids"]).cuda(), output_routing=True)
    flips = sum(
        int((output.routing.layers[layer].choice_BT.cpu().numpy() != expected[f"route.{layer}"]).sum())
        for layer in output.routing.routed_layers
    )
    return float(np.abs(output.logits.cpu().numpy() - expected["logits"]).max()), flips


def against_cpu(name: str, changes: dict[str, Any]) -> tuple[float, float, int]:
    """The largest difference in logits and (relative) in gradients, and how many routes the GPU chooses differently."""
    torch.manual_seed(0)
    model = ChiarForCausalLM(presets.get(name, dropout=0.0, **changes))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(0, 257, (3, 40))
    mask = torch.ones_like(ids)
    mask[1, :7] = mask[2, 30:] = 0
    cpu = run(model, ids, mask, None)
    routed = {i: cpu[2].layers[i].choice_BT.cuda() for i in cpu[2].routed_layers}
    free = run(model.cuda(), ids.cuda(), mask.cuda(), None)
    forced = None if model.config.routing == "soft" else routed
    gpu = run(model, ids.cuda(), mask.cuda(), forced)
    real = mask.bool()
    flips = sum(int((free[2].layers[i].choice_BT != choice)[real.cuda()].sum()) for i, choice in routed.items())
    gradients = max(
        float((gpu[1][k].cpu() - g).abs().max() / g.abs().max()) for k, g in cpu[1].items() if g.abs().max() > 1e-7
    )
    return float((gpu[0].cpu() - cpu[0])[real].abs().max()), gradients, flips


def run(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, forced: Any) -> tuple[Any, Any, Any]:
    model.zero_grad()
    output = model(ids, attention_mask=mask, labels=ids, output_routing=True, forced_routes=forced)
    output.loss.backward()
    gradients = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), gradients, output.routing


def packed(changes: dict[str, Any], compile: bool, training: bool = True) -> tuple[float, float]:
    """Relative differences in bf16 between packed dark tokens and the definition, with the same routes: of logits, and
    of the gradient that differs most."""
    torch.manual_seed(0)
    results = {}
    model = ChiarForCausalLM(presets.get("v5-16m", num_hidden_layers=6, **changes)).cuda().train(training)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    ids = torch.randint(32, 128, (6, 700), device="cuda")
    for execution in ("dense", "sparse"):
        model.config.execution = execution
        if execution == "sparse" and compile:
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        routes = None if execution == "dense" else {2: results["dense"][2].layers[2].choice_BT}
        with torch.autocast("cuda", torch.bfloat16):
            results[execution] = run(model, ids, None, routes)
    (logits, gradients, _), (packed_logits, packed_gradients, _) = results["dense"], results["sparse"]
    nonzero = [name for name in gradients if gradients[name].norm() > 1e-6]
    errors = [relative_error(packed_gradients[name], gradients[name]) for name in nonzero]
    return relative_error(packed_logits, logits), max(errors)


def captured(name: str, changes: dict[str, Any], compile: bool) -> float:
    """The largest difference between 200 tokens fed one by one, captured (and compiled), and a full pass, relative to
    the largest logit. Stores grow twice. Replayed steps must not synchronise, except to learn whether a dark stack is
    needed: its routes are forced (but for OWN), and every third step is light in all rows."""
    torch.manual_seed(0)
    model = ChiarForCausalLM(presets.get(name, dropout=0.0, **changes)).eval().cuda()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ids = torch.randint(0, model.config.vocab_size, (3, 240), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, :30] = 0, 0
    logits, stacks = [], model.config.stacks
    routes = {
        i: torch.randint(0, 2, ids.shape, device="cuda") * (torch.arange(240, device="cuda") % 3 > 0)
        for i in (() if (name, changes) == OWN else stacks)
    }
    with torch.no_grad():
        expected = model(ids, mask, forced_routes=routes).logits[:, 40:]
        model.enable_fast_decoding(compile=compile)
        prompt = {i: choice[:, :40] for i, choice in routes.items()}
        cache = model(ids[:, :40], mask[:, :40], use_cache=True, forced_routes=prompt).past_key_values
        for n in range(40, 240):
            step = model.fast_decoder.captured
            ready = step is not None and bool(step.graphs) and not stacks
            ready = ready and all(store.most + 1 < store.capacity for store in cache.shelf.stores)
            with forbid_sync("cuda" if ready else "cpu"):
                forced = {i: choice[:, n : n + 1] for i, choice in routes.items()}
                arguments = {"past_key_values": cache, "forced_routes": forced}
                logits.append(model(ids[:, n : n + 1], mask[:, : n + 1], **arguments).logits)
    assert model.fast_decoder.steps == 200
    return float((torch.cat(logits, 1) - expected).abs().max() / expected.abs().max())


def main() -> int:
    if not torch.cuda.is_available():
        print("there is no CUDA device here")
        return 2
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    failed = 0
    for name in ("threshold", "soft", "hard", "baseline"):
        logits, flips = golden(name)
        failed += logits > LOGITS or flips > 0
        print(f"author's {name}: logits {logits:.1e}, {flips} routes differ", flush=True)
    for name, changes in CASES:
        logits, gradients, flips = against_cpu(name, changes)
        failed += logits > LOGITS or gradients > GRADIENTS
        print(f"{name} {changes}: logits {logits:.1e}, gradients {gradients:.1e}, {flips} routes flip", flush=True)
    for changes in STACKS:
        modes = (("", (False, True)), (" and compiled", (True, True)), (", in evaluation", (False, False)))
        for mode, (compile, training) in modes:
            logits, gradients = packed(changes, compile, training)
            failed += logits > PACKED or gradients > PACKED
            print(f"v5-16m {changes}, packed{mode}: logits {logits:.1e}, gradients {gradients:.1e}", flush=True)
    for name, changes in DECODED:
        for compile in (False, True):
            error = captured(name, changes, compile)
            failed += error > DECODING
            print(f"{name} {changes}, captured{' and compiled' if compile else ''}: {error:.1e}", flush=True)
    print("FAILED" if failed else "all within tolerance")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
