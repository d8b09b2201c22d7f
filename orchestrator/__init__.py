"""The orchestrator: cycles of many sessions, and the launcher of a cluster on one machine."""

import os

# For this process and the replicas that it starts; see services/__init__.py.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
