"""A model of one's own: a small convolutional net on the handwritten digits of scikit-learn.

pip install "snugtune[train]" scikit-learn
python examples/digits.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import snugtune

Batch = dict[str, torch.Tensor]


def build_model() -> nn.Module:
    """Two convolutions and a linear layer: 8 x 8 grey pixels -> one of ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """The sum of the losses, and how many there are: passes of any size then make one exact update."""
    answers = model(batch["images"])
    return F.cross_entropy(answers, batch["labels"], reduction="sum"), len(batch["labels"])


def outputs(model: nn.Module, batch: Batch) -> Batch:
    """What the score needs of each row."""
    return {"right": model(batch["images"]).argmax(dim=1) == batch["labels"]}


def measure(outputs: Batch) -> dict[str, float]:
    """The score of all rows together."""
    return {"accuracy": outputs["right"].double().mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/digits")
    options = parser.parse_args()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    task = snugtune.Task(
        name="digits",
        build_model=build_model,
        loss=loss,
        outputs=outputs,
        measure=measure,
        metric="accuracy",
    )
    result = snugtune.train(
        task=task,
        data={"images": images, "labels": torch.tensor(digits.target)},
        epochs=10,
        batch_size=32,
        learning_rate=3e-3,
        output=options.output,
    )
    print(f"{result.metrics['accuracy']:.1%} of the digits that it had never seen")


if __name__ == "__main__":
    main()
