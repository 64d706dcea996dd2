"""Answers in the shape of OpenAI's completions."""

import json
import time
import uuid
from typing import Any

from chiar.data.tokens import TextCodec
from chiar.serving.job import Job
from chiar.serving.pieces import Piece, TokenScore


class Answer:
    """To one request: as a whole, or chunk by chunk."""

    def __init__(self, job: Job, model: str, codec: TextCodec) -> None:
        self.job, self.codec = job, codec
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self.offsets = [0] * job.request.rows
        """Characters of each choice that went out."""

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        choices = []
        for number in range(self.job.request.rows):
            own = [piece for piece in pieces if piece.choice == number]
            text, tokens = "".join(piece.text for piece in own), [token for piece in own for token in piece.tokens]
            choices.append(self.choice(Piece(number, text, tokens, own[-1].finish)))
        return {**self.head, "choices": choices, "usage": self.usage()}

    def chunk(self, piece: Piece) -> bytes:
        return event({**self.head, "choices": [self.choice(piece)]})

    def end(self) -> bytes:
        last = event({**self.head, "choices": [], "usage": self.usage()}) if self.job.request.include_usage else b""
        return last + b"data: [DONE]\n\n"

    def choice(self, piece: Piece) -> dict[str, Any]:
        logprobs = None if self.job.request.logprobs is None else self.logprobs(piece.choice, piece.tokens)
        return {"index": piece.choice, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def logprobs(self, choice: int, tokens: list[TokenScore]) -> dict[str, Any]:
        texts = self.codec.pieces([token.id for token in tokens])
        offsets = []
        for text in texts:
            offsets.append(self.offsets[choice])
            self.offsets[choice] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self.likeliest(token) for token in tokens],
            "text_offset": offsets,
        }

    def likeliest(self, token: TokenScore) -> dict[str, float] | None:
        """By text, as OpenAI's; of several tokens that look alike the likeliest."""
        if token.logprob is None:
            return None
        likeliest: dict[str, float] = {}
        for text, logprob in zip(self.codec.pieces(list(token.top)), token.top.values(), strict=True):
            likeliest.setdefault(text, logprob)
        return likeliest

    def usage(self) -> dict[str, int]:
        read = sum(len(prompt.ids) for prompt in self.job.request.prompts)
        written = self.job.completion_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"


def to_json(body: dict[str, Any]) -> bytes:
    """In ASCII: what a client sent may come back in an error, half surrogate pairs among it."""
    return json.dumps(body).encode("ascii")
