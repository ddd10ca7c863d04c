"""The peak number of floating-point operations of a device in a second, from which MFU is computed."""

from __future__ import annotations

TPU_PEAKS: tuple[tuple[str, float], ...] = (
    # Of what JAX calls a device. Per chip in "Peak compute per chip" on cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e,tpu7x};
    # of v2, v3 and TPU7x a device is one of the two cores of a chip (46, 123 and 2307 TFLOP/s).
    ("TPU v2", 23e12),
    ("TPU v3", 61.5e12),
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v5p", 459e12),
    ("TPU v6 lite", 918e12),
    ("TPU v6e", 918e12),
    ("TPU7x", 1153.5e12),
)
"""Peaks for bfloat16; and for float32, which XLA multiplies as bfloat16 by default (`jax_default_matmul_precision`)."""

GPU_PEAKS: tuple[tuple[str, float, float], ...] = (
    # (kind, 16 bits, float32). Tensor cores without sparsity, from NVIDIA's and AMD's data sheets of each product, which for some
    # name the numbers with sparsity: half of them is meant. float32 is TF32, XLA's default where there is TF32.
    ("GB200", 2500e12, 1250e12),
    ("B200", 2250e12, 1125e12),
    ("H200", 989.4e12, 494.7e12),
    ("GH200", 989.4e12, 494.7e12),
    ("H100 PCIe", 756e12, 378e12),
    ("H100 NVL", 835.5e12, 417.5e12),
    ("H100", 989.4e12, 494.7e12),
    ("A100", 312e12, 156e12),
    ("L40S", 362e12, 183e12),
    ("L4", 121e12, 60e12),
    ("MI300X", 1307.4e12, 653.7e12),
    ("V100", 125e12, 15.7e12),
    ("T4", 65e12, 8.1e12),
)
FP8_PEAKS: tuple[tuple[str, float | None], ...] = (
    # TPUs: "Peak compute per chip (FP8)" in the table of cloud.google.com/tpu/docs/tpu7x, which has v5p, v6e and TPU7x; of TPU7x
    # a device is one of two cores of a chip (4614 TFLOP/s). GPUs: "FP8 Tensor Core" in the data sheets, without sparsity. A100,
    # V100 and T4 have no such products, those of MI300X are of other 8-bit floats (`fnuz`), and nothing is published of v5e ("v5
    # lite").
    ("TPU v5 lite", None),
    ("TPU v5", 459e12),
    ("TPU v5p", 459e12),
    ("TPU v6 lite", 918e12),
    ("TPU v6e", 918e12),
    ("TPU7x", 2307e12),
    ("GB200", 5000e12),
    ("B200", 4500e12),
    ("H200", 1978.9e12),
    ("GH200", 1978.9e12),
    ("H100 PCIe", 1513e12),
    ("H100 NVL", 1671e12),
    ("H100", 1978.9e12),
    ("L40S", 733e12),
    ("L4", 242.5e12),
)
"""(kind, products of float8_e4m3fn and float8_e5m2); None: not known."""
FLOAT16_ONLY = ("V100", "T4")
"""The tensor cores of these have neither bfloat16 nor TF32."""


def peak_flops_per_s(device_kind: str, dtype: str) -> float | None:
    """Returns the peak of one device, by JAX's name of its kind and the dtype of the computation; None if it is not known.

    The first kind of the tables that occurs in the name as whole words is taken: more specific names come first.
    """
    for kind, peak in TPU_PEAKS:
        if _is(device_kind, kind):
            return peak
    for kind, half, full in GPU_PEAKS:
        if _is(device_kind, kind):
            if dtype == "float32":
                return full
            return None if dtype == "bfloat16" and kind in FLOAT16_ONLY else half
    return None


def fp8_peak_flops_per_s(device_kind: str) -> float | None:
    """Returns the peak of one device for products of 8-bit floats; None if it is not known, or has none."""
    return next((peak for kind, peak in FP8_PEAKS if _is(device_kind, kind)), None)


def _is(device_kind: str, kind: str) -> bool:
    return f" {kind} " in f" {device_kind} ".replace("-", " ")
