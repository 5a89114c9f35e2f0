"""The peak speed of GPUs, for model FLOPs utilization and for simulated steps."""

# Dense bfloat16 FLOP per second of a GPU by a part of its name, from NVIDIA's data sheets; the first match counts.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 150e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def find_peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP per second of a GPU, None if it isn't in the table.

    >>> find_peak_flops("NVIDIA H100 80GB HBM3"), find_peak_flops("NVIDIA L4"), find_peak_flops("Quadro T400")
    (989000000000000.0, 121000000000000.0, None)
    """
    words = f"{device_name.replace('-', ' ')} "
    return next((flops for name, flops in PEAK_FLOPS.items() if f"{name} " in words), None)
