"""What a client is told when it cannot be served, in OpenAI's shape."""

from typing import Any


class ApiError(Exception):
    """`kind` is OpenAI's error type, `param` the field that was wrong, `code` a name programs can look for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.retry_after = retry_after
        """Seconds after which to ask again."""

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def wrong(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def stopping() -> ApiError:
    return ApiError(
        503, "the server is stopping: ask another one, or this one later.", kind="server_error", retry_after=5
    )
