"""Networks and training steps for the checks and figures, written out, as torchvision may not be there.

LeNet-5 is that of LeCun et al. 1998 with ReLU and max pooling; ResNet-50 that of He et al. 2016, with the
stride in the 3x3 convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], Tensor]


def lenet(dropout: float = 0.0) -> nn.Module:
    """For images of 1 x 32 x 32."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1),
        )
        alike = inputs == outputs and stride == 1
        self.short = nn.Identity() if alike else nn.Sequential(*_convolution(inputs, outputs, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.short(x))
        return out


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


def resnet50(width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    """For images of 3 x 224 x 224; narrower and shallower ones to try the code."""
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(_Bottleneck(inputs, width << stage, 2 if stage and not number else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def wide(width: int, layers: int = 4) -> nn.Module:
    """A network of a few large products: the device has work enough, whatever the host does."""
    body = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(width, 10))


class Encoder(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021); of size B by default: patches of 16 x 16 pixels."""

    def __init__(self, image: int = 224, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.randn(1, (image // 16) ** 2, width) / 50)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, images: Tensor) -> Tensor:
        """One vector a picture: the mean of its patches'."""
        patches = self.patches(images).flatten(2).transpose(1, 2) + self.places
        found: Tensor = self.body(patches).mean(1)
        return found


def training_step(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    prepare: Callable[[Tensor], Tensor],
    autocast: torch.dtype | None = None,
) -> Step:
    """A step that a graph can capture: nothing in it asks the device."""
    kind = next(network.parameters()).device.type

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(kind, autocast or torch.bfloat16, enabled=autocast is not None):
            loss = nn.functional.cross_entropy(network(prepare(images)), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def grey(images: Tensor) -> Tensor:
    """Bytes to what LeNet-5 is given."""
    return images.float().div_(255).sub_(0.1307).div_(0.3081)


def colour(images: Tensor) -> Tensor:
    """Bytes to what ResNet-50 is given, channels last."""
    return images.float().div_(255).sub_(0.45).div_(0.225).contiguous(memory_format=torch.channels_last)


def sgd(network: nn.Module, rate: float = 0.01) -> Any:
    return torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9)
