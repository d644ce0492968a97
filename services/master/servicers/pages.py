"""Pages of a list, as every List call hands them out (AIP-158): a size with a limit, and an opaque token."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from services.master import errors

PAGE_SIZE_DEFAULT: Final = 100
PAGE_SIZE_MAX: Final = 1000


def page_size(asked: int) -> int:
    """The number of items to answer with. Raises InvalidRequest for more than a page may hold."""
    if asked > PAGE_SIZE_MAX:
        raise errors.InvalidRequest(
            f"page_size is {asked}: ask for at most {PAGE_SIZE_MAX}, and follow next_page_token"
        )
    return asked or PAGE_SIZE_DEFAULT


def page_token(position: str) -> str:
    """The token of the page that begins at `position`."""
    return base64.urlsafe_b64encode(position.encode()).decode()


def position(token: str) -> str:
    """Where the page of `token` begins. Raises InvalidRequest for a token that none of our pages gave."""
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise errors.InvalidRequest(
            "page_token is none that was given out: leave it empty to begin at the first page"
        ) from error
