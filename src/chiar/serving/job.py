"""One request on its way: the server's loop waits for what the engine's thread writes."""

import asyncio
from collections.abc import AsyncIterator

from chiar.serving.pieces import Piece
from chiar.serving.problems import ApiError
from chiar.serving.requests import CompletionRequest


class Job:
    def __init__(self, request: CompletionRequest) -> None:
        """Made on the loop that will read it."""
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Piece | ApiError | None] = asyncio.Queue()
        self.left = request.rows
        """Choices that are not finished; the engine's thread alone counts them."""
        self.failed = self.cancelled = False
        """Cancelled: nobody reads any more. The engine drops either before its next step."""
        self.completion_tokens = 0

    @property
    def is_over(self) -> bool:
        return self.failed or self.cancelled or not self.left

    def send(self, item: Piece | ApiError | None) -> None:
        """From any thread."""
        if isinstance(item, Piece) and item.finish is not None:
            self.left -= 1
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self.cancelled = True

    def fail(self, error: ApiError) -> None:
        self.failed = True
        self.send(error)

    def cancel(self) -> None:
        self.cancelled = True
        self.send(None)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Until every choice has ended, or the client has gone."""
        open_choices = self.request.rows
        while open_choices:
            item = await self.queue.get()
            if item is None:
                return
            if isinstance(item, ApiError):
                raise item
            open_choices -= item.finish is not None
            yield item
