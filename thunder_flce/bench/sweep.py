"""Loss regions over context length and vocabulary: time and memory, as far as the device goes."""

AXES = {"context": "tokens", "vocabulary": "vocab"}
"""What can be changed, and the field of `Shape` that it is."""

POINTS = {
    "cuda": {
        "context": [1024, 2048, 4096, 8192, 16384, 32768, 65536],
        "vocabulary": [32000, 64000, 96000, 128256, 192000, 256000],
    },
    "cpu": {"context": [64, 128, 256, 512], "vocabulary": [1000, 2000, 4000, 8000]},
}

METHODS = [
    "eager",
    "torch.compile",
    "thunder",
    "flce",
    "liger",
    "liger, chunk 8",
    "cut-cross-entropy",
]


def parse_points(texts: list[str], device: str) -> list[tuple[str, int]]:
    """Reads "context=4096" as ("context", 4096), and "context" as all its `POINTS`.

    Raises:
        ValueError: where a text is neither.
    """
    points = []
    for text in texts:
        axis, separator, value = text.partition("=")
        if axis not in AXES or (separator and not value.isdecimal()):
            raise ValueError(f"a point must be one of {', '.join(AXES)}, or as in context=4096, but got {text!r}")
        points += [(axis, int(value))] if separator else [(axis, size) for size in POINTS[device][axis]]
    return points
