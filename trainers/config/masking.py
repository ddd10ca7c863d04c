"""What is secret in text that is shown or stored: in a URL, who logs in and with what. Free of JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_USER = re.compile(r"(?<=://)[^\s:/?#@'\"]*(?::[^\s@'\"]*)?@(?:[^\s/?#@'\"]*@)*")
"""Up to the host. A password may hold a slash, and even the sign that ends it."""
_QUERY = re.compile(r"(?i)([?&][\w.-]*(?:password|passwd|pwd|secret|token|signature|credential|key)[\w.-]*=)[^&#\s'\"]+")


def masked(data: Any) -> Any:
    """Plain data, or a text, without the user information of the URLs in it."""
    if isinstance(data, str):
        return _QUERY.sub(rf"\1{MASK}", _USER.sub(f"{MASK}@", data)) if "://" in data else data
    if isinstance(data, Mapping):
        return {key: masked(value) for key, value in data.items()}
    return type(data)(masked(item) for item in data) if type(data) in (list, tuple) else data
