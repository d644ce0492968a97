"""gRPC's event engine, which hands each message through four threads where two do.

For a process of many small messages that is half of the changes of thread and a third of the processor time.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import Final

_GRPC_TRIED: Final = "1.85."
"""Another release may know the switches by other names, or not do without what they switch off."""

_EXPERIMENTS: Final = "-event_engine_client,-event_engine_listener"


def leave_out() -> None:
    """Do without it in this process and in those it starts, unless the environment says otherwise.

    gRPC looks when it is first imported: call it before.
    """
    if metadata.version("grpcio").startswith(_GRPC_TRIED):
        os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS)
