"""What recording decides without a GPU; recorded passes themselves are checked by benchmarks/gpu/training_step.py."""

import pytest

from chiar.training.graphs import root_of, tells_of_waiting


@pytest.mark.parametrize(
    ("message", "waits"),
    [
        ("called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:145.)", True),
        (
            "debug mode is a prototype feature and does not yet detect all synchronizing operations",
            False,
        ),
        ("TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.", False),
    ],
    ids=["a wait", "the mode's own words", "another"],
)
def test_only_a_wait_keeps_a_pass_from_being_recorded(message, waits):
    assert tells_of_waiting(message) == waits


def test_the_first_error_is_the_reason():
    def fail():
        try:
            raise RuntimeError("out of memory")
        finally:
            raise RuntimeError("capture was broken")

    with pytest.raises(RuntimeError, match="broken") as told:
        fail()
    assert str(root_of(told.value)) == "out of memory"
