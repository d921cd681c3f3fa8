"""Transforms of five libraries, in tables, each with a sample that it can be applied to.

A line of a table is an expression, and the name of its sample behind an ``@``, if that is not ``picture``.
CALM ones draw nothing; IDLE ones draw, and what they draw changes nothing; RANDOM ones differ from call to
call; UNSEEN ones are random, and 64 calls do not show it, for the reason that is written beside them.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from helpers import difference
from helpers import leaves as parts

import hotset

# albumentations asks a server for its newest version when it is imported, unless told not to.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")


def need(module: str) -> Any:
    """A library that may be missing; its own warnings as it is imported are not this project's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except ImportError:
            pytest.skip(f"{module} is not installed; it comes with the extra `test`")


def _image(*shape: int, dtype: Any = np.uint8) -> Any:
    values = np.random.default_rng(7).integers(0, 256, shape)
    return values.astype(np.uint8) if dtype is np.uint8 else (values / 255).astype(np.float32)


def sure(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is declared deterministic and does what the given one does, which stays undeclared."""
    return hotset.deterministic(lambda *args, **kwargs: function(*args, **kwargs))


def unsure(function: Callable[..., Any]) -> Callable[..., Any]:
    return hotset.nondeterministic(lambda *args, **kwargs: function(*args, **kwargs))


# ---- torchvision -----------------------------------------------------------------------------------------

CALM_TORCHVISION = """
T.ToTensor() @ pil                             T.PILToTensor() @ pil
T.ConvertImageDtype(torch.float64)             T.ToPILImage() @ picture
T.Normalize([0.5] * 3, [0.2] * 3)              T.Normalize(0.5, 0.2, inplace=False)
T.Resize(16)                                   T.Resize((20, 9), antialias=False)
T.CenterCrop(20)                               T.CenterCrop(40)
T.Pad(3)                                       T.Pad((1, 2), padding_mode="reflect")
T.FiveCrop(10)                                 T.TenCrop(10, vertical_flip=True)
T.Grayscale()                                  T.Grayscale(3) @ pil
T.LinearTransformation(torch.eye(3072), torch.zeros(3072))
v2.ToImage() @ pil                             v2.PILToTensor() @ pil
v2.ToDtype(torch.float32, scale=True) @ bytes  v2.ToPILImage() @ picture
v2.ToPureTensor()                              v2.Identity()
v2.Resize(16)                                  v2.Resize([9, 20], antialias=True) @ pil
v2.CenterCrop(20)                              v2.Pad([1, 2, 3, 4], fill=0.5)
v2.FiveCrop(10)                                v2.TenCrop(10)
v2.Grayscale()                                 v2.RGB() @ pil
v2.Normalize([0.5] * 3, [0.2] * 3)             v2.ConvertImageDtype(torch.float64)
v2.LinearTransformation(torch.eye(3072), torch.zeros(3072))
v2.UniformTemporalSubsample(2) @ video         v2.ConvertBoundingBoxFormat("CXCYWH") @ boxes
v2.ClampBoundingBoxes() @ boxes                v2.SanitizeBoundingBoxes() @ boxes
v2.SanitizeBoundingBoxes(labels_getter=None) @ boxes
presets.ImageClassification(crop_size=8, resize_size=9)
T.Compose([T.Resize(8), T.CenterCrop(4)])      v2.Compose([v2.Resize(8), T.CenterCrop(4)])
v2.Lambda(sure(neg))           T.Lambda(sure(neg))
T.RandomOrder([T.Resize(8)])                   T.RandAugment(num_ops=0) @ bytes
F.hflip                                        F.to_tensor @ pil
F.rgb_to_grayscale                             F.equalize @ bytes
F2.vertical_flip                               F2.to_image @ pil
F2.invert                                      partial(F.resize, size=[9, 9])
partial(F.rotate, angle=30.0)                  partial(F2.resize, size=[9, 9], antialias=True)
"""

# They draw, and what they draw changes nothing.
IDLE_TORCHVISION = """
T.RandomHorizontalFlip(p=0)                    T.RandomHorizontalFlip(p=1)
T.RandomVerticalFlip(0.0)                      T.RandomGrayscale(p=1)
T.RandomInvert(p=0)                            T.RandomSolarize(0.5, p=1)
T.RandomErasing(p=0)                           T.RandomPerspective(p=0)
T.RandomPerspective(distortion_scale=0, p=1)   T.RandomRotation((30, 30))
T.RandomAffine(0)                              T.RandomAffine((9, 9), scale=(2, 2), shear=(5, 5))
T.ColorJitter()                                T.ColorJitter(brightness=(1.5, 1.5))
T.GaussianBlur(3, sigma=1.0)                   T.GaussianBlur(5, sigma=(2.0, 2.0))
T.ElasticTransform(alpha=0.0)
T.RandomApply([T.Resize(8)], p=1)              T.RandomChoice([T.Resize(8)])
v2.RandomHorizontalFlip(p=0)                   v2.RandomHorizontalFlip(p=1)
v2.RandomVerticalFlip(p=0)                     v2.RandomGrayscale(p=1.0)
v2.RandomEqualize(p=1) @ bytes                 v2.RandomPosterize(2, p=0) @ bytes
v2.RandomZoomOut(side_range=(1, 1), p=1)       v2.RandomPerspective(0, p=1)
v2.RandomZoomOut(p=0)                          v2.RandomPhotometricDistort(p=0)
v2.RandomErasing(p=0)                          v2.RandomPerspective(p=0)
v2.RandomRotation((30, 30))                    v2.RandomAffine(0)
v2.ColorJitter(hue=(0.1, 0.1))                 v2.GaussianBlur(3, sigma=1.0)
v2.GaussianNoise(sigma=0.0)                    v2.ElasticTransform(alpha=0)
v2.JPEG(quality=50) @ bytes                    v2.ScaleJitter((16, 16), scale_range=(0.5, 0.5))
v2.RandomShortestSize(16)                      v2.RandomResize(16, 17)
v2.RandomApply([v2.Resize(8)], p=0)            v2.RandomApply([v2.Resize(8)], p=1.0)
v2.RandomChoice([v2.Resize(8)])
"""

RANDOM_TORCHVISION = """
T.RandomHorizontalFlip()                       T.RandomVerticalFlip(0.2)
T.RandomGrayscale()                            T.RandomInvert(0.3)
T.RandomPosterize(2) @ bytes                   T.RandomSolarize(0.5)
T.RandomAdjustSharpness(2)                     T.RandomAutocontrast(0.9) @ bytes
T.RandomEqualize() @ bytes                     T.RandomErasing(p=1)
T.RandomPerspective(p=1)                       T.RandomCrop(20)
T.RandomPerspective(distortion_scale=0) @ pil  v2.RandomPerspective(0) @ pil
T.RandomCrop(32, padding=4)                    T.RandomResizedCrop(16)
T.RandomResizedCrop(16, scale=(0.5, 0.5), ratio=(1, 1))
T.RandomRotation(10)                           T.RandomAffine(0, translate=(0.2, 0.2))
T.RandomAffine(0, shear=(0, 0, -5, 5))         T.ColorJitter(0.3)
T.ColorJitter(hue=0.2)                         T.ColorJitter((1.5, 1.5), (0.5, 0.5))
T.GaussianBlur(3)                              T.ElasticTransform(50.0, sigma=1.0)
T.AutoAugment() @ bytes                        T.RandAugment() @ bytes
T.TrivialAugmentWide() @ bytes                 T.AugMix() @ bytes
T.RandomApply([T.Resize(8)], p=0.5)            T.RandomApply([T.RandomCrop(9)], p=1)
T.RandomChoice([T.Resize(8), T.Resize(9)])     T.RandomOrder([T.Resize(8), T.CenterCrop(4)])
v2.RandomHorizontalFlip()                      v2.RandomGrayscale(0.5)
v2.RandomChannelPermutation()                  v2.RandomPhotometricDistort(p=1)
v2.RandomAdjustSharpness(2)                    v2.RandomErasing(p=0.5)
v2.RandomPerspective(0.5, p=1)                 v2.RandomCrop(20)
v2.RandomResizedCrop(16)                       v2.RandomRotation((0, 90))
v2.RandomAffine(30)                            v2.RandomZoomOut(p=1.0)
v2.RandomIoUCrop() @ boxes                     v2.ColorJitter(0.1, 0.1)
v2.GaussianBlur(3, sigma=(0.1, 3.0))           v2.GaussianNoise()
v2.ElasticTransform(50.0, sigma=1.0)           v2.JPEG(quality=(10, 90)) @ bytes
v2.ScaleJitter((16, 16))                       v2.RandomShortestSize([8, 16])
v2.RandomResize(8, 24)                         v2.AutoAugment() @ bytes
v2.RandAugment() @ bytes                       v2.TrivialAugmentWide() @ bytes
v2.AugMix() @ bytes                            v2.CutMix(num_classes=4) @ labelled
v2.MixUp(num_classes=4) @ labelled             v2.RandomApply([v2.Resize(8)])
v2.RandomChoice([v2.Resize(8), v2.Resize(9)])  v2.RandomOrder([v2.Resize(8), v2.CenterCrop(4)])
F2.gaussian_noise                              partial(F2.gaussian_noise, sigma=0.5)
T.Lambda(unsure(noise))       T.Compose([T.Resize(8), T.RandomCrop(4)])
"""

UNSEEN_TORCHVISION = """
T.RandomCrop(32)                               # of exactly the picture's size: draws for a larger one
v2.RandomCrop(32)                              # the same
T.RandomErasing(p=0.001)                       # a draw that comes up once in a thousand
T.RandomApply([T.Resize(8)], p=0)              # v1 applies it when its draw is exactly 0, once in 2**24
T.RandomChoice([T.Resize(8), T.Resize(8)])     # draws between two that are the same
T.RandomOrder([T.Resize(8), T.Resize(8)])      # the same
v2.ColorJitter(0.5) @ black                    # a factor times black is black
"""


def neg(picture: torch.Tensor) -> torch.Tensor:
    return -picture


def noise(picture: torch.Tensor) -> torch.Tensor:
    return picture + torch.rand(())


def torchvision() -> tuple[dict[str, Any], dict[str, Any]]:
    import torchvision.transforms as T
    from torchvision import tv_tensors
    from torchvision.transforms import functional as F
    from torchvision.transforms import v2
    from torchvision.transforms.v2 import functional as F2

    picture = torch.from_numpy(_image(3, 32, 32, dtype=np.float32))
    boxes = tv_tensors.BoundingBoxes([[2, 3, 20, 25], [9, 1, 30, 30]], format="XYXY", canvas_size=(32, 32))  # type: ignore[call-arg]
    samples = {
        "picture": picture,
        "bytes": torch.from_numpy(_image(3, 32, 32) // 2 + 40),
        "black": torch.zeros(3, 8, 8),
        "pil": PIL.Image.fromarray(_image(32, 32, 3)),
        "video": tv_tensors.Video(torch.from_numpy(_image(6, 3, 8, 8))),
        "boxes": {"image": tv_tensors.Image(picture), "boxes": boxes, "labels": torch.tensor([0, 1])},
        "labelled": (torch.stack([picture, 1 - picture]), torch.tensor([1, 2])),
    }
    given = {
        "presets": importlib.import_module("torchvision.transforms._presets"),
        "T": T,
        "v2": v2,
        "F": F,
        "F2": F2,
        "neg": neg,
        "noise": noise,
    }
    return given, samples


# ---- MONAI -----------------------------------------------------------------------------------------------

CALM_MONAI = """
M.EnsureChannelFirst(channel_dim=0)            M.EnsureChannelFirstd("image", channel_dim=0) @ dict
M.ScaleIntensity()                             M.ScaleIntensityd("image", 0, 5) @ dict
M.ScaleIntensityRange(0, 1, 0, 9)
M.ScaleIntensityRangePercentilesd("image", 5, 95, 0, 1) @ dict
M.NormalizeIntensity(nonzero=True)             M.NormalizeIntensityd("image") @ dict
M.Spacing((0.5, 2.0))                          M.Spacingd("image", (0.5, 2.0), mode="nearest") @ dict
M.Orientation("RA")                            M.Orientationd("image", "RA") @ dict
M.Resize((8, 9))                               M.Resized("image", (8, 9), mode="nearest") @ dict
M.SpatialPad((20, 20))                         M.SpatialPadd("image", (20, 20)) @ dict
M.CenterSpatialCrop((8, 8))                    M.CenterSpatialCropd("image", (8, 8)) @ dict
M.SpatialCrop((4, 4), (3, 3))                  M.CropForeground()
M.CropForegroundd("image", source_key="image") @ dict
M.CropForeground(select_fn=sure(positive))
M.Flip(0)                                      M.Rotate90(k=2)
M.Rotate(0.3)                                  M.Zoom(1.2)
M.Affine(rotate_params=0.2)                    M.GaussianSmooth(2.0)
M.MedianSmooth(1)                              M.GaussianSharpen()
M.AdjustContrast(1.5)                          M.ShiftIntensity(0.2)
M.StdShiftIntensity(0.2)                       M.ThresholdIntensity(0.4)
M.HistogramNormalize()                         M.GibbsNoise(0.4)
M.KSpaceSpikeNoise((0, 3, 3), 5.0)             M.SavitzkyGolaySmooth(5, 2)
M.EnsureType()                                 M.EnsureTyped("image") @ dict
M.CastToType(np.float64)                       M.ToTensor()
M.ToNumpy()                                    M.AsDiscrete(threshold=0.5)
M.Activations(sigmoid=True)                    M.FillHoles()
M.RepeatChannel(2)                             M.SqueezeDim(0)
M.Transpose((0, 2, 1))                         M.AddCoordinateChannels((0,))
M.BorderPad(2)                                 M.DivisiblePad(7)
M.ResizeWithPadOrCrop((20, 8))                 M.KeepLargestConnectedComponent()
M.LabelToContour()                             M.FgBgToIndices()
M.Identity()                                   M.Identityd("image") @ dict
M.CopyItemsd("image", 1, "copy") @ dict        M.SelectItemsd("image") @ dict
M.DeleteItemsd("label") @ dict                 M.ConcatItemsd(["image", "label"], "both") @ dict
M.SplitDimd("image", dim=1, list_output=True) @ dict
M.ForegroundMask(0.5)                          M.ImageFilter("laplace", 3)
M.TorchVision("Grayscale") @ rgb               M.TorchVisiond("image", "CenterCrop", size=8) @ dict
M.Lambda(sure(neg))            M.Lambdad("image", sure(neg)) @ dict
M.Compose([M.Flip(0), M.Zoom(1.2)])            M.GridPatch((4, 4))
"""

IDLE_MONAI = """
M.RandFlip(prob=0)                             M.RandFlipd("image", prob=0) @ dict
M.RandFlip(prob=1, spatial_axis=0)             M.RandFlipd("image", prob=1.0, spatial_axis=1) @ dict
M.RandRotate90(prob=0)                         M.RandGaussianNoise(prob=0)
M.RandAffine(prob=0, rotate_range=0.5)         M.RandAffined("image", prob=0, rotate_range=1) @ dict
M.RandZoom(prob=0)                             M.RandScaleIntensity(0.5, prob=0)
M.RandGaussianSmoothd("image", prob=0) @ dict  M.RandAdjustContrast(prob=0)
M.RandCoarseDropout(1, 3, prob=0)              M.RandRicianNoise(prob=0, std=0.5)
M.RandHistogramShift(prob=0)                   M.RandBiasField(prob=0)
M.RandLambda(sure(neg))                        M.RandZoomd("image", prob=0) @ dict
M.RandAxisFlip(prob=0)                         M.RandImageFilter("laplace", 3, prob=0)
"""

RANDOM_MONAI = """
M.RandFlip(prob=0.5)                           M.RandFlipd("image", prob=0.5) @ dict
M.RandAxisFlip(prob=1)                         M.RandRotate90(prob=1)
M.RandRotate(0.5, prob=1)                      M.RandZoom(prob=0.7)
M.RandAffine(prob=1, rotate_range=0.5)         M.RandAffined("image", prob=1, shear_range=0.5) @ dict
M.Rand2DElastic((5, 5), (1, 2), prob=1)        M.RandGaussianNoise(prob=1)
M.RandGaussianNoised("image", prob=0.5) @ dict
M.RandRicianNoise(prob=1, std=0.5)
M.RandShiftIntensity(0.5, prob=1)              M.RandScaleIntensity(0.5, prob=0.5)
M.RandBiasField(prob=1)                        M.RandAdjustContrast(prob=1)
M.RandGaussianSmooth(prob=1)                   M.RandGaussianSharpend("image", prob=1) @ dict
M.RandHistogramShift(prob=1)                   M.RandGibbsNoise(prob=1)
M.RandCoarseDropout(1, 3, prob=1)              M.RandCoarseShuffle(2, 3, prob=1)
M.RandSpatialCrop((6, 6), random_size=False)   M.RandSpatialCropd("image", (6, 6)) @ dict
M.RandSpatialCropSamples((6, 6), 2, random_size=False)
M.RandCropByPosNegLabeld("image", "label", (6, 6), num_samples=2) @ dict
M.RandScaleCrop((0.5, 0.5), random_size=False)
M.RandGridDistortion(prob=1)                   M.RandKSpaceSpikeNoise(prob=1)
M.RandLambda(sure(neg), prob=0.5)
M.OneOf([M.Flip(0), M.Zoom(1.5)])              M.SomeOf([M.Flip(0), M.Zoom(1.5)], num_transforms=1)
M.RandomOrder([M.Zoom(1.5), M.Rotate(0.3)])    M.Compose([M.Flip(0), M.RandZoom(prob=1)])
M.Lambda(unsure(noise))
M.RandImageFilter("laplace", 3, prob=0.5)
M.TorchVisiond("image", "RandomCrop", size=6) @ dict
M.RandTorchVisiond("image", "ColorJitter", brightness=0.9) @ dict
"""

UNSEEN_MONAI = """
M.RandSpatialCrop((16, 16), random_size=False) # of exactly the picture's size: draws for a larger one
M.RandFlip(prob=0.001, spatial_axis=0)         # a draw that comes up once in a thousand
M.RandIdentity()                               # does nothing, and is there to say that it is random
M.RandGridPatch((16, 16))                      # one patch is all there is
"""


def positive(picture: Any) -> Any:
    return picture > 0.5


def monai() -> tuple[dict[str, Any], dict[str, Any]]:
    M = need("monai.transforms")
    data = need("monai.data")
    need("torchvision")

    def image(*shape: int) -> Any:
        return data.MetaTensor(torch.from_numpy(_image(*shape, dtype=np.float32)), affine=torch.eye(4))

    label = (_image(1, 16, 16) > 200).astype(np.float32)
    samples = {
        "picture": image(1, 16, 16),
        "rgb": image(3, 16, 16),
        "dict": {"image": image(1, 16, 16), "label": data.MetaTensor(torch.from_numpy(label))},
    }
    return {"M": M, "neg": neg, "noise": noise, "positive": positive}, samples


# ---- albumentations --------------------------------------------------------------------------------------

CALM_ALBUMENTATIONS = """
A.Resize(16, 20)                               A.Resize(9, 9, interpolation=0)
A.LongestMaxSize(20)                           A.SmallestMaxSize(20)
A.CenterCrop(20, 20)                           A.Crop(2, 3, 20, 21)
A.PadIfNeeded(40, 40)                          A.PadIfNeeded(40, 40, position="top_left")
A.Pad(4)                                       A.Normalize()
A.Normalize(normalization="min_max")           A.ToFloat()
A.FromFloat(dtype="uint8") @ float             A.Morphological((2, 5), p=1)
A.NoOp(p=1)                                    A.HorizontalFlip(p=1)
A.VerticalFlip(p=1)                            A.Transpose(p=1)
A.ToGray(p=1)                                  A.ToSepia(p=1)
A.Blur((5, 5), p=1)                            A.MedianBlur((5, 5), p=1)
A.CropAndPad(px=4, p=1)                        A.CropAndPad(percent=0.1, p=1)
A.InvertImg(p=1)                               A.Equalize(p=1)
A.AutoContrast(p=1)                            ToTensorV2()
A.HorizontalFlip(p=0)                          A.RandomCrop(9, 9, p=0)
A.GaussNoise(p=0)                              A.RandomBrightnessContrast(p=0)
A.Equalize(mask=sure(everywhere), p=1)
A.Lambda(image=sure(darker))
"""

IDLE_ALBUMENTATIONS = """
A.NoOp()                                       A.Downscale(p=1)
A.Rotate((30, 30), p=1)                        A.RandomGamma((80, 80), p=1)
A.RandomBrightnessContrast((0.2, 0.2), (0.1, 0.1), p=1)
A.ImageCompression(quality_range=(50, 50), p=1)
A.HueSaturationValue((9, 9), (9, 9), (9, 9), p=1)
A.Solarize(threshold_range=(0.5, 0.5), p=1)    A.RandomScale((0.5, 0.5), p=1)
A.Posterize(num_bits=4, p=1)                   A.GaussianBlur((3, 3), (1, 1), p=1)
A.Sharpen((0.3, 0.3), (0.6, 0.6), p=1)         A.Emboss((0.3, 0.3), (0.6, 0.6), p=1)
A.SafeRotate((30, 30), p=1)                    A.Defocus((3, 3), (0.3, 0.3), p=1)
A.CLAHE(clip_limit=(2, 2), p=1)                A.OneOf([A.HorizontalFlip(p=1)], p=0)
A.Compose([A.Resize(9, 9)])                    A.Compose([A.RandomCrop(9, 9)], p=0)
A.Sequential([A.Resize(9, 9)], p=1)
A.Compose([A.Resize(9, 9)], bbox_params=A.BboxParams("coco")) @ boxes
"""

RANDOM_ALBUMENTATIONS = """
A.HorizontalFlip()                             A.VerticalFlip(p=0.2)
A.Transpose()                                  A.ToGray()
A.RandomRotate90(p=1)                          A.D4(p=1)
A.RandomCrop(9, 9)                             A.RandomResizedCrop((9, 9))
A.Rotate(p=1)                                  A.Affine(scale=(0.5, 1.5), p=1)
A.ShiftScaleRotate(p=1)                        A.Perspective(p=1)
A.ElasticTransform(p=1)                        A.GridDistortion(p=1)
A.OpticalDistortion(p=1)                       A.RandomBrightnessContrast(p=1)
A.RandomGamma(p=1)                             A.HueSaturationValue(p=1)
A.ColorJitter(p=1)                             A.RGBShift(p=1)
A.ChannelShuffle(p=1)                          A.ChannelDropout(p=1)
A.CLAHE(tile_grid_size=(2, 2), p=1)                                   A.Posterize(num_bits=(2, 6), p=1)
A.Solarize(threshold_range=(0.2, 0.8), p=1)    A.GaussNoise(p=1)
A.ISONoise(p=1)                                A.MultiplicativeNoise(p=1)
A.SaltAndPepper(p=1)                           A.Blur((3, 9), p=1)
A.GaussianBlur(p=1)                            A.MotionBlur((3, 9), p=1)
A.MedianBlur((3, 9), p=1)                      A.Sharpen(p=1)
A.ImageCompression(quality_range=(10, 90), p=1)
A.CropAndPad(px=(1, 9), p=1)                   A.CropAndPad(px=4, fill=(0, 200), p=1)
A.CoarseDropout(p=1)
A.GridDropout(p=1, random_offset=True)         A.PixelDropout(p=1)
A.RandomScale(p=1)                             A.LongestMaxSize([8, 16])
A.PadIfNeeded(40, 40, position="random")       A.Downscale(scale_range=(0.2, 0.6), p=1)
A.RandomGridShuffle(p=1)                       A.PlanckianJitter(p=1)
A.Resize(9, 9, p=0.5)                          A.RandomSizedCrop((8, 20), (9, 9))
A.OneOf([A.HorizontalFlip(p=1), A.VerticalFlip(p=1)], p=1)
A.SomeOf([A.HorizontalFlip(p=1), A.VerticalFlip(p=1)], n=1, p=1)
A.RandomOrder([A.Rotate((9, 9), p=1), A.Resize(9, 7)], n=2, p=1)
A.OneOrOther(A.HorizontalFlip(p=1), A.VerticalFlip(p=1))
A.Sequential([A.HorizontalFlip(p=1)])          A.Compose([A.HorizontalFlip(p=1)], p=0.5)
A.Compose([A.HorizontalFlip()], bbox_params=A.BboxParams("coco")) @ boxes
"""

UNSEEN_ALBUMENTATIONS = """
A.RandomCrop(32, 32)                           # of exactly the picture's size: draws for a larger one
A.HorizontalFlip(p=0.001)                      # a draw that comes up once in a thousand
"""


def everywhere(image: Any, **_: Any) -> Any:
    return np.ones(image.shape[:2], np.uint8)


def darker(image: Any, **_: Any) -> Any:
    return image // 2


def albumentations() -> tuple[dict[str, Any], dict[str, Any]]:
    A = need("albumentations")
    tensors = need("albumentations.pytorch")
    samples = {
        "picture": {"image": _image(32, 32, 3)},
        "float": {"image": _image(32, 32, 3, dtype=np.float32)},
        "boxes": {"image": _image(32, 32, 3), "bboxes": np.array([[2.0, 3.0, 9.0, 9.0, 1.0]])},
    }
    given = {"A": A, "ToTensorV2": tensors.ToTensorV2, "everywhere": everywhere, "darker": darker}
    return given, samples


# ---- kornia ----------------------------------------------------------------------------------------------

CALM_KORNIA = """
K.Normalize(torch.tensor(0.5), torch.tensor(0.2))
K.Denormalize(torch.tensor(0.5), torch.tensor(0.2))
K.CenterCrop(10)                               K.CenterCrop((10, 12), resample="nearest")
K.Resize((9, 20))                              K.Resize(9, side="long")
K.LongestMaxSize(20)                           K.SmallestMaxSize(20)
K.PadTo((40, 40))                              K.RandomHorizontalFlip(p=1.0)
K.RandomVerticalFlip(p=1.0)                    K.RandomInvert(p=1.0)
K.RandomGrayscale(p=1.0)                       K.RandomEqualize(p=1.0)
K.RandomAutoContrast(p=1.0)                    K.RandomBoxBlur(p=1.0)
K.RandomMedianBlur(p=1.0)                      K.RandomHorizontalFlip(p=0.0)
K.RandomGrayscale(p=0.0)                       K.ImageSequential(K.Resize((9, 9)), K.CenterCrop(5))
K.AugmentationSequential(K.Resize((9, 9)))     color.RgbToGrayscale()
color.RgbToHsv()                               enhance.AdjustBrightness(0.2)
enhance.Invert()                               filters.GaussianBlur2d((3, 3), (1.0, 1.0))
filters.Sobel()                                filters.MedianBlur((3, 3))
geometry.transform.Resize((9, 9))              geometry.transform.Hflip()
color.rgb_to_grayscale                         partial(enhance.adjust_gamma, gamma=2.0)
"""

IDLE_KORNIA = """
K.RandomCrop((10, 10), p=0.0)                  K.ColorJitter(0.5, 0.5, p=0.0)
K.RandomGaussianNoise(p=0.0)                   K.RandomRotation(30.0, p=0.0)
K.RandomBrightness((1.2, 1.2), p=1.0)          K.RandomGamma((2.0, 2.0), (1.0, 1.0), p=1.0)
K.RandomMixUpV2(p=0.0)                         K.RandomJigsaw((2, 2), p=0.0)
K.RandomGaussianBlur((3, 3), (1.0, 1.0), p=1.0)
K.RandomHue((0.1, 0.1), p=1.0)                 K.RandomElasticTransform(p=0.0)
K.RandomContrast((0.5, 0.5), p=1.0)            K.RandomRotation((30.0, 30.0), p=1.0)
"""

RANDOM_KORNIA = """
K.RandomHorizontalFlip()                       K.RandomVerticalFlip(p=0.2)
K.RandomHorizontalFlip(p=1.0, p_batch=0.5)     K.RandomGrayscale()
K.RandomCrop((10, 10))                         K.RandomResizedCrop((10, 10))
K.RandomRotation(30.0, p=1.0)                  K.RandomAffine(30.0, p=1.0)
K.RandomPerspective(p=1.0)                     K.RandomElasticTransform(p=1.0)
K.RandomThinPlateSpline(p=1.0)                 K.RandomErasing(p=1.0)
K.ColorJitter(0.2, 0.2, 0.2, 0.2, p=1.0)       K.ColorJiggle(0.2, p=1.0)
K.RandomBrightness((0.5, 1.5), p=1.0)          K.RandomContrast((0.5, 1.5), p=1.0)
K.RandomGamma((0.5, 2.0), p=1.0)               K.RandomHue((-0.4, 0.4), p=1.0)
K.RandomSaturation((0.5, 1.5), p=1.0)          K.RandomSharpness(0.9, p=1.0)
K.RandomSolarize(0.3, 0.1, p=1.0)              K.RandomPosterize((1, 6), p=1.0)
K.RandomGaussianBlur((3, 3), (0.1, 2.0), p=1.0)
K.RandomMotionBlur(3, 35.0, 0.5, p=1.0)        K.RandomGaussianNoise(p=1.0)
K.RandomChannelShuffle(p=1.0)                  K.RandomChannelDropout(p=1.0)
K.RandomPlasmaShadow(p=1.0)                    K.RandomPlasmaBrightness(p=1.0)
K.RandomRGBShift(p=1.0)                        K.RandomPlanckianJitter(p=1.0)
K.RandomSaltAndPepperNoise(p=1.0)              K.RandomClahe((1.0, 40.0), p=1.0)
K.RandomTranslate((-0.2, 0.2), p=1.0)           K.RandomShear(20.0, p=1.0)
K.RandomMixUpV2(p=1.0)                         K.RandomJigsaw((2, 2), p=1.0)
K.ImageSequential(K.Resize((9, 9)), K.CenterCrop(5), random_apply=1)
K.AugmentationSequential(K.RandomCrop((9, 9)))
K.auto.RandAugment(n=2, m=10)                  K.auto.TrivialAugment()
"""

UNSEEN_KORNIA = """
K.RandomCrop((32, 32))                         # of exactly the picture's size: draws for a larger one
K.RandomHorizontalFlip(p=0.0001)               # a draw that comes up once in ten thousand
"""


def kornia() -> tuple[dict[str, Any], dict[str, Any]]:
    given = {name: need(f"kornia.{name}") for name in ("color", "enhance", "filters", "geometry")}
    given["K"] = need("kornia.augmentation")
    return given, {"picture": torch.from_numpy(_image(2, 3, 32, 32, dtype=np.float32))}


# ---- torch.nn --------------------------------------------------------------------------------------------

CALM_MODULES = """
nn.Dropout().eval()                            nn.Dropout(p=0.0)
nn.Dropout2d().eval()                          nn.AlphaDropout(0.0)
nn.ReLU()                                      nn.Linear(8, 3)
nn.Conv2d(3, 2, 3)                             nn.AvgPool2d(2)
nn.MaxPool2d(2)                                nn.AdaptiveAvgPool2d(2)
nn.Upsample(scale_factor=2)                    nn.Flatten()
nn.LayerNorm(8)                                nn.GroupNorm(1, 3)
nn.InstanceNorm2d(3)                           nn.BatchNorm2d(3).eval()
nn.BatchNorm2d(3, track_running_stats=False)   nn.RReLU().eval()
nn.LSTM(8, 4) @ rows
nn.GRU(8, 4, num_layers=2, dropout=0.5).eval() @ rows
nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0) @ rows
nn.TransformerEncoderLayer(8, 2, 8).eval() @ rows
nn.Sequential(nn.ReLU(), nn.Dropout().eval())  nn.Identity()
"""

IDLE_MODULES = """
nn.RReLU(0.2, 0.2)                             nn.Sequential(nn.RReLU(0.1, 0.1), nn.ReLU())
"""

RANDOM_MODULES = """
nn.Dropout()                                   nn.Dropout(0.1)
nn.Dropout1d() @ rows                          nn.Dropout2d()
nn.AlphaDropout()                              nn.FeatureAlphaDropout()
nn.RReLU()                                     nn.FractionalMaxPool2d(2, output_ratio=0.8)
nn.FractionalMaxPool2d(2, output_ratio=0.8).eval()
nn.GRU(8, 4, num_layers=2, dropout=0.5) @ rows
nn.LSTM(8, 4, num_layers=3, dropout=0.1) @ rows
nn.TransformerEncoderLayer(8, 2, 8) @ rows     nn.Sequential(nn.ReLU(), nn.Dropout())
nn.Sequential(nn.Sequential(nn.Dropout2d()))   WithDropout()
"""

UNSEEN_MODULES = """
nn.Dropout() @ zeros                           # nothing is left to drop
nn.Dropout(1e-6)                               # drops one value in a million
"""


class WithDropout(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) + 1  # type: ignore[no-any-return]


def modules() -> tuple[dict[str, Any], dict[str, Any]]:
    samples = {
        "picture": torch.from_numpy(_image(2, 3, 8, 8, dtype=np.float32)) + 0.1,
        "rows": torch.from_numpy(_image(2, 5, 8, dtype=np.float32)) - 0.5,
        "zeros": torch.zeros(4),
    }
    samples["picture"] -= 0.5
    return {"nn": torch.nn, "WithDropout": WithDropout}, samples


# ---- reading the tables -----------------------------------------------------------------------------------

LIBRARIES = {
    name: globals()[name] for name in ("torchvision", "monai", "albumentations", "kornia", "modules")
}


def lines(table: str) -> Iterator[str]:
    """The expressions of a table, parted by two spaces or more."""
    for line in table.strip().splitlines():
        for part in line.split("#")[0].split("  "):
            if part.strip():
                yield part.strip()


def cases(kind: str, library: str) -> list[str]:
    return list(lines(globals().get(f"{kind}_{library.upper()}", "")))


@functools.cache
def world(library: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return LIBRARIES[library]()  # type: ignore[no-any-return]


def made(library: str, line: str) -> tuple[Any, Callable[[], Any]]:
    """The transform of a line, and what applies it to a fresh copy of its sample."""
    given, samples = world(library)
    expression, _, name = line.partition(" @ ")
    torch.default_generator.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = eval(
            expression,
            {**given, "torch": torch, "np": np, "sure": sure, "unsure": unsure, "partial": functools.partial},
        )
    seed(step)
    sample = samples[name or "picture"]

    def apply() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return step(**copied(sample)) if library == "albumentations" else step(copied(sample))

    return step, apply


def applicable(apply: Callable[[], Any]) -> bool:
    """False if it needs what is not installed: nibabel, or torchvision's compiled part."""
    try:
        apply()
    except ImportError:
        return False
    except RuntimeError as error:
        if "image extension" not in str(error):
            raise
        return False
    return True


def seed(step: Any) -> None:
    """Give generators of its own a state of which a run is repeatable."""
    if hasattr(step, "set_random_state") and type(step).__module__.startswith("monai."):
        step.set_random_state(seed=5)
    if hasattr(step, "set_random_seed"):
        step.set_random_seed(5)


def copied(sample: Any) -> Any:
    if isinstance(sample, dict):
        return {name: copied(part) for name, part in sample.items()}
    if isinstance(sample, tuple):
        return tuple(map(copied, sample))
    return sample.clone() if isinstance(sample, torch.Tensor) else sample.copy()


def apart(a: Any, b: Any) -> bool:
    """Whether two outputs differ by more than sums do that are taken in another order.

    A convolution may be in the last bits, from call to call, depending on where in memory its input lies.
    """
    found, other = list(parts(a)), list(parts(b))
    return len(found) != len(other) or any(_apart(*pair) for pair in zip(found, other, strict=True))


def _apart(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        a, b = (each.detach().as_subclass(torch.Tensor).numpy() for each in (a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape and a.dtype == b.dtype:
        return not np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
    return difference(a, b) is not None
