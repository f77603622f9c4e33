"""What a server makes of the change that its devices agree on: Flower's own FedAvg, FedAdam and FedProx.

FedAdam: Reddi et al. 2021, arXiv 2003.00295. FedProx, whose server averages: Li et al. 2020,
arXiv 1812.06127.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx

from device_runner.fleet.agreement import Plan
from prge.engine import FloatArray

# A line for every round, which the coordinator tells better.
logging.getLogger("flwr").setLevel(logging.WARNING)
_NAME, _EXAMPLES = "lora_b", "num-examples"


class Averaging:
    """The server's side of messages that are changes; `arrays` is what it remembers between rounds."""

    def __init__(self, plan: Plan) -> None:
        self._strategy: Any = {
            "fedavg": lambda: FedAvg(weighted_by_key=_EXAMPLES),
            "fedprox": lambda: FedProx(weighted_by_key=_EXAMPLES, proximal_mu=plan.proximal),
            "fedadam": lambda: FedAdam(weighted_by_key=_EXAMPLES, eta=plan.server_rate),
        }[plan.average]()

    @property
    def arrays(self) -> dict[str, FloatArray]:
        """The strategy's moments by name, where it has any."""
        moments = {name: getattr(self._strategy, name, None) for name in ("m_t", "v_t")}
        return {name: np.array(table[_NAME]) for name, table in moments.items() if table}

    @arrays.setter
    def arrays(self, arrays: dict[str, FloatArray]) -> None:
        for name, array in arrays.items():
            setattr(self._strategy, name, {_NAME: array})

    def __call__(self, values: FloatArray, change: FloatArray, number: int) -> FloatArray:
        """The adapter's new values, f32 [size].

        Args:
            values: where the round began.
            change: of the devices, f32 [size].
            number: of the round, counted from 1.
        """
        self._strategy.current_arrays = {_NAME: values}
        arrays, _ = self._strategy.aggregate_train(number, [_reply(values + change)])
        return np.asarray(arrays[_NAME].numpy(), np.float32)


@dataclass(frozen=True)
class _Reply:
    """What a strategy reads of a message; a Message of Flower's own needs a run of Flower's around it."""

    content: RecordDict

    def has_error(self) -> bool:
        """Whether the device failed; those answers don't come here."""
        return False


def _reply(values: FloatArray) -> _Reply:
    arrays, metrics = ArrayRecord({_NAME: Array(values)}), MetricRecord({_EXAMPLES: 1})
    return _Reply(RecordDict({"arrays": arrays, "metrics": metrics}))
