"""Models that are not from transformers, recurrent and convolutional: each returns a loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30522, 300)
        self.recurrent = kind(300, 512, batch_first=True, **settings)
        directions = 2 if settings.get("bidirectional") else 1
        self.head = nn.Linear(512 * directions, 2)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        states, _ = self.recurrent(self.embedding(input_ids))
        logits = self.head((states * attention_mask.unsqueeze(-1)).mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class LSTM(_Recurrent):
    def __init__(self) -> None:
        super().__init__(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.3)


class GRU(_Recurrent):
    def __init__(self) -> None:
        super().__init__(nn.GRU, num_layers=1)


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (64, 128, 256, 512):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.Conv2d(width, width, 3, padding=1, groups=4), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.features(pixel_values))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}
