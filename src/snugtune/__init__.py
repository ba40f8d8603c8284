"""Fine-tune neural networks on the card you really have."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snugtune.api import cards as cards
    from snugtune.api import check_data as check_data
    from snugtune.api import demo as demo
    from snugtune.api import doctor as doctor
    from snugtune.api import evaluate as evaluate
    from snugtune.api import install_line as install_line
    from snugtune.api import predict as predict
    from snugtune.api import show_config as show_config
    from snugtune.api import train as train
    from snugtune.data.look import DataCheck as DataCheck
    from snugtune.errors import SnugtuneError as SnugtuneError
    from snugtune.inference.tables import Predictions as Predictions
    from snugtune.planning.asked import predict_memory as predict_memory
    from snugtune.planning.prediction import Prediction as Prediction
    from snugtune.tasks import Task as Task
    from snugtune.training.result import TrainResult as TrainResult

__version__ = "0.1.0"

# Loaded on first use: importing the package must stay free of torch and pydantic.
_HOMES = {
    "DataCheck": "snugtune.data.look",
    "Prediction": "snugtune.planning.prediction",
    "Predictions": "snugtune.inference.tables",
    "SnugtuneError": "snugtune.errors",
    "Task": "snugtune.tasks",
    "TrainResult": "snugtune.training.result",
    "cards": "snugtune.api",
    "check_data": "snugtune.api",
    "demo": "snugtune.api",
    "doctor": "snugtune.api",
    "evaluate": "snugtune.api",
    "install_line": "snugtune.api",
    "predict": "snugtune.api",
    "predict_memory": "snugtune.planning.asked",
    "show_config": "snugtune.api",
    "train": "snugtune.api",
}

__all__ = [
    "DataCheck",
    "Prediction",
    "Predictions",
    "SnugtuneError",
    "Task",
    "TrainResult",
    "__version__",
    "cards",
    "check_data",
    "demo",
    "doctor",
    "evaluate",
    "install_line",
    "predict",
    "predict_memory",
    "show_config",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'snugtune' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
