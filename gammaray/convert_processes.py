"""Between the wire messages and the values of a cluster's state."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from gammaray.types import ProcessStatus, SpeculationTotals, WorkerTotals
from gammaray.v1 import generation_service_pb2 as gen
from gammaray.v1 import types_pb2 as pb

__all__ = ["process_from_proto", "process_to_proto", "worker_totals_from_proto"]


def process_to_proto(process: ProcessStatus) -> gen.ProcessStatus:
    """Return the wire form of a process's status."""
    worker, speculation = process.worker_totals, process.speculation_totals
    return gen.ProcessStatus(
        **{
            **vars(process),
            "worker_totals": None if worker is None else pb.WorkerTotals(**vars(worker)),
            "speculation_totals": None if speculation is None else pb.SpeculationTotals(**vars(speculation)),
        }
    )


def process_from_proto(message: gen.ProcessStatus) -> ProcessStatus:
    """Return the process status of a wire message."""
    values = {field.name: getattr(message, field.name) for field in fields(ProcessStatus)}
    values["accepted_per_position"] = tuple(message.accepted_per_position)
    values["worker_totals"] = (
        worker_totals_from_proto(message.worker_totals) if message.HasField("worker_totals") else None
    )
    values["speculation_totals"] = (
        SpeculationTotals(**_numbers(message.speculation_totals, SpeculationTotals))
        if message.HasField("speculation_totals")
        else None
    )
    return ProcessStatus(**values)


def worker_totals_from_proto(message: pb.WorkerTotals) -> WorkerTotals:
    """Return the totals of a wire message."""
    return WorkerTotals(**_numbers(message, WorkerTotals))


def _numbers(message: Any, kind: type[WorkerTotals] | type[SpeculationTotals]) -> dict[str, int]:
    return {field.name: getattr(message, field.name) for field in fields(kind)}
