"""Ullage's services: a probe and a runner on every node, one master, and the commands people type."""

import os

# gRPC's core writes lines of its own to stderr, e.g. for a port in use, before we can say what to do about it.
# It reads this once, when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
