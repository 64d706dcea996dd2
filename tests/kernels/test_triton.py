"""The Triton kernels without a GPU: in Triton's interpreter against the definitions, and compiled for an H200."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from implementations import implementations

from chiar import ChiarForCausalLM
from chiar.kernels import packed_norm, packing
from chiar.layers import sparse
from helpers import gradients, randomise, small_config, token_ids

triton = pytest.importorskip("triton", reason="Triton is not installed")
TESTED = ("packing", "packed_attention", "decode_attention", "linear_cross_entropy")


def test_every_kernel_is_its_definition():
    """The tests of the plain operators, and that of recomputed layers, with Triton's."""
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in TESTED]
    files.append(f"{__file__}::{test_recomputed_layers_give_the_same_gradients.__name__}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "triton", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@implementations("torch")
def test_recomputed_layers_give_the_same_gradients(implementation, monkeypatch):
    """torch lets a gradient unpack what a checkpoint recomputes once only."""
    monkeypatch.setattr(sparse, "host_sees_routes", lambda device: False)
    if implementation == "triton":
        for module in (packing, packed_norm):
            monkeypatch.setattr(module, "wants_triton", lambda *_: True)
    fields = {"hidden_size": 32, "norm_position": "pre", "light_ffn": False, "keys": "routed", "router": "learned"}
    config = small_config(**fields, num_attention_heads=2, hard_estimator="selected", execution="sparse")
    model, ids, found = randomise(ChiarForCausalLM(config)).train(), token_ids(3, 12), []
    for enable in (lambda: None, model.gradient_checkpointing_enable):
        enable()
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    # The same kernels over the same numbers.
    torch.testing.assert_close(found[1], found[0])


def machine_code(function, types, constants, aligned, options, monkeypatch, tmp_path):
    """Up to machine code for compute capability 9.0; arguments in `aligned` are multiples of 16."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    sixteen = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(signature) if name in aligned}
    source = ASTSource(function, signature, constants, sixteen)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


# Tiles are chosen by head size and by rows of up to 512 tokens.
@pytest.mark.parametrize(
    ("kernel", "head", "max_keys"), [("forward", 64, 2048), ("queries", 64, 256), ("keys", 128, 2048)]
)
def test_attention_has_asynchronous_products_and_fits_shared_memory(kernel, head, max_keys, monkeypatch, tmp_path):
    from chiar.kernels import triton_attention as module

    names = {"forward": "_forward", "queries": "_backward_queries", "keys": "_backward_keys"}
    function = getattr(module, names[kernel])
    options = module.options(kernel, torch.empty(0, 1, head).bfloat16(), max_keys)
    constants = {name: options.pop(name) for name in ("HEAD", "QUERIES", "KEYS")}
    types = {name: "*bf16" for name in function.arg_names if name.endswith("_ptr")}
    types |= {"scale": "fp32", "log_sum_ptr": "*fp32", "delta_ptr": "*fp32"}
    types |= dict.fromkeys(("query_rows_ptr", "key_rows_ptr", "limit_ptr", "skip_ptr"), "*i32")
    aligned = set(function.arg_names) - {"scale", *constants}
    compiled = machine_code(function, types, constants, aligned, options, monkeypatch, tmp_path)
    assert "wgmma.mma_async" in compiled.asm["ptx"] and "cp.async.cg.shared.global" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024


def test_softmax_gradient_moves_16_bytes_at_a_time(monkeypatch, tmp_path):
    from chiar.kernels.triton_rows import SOFTMAX_WARPS, _softmax_gradient

    constants = {"VOCABULARY": 50257, "PADDED": 50272, "GRADIENT": True, "BLOCK": 4096}
    types = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "losses_ptr": "*fp32"}
    aligned, options = ("logits_ptr", "row_stride"), {"num_warps": SOFTMAX_WARPS}
    compiled = machine_code(_softmax_gradient, types, constants, aligned, options, monkeypatch, tmp_path)
    assert "ld.global.v4.b32" in compiled.asm["ptx"] and "st.global.v4.b32" in compiled.asm["ptx"]
