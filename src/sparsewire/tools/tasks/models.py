"""The networks that benchmarks train beside MNIST's perceptron: a ResNet and a transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Block(nn.Module):
    """Two 3×3 convolutions and a way around them."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.around = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.norm1(self.conv1(images)))
        hidden = self.norm2(self.conv2(hidden)) + self.around(images)
        return functional.relu(hidden)


def _resnet(width: int, blocks: int, stride: int, classes: int) -> nn.Sequential:
    """Build four stages of `blocks` blocks; `width` channels double from stage to stage."""
    layers: list[nn.Module] = []
    inner = width
    for stage in range(4):
        outer = width << stage
        for block in range(blocks):
            layers.append(_Block(inner, outer, 2 if stage and not block else 1))
            inner = outer
    stem = (nn.Conv2d(3, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return nn.Sequential(
        *stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes)
    )


def resnet18(classes: int = 10) -> nn.Sequential:
    """ResNet-18 for images of 32 × 32 pixels: 62 tensors, 11.17 million parameters.

    Reference: He et al. 2016, with the stem of their CIFAR-10 networks.
    """
    return _resnet(64, 2, 1, classes)


def resnet10(classes: int = 10) -> nn.Sequential:
    """The same for a laptop: half the blocks, a quarter of the channels, and half the resolution
    from the stem on; 38 tensors, 0.31 million parameters."""
    return _resnet(16, 1, 2, classes)


class Transformer(nn.Module):
    """A decoder that predicts the next token, in the sizes of GPT-2 small: 124 million parameters.

    Reference: Radford et al. 2019; input and output embeddings are one matrix.
    """

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        words: int = 50257,
        context: int = 1024,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, functional.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.words(tokens) + self.places(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.layers(hidden, mask=mask, is_causal=True)
        return functional.linear(hidden, self.words.weight)
