"""The next step's batches, made while the device works on this one's."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from chiar.training.batches import Batch, Schedule


class Prefetch:
    """Batches of a step by slot. They are a pure function of the step, so making them early changes nothing."""

    def __init__(self, schedule: Schedule, slots: list[int], device: torch.device) -> None:
        self.schedule, self.slots, self.pins = schedule, slots, device.type == "cuda"
        self.steps = schedule.settings.steps
        # A thread has a current GPU of its own.
        start = (torch.cuda.set_device, (device,)) if self.pins else (None, ())
        self.thread = ThreadPoolExecutor(1, "batches", *start)
        self.next: tuple[int, Future[list[list[Batch]]]] | None = None

    def batches(self, step: int) -> list[list[Batch]]:
        """The micro-batches of each slot of `step`; asks for those of the step after."""
        ready = self.next[1].result() if self.next and self.next[0] == step else self.make(step)
        self.next = (step + 1, self.thread.submit(self.make, step + 1)) if step + 1 < self.steps else None
        return ready

    def make(self, step: int) -> list[list[Batch]]:
        made = [self.schedule.batches(step, slot) for slot in self.slots]
        return [[batch.pinned() if self.pins else batch for batch in batches] for batches in made]
