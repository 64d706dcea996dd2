"""By which names a server on this machine may be called."""

import ipaddress
from urllib.parse import urlsplit


def is_called_rightly(header: str, name: str) -> bool:
    """Whether a Host header leads here by localhost, by `name` or by number. Any other name may be a stranger's who let
    it point here, so that his page could read the answers (DNS rebinding); a number cannot be."""
    try:
        called = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        called = ""
    return called in ("localhost", name) or read_number(called) is not None


def is_loopback(host: str) -> bool:
    number = read_number(host)
    return host == "localhost" if number is None else number.is_loopback


def read_number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
