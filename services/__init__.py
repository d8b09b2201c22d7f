"""Draft and target workers."""

import os

# gRPC reads this when it is first imported. Without its event engine a message takes fewer threads: a round
# trip on loopback costs half the time and two thirds of the CPU (grpcio 1.85).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
